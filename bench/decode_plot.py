"""Draw a record of paged decode again: ``python -m bench.decode_plot RECORD.json FILE.png``.

RECORD.json is one of ``python -m bench.decode`` or of ``flashcli bench-decode --ladder``.
"""

from __future__ import annotations

from bench import scripts
from bench.rows import Called
from flashcli.measure.plots import draw_decode
from flashcli.measure.rows import Decoded

main = scripts.redrawing("flashcli bench-decode --ladder", Decoded | Called, draw_decode)


if __name__ == "__main__":
    scripts.run(main)
