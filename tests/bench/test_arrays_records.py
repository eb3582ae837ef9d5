"""Records of attention on tensors and in models: their tables, and what is said of targets."""

from __future__ import annotations

import importlib.util

import pytest
from support import drawing, python

from bench import views
from bench.case_study import STEPS
from bench.gpt2 import plot
from bench.rows import Forward, Generated
from bench.targets import TARGETS, target_lines
from flashcli.measure import records
from flashcli.measure.rows import Failure, InPlace

ABOUT = {"B": 4, "N": 1024, "d": 64, "causal": False}
TIMES = {"min": 1e-3, "max": 3e-3, "runs": 20}


def row(case: str, contender: str, seconds: float, layout: str = "bhnd") -> InPlace:
    tensors = {"H": 24, "Hkv": 12, "M": 1024, "layout": layout, "clock": "gpu"}
    accuracy = {"relative_l2": 1e-7, "max_abs": 1e-6, "tflops": 1.0}
    return InPlace(**ABOUT, **TIMES, **tensors, **accuracy, case=case, contender=contender, seconds=seconds)


def generated(case: str, contender: str, seconds: float, **more: object) -> Generated:
    about = {"case": case, "B": 1, "N": 64, "d": 64, "causal": True, "contender": contender}
    return Generated(**about, **TIMES, seconds=seconds, reached={"32": seconds / 2, "64": seconds}, **more)


def test_a_target_is_reached_by_seconds_or_by_times_as_long_as_another():
    rows = [
        row("grouped heads", "flashcli", 1.6e-3), row("replayed", "flashcli", 2e-5),
        row("replayed", "PyTorch efficient", 6e-5),
        row("short rows", "flashcli", 1e-3), row("short rows", "flashcli", 1.04e-3, "bnhd"),
    ]  # fmt: skip
    assert target_lines(rows)[1:] == [
        ["grouped heads", "bhnd", "1.600 ms", "at most 1.5 ms", "missed"],
        ["short rows", "bnhd", "1.04x", "at most 1.05x flashcli", "reached"],
        ["replayed", "bhnd", "0.33x", "at most 0.40x PyTorch efficient", "reached"],
    ]
    assert len(target_lines([])) == 1 and len(TARGETS) == 11


def test_contenders_on_tensors_stand_beside_the_first():
    rows = [
        row("it", "flashcli", 2e-3),
        row("it", "PyTorch math", 5e-5),
        Failure(**ABOUT, case="it", contender="x", error="no"),
    ]
    assert views.in_place_lines(rows)[1:] == [
        ["it", "(4, 24/12, 1024, 64)", "bhnd", "gpu", "flashcli", "2 ms", "1 to 3", "1.0e-07", "1.00x"],
        ["it", "(4, 24/12, 1024, 64)", "bhnd", "gpu", "PyTorch math", "50 us", "1000 to 3000", "1.0e-07", "0.03x"],
        ["it", "", "", "", "x", "no", "", "", ""],
    ]  # fmt: skip


def test_tokens_that_differ_are_told_with_their_logits():
    rows = [
        generated("no cache", "naive", 2.0, peak_mib=100.0),
        generated("no cache", "wgmma", 1.0, differs_at=7, gap=-1e-6)
    ]  # fmt: skip
    assert views.gpt2_lines(rows)[1:] == [
        ["no cache", "naive", "2.000", "0.001 to 0.003", "1.00x", "32", "100.0", "the same 64"],
        ["no cache", "wgmma", "1.000", "0.001 to 0.003", "2.00x", "64", "", "another at 7, logit -1.0e-06"],
    ]


def test_a_step_stands_beside_the_one_before_it_in_every_case():
    rows = [row("one", "v1", 4e-3), row("one", "v2", 2e-3), row("one", "flashcli", 1e-3),
            row("two", "v1", 9e-3), Failure(**ABOUT, case="two", contender="v2", error="no"),
            row("two", "flashcli", 1e-3)]  # fmt: skip
    about = [[step.change, step.rungs] for step in STEPS[:2]]
    assert views.step_lines(rows) == [
        ["step", "change", "rungs that have it", "one, ms", "gain", "two, ms", "gain"],
        ["v1", *about[0], "4.000", "", "9.000", ""],
        ["v2", *about[1], "2.000", "2x", "no", ""],
        ["flashcli", "", "", "1.000", "", "1.000", ""],
    ]


def test_a_pass_of_a_model_stands_beside_ours():
    sizes = {"layers": 2, "H": 4, "Hkv": 2, "relative_l2": 1e-7}
    some = [Forward(**ABOUT, **TIMES, **sizes, case="Llama", contender=name, seconds=seconds)
            for name, seconds in (("flashcli", 2e-3), ("sdpa", 3e-3))]  # fmt: skip
    assert [line[-1] for line in views.model_lines(some)[1:]] == ["", "1.50x"]


@drawing
def test_a_generation_is_drawn(tmp_path):
    rows = [generated(case, name, 1.0) for case in ("no cache", "KV cache") for name in ("naive", "flashcli", "mma")]
    rows.append(generated("KV cache", "paged", 1.0))
    plot.draw_generation(records.Record({"gpu": "GPU 1"}, rows), str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    assert all(f">{name}</text>" in text for name in ("naive", "flashcli", "mma", "paged", "no cache", "KV cache"))


@pytest.mark.parametrize("name", ["arrays", "gpt2.times", "models"])
def test_without_pytorch_the_scripts_say_so(name):
    if importlib.util.find_spec("torch"):
        pytest.skip("PyTorch is installed")
    python("-m", f"bench.{name}").assert_error(69, "torch is not installed.")
