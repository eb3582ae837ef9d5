"""The README's picture: what it shows of a record."""

from __future__ import annotations

from support import ROOT, drawing

from bench import headline_plot
from bench.records import read
from flashcli.measure.rows import Failure, Timed

RECORD = read((ROOT / "cuda/records/h200.json").read_bytes())
TITLE = "t10 (10, 2048, 64)"
ABOUT = {"case": "t10", "B": 10, "N": 2048, "d": 64}


def row(contender: str, tflops: float) -> Timed:
    times = {"seconds": 1.0, "min": 1.0, "max": 1.0, "runs": 1}
    return Timed(**ABOUT, contender=contender, relative_l2=1e-6, max_abs=1e-6, **times, tflops=tflops)


def test_the_fastest_of_our_fp32_kernels_stands_beside_the_fp32_peers():
    rows = [row("mma", 75.0), row("wgmma", 157.0), row("wgmma fp16", 238.0), row("PyTorch math", 16.0)]
    assert headline_plot.rates(rows) == {"t10 (10, 2048, 64)": {"flashcli": 157.0, "PyTorch math": 16.0}}


def test_what_was_not_timed_has_no_bar():
    rows = [row("mma", 75.0), Failure(**ABOUT, contender="PyTorch efficient", error="it refuses")]
    assert headline_plot.rates(rows) == {"t10 (10, 2048, 64)": {"flashcli": 75.0}}


def test_every_case_of_the_record_has_a_bar_of_ours_and_of_each_peer():
    cases = list(headline_plot.rates(RECORD.rows).values())
    assert all(set(case) == set(cases[0]) and len(case) >= 4 for case in cases)


@drawing
def test_the_record_is_drawn(tmp_path):
    picture = tmp_path / "headline.svg"
    headline_plot.draw_headline(RECORD, str(picture))
    text = picture.read_text()
    assert "<svg" in text and all(
        f">{name}</text>" in text for name in [*headline_plot.rates(RECORD.rows)[TITLE], "cuBLAS in fp32"]
    )
