"""fp32 attention for PyTorch: on tensors where they lie, with gradients, and in the place of PyTorch's own.

Importing this imports PyTorch.
"""

from flashcli.torch.models import register_transformers
from flashcli.torch.replacing import replacing_sdpa
from flashcli.torch.sdpa import scaled_dot_product_attention
from flashcli.torch.tensors import attention

__all__ = ["attention", "register_transformers", "replacing_sdpa", "scaled_dot_product_attention"]
