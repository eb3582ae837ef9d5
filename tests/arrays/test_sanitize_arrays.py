"""What compute-sanitizer is shown of arrays on a GPU: that each case launches what it is for."""

from __future__ import annotations

import dataclasses

import pytest
import sanitize_arrays
from sanitize_arrays import CASES, PROGRAM, STRIDED, asked, check
from support import sampled

from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import prepare
from flashcli.kernels.plan import ATTENTION

LONG_OR_ODD = [
    "odd", "odd, causal", "heads of 30", "heads of 200, causal", "heads of 256, fused",
    "heads of 160, more of them than multiprocessors", "chunks of keys, heads of 256",
    "chunks of keys, heads of 160", "chunks of keys, heads of 160, more of them than blocks", "few keys, odd, causal",
]  # fmt: skip
LONG_BIAS = ["bias", "bias of keys", "bias of queries", "bias, odd, causal", "bias, heads of 128", "bias, heads of 256"]
LONG_MASK = [
    "mask of queries", "bias and mask, heads of 64, causal", "bias in fours, causal",
    "bias in pairs, heads of 128", "mask in pairs", "bias and mask, odd, heads of 200",
    "a bias that hides NaN of K, heads of 256",
]  # fmt: skip
LONG_NAN = ["NaN, odd, causal", "NaN, heads of 200", "NaN with a bias", "NaN, chunks of keys, heads of 256"]
LONG_OF_FEW_KEYS = [name for name in CASES if "a tile of keys for each block" in name or "many long heads" in name]
LONG_FP16 = "fp16, heads of 192"
HALVES = [name for name, case in CASES.items() if case.dtype != "float32"]
REFUSED = {  # by kernels that do not take them
    "register_tiled": ["few keys, fp16", "fp16", LONG_FP16, "halves, fp16"],
    "mma": [],
    "wgmma": [],
    "mma_short": [name for name, case in CASES.items() if case.N > 128 or case.d > 64],
    "wgmma_short": [*LONG_OR_ODD, *LONG_BIAS, *LONG_MASK, *LONG_NAN, *LONG_OF_FEW_KEYS, LONG_FP16, *HALVES],
}
MACROS = {"DENSE": "01", "ALIGNED": "01", "LSE": "01", "CAUSAL": "01", "BIAS": "123", "BIAS_COLUMN": "0124"}


@pytest.mark.parametrize("kernel", sampled(STRIDED, 5))
def test_every_case_is_prepared_and_computed_by_every_kernel_that_takes_it(hopper, driver, kernel):
    found = [name for name in CASES if PROGRAM.takes(hopper, kernel, name)]
    assert {name for name in CASES if name not in found} == set(REFUSED[kernel])
    PROGRAM.compile_all(hopper, [(kernel, name) for name in found])
    for name in found:
        prepare(hopper, ATTENTION, *asked(CASES[name], kernel))
    for name in found[STRIDED.index(kernel) :: 5]:  # each case by one kernel, or two
        check(hopper, kernel, CASES[name])
    for macro, values in MACROS.items():
        values = {("wgmma_short", "ALIGNED"): "1", ("mma_short", "BIAS_COLUMN"): "014"}.get((kernel, macro), values)
        assert {macros.get(macro) for macros in driver.loaded} - {None} == set(values), macro
    assert not driver.allocated


@pytest.mark.parametrize("kernel", STRIDED)
def test_on_a_gpu_that_has_not_what_a_kernel_needs_there_is_no_case(driver, kernel):
    place = place_of_device(0)
    assert any(PROGRAM.takes(place, kernel, name) for name in CASES) == (
        kernel in ("register_tiled", "mma", "mma_short")
    )


def test_a_wrong_answer_is_told(hopper, monkeypatch, capsys):
    program = dataclasses.replace(PROGRAM, cases={name: CASES[name] for name in ("mask", "fp16")})
    monkeypatch.setitem(sanitize_arrays.TOLERANCE, "fp16", 0)
    assert program.main(["mma"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["mma: mask", "mma: fp16"] and told[2].startswith("WRONG, mma: fp16: Not equal to tolerance")
    assert told[3:] == ["1 of 2 cases are right"]
