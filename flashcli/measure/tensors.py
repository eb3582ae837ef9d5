"""Problems on PyTorch's tensors: their sizes, how they lie in memory, their numbers, and their answer in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashcli.asked.shape import Shape
from flashcli.measure.rows import Row

if TYPE_CHECKING:
    from torch import Tensor

    from flashcli.files.verify import Comparison

LAYOUTS = ("bhnd", "bnhd", "qkv")
CHECKED_ROWS = 512
CHECKED_HEADS = 64  # of all batches


@dataclass(frozen=True)
class Problem:
    """Attention of q [B, H, M, d] to k and v [B, Hkv, N, d].

    ``layout`` says how they lie: "bhnd", one after the other; "bnhd", as views of [B, N, H, d]; "qkv", as slices of one
    fused projection [B, N, H + 2 Hkv, d], M = N. ``bias`` is the shape of one of float32, if there is any, ``mask``
    that of a mask, which takes a tenth of the keys away.
    """

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    d: int
    causal: bool = False
    layout: str = "bhnd"
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None

    def __str__(self) -> str:
        heads = f"{self.H}" if self.Hkv == self.H else f"{self.H}/{self.Hkv}"
        rows = f"{self.N}" if self.M == self.N else f"{self.M}/{self.N}"
        return f"({self.B}, {heads}, {rows}, {self.d})"

    def about(self, case: str, contender: str) -> Row:
        """The beginning of a contender's row."""
        return Row.about(case, Shape(self.B, self.N, self.d), contender, self.causal)

    def figures(self) -> dict[str, Any]:
        """The fields of a row that `about` has not."""
        bias, mask = (None if shape is None else list(shape) for shape in (self.bias, self.mask))
        return {"H": self.H, "Hkv": self.Hkv, "M": self.M, "layout": self.layout, "bias": bias, "mask": mask}

    @property
    def bytes(self) -> int:
        """Bytes of Q, K and V."""
        return 4 * self.B * self.d * (self.H * self.M + 2 * self.Hkv * self.N)

    @property
    def operations(self) -> int:
        """4 for each number of a head and each pair of a query and a key that it sees; exponentials are not counted."""
        seen = min(self.M, self.N)
        unmasked = seen * (seen + 1) // 2 + (self.M - seen) * self.N
        return 4 * self.B * self.H * (unmasked if self.causal else self.M * self.N) * self.d


@dataclass(frozen=True)
class Inputs:
    """Tensors of a `Problem`, and where its answer goes: None where it is allocated, contiguous.

    ``do`` is the gradient of a loss with respect to the answer, where gradients are timed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    out: Tensor | None = None
    do: Tensor | None = None

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """Tensors whose gradients are taken: q, k, v, and the bias, if there is one."""
        return tuple(x for x in (self.q, self.k, self.v, self.bias) if x is not None)

    def changes(self, problem: Problem, batch: int, head: int, rows: Any) -> Tensor:
        """Numbers that are added to a head's scores, [rows, N] in float64: -inf where the mask is false."""
        import torch

        found = torch.zeros(len(rows), problem.N, dtype=torch.float64, device=self.q.device)
        shape = problem.B, problem.H, problem.M, problem.N
        if self.bias is not None:
            found += self.bias.detach().expand(shape)[batch, head][rows]
        return (
            found if self.mask is None else found.masked_fill(~self.mask.expand(shape)[batch, head][rows], -torch.inf)
        )


def random_inputs(problem: Problem, seed: int, device: str, dtype: str = "float32") -> Inputs:
    """Numbers uniform in [-3, 3]; the answer lies as the inputs do, with rows before heads where theirs have them."""
    import torch

    generator, kind = torch.Generator(device).manual_seed(seed), getattr(torch, dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.empty(shape, device=device).uniform_(-3, 3, generator=generator).to(kind)

    B, H, Hkv, M, N, d = problem.B, problem.H, problem.Hkv, problem.M, problem.N, problem.d
    if problem.layout == "qkv":
        q, k, v = uniform(B, N, H + 2 * Hkv, d).transpose(1, 2).split([H, Hkv, Hkv], dim=1)
    elif problem.layout == "bnhd":
        q, k, v = (uniform(B, n, heads, d).transpose(1, 2) for n, heads in ((M, H), (N, Hkv), (N, Hkv)))
    else:
        q, k, v = (uniform(B, heads, n, d) for n, heads in ((M, H), (N, Hkv), (N, Hkv)))
    out = None if problem.layout == "bhnd" else torch.empty(B, M, H, d, device=device).transpose(1, 2)
    mask = None if problem.mask is None else torch.rand(problem.mask, generator=generator, device=device) < 0.9
    return Inputs(q, k, v, None if problem.bias is None else uniform(*problem.bias), mask, out)


Sample = list[tuple[int, int, Any, Any]]  # rows of the right answer: batch, head, which rows, [rows, d] in float64


def sample(problem: Problem, inputs: Inputs, seed: int) -> Sample:
    """A seeded sample of rows, as they are in float64."""
    import numpy as np

    rng, heads = np.random.default_rng(seed), problem.B * problem.H
    chosen = rng.choice(heads, min(heads, CHECKED_HEADS), replace=False)
    per_head = max(1, min(problem.M, CHECKED_ROWS // len(chosen)))
    known = []
    for batch, head in (divmod(int(index), problem.H) for index in chosen):
        rows = np.sort(rng.choice(problem.M, per_head, replace=False))
        known.append((batch, head, rows, _rows_in_float64(problem, inputs, batch, head, rows).cpu().numpy()))
    return known


def compared(known: Sample, answer: Tensor) -> Comparison:
    """How an answer [B, H, M, d] compares with the rows that are known."""
    import torch

    from flashcli.files.verify import Comparison

    comparison, answer = Comparison(), answer.detach()
    got = torch.stack([answer[batch, head][rows] for batch, head, rows, _ in known]).float().cpu().numpy()
    for some, (batch, head, rows, want) in zip(got, known, strict=True):
        comparison.add(some, want, batch * answer.shape[1] + head, rows)
    return comparison


def _rows_in_float64(problem: Problem, inputs: Inputs, batch: int, head: int, rows: Any) -> Tensor:
    shared = head * problem.Hkv // problem.H
    q = inputs.q.detach()[batch, head][rows].double()
    k, v = (x.detach()[batch, shared].double() for x in (inputs.k, inputs.v))
    return in_float64(problem, q, k, v, inputs.changes(problem, batch, head, rows), rows)


def in_float64(problem: Problem, q: Tensor, k: Tensor, v: Tensor, changes: Tensor, rows: Any) -> Tensor:
    """Some rows of a head's attention, of their queries [rows, d], keys and values [N, d], and what scores gain."""
    import torch

    scores = q @ k.mT * problem.d**-0.5 + changes
    if problem.causal:
        keys = torch.arange(problem.N, device=q.device)
        scores = scores.masked_fill(keys > torch.as_tensor(rows, device=q.device)[:, None], -torch.inf)
    return scores.softmax(-1) @ v
