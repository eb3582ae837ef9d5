"""All kernels, by the operation that they compute: what can be compiled, listed and checked for each."""

from __future__ import annotations

from flashcli.kernels import attention

OPERATIONS = {"attention": attention.KERNELS}
