"""The plan of attention on arrays where they lie: the launches in order, and the scratch that they share."""

from __future__ import annotations

from flashcli.asked.attention import Call
from flashcli.asked.how import PRECISIONS, How, check_choice
from flashcli.errors import UsageError
from flashcli.kernels.arguments import POINTERS, argument
from flashcli.kernels.attention import KERNELS, chunk_tiles
from flashcli.kernels.choice import choose
from flashcli.kernels.operation import Build, Gpu, Operation, Plan, named
from flashcli.kernels.problem import Problem


def check(how: How) -> None:
    """Raise ValueError or UsageError for a precision or a kernel that does not exist for arrays on a GPU."""
    check_choice("precision", how.precision, PRECISIONS)
    if how.kernel is None:
        return
    kernel = named({name: one for name, one in KERNELS.items() if one.strided}, how.kernel, "arrays on a GPU")
    if how.precision not in kernel.precisions:
        raise UsageError(f"kernel {kernel.name} has no {how.precision}.", f"it has {', '.join(kernel.precisions)}.")


def plan(call: Call, gpu: Gpu, how: How) -> Plan:
    """The launches for a call that is not empty; BackendUnavailable says why the kernel named cannot compute it."""
    check(how)
    problem = problem_of(call, gpu, how)
    kernel = choose(gpu.capability, problem, how.kernel)
    build = Build(kernel, problem)
    return Plan(build.steps(), argument(call, chunk_tiles(build.tiling, problem)), build.workspace())


def problem_of(call: Call, gpu: Gpu, how: How) -> Problem:
    """The problem that a kernel is built for to compute this call where its arrays lie."""
    return Problem(
        call.B * call.H, call.M, call.N, call.d, call.causal, how.precision, gpu.multiprocessors, in_place=True,
        lse=bool(how.return_lse), dense=_is_dense(call), aligned=call.aligned, bias=call.bias,
        bias_contiguous=call.bias_contiguous, bias_together=call.together, mask_of_keys=call.mask_of_keys,
        batch_invariant=bool(how.batch_invariant), group=call.group, windowed=call.windowed, sequences=call.sequences,
        speed=gpu.speed,
        dtype=call.dtype, out_dtype=call.out_dtype,
    )  # fmt: skip


def _is_dense(call: Call) -> bool:
    """Whether the rows of each head follow one another without gaps, in Q, K, V and O."""
    strides = (call.q, call.M), (call.k, call.N), (call.v, call.N), (call.o, call.M)
    return all(row == call.d or rows == 1 for (_, _, row), rows in strides)


ATTENTION = Operation("attention", POINTERS, KERNELS, plan)
