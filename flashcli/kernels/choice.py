"""Which kernel computes when nobody names one, and whether one that is named can."""

from __future__ import annotations

from flashcli.errors import BackendUnavailable
from flashcli.kernels.attention import KERNELS, SHORT
from flashcli.kernels.compiler import architecture
from flashcli.kernels.types import Kernel, Problem

PREFERENCE = ("wgmma_short", "wgmma", "mma", "register_tiled")  # the fastest first, where it is worth it
TINY = 32  # up to this N, in place, one launch counts more than tensor cores do: those that split numbers need two
SHORT_HEAD = 16  # tensor cores multiply 16 columns or more at a time: a shorter head would mostly multiply padding


def choose(capability: tuple[int, int], problem: Problem) -> Kernel:
    """The fastest kernel for a problem on a device of this compute capability; BackendUnavailable if there is none."""
    for kernel in (KERNELS[name] for name in PREFERENCE):
        able = kernel.runs_on(capability) and problem.precision in kernel.precisions and not kernel.refuses(problem)
        if able and _worth_it(kernel, problem):
            return kernel
    text = "no kernel computes in {} on sm_{}{}.".format(problem.precision, *capability)
    raise BackendUnavailable(text, "use --precision fp32.")


def named(name: str, capability: tuple[int, int], problem: Problem, device: str = "this GPU") -> Kernel:
    """The kernel of that name; BackendUnavailable if it cannot compute the problem on the device."""
    kernel, hint = KERNELS[name], "see `flashcli kernels`."
    if not kernel.runs_on(capability):
        needed, found = architecture(kernel.needs), architecture(capability)
        raise BackendUnavailable(f"kernel {name} needs {needed}, {device} is {found}.", hint)
    if reason := kernel.refuses(problem):
        raise BackendUnavailable(f"kernel {name} cannot compute d = {problem.d}: {reason}.", hint)
    return kernel


def _worth_it(kernel: Kernel, problem: Problem) -> bool:
    """Heads shorter than `SHORT_HEAD` are left to FFMA in fp32, which is also more accurate there: the 22 bits of a
    split number show where a score is a sum of only a few products. So are, in place, `TINY` sequences."""
    few = problem.d < SHORT_HEAD or (problem.in_place and problem.N <= TINY)
    if kernel.splits and problem.precision == "fp32" and few:
        return False
    return kernel.name != "wgmma_short" or problem.N <= SHORT


def exact(kernel: Kernel) -> Kernel:
    """The kernel for inputs with NaN or Inf: itself, or one that does not split numbers."""
    return KERNELS["register_tiled"] if kernel.splits else kernel
