"""Views of a benchmark record: a table for people, Markdown, CSV, the tables in the documents. The record is JSON.

A record is ``{"circumstances": {...}, "ceilings": {...}, "rows": [{...}]}``; its rows are those of `flashcli.bench`
or of `flashcli.end_to_end`.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

from flashcli.kernels import KERNELS

COLUMNS = ("case", "(B, N, d)", "contender", "median", "min to max", "TFLOP/s", "of floor", "relative L2", "max abs")


def shape_text(row: dict) -> str:
    return "({B}, {N}, {d})".format(**row)


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
    lines = [list(COLUMNS), *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines if line[-1]) for i in range(len(COLUMNS))]
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


def end_to_end(rows: list[dict]) -> str:
    """For each case the median seconds of each whole command, and how the first compares with the last."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    ratio = f"{names[0]} over {names[-1]}"
    lines = [["case", "(B, N, d)", *(f"{name}, s" for name in names), ratio, "peak memory, MiB"]]
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = {row["contender"]: row for row in rows if row["case"] == case}
        first, last = timed[names[0]], timed[names[-1]]
        peaks = (f"{row['peak_mib']:.0f}" for row in timed.values())
        lines.append([
            case, shape_text(first),
            *(f"{row['seconds']:.2f} ({row['min']:.2f} to {row['max']:.2f})" for row in timed.values()),
            f"{first['seconds'] / last['seconds']:.2f}x", " / ".join(peaks),
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


VIEWS = {"headline": headline, "table": markdown, "end_to_end": end_to_end, "scaling": scaling}
BLOCK = re.compile(r"(<!-- (\w+): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a Markdown document with each block between ``<!-- VIEW: RECORD -->`` and ``<!-- end -->`` made anew.

    VIEW is a name in `VIEWS`, RECORD the path of a record, relative to the document.
    """

    def view(match: re.Match) -> str:
        record = json.loads((document.parent / match[3]).read_text())
        return f"{match[1]}{VIEWS[match[2]](record['rows'])}\n{about(record)}\n{match[4]}"

    return BLOCK.sub(view, document.read_text())


if __name__ == "__main__":  # python -m flashcli.records README.md ...: bring the documents' tables up to date
    for name in sys.argv[1:]:
        Path(name).write_text(refreshed(Path(name)))
