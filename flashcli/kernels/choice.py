"""Which kernel computes when nobody names one."""

from __future__ import annotations

from flashcli.errors import BackendUnavailable
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.types import Kernel

SHORT_HEAD = 16  # tensor cores multiply 16 columns or more at a time: a shorter head would mostly multiply padding


def choose(capability: tuple[int, int], d: int, precision: str = "fp32") -> Kernel:
    """The fastest kernel for head size d on a device of this compute capability; its tiles then depend on the shape.

    Heads shorter than `SHORT_HEAD` are left to FFMA in fp32, which is also more accurate there: the 22 bits of a split
    number show where a score is a sum of only a few products.
    """
    fit = [
        kernel
        for kernel in KERNELS.values()
        if kernel.runs_on(capability)
        and precision in kernel.precisions
        and not (kernel.splits and precision == "fp32" and d < SHORT_HEAD)
    ]
    if not fit:
        raise BackendUnavailable(
            "no kernel computes in {} on sm_{}{}.".format(precision, *capability), "use --precision fp32."
        )
    return fit[-1]


def exact(kernel: Kernel) -> Kernel:
    """The kernel for inputs with NaN or Inf: itself, or one that does not split numbers."""
    return KERNELS["register_tiled"] if kernel.splits else kernel
