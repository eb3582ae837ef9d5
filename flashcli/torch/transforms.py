"""Support of torch.func's transformations (grad, jacrev, ..) in an operator's kernel for autograd.

Transformations are nested in levels. PyTorch calls the kernel at the innermost level; a call that the kernel makes
below autograd comes to the next level. There PyTorch refuses a `torch.autograd.Function`, but not one for a single
level. While its ``forward`` runs, gradients and tangents are switched off, at the outer levels as well. The way to make
a function for a single level is private to PyTorch: where it has changed, PyTorch's operations compute, which PyTorch
transforms itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from flashcli.asked import attention as operands
from flashcli.torch import private


def levels() -> int:
    """The number of transformations of torch.func now going on that differentiate; 1 if that cannot be known."""
    if private.transformations is None or private.vmap is None:
        return 1
    return sum(level.key() != private.vmap for level in private.transformations() or ())


def depth() -> int:
    """The number of transformations of torch.func now going on, whatever they do; many if that cannot be known."""
    return sys.maxsize if private.transformations is None else len(private.transformations() or ())


def is_left_to_pytorch() -> bool:
    """Whether a transformation is going on for which no function of a single level can be made."""
    parts = (
        private.transformations, private.vmap, private.allow_single_level, private.SingleLevelFunction,
        private.set_tangents, private.below_autograd,
    )  # fmt: skip
    return None in parts and levels() > 0


@cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    parts = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (private.SingleLevelFunction,), parts)


def apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function's ``apply`` at this level of torch.func's transformations."""
    if not levels():
        return function.apply(*arguments)
    with private.allow_single_level():
        return _of_one_level(function).apply(*arguments)


def below_autograd(operator: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call an operator so that it bypasses this level's autograd; outer levels keep theirs."""
    if private.below_autograd is None:
        with torch.inference_mode():  # which bypasses it, too, but whose tensors cannot be saved for gradients
            found = operator(*arguments)
        return tuple(x.clone() for x in found)
    with private.below_autograd():
        if not levels():
            return operator(*arguments)
        with torch.enable_grad(), private.set_tangents(True):
            return operator(*arguments)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    return private.may_have_tangents() and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def checked(causal: bool, scale: float | None, q_start: int, window: Sequence[int]) -> operands.Options:
    """Return the options, checked by `asked.attention.checked` unless they may be a compiler's symbols."""
    if torch.compiler.is_compiling() or isinstance(q_start, torch.SymInt):
        return operands.Options(causal, scale, q_start, window)  # type: ignore[arg-type]
    return operands.checked(causal, scale, q_start, window)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A ``with`` block without autocast on a kind of device, so that formulas keep their digits."""
    if torch.compiler.is_dynamo_compiling() or not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
