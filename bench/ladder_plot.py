"""Draw a record of the ladder again: ``python -m bench.ladder_plot RECORD.json FILE.png [--profile PROFILE.json]``.

RECORD.json is one of ``flashcli bench --ladder``; the roofline goes to FILE-roofline.png.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import click

from bench import scripts
from bench.records import load_record
from flashcli.measure.plots import MUST, Moved, check_drawable, draw_ladder
from flashcli.measure.records import of_kind
from flashcli.measure.rows import Profiled, Row, Rung

DRAM = "the bytes that a launch with empty caches moves through DRAM, as counted by Nsight Compute"


def dram_bytes(counted: Iterable[Row]) -> Moved:
    """The bytes that rungs moved through DRAM, as far as a profile has them.

    Not for a function of many launches: the caches were empty before the one that was counted, which they are not
    before the others.
    """
    found: dict[tuple[str, str], float] = {}
    for row in of_kind(Profiled, counted):
        rung = str(row.shape), row.contender
        once = row.dram_bytes if row.launches == 1 else None
        found[rung] = found.get(rung, 0.0) + (math.nan if once is None else once)
    return {rung: moved for rung, moved in found.items() if not math.isnan(moved)}


def caption(rows: Iterable[Row], moved: Moved) -> str:
    """The bytes over which the roofline's operations are, in words."""
    known = {(str(row.shape), row.contender) in moved for row in of_kind(Rung, rows)}
    mixed = f"{DRAM}; for rungs of many launches, or none counted, {MUST}"
    return mixed if len(known) > 1 else DRAM if known == {True} else MUST


@click.command()
@click.argument("record", type=Path)
@click.argument("picture")
@click.option("--profile", type=Path, help="A record of `flashcli profile`, for the bytes that rungs moved.")
def main(record: Path, picture: str, profile: Path | None) -> None:
    """Draw a RECORD of `flashcli bench --ladder` to PICTURE, and its roofline beside it."""
    check_drawable(picture)
    moved = dram_bytes(load_record(profile, "flashcli profile", Profiled).rows) if profile else {}
    ladder = load_record(record, "flashcli bench --ladder", Rung)
    draw_ladder(ladder, picture, moved, caption(ladder.rows, moved))


if __name__ == "__main__":
    scripts.run(main)
