"""Paged decode, and writing into its cache, for compute-sanitizer: many small cases in a process without PyTorch.

Usage: python tests/sanitize_decode.py [KERNEL]

Each array has memory of its own, exactly as long as it is, so that memcheck sees what reads beyond; slots that are not
used hold NaN. The answers are compared with float64, but for those to lengths and pages that there are not, which no
kernel may follow. Without a KERNEL it takes all; in any case it compiles all it needs first, on all cores, so that a
run without the tool leaves a cache for those under it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import sanitizing
from sanitizing import allocate, free, get, put

from bench.decode_judge import golden
from flashcli.asked import merge as merging
from flashcli.asked.attention import outline
from flashcli.asked.decode import ARRAYS, LAYOUTS, BlockSparse, cache_shapes
from flashcli.cpu.merge import merge as merge_arrays
from flashcli.cpu.pages import DecodeArrays, WriteKvArrays
from flashcli.cpu.write_kv import write
from flashcli.files.decode.cases import Case, make
from flashcli.files.decode.tensors import dtype
from flashcli.gpu.place import Place, place_of_device
from flashcli.gpu.prepared import Prepared
from flashcli.kernels import decode, merge, write_kv
from flashcli.kernels.decode import CEILING, KERNELS, Problem
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.tuning.decode import HOPPER

WRITE, MERGED = write_kv.KERNEL.name, merge.KERNEL.name
LADDER = {**KERNELS, CEILING.name: CEILING}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}  # times the largest number of the answer
PLAIN = Case(4, 6, 2, 128, "700,5,0,130")  # two pieces, or partitions; part of a page; nothing; a piece
TOLD = "ragged, three query tokens at most"
WIDE = "more of them than run at once, wide tables"
CASES = {
    **{layout: dataclasses.replace(PLAIN, layout=layout) for layout in LAYOUTS},
    **{f"e4m3, {layout}": dataclasses.replace(PLAIN, layout=layout, cache_type="float8_e4m3fn") for layout in LAYOUTS},
    "e5m2": dataclasses.replace(PLAIN, layout="nhd", cache_type="float8_e5m2"),
    "int8": dataclasses.replace(PLAIN, cache_type="int8"),
    "int8, bfloat16, hnd": dataclasses.replace(PLAIN, layout="hnd", cache_type="int8", query_type="bfloat16"),
    "bfloat16": dataclasses.replace(PLAIN, query_type="bfloat16", layout="hnd"),
    "float32": dataclasses.replace(PLAIN, query_type="float32"),
    "float32, hnd": dataclasses.replace(PLAIN, query_type="float32", layout="hnd"),
    "heads of 32": dataclasses.replace(PLAIN, D=32, page=8),
    "heads of 80": dataclasses.replace(PLAIN, D=80, layout="nhd"),
    "heads of 256": dataclasses.replace(PLAIN, D=256, layout="hnd"),
    "pages of 1": dataclasses.replace(PLAIN, page=1, lengths="40,5,0,13"),
    "pages of 64": dataclasses.replace(PLAIN, page=64, layout="nhd"),
    "pages of 64, vllm": dataclasses.replace(PLAIN, page=64, window=50),
    "float32, int8, pages of 4": dataclasses.replace(PLAIN, page=4, query_type="float32", cache_type="int8"),
    "seventeen heads on one": dataclasses.replace(PLAIN, H=17, Hkv=1),
    "three tokens": dataclasses.replace(PLAIN, T=3, alibi=True),
    "eight tokens, a window": dataclasses.replace(PLAIN, T=8, window=50, layout="hnd"),
    "many sequences": Case(150, 2, 1, 128, "700,5x148,600", layout="hnd"),
    # more pieces than tensor's blocks at a time, a block for each that there may be
    "more of them than run at once": Case(300, 2, 1, 128, "700,5x298,600", layout="hnd"),
    "more of them than run at once, vllm": Case(300, 2, 1, 128, "700,0x298,600"),
    "more of them than run at once, heads of 64": Case(300, 2, 1, 64, "1100,5x298,600", layout="nhd"),
    # many may be missing, so that tensor's blocks take piece after piece
    WIDE: Case(430, 2, 1, 128, "700,5x428,600", layout="hnd"),
    f"{WIDE}, vllm": Case(430, 2, 1, 128, "700,0x428,600"),
    f"{WIDE}, e4m3": Case(560, 2, 1, 128, "1100,5x558,600", layout="nhd", cache_type="float8_e4m3fn"),
    "clusters of four, some blocks without a piece": dataclasses.replace(PLAIN, lengths="1100,5,0,600", layout="nhd"),
    "rows that fill no block of those that merge": Case(35, 5, 1, 128, "700,5x33,1100", layout="nhd"),
    "more than eight pieces": Case(2, 2, 1, 128, "4000,600", layout="hnd"),
    "more than eight pieces, heads of 80": Case(2, 3, 1, 80, "9000,1", layout="nhd"),
    "ragged": dataclasses.replace(PLAIN, lengths="700,5,0,130", queries="3,1,1,9"),
    TOLD: dataclasses.replace(PLAIN, lengths="700,5,0,1100", queries="3,1,0,3", layout="nhd"),
    "ragged, a window, hnd": dataclasses.replace(PLAIN, queries="0,7,2,40", window=50, layout="hnd"),
    "ragged, more than run at once": Case(3, 2, 1, 128, "700,400,600", queries="20,380,200", layout="hnd"),
    "ragged, bfloat16, block-sparse": dataclasses.replace(
        PLAIN, queries="3,2,0,4", query_type="bfloat16", layout="nhd", sparse=BlockSparse(3, 32, 1, -1, 1)
    ),
    "ragged, all see all": dataclasses.replace(PLAIN, queries="9,2,1,4", causal=False, layout="hnd"),
    "ragged, heads of 8": dataclasses.replace(PLAIN, D=8, queries="40,1,0,90", layout="nhd"),
    "ragged, heads of 16, e4m3": dataclasses.replace(PLAIN, D=16, queries="40,1,0,90", cache_type="float8_e4m3fn"),
    "float32, ragged": dataclasses.replace(PLAIN, queries="40,1,0,90", query_type="float32", layout="nhd"),
    "float32, ragged, int8, a window": dataclasses.replace(
        PLAIN, queries="9,0,20,8", query_type="float32", cache_type="int8", window=50, alibi=True
    ),
    "softcap and sinks": dataclasses.replace(PLAIN, softcap=4.0, sinks=True, alibi=True),
    "softcap and sinks, float32, ragged": dataclasses.replace(
        PLAIN, queries="2,0,1,5", softcap=4.0, sinks=True, query_type="float32"
    ),
    "sinks, clusters of four": dataclasses.replace(PLAIN, lengths="1100,5,0,600", layout="nhd", sinks=True),
    "block-sparse": dataclasses.replace(PLAIN, sparse=BlockSparse(3, 32, 1, -1, 1)),
}
RUBBISH = {  # by what they are made of
    "lengths and pages that there are not": PLAIN,
    # few pages: gather takes as many keys as a row of the table has room for
    "lengths, pages and query tokens that there are not": dataclasses.replace(
        CASES["float32, ragged"], lengths="170,5,0,130"
    ),
}


def asked_for(name: str) -> DecodeArrays:
    if name.startswith(WIDE):
        asked = make(CASES[name])
        tables = np.pad(asked.block_tables, ((0, 0), (0, 17 * 1024 // asked.page)), constant_values=-1)
        return dataclasses.replace(asked, block_tables=tables)
    if name == TOLD:
        return dataclasses.replace(make(CASES[name]), max_query_len=3)
    if name not in RUBBISH:
        return make(CASES[name])
    asked = make(RUBBISH[name])
    asked.block_tables[0, ::3], asked.block_tables[3] = 10**6, -7
    asked.seq_lens[...] = 2**31 - 1, -5, 9, 130
    if asked.is_ragged:
        asked.query_starts[...] = -3, 2**31 - 1, 40, 7, 10**6
    return asked


# ---- the ladder


def takes(kernel: str, case: Case) -> bool:
    """Whether a kernel takes a case, which its lengths do not decide."""
    return not LADDER[kernel].refuses(
        build_of(kernel, make(dataclasses.replace(case, S=1, lengths="1", queries=case.queries and "1"))).problem
    )


def taken(kernel: str) -> Iterator[str]:
    """The names of the cases that a kernel takes."""
    return (name for name, case in {**CASES, **RUBBISH}.items() if takes(kernel, case))


def build_of(kernel: str, asked: DecodeArrays, gpu: Gpu = HOPPER) -> Build:
    return decode.build_of(LADDER[kernel], asked.outline, gpu)


def check(place: Place, kernel: str, name: str) -> None:
    """Compute it and compare it with float64; AssertionError says what is wrong."""
    asked = asked_for(name)
    plan = decode.plan_of(build_of(kernel, asked, place.gpu), asked.outline)
    prepared = Prepared(place, decode.DECODE, plan)
    shape = asked.query.shape if name in RUBBISH else asked.shape_of(range(asked.S))  # not of 10**6 query tokens
    out = np.full(shape, np.nan, asked.query.dtype)
    lse = np.full(out.shape[:-1], np.nan, np.float32)
    arrays = {name: getattr(asked, name) for name in ARRAYS}
    with place.current():
        memory = {name: put(_bytes(array)) for name, array in arrays.items() if array is not None}
        # What nobody has written yet, for initcheck to see who reads it.
        memory |= {"out": allocate(out.nbytes), "lse": allocate(lse.nbytes), "workspace": allocate(prepared.workspace)}
        prepared.launch(0, *(memory.get(name, 0) for name in decode.POINTERS))
        if has_answer := kernel != CEILING.name and name not in RUBBISH:
            get(_bytes(out), memory["out"])
            get(lse, memory["lse"])
        free(memory.values())
    if has_answer:
        want = golden(asked)
        largest = float(np.abs(want.out).max())
        bound = TOLERANCE[asked.query.dtype.name] * largest
        np.testing.assert_allclose(out.astype(np.float64), want.out, rtol=0, atol=bound, err_msg="out")
        np.testing.assert_allclose(lse, want.lse, rtol=1e-3, atol=1e-3, err_msg="LSE")


# ---- writing

WRITES = {f"{key}, {cache}, {layout}": (key, cache, layout) for layout in LAYOUTS for key, cache in (
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "float8_e4m3fn"), ("float32", "float8_e5m2"),
    ("bfloat16", "int8"),
)}  # fmt: skip


def to_write(name: str, slots: Iterable[int] = (5, -1, 39, 8, 0)) -> WriteKvArrays:
    """Five tokens of three heads of 80 for five pages of eight slots."""
    key, cache, layout = WRITES[name]
    rows = np.random.default_rng(0).normal(size=(2, 5, 3, 80)).astype(dtype(key))
    caches = (np.full(shape, 7, dtype(cache)) for shape in cache_shapes(layout, 5, 3, 8, 80, dtype(cache).itemsize))
    return WriteKvArrays(*rows, *caches, np.array(slots), 0.3, 3.0, layout)


def check_write(place: Place, name: str) -> None:
    """Write what NumPy does; AssertionError says what is wrong."""
    asked, want = to_write(name, (40, -1, 39, 2**40, 0)), to_write(name, (-1, -1, 39, -1, 0))
    write(want)
    prepared = Prepared(place, write_kv.WRITE_KV, write_kv.plan(asked.outline, place.gpu))
    with place.current():
        memory = {name: put(_bytes(getattr(asked, name))) for name in write_kv.POINTERS[:5]}
        prepared.launch(0, *(memory.get(name, 0) for name in write_kv.POINTERS))
        for cache in ("key_cache", "value_cache"):
            get(_bytes(getattr(asked, cache)), memory[cache])
            np.testing.assert_array_equal(_bytes(getattr(asked, cache)), _bytes(getattr(want, cache)), err_msg=cache)
        free(memory.values())


# ---- merging

MERGES = ("float32", "float16", "bfloat16")


def check_merge(place: Place, kind: str) -> None:
    """Merge three parts, of which one has seen nothing and holds NaN; AssertionError says what is wrong."""
    rng = np.random.default_rng(0)
    outs = [rng.normal(size=(5, 3, 80)).astype(dtype(kind)) for _ in range(3)]
    lses = [1000 + rng.normal(size=(5, 3)).astype(np.float32) * 3 for _ in range(3)]
    lses[1][2], outs[1][2] = -np.inf, np.nan
    for lse in lses:
        lse[4, 1] = -np.inf
    want = merge_arrays(outs, lses)
    asked = merging.ask(tuple(map(outline, outs)), tuple(map(outline, lses)))
    prepared = Prepared(place, merge.MERGE, merge.plan(asked, place.gpu))
    got = np.full_like(want[0], np.nan), np.full_like(want[1], np.nan)
    with place.current():
        given = {f"{name}[{i}]": x for name, some in (("outs", outs), ("lses", lses)) for i, x in enumerate(some)}
        memory = {name: put(_bytes(x)) for name, x in given.items()}
        memory |= {name: allocate(x.nbytes) for name, x in zip(("out", "lse"), got, strict=True)}
        prepared.launch(0, *(memory.get(name, 0) for name in merge.POINTERS))
        get(_bytes(got[0]), memory["out"])
        get(got[1], memory["lse"])
        free(memory.values())
    close = {"rtol": TOLERANCE[kind], "atol": TOLERANCE[kind]}
    np.testing.assert_allclose(got[0].astype(np.float32), want[0].astype(np.float32), **close, err_msg="out")
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5, err_msg="LSE")


# ---- all


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def compile_all(place: Place, cases: list[tuple[str, str]]) -> None:
    """Leave the code of all of these kernels and cases in the cache."""
    written = [write_kv.plan(to_write(name).outline, place.gpu) for kernel, name in cases if kernel == WRITE]
    builds = {build for plan in written for build in plan.builds()}
    builds |= {Build(merge.KERNEL, Problem(80, 1, name, name, False)) for kernel, name in cases if kernel == MERGED}
    for kernel, name in cases:
        if kernel in LADDER:
            asked = asked_for(name)
            builds |= {*decode.plan_of(build_of(kernel, asked, place.gpu), asked.outline).builds()}
    sanitizing.compile_all(place, builds)


def main(kernels: list[str]) -> int:
    place = place_of_device(0)
    cases = [
        (kernel, name)
        for kernel in kernels or [*LADDER, WRITE, MERGED]
        for name in (taken(kernel) if kernel in LADDER else {WRITE: WRITES, MERGED: MERGES}[kernel])
    ]
    compile_all(place, cases)

    def checked(kernel: str, name: str) -> None:
        others = {WRITE: check_write, MERGED: check_merge}
        others[kernel](place, name) if kernel in others else check(place, kernel, name)

    return sanitizing.run(cases, checked)


if __name__ == "__main__":
    sanitizing.end(main)
