"""Paged decode by PyCUDA, for arrays in the host's memory, with a PyCUDA that computes in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from paged_oracle import oracle

from flashcli.cpu.pages import DecodeArrays
from flashcli.errors import KernelFailure, OutOfMemory, UsageError
from flashcli.files.decode.cases import Case, make
from flashcli.run.decode_cuda import SPARE, DecodeCuda

SMALL = Case(3, 4, 2, 32, "5,37,0", page=8)


def check(asked: DecodeArrays, got: tuple[np.ndarray, np.ndarray], sequences: range) -> None:
    some = slice(sequences.start, sequences.stop)
    for mine, right in zip(got, oracle(asked), strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), right[some], rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"query_type": "float32", "alibi": True, "window": 9}, {"layout": "nhd", "T": 3},
        {"layout": "hnd", "query_type": "bfloat16", "pages": "shared"},
    ],
    ids=str,
)  # fmt: skip
def test_the_answer_is_that_of_the_caches_on_the_device(fake_gpu, changes):
    asked = make(dataclasses.replace(SMALL, **changes))
    with DecodeCuda() as backend:
        check(asked, backend.decode(asked, range(3)), range(3))
        check(asked, backend.decode(asked, range(1, 2)), range(1, 2))
        details = backend.details()
    assert details["device"] == "Fake GPU" and details["kernel"] in backend.description
    assert details["kernel"] == ("grouped" if changes.get("query_type") == "float32" else "tensor")


def test_a_cache_that_does_not_fit_goes_there_by_the_pages_of_a_group(fake_gpu, monkeypatch):
    asked = make(dataclasses.replace(SMALL, lengths="40,9,300"))
    whole = asked.key_cache.nbytes + asked.value_cache.nbytes
    monkeypatch.setattr(fake_gpu, "_TOTAL", 2 * SPARE + whole // 2)
    with DecodeCuda("grouped") as backend:
        assert backend.at_once < whole
        check(asked, backend.decode(asked, range(2)), range(2))
        empty = dataclasses.replace(asked, seq_lens=asked.seq_lens * 0)
        check(empty, backend.decode(empty, range(3)), range(3))


def test_what_goes_wrong_on_the_device_is_told(fake_gpu, monkeypatch):
    asked = make(SMALL)
    with DecodeCuda() as backend:
        monkeypatch.setenv("FAKE_GPU_FAILS", "launch")
        with pytest.raises(KernelFailure, match="kernel tensor failed: fake failure of launch"):
            backend.decode(asked, range(3))
        monkeypatch.setattr(fake_gpu, "_TOTAL", 1000)
        with pytest.raises(OutOfMemory, match="the pages of sequences 1 to 2 do not fit"):
            backend.decode(asked, range(1, 3))
    with pytest.raises(UsageError, match="there is no kernel 'x'"):
        DecodeCuda("x")
