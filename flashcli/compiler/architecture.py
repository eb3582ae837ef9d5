"""What nvcc calls GPUs."""

from __future__ import annotations


def architecture(capability: tuple[int, int]) -> str:
    """nvcc's name for a compute capability. Hopper's own instructions need the ``a``."""
    return "sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")
