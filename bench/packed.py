"""Packed sequences and a window, forward and gradients, beside PyTorch's nested tensors and FlexAttention.

``python -m bench.packed [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import scripts
from flashcli.measure import clocks, peers
from flashcli.measure.bench import REFUSED_ABOVE, Conditions
from flashcli.measure.rows import Failure, Gradients, InPlace, Row, over_all

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (1, 100, 500, 1000, 1500, 2200, 3000, 4000)  # of packed sequences
INPUTS = 2  # sets of tensors that take turns
Call = Callable[[], Any]


class Case(NamedTuple):
    """Sequences of these lengths, packed, or without any a batch of B sequences of N; ``left`` keys of a window."""

    lengths: tuple[int, ...] = ()
    B: int = 1
    N: int = 4000
    H: int = 16
    d: int = 64
    causal: bool = False
    left: int = -1

    @property
    def tokens(self) -> int:
        return sum(self.lengths) or self.N

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it sees, in a head."""
        if not self.causal:
            return sum(n * n for n in self.lengths) or self.B * self.N**2
        rows = self.N if self.left < 0 else min(self.left + 1, self.N)
        return self.B * (rows * (rows + 1) // 2 + (self.N - rows) * rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens, self.H, self.d) if self.lengths else (self.B, self.H, self.N, self.d)

    def starts(self) -> Tensor:
        import torch

        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device="cuda")

    def options(self) -> dict[str, Any]:
        """Options of `flashcli.attention`."""
        named: dict[str, Any] = {"causal": self.causal, "window": (self.left, -1)}
        return named | ({"cu_seqlens_q": self.starts()} if self.lengths else {})


CASES = {
    "one sequence": Case(),
    "8 sequences, packed": Case(LENGTHS),
    "all before": Case(B=4, N=16384, causal=True),
    "window of 512": Case(B=4, N=16384, causal=True, left=511),
}


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Call, Call]:
    """Calls of attention, and of its gradients, which are given what the forward pass gave."""
    from flashcli.torch import attention, attention_backward

    named = case.options()
    o, lse = attention(q, k, v, **named, return_lse=True)
    return (
        functools.partial(attention, q, k, v, **named),
        functools.partial(attention_backward, do, q, k, v, **named, o=o, lse=lse),
    )


def nested(case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Call, Call]:
    """PyTorch's attention of nested tensors."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not case.lengths:
        raise RuntimeError("for packed sequences only")
    offsets = case.starts().long()
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    a, b, c = [
        torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=1, max_seqlen=max(case.lengths)).transpose(1, 2)
        for x in inputs
    ]
    return _with_autograd(lambda: scaled_dot_product_attention(a, b, c).transpose(1, 2).values(), inputs, do)


def flex(case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Call, Call]:
    """FlexAttention, compiled, with the tiles of its mask made before the clock starts."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.left < 0:
        raise RuntimeError("for windows only")

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= case.left)

    mask = create_block_mask(sees, None, None, case.tokens, case.tokens, device="cuda")
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    compiled: Any = torch.compile(flex_attention)
    return _with_autograd(lambda: compiled(*inputs, block_mask=mask), inputs, do)


def _with_autograd(attend: Call, inputs: list[Tensor], do: Tensor) -> tuple[Call, Call]:
    import torch

    answer = attend()

    def forward() -> Any:
        with torch.no_grad():
            return attend()

    return forward, functools.partial(torch.autograd.grad, answer, inputs, do, retain_graph=True)


CONTENDERS = {"flashcli": ours, "PyTorch nested": nested, "FlexAttention": flex}


def measured(conditions: Conditions) -> Iterator[Row]:
    """The rows of each case: forward, then gradients."""
    import torch

    for name, case in CASES.items():
        torch.manual_seed(conditions.seed)
        sets = [[torch.empty(case.shape, device="cuda").uniform_(-3, 3) for _ in range(4)] for _ in range(INPUTS)]
        want = _in_float64(case, *sets[0])
        found = {contender: _calls(contender, case, sets) for contender in CONTENDERS}
        for gradients in (False, True):
            yield from _raced(name, case, found, want, gradients, conditions.runs)
        del sets, found, want
        peers.release()


def _calls(contender: str, case: Case, sets: list[list[Tensor]]) -> list[tuple[Call, Call]] | str:
    """The calls of a contender for each set of tensors, or why there are none."""
    try:
        return [CONTENDERS[contender](case, *tensors) for tensors in sets]
    except Exception as error:  # a peer may fail in any way: the other rows shall survive
        return (str(error).strip() or type(error).__name__).splitlines()[0]


def _raced(
    name: str, case: Case, found: dict[str, Any], want: list[Tensor], gradients: bool, runs: int
) -> Iterator[Row]:
    """A row for each contender that there is, those with right answers timed in turn."""
    ready: dict[str, tuple[dict[str, Any], list[float], list[Call]]] = {}
    rows = []
    for contender, calls in found.items():
        about: dict[str, Any] = {
            "case": name, "B": len(case.lengths) or case.B, "N": case.tokens, "d": case.d, "causal": case.causal,
            "contender": contender,
        }  # fmt: skip
        try:
            if isinstance(calls, str):
                raise RuntimeError(calls)
            errors = _errors(case, calls[0][gradients](), want[1:] if gradients else want[:1])
            largest = max(errors[: len(errors) // 2])
        except Exception as error:
            if "only" not in str(error):
                rows.append(Failure.of(Row(**about), error))
            continue
        if not largest <= REFUSED_ABOVE["float32"]:
            rows.append(Failure(**about, relative_l2=largest, error=f"wrong: relative L2 {largest:.1e}"))
            continue
        ready[contender] = about, errors, [call[gradients] for call in calls]
    times = clocks.on_gpu([turns for *_, turns in ready.values()], runs)
    for (about, errors, _), seconds in zip(ready.values(), times, strict=True):
        figures: dict[str, Any] = over_all(seconds)
        operations = 2 * case.H * case.pairs * case.d * (5 if gradients else 2)
        figures |= {
            "relative_l2": max(errors[: len(errors) // 2]),
            "tflops": operations / figures["seconds"] / 1e12,
            "H": case.H,
        }
        figures |= {"Hkv": case.H, "M": case.tokens, "layout": "bnhd" if case.lengths else "bhnd", "clock": "gpu"}
        if gradients:
            yield Gradients(**about, **figures, dq=errors[0], dk=errors[1], dv=errors[2])
        else:
            yield InPlace(**about, **figures, max_abs=errors[1])
    yield from rows


def _in_float64(case: Case, *tensors: Tensor) -> list[Tensor]:
    """O, dQ, dK and dV of the first head, and batch, by the formulas in float64."""
    import torch

    from flashcli.torch import gradients
    from flashcli.torch.sight import Sight

    q, k, v, do = (_of_head(case, x).double() for x in tensors)
    options = case.options()
    sight = Sight(options["window"], None, options.get("cu_seqlens_q"))
    scores = gradients.Scores(None, None, case.causal, None, 0, sight)
    o, lse = gradients.attention(q, k, v, scores)
    found = gradients.gradients(do, None, q, k, v, o, lse, scores)
    torch.cuda.empty_cache()
    return [o, *found[:3]]


def _of_head(case: Case, x: Tensor) -> Tensor:
    return x.detach()[:, :1] if case.lengths else x.detach()[:1, :1]


def _errors(case: Case, got: Any, want: list[Tensor]) -> list[float]:
    """‖got - want‖ / ‖want‖ of each array that a call gives, then each largest |got - want|, in the first head."""
    given = got if isinstance(got, tuple) else (got,)
    pairs = [(_of_head(case, x).double(), y) for x, y in zip(given, want, strict=True)]
    return [float((x - y).norm() / y.norm()) for x, y in pairs] + [float((x - y).abs().max()) for x, y in pairs]


main = scripts.of_tensors(
    "packed", measured, 10, "Time packed sequences and a window on this machine's first GPU, beside PyTorch's."
)


if __name__ == "__main__":
    scripts.run(main)
