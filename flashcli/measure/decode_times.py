"""How fast is paged decode? Kernels, PyTorch's attention without pages, and the floor, each with cold caches."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashcli.asked.decode import Decode
from flashcli.cpu.decode import DecodeCpu
from flashcli.cpu.pages import DecodeArrays
from flashcli.errors import FlashError
from flashcli.files.decode.cases import Case, outlined
from flashcli.kernels import decode
from flashcli.kernels.decode import CEILING
from flashcli.kernels.operation import Build, Kernel
from flashcli.measure.builds import compile_all
from flashcli.measure.decode_arrays import Drawn, OnDevice, sampled, tokens_of, wanted_of
from flashcli.measure.peers import event_seconds
from flashcli.measure.rows import Decoded, Failure, Row, Skipped, over_all

RUNS = 20
WARM_UP = 0.03  # seconds: after a pause, kernels take up to an eighth longer for some milliseconds
CACHE_FLUSH = 2**30  # bytes read between two runs: longer than the host takes to queue what is timed
WRONG = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # a relative L2 that no right answer comes near
Ways = Mapping[str, Callable[[Decode], Build]]  # to compute what is asked, by the names of rows


def ways(kernels: Iterable[Kernel]) -> Ways:
    """Each kernel, as it is built if nobody says how."""
    return {kernel.name: functools.partial(decode.build_of, kernel) for kernel in kernels}


def seconds(work: Callable[[], object], runs: int) -> list[float]:
    """Seconds of so many runs, each with cold caches, after a first one and `WARM_UP` that are not timed.

    The second-level cache is filled by reading: had it been written to, what is timed would wait for that to be stored.
    """
    import torch

    flush = torch.zeros(CACHE_FLUSH // 4, device="cuda")
    event_seconds(flush.sum, work)
    warm = time.perf_counter() + WARM_UP
    while time.perf_counter() < warm:
        event_seconds(flush.sum, work)
    return [event_seconds(flush.sum, work)[0] for _ in range(runs)]


def times(
    contenders: Ways, cases: Mapping[str, Case], layouts: Collection[str], peers: bool, runs: int = RUNS, seed: int = 0
) -> Iterator[Row]:
    """A row for each case, layout and contender; peers once a case."""
    import torch

    drawn = [(name, replace(case, layout=layout, seed=seed)) for name, case in cases.items() for layout in layouts]
    asked = [outlined(case).outline for _, case in drawn]
    compile_all(build(one) for build, one in itertools.product(contenders.values(), asked))
    for name, case in drawn:
        yield from times_of(Drawn(name, case), contenders, peers and case.layout == next(iter(layouts)), runs)
        torch.cuda.empty_cache()


def times_of(given: OnDevice, contenders: Ways, peers: bool, runs: int = RUNS) -> Iterator[Row]:
    """A row for each contender, and for the peers that compute the same."""
    for name, build in contenders.items():
        yield _of_ours(name, build(given.asked.outline), given, runs)
    if peers and (arrays := given.without_pages()):
        yield from _of_torch(arrays, given, runs)


def about(name: str, asked: DecodeArrays, contender: str) -> dict[str, Any]:
    """The beginning of a row."""
    return {"case": name, "B": asked.S, "N": asked.longest, "d": asked.D, "contender": contender}


def timed(name: str, asked: DecodeArrays, contender: str, seconds: list[float], error: float | None = None) -> Decoded:
    figures = over_all(seconds) | {"bytes": asked.used_bytes(), "relative_l2": error}
    return Decoded(**about(name, asked, contender), H=asked.H, layout=asked.layout, **figures)


def _of_ours(name: str, build: Build, given: OnDevice, runs: int) -> Row:
    """The row of a kernel, launched as a call does: its seconds and its error, or why it was skipped."""
    import torch

    start = about(given.name, given.asked, name)
    if reason := build.kernel.refuses(build.problem):
        return Skipped(**start, skipped=reason)
    given.tensors["out"].fill_(float("nan"))
    try:
        prepared = given.prepared(build)
        workspace = torch.zeros(prepared.workspace, dtype=torch.uint8, device="cuda")  # as counters are to be
        stream, addresses = torch.cuda.current_stream().cuda_stream, given.addresses(workspace.data_ptr())
        found = seconds(lambda: prepared.launch(stream, *addresses), runs)
    except FlashError as error:
        return Skipped(**start, skipped=str(error))
    off = None if build.kernel is CEILING else given.error()
    if off is not None and not off < WRONG[given.asked.query.dtype.name]:
        return Failure(**start, relative_l2=off, error=f"the answer is wrong: relative L2 {off:.1e}")
    return timed(given.name, given.asked, name, found, off)


def _of_torch(arrays: tuple[Any, ...], given: OnDevice, runs: int) -> Iterator[Row]:
    """PyTorch's attention on the same keys and values without pages: what paging costs is not in it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    query, keys, values = arrays
    ways = {"PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION, "PyTorch flash": SDPBackend.FLASH_ATTENTION}
    for name, way in ways.items():

        def attend(way: Any = way) -> Any:
            with sdpa_kernel(way):
                return scaled_dot_product_attention(query, keys, values, scale=given.asked.scale, enable_gqa=True)

        try:
            yield timed(given.name, given.asked, name, seconds(attend, runs))
        except RuntimeError as error:
            told = str(error).splitlines()[0][:80]
            yield Skipped(**about(given.name, given.asked, name), skipped=told)


def on_cpu(name: str, asked: DecodeArrays, threads: int | None, runs: int) -> Row:
    """The row of the CPU backend, after a run that is not timed."""
    found = []
    with DecodeCpu(threads) as backend:
        for _ in range(runs + 1):
            start = time.perf_counter()
            out, _ = backend.decode(asked, range(asked.S))
            found.append(time.perf_counter() - start)
    some = sampled(asked)
    want = np.concatenate([wanted_of(asked, s) for s in some])
    rows = np.concatenate([asked.starts[s] + tokens_of(asked, s) for s in some])
    got = out.reshape(-1, asked.H, asked.D)[rows].astype(np.float64)
    off = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-300))
    if not off < WRONG[asked.query.dtype.name]:
        told = f"the answer is wrong: relative L2 {off:.1e}"
        return Failure(**about(name, asked, "flashcli cpu"), relative_l2=off, error=told)
    return timed(name, asked, "flashcli cpu", found[1:], off)
