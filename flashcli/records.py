"""Views of a benchmark record: a table for people, Markdown, CSV. The record itself is JSON.

A record is ``{"circumstances": {...}, "ceilings": {...}, "rows": [{...}]}``; its rows are those of `flashcli.bench`.
"""

from __future__ import annotations

import csv
import io

COLUMNS = ("case", "(B, N, d)", "contender", "median", "min to max", "TFLOP/s", "of floor", "relative L2", "max abs")


def cells(row: dict) -> list[str]:
    """One row of the table: milliseconds, and the floor (by bytes or operations, the larger) over the median."""
    start = [row["case"], f"({row['B']}, {row['N']}, {row['d']})", row["contender"]]
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
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


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
