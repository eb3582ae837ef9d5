"""Attention on PyTorch's tensors where they lie, timed beside PyTorch's and Triton's on the same tensors.

Every contender's answer is checked first; one that is wrong, or fails, is told and not timed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.shape import ceil_div
from flashcli.measure import peers
from flashcli.measure.bench import L2_BYTES, Conditions, judged, versions
from flashcli.measure.bench import Contender as OfFiles
from flashcli.measure.clocks import Turns, on_cpu, on_gpu
from flashcli.measure.rows import Failure, InPlace, Row, over_all
from flashcli.measure.tensors import Inputs, Problem, Sample, compared, random_inputs, sample

Clock = Callable[[Sequence[Turns], int], list[list[float]]]
CLOCKS: dict[str, Clock] = {"gpu": on_gpu, "cpu": on_cpu}
EFFICIENT = "PyTorch efficient"
PRODUCTS = ("tf32x3", "bf16x6")  # of the Triton kernel: how it makes one fp32 product of several shorter ones


class Contender(NamedTuple):
    """``bind(problem, inputs)`` gives a call without arguments, for a tensor [B, H, M, d] as accurate as ``dtype``.

    The inputs are of type ``takes``; with ``gradients``, those of q, k and v are wanted.
    """

    name: str
    bind: Callable[[Problem, Inputs], Callable[[], Any]]
    dtype: str = "float32"
    takes: str = "float32"
    gradients: bool = False


Entrant = tuple[Contender, Problem]


def ours(
    kernel: str | None = None, precision: str = "fp32", name: str = "flashcli", gradients: bool = False
) -> Contender:
    """`flashcli.attention` with a kernel, or its own choice."""
    from flashcli.api import attention

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        return functools.partial(
            attention, inputs.q, inputs.k, inputs.v, problem.causal, bias=inputs.bias, mask=inputs.mask, out=inputs.out,
            kernel=kernel, precision=precision,
        )  # fmt: skip

    label = kernel or name
    if precision == "fp16":
        return Contender(f"{label} fp16", bind, "float16")
    return Contender(label, bind, gradients=gradients)


def pytorchs_choice(gradients: bool = False) -> Contender:
    """PyTorch's attention, whichever it chooses."""
    from torch.nn.functional import scaled_dot_product_attention

    return Contender("PyTorch SDPA", bound(scaled_dot_product_attention), gradients=gradients)


def pytorchs() -> list[Contender]:
    """PyTorch's attention on a GPU by each of its ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(way: SDPBackend, *tensors: Any, **options: Any) -> Any:
        with sdpa_kernel(way):
            return scaled_dot_product_attention(*tensors, **options)

    def contender(name: str, dtype: str, way: SDPBackend) -> Contender:
        by_it = functools.partial(attend, way)
        return Contender(name, bound(_repeating_heads(by_it) if name == EFFICIENT else by_it), dtype, dtype)

    return [
        contender("PyTorch math", "float32", SDPBackend.MATH),
        contender(EFFICIENT, "float32", SDPBackend.EFFICIENT_ATTENTION),
        contender("PyTorch flash fp16", "float16", SDPBackend.FLASH_ATTENTION),
        contender("PyTorch cuDNN fp16", "float16", SDPBackend.CUDNN_ATTENTION),
    ]


def bound(attend: Callable[..., Any]) -> Callable[[Problem, Inputs], Callable[[], Any]]:
    """A binder for a function with the parameters of PyTorch's."""

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        grouped = {"enable_gqa": True} if problem.Hkv != problem.H else {}
        return functools.partial(
            attend,
            inputs.q,
            inputs.k,
            inputs.v,
            attn_mask=_merged(problem, inputs),
            is_causal=problem.causal,
            **grouped,
        )

    return bind


def _merged(problem: Problem, inputs: Inputs) -> Any:
    """A bias and a mask in one tensor, for attention that takes no two; PyTorch's wants it in the shape of scores."""
    if inputs.bias is None or inputs.mask is None:
        return inputs.mask if inputs.bias is None else inputs.bias.expand(problem.B, problem.H, problem.M, problem.N)
    return inputs.bias.masked_fill(~inputs.mask, float("-inf"))


def _repeating_heads(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention that takes no grouped heads: k's and v's heads are repeated in memory, which is timed too."""

    def repeating(q: Any, k: Any, v: Any, enable_gqa: bool = False, **options: Any) -> Any:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return attend(q, k, v, **options)

    return repeating


def tritons() -> list[Contender]:
    """The Triton kernel, with each kind of products that is accurate to fp32."""
    from flashcli.measure import peer_triton

    def bind(problem: Problem, inputs: Inputs, products: str) -> Callable[[], Any]:
        if problem.bias is not None or problem.mask is not None:
            raise RuntimeError("the Triton peer has no bias and no mask")
        return functools.partial(peer_triton.attend, inputs.q, inputs.k, inputs.v, products, problem.causal)

    return [Contender(f"Triton {products}", functools.partial(bind, products=products)) for products in PRODUCTS]


def gpu_peers(against: Collection[str]) -> list[Contender]:
    """The peers of the packages "torch" and "triton"."""
    return [*(pytorchs() if "torch" in against else []), *(tritons() if "triton" in against else [])]


def gpu_contenders(kernels: Collection[str], precisions: Collection[str], against: Collection[str]) -> list[Contender]:
    """Kernels of ours, and the peers."""
    return [*(ours(*version) for version in versions(kernels, precisions)), *gpu_peers(against)]


def cpu_contenders(against: Collection[str]) -> list[Contender]:
    return [ours(name="flashcli cpu"), *([pytorchs_choice()] if "torch" in against else [])]


def of_files(contender: Contender, causal: bool, clock: str) -> OfFiles:
    """A contender on tensors as one of `flashcli bench`, on what input files hold: [B, 3, N, d]."""
    import torch

    def measure(inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        B, N, d = out.shape
        problem = Problem(B, 1, 1, N, N, d, causal)
        where = {"device": "cuda" if clock == "gpu" else "cpu", "dtype": getattr(torch, contender.takes)}
        given = [[torch.from_numpy(x[:, i, None]).to(**where).contiguous() for i in range(3)] for x in inputs]
        turns = [contender.bind(problem, Inputs(*qkv)) for qkv in given]
        [seconds] = CLOCKS[clock]([turns], runs)
        out[...] = turns[0]()[:, 0].float().cpu().numpy()
        return seconds

    return OfFiles(contender.name, contender.dtype, None, measure)


class Ready(NamedTuple):
    """A contender with a right answer: how right, and its calls."""

    accuracy: dict[str, Any]
    turns: Turns


class Drawn(NamedTuple):
    """Inputs that entrants with the same problem share, and what is known of the right answer to the first."""

    inputs: list[Inputs]
    known: Any


class Contest(NamedTuple):
    """The thing that contenders are raced for, answers or gradients, and how it is drawn, judged and told.

    draw : inputs of a problem and a type, whose gradients may be wanted, by a seed on a device
    judge : how right an answer to the first of them is, beside what is known; or the row of a wrong one
    kind : the type of rows
    work : the operations of a contender of a name, in those of attention itself
    """

    draw: Callable[..., Drawn]
    judge: Callable[[Row, Any, Any, str], dict[str, Any] | Failure]
    kind: type[InPlace]
    work: Callable[[str], float]


def inputs_for(problem: Problem, takes: str, gradients: bool, seed: int, device: str, most: int = 8) -> list[Inputs]:
    """Inputs, as many as no cache holds, up to ``most``."""
    count = min(most, max(2, ceil_div(L2_BYTES, problem.bytes)))
    found = [random_inputs(problem, seed + index, device, takes) for index in range(count)]
    for tensor in (tensor for inputs in found if gradients for tensor in inputs.wanted):
        tensor.requires_grad_()
    return found


def _drawn(problem: Problem, takes: str, gradients: bool, seed: int, device: str) -> Drawn:
    inputs = inputs_for(problem, takes, gradients, seed, device)
    return Drawn(inputs, sample(problem, inputs[0], seed))


def _judged(about: Row, known: Sample, answer: Any, dtype: str) -> dict[str, Any] | Failure:
    return judged(about, compared(known, answer), dtype)


ANSWERS = Contest(_drawn, _judged, InPlace, lambda name: 1)


def bench(
    problems: dict[str, Problem], contenders: Sequence[Contender], conditions: Conditions, device: str = "cuda",
    contest: Contest = ANSWERS,
) -> Iterator[Row]:  # fmt: skip
    """A row for each problem and contender."""
    for case, problem in problems.items():
        entrants = [(contender, problem) for contender in contenders]
        yield from race(case, entrants, "gpu" if device == "cuda" else "cpu", conditions, device, contest)


def race(
    case: str, entrants: Sequence[Entrant], clock: str, conditions: Conditions, device: str = "cuda",
    contest: Contest = ANSWERS, clocks: Mapping[str, Clock] = CLOCKS,
) -> list[Row]:  # fmt: skip
    """A row for each entrant: those with a right answer are timed in turn, by the clock of that name."""
    found = checked(case, entrants, conditions.seed, device, contest)
    ready = [one.turns for one in found if isinstance(one, Ready)]
    times = iter(clocks[clock](ready, conditions.runs) if ready else [])

    def timed(contender: Contender, problem: Problem, accuracy: dict[str, Any]) -> Row:
        seconds = over_all(next(times))
        rate = contest.work(contender.name) * problem.operations / seconds["seconds"] / 1e12
        about = vars(problem.about(case, contender.name))
        return contest.kind(**about, **accuracy, **seconds, tflops=rate, **problem.figures(), clock=clock)

    rows = [
        one if isinstance(one, Failure) else timed(*entrant, one.accuracy)
        for entrant, one in zip(entrants, found, strict=True)
    ]
    del found, ready  # whose tensors are then free for the next race
    peers.release()
    return rows


def checked(
    case: str, entrants: Sequence[Entrant], seed: int, device: str = "cuda", contest: Contest = ANSWERS
) -> list[Ready | Failure]:
    """Each entrant's calls, if its answer is right."""
    draw = functools.cache(functools.partial(contest.draw, seed=seed, device=device))

    def ready(contender: Contender, problem: Problem) -> Ready | Failure:
        about = problem.about(case, contender.name)
        try:
            inputs, known = draw(problem, contender.takes, contender.gradients)
            turns = [contender.bind(problem, some) for some in inputs]
            accuracy = contest.judge(about, known, turns[0](), contender.dtype)
        except Exception as error:  # a peer may fail in any way: the other rows shall survive
            return Failure.of(about, error)
        return accuracy if isinstance(accuracy, Failure) else Ready(accuracy, turns)

    return list(itertools.starmap(ready, entrants))
