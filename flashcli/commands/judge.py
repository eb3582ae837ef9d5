from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from flashcli import errors
from flashcli.commands import options


@click.command()
@click.argument("folder", default="testcases", metavar="[DIR]")
@click.option("--exe", metavar="PROGRAM", help="Judge this program, run as PROGRAM IN OUT, instead of flashcli.")
@click.option("--case", "names", multiple=True, metavar="NAME", help="Only this case; may be repeated.")
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), help="Seconds a case; the manifest's by default."
)
@options.backend_option
@options.kernel_option
@options.tolerance_option
@options.json_option
def command(
    folder: str,
    exe: str | None,
    names: tuple[str, ...],
    time_limit: float | None,
    backend: str,
    kernel: str | None,
    tolerance: float,
    as_json: bool,
) -> None:
    """Run all test cases of DIR (default: testcases) and check each output. Exit code 1 if any case fails.

    Prints a line a case: name, (B, N, d), wall time of the whole command, verdict.
    """
    from flashcli import judging

    program = _program(exe, backend, kernel)
    results = []
    with tempfile.TemporaryDirectory(prefix="flashcli-judge-") as scratch:
        for case in _cases(folder, names, time_limit):
            result = judging.judge(case, program, Path(scratch), tolerance)
            results.append(result)
            if not as_json:
                click.echo(_line(result, first=len(results) == 1 and exe is None))
    accepted = sum(result.verdict == judging.ACCEPTED for result in results)
    if as_json:
        cases = [{name: value for name, value in result._asdict().items() if name != "printed"} for result in results]
        options.print_json({"accepted": accepted, "cases": cases})
    else:
        seconds = sum(result.seconds for result in results)
        click.echo(f"{accepted} of {len(results)} accepted, {seconds:.2f} s in all")
    raise SystemExit(0 if accepted == len(results) else errors.MISMATCH)


def _program(exe: str | None, backend: str, kernel: str | None) -> list[str]:
    if exe is not None:
        if backend != "auto" or kernel is not None:
            raise errors.UsageError("--backend and --kernel are for flashcli itself, not for --exe.", "leave them out.")
        return [os.path.abspath(exe) if os.sep in exe else exe]
    chosen_kernel = ["--kernel", kernel] if kernel else []
    return [sys.executable, "-m", "flashcli", "run", "--backend", backend, *chosen_kernel]


def _cases(folder: str, names: tuple[str, ...], time_limit: float | None):
    """The chosen cases, each with its input file ready."""
    from dataclasses import replace

    from flashcli import testcases

    cases = testcases.load(Path(folder))
    if unknown := set(names) - {case.name for case in cases}:
        raise errors.UsageError(
            f"there is no case {', '.join(sorted(unknown))} in {folder!r}.", "see its manifest.toml."
        )
    for case in cases:
        if names and case.name not in names:
            continue
        if not case.is_ready():
            with options.progress(case.shape.B, f"generating {case.name}") as bar:
                for count in case.prepare():
                    bar.update(count)
        yield replace(case, time_limit=time_limit) if time_limit else case


def _line(result, first: bool) -> str:
    shape = f"({result.B}, {result.N}, {result.d})"
    detail = f": {result.detail}" if result.detail else ""
    line = f"{result.case}  {shape:<17}{result.seconds:8.2f} s  {result.verdict}{detail}"
    if not first:
        return line
    about = [text for text in result.printed.splitlines() if text.startswith(("Notice:", "backend:"))]
    return "\n".join([*about, line])
