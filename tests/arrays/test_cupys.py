"""Paged decode of CuPy's arrays: a CuPy and a driver that are fakes, for which the CPU's memory is a GPU's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_driver import FromDlpack, OnGpu, WithoutAStream

import flashcli
from flashcli.arrays import on_gpu
from flashcli.cpu.decode import DecodeCpu
from flashcli.cpu.pages import DecodeArrays
from flashcli.files.decode.cases import Case, make

SMALL = Case(3, 4, 2, 64, "5,37,0", page=8)
STREAM = 7


@pytest.fixture
def cupy(monkeypatch, driver):
    """``cupy(array)`` is CuPy's array of NumPy's."""
    driver.capability = 9, 0

    class Array(OnGpu):
        @property
        def shape(self):
            return self.array.shape

        @property
        def dtype(self):
            return self.array.dtype

        device = SimpleNamespace(id=0)

        @property
        def data(self):
            return SimpleNamespace(ptr=self.array.ctypes.data)

    Array.__module__ = "cupy"
    Array.__name__ = "ndarray"
    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=STREAM), Device=lambda device: contextlib.nullcontext()
    )
    fake = SimpleNamespace(empty=lambda shape, dtype: Array(driver, np.empty(shape, dtype)), cuda=cuda, ndarray=Array)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return lambda array, **options: Array(driver, array.copy(), **options)


def arrays(asked: DecodeArrays) -> dict[str, np.ndarray]:
    names = "query", "key_cache", "value_cache", "block_tables", "seq_lens"
    return {name: getattr(asked, name) for name in names}


def check(got, asked: DecodeArrays) -> None:
    with DecodeCpu(1) as backend:
        want, want_lse = backend.decode(asked, range(asked.S))
    np.testing.assert_allclose(got[0].array, want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got[1].array, want_lse, rtol=1e-3)


@pytest.mark.parametrize("query_type", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["vllm", "nhd"])
def test_cupys_arrays_are_read_where_they_lie_on_its_stream(cupy, driver, query_type, layout):
    asked = make(dataclasses.replace(SMALL, query_type=query_type, layout=layout))
    given = {name: cupy(x) for name, x in arrays(asked).items()}
    check(flashcli.decode(**given, layout=layout, return_lse=True), asked)
    assert {stream for _, stream, _ in driver.launches} == {STREAM}


def test_bytes_are_fp8_if_the_caller_says_so_and_scales_may_be_arrays(cupy):
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e5m2"))
    asked = dataclasses.replace(asked, k_scale=0.5, v_scale=3.0)
    given = arrays(asked)
    given |= {name: given[name].view(np.uint8) for name in ("key_cache", "value_cache")}
    scale = cupy(np.array([3.0], np.float32))
    given = {name: cupy(x) for name, x in given.items()}
    check(flashcli.decode(**given, cache_dtype="float8_e5m2", k_scale=0.5, v_scale=scale, return_lse=True), asked)


def test_ragged_queries_have_a_row_for_each_token(cupy):
    asked = make(dataclasses.replace(SMALL, queries="3,0,2", softcap=2.0, sinks=True))
    given = arrays(asked) | {"query": asked.query[:, 0], "query_starts": asked.query_starts, "sinks": asked.sinks}
    given = {name: cupy(x) for name, x in given.items()}
    check(flashcli.decode(**given, softcap=2.0, return_lse=True), asked)


def test_factors_of_a_cache_that_is_not_fp8_are_ignored(cupy):
    asked = make(SMALL)
    given = {name: cupy(x) for name, x in arrays(asked).items()}
    factors = {"k_scale": cupy(np.array([7.0], np.float32)), "v_scale": 2.0}
    check(flashcli.decode(**given, **factors, return_lse=True), asked)


def test_what_somebody_else_still_fills_is_waited_for(cupy, driver):
    given = {name: cupy(x, stream=9 if name == "seq_lens" else None) for name, x in arrays(make(SMALL)).items()}
    flashcli.decode(**given)
    assert driver.waits == [(STREAM, 9)]


def test_what_does_not_say_when_it_is_ready_is_to_be_on_cupys_stream_and_is_kept_until_it_has_been_read(
    cupy, driver, monkeypatch
):
    kept = []
    monkeypatch.setattr(driver, "cuEventQuery", lambda event: (600,))
    monkeypatch.setattr(on_gpu, "_unread", kept)
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e5m2"))
    scale = WithoutAStream(cupy(np.array([asked.v_scale], np.float32)))
    given = arrays(asked)
    given |= {name: given[name].view(np.uint8) for name in ("key_cache", "value_cache")}
    given = {name: cupy(x) for name, x in given.items()}
    options = {"cache_dtype": "float8_e5m2", "k_scale": asked.k_scale, "v_scale": scale, "return_lse": True}
    check(flashcli.decode(**given, **options), asked)
    assert scale.streams == [STREAM] and [len(owners) for _, owners in kept] == [1]


def test_what_is_on_the_cpu_is_refused(cupy):
    host = arrays(make(SMALL))
    given = {name: cupy(x) for name, x in host.items()}
    with pytest.raises(TypeError, match="seq_lens must be an array on a GPU, but it is on the CPU"):
        flashcli.decode(**given | {"seq_lens": host["seq_lens"]})


@pytest.mark.parametrize("query_type", ["float32", "float16", "bfloat16"])
def test_arrays_of_any_library_are_decoded_where_they_lie(driver, query_type):
    driver.capability = 9, 0
    asked = make(dataclasses.replace(SMALL, query_type=query_type, layout="hnd"))
    given = {name: FromDlpack(OnGpu(driver, x.copy())) for name, x in arrays(asked).items()}
    out, lse = flashcli.decode(**given, layout="hnd", return_lse=True)
    with DecodeCpu(1) as backend:
        want, want_lse = backend.decode(asked, range(asked.S))
    assert (out.dtype, out.shape) == (query_type, want.shape)
    got = np.ctypeslib.as_array((ctypes.c_uint8 * want.nbytes).from_address(out.address)).view(want.dtype)
    np.testing.assert_allclose(got.reshape(want.shape).astype(float), want.astype(float), rtol=2e-2, atol=2e-2)
    assert lse.shape == want_lse.shape and hasattr(out, "__cuda_array_interface__") == (query_type != "bfloat16")
    driver.launches.clear()
    flashcli.decode(**given, layout="hnd", kernel="split")
    assert [name for name, *_ in driver.launches] == ["split"]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_merges_pieces_begins_early_on_hopper_alone(driver, capability):
    driver.capability = capability
    asked = make(dataclasses.replace(SMALL, lengths="40000,3,5", layout="hnd"))
    given = {name: OnGpu(driver, x) for name, x in arrays(asked).items()}
    flashcli.decode(**given, layout="hnd", kernel="tensor")
    assert [name for name, *_ in driver.launches] == ["tensor", "merge"]
    assert driver.early == [False, capability == (9, 0)]


def test_arrays_of_any_library_are_written_where_they_lie(driver):
    asked = make(SMALL)
    rows = np.random.default_rng(0).normal(size=(2, 3, 2, 64)).astype(np.float16)
    caches, slots = [asked.key_cache, asked.value_cache], np.array([9, -1, 3])
    there = [OnGpu(driver, x.copy()) for x in (*rows, *caches, slots)]
    flashcli.write_kv(*there)
    flashcli.write_kv(*rows, *caches, slots)
    for array, want in zip(there[2:4], caches, strict=True):
        np.testing.assert_array_equal(array.array, want)


@pytest.mark.parametrize("layout", ["vllm", "hnd"])
def test_cupys_arrays_are_written_where_they_lie_on_its_stream(cupy, driver, layout):
    asked = make(dataclasses.replace(SMALL, layout=layout))
    rows = np.random.default_rng(0).normal(size=(2, 3, 2, 64)).astype(np.float16)
    caches, slots = [asked.key_cache, asked.value_cache], np.array([9, -1, 3])
    there = [cupy(x) for x in (*rows, *caches, slots)]
    flashcli.write_kv(*there, layout=layout)
    flashcli.write_kv(*rows, *caches, slots, layout=layout)
    for array, want in zip(there[2:4], caches, strict=True):
        np.testing.assert_array_equal(array.array, want)
    assert driver.launches == [("write_kv", STREAM, 1000)]
    with pytest.raises(TypeError, match="slot_mapping must be an array on a GPU, but it is on the CPU"):
        flashcli.write_kv(*there[:4], slots, layout=layout)


def parts() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return list(rng.normal(size=(3, 5, 2, 64)).astype(np.float16)), list(rng.normal(size=(3, 5, 2)).astype(np.float32))


def test_cupys_arrays_are_merged_where_they_lie_on_its_stream(cupy, driver):
    outs, lses = parts()
    out, lse = flashcli.merge([cupy(x) for x in outs], [cupy(x) for x in lses])
    want = flashcli.merge(outs, lses)
    np.testing.assert_array_equal(out.array, want[0])
    np.testing.assert_array_equal(lse.array, want[1])
    assert driver.launches == [("merge_answers", STREAM, 1000)]
    with pytest.raises(ValueError, match=r"outs\[1\] has strides .*: give a contiguous copy"):
        wide = cupy(np.concatenate(outs[:2], axis=2))
        flashcli.merge([cupy(outs[0]), strided(wide)], [cupy(x) for x in lses[:2]])


def strided(wide):
    """Every other number's row of an array that is twice as wide."""
    wide.array = wide.array[..., :64]
    return wide


@pytest.mark.gpu
def test_a_gpu_merges_what_numpy_does():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    outs, lses = parts()
    got = flashcli.merge([cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses])
    for found, want in zip(got, flashcli.merge(outs, lses), strict=True):
        np.testing.assert_allclose(found.get().astype(np.float32), want.astype(np.float32), rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["vllm", "nhd", "hnd"])
def test_a_gpu_writes_and_reads_what_numpy_does(layout):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("CuPy finds no GPU")
    asked = make(dataclasses.replace(SMALL, layout=layout, lengths="5,1037,0"))
    rows = np.random.default_rng(0).normal(size=(2, 3, 2, 64)).astype(np.float16)
    table = asked.block_tables[1]
    caches, slots = (asked.key_cache, asked.value_cache), np.array([int(table[0]) * 8, -1, int(table[9]) * 8 + 7])
    there = [cupy.asarray(x) for x in caches]
    with cupy.cuda.Stream():
        flashcli.write_kv(*map(cupy.asarray, rows), *there, cupy.asarray(slots), layout=layout)
        given = {name: cupy.asarray(x) for name, x in arrays(asked).items()}
        given |= dict(zip(("key_cache", "value_cache"), there, strict=True))
        found = [x.get() for x in flashcli.decode(**given, layout=layout, return_lse=True)]
    flashcli.write_kv(*rows, *caches, slots, layout=layout)
    for array, want in zip(there, caches, strict=True):
        np.testing.assert_array_equal(array.get(), want)
    check([SimpleNamespace(array=x) for x in found], asked)
