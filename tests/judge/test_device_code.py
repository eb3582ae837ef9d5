"""A submission's kernels: what cuobjdump says of them, in results, on the page and in feedback."""

from __future__ import annotations

import json

import pytest
from support import flashcli, script
from test_scoreboard import result

from flashcli.judge import pseudonyms, scoreboard, views
from flashcli.judge.device_code import ProgramKernel, parsed

# What cuobjdump of CUDA 12 prints, with names by c++filt.
PRINTED = """
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function void attend<1024>(float*):
  REG:168 STACK:16 SHARED:5120 LOCAL:8 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function plain:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin ptx code:
================
arch = sm_90

Resource usage:
 Function plain:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_999
 Function plain:
  REG:9 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ATTEND = ProgramKernel("attend<1024>(float*)", "sm_90", 168, 5120, 24, 12.5)


def test_registers_memory_and_occupancy_of_each_kernel_and_architecture():
    """Of 168 registers, 1 block of 8 warps of 64 fits: 65536 / (168 * 256) = 1.5."""
    plain, other = ProgramKernel("plain", "sm_90", 8, 0, 0, 100.0), ProgramKernel("plain", "sm_999", 9, 0, 0, None)
    assert parsed(PRINTED) == [ATTEND, plain, other]


@pytest.mark.parametrize("printed", ["", "no device code\n", "  REG:x STACK:1\n Function :\n", "arch = \nREG:1"])
def test_what_is_no_such_print_out_has_no_kernels(printed):
    assert parsed(printed) == []


def test_they_are_in_results_and_feedback_and_on_the_page(cases, compiled, tmp_path):
    """A script is not looked into, nor is a cuobjdump run outside of the limits that the program has."""
    script(tmp_path / "cuobjdump", f"#!/bin/sh\necho >> {tmp_path}/asked\ncat << 'END'\n{PRINTED}\nEND\n")
    fails = script(tmp_path / "fails", "#!/bin/sh\nexit 1\n")
    results, page = tmp_path / "results.jsonl", tmp_path / "board.html"
    programs = "--exe", f"right={compiled('right')}", "--exe", f"fails={fails}"
    wanted = "--results", results, "--board", page, "--feedback", tmp_path
    flashcli("judge", cases, *programs, *wanted, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    found = {line["submission"]: line["kernels"] for line in map(json.loads, results.read_text().splitlines()[1:])}
    assert found["right"][0] == ATTEND._asdict() and len(found["right"]) == 3 and found["fails"] == []
    assert len((tmp_path / "asked").read_text().splitlines()) == 1, "once for a program"
    assert '<td class="">attend&lt;1024&gt;(float*)</td>' in page.read_text()
    assert "| sm&#95;90 | 168 | 5120 bytes | 24 bytes | 12 % |" in (tmp_path / "right.md").read_text()
    assert "Kernels" not in (tmp_path / "fails.md").read_text()
    before = page.read_text()
    assert flashcli("scoreboard", results, "--board", page).code == 0 and page.read_text() == before


def test_an_anonymous_page_has_no_names_of_kernels():
    shown = pseudonyms.disguised(result("x", "a", 1.0)._replace(kernels=(ATTEND,)), "key")
    assert "attend" not in views.WRITERS[".html"](scoreboard.boards([shown], "passed"))
