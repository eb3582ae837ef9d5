"""The rows of records: a type for each kind of row, which says what each figure means.

Times are in seconds and sizes in bytes, if nothing else is said. In a record's file a row is an object with the names
of these fields; those that are None are left out.
"""

from __future__ import annotations

import statistics
from dataclasses import MISSING, dataclass, fields
from typing import Any

from flashcli.asked.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row begins with."""

    case: str  # the name of a test case; a shape that is none has itself as its name
    B: int
    N: int
    d: int
    causal: bool | None = None  # with the mask or without; None in records that are never of masked attention
    contender: str  # the kernel, or the command, whose figures these are

    @classmethod
    def about(cls, case: str, shape: Shape, contender: str, causal: bool | None = None) -> Row:
        """The beginning of a row; its ``vars()`` go into one with figures."""
        return cls(case=case, **vars(shape), contender=contender, causal=causal)

    @property
    def shape(self) -> Shape:
        return Shape(self.B, self.N, self.d)

    @property
    def is_named(self) -> bool:
        """Whether the case has another name than its shape."""
        return self.case != str(self.shape)

    @property
    def title(self) -> str:
        """The name and the shape of the case."""
        return f"{self.case} {self.shape}" if self.is_named else self.case

    def written(self) -> dict[str, object]:
        """The row as it stands in a record's file."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Failure(Row):
    """A contender without times: its answer was wrong, or it failed."""

    relative_l2: float | None = None  # of a wrong answer: ‖got - want‖ / ‖want‖, want in float64
    max_abs: float | None = None  # of a wrong answer: the largest |got - want|
    error: str  # why there are no times, in one line

    @property
    def is_wrong(self) -> bool:
        return self.relative_l2 is not None


@dataclass(frozen=True, kw_only=True)
class Skipped(Row):
    """A contender that was not tried."""

    skipped: str  # the reason


@dataclass(frozen=True, kw_only=True)
class Timed(Row):
    """A contender of ``flashcli bench`` with a right answer. Its times are those of the computation alone."""

    relative_l2: float  # ‖got - want‖ / ‖want‖, want in float64
    max_abs: float  # the largest |got - want|
    seconds: float  # the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed
    floor_bytes: float | None = None  # seconds that a copy takes which moves as many bytes as Q, K, V and O are
    floor_operations: float | None = None  # seconds that cuBLAS takes for as many operations on the same unit
    tflops: float  # 10^12 operations a second, at the median


@dataclass(frozen=True, kw_only=True)
class InPlace(Timed):
    """A contender on PyTorch's tensors, q [B, H, M, d], k and v [B, Hkv, N, d], where they lie."""

    H: int
    Hkv: int
    M: int
    layout: str  # how the tensors lie: one of `flashcli.measure.tensors.LAYOUTS`
    bias: list[int] | None = None  # the shape of what is added to scores
    clock: str  # what was timed: "gpu", the call there; "graph", its replay; "host", its queueing; "cpu", on the CPU


@dataclass(frozen=True, kw_only=True)
class Gridded(Timed):
    """A contender on one shape of the grid, on PyTorch's tensors where they lie, with all that it launches."""

    chosen: bool | None = None  # whether it is the kernel of ours that computes when nobody names one; None of peers
    calls: int  # in the CUDA graph that was replayed; 0 where a call took so long that there was none
    replayed: float | None = None  # seconds of one of them, the median of all replays

    @property
    def floor(self) -> float:
        """Seconds that no kernel on half products, three for each fp32 one, can be much below."""
        return max(self.floor_bytes or 0, self.floor_operations or 0)


@dataclass(frozen=True, kw_only=True)
class Emulated(Row):
    """A kernel's arithmetic emulated, with the roundings that ``contender`` says."""

    relative_l2: float  # ‖got - want‖ / ‖want‖, want in float64
    rows: int  # how many were computed


@dataclass(frozen=True, kw_only=True)
class Gradients(InPlace):
    """The gradients of attention, dQ, dK and dV together, and where the contender says so the forward pass too.

    ``relative_l2`` is the largest of the three; operations are those of five products, with the forward pass seven.
    """

    max_abs: float | None = None  # type: ignore[assignment]  # not measured
    dq: float  # ‖got - want‖ / ‖want‖ of dQ, want in float64
    dk: float
    dv: float


@dataclass(frozen=True, kw_only=True)
class Generated(Row):
    """Tokens generated one after another, each the most likely, by a language model with an attention of its own."""

    seconds: float  # the median of all runs, for all tokens
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed, after one that was not
    reached: dict[str, float]  # seconds until so many tokens, of the run at the median or the one before it
    peak_mib: float | None = None  # the most memory that PyTorch gave out at a time beside the weights; None on the CPU
    differs_at: int | None = None  # the first token that is another than naive attention's without a cache
    gap: float | None = None  # there, by how much the logit of naive's token is above this one's, in float64


@dataclass(frozen=True, kw_only=True)
class Trained(Row):
    """A training run of a language model with heads of d numbers, on batches of B sequences of N tokens."""

    layers: int
    H: int
    parameters: int  # how many numbers the model has
    seconds: float  # the median of all steps but the first few
    min: float  # of them
    max: float  # of them
    runs: int  # how many steps were timed
    losses: list[float]  # of each step
    weights: str  # the beginning of a hash of all weights at the end


@dataclass(frozen=True, kw_only=True)
class Forward(Row):
    """One pass of a model of transformers, B sequences of N tokens, with heads of d numbers."""

    layers: int
    H: int
    Hkv: int
    relative_l2: float  # of the last hidden state: ‖got - want‖ / ‖want‖, want by "eager" attention in float64
    seconds: float  # the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed


@dataclass(frozen=True, kw_only=True)
class Rung(Timed):
    """A kernel of ``flashcli bench --ladder``, and whole commands with it: the medians of their phases."""

    total: float  # of the whole command, from the start of its process
    input: float  # reading
    computation: float  # from the input in the host's memory to the output there
    output: float  # writing
    commands: int  # how many whole commands were run
    over_previous: float | None = None  # how many times faster the kernel is than the rung before it that was timed
    over_first: float | None = None  # how many times faster it is than the first that was timed


@dataclass(frozen=True, kw_only=True)
class Profiled(Row):
    """One launch of one function of a kernel, by the GPU's counters or else by what the compiler knows.

    What was not counted is None. Percentages are of what the GPU could do at most; rates are in bytes a second.
    """

    function: str  # its name in the source
    launches: int  # how many launches of it the whole computation has
    seconds: float | None = None
    occupancy: float | None = None  # warps that a multiprocessor held on average, in percent
    possible_occupancy: float | None = None  # the same, as far as registers and shared memory allow
    sm_efficiency: float | None = None  # cycles in which a multiprocessor had work, in percent
    tensor_pipe: float | None = None  # cycles in which the tensor cores were busy, in percent
    load_conflicts: float | None = None  # passes that loads from shared memory took because of bank conflicts
    store_conflicts: float | None = None  # the same for stores
    registers: float | None = None  # of a thread
    spilled: int | None = None  # bytes of a thread's registers that the compiler moved to memory
    shared_load: float | None = None  # rate of loads from shared memory
    shared_store: float | None = None
    global_load: float | None = None
    global_store: float | None = None
    excess_wavefronts: float | None = None  # passes of shared memory beyond those that its accesses need by their width
    local_bytes: float | None = None  # moved from and to local memory, where spilled registers are
    dram_bytes: float | None = None  # moved from and to the GPU's memory
    shared: float | None = None  # shared memory of a block
    limited_by: str | None = None  # the resource of which there is too little for more warps


@dataclass(frozen=True, kw_only=True)
class WholeCommand(Row):
    """A command from an input file to an output file, seen from outside; the phases are those that it tells of."""

    seconds: float  # the median of all runs
    peak_mib: float  # the most memory that it had, in MiB, in the last run
    total: float | None = None  # of the last run, as are the phases
    input: float | None = None
    computation: float | None = None
    output: float | None = None
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed
    device_mib: float | None = None  # memory taken on the GPU, in MiB


@dataclass(frozen=True, kw_only=True)
class PlainFiles(Row):
    """Reading an input file and writing an output file and nothing else, as a bound for `Scaled`."""

    count: int  # of GPUs or processes
    reads: float  # 10^9 bytes a second
    writes: float  # 10^9 bytes a second


@dataclass(frozen=True, kw_only=True)
class Scaled(PlainFiles):
    """A command on so many GPUs or processes. Times are medians over all runs."""

    seconds: float  # from outside
    busy: float  # of the kernel on the GPU, or in the process, that took longest
    pipeline: float  # from the first thing that was read to the last that was written
    total: float  # as the command tells it, as are the phases
    input: float
    computation: float
    output: float
    min: float  # of the times from outside
    max: float
    runs: int  # how many were timed


@dataclass(frozen=True, kw_only=True)
class Decoded(Row):
    """A contender of paged decode: B sequences, the longest of N tokens, heads of d numbers."""

    clock: str | None = None  # None: the time there, caches cold; "host": of a call's queueing; "graph": of its replay
    layout: str  # how a page lies in memory
    bytes: int  # of keys and values that have to be read
    relative_l2: float | None = None  # ‖got - want‖ / ‖want‖ over some sequences, want in float64; None of peers
    seconds: float  # the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed


KINDS: tuple[type[Row], ...] = (
    Failure, Skipped, Timed, InPlace, Gradients, Gridded, Rung, Profiled, WholeCommand, PlainFiles, Scaled, Decoded,
    Generated, Trained, Forward, Emulated,
)  # fmt: skip


def read(found: dict[str, Any]) -> Row:
    """The row that stands in a record's file. ValueError if it is of no kind."""
    for kind in KINDS:
        known = {field.name: field.default is MISSING for field in fields(kind)}
        if found.keys() <= known.keys() and all(name in found for name, needed in known.items() if needed):
            return kind(**found)
    raise ValueError(f"no kind of row has the fields {', '.join(found)}")


def over_all(seconds: list[float]) -> dict[str, Any]:
    """What rows say of the times of several runs."""
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "runs": len(seconds)}
