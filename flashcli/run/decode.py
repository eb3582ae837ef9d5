"""Paged decode from a file to a file, and of arrays in memory, by an open backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from flashcli.cpu.pages import DecodeArrays
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.decode.tensors import create_answer, read_decode
from flashcli.files.outputs import check_distinct
from flashcli.process import mapped
from flashcli.run import decode_finite
from flashcli.run.report import PHASES, seconds_since_process_start
from flashcli.run.timeline import Timeline

AT_ONCE = 2**28  # bytes of keys and values that the CPU is given at a time, for progress to show


def open_backend(
    name: str, threads: int | None = None, kernel: str | None = None, notice: Callable[[str], None] = lambda text: None
) -> AbstractContextManager:
    """A backend for paged decode. "auto" is the GPU if there is a usable one or a kernel is named, else the CPU."""
    if name != "cpu":
        try:
            from flashcli.run.decode_cuda import DecodeCuda

            return DecodeCuda(kernel)
        except BackendUnavailable as error:
            if name == "cuda" or kernel is not None:
                raise
            notice(f"no usable GPU, computing on the CPU: {error}")
    from flashcli.cpu.decode import DecodeCpu

    return DecodeCpu(threads)


def check_kernel(name: str, kernel: str | None, spelled: str = "kernel") -> None:
    """Raise UsageError where a kernel is named for the CPU, in words in which the option is ``spelled`` so."""
    if kernel is not None and name == "cpu":
        raise UsageError(f"{spelled} is for GPUs, not for the cpu backend.", f"leave out {spelled}.")


def run(
    input_path: str | os.PathLike,
    output_path: str | os.PathLike,
    opener: Callable[[], AbstractContextManager],
    progress: Callable[[int], AbstractContextManager] = lambda total: nullcontext(lambda count: None),
    notice: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Decode one file into another; returns the record of what was done and how long it took.

    ``progress(total)``, in bytes of keys and values, is a context manager that gives a function to call with the bytes
    done since the last call. ``notice`` is told of names in the file that mean nothing, ``warn`` of NaN and Inf.
    """
    timeline = Timeline()
    check_distinct(input_path, output_path)
    with timeline.measure("input"):
        asked, query_shape = read_decode(input_path, notice)
    with create_answer(output_path, asked.query.dtype.name, query_shape, asked.is_ragged) as sink:
        with timeline.measure("computation"):
            opened = opener()
        starts, lse = asked.starts.tolist(), np.empty((asked.total, asked.H), np.float32)
        if warned := decode_finite.in_query(asked):
            warn(f"{input_path} {warned}")
        used = asked.used_bytes_each().tolist()
        with opened as backend, progress(sum(used)) as tell:
            for sequences in groups(asked, getattr(backend, "at_once", AT_ONCE)):
                with timeline.measure("computation"):
                    out, some = backend.decode(asked, sequences)
                    lse[starts[sequences.start] : starts[sequences.stop]] = some.reshape(-1, asked.H)
                with timeline.measure("output"):
                    sink.write("out", out, starts[sequences.start] * asked.H * asked.D)
                if not warned and (warned := decode_finite.behind_answer(asked, sequences, out)):
                    warn(f"{input_path} {warned}")
                tell(sum(used[sequences.start : sequences.stop]))
            details = {"description": backend.description, **backend.details()}
        with timeline.measure("output"):
            sink.write("lse", lse)
            mapped.check()
            sink.commit()
    phases = {phase: timeline.active(phase) for phase in PHASES}
    return {**what(asked), "total": seconds_since_process_start(), **phases, **details}


def groups(asked: DecodeArrays, most: int) -> list[range]:
    """Consecutive ranges of sequences that use at most so many bytes of the cache each, but at least one sequence."""
    found, first, size = [], 0, 0
    for s, more in enumerate(asked.used_bytes_each().tolist()):
        if s > first and size + more > most:
            found.append(range(first, s))
            first, size = s, 0
        size += more
    return [*found, range(first, asked.S)]


def what(asked: DecodeArrays) -> dict[str, object]:
    """The record's figures of a paged decode: its sizes, types and options."""
    lengths = asked.seq_lens
    return {
        "S": asked.S, "T": asked.T, "query_tokens": asked.total, "ragged": asked.is_ragged, "H": asked.H,
        "Hkv": asked.Hkv, "D": asked.D, "page": asked.page,
        "pages": asked.pages, "layout": asked.layout, "query_type": asked.query.dtype.name,
        "cache_type": asked.key_cache.dtype.name, "shortest": int(lengths.min()), "longest": int(lengths.max()),
        "tokens": int(lengths.astype(np.int64).sum()), "cache_bytes": asked.used_bytes(),
        "scale": asked.scale, "k_scale": asked.k_scale, "v_scale": asked.v_scale, "sliding_window": asked.window,
        "alibi": asked.alibi_slopes is not None, "softcap": asked.softcap, "sinks": asked.sinks is not None,
        "causal": asked.causal, "block_sparse": asked.sparse and vars(asked.sparse),
    }  # fmt: skip


def sizes(record: dict[str, Any]) -> str:
    """The line of a record's sizes; ragged queries have no T that all sequences share."""
    if record["ragged"]:
        return "(S, H, Hkv, D): ({S}, {H}, {Hkv}, {D}), {query_tokens} query tokens".format(**record)
    return "(S, T, H, Hkv, D): ({S}, {T}, {H}, {Hkv}, {D})".format(**record)


def report(record: dict[str, Any]) -> str:
    """The record as text, in the manner of the report of `run`."""
    lines = [
        sizes(record),
        f"Total Time: {record['total']:.3f} seconds",
        *(f"{label}: {record[phase]:.3f} seconds" for phase, label in PHASES.items()),
        f"backend: {record['description']}",
        "cache: {tokens} tokens of {cache_type}, {shortest} to {longest} a sequence, in pages of {page} "
        "({layout})".format(**record),
    ]
    if seconds := record.get("kernel_seconds"):
        lines.append(
            f"kernel: {seconds * 1e6:.1f} us, {record['cache_bytes'] / seconds / 1e9:.0f} GB/s of keys and values"
        )
    return "\n".join(lines)
