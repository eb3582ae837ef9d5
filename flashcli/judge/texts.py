"""Text that came from a submission, made fit to be shown."""

from __future__ import annotations

import signal

LONGEST = 200
WHY = {
    signal.SIGXFSZ: ", for it wrote a file larger than the rules allow",
    signal.SIGXCPU: ", for it used too much CPU time",
}


def printable(text: str) -> str:
    """Replace control characters, which could drive a terminal, and lone surrogates of file names by U+FFFD."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def last_line(printed: str) -> str:
    """ ": " and the last line that a program printed, or its last "Error:", if it printed one and a hint below it.

    Cut to a bearable length; nothing if it printed nothing.
    """
    lines = printed.split("\n")
    errors = [line for line in lines if line.startswith("Error:")]
    line = printable((errors or lines)[-1].strip())
    if not line:
        return ""
    return f": {line[:LONGEST]}{'...' if len(line) > LONGEST else ''}"


def first_error(printed: str) -> str:
    """Like `last_line`, of what a build printed: what the compiler said first, not that make gave up after it."""
    errors = [line for line in printed.split("\n") if "error:" in line.lower() and "***" not in line]
    return last_line(errors[0] if errors else printed)


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"killed by signal {-returncode}"
    return f"killed by {number.name}{WHY.get(number, '')}"
