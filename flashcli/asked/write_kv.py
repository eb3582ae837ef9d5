"""Calls of write_kv: the outlines of new keys and values and of a cache in pages, and their checks.

Token i of ``key`` and ``value`` goes into slot ``slot_mapping[i] % page`` of page ``slot_mapping[i] // page``; a token
whose number is negative goes nowhere. This is vLLM's `reshape_and_cache`, and the names are vLLM's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic

from flashcli.asked import decode as pages
from flashcli.asked.attention import ALIGNMENT, Operand
from flashcli.asked.decode import FACTORS, Array, InPages
from flashcli.asked.shape import MAX_FLOAT32

LEAST_FLOAT32 = 2.0**-150  # rounds to 0; what is larger does not
ARRAYS = ("key", "value", "key_cache", "value_cache", "slot_mapping")


@dataclass(frozen=True, eq=False)
class Rows(InPages, Generic[Array]):
    """A call of write_kv: keys and values [tokens, Hkv, D] for the slots of a cache in pages, and options.

    A cache of fp8 or int8 gets the numbers divided by the scales, which are 1 where they are arrays.
    """

    key: Array
    value: Array
    key_cache: Array
    value_cache: Array
    slot_mapping: Array
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"

    @property
    def tokens(self) -> int:
        return self.key.shape[0]

    @property
    def D(self) -> int:  # type: ignore[override]
        return self.key.shape[2]


@dataclass(frozen=True)
class WriteKv(Rows[Operand]):
    """A call of write_kv with outlines of arrays; hashable."""

    def at(self, addresses: int) -> WriteKv:
        """The call itself; ValueError if arrays at these addresses, or'ed, are not aligned to `ALIGNMENT` bytes."""
        if addresses % ALIGNMENT:
            raise ValueError(f"key, value, key_cache and value_cache must start on multiples of {ALIGNMENT} bytes")
        return self


@functools.lru_cache(maxsize=256)
def ask(
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    slot_mapping: Operand,
    k_scale: Operand | float = 1.0,
    v_scale: Operand | float = 1.0,
    layout: str = "vllm",
    cache_dtype: str | None = None,
) -> WriteKv:
    """The `WriteKv` of a call of `flashcli.write_kv` with arrays of these outlines; ValueError says why not."""
    pages.check_layout(layout)
    factors = (pages.one_factor("k_scale", k_scale), pages.one_factor("v_scale", v_scale))
    caches = pages.caches_of_type(key_cache, value_cache, cache_dtype)
    asked = WriteKv(key, value, *caches, slot_mapping, *factors, layout)
    if wrong := outer_problem(asked):
        raise ValueError(f"cannot write: {wrong}")
    return asked


def outer_problem(asked: WriteKv) -> str:
    """The fault in a call by types, shapes and scales, without a look at the arrays; empty if there is none."""
    return _type_problem(asked) or _shape_problem(asked) or _scale_problem(asked)


def _type_problem(asked: WriteKv) -> str:
    key, value = asked.key.dtype, asked.value.dtype
    if wrong := pages.cache_type_problem(asked, "key", key):
        return wrong
    if value != key:
        return f"value is {value}, not {key}, as key is"
    if asked.slot_mapping.dtype != "int64":
        return f"slot_mapping is {asked.slot_mapping.dtype}, not int64"
    return ""


def _shape_problem(asked: WriteKv) -> str:
    given = {"key": 3, "value": 3, "slot_mapping": 1}
    if wrong := pages.rank_problem(asked, {**pages.cache_ranks(asked.layout), **given}, may_be_empty=tuple(given)):
        return wrong
    if wrong := pages.head_problem(asked, asked.D):
        return wrong
    tokens = (asked.tokens, asked.Hkv, asked.D)
    given_shapes = {"key": tokens, "value": tokens, "slot_mapping": tokens[:1]}
    return pages.exact_shape_problem(asked, {**given_shapes, **pages.wanted_caches(asked, asked.D)})


def _scale_problem(asked: WriteKv) -> str:
    for name in FACTORS:
        scale = getattr(asked, name)
        if not LEAST_FLOAT32 < abs(scale) <= MAX_FLOAT32:
            return f"{name} is {scale}, in float32 not a finite number other than 0"
    return ""
