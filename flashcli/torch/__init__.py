"""fp32 attention for PyTorch's tensors: with gradients, in place of PyTorch's own, and vLLM's paged operators.

An import of this package imports PyTorch.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise  # it is there, and lacks something itself
    raise ModuleNotFoundError("flashcli.torch needs PyTorch: pip install torch", name="torch") from None

from flashcli.torch import vmap as _vmap  # noqa: F401  torch.vmap asks it
from flashcli.torch.backward import attention_backward
from flashcli.torch.merging import merge
from flashcli.torch.models import register_transformers
from flashcli.torch.paged import decode
from flashcli.torch.paged_write import write_kv
from flashcli.torch.replacing import replacing_sdpa
from flashcli.torch.sdpa import scaled_dot_product_attention
from flashcli.torch.tensors import attention
from flashcli.torch.triangle import triangle_attention
from flashcli.torch.vllm import paged_attention_v1, paged_attention_v2, reshape_and_cache

__all__ = [
    "attention", "attention_backward", "decode", "merge", "paged_attention_v1", "paged_attention_v2",
    "register_transformers", "replacing_sdpa", "reshape_and_cache", "scaled_dot_product_attention",
    "triangle_attention", "write_kv",
]  # fmt: skip
