"""Draw a record of paged decode again: ``python -m bench.decode_plot RECORD.json FILE.png``.

RECORD.json is one of ``python -m bench.decode`` or of ``flashcli bench-decode --ladder``.
"""

from __future__ import annotations

from pathlib import Path

import click

from bench import scripts
from bench.records import load_record
from flashcli.measure.decode_plot import draw_decode
from flashcli.measure.plots import check_picture
from flashcli.measure.rows import Decoded


@click.command()
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture")
def main(record: Path, picture: str) -> None:
    """Draw a RECORD of `flashcli bench-decode --ladder` to PICTURE."""
    check_picture(picture)
    draw_decode(load_record(record, "flashcli bench-decode --ladder", Decoded), picture)


if __name__ == "__main__":
    scripts.run(main)
