"""What the kernels of attention's ladder answer, emulated on the CPU; the same on a GPU is tested file by file."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.attention import attend
from oracle import Asked, assert_accurate
from support import THOROUGH, sampled

from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem

LADDER = [name for name, kernel in KERNELS.items() if not kernel.on_host]
SHAPES = [(2, 130, 64), (1, 33, 80), (3, 1, 5), (1, 150, 256)]  # (B, N, d): several tiles, the last ones partly filled


@pytest.mark.parametrize("causal", sampled([True, False]))
@pytest.mark.parametrize("name", LADDER)
def test_every_kernel_is_as_accurate_as_naive_attention_in_any_order_of_its_threads(emulated, name, causal):
    cases = []
    for B, N, d in SHAPES if THOROUGH else SHAPES[:2]:
        if KERNELS[name].refuses(Problem(B, N, N, d, causal=causal)):
            continue
        q, k, v = np.random.default_rng(d).normal(size=(3, B, N, d)).astype(np.float32)
        found = [attend(name, q, k, v, emulated, causal, backwards) for backwards in (False, True)]
        assert found[0].tobytes() == found[1].tobytes()
        cases.append((Asked(q, k, v, causal), found[0], None))
    assert_accurate(cases)
