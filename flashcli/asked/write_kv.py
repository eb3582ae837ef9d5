"""New keys and values for a cache in pages: what is asked for, and whether it can be done.

Token i of ``key`` and ``value`` goes into slot ``slot_mapping[i] % page`` of page ``slot_mapping[i] // page``; a token
whose number is negative goes nowhere. This is vLLM's `reshape_and_cache`, and the names are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashcli.asked.decode import (
    FACTORS,
    InPages,
    cache_ranks,
    cache_type_problem,
    exact_shape_problem,
    head_problem,
    rank_problem,
    wanted_caches,
)


@dataclass(frozen=True, eq=False)
class WriteKv(InPages):
    """Keys and values [tokens, Hkv, D] for the slots of a cache; an fp8 one gets them divided by the scales."""

    key: np.ndarray
    value: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    slot_mapping: np.ndarray
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"

    @property
    def tokens(self) -> int:
        return self.key.shape[0]

    @property
    def D(self) -> int:
        return self.key.shape[2]


def outer_problem(asked: WriteKv) -> str:
    """What is wrong with it by types, shapes and numbers alone, as the rest of a sentence; empty if nothing is."""
    return _type_problem(asked) or _shape_problem(asked) or _scale_problem(asked)


def problem(asked: WriteKv) -> str:
    """The same with a look at the slots."""
    if wrong := outer_problem(asked):
        return wrong
    slots = asked.pages * asked.page
    if (bad := asked.slot_mapping >= slots).any():
        i = int(bad.argmax())
        return f"slot_mapping[{i}] is {asked.slot_mapping[i]}, not below {slots}, the cache's slots"
    return ""


def _type_problem(asked: WriteKv) -> str:
    key, value = asked.key.dtype.name, asked.value.dtype.name
    if wrong := cache_type_problem(asked, "key", key):
        return wrong
    if value != key:
        return f"value is {value}, not {key}, as key is"
    if asked.slot_mapping.dtype.name != "int64":
        return f"slot_mapping is {asked.slot_mapping.dtype.name}, not int64"
    return ""


def _shape_problem(asked: WriteKv) -> str:
    given = {"key": 3, "value": 3, "slot_mapping": 1}
    if wrong := rank_problem(asked, {**cache_ranks(asked.layout), **given}, may_be_empty=tuple(given)):
        return wrong
    if wrong := head_problem(asked, asked.D):
        return wrong
    tokens = (asked.tokens, asked.Hkv, asked.D)
    given_shapes = {"key": tokens, "value": tokens, "slot_mapping": tokens[:1]}
    return exact_shape_problem(asked, {**given_shapes, **wanted_caches(asked, asked.D)})


@np.errstate(over="ignore")  # what float32 has no room for is told in words
def _scale_problem(asked: WriteKv) -> str:
    for name in FACTORS:
        scale = getattr(asked, name)
        if not 0 < abs(np.float32(scale)) < np.inf:
            return f"{name} is {scale}, in float32 not a finite number other than 0"
    return ""
