"""Draw a record of the ladder again: ``python -m bench.ladder_plot RECORD.json FILE.png [--profile PROFILE.json]``.

RECORD.json is one of ``flashcli bench --ladder``; the roofline goes to FILE-roofline.png.
"""

from __future__ import annotations

from pathlib import Path

import click

from bench import scripts
from bench.records import load_record
from flashcli.measure.plots import check_drawable, draw_ladder
from flashcli.measure.rows import Profiled, Rung


@click.command()
@click.argument("record", type=Path)
@click.argument("picture")
@click.option("--profile", type=Path, help="A record of `flashcli profile`, for the bytes that rungs moved.")
def main(record: Path, picture: str, profile: Path | None) -> None:
    """Draw a RECORD of `flashcli bench --ladder` to PICTURE, and its roofline beside it."""
    check_drawable(picture)
    launches = load_record(profile, "flashcli profile", Profiled) if profile else None
    draw_ladder(load_record(record, "flashcli bench --ladder", Rung), picture, launches)


if __name__ == "__main__":
    scripts.run(main)
