"""All kernels, by the operation that they compute: what can be compiled, listed and checked for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashcli.kernels import attention, backward, decode, write_kv

OPERATIONS: dict[str, Mapping[str, Any]] = {
    "attention": attention.KERNELS, "backward": backward.KERNELS, "decode": decode.KERNELS,
    "write_kv": write_kv.KERNELS,
}  # fmt: skip
