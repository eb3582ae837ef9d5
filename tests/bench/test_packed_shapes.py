"""What the script that times packed sequences counts."""

from __future__ import annotations

import numpy as np
import pytest

from bench.packed import Case


@pytest.mark.parametrize("case", [Case(N=50, causal=True), Case(N=50, causal=True, left=7), Case(N=50)], ids=str)
def test_pairs_are_those_of_a_query_and_a_key_that_it_sees(case):
    far = np.arange(case.N)[:, None] - np.arange(case.N)
    seen = (far >= 0) & ((far <= case.left) | (case.left < 0)) if case.causal else far < case.N
    assert case.pairs == seen.sum()


def test_pairs_of_packed_sequences_are_within_each():
    assert Case((3, 0, 5)).pairs == 9 + 25 and Case((3, 0, 5)).tokens == 8
