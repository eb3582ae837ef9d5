"""The command group. Commands are loaded when called; every failure becomes one sentence, a hint and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import click

from flashcli import __version__
from flashcli.errors import AlreadyTold, later_notes
from flashcli.process import signals
from flashcli.terminal import parameters
from flashcli.terminal.messages import explain, trace

COMMANDS = {
    "run": "Compute attention from an input file to an output file.",
    "decode": "Compute attention against a cache in pages, as language models do token by token.",
    "compare": "Compare two output files element by element.",
    "generate": "Make a seeded input file.",
    "inspect": "Show what an input file holds.",
    "judge": "Run and check all test cases; judge programs of others, and rank them.",
    "scoreboard": "Rank what judge has found.",
    "emulate": "Compile a CUDA program for the CPU, to run it slowly where there is no GPU.",
    "export-hw4": "Write flashcli as a submission to a judge.",
    "bench": "Time kernels and their peers side by side.",
    "bench-tensors": "Time attention on PyTorch's tensors, or its gradients.",
    "bench-decode": "Time the kernels of paged decode beside the floor.",
    "streams": "Time copies and kernels in several streams, and show what overlaps.",
    "profile": "Profile kernels with the GPU's counters, through Nsight Compute.",
    "kernels": "Show the ladder of kernels.",
    "warm": "Compile the kernels of usual shapes ahead of the first call.",
    "doctor": "Show what this machine can run, and what is missing.",
}
COMPLETING = "_FLASHCLI_COMPLETE"  # set by a shell that wants to know how a command line may go on
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(click.Group):
    """Lists commands without importing them; imports ``flashcli.commands.<name>`` (- is _) when one is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"flashcli.commands.{name.replace('-', '_')}").command
        command.name, command.context_settings = name, CONTEXT
        if not any(option.name == "debug" for option in command.params):  # a command may be asked for again
            command.params.append(debug_option())
        for parameter in command.params:
            if parameter.type is click.STRING:
                parameter.type = parameters.TEXT
        return command

    def shell_complete(self, context: click.Context, incomplete: str) -> list:
        from click.shell_completion import CompletionItem

        commands = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return commands + click.Command.shell_complete(self, context, incomplete)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def debug_option() -> click.Option:
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="Show a traceback on errors.")  # see main()


COMPLETION = """\b
Completion of command lines, to be put into ~/.bashrc (zsh_source for ~/.zshrc):
  eval "$(_FLASHCLI_COMPLETE=bash_source flashcli)"
"""


@click.group(cls=LazyGroup, context_settings=CONTEXT, epilog=COMPLETION)
@click.version_option(__version__, prog_name="flashcli")
def group() -> None:
    """fp32-accurate attention from file to file, on a GPU or without one."""


group.params.append(debug_option())


def main() -> int:
    """Run the command line; returns one of the exit codes that the README names."""
    signals.listen()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # a file name need not be text, nor a locale know ᵀ
    try:
        try:
            signals.heed()
            return _invoke()
        finally:
            signals.ignore_from_now_on()
    except BaseException as error:
        signals.ignore_from_now_on()  # once more: a signal may have come before that was done
        with contextlib.suppress(OSError):  # what went wrong first is what to tell
            _flush()
        told = _as_told(error)
        trace(told)
        return explain(told)


def _invoke() -> int:
    """Do what the command line says; returns 0, or 1 where the answer is no."""
    code = 0
    try:
        if instruction := os.environ.get(COMPLETING):
            from click.shell_completion import shell_complete

            return shell_complete(group, {}, "flashcli", COMPLETING, instruction)
        # Not group.main(): it has exit codes of its own for Ctrl-C and for a closed pipe.
        with group.make_context("flashcli", sys.argv[1:]) as context:
            group.invoke(context)
    except click.exceptions.Exit as done:
        code = done.exit_code
    _flush()  # here, where its failure can still be told
    return code


def _flush() -> None:
    """Write what is left of the output."""
    if sys.stdout:  # None if it was closed from the start
        sys.stdout.flush()


def _as_told(error: BaseException) -> BaseException:
    """The error to tell; or the signal behind it, which may have become another error where it was raised."""
    signal = signals.ending()
    if signal is None or isinstance(error, AlreadyTold):
        return error
    for note in later_notes(error):
        signal.add_note(note)
    return signal.with_traceback(error.__traceback__)
