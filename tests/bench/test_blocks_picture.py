"""The picture of grid, blocks and threads: its numbers are the registry's."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from support import ROOT, drawing, python

from bench.blocks_picture import picture
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem

SVG = "{http://www.w3.org/2000/svg}"


@drawing
@pytest.mark.parametrize(
    ("d", "Bc", "shared"), [(64, 16, "Q 32 + K 4 + V 4 + S 8 = 48"), (32, 32, "Q 16 + K 4 + V 4 + S 16 = 40")]
)
def test_the_default_tiles(d, Bc, shared):
    figure = picture(Build(KERNELS["split_q"], Problem(10, 2048, 2048, d)))
    grid, tiles, threads = figure.axes
    assert grid.get_title() == "the grid: B x Tr = 160 blocks" and len(grid.patches) == 160
    assert f"Q and O stay at tile i; K and V pass, j = 0 to {2048 // Bc - 1}, a tile a step" in texts(tiles)
    assert {f"Bc = {Bc} keys", f"shared memory: {shared} KiB", "warp 3"} <= texts(threads) and "warp 4" not in texts(
        threads
    )
    assert threads.get_title() == "the threads of a block: 128, one a row"


def texts(ax) -> set[str]:
    return {text.get_text() for text in ax.texts}


@drawing
def test_a_kernel_that_divides_its_work_otherwise_is_refused(tmp_path):
    for name in ("sequential", "max_shared", "q_in_registers", "wgmma"):
        done = python("-m", "bench.blocks_picture", tmp_path / "x.svg", "--kernel", name)
        done.assert_error(2, f"kernel {name} is divided in another way.")


@drawing
def test_the_picture_on_the_ladders_page_is_what_the_registry_says(tmp_path):
    assert python("-m", "bench.blocks_picture", tmp_path / "x.svg").code == 0
    drawn, kept = (
        [text.text for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")]
        for path in (tmp_path / "x.svg", ROOT / "docs" / "blocks.svg")
    )
    assert drawn == kept
