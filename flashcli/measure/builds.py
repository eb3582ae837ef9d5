"""Builds of many kernels, compiled side by side: one nvcc after the other would take most of a measurement's time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from flashcli.compiler import compiler
from flashcli.cpu.workers import usable_cores
from flashcli.gpu.pycuda import devices
from flashcli.kernels.operation import Build


def compile_all(builds: Iterable[Build]) -> None:
    """Leave code for the first GPU in the cache, of those builds that there can be."""
    wanted = {build for build in builds if not build.kernel.refuses(build.problem)}
    compile_for(compiler.architecture(devices()[0].capability), wanted)


def compile_for(arch: str, builds: Iterable[Build]) -> None:
    """Leave code for an architecture in the cache."""
    with ThreadPoolExecutor(len(usable_cores())) as pool:
        list(pool.map(lambda build: compiler.cubin(build, arch), builds))
