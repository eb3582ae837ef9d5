"""The rows that scripts write beside those of `flashcli.measure.rows`, and how a row of any kind is read."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from flashcli.measure.rows import (
    Decoded,
    Failure,
    Gradients,
    InPlace,
    Profiled,
    Row,
    Rung,
    Skipped,
    Streamed,
    Tiled,
    Timed,
)


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
class Judged(Row):
    """A kernel of paged decode on all cases of a query's and a cache's type; the shape is that of the hardest one."""

    cases: int  # that it takes, and in which nonsense would not pass
    wrong: int  # of these, with a wrong answer, or other bytes where they must not differ
    share: float  # the largest of all errors, each as a share of what is allowed
    hardest: str  # the case that has it, by how it differs from the first


@dataclass(frozen=True, kw_only=True)
class Emulated(Row):
    """A kernel's arithmetic emulated, with the roundings that ``contender`` says."""

    relative_l2: float  # ‖got - want‖ / ‖want‖, want in float64
    rows: int  # how many were computed


@dataclass(frozen=True, kw_only=True)
class Compiled(Row):
    """A kernel compiled for an architecture; ``case`` is its operation, B, N and d are those of the worst build."""

    arch: str  # such as "sm_80"
    compiler: str  # such as "nvcc 13.0.88"
    builds: int  # how many different ones were compiled
    chosen: int  # how many of them are what computes their problem there if nobody names a kernel
    registers: int  # a thread, of the worst build: that which spills most, then that with most registers
    spilled: int  # bytes a thread, of that build
    spilled_by_defaults: int  # bytes a thread, at most, of the builds that are chosen
    shared: int  # bytes a block, static and dynamic, at most
    warnings: int  # functions about which ptxas has warned


@dataclass(frozen=True, kw_only=True)
class FirstCall(Row):
    """The first call of its kind in a process; ``contender`` is the state of the cache, ``case`` the operation."""

    seconds: float  # of the call, until its answer is there


@dataclass(frozen=True, kw_only=True)
class Repeated(Row):
    """Something that was timed several times."""

    seconds: float  # the median of all runs
    min: float  # of all runs
    max: float  # of all runs
    runs: int  # how many were timed


@dataclass(frozen=True, kw_only=True)
class Called(Repeated):
    """Calls of a function of paged decode; the shape is that of `Decoded`."""

    clock: str  # "host": of a call's queueing; "graph": of its replay
    H: int
    layout: str  # how a page lies in memory
    bytes: int  # of keys and values that have to be read


@dataclass(frozen=True, kw_only=True)
class Ragged(Decoded):
    """A contender of paged decode with several query tokens a sequence."""

    operations: float  # of both products


@dataclass(frozen=True, kw_only=True)
class Generated(Repeated):
    """Tokens generated one after another, each the most likely, by a language model with an attention of its own.

    Times are those for all tokens.
    """

    reached: dict[str, float]  # seconds until so many tokens, of the run at the median or the one before it
    peak_mib: float | None = None  # the most memory that PyTorch gave out at a time beside the weights; None on the CPU
    differs_at: int | None = None  # the first token that is another than naive attention's without a cache
    gap: float | None = None  # there, by how much the logit of naive's token is above this one's, in float64


@dataclass(frozen=True, kw_only=True)
class Trained(Repeated):
    """A training run of a model with heads of d numbers, on batches of B sequences of N tokens, or sets of N points.

    Times are those of a step; the first few do not count.
    """

    layers: int
    H: int
    parameters: int  # how many numbers the model has
    losses: list[float]  # of each step
    weights: str  # the beginning of a hash of all weights at the end


@dataclass(frozen=True, kw_only=True)
class Forward(Repeated):
    """One pass of a model of transformers, B sequences of N tokens, with heads of d numbers."""

    layers: int
    H: int
    Hkv: int
    relative_l2: float  # of the last hidden state: ‖got - want‖ / ‖want‖, want by "eager" attention in float64


@dataclass(frozen=True, kw_only=True)
class WholeCommand(Repeated):
    """A command from an input file to an output file, seen from outside; the phases are those that it tells of."""

    peak_mib: float  # the most memory that it had, in MiB, in the last run
    total: float | None = None  # of the last run, as are the phases
    input: float | None = None
    computation: float | None = None
    output: float | None = None
    device_mib: float | None = None  # memory taken on the GPU, in MiB


@dataclass(frozen=True, kw_only=True)
class PlainFiles(Row):
    """Reading an input file and writing an output file and nothing else, as a bound for `Scaled`."""

    count: int  # of GPUs or processes
    reads: float  # 10^9 bytes a second
    writes: float  # 10^9 bytes a second


@dataclass(frozen=True, kw_only=True)
class Scaled(PlainFiles, Repeated):
    """A command on so many GPUs or processes, seen from outside. The times that it tells are medians over all runs."""

    busy: float  # of the kernel on the GPU, or in the process, that took longest
    pipeline: float  # from the first thing that was read to the last that was written
    total: float  # as the command tells it, as are the phases
    input: float
    computation: float
    output: float


KINDS: tuple[type[Row], ...] = (
    Failure, Skipped, Timed, InPlace, Gradients, Gridded, Rung, Profiled, WholeCommand, PlainFiles, Scaled, Decoded,
    Called, Ragged, Generated, Trained, Forward, Emulated, Tiled, Streamed, Judged, Compiled, FirstCall,
)  # fmt: skip


def read(found: dict[str, Any]) -> Row:
    """The row that stands in a record's file. ValueError if it is of no kind."""
    for kind in KINDS:
        known = {field.name: field.default is MISSING for field in fields(kind)}
        if found.keys() <= known.keys() and all(name in found for name, needed in known.items() if needed):
            return kind(**found)
    raise ValueError(f"no kind of row has the fields {', '.join(found)}")
