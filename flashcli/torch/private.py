"""PyTorch's private parts that are used here, None where a version has them no more; public ones then serve.

Answers stay the same, but take longer: `tests/pytorch/test_transforms.py` takes each part away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def part(path: str) -> Any:
    """Find a part of PyTorch by its path, such as "_C._cuda_getCurrentRawStream"; None if there is none."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def stream_by_public_parts(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The number of a GPU's current stream, without an object for it.
current_stream: Any = part("_C._cuda_getCurrentRawStream") or stream_by_public_parts

# What watches operations: a trace, modes, and transformations of torch.func, the innermost first and all of them.
is_traced: Any = part("_C._is_tracing")
modes: Any = part("_C._len_torch_dispatch_stack")
innermost: Any = part("_C._functorch.peek_interpreter_stack")
transformations: Any = part("_C._functorch.get_interpreter_stack")
vmap: Any = part("_C._functorch.TransformType.Vmap")

# What makes a function for a single level of torch.func's transformations.
allow_single_level: Any = part("_functorch.utils.enable_single_level_autograd_function")
SingleLevelFunction: Any = part("autograd.function._SingleLevelFunction")
set_tangents: Any = part("autograd.forward_ad._set_fwd_grad_enabled")
below_autograd: Any = part("_C._AutoDispatchBelowAutograd")

# A decorator that imports PyTorch's compiler, for seconds, only when a graph is made; the public one does so at once.
disable_dynamo: Any = part("_disable_dynamo")


def is_watched() -> bool:
    """Whether a mode, a transformation, a trace or a level of tangents may be watching operations."""
    return (
        modes is None or innermost is None or is_traced is None
        or modes() > 0 or innermost() is not None or is_traced() or may_have_tangents()
    )  # fmt: skip


def may_have_tangents() -> bool:
    """Whether tensors may have tangents: a level of forward mode has been entered."""
    return getattr(forward_ad, "_current_level", 0) >= 0
