"""Every kernel compiled for every architecture that it claims: which is chosen there, and what each takes of it.

``make compile-all`` runs it, and needs no GPU. Where nvcc is too new for an architecture, NVRTC compiles for it: that
of CUDA 12, in an environment with cuda-bindings and nvidia-cuda-nvrtc-cu12 of that version, knows GPUs from sm_50 on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from bench import scripts
from bench.rows import Compiled
from flashcli.asked.decode import ITEM_SIZES, QUERY_TYPES
from flashcli.compiler import compiler, nvrtc
from flashcli.cpu.workers import usable_cores
from flashcli.errors import BackendUnavailable
from flashcli.kernels import backward, choice, decode, tangents
from flashcli.kernels.occupancy import most_shared
from flashcli.kernels.operation import Build, Gpu, Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.registry import OPERATIONS
from flashcli.kernels.tuning.decode import Problem as Paged
from flashcli.measure.rows import Row
from flashcli.terminal import as_json
from flashcli.terminal.messages import say

ARCHITECTURES = {
    compiler.architecture(each): each
    for each in ((6, 1), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
}  # fmt: skip
SHAPES = ((10, 2048), (2, 32768), (1360, 128))  # B, N
HEADS = (1, 32, 64, 80, 128, 256)
FEW_HEADS = (33, 64, 128, 256)  # of the first rungs: their tiles differ, their code hardly
TYPES = ("float32", "float16", "bfloat16")
CACHED = [(each, cache) for each in TYPES for cache in (each, "float8_e4m3fn", "float8_e5m2", "int8")]


def attention_problems(kernel: Kernel) -> Iterator[Problem]:
    """Files of every length of heads, masked and not; and arrays, with what they can have beside."""
    for i, d in enumerate(HEADS if kernel.strided else FEW_HEADS):
        B, N = SHAPES[i % 3]
        yield Problem(B, N, N, d, causal=i % 2 == 1)
    if not kernel.strided:
        return
    for i, (d, (B, N)) in enumerate(itertools.product((16, *HEADS, 96, 160), ((1, 1000), (4, 2048), (500, 2048)))):
        if i % (2 if kernel.arch_only else 3) == 0:  # wgmma has forms by the number of rows and keys
            yield Problem(
                B, N, N, d, i % 4 == 0, in_place=True, lse=i % 8 < 4, dense=i % 5 > 0, aligned=i % 7 > 0,
                batch_invariant=True,
            )  # fmt: skip
    for d, bias in ((32, "float32"), (64, "bool"), (96, "bool"), (128, "float32"), (256, "float32")):
        yield Problem(200, 128, 128, d, d != 64, in_place=True, bias=bias)
    yield from (Problem(16, 4096, 4096, d, in_place=True, dense=False, sequences=8) for d in (64, 128))
    yield Problem(64, 4096, 4096, 64, True, in_place=True, windowed=True, bias="alibi")
    for N in (64, 128) if kernel.name == "wgmma" else ():  # heads that blocks split
        yield Problem(200, N, N, 256, in_place=True, batch_invariant=True)
    for N, d in ((33, 17), (49, 32), (64, 64), (96, 32), (128, 32)) if kernel.name == "mma_short" else ():
        yield Problem(4000, N, N, d, N == 96, in_place=True, lse=N == 49, batch_invariant=True)
    for d in (28, 64) if kernel.splits else ():  # 28: tiles of K and of V differ in size
        yield Problem(10, 2048, 2048, d, precision="fp16")


def backward_problems(kernel: Kernel) -> Iterator[Problem]:
    """Gradients of short and long heads, masked and not, with a bias and its gradient or without."""
    for i, d in enumerate((5, 16, 32, 64, 80, 96, 128, 192, 256)):
        bias = ("", "float32", "both", "bool")[i % 4]
        M = 128 if kernel.name.endswith(("_short", "_whole")) else 2048
        yield backward.of_sizes(
            d, i % 2 == 1, bias, bias_contiguous=i % 3 > 0, bias_together=i % 3 > 1, aligned=i % 5 > 0, B=2, H=8, Hkv=8,
            M=M, N=M, dbias=(1, 8, M, M) if bias else (0,) * 4,
        )  # fmt: skip
    if kernel.name in ("mma_short", "wgmma_whole"):
        yield from (backward.of_sizes(d, N == 96, M=N, N=N, H=8, Hkv=8) for N, d in ((49, 32), (64, 64), (96, 32)))
    yield from (backward.of_sizes(d, M=2048, N=2048, H=8, Hkv=8, sequences=8) for d in (64, 128))
    yield backward.of_sizes(64, True, "alibi", M=2048, N=2048, H=8, Hkv=8, windowed=True)


def tangents_problems(kernel: Kernel) -> Iterator[Problem]:
    """Tangents along with those of gradients, and every other one without."""
    of_floats = (x for x in backward_problems(kernel) if not x.sequences)
    yield from (x._replace(dbias=(0,) * 4, gradient="" if i % 2 else "float32") for i, x in enumerate(of_floats))


def paged_problems(kernel: Kernel) -> Iterator[Paged]:
    """One token of sequences in pages of 16, of every type of query and cache, in both layouts of values."""
    for i, (kind, cache) in enumerate(CACHED):
        for j, d in enumerate((32, 64, 80, 128, 256)):
            every = 2 if kernel.name in decode.DEFAULTS else 4
            if (i + j) % every == 0 and d * ITEM_SIZES[cache] % 16 == 0:
                yield Paged(
                    d, 16, kind, cache, i % 4 < 2, sequences=8, heads=(8, 32, 128)[j % 3], kv_heads=8, table_width=128
                )  # fmt: skip

    for cap, sinks in ((True, False), (False, True)):
        yield Paged(
            128, 16, "float16", "float16", True, ragged=True, softcap=cap, sinks=sinks, sequences=8, heads=32,
            kv_heads=8, table_width=128, total=200,
        )  # fmt: skip
    for cache, transposed in (("float32", True), ("float8_e4m3fn", False)):
        yield Paged(128, 16, "float32", cache, transposed, ragged=True, packs=True, table_width=128, total=200)


def write_problems(kernel: Kernel) -> Iterator[Paged]:
    """New keys and values of every type, into a cache of it or of fp8, in both layouts of values."""
    for i, (kind, cache) in enumerate(CACHED):
        yield Paged(128, 16, kind, cache, i % 2 == 0, total=8, kv_heads=8)


def merge_problems(kernel: Kernel) -> Iterator[Paged]:
    """Answers of every type."""
    yield from (Paged(128, 1, kind, kind, False, total=8) for kind in QUERY_TYPES)


PROBLEMS: dict[str, Callable[[Kernel], Iterable[Any]]] = {
    "attention": attention_problems, "backward": backward_problems, "tangents": tangents_problems,
    "decode": paged_problems, "write_kv": write_problems, "merge": merge_problems,
}  # fmt: skip


def chosen(operation: str, capability: tuple[int, int], problem: Any) -> str:
    """The name of the kernel that computes a problem on a GPU of this compute capability if nobody names one."""
    if operation == "attention":
        return choice.choose(capability, problem).name
    if operation == "backward":
        return backward.choose(capability, problem).name
    if operation == "tangents":
        return tangents.choose(capability, problem).name
    return decode.choose(problem).kernel.name if operation == "decode" else next(iter(OPERATIONS[operation].kernels))


def builds(operation: str, kernel: Kernel, capability: tuple[int, int]) -> dict[Build, bool]:
    """Builds of a kernel for the sample problems that it does not refuse there, and whether it is their default."""
    found: dict[str, tuple[Build, bool]] = {}
    for problem in PROBLEMS[operation](kernel):
        if operation == "decode":
            problem = problem._replace(gpu=Gpu(capability, problem.gpu.multiprocessors))
        if not kernel.refusal(capability, problem):
            build = Build(kernel, kernel.fitted(problem))
            default = chosen(operation, capability, problem) == kernel.name
            found.setdefault(repr(build.macros()), (build, default))
    return dict(found.values())


def compiled(operation: str, kernel: Kernel, capability: tuple[int, int], every: int) -> Compiled | None:
    """A row of what a kernel's builds take at most on an architecture; None if it does not run there."""
    if not (some := dict([*builds(operation, kernel, capability).items()][::every])):
        return None
    arch = compiler.architecture(capability)
    with ThreadPoolExecutor(len(usable_cores())) as pool:
        reports = list(pool.map(lambda build: compiler.resources(build, arch), some))
    taken = [
        (found.spilled, found.registers, found.shared + shared_of(build, function), build)
        for build, report in zip(some, reports, strict=True)
        for function, found in report.items()
    ]
    spilled, registers, shared, worst = max(taken, key=lambda each: each[:3])
    shared = max(each[2] for each in taken)
    if shared > most_shared(capability):
        raise BackendUnavailable(f"{kernel.name} takes {shared} bytes of shared memory on {arch}.", "report it.")
    problem = worst.problem
    return Compiled(
        case=operation, contender=kernel.name, B=getattr(problem, "B", 1), N=getattr(problem, "N", 1), d=problem.d,
        arch=arch, compiler=name_of_compiler(), builds=len(some), chosen=sum(some.values()), registers=registers,
        spilled=spilled, spilled_by_defaults=max((row[0] for row in taken if some[row[3]]), default=0), shared=shared,
        warnings=sum(bool(found.warnings) for report in reports for found in report.values()),
    )  # fmt: skip


def shared_of(build: Build, function: str) -> int:
    """The bytes of dynamic shared memory that a function of a build is launched with, at most."""
    return max((launch.shared for launch in build.functions() if launch.function == function), default=0)


def name_of_compiler() -> str:
    """The compiler that `compiler.resources` asks, with its version, such as "nvcc 13.0.88" or "NVRTC 12.9"."""
    if (nvcc := compiler.find_nvcc()) is None:
        version = nvrtc.version()
        return "NVRTC " + ".".join(map(str, version))
    found = re.search(r"V([\d.]+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return f"nvcc {found[1]}" if found else "nvcc"


@contextlib.contextmanager
def compiler_for(arch: str) -> Iterator[None]:
    """Have NVRTC compile in a ``with`` block if nvcc, where there is one, does not know the architecture."""
    nvcc, before = compiler.find_nvcc(), os.environ.get("NVCC")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split() if nvcc else []
    if nvcc and arch.rstrip("a") not in known:
        os.environ["NVCC"] = nvrtc.NAME
    try:
        yield
    finally:
        os.environ.pop("NVCC", None)
        os.environ.update({} if before is None else {"NVCC": before})


def rows(capabilities: Iterable[tuple[int, int]], operations: Iterable[str], every: int = 1) -> Iterator[Row]:
    """A row for each kernel of the operations on each architecture."""
    for capability in capabilities:
        with compiler_for(compiler.architecture(capability)):
            for operation in operations:
                for kernel in OPERATIONS[operation].kernels.values():
                    if row := compiled(operation, kernel, capability, every):
                        say(f"{row.arch} {operation} {kernel.name}: {row.builds} builds, {row.spilled} bytes spilled")
                        yield row


@click.command()
@click.option("--arch", "archs", multiple=True, type=click.Choice(list(ARCHITECTURES)), help="By default, all.")
@click.option("--operation", "operations", multiple=True, type=click.Choice(list(OPERATIONS)), help="By default, all.")
@click.option("--every", default=1, show_default=True, type=click.IntRange(1), help="Compile one build of so many.")
@as_json.json_option
def main(archs: tuple[str, ...], operations: tuple[str, ...], every: int, json_path: str | None) -> None:
    """Compile every kernel for every architecture that it claims, and tell what each takes."""
    capabilities = [ARCHITECTURES[arch] for arch in archs or ARCHITECTURES]
    found = list(rows(capabilities, operations or OPERATIONS, every))
    scripts.publish("compile_all", {}, found, json_path)


if __name__ == "__main__":
    scripts.run(main)
