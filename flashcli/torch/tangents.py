"""Tangents of PyTorch's tensors on a GPU, with memory that grows with M + N: forward mode, and gradients of gradients.

The tangents of dQ, dK, dV and O are gradients of gradients (cuda/backward/tangents.cuh): with a loss's gradients with
respect to dQ, dK and dV as directions, they are its gradients with respect to Q, K, V and dO. O and the LSE are taken
for functions of Q, K and V, so that nothing is left for their own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from flashcli.asked.how import How
from flashcli.asked.tangents import tangents
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import prepare
from flashcli.kernels.tangents import KERNELS, TANGENTS
from flashcli.torch import in_place, private, transforms
from flashcli.torch.sight import Sight

SCHEMA = (
    "attention_tangents(Tensor? tq, Tensor? tk, Tensor? tv, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor? bias, "
    "Tensor? mask, bool causal, float? scale, SymInt q_start, int[2] window, Tensor? alibi_slopes) -> (Tensor, Tensor)"
)
Optional: TypeAlias = torch.Tensor | None


class Found(NamedTuple):
    """The tangents of O and the LSE, and of dQ, dK and dV, as gradients have them: those of dO and dlse first."""

    do: torch.Tensor
    dlse: torch.Tensor
    q: Optional = None
    k: Optional = None
    v: Optional = None


def fit(tensors: Sequence[Any], sight: Sight, transformed: bool = False) -> bool:
    """Whether kernels compute tangents of these tensors: float32, on a GPU that has such a kernel, and not packed.

    Others are left to PyTorch's operations, and so are third derivatives, and what torch.func transforms: but a single
    transformation, where those that are ``transformed`` will do.
    """
    given = [x for x in tensors if x is not None and x.dtype != torch.bool]
    return (
        not sight.packed
        and transforms.depth() <= transformed
        and all(type(x) in in_place.ORDINARY and x.is_cuda and not x.is_neg() for x in given)
        and all(x.dtype == torch.float32 and x.numel() for x in given)
        and KERNELS["register_tiled"].runs_on(place_of_device(given[0].get_device()).gpu.capability)
    )


def compute(
    along: Sequence[Optional],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    do: Optional,
    dlse: Optional,
    bias: Optional,
    mask: Optional,
    causal: bool,
    scale: float | None,
    q_start: int,
    sight: Sight,
) -> Found:
    """Queue the tangents along directions of Q, K and V, None for no change; without ``do``, of O and the LSE alone."""
    tq, tk, tv = (
        torch.zeros_like(x) if y is None else in_place.rows_contiguous(y) for x, y in zip((q, k, v), along, strict=True)
    )
    do = None if do is None else in_place.rows_contiguous(do)
    matrices = tq, tk, tv, q, k, v
    found = Found(
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, lse, *(() if do is None else (q, k, v))))
    )
    addresses = 0
    for x in (*matrices, found.do, *(() if do is None else (do, found.q, found.k, found.v))):
        addresses |= x.data_ptr()
    of = sight.operands(tq=tq, tk=tk, tv=tv, q=q, k=k, v=v, lse=lse, do=do, dlse=dlse, bias=bias, mask=mask)
    given = {name: x for name, x in of.items() if x is not None}  # no starts of sequences among them, see `fit`
    place = place_of_device(q.get_device())
    at_bias, at_mask = in_place.score_addresses(bias, mask)
    asked = tangents(**given, causal=causal, scale=scale, q_start=q_start).at(addresses, at_bias, at_mask)
    prepared = prepare(place, TANGENTS, asked, How())
    stream = private.current_stream(place.device)
    named: dict[str, Any] = {
        "dO": do, "Q": q, "K": k, "V": v, "lse": lse, "dlse": dlse, "tQ": tq, "tK": tk, "tV": tv, "tO": found.do,
        "tlse": found.dlse, "dQ": found.q, "dK": found.k, "dV": found.v,
        "workspace": in_place.scratch(q, prepared.workspace, stream),
    }  # fmt: skip
    at = {name: x.data_ptr() for name, x in named.items() if x is not None}
    at |= {"bias": at_bias, "mask": at_mask, "slopes": sight.addresses()[0]}
    prepared.launch(stream, *(at.get(name, 0) for name in TANGENTS.pointers))
    return found


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *directions, q, k, v, lse, bias, mask, causal, scale, q_start, window, slopes = arguments
    options = causal, scale, q_start, Sight(window, slopes)
    return compute(directions, q, k, v, lse, None, None, bias, mask, *options)[:2]


def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tangents of O and the LSE, by an operator, so that a transformation of torch.func gives it its own tensors.

    Arguments are those of ``SCHEMA``.
    """
    return transforms.below_autograd(torch.ops.flashcli.attention_tangents.default, *arguments)


library = torch.library.Library("flashcli", "FRAGMENT")
library.define(SCHEMA)
library.impl("attention_tangents", _forward, "CompositeExplicitAutograd")
