"""Measuring gradients on PyTorch's tensors: what is computed and refused, on the CPU; and what is told of a record."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support import drawing

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from bench import (  # noqa: E402
    pairs,
    training,
    training_plot,
    views,
)
from bench import rows as rows_of  # noqa: E402
from bench.records import read  # noqa: E402
from bench.targets import BACKWARD  # noqa: E402
from flashcli.commands.bench_tensors import command  # noqa: E402
from flashcli.errors import UsageError  # noqa: E402
from flashcli.measure import backward, in_place, peers, records  # noqa: E402
from flashcli.measure.backward import GRADIENTS  # noqa: E402
from flashcli.measure.bench import Conditions  # noqa: E402
from flashcli.measure.in_place import race  # noqa: E402
from flashcli.measure.rows import Failure, Gradients  # noqa: E402
from flashcli.measure.tensors import Problem  # noqa: E402

QUICK = Conditions(runs=2, causal=False, seed=0)
PROBLEMS = [
    Problem(2, 4, 4, 30, 30, 8),
    Problem(2, 4, 2, 20, 30, 8, causal=True, layout="bnhd"),
    Problem(2, 4, 2, 30, 30, 8, layout="qkv"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ours_and_pytorchs_are_checked_and_timed(problem):
    entrants = [(contender, problem) for contender in backward.cpu_contenders(["torch"])]
    rows = race("it", entrants, "cpu", QUICK, "cpu", GRADIENTS)
    assert [row.contender for row in rows] == ["flashcli", "PyTorch SDPA"]
    for row in rows:
        assert isinstance(row, Gradients) and row.runs == 2 and row.clock == "cpu"
        assert 0 < max(row.dq, row.dk, row.dv) == row.relative_l2 < 2e-6
        assert row.tflops == pytest.approx(problem.operations * 2.5 / row.seconds / 1e12)


def test_with_the_forward_pass_seven_products_are_counted():
    [row] = race("it", [(backward.ours_with_forward(), PROBLEMS[0])], "cpu", QUICK, "cpu", GRADIENTS)
    assert isinstance(row, Gradients) and row.contender == "flashcli, forward too"
    assert row.tflops == pytest.approx(PROBLEMS[0].operations * 3.5 / row.seconds / 1e12)


@pytest.mark.parametrize("which", range(3), ids=["dQ", "dK", "dV"])
def test_what_is_wrong_is_told_and_not_timed(which):
    def bind(problem, inputs):
        call = backward.ours().bind(problem, inputs)

        def wrong():
            found = list(call())
            found[which] = found[which] * 1.01
            return found

        return wrong

    [row] = race("it", [(in_place.Contender("wrong", bind), PROBLEMS[1])], "cpu", QUICK, "cpu", GRADIENTS)
    assert isinstance(row, Failure) and row.is_wrong and row.relative_l2 == pytest.approx(0.01, rel=1e-3)


def test_bench_times_gradients(tmp_path):
    file = tmp_path / "x.json"
    given = ["--backward", "--backend", "cpu", "--shape", "2,40,8", "--heads", "4", "--kv-heads", "2", "--causal"]
    done = CliRunner().invoke(command, [*given, "--runs", "1", "--against", "torch", "--json", str(file)])
    assert done.exit_code == 0, done.output
    record = read(file.read_text())
    assert [row.contender for row in record.rows] == ["flashcli", "PyTorch SDPA"]
    assert all(isinstance(row, Gradients) and row.causal and row.Hkv == 2 for row in record.rows)
    assert "dq" in json.loads(file.read_text())["rows"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backward", "--precision", "fp16"], "--precision fp16 has no meaning for gradients, which are in fp32."),
        (["--backward", "--against", "triton"], "--against triton has no meaning for gradients"),
        (["--kernel", "plain"], "kernel plain does not compute attention."),
    ],
)
def test_what_has_no_meaning_for_gradients_is_wrong_usage(monkeypatch, options, message):
    monkeypatch.setattr(peers, "installed", lambda name: True)
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, ["--shape", "2,40,8", *options], catch_exceptions=False)


def test_a_record_is_told_beside_what_is_wanted():
    problem = BACKWARD[6].problem
    about = {"case": str(problem), "B": 4, "N": 1024, "d": 64, "causal": True, "H": 12, "Hkv": 12, "M": 1024}
    rest = {"layout": "bhnd", "clock": "gpu", "min": 1e-4, "max": 1e-3, "runs": 20, "tflops": 33.4}
    errors = {"relative_l2": 3e-7, "dq": 3e-7, "dk": 2e-7, "dv": 1e-7}
    rows = [
        Gradients(**about, **rest, **errors, contender=name, seconds=seconds)
        for name, seconds in (("flashcli", 5e-4), ("PyTorch math", 1.2e-3))
    ]
    assert views.backward_lines(rows) == [
        ["(B, H, N, d)", "wanted, ms", "flashcli, ms", "TFLOP/s", "relative L2 of dQ, dK, dV", "PyTorch math, ms"],
        ["(4, 12, 1024, 64) causal", "0.25", "0.500", "33", "3.0e-07, 2.0e-07, 1.0e-07", "1.200, 2.4x"],
    ]
    assert [rows_of.read(row.written()) for row in rows] == rows


# A training run

TINY = training.Config(layers=1, heads=2, d=8, N=12, batch=3, steps=4)


@functools.cache
def trained() -> list[rows_of.Row]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "text", lambda: "attention, " * 100)  # not the sources, which may change
        return list(training.measured(TINY, "cpu"))


def test_a_model_is_trained_by_each_attention_from_the_same_weights():
    rows = trained()
    assert [row.contender for row in rows] == ["flashcli", "flashcli, again", "PyTorch SDPA"]
    assert training.verdict(rows) == [] and rows[0].weights == rows[1].weights
    assert max(training.differences(rows)) < 1e-5 and rows[0].losses[3] < rows[0].losses[0]
    assert len(views.training_lines(rows)) == 4
    assert [rows_of.read(row.written()) for row in rows] == rows


def test_a_model_of_pairs_is_trained_by_each_attention_from_the_same_weights():
    tiny = training.Config(layers=2, heads=2, d=4, N=6, batch=2, steps=4, rising=1)
    rows = list(pairs.measured(tiny, "cpu"))
    assert training.verdict(rows) == [] and rows[0].weights == rows[1].weights != rows[2].weights
    assert max(training.differences(rows)) < 1e-5 and rows[0].losses[3] < rows[0].losses[0]


def test_other_weights_and_losses_that_are_far_are_told():
    first, again, pytorchs = trained()
    other = replace(again, weights="0"), replace(pytorchs, losses=[loss + 1e-3 for loss in pytorchs.losses])
    found = training.verdict([first, *other])
    assert (
        found[0] == "two runs by our attention have other weights" and "differ from PyTorch's by up to 1." in found[1]
    )


@drawing
def test_losses_are_drawn(tmp_path):
    training_plot.draw_training(records.Record({"gpu": "GPU 1"}, trained()), str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    assert all(f">{name}</text>" in text for name in ("flashcli", "PyTorch SDPA", "loss", "difference"))
