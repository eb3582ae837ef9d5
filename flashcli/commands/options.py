"""Options that several commands share, and how they print."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click

from flashcli.asked.how import PRECISIONS
from flashcli.errors import FlashError, UsageError
from flashcli.files.tolerance import TOLERANCE
from flashcli.kernels.attention import KERNELS
from flashcli.terminal import parameters
from flashcli.terminal.messages import say

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar


def notice(text: str) -> None:
    say(f"Notice: {text}")


def warn(text: str) -> None:
    say(f"Warning: {text}")


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to try, each at most 90 characters long."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def several(added: Iterable[Callable]) -> Callable[[Callable], Callable]:
    """A decorator that gives a command all of these options."""
    return lambda command: functools.reduce(lambda given, option: option(given), reversed([*added]), command)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None: closed from the start


def progress(length: int, label: str, about: Callable[[int | None], str | None] | None = None) -> ProgressBar[int]:
    """A progress bar on stderr, shown on a terminal only, with a text ``about`` what was last told to it."""
    return click.progressbar(
        length=length, label=label, item_show_func=about, file=sys.stderr, hidden=not _on_terminal()
    )


BAR_AFTER = 1.0  # seconds that a run takes before it has a progress bar


@contextlib.contextmanager
def late_progress(length: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes, with rate and time left, that appears on a terminal once the work takes a while."""
    start, done = time.time(), 0
    bar: ProgressBar[int] | None = None

    def rate(done: int | None) -> str | None:
        return f"{done / (time.time() - start) / 1e6:.0f} MB/s" if done else None

    def tell(count: int) -> None:
        nonlocal bar, done
        done += count
        with contextlib.suppress(OSError):  # the terminal may be gone
            if bar is not None:
                bar.update(count, done)
            elif _on_terminal() and time.time() - start > BAR_AFTER:
                bar = progress(length, "computing", rate).__enter__()
                bar.start = bar.last_eta = start  # the time left is reckoned from the beginning, not from here
                bar.update(done, done)

    try:
        yield tell
    finally:
        with contextlib.suppress(OSError):
            if bar is not None:
                bar.render_finish()


def _complete_case(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """The cases that a name may become, for a shell."""
    from pathlib import Path

    from flashcli.files import testcases

    with contextlib.suppress(FlashError):  # which is for the command to tell
        return [case.name for case in testcases.load(Path("testcases")) if case.name.startswith(incomplete)]
    return []


case_option = click.option(
    "--case",
    "cases",
    multiple=True,
    shell_complete=_complete_case,
    help="A test case, such as t10; repeatable. By default those of the report.",
)
shape_option = click.option(
    "--shape",
    "shapes",
    type=parameters.SHAPE,
    multiple=True,
    help="Any other input, by its B,N,d; repeatable.",
)


def named_shapes(cases: tuple[str, ...], shapes: tuple, otherwise: tuple[str, ...]) -> dict:
    """The shapes that `case_option` and `shape_option` name, by name; without any, those of the cases ``otherwise``."""
    from pathlib import Path

    from flashcli.files import testcases

    named = {str(shape): shape for shape in shapes}
    names = cases or (() if shapes else otherwise)
    hint = "go to the repository, or name shapes by --shape."
    known = {case.name: case.shape for case in testcases.load(Path("testcases"), hint)} if names else {}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no case {name!r}.", "see testcases/manifest.toml, or use --shape.")
        named[name] = known[name]
    return named


backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto is the GPU if there is a usable one, else the CPU.",
)


def as_option(name: str, value: str = "") -> str:
    """How the command line spells a field of a request."""
    name = {"max_device_bytes": "max-device-memory"}.get(name, name)
    return f"--{name} {value}".rstrip()


kernel_option = click.option(
    "--kernel",
    metavar="NAME",
    type=click.Choice(list(KERNELS)),
    help=f"Compute with one of {', '.join(KERNELS)}; the best for the GPU by default. See `flashcli kernels`.",
)
precision_option = click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    help="fp16 is faster, with a relative L2 error of about 7e-4; kernels that split numbers have it.",
)


tolerance_option = click.option(
    "--tolerance",
    type=parameters.FiniteRange(0),
    default=TOLERANCE,
    show_default=True,
    help="|got - want| may be as large as this plus this times |want|.",
)
