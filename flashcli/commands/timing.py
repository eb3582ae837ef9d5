"""Parts of the commands that time something: options, the place that is timed, and what becomes of the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from flashcli.asked.how import PRECISIONS
from flashcli.commands import options
from flashcli.errors import MISMATCH, BackendUnavailable, UsageError
from flashcli.kernels.attention import KERNELS
from flashcli.terminal import as_json, parameters

if TYPE_CHECKING:
    from flashcli.asked.shape import Shape
    from flashcli.measure.records import Record, Tables
    from flashcli.measure.rows import Row

RUNS, RUNS_ON_CPU = 20, 5  # which takes a hundred times as long

precision_option = click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(list(PRECISIONS)),
    default=["fp32"],
    show_default=True,
    help="Time kernels in fp32, or in fp16 if they have it; repeatable.",
)
causal_option = click.option("--causal", is_flag=True, help="Have row i of Q see rows 0 to i of K only.")


@dataclass(frozen=True)
class Timing:
    """The options that these commands share, each under its name; ``json``, ``csv`` and ``markdown`` are FILEs."""

    backend: str
    kernels: tuple[str, ...]
    against: tuple[str, ...]
    runs: int | None
    seed: int
    json: str | None
    csv: str | None
    markdown: str | None
    threads: int | None = None
    ladder: bool = False
    tiles: bool = False
    plot: str | None = None

    @property
    def files(self) -> dict[str, str]:
        named = {"json": self.json, "csv": self.csv, "markdown": self.markdown}
        return {kind: path for kind, path in named.items() if path}

    def check(self, check_drawable: Callable[[str], None]) -> None:
        """Find out before the timing whether these options go together, and each result has a file of its own."""
        from flashcli.files.outputs import check_distinct

        if self.threads and self.backend != "cpu":
            raise UsageError(
                "--threads is for the cpu backend, not for GPUs.", "leave out --threads, or add --backend cpu."
            )
        if self.plot and not (self.ladder or self.tiles):
            raise UsageError("--plot draws the ladder.", "add --ladder.")
        check_distinct(*(path for path in self.files.values() if path != as_json.PRINT), self.plot)
        if self.plot:
            check_drawable(self.plot)

    def chosen(self, names: Iterable[str], otherwise: Collection[str]) -> list[str]:
        """The names of the kernels that are asked for, in order; if none is, all of a ladder, or else ``otherwise``."""
        everything = parameters.ALL in self.kernels or (self.ladder and not self.kernels)
        return [name for name in names if everything or name in (self.kernels or otherwise)]

    def is_cpu(self, on_gpus: list[str], look_for_gpus: Callable[[], object]) -> bool:
        """Whether the CPU is timed: with "auto", where no GPU is usable.

        ``on_gpus`` are the options given that only a GPU has: with them the CPU is no substitute.
        """
        if self.backend == "cpu":
            for option in on_gpus:
                text = f"{option} is for GPUs, not for the cpu backend."
                raise UsageError(text, f"leave out {option}, or change --backend.")
            return True
        try:
            look_for_gpus()
        except BackendUnavailable as error:
            if self.backend == "cuda" or on_gpus:
                left_out = " and ".join(["--backend cuda"] * (self.backend == "cuda") + on_gpus)
                raise BackendUnavailable(str(error), f"{error.hint} Or time the CPU: leave out {left_out}.") from error
            options.notice(f"no usable GPU, timing the CPU: {error}")
            return True
        return False

    def runs_on(self, on_cpu: bool) -> int:
        return self.runs or (RUNS_ON_CPU if on_cpu else RUNS)

    def finish(
        self,
        record: Record,
        rows: Iterable[Row],
        tables_of: Callable[[list[Row]], Tables],
        draw: Callable[[Record, str], None] | None = None,
    ) -> None:
        """Time what the rows are of, telling each; then show their tables, write the files, and draw the picture.

        The exit code is 1 where an answer was wrong, or nothing could be timed.
        """
        from flashcli.measure import bench, records

        for row in rows:
            record.rows.append(row)
            click.echo(f"{row.case} {row.contender}: {records.outcome(row)}", err=True)
        click.echo(records.texts(tables_of(record.rows)), err=as_json.PRINT in self.files.values())
        self._write(record, records.markdowns(tables_of(record.rows)))
        if self.plot and draw:
            draw(record, self.plot)
        if bench.failed(record.rows):
            raise SystemExit(MISMATCH)

    def _write(self, record: Record, markdown: str) -> None:
        from flashcli.files.outputs import write_whole
        from flashcli.measure import records

        csv = records.csv_text(record.rows)
        contents = {"json": as_json.json_text(record.written()), "csv": csv, "markdown": markdown}
        for kind, path in self.files.items():
            if path == as_json.PRINT:
                click.echo(contents[kind], nl=False)
            else:
                write_whole(path, contents[kind])


def options_of(
    kernels: Iterable[str], otherwise: str, against: Iterable[str], ladder: tuple[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Give a command the options of `Timing`, which it is called with as ``how``.

    ``otherwise`` says which of the kernels are timed if none is named; ``ladder``, what --ladder times and --plot
    draws. Where that is None, there are neither of them, nor --threads.
    """
    added = [
        options.backend_option,
        click.option(
            "--kernel", "kernels", metavar="NAME", multiple=True, type=click.Choice([*kernels, parameters.ALL]),
            help=f"Time this kernel, or all; repeatable. By default {otherwise}.",
        ),
        click.option(
            "--against", multiple=True, type=click.Choice(list(against)),
            help="Time this package's kernels too; repeatable.",
        ),
        click.option(
            "--runs", type=click.IntRange(1),
            help=f"Time each so many times: {RUNS} by default, on a CPU {RUNS_ON_CPU}.",
        ),
        click.option(
            "--seed", type=click.IntRange(0), default=0, show_default=True, help="The inputs are made from this number."
        ),
        *(_ladder_options(*ladder) if ladder else ()),
        _file_option("json", "Write the record to FILE as JSON; - prints it, and the table goes to stderr."),
        _file_option("csv", "Write the rows of the record to FILE as CSV; - prints them, as above."),
        _file_option("markdown", "Write the rows of the record to FILE as a Markdown table; - prints it, as above."),
    ]  # fmt: skip

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def folded(**given: Any) -> Any:
            shared = {field.name: given.pop(field.name) for field in fields(Timing) if field.name in given}
            return command(how=Timing(**shared), **given)

        return options.several(added)(folded)

    return decorate


def _ladder_options(timed: str, drawn: str) -> tuple[Callable, ...]:
    return (
        click.option(
            "--threads", type=click.IntRange(1),
            help="So many threads compute on the CPU; as many as there are cores by default.",
        ),
        click.option("--ladder", is_flag=True, help=timed),
        click.option("--plot", metavar="FILE", help=drawn),
    )  # fmt: skip


def _file_option(name: str, text: str) -> Callable:
    return click.option(
        f"--{name}", metavar="FILE", type=parameters.FILE_OR_STREAM, callback=as_json.creatable, help=text
    )


def shapes(cases: tuple[str, ...], named: tuple[Shape, ...], on_cpu: bool) -> dict[str, Shape]:
    """The shapes to time, by name: if none is named those of the report's cases, on a CPU of the first."""
    from flashcli.files.testcases import REPORT_CASES

    first, *others = REPORT_CASES
    if on_cpu and not (cases or named):
        options.notice(f"timing {first} only: {', '.join(others)} take minutes on a CPU, and --case names them.")
    return options.named_shapes(cases, named, (first,) if on_cpu else REPORT_CASES)


def on_gpus(kernels: Iterable[str], precisions: Iterable[str], against: Iterable[str]) -> list[str]:
    """The options, as they were given, that only a GPU has."""
    return [
        *(f"--kernel {name}" for name in kernels if name == parameters.ALL or not KERNELS[name].on_host),
        *(f"--precision {name}" for name in precisions if name != "fp32"),
        *(f"--against {name}" for name in against if name == "triton"),
    ]
