"""Gradients by quick builds on a GPU: the bytes of full builds, in each of several calls."""

from __future__ import annotations

import pytest
import sanitize_backward
from sanitize_arrays import nan
from sanitizing import compute

from flashcli.compiler import compiler, nvrtc, quick
from flashcli.gpu import driver
from flashcli.gpu.place import Place, place_of_device
from flashcli.gpu.prepared import Prepared
from flashcli.kernels.backward import BACKWARD, KERNELS, POINTERS

pytestmark = pytest.mark.gpu
CASES = ("dense", "causal", "odd, causal", "heads of 128, rows first", "bias and mask", "whole heads, bias", "NaN")


@pytest.fixture
def place() -> Place:
    if missing := driver.problem() or nvrtc.problem():
        pytest.skip(missing)
    return place_of_device(0)


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.explicit])
@pytest.mark.parametrize("name", CASES)
def test_quick_builds_have_the_bytes_of_full_ones(place, monkeypatch, kernel, name):
    if not sanitize_backward.PROGRAM.takes(place, kernel, name):
        pytest.skip("the kernel does not take this case here")
    case = sanitize_backward.CASES[name]
    [plan], given = sanitize_backward.plans(place, kernel, case), sanitize_backward.make(case)
    monkeypatch.setattr(quick, "first_cubin", lambda build, arch: (compiler.quick_cubin(build, arch), True))
    monkeypatch.setattr(quick, "is_under_way", lambda build, arch: True)
    found = []
    for is_quick in (False, True, True, True):
        prepared = Prepared(Place(place.device, place.context), BACKWARD, plan, is_quick)
        answers = {f"d{x}": nan(*given.view[x].shape, kind=case.out_dtype) for x in "QKV"}
        if case.bias:
            answers["dbias"] = nan(*case.bias)
        compute(place, prepared, POINTERS, *given, answers)
        found.append([x.tobytes() for x in answers.values()])
    assert found[1:] == found[:1] * 3
