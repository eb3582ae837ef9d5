"""Steps of the case study on GPT-2's attention: right as they are emulated, and named as the ladder has them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from emulator import attention
from support import sampled

from bench.case_study import STEPS
from bench.gpt2 import steps
from flashcli.compiler.compiler import SOURCES
from flashcli.emulator import machine
from flashcli.kernels.attention import KERNELS


@pytest.fixture
def named(monkeypatch, tmp_path):
    """Steps among the kernels, with their header as the emulator finds it: all in one folder."""

    def library_of(build, folder):
        source = tmp_path / "steps.cu"
        source.write_text(Path(build.kernel.file).read_text().replace('"attention/attention.cuh"', '"attention.cuh"'))
        return machine.library(source, [SOURCES, SOURCES / "attention"], build.macros(), folder)

    monkeypatch.setattr(machine, "library_of", library_of)
    for name, kernel in steps.kernels().items():
        monkeypatch.setitem(KERNELS, name, kernel)


@pytest.mark.parametrize("name", sampled(list(steps.kernels()), step=5))
def test_each_step_is_right_with_the_mask(emulated, named, name):
    Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 75, 64), np.float32)
    scores = np.where(np.tri(75) > 0, Q.astype(np.float64) @ K.swapaxes(1, 2) / 8, -np.inf)
    P = np.exp(scores - scores.max(-1, keepdims=True))
    want = P / P.sum(-1, keepdims=True) @ V
    got = attention.attend(name, Q, K, V, emulated, causal=True)
    assert np.linalg.norm(got - want) < 5e-7 * np.linalg.norm(want)


def test_rungs_that_have_a_step_are_on_the_ladder():
    found = {name for step in STEPS for name in re.findall(r"`(\w+)`", step.rungs)}
    assert found and found <= KERNELS.keys()
