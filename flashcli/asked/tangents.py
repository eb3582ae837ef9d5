"""Calls of tangents, of attention and of its gradients: outlines of arrays, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashcli.asked.attention import Backward, Call, Operand, backward, call, check_type, contiguous


class Tangents(NamedTuple):
    """A call of tangents: sizes, strides and options, without the arrays' addresses; hashable.

    ``of`` is the call of the gradients whose tangents are wanted, laid out as it has the gradients. ``along`` is a call
    with the directions in place of Q, K and V, and O's tangent in place of O. The LSE's tangent is contiguous. Without
    ``gradients``, tangents of O and the LSE alone are wanted.
    """

    of: Backward
    along: Call
    gradients: bool

    def at(self, addresses: int, of_bias: int = 0, of_mask: int = 0) -> Tangents:
        """The call with `Backward.at` of these addresses, or'ed, which the directions' rows are on, too."""
        of, along = self.of.at(addresses, of_bias, of_mask), self.along.at(addresses)
        return self._replace(of=of._replace(aligned=of.aligned and along.aligned))


def tangents(
    tq: Operand,
    tk: Operand,
    tv: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    lse: Operand | None = None,
    do: Operand | None = None,
    **others: Any,
) -> Tangents:
    """The `Tangents` of operands, and ``others`` of `backward`; without ``do``, those of gradients are not wanted.

    Raises TypeError for an argument of the wrong type, ValueError for one of the wrong shape or strides.
    """
    for name, x, like in (("q", q, q), ("k", k, k), ("v", v, v), ("tq", tq, q), ("tk", tk, k), ("tv", tv, v)):
        check_type(name, x, ("float32",))
        if x.shape != like.shape:
            raise ValueError(f"{name} must have the shape of {name[1:]}, {list(like.shape)}, not {list(x.shape)}")
    o = None if lse is None else contiguous(q.shape, "float32")
    return Tangents(backward(q if do is None else do, q, k, v, o, lse, **others), call(tq, tk, tv), do is not None)
