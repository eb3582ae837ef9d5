"""Support of torch.func's transformations (grad, jacrev, ..) in an operator's kernel for autograd.

Transformations are nested in levels. PyTorch calls the kernel at the innermost level; a call that the kernel makes
below autograd comes to the next level. There PyTorch refuses a `torch.autograd.Function`, but not one for a single
level. While its ``forward`` runs, gradients and tangents are switched off, at the outer levels as well. The way to make
a function for a single level is private to PyTorch: where it has changed, PyTorch's operations compute, which PyTorch
transforms itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from flashcli.asked import attention as operands

_VMAP = torch._C._functorch.TransformType.Vmap
_allowed: Any = getattr(torch._functorch.utils, "enable_single_level_autograd_function", None)
_SingleLevelFunction: Any = _allowed and getattr(torch.autograd.function, "_SingleLevelFunction", None)


def levels() -> int:
    """The number of transformations of torch.func now going on that differentiate."""
    return sum(level.key() != _VMAP for level in torch._C._functorch.get_interpreter_stack() or ())


def is_left_to_pytorch() -> bool:
    """Whether a transformation is going on for which no function of a single level can be made."""
    return _SingleLevelFunction is None and levels() > 0


@cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    parts = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (_SingleLevelFunction,), parts)


def apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function's ``apply`` at this level of torch.func's transformations."""
    if not levels():
        return function.apply(*arguments)
    with _allowed():
        return _of_one_level(function).apply(*arguments)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Let operators bypass this level's autograd in a ``with`` block; outer levels keep theirs."""
    with torch._C._AutoDispatchBelowAutograd():
        if not levels():
            yield
            return
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def checked(causal: bool, scale: float | None, q_start: int) -> tuple[bool, float | None, int]:
    """Return causal, scale and q_start, checked by `asked.attention.checked` unless they may be compiler's symbols."""
    if torch.compiler.is_compiling() or isinstance(q_start, torch.SymInt):
        return causal, scale, q_start
    return operands.checked(causal, scale, q_start)


def window(given: Sequence[int]) -> Sequence[int]:
    """Return a window, checked by `asked.attention.checked_window` unless a compiler is tracing."""
    return given if torch.compiler.is_compiling() else operands.checked_window(given)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A ``with`` block without autocast on a kind of device, so that formulas keep their digits."""
    if torch.compiler.is_dynamo_compiling() or not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
