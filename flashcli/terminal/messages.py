"""How an error is told: one sentence on stderr, a hint, an exit code; a traceback where one is asked for."""

from __future__ import annotations

import contextlib
import sys

import click

from flashcli.errors import INTERRUPTED, SHORT_OF, AlreadyTold, FlashError, later_notes
from flashcli.process import signals

# How the dynamic loader says that it lacks memory, or open files, for a library.
LOADERS_WORDS = ("failed to map segment from shared object", "cannot allocate memory", "too many open files")
UNHEARD = (OSError, ValueError)  # what writing to a stderr raises that nobody reads, or that is closed


def trace(error: BaseException) -> None:
    """Print an error's traceback, if that is wanted."""
    if "--debug" in sys.argv and not isinstance(error, SystemExit | click.exceptions.Exit | AlreadyTold):
        import traceback

        with contextlib.suppress(*UNHEARD):
            traceback.print_exception(error)


def say(text: str) -> None:
    """A line on stderr, if anybody reads it: what goes on, and the exit code, do not depend on that."""
    with contextlib.suppress(*UNHEARD):
        click.echo(text, err=True)


def explain(error: BaseException) -> int:
    """Print what went wrong, and the way out, to stderr; returns the exit code."""
    if isinstance(error, AlreadyTold):
        return wording(error.args[0])[0]
    if isinstance(error, click.UsageError):
        with contextlib.suppress(*UNHEARD):
            error.show()
        return 2
    code, message, hint = wording(error)
    for label, text in (("Error", message), ("Hint", hint)):
        if text:
            say(f"{label}: {text}")
    for note in later_notes(error):
        say(note)
    return code


def wording(error: BaseException) -> tuple[int, str, str]:
    """The exit code for an error, one sentence on what went wrong, and the way out; no sentence if it needs none."""
    match error:
        case SystemExit() | click.exceptions.Exit():
            return getattr(error, "exit_code", None) or getattr(error, "code", None) or 0, "", ""
        case FlashError():
            return error.exit_code, str(error), error.hint
        case click.ClickException():
            return 70, error.format_message(), ""
        case click.Abort() | KeyboardInterrupt():
            return INTERRUPTED, f"interrupted{_what_is_left()}", ""
        case signals.Terminated():
            return 128 + error.args[0], f"terminated{_what_is_left()}", ""
        case BrokenPipeError():
            return 74, "", ""  # whoever read our output is gone: nobody to tell
        case OSError() | ImportError() if reason := _what_ran_out(error):
            return 71, f"out of memory: {reason}.", "raise the limits (ulimit -a), or use a larger machine."
        case OSError() if error.filename is None and error.errno is not None:
            reason = (error.strerror or str(error)).lower()
            return 74, f"cannot write the results: {reason}.", "check where stdout goes."
        case MemoryError():
            reason = str(error) or "the system gives no more"
            return 71, f"out of memory: {reason}.", "use a larger machine, or a smaller file."
        case RuntimeError() if "can't start new thread" in str(error):
            return 71, "the system starts no more threads.", "use fewer --threads, or raise the limits (ulimit -a)."
        case _:
            return 70, f"internal error: {type(error).__name__}: {error}.", "run again with --debug, and report it."


def _what_is_left() -> str:
    """The end of the message about a command that a signal ended: whether its output is complete."""
    return f", but {signals.complete[-1]!r} is complete." if signals.complete else "; nothing is left half-written."


def _what_ran_out(error: BaseException | None) -> str:
    """The system's words, where there was no memory, or no open file more, for the error or for what caused it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SHORT_OF:
            return (error.strerror or str(error)).lower()
        for words in LOADERS_WORDS:
            if words in str(error).lower():
                return words
        error = error.__cause__ or error.__context__
    return ""
