"""The rows of records: a type for each kind of row, which says what each figure means.

Times are in seconds and sizes in bytes, if nothing else is said. In a record's file a row is an object with the names
of these fields; those that are None are left out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from flashcli.asked.shape import Shape

# Kinds of the host's memory, for `Streamed`; and orders in which chunks are queued: all of one before the next, or one
# step of as many as there are streams before the next step.
MEMORIES, ORDERS = ("pageable", "pinned"), ("depth", "breadth")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The beginning of every row."""

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

    @classmethod
    def of(cls, about: Row, error: Exception) -> Failure:
        """The row of a contender that failed, which a peer may do in any way."""
        return cls(**vars(about), error=(str(error).strip() or type(error).__name__).splitlines()[0])

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
    mask: list[int] | None = None  # the shape of the mask
    clock: str  # what was timed: "gpu", the call there; "graph", its replay; "host", its queueing; "cpu", on the CPU


@dataclass(frozen=True, kw_only=True)
class Gradients(InPlace):
    """The gradients of attention, dQ, dK, dV, and a bias's, together; where the contender says so the forward pass too.

    ``relative_l2`` is the largest of them; operations are those of five products, with the forward pass seven.
    """

    max_abs: float | None = None  # type: ignore[assignment]  # not measured
    dq: float  # ‖got - want‖ / ‖want‖ of dQ, want in float64
    dk: float
    dv: float
    dbias: float | None = None  # of the first head


@dataclass(frozen=True, kw_only=True)
class Rung(Timed):
    """A kernel of ``flashcli bench --ladder``, and whole commands with it: the medians of their phases."""

    total: float  # of the whole command, from the start of its process
    input: float  # reading
    computation: float  # from the input in the host's memory to the output there
    output: float  # writing
    commands: int  # how many whole commands were run


@dataclass(frozen=True, kw_only=True)
class Tiled(Timed):
    """A kernel of ``flashcli bench --tiles``, with tiles of Br rows of Q and Bc rows of K and V."""

    kernel: str
    Br: int
    Bc: int
    own: bool  # whether these are the tiles that the kernel has if nobody asks for others
    threads: int  # of a block
    registers: int  # of a thread
    shared: int  # shared memory of a block
    occupancy: float  # warps that a multiprocessor holds, of those that it has room for, in percent
    limited_by: str  # the resource of which there is too little for more warps


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
class Decoded(Row):
    """A contender of paged decode, caches cold: B sequences, the longest of N tokens, heads of d numbers."""

    H: int | None = None  # heads of the query; None in older records
    layout: str  # how a page lies in memory
    bytes: int  # of keys and values that have to be read
    relative_l2: float | None = None  # ‖got - want‖ / ‖want‖ over some sequences, want in float64; None of peers
    seconds: float  # the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed


@dataclass(frozen=True, kw_only=True)
class Streamed(Row):
    """A way of ``flashcli streams`` to hand a file's chunks to a GPU: its copies in, kernels and copies out.

    An engine's time is that in which it was busy, by an event after each of its operations, in a run of its own;
    "beside" is how much of it another engine was busy, too.
    """

    streams: int  # 0: the default stream
    memory: str  # one of `MEMORIES`
    order: str  # one of `ORDERS`
    connections: int  # queues from the host to the GPU, as the driver was asked for
    chunks: int  # how many the file was cut into
    queued: float  # seconds until all was handed over, the median of all runs
    traced: float  # seconds from the first operation to the last in the run with events
    copies_in: float
    copies_in_beside: float
    kernels: float
    kernels_beside: float
    copies_out: float
    copies_out_beside: float
    hidden: float  # of the time of kernels and copies out, the share in which a copy in was under way
    seconds: float  # of the wall clock until the answer is there, the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed


def over_all(seconds: list[float]) -> dict[str, Any]:
    """The fields of rows that tell of the times of several runs."""
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "runs": len(seconds)}
