"""What compute-sanitizer is shown of paged decode: that each case launches what it is for, by a fake driver."""

from __future__ import annotations

import pytest
import sanitize_decode
from sanitize_decode import CASES, LADDER, RUBBISH, WRITE, WRITES, check, check_write, compile_all, taken
from support import sampled

EVERY = {**CASES, **RUBBISH}
OF_OTHER_LAYOUTS = {name for name, case in EVERY.items() if case.layout != "vllm"}
WITH_SINKS = {name for name, case in CASES.items() if case.sinks}
FLOAT32 = {name for name, case in EVERY.items() if case.query_type == "float32"}
SPARSE = {name for name, case in CASES.items() if case.sparse}
GATHERED = {name for name, case in EVERY.items() if case.queries and case.query_type == "float32" and not case.sinks}
REFUSED = {
    **{name: {"pages of 1", *OF_OTHER_LAYOUTS, *WITH_SINKS} for name in ("paged_v1", "paged_v2")},
    "tensor": {"pages of 1", *FLOAT32},
    "prompt": {"pages of 1", *FLOAT32, *SPARSE},
    "read": {"pages of 1"},
    "gather": {*EVERY} - GATHERED,
}  # fmt: skip


@pytest.mark.parametrize("kernel", LADDER)
def test_every_case_is_for_every_kernel_that_takes_it(kernel):
    assert {*EVERY} - {*taken(kernel)} == REFUSED.get(kernel, set())


@pytest.mark.parametrize("kernel", sampled(["tensor", "prompt", "grouped"], 3))  # which the fake computes
def test_every_answer_is_looked_at(hopper, driver, kernel):
    for name in set(taken(kernel)) - {*RUBBISH}:
        check(hopper, kernel, name)
    assert {name for name, _, _ in driver.launches} >= {kernel} and not driver.allocated


@pytest.mark.parametrize("kernel", ["paged_v1", "paged_v2", "split", "read"])  # which it only launches
def test_every_kernel_is_launched_with_the_shared_memory_that_it_needs(hopper, driver, kernel):
    check(hopper, kernel, next(iter(RUBBISH)))
    assert {name for name, _, _ in driver.launches} >= {kernel} and not driver.allocated


def test_every_write_is_looked_at(hopper, driver):
    compile_all(hopper, [(WRITE, name) for name in WRITES])
    for name in WRITES:
        check_write(hopper, name)
    assert [name for name, _, _ in driver.launches] == [WRITE] * len(WRITES) and not driver.allocated


def test_a_wrong_answer_is_told(hopper, monkeypatch, capsys):
    monkeypatch.setattr(sanitize_decode, "CASES", {"hnd": CASES["hnd"]})
    monkeypatch.setitem(sanitize_decode.TOLERANCE, "float16", 0)
    monkeypatch.setattr(sanitize_decode, "taken", lambda kernel: ["hnd"])
    assert sanitize_decode.main(["tensor"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "tensor: hnd" and told[1].startswith("WRONG, tensor: hnd: Not equal to tolerance")
    assert told[2:] == ["0 of 1 cases are right"]
