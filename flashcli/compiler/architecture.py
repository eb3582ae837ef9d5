"""Names of GPU architectures, as nvcc takes them."""

from __future__ import annotations


def architecture(capability: tuple[int, int]) -> str:
    """The architecture's name for a compute capability, such as "sm_90a": Hopper's own instructions need the ``a``."""
    return "sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")
