"""Figures of a rung from the GPU's counters: the metrics that the report took with nvprof, through Nsight Compute.

``ncu`` runs ``python -m flashcli.measure.profiling KERNEL B,N,d SEED``, which launches the kernel on a whole input; of
paged decode, the second argument is the JSON of a `Case`. It counts during the second launch of each of the kernel's
functions, with caches emptied before: the first launch warms up, and a rung of thousands of launches is not profiled
whole. A rung has a row for each function, because the mean of a pre-pass and of the attention is of neither.
"""

from __future__ import annotations

import csv
import json
import operator
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple
from typing import Any

import numpy as np

from flashcli.asked.decode import BlockSparse
from flashcli.asked.shape import Shape
from flashcli.compiler import compiler
from flashcli.errors import BackendUnavailable, KernelFailure
from flashcli.files.decode.cases import Case, make, outlined
from flashcli.files.distributions import draw
from flashcli.gpu.pycuda import Session, kernel_seconds, load_driver
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.decode import KERNELS as DECODERS
from flashcli.kernels.decode import build_of
from flashcli.kernels.occupancy import OF_AN_H200, Multiprocessor, multiprocessor, occupancy, tightest
from flashcli.kernels.operation import Build, Gpu, Launch
from flashcli.kernels.problem import Problem
from flashcli.measure import race
from flashcli.measure.rows import Failure, Profiled, Row, Skipped
from flashcli.run.decode_cuda import DecodeCuda
from flashcli.terminal.messages import explain

LAUNCH = 2  # of each function, counted from one
WAVEFRONT = 128  # bytes that shared memory moves in one pass: 32 banks of 4
LIMITS = {"registers": "registers", "shared memory": "shared_mem", "warps": "warps", "blocks": "blocks"}
# Our names of ncu's metrics; NVIDIA's table "nvprof Metric Comparison" says which stand for the report's.
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",  # achieved_occupancy
    "sm_efficiency": "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "global_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "global_store_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    # nvprof's shared_ld_bank_conflict and shared_st_bank_conflict. On newer chips they also count cycles in which
    # something else had the pipe, so that they are not zero where no two threads of a warp meet in a bank...
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    # ... while these two are equal exactly where every access takes as few passes as its width needs. (Their difference
    # is a metric too, derived__memory_l1_wavefronts_shared_excessive, but one that cannot be asked for.)
    "wavefronts": "memory_l1_wavefronts_shared",
    "ideal_wavefronts": "memory_l1_wavefronts_shared_ideal",
    "local_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "local_store_bytes": "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
    "static_shared": "launch__shared_mem_per_block_static",
    "dynamic_shared": "launch__shared_mem_per_block_dynamic",
    "possible_occupancy": "sm__maximum_warps_per_active_cycle_pct",
    **{f"limit of {name}": f"launch__occupancy_limit_{metric}" for name, metric in LIMITS.items()},
}
TIME_UNITS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3}
FORBIDDEN = BackendUnavailable(
    "the driver lets only administrators read the GPU's performance counters (ERR_NVGPUCTRPERM).",
    "an administrator can set `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file in /etc/modprobe.d and "
    "reboot, or give the process CAP_SYS_ADMIN (sudo; docker run --cap-add=SYS_ADMIN).",
)


def find_ncu() -> str:
    """Nsight Compute's command: on the PATH, beside nvcc, or in the usual folder."""
    nvcc = compiler.find_nvcc()
    beside = [str(nvcc.parent / "ncu")] if nvcc else []
    found = next(filter(None, map(shutil.which, ["ncu", *beside, "/usr/local/cuda/bin/ncu"])), None)
    if found is None:
        raise BackendUnavailable(
            "Nsight Compute's command, ncu, was not found.", "it comes with the CUDA toolkit: put it on the PATH."
        )
    return found


class Profiler:
    """Makes rows for one GPU. ``unavailable`` becomes the reason when counters cannot be had; rows go on without."""

    def __init__(
        self, capability: tuple[int, int], sms: int, multiprocessor: Multiprocessor,
        unavailable: BackendUnavailable | None = None,
    ) -> None:  # fmt: skip
        self._capability = capability
        self._arch = compiler.architecture(capability)
        self._sms = sms
        self._multiprocessor = multiprocessor
        self._metrics = dict(METRICS)
        self.unavailable = unavailable
        try:
            self._ncu = find_ncu()
        except BackendUnavailable as error:
            self.unavailable = unavailable or error

    @classmethod
    def of_first_gpu(cls) -> Profiler:
        """Make a profiler for the first GPU of this machine; BackendUnavailable if there is none."""
        driver = load_driver()
        device = driver.Device(0)
        sms = device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        return cls(device.compute_capability(), sms, multiprocessor(driver))

    @classmethod
    def of_no_gpu(cls, error: BackendUnavailable) -> Profiler:
        """Make a profiler of what nvcc alone tells about an H200's kernels; raises ``error`` if there is no nvcc.

        ``error`` says why there is no GPU, and hence no counters.
        """
        if compiler.find_nvcc() is None:
            raise error
        return cls((9, 0), 132, OF_AN_H200, error)

    def of_attention(self, case: str, shape: Shape, name: str, seed: int) -> Iterator[Row]:
        """A row for each function of a rung on a file of this shape; one that says why where there is none."""
        problem = Problem(shape.B, shape.N, shape.N, shape.d, sms=self._sms)
        sizes = ",".join(str(size) for size in astuple(shape))
        return self._rows(Row.about(case, shape, name), Build(KERNELS[name], problem), sizes, str(seed))

    def of_decode(self, case: Case, name: str) -> Iterator[Row]:
        """A row for each function of a rung of paged decode, as `of_attention` gives them."""
        asked = outlined(case)
        build = build_of(DECODERS[name], asked.outline, Gpu(self._capability, self._sms))
        title = f"{case.S}x({case.lengths}) {case.H}/{case.Hkv} D={case.D}"
        about = Row(case=title, B=case.S, N=asked.longest, d=case.D, contender=name)
        return self._rows(about, build, json.dumps(asdict(case)))

    def _rows(self, about: Row, build: Build, *given: str) -> Iterator[Row]:
        """The rows of a build, which `exercise` launches if it is ``given`` this beside the kernel's name."""
        kernel = build.kernel
        needs = "" if kernel.runs_on(self._capability) else f"it needs {compiler.architecture(kernel.needs)}"
        if reason := "it runs on the host" if kernel.on_host else needs or kernel.refuses(build.problem):
            yield Skipped(**vars(about), skipped=reason)
            return
        launches: dict[str, list[Launch]] = {}
        for launch in build.launches():
            launches.setdefault(launch.function, []).append(launch)
        known: dict[str, dict[str, Any]] = {}
        try:
            if not self.unavailable:
                known = self._counted(build, given, len(launches))
        except BackendUnavailable as error:
            self.unavailable = error
        except KernelFailure as error:
            yield Failure(**vars(about), error=str(error))
            return
        known = known or self._by_the_compiler(build, launches)
        for function, some in launches.items():
            yield Profiled(**vars(about), function=function, launches=len(some), **known.get(function, {}))

    def _by_the_compiler(self, build: Build, launches: dict[str, list[Launch]]) -> dict[str, dict[str, Any]]:
        """Figures that are known without counters, if there is a compiler."""
        found = compiler.resources(build, self._arch) if not compiler.reporting_problem() else {}
        return {
            function: _static(found[function], first, self._multiprocessor)
            for function, (first, *_) in launches.items()
            if function in found
        }

    def _counted(self, build: Build, given: tuple[str, ...], functions: int) -> dict[str, dict[str, Any]]:
        """Each function's figures. A metric that this ncu does not know is left out."""
        compiler.cubin(build, self._arch)  # here, for the cache: ncu need not look at a compiler
        while True:
            command = [
                self._ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
                "--kernel-id", f":::{LAUNCH}", "--launch-count", str(functions),
                "--metrics", ",".join(self._metrics.values()),
                sys.executable, "-m", "flashcli.measure.profiling", build.kernel.name, *given,
            ]  # fmt: skip
            done = race.finish(command)
            printed = done.out + done.err
            if unknown := re.search(r"Failed to find metric (?:regex:\^)?(\w+)", printed):
                left = {ours: theirs for ours, theirs in self._metrics.items() if theirs.split(".")[0] != unknown[1]}
                if len(left) < len(self._metrics):
                    self._metrics = left
                    continue
            if counted := parse_page(done.out, self._metrics):
                return {function: figures(of_launch) for function, of_launch in counted.items()}
            raise complaint(printed)


def _static(found: compiler.Resources, launch: Launch, multiprocessor: Multiprocessor) -> dict[str, Any]:
    fits = occupancy(multiprocessor, launch.threads, found.registers, found.shared + launch.shared)
    return {
        "registers": found.registers, "spilled": found.spilled, "shared": found.shared + launch.shared,
        "possible_occupancy": fits.percent, "limited_by": fits.limited_by,
    }  # fmt: skip


def parse_page(printed: str, metrics: dict[str, str]) -> dict[str, dict[str, float]]:
    """ncu's raw page as CSV: a line of names, a line of units, a line for each launch. Other lines are remarks."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    names, units, *launches = csv.reader(lines) if len(lines) > 2 else ([], [])
    found = {}
    for line in launches:
        cells = dict(zip(names, zip(line, units, strict=True), strict=True))
        found[cells["Kernel Name"][0].partition("(")[0]] = {
            ours: value
            for ours, theirs in metrics.items()
            if (value := _number(*cells.get(theirs, ("", "")))) is not None
        }
    return found


def _number(cell: str, unit: str) -> float | None:
    """A number with commas between its thousands; None for "n/a" and the like."""
    try:
        return float(cell.replace(",", "")) * TIME_UNITS.get(unit, 1)
    except ValueError:
        return None


def complaint(printed: str) -> BackendUnavailable | KernelFailure:
    """Why there are no figures: ncu has none for any rung, or this rung failed."""
    if "ERR_NVGPUCTRPERM" in printed:
        return FORBIDDEN
    if own := re.search(r"^Error: (.+)", printed, re.MULTILINE):
        return KernelFailure(own[1])
    theirs = re.search(r"^==ERROR== (.+?)\.?$", printed, re.MULTILINE)
    reason = theirs[1] if theirs else "it counted nothing"
    return BackendUnavailable(f"Nsight Compute gave no figures: {reason}.", "does `ncu` profile other programs here?")


def figures(counted: dict[str, float]) -> dict[str, Any]:
    """One launch of one function, as rows have it: rates in bytes a second. What was not counted is left out."""
    as_counted = (
        "seconds", "occupancy", "possible_occupancy", "sm_efficiency", "tensor_pipe", "load_conflicts",
        "store_conflicts", "registers",
    )  # fmt: skip
    derived: dict[str, tuple[Any, ...]] = {  # a function, and what it is called with
        "shared_load": (_rate_of_wavefronts, "shared_load_wavefronts", "seconds"),
        "shared_store": (_rate_of_wavefronts, "shared_store_wavefronts", "seconds"),
        "global_load": (operator.truediv, "global_load_bytes", "seconds"),
        "global_store": (operator.truediv, "global_store_bytes", "seconds"),
        "excess_wavefronts": (operator.sub, "wavefronts", "ideal_wavefronts"),
        "local_bytes": (operator.add, "local_load_bytes", "local_store_bytes"),
        "dram_bytes": (operator.add, "dram_read_bytes", "dram_write_bytes"),
        "shared": (operator.add, "static_shared", "dynamic_shared"),
        "limited_by": (_tightest, *(f"limit of {name}" for name in LIMITS)),
    }
    return {name: counted[name] for name in as_counted if name in counted} | {
        name: combine(*(counted[part] for part in parts))
        for name, (combine, *parts) in derived.items()
        if all(part in counted for part in parts)
    }


def _rate_of_wavefronts(count: float, seconds: float) -> float:
    return count * WAVEFRONT / seconds


def _tightest(*blocks: float) -> str:
    return tightest(dict(zip(LIMITS, blocks, strict=True)))


def exercise(name: str, what: str, seed: str = "0") -> None:
    """Launch a kernel `LAUNCH` times or more on a whole input, without a file, for ncu to look at.

    ``what`` is the input, as `Profiler` says it: B,N,d, or the JSON of a `Case`.
    """
    if what.startswith("{"):
        given = json.loads(what)
        asked = make(Case(**given | {"sparse": BlockSparse(**given["sparse"]) if given["sparse"] else None}))
        with DecodeCuda(name) as backend:
            for _ in range(LAUNCH):
                backend.decode(asked, range(asked.S))
        return
    shape = Shape(*map(int, what.split(",")))
    qkv = draw(shape, range(shape.B), int(seed))
    with Session() as session:
        build = session.build(name, Problem(shape.B, shape.N, shape.N, shape.d))
        kernel_seconds(session, build, [qkv], np.empty(qkv[:, 0].shape, np.float32), 0)


if __name__ == "__main__":
    try:
        exercise(*sys.argv[1:])
    except BaseException as error:
        sys.exit(explain(error))
