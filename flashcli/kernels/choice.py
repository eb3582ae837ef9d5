"""The choice of an attention kernel: the fastest when nobody names one, and a check of one that is named."""

from __future__ import annotations

from typing import NamedTuple

from flashcli.asked.shape import ceil_div
from flashcli.errors import BackendUnavailable
from flashcli.kernels.attention import KERNELS, longest_short
from flashcli.kernels.operation import Build, Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.speed import MULTIPROCESSORS
from flashcli.kernels.tuning import cost

PREFERENCE = ("wgmma_short", "wgmma", "mma", "mma_short", "register_tiled")  # the fastest first, for files
TWINS = ("wgmma_short", "wgmma")  # the same arithmetic: with tiles of the same keys, they give the same bytes
SHORT_HEAD = 8  # a score that is a sum of fewer products shows that a split number has 22 bits
LONG_HEAD, PADDED_KEYS = 64, 32  # heads of more numbers, whose tile of keys would be half empty with so many keys
AS_FAST = 1.03  # times the least that is expected: then a launch less counts, which takes the host 4 us
HOST = 8.5  # microseconds that a call takes the host at least: a GPU that has less to do waits for it
FULL = 16 * MULTIPROCESSORS  # tiles of 128 rows that keep an H200 busy


class Candidate(NamedTuple):
    """A kernel's name with the microseconds that `tuning.cost` expects, or with the reason why it cannot compute."""

    name: str
    microseconds: float | None = None
    refused: str = ""


def choose(capability: tuple[int, int], problem: Problem, name: str | None = None, device: str = "this GPU") -> Kernel:
    """The kernel of that name, or the fastest for a problem on a device of this compute capability.

    BackendUnavailable if it cannot compute the problem, or if no kernel can.

    Arrays where they lie get the kernel that `tuning.cost` expects to be the fastest, or one without a pre-pass that is
    as good, or as fast as the host. Where a row's bytes must not depend on its company, the kernel must not either: it
    is the best one for `FULL` row tiles, or its twin. Files, whose time is that of reading and writing, go by
    `PREFERENCE`, so that an answer keeps its bytes when a kernel becomes faster.
    """
    if name is not None:
        return KERNELS[name].check(capability, problem, "see `flashcli kernels`.", device)
    able = [name for name in PREFERENCE if not refusal(name, capability, problem)]
    if not able:
        text = "no kernel computes in {} on sm_{}{}.".format(problem.precision, *capability)
        raise BackendUnavailable(text, "use --precision fp32.")
    if problem.sequences:  # whose lengths, which decide about times, nobody knows here
        return KERNELS[able[0]]
    if problem.in_place and problem.batch_invariant and len(able) > 1:
        able = _invariant(able, capability, problem)
    if problem.in_place and len(able) > 1:
        expected = {name: _expected(name, problem) for name in able}
        fast = [name for name in able if expected[name] <= AS_FAST * max(HOST, min(expected.values()))]
        able = sorted(fast, key=lambda name: (Build(KERNELS[name], problem).prepares, expected[name]))
    return KERNELS[able[0]]


def why(capability: tuple[int, int], problem: Problem) -> str:
    """The reason why `choose` takes its kernel for arrays, as the rest of a sentence that begins with its name."""
    able = [name for name in PREFERENCE if not refusal(name, capability, problem)]
    fastest = min(able, key=lambda name: _expected(name, problem))
    if len(able) == 1:
        return "is the only one that may compute this"
    if choose(capability, problem).name == fastest:
        return "is expected to be the fastest"
    if problem.batch_invariant and fastest not in _invariant(able, capability, problem):
        return f"has the bytes of the best kernel for large batches, which {fastest} has not"
    return f"is expected to be as fast as {fastest} or as the host ({HOST} us), and has no pre-pass to launch"


def _invariant(able: list[str], capability: tuple[int, int], problem: Problem) -> list[str]:
    """The names of kernels that give the bytes of the best kernel for `FULL` dense and aligned row tiles.

    Where none of those that are able has these bytes, the best of them.
    """
    many = ceil_div(FULL, ceil_div(problem.M, 128))
    full = problem._replace(B=many, sms=MULTIPROCESSORS, aligned=True, dense=True, lse=False)
    may = [name for name in PREFERENCE if not refusal(name, capability, full)]
    best = min(may, key=lambda name: _expected(name, full))
    same = [name for name in able if name == best or _same_bytes(name, best, full)]
    return same or [min(able, key=lambda name: _expected(name, full))]


def candidates(capability: tuple[int, int], problem: Problem) -> list[Candidate]:
    """The kernels of `PREFERENCE`, in its order, each with its expected microseconds or why it is refused."""
    return [
        Candidate(name, refused=reason)
        if (reason := refusal(name, capability, problem))
        else Candidate(name, cost.microseconds(KERNELS[name], problem))
        for name in PREFERENCE
    ]


def _expected(name: str, problem: Problem) -> float:
    """The microseconds that `tuning.cost` expects of a kernel, infinity if it has no figure: `PREFERENCE` decides."""
    known = cost.microseconds(KERNELS[name], problem)
    return float("inf") if known is None else known


def refusal(name: str, capability: tuple[int, int], problem: Problem) -> str:
    """The reason why a kernel must not be chosen for a problem; empty if it may be."""
    kernel = KERNELS[name]
    if reason := kernel.refusal(capability, problem):
        return reason
    if problem.precision not in kernel.precisions:
        return f"it has no {problem.precision}"
    return _not_worth_it(kernel, problem)


def _same_bytes(one: str, other: str, problem: Problem) -> bool:
    """Whether two kernels give each row the same bytes."""
    if one not in TWINS or other not in TWINS:
        return False
    return KERNELS[one].tiling(problem).Bc == KERNELS[other].tiling(problem).Bc


def _not_worth_it(kernel: Kernel, problem: Problem) -> str:
    """The reason not to choose a kernel that could compute, whatever its time; empty if there is none.

    Heads of less than `SHORT_HEAD` numbers are left to FFMA in fp32, which is more accurate there.
    """
    if kernel.splits and problem.precision == "fp32" and problem.d < SHORT_HEAD:
        return f"heads of less than {SHORT_HEAD} numbers are left to FFMA in fp32"
    if kernel.name != "wgmma_short":
        return ""
    if problem.d > LONG_HEAD and problem.N <= PADDED_KEYS:
        return f"of long heads it splits tiles of 64 keys: with up to {PADDED_KEYS} that does not pay"
    longest = longest_short(problem)
    return f"it splits keys over and over: with more than {longest} that does not pay" if longest < problem.N else ""


def exact(kernel: Kernel) -> Kernel:
    """The kernel for files with NaN or Inf: itself, or one that does not split numbers."""
    return KERNELS["register_tiled"] if kernel.splits else kernel
