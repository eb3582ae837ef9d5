"""Records of measurements, and views of them: tables for a terminal and in Markdown, and CSV."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flashcli.kernels.decode import VERSIONS, takes_v1
from flashcli.measure import reported
from flashcli.measure.rows import (
    Decoded,
    Failure,
    Profiled,
    Row,
    Rung,
    Skipped,
    Streamed,
    Tiled,
    Timed,
)
from flashcli.terminal import tables

Kind = TypeVar("Kind", bound=Row)
Tables = Iterable[tuple[str, tables.Lines]]  # each with its title, which is empty where one is enough


@dataclass
class Record:
    """Measured rows, and the circumstances under which they were measured."""

    circumstances: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] | None = None  # what `peers.ceilings` measured; None in records that have no such thing

    def written(self) -> dict[str, object]:
        """The record as it stands in its file."""
        ceilings = {} if self.ceilings is None else {"ceilings": self.ceilings}
        return {"circumstances": self.circumstances, **ceilings, "rows": [row.written() for row in self.rows]}


def of_kind(kind: type[Kind], rows: Iterable[Row]) -> list[Kind]:
    return [row for row in rows if isinstance(row, kind)]


def by_case(rows: Iterable[Kind]) -> dict[str, list[Kind]]:
    """The rows of each case, under its name."""
    cases: dict[str, list[Kind]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def outcome(row: Row) -> str:
    """The outcome of a contender, in a word."""
    match row:
        case Failure():
            return row.error
        case Skipped():
            return f"skipped: {row.skipped}"
        case Timed() | Streamed():
            return f"{row.seconds * 1e3:.3f} ms"
        case Decoded():
            return f"{row.seconds * 1e6:.1f} us"
    return ""


def csv_text(rows: Sequence[Row]) -> str:
    written = [row.written() for row in rows]
    names = list(dict.fromkeys(name for row in written for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(written)
    return buffer.getvalue()


# ---- flashcli bench

CONTENDERS = ("case", "(B, N, d)", "contender", "median", "min to max", "TFLOP/s", "of floor", "relative L2", "max abs")


def contender_tables(rows: Sequence[Row]) -> Tables:
    """A line for each case and contender."""
    yield "", filled([CONTENDERS, *map(_contender, rows)])


def _contender(row: Row) -> list[str]:
    """Milliseconds, and the floor (by bytes or operations, the larger) over the median; or why there are none."""
    start = [*case_cells(row), row.contender]
    if not isinstance(row, Timed):
        return [*start, outcome(row), *[""] * (len(CONTENDERS) - 4)]
    share = ""
    if row.floor_operations is not None:
        share = f"{100 * max(row.floor_bytes or 0, row.floor_operations) / row.seconds:.0f} %"
    low, median, high = (seconds * 1e3 for seconds in (row.min, row.seconds, row.max))
    return [
        *start, f"{median:.3f} ms", f"{low:.3f} to {high:.3f}", f"{row.tflops:.3g}", share,
        f"{row.relative_l2:.1e}", "" if row.max_abs is None else f"{row.max_abs:.1e}",
    ]  # fmt: skip


def case_cells(row: Row) -> list[str]:
    return [row.case if row.is_named else "", str(row.shape)]


# ---- flashcli bench --ladder

RUNGS = (
    "rung", "kernel", "min to max", "TFLOP/s", "over the one before", "in the report", "over the first",
    "total", "input", "computing", "output",
)  # fmt: skip


def ladder_tables(rows: Sequence[Row]) -> Tables:
    """For each case: the kernel of each rung, how it compares with others on the case, the seconds of the command.

    Beside a rung's gain over the one before that was timed is the report's.
    """
    for some in by_case(rows).values():
        yield some[0].title, filled([RUNGS, *_rungs(some)])


def _rungs(rows: list[Row]) -> Iterator[list[str]]:
    """The lines of a ladder's table; neighbours that were skipped for one reason share a line."""
    timed = of_kind(Timed, rows)
    before = dict(zip((row.contender for row in timed[1:]), timed, strict=False))
    for remark, some in itertools.groupby(rows, key=lambda row: "" if isinstance(row, Timed) else outcome(row)):
        if remark:
            yield [", ".join(row.contender for row in some), remark, *[""] * (len(RUNGS) - 2)]
        else:
            yield from (_rung(row, before.get(row.contender), timed[0]) for row in of_kind(Timed, some))


def _rung(row: Timed, before: Timed | None, first: Timed) -> list[str]:
    gains = [""] * 3
    if before:
        reports = reported.gain(row.case, before.contender, row.contender)
        gains = [times(before.seconds / row.seconds), times(reports), times(first.seconds / row.seconds)]
    phases = [""] * 4
    if isinstance(row, Rung):
        phases = [f"{seconds:.3f} s" for seconds in (row.total, row.input, row.computation, row.output)]
    figures = [f"{ms(row.seconds)} ms", f"{ms(row.min)} to {ms(row.max)}", f"{row.tflops:.3g}"]
    return [row.contender, *figures, *gains, *phases]


# ---- flashcli bench --tiles


def tiles_tables(rows: Sequence[Row]) -> Tables:
    """For each case and kernel a line for each Br and a column for each Bc: the time, the registers of a thread, the
    occupancy; and which of them are the fastest, and the kernel's own."""
    for (title, kernel), some in by_search(rows).items():
        columns = sorted({row.Bc for row in some})
        cells = {(row.Br, row.Bc): _tiles_cell(row, row is fastest(some)) for row in some}
        lines = [[str(Br), *(cells.get((Br, Bc), "") for Bc in columns)] for Br in sorted({row.Br for row in some})]
        yield f"{kernel} on {title}", [["Br", *(f"Bc = {Bc}" for Bc in columns)], *lines]


def by_search(rows: Iterable[Row]) -> dict[tuple[str, str], list[Tiled]]:
    """The rows of each search for tiles, under the title of the case and the kernel's name."""
    found: dict[tuple[str, str], list[Tiled]] = {}
    for row in of_kind(Tiled, rows):
        found.setdefault((row.title, row.kernel), []).append(row)
    return found


def fastest(rows: Iterable[Tiled]) -> Tiled:
    return min(rows, key=lambda row: row.seconds)


def _tiles_cell(row: Tiled, is_fastest: bool) -> str:
    marks = ", ".join(["the fastest"] * is_fastest + ["its own"] * row.own)
    figures = f"{ms(row.seconds)} ms, {row.registers}, {row.occupancy:.0f} %"
    return figures + (f" ({marks})" if marks else "")


def times(factor: float | None) -> str:
    if factor is None:
        return ""
    return f"{factor:.0f}x" if factor >= 100 else f"{factor:.3g}x"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{3 if seconds < 0.1 else 0}f}"


# ---- flashcli profile

# The head of each column, and the text of its cell.
PROFILE: dict[str, Callable[[Any], str]] = {
    "rung": lambda row: row.contender,
    "function": lambda row: row.function,
    "time": lambda row: f"{ms(row.seconds)} ms",
    "occupancy (possible)": lambda row: f"{row.occupancy:.0f} % ({row.possible_occupancy:.0f} %)",
    "possible occupancy": lambda row: f"{row.possible_occupancy:.0f} %" if row.occupancy is None else "",
    "limited by": lambda row: row.limited_by or "",
    "SM efficiency": lambda row: f"{row.sm_efficiency:.0f} %",
    "tensor pipe": lambda row: f"{row.tensor_pipe:.0f} %",
    "shared load / store, GB/s": lambda row: f"{row.shared_load / 1e9:.0f} / {row.shared_store / 1e9:.0f}",
    "global load / store, GB/s": lambda row: f"{row.global_load / 1e9:.0f} / {row.global_store / 1e9:.0f}",
    "bank conflicts load / store": lambda row: f"{row.load_conflicts:.0f} / {row.store_conflicts:.0f}",
    "excess wavefronts": lambda row: f"{row.excess_wavefronts:.0f}",
    "registers": lambda row: f"{row.registers:.0f}",
    "spilled": lambda row: "" if row.spilled is None else f"{row.spilled} B",
    "local memory": lambda row: f"{row.local_bytes:.0f} B",
    "shared memory": lambda row: f"{row.shared / 1024:.1f} KiB",
}


def profile_tables(rows: Sequence[Row]) -> Tables:
    """For each case a line for each function of each rung."""
    for some in by_case(rows).values():
        yield some[0].title, filled([list(PROFILE), *map(_profile, some)])


def _profile(row: Row) -> list[str]:
    if isinstance(row, Profiled):
        return [_cell(row, text) for text in PROFILE.values()]
    return [row.contender, outcome(row), *[""] * (len(PROFILE) - 2)]


def _cell(row: Profiled, text: Callable[[Profiled], str]) -> str:
    try:
        return text(row)
    except TypeError:  # None, which has no format: it was not counted
        return ""


# ---- flashcli bench-decode


def decode_tables(rows: Sequence[Row]) -> Tables:
    """For each batch the microseconds of each contender, at the median; nothing for those that cannot compute it."""
    timed = of_kind(Decoded, rows)
    several = len({row.layout for row in timed}) > 1

    def name_of(row: Decoded) -> str:
        return f"{row.contender}, {row.layout}" if several else row.contender

    names = list(dict.fromkeys(map(name_of, timed)))
    lines = [["batch", "MB", *names]]
    for case, some in by_case(timed).items():
        cells = {name_of(row): f"{row.seconds * 1e6:.1f}" for row in some}
        megabytes = some[0].bytes / 1e6
        lines.append([case, f"{megabytes:.{0 if megabytes >= 10 else 2}f}", *(cells.get(name, "") for name in names)])
    yield "", lines


def rule_tables(rows: Sequence[Row]) -> Tables:
    """For each batch the microseconds of V1 and V2, which of them vLLM takes, and its time over that of the faster."""
    lines = [["batch", "blocks of V1", *VERSIONS, "vLLM takes", "times the faster"]]
    for case, some in by_case(of_kind(Decoded, rows)).items():
        found = {row.contender: row.seconds for row in some}
        if not {*VERSIONS} <= found.keys() or some[0].H is None:
            continue
        taken = VERSIONS[0 if takes_v1(some[0].N, some[0].B, some[0].H) else 1]
        times = [found[name] for name in VERSIONS]
        cells = [f"{seconds * 1e6:.1f}" for seconds in times]
        lines.append([case, str(some[0].B * some[0].H), *cells, taken, f"{found[taken] / min(times):.2f}"])
    yield "", lines


# ---- flashcli streams

STREAMS = (
    "streams", "memory", "order", "connections", "wall, ms", "queued after, ms", "overlapped", "with events, ms",
    "in / kernels / out, ms", "beside others", "behind copies in",
)  # fmt: skip


def streams_tables(rows: Sequence[Row]) -> Tables:
    """For each case a line for each way to hand chunks to a GPU."""
    for some in by_case(rows).values():
        alone = {(row.memory, row.connections): row for row in of_kind(Streamed, some) if row.streams == 0}
        yield some[0].title, [STREAMS, *(_way(row, alone) for row in some)]


def _way(row: Row, alone: Mapping[tuple[str, int], Streamed]) -> list[str]:
    """A line of the table; ``alone`` are the ways by the default stream, on which nothing overlaps."""
    if not isinstance(row, Streamed):
        return [row.contender, outcome(row), *[""] * (len(STREAMS) - 2)]
    busy = row.copies_in, row.kernels, row.copies_out
    beside = row.copies_in_beside, row.kernels_beside, row.copies_out_beside
    shares = (some / all_ if all_ else 0 for some, all_ in zip(beside, busy, strict=True))
    return [
        str(row.streams or "default"), row.memory, f"{row.order} first" if row.streams > 1 else "",
        str(row.connections), f"{row.seconds * 1e3:.1f}", f"{row.queued * 1e3:.1f}",
        _overlapped(row, alone.get((row.memory, row.connections))), f"{row.traced * 1e3:.1f}",
        " / ".join(f"{seconds * 1e3:.1f}" for seconds in busy), " / ".join(f"{share:.0%}" for share in shares),
        f"{row.hidden:.0%}",
    ]  # fmt: skip


def _overlapped(row: Streamed, alone: Streamed | None) -> str:
    """The time saved by a way, as a share of what it would save if the busiest engine alone took time."""
    if alone is None or row is alone:
        return ""
    could = alone.seconds - max(alone.copies_in, alone.kernels, alone.copies_out)
    return f"{max(0.0, alone.seconds - row.seconds) / could:.0%}" if could > 0 else ""


# ---- Tables


def texts(titled: Tables) -> str:
    """Several tables for a terminal."""
    return "\n\n".join((f"{title}\n" if title else "") + tables.text(lines) for title, lines in titled)


def markdowns(titled: Tables) -> str:
    """Several tables in Markdown."""
    return "\n".join((f"**{title}**\n\n" if title else "") + tables.markdown(lines) for title, lines in titled)


def filled(lines: tables.Lines) -> tables.Lines:
    """The table without the columns that no row has anything for."""
    head, *body = lines
    kept = [index for index in range(len(head)) if not body or any(line[index] for line in body)]
    return [[line[index] for index in kept] for line in lines]
