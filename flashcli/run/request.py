"""The request to a backend, and the choice of a backend that can do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashcli.asked.how import PRECISIONS, check_choice
from flashcli.asked.shape import Shape
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels.attention import KERNELS
from flashcli.run.slots import Backend, ignore

BACKENDS = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class Request:
    """How attention is to be computed, and where.

    backend : "cuda", "cpu", or "auto", which is the GPU if there is a usable one, else the CPU
    causal : query i sees keys 0 to i only
    scale : factor on Q Kᵀ; 1/sqrt(d) if None
    kernel : a kernel by name; the best for the GPU if None
    precision : "fp32" or "fp16", for kernels that have both
    device : the number of the GPU; if None, it follows from ``turn``
    turn : processes of one machine that have different turns get different GPUs, as far as there are
    threads : how many the CPU backend has; as many as there are ``cores`` if None
    cores : how many this process may keep busy; all that the system lets it use if None
    max_device_bytes : the most memory to take on the GPU; as much as there is if None
    emulate : run the kernel on the CPU, its threads emulated
    """

    backend: str = "auto"
    causal: bool = False
    scale: float | None = None
    kernel: str | None = None
    precision: str = "fp32"
    device: int | None = None
    turn: int = 0
    threads: int | None = None
    cores: int | None = None
    max_device_bytes: int | None = None
    emulate: bool = False

    @property
    def on_host(self) -> bool:
        """Whether a kernel was asked for that runs on the CPU."""
        return self.kernel is not None and KERNELS[self.kernel].on_host

    @property
    def needs_gpu(self) -> bool:
        """Whether something was asked for that the CPU backend does not have, so that it is no substitute."""
        return self.backend == "cuda" or self.kernel is not None or self.device is not None or self.precision != "fp32"


def as_argument(name: str, value: object = None) -> str:
    """How Python spells a field of a request, or a field with a value."""
    return name if value is None else f"{name}={value!r}"


def refuse_conflicts(request: Request, spelled: Callable[..., str] = as_argument) -> None:
    """Refuse what does not go together, in words in which the fields are ``spelled`` as whoever asked knows them."""
    kernel, precision, on_cpu = request.kernel, request.precision, request.backend == "cpu"
    check_choice("backend", request.backend, BACKENDS)
    check_choice("precision", precision, PRECISIONS)
    if kernel is not None and kernel not in tuple(KERNELS):  # which a list can be looked for in
        raise UsageError(f"there is no kernel {kernel!r}.", f"choose one of {', '.join(KERNELS)}.")
    if kernel is not None and precision not in KERNELS[kernel].precisions:
        raise UsageError(f"kernel {kernel} has no {precision}.", f"it has {', '.join(KERNELS[kernel].precisions)}.")
    if request.emulate:
        _refuse_emulating(request, spelled)
        return
    if request.threads is not None and request.needs_gpu:
        raise UsageError(
            f"{spelled('threads')} is for the cpu backend, not for GPUs or kernels.", f"leave out {spelled('threads')}."
        )
    if request.on_host:
        given = {
            spelled("backend", "cuda"): request.backend == "cuda",
            spelled("device"): request.device is not None,
            spelled("max_device_bytes"): request.max_device_bytes is not None,
        }
        if names := " and ".join(name for name, is_given in given.items() if is_given):
            raise UsageError(
                f"{names}: for GPUs, but kernel {kernel} runs on the CPU.",
                f"leave out {names}, or {spelled('kernel')}.",
            )
    elif on_cpu and (kernel is not None or request.device is not None):
        names = f"{spelled('kernel')} and {spelled('device')}"
        raise UsageError(f"{names} are for GPUs, not for the cpu backend.", f"leave out {spelled('backend', 'cpu')}.")
    elif on_cpu and request.max_device_bytes is not None:
        raise UsageError(
            f"{spelled('max_device_bytes')} is for GPUs, not for the cpu backend.",
            f"leave out {spelled('max_device_bytes')}.",
        )
    elif on_cpu and precision != "fp32":
        raise UsageError(f"the cpu backend has no {precision}.", f"leave out {spelled('precision')}.")


def _refuse_emulating(request: Request, spelled: Callable[..., str]) -> None:
    given = {
        spelled("backend", request.backend): request.backend != "auto",
        spelled("device"): request.device is not None,
        spelled("max_device_bytes"): request.max_device_bytes is not None,
    }
    if names := " and ".join(name for name, is_given in given.items() if is_given):
        raise UsageError(f"{names}: what is emulated runs on the CPU, by the emulator.", f"leave out {names}.")
    if request.kernel is None or request.on_host:
        kernels = ", ".join(name for name, kernel in KERNELS.items() if not kernel.on_host)
        hint = f"add {spelled('kernel')} and one of {kernels}."
        if request.on_host:
            hint = f"leave it out: {request.kernel} runs on the CPU as it is."
        raise UsageError(f"{spelled('emulate')} is for a kernel of GPUs, by name.", hint)


def open_backend(
    request: Request, shape: Shape, rows: int | None = None, notice: Callable[[str], None] = ignore
) -> Backend:
    """An open backend for inputs of a shape, of whose Q ``rows`` come at a time; a ``with`` block closes it.

    It is right for any B, N and number of rows; they only decide which tiles are fastest. Where the GPU was left open
    and none is usable, it is the CPU, with one ``notice``.
    """
    refuse_conflicts(request)
    if request.emulate:
        from flashcli.kernels.problem import Problem
        from flashcli.run.slots_emulated import EmulatedBackend

        sizes = shape.B, rows or shape.N, shape.N
        problem = Problem(*sizes, shape.d, request.causal, request.precision)
        threads = request.threads or request.cores
        return EmulatedBackend(str(request.kernel), problem, request.scale, threads, notice)
    if request.on_host:
        from flashcli.run.slots_sequential import SequentialBackend

        return SequentialBackend(shape.d, request.causal, request.scale)
    if request.backend != "cpu":
        from flashcli.run.slots_cuda import CudaBackend

        try:
            return CudaBackend(
                shape.d, request.causal, request.scale, request.kernel, request.precision, request.device, request.turn,
                (shape.B, rows or shape.N, shape.N), request.max_device_bytes,
            )  # fmt: skip
        except BackendUnavailable as error:
            if request.needs_gpu:
                raise
            notice(f"no usable GPU, computing on the CPU: {error}")
    from flashcli.run.slots_cpu import CpuBackend

    return CpuBackend(request.causal, request.scale, request.threads or request.cores)
