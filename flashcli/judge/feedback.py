"""A file for each submission, to be handed to its author: what came of it, and nothing of anybody else's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flashcli.errors import CannotCreate, explained
from flashcli.files.outputs import write_whole
from flashcli.judge import device_code
from flashcli.judge.device_code import THREADS, cells
from flashcli.judge.judging import ACCEPTED, Result
from flashcli.judge.pseudonyms import pseudonym
from flashcli.judge.scoreboard import Board, Standing, columns, kernels, shown, size
from flashcli.judge.texts import LONGEST, printable
from flashcli.judge.views import escaped
from flashcli.terminal import tables

LINES = 40  # of what a program printed, the last ones
LONGEST_NAME = 100  # of a file, without what tells two of one name apart


def prepare(folder: str | None) -> None:
    """Make the folder, if one is wanted, before anything is judged."""
    if folder is not None:
        with explained("create", folder, CannotCreate):
            Path(folder).mkdir(parents=True, exist_ok=True)


def write(folder: str | None, boards: list[Board], key: str | None) -> None:
    """Write NAME.md for each submission, if a folder is wanted for that.

    ``key`` explains pseudonyms; with one, everybody is told their own.
    """
    if folder is None:
        return
    found: dict[str, list[str]] = {}
    for board in boards:
        for standing in board.standings:
            found.setdefault(standing.submission, []).extend(_section(board, standing))
    taken: set[str] = set()
    for submission, sections in found.items():
        known = [f"On boards without names: {pseudonym(submission, key)}."] if key else []
        text = "\n\n".join([f"# {escaped(submission)}", *known, *sections])
        write_whole(Path(folder) / f"{_file_name(submission, taken)}.md", text + "\n")


def _file_name(submission: str, taken: set[str]) -> str:
    plain = re.sub(r"[^\w.+=-]", "_", submission).lstrip(".")[:LONGEST_NAME] or "_"
    name = next(
        name for count in range(len(taken) + 1) if (name := f"{plain}-{count}" if count else plain) not in taken
    )
    taken.add(name)
    return name


def _section(board: Board, standing: Standing) -> Iterator[str]:
    told = [f"{column.heading} {column.text(standing)}" for column in columns(board) if column.heading != "submission"]
    told[0] += f" of {len(board.standings)}" if standing.rank else ""
    yield f"## {escaped(board.device)}"
    yield f"{', '.join(told)}."
    yield tables.markdown(
        [["case", "(B, N, d)", "points", "time", "memory", "verdict"], *map(_line, standing.results.values())]
    )
    if found := kernels(standing):
        yield f"### Kernels\n\nOccupancy is that of blocks of {THREADS} threads without dynamic shared memory."
        yield tables.markdown([device_code.HEADINGS, *([escaped(cell) for cell in cells(one)] for one in found)])
    failures: dict[tuple[str, str, str], list[str]] = {}
    for result in standing.results.values():
        if result.verdict != ACCEPTED:
            failures.setdefault((result.verdict, result.detail, result.printed), []).append(result.case)
    for (verdict, detail, printed), cases in failures.items():
        yield f"### {escaped(', '.join(cases))}: {verdict}"
        yield from [f"{escaped(detail)}."] if detail else []
        yield from ["The end of what was printed:", _quoted(printed)] if printed else []


def _line(result: Result) -> list[str]:
    shape, worth = f"({result.B}, {result.N}, {result.d})", f"{result.points:g}"
    return [escaped(result.case), shape, worth, shown(result.seconds), size(result.memory), result.verdict]


def _quoted(printed: str) -> str:
    """Lines as they are, which four blanks before each tell Markdown."""
    lines = printed.splitlines()
    cut = ["..."] if len(lines) > LINES else []
    return "\n".join(f"    {printable(line.expandtabs())[:LONGEST]}" for line in [*cut, *lines[-LINES:]])
