"""The picture of who has what in V1 and V2: its numbers, and that it shows them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from support import ROOT, drawing

from bench import headline_plot, paged_plot
from bench.paged_plot import Shares
from flashcli.errors import UsageError


def test_numbers_are_those_that_vllms_documentation_has():
    shares = Shares.of(128, 16, "float16")
    assert (shares.THREAD_GROUP_SIZE, shares.VEC_SIZE, shares.NUM_VECS_PER_THREAD) == (2, 4, 16)
    assert (shares.V_VEC_SIZE, shares.NUM_ROWS_PER_ITER, shares.NUM_ROWS_PER_THREAD) == (8, 16, 8)


def test_a_page_that_v1_refuses_is_not_drawn():
    with pytest.raises(UsageError, match="pages of less than four tokens"):
        Shares.of(64, 2, "float16")


def test_heads_that_v1_refuses_are_not_drawn():
    with pytest.raises(UsageError, match="heads of a multiple of 8 numbers"):
        Shares.of(37, 16, "float16")


@drawing
@pytest.mark.parametrize(
    ("script", "given"), [(paged_plot, []), (headline_plot, [str(ROOT / "cuda/records/h200.json")])]
)
def test_a_name_that_is_no_pictures_is_refused(script, given, tmp_path):
    done = CliRunner().invoke(script.main, [*given, str(tmp_path / "x.txt")])
    assert isinstance(done.exception, UsageError) and "is not the name of a picture" in str(done.exception)


@drawing
def test_the_picture_tells_what_a_warp_loads(tmp_path):
    paged_plot.draw(Shares.of(32, 8, "float32"), "float32", str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    for told in ("32 lanes x 4 bytes = 128 bytes", "thread t of each group of 4", "q_vecs[3]", "accs[1]: 16", "warp 3"):
        assert told in text
