"""Views of a benchmark record: a table for people, Markdown, CSV, the tables in the documents. The record is JSON.

A record is ``{"circumstances": {...}, "ceilings": {...}, "rows": [{...}]}``; its rows are those of
`flashcli.measure.bench`, `ladder`, `profiling`, `end_to_end` or `scaling`.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flashcli.kernels.attention import KERNELS

COLUMNS = ("case", "(B, N, d)", "contender", "median", "min to max", "TFLOP/s", "of floor", "relative L2", "max abs")


def shape_text(row: dict) -> str:
    return "({B}, {N}, {d})".format(**row)


def case_title(row: dict) -> str:
    """What a row's case is called: a shape without a name is its own."""
    shape = shape_text(row)
    return shape if row["case"] == shape else f"{row['case']} {shape}"


def table(lines: list) -> str:
    """A Markdown table; the first line is its head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled) + "\n"


def cells(row: dict) -> list[str]:
    """One row of the table: milliseconds, and the floor (by bytes or operations, the larger) over the median."""
    shape = shape_text(row)
    start = ["" if row["case"] == shape else row["case"], shape, row["contender"]]
    if "error" in row:
        return [*start, row["error"], *[""] * (len(COLUMNS) - 4)]
    floor = max(row.get("floor_bytes", 0), row.get("floor_operations", 0))
    share = f"{100 * floor / row['seconds']:.0f} %" if "floor_operations" in row else ""
    low, median, high = (row[name] * 1e3 for name in ("min", "seconds", "max"))
    return [
        *start, f"{median:.3f} ms", f"{low:.3f} to {high:.3f}", f"{row['tflops']:.3g}", share,
        f"{row['relative_l2']:.1e}", f"{row['max_abs']:.1e}",
    ]  # fmt: skip


def markdown(rows: list[dict]) -> str:
    lines = [COLUMNS, *(cells(row) for row in rows)]
    return table(lines)


def text(rows: list[dict]) -> str:
    return aligned([list(COLUMNS), *(cells(row) for row in rows)])


def aligned(lines: list) -> str:
    """Columns for a terminal. A line without a last cell is a remark: it may be wider than its column."""
    widths = [max(len(line[i]) for line in lines if line[-1]) for i in range(len(lines[0]))]
    padded = (" ".join(f"{part:<{width + 1}}" for part, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def csv_text(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def headline(rows: list[dict]) -> str:
    """For each case the fastest of ours in fp32, and its fp32 peers in the same run: how many times slower they are."""
    peers = ("PyTorch efficient", "PyTorch math", "Triton tf32x3")
    lines = [("case", "(B, N, d)", "flashcli", "TFLOP/s", "relative L2", *peers)]
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = {row["contender"]: row for row in rows if row["case"] == case and "seconds" in row}
        ours = min((timed[name] for name in KERNELS if name in timed), key=lambda row: row["seconds"])
        theirs = (
            f"{timed[peer]['seconds'] * 1e3:.3f} ms, {timed[peer]['seconds'] / ours['seconds']:.1f}x"
            if peer in timed
            else ""
            for peer in peers
        )
        shape = shape_text(ours)
        own = (
            f"{ours['contender']} {ours['seconds'] * 1e3:.3f} ms",
            f"{ours['tflops']:.0f}",
            f"{ours['relative_l2']:.1e}",
        )
        lines.append(("" if case == shape else case, shape, *own, *theirs))
    return table(lines)


RUNGS = (
    "rung", "kernel", "min to max", "TFLOP/s", "over the one before", "over the first",
    "total", "input", "computing", "output",
)  # fmt: skip


def _tables(titled: Iterable[tuple[str, list]]) -> str:
    """Several tables, in Markdown."""
    return "\n".join(f"**{title}**\n\n{table(lines)}" for title, lines in titled)


def _texts(titled: Iterable[tuple[str, list]]) -> str:
    """The same for people."""
    return "\n\n".join(f"{title}\n{aligned(lines)}" for title, lines in titled)


def ladder(rows: list[dict]) -> str:
    """A table for each case: the kernel, how it compares with others on the case, and the seconds of the command."""
    return _tables(_ladders(rows))


def ladder_text(rows: list[dict]) -> str:
    return _texts(_ladders(rows))


def _ladders(rows: list[dict]) -> Iterator[tuple[str, list]]:
    for title, of_case in _by_case(rows):
        yield title, [RUNGS, *_rungs(of_case)]


def _by_case(rows: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """The rows of each case, and its title."""
    for _, some in itertools.groupby(rows, key=lambda row: row["case"]):
        of_case = list(some)
        yield case_title(of_case[0]), of_case


def _rungs(rows: list[dict]) -> Iterator[list[str]]:
    """Neighbours that were skipped for the same reason share a line."""
    for reason, some in itertools.groupby(rows, key=lambda row: row.get("error") or row.get("skipped")):
        if reason is None:
            yield from map(_rung, some)
        else:
            alike = list(some)
            names = ", ".join(row["contender"] for row in alike)
            remark = f"skipped: {reason}" if "skipped" in alike[0] else reason
            yield [names, remark, *[""] * (len(RUNGS) - 2)]


def _rung(row: dict) -> list[str]:
    factors = (_times(row[name]) if name in row else "" for name in ("over_previous", "over_first"))
    return [
        row["contender"], f"{_ms(row['seconds'])} ms", f"{_ms(row['min'])} to {_ms(row['max'])}",
        f"{row['tflops']:.3g}", *factors,
        *(f"{row[phase]:.3f} s" for phase in ("total", "input", "computation", "output")),
    ]  # fmt: skip


def _times(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= 100 else f"{factor:.3g}x"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{3 if seconds < 0.1 else 0}f}"


# The head of each column of a profile, and the text of its cell; a column that no row has anything for is left out.
PROFILE = {
    "rung": lambda row: row["contender"],
    "function": lambda row: row.get("function", ""),
    "time": lambda row: f"{_ms(row['seconds'])} ms",
    "occupancy (possible)": lambda row: f"{row['occupancy']:.0f} % ({row['possible_occupancy']:.0f} %)",
    "possible occupancy": lambda row: "" if "occupancy" in row else f"{row['possible_occupancy']:.0f} %",
    "limited by": lambda row: row["limited_by"],
    "SM efficiency": lambda row: f"{row['sm_efficiency']:.0f} %",
    "tensor pipe": lambda row: f"{row['tensor_pipe']:.0f} %",
    "shared load / store, GB/s": lambda row: _pair(row, "shared_load", "shared_store", 1e9),
    "global load / store, GB/s": lambda row: _pair(row, "global_load", "global_store", 1e9),
    "bank conflicts load / store": lambda row: _pair(row, "load_conflicts", "store_conflicts"),
    "excess wavefronts": lambda row: f"{row['excess_wavefronts']:.0f}",
    "registers": lambda row: f"{row['registers']:.0f}",
    "spilled": lambda row: f"{row['spilled']} B",
    "local memory": lambda row: f"{row['local_bytes']:.0f} B",
    "shared memory": lambda row: f"{row['shared'] / 1024:.1f} KiB",
}


def profile(rows: list[dict]) -> str:
    """A table for each case, with a line for each function of each rung."""
    return _tables(_profiles(rows))


def profile_text(rows: list[dict]) -> str:
    return _texts(_profiles(rows))


def _profiles(rows: list[dict]) -> Iterator[tuple[str, list]]:
    for title, of_case in _by_case(rows):
        lines = [[_cell(row, text) for text in PROFILE.values()] for row in of_case]
        for row, line in zip(of_case, lines, strict=True):
            line[1] = row.get("error") or (f"skipped: {row['skipped']}" if "skipped" in row else line[1])
        kept = [index for index in range(len(PROFILE)) if any(line[index] for line in lines)]
        yield title, [[line[index] for index in kept] for line in [list(PROFILE), *lines]]


def _cell(row: dict, text: Callable[[dict], str]) -> str:
    try:
        return text(row)
    except KeyError:  # it was not counted
        return ""


def _pair(row: dict, load: str, store: str, unit: float = 1) -> str:
    return f"{row[load] / unit:.0f} / {row[store] / unit:.0f}"


def end_to_end(rows: list[dict]) -> str:
    """For each case the median seconds of each whole command, and how the first compares with the last."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    ratio = f"{names[0]} over {names[-1]}"
    lines = [["case", "(B, N, d)", *(f"{name}, s" for name in names), ratio, "peak memory, MiB", "of the GPU's"]]
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = {row["contender"]: row for row in rows if row["case"] == case}
        first, last = timed[names[0]], timed.get(names[-1])
        spread = {name: f"{row['seconds']:.2f} ({row['min']:.2f} to {row['max']:.2f})" for name, row in timed.items()}
        lines.append([
            case, shape_text(first),
            *(spread.get(name, "") for name in names),
            f"{first['seconds'] / last['seconds']:.2f}x" if last else "",
            " / ".join(f"{row['peak_mib']:.0f}" for row in timed.values()),
            f"{first['device_mib']:.0f}" if "device_mib" in first else "",
        ])  # fmt: skip
    return table(lines)


def scaling(rows: list[dict]) -> str:
    """For each way to use several GPUs: the kernel on the slowest of them, the pipeline, the whole command, and how
    many times as fast each is as on one; and the rates of reading and writing, while that went on."""
    lines = [("(B, N, d)", "", "GPUs", "kernel, s", "pipeline, s", "command, s", "reads, GB/s", "writes, GB/s")]
    for row in rows:
        one = next(other for other in rows if other["case"] == row["case"])
        times = (
            f"{row[name]:.3f} ({one[name] / row[name]:.2f}x)" if name in row else ""
            for name in ("busy", "pipeline", "seconds")
        )
        rates = (f"{row[name]:.1f}" for name in ("reads", "writes"))
        lines.append((shape_text(row), f"`{row['contender']}`", str(row["count"]), *times, *rates))
    return table(lines)


def about(record: dict) -> str:
    """Under which circumstances a record was made, in one line."""
    wordings = {
        "gpu": "{}", "driver": "driver {}", "cpu": "{}", "threads": "{} threads", "blas": "{}", "date": "{}",
        "commit": "commit {}", "command": "`{}`",
    }  # fmt: skip
    facts = record["circumstances"]
    return ", ".join(wording.format(facts[name]) for name, wording in wordings.items() if name in facts)


VIEWS = {
    "headline": headline, "table": markdown, "end_to_end": end_to_end, "ladder": ladder, "profile": profile,
    "scaling": scaling,
}  # fmt: skip
BLOCK = re.compile(r"(<!-- (\w+): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a Markdown document with each block between ``<!-- VIEW: RECORD -->`` and ``<!-- end -->`` made anew.

    VIEW is a name in `VIEWS`, RECORD the path of a record, relative to the document.
    """

    def view(match: re.Match) -> str:
        record = json.loads((document.parent / match[3]).read_text())
        return f"{match[1]}{VIEWS[match[2]](record['rows'])}\n{about(record)}\n{match[4]}"

    return BLOCK.sub(view, document.read_text())


if __name__ == "__main__":  # python -m flashcli.measure.records README.md ...: bring the documents' tables up to date
    for name in sys.argv[1:]:
        Path(name).write_text(refreshed(Path(name)))
