"""Seeded inputs: the same seed gives the same file, whatever range of batches is made at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from flashcli.asked.shape import Shape
from flashcli.files.fileformat import create_input, create_output

Draw = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]


def _uniform(limit: float) -> Draw:
    return lambda rng, size: (rng.random(size, np.float32) * 2 - 1) * np.float32(limit)


def _outlier(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    qkv = _uniform(3)(rng, size)
    for matrix in qkv:
        matrix.flat[rng.integers(matrix.size)] = 100
    return qkv


def _equal_rows(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    return np.broadcast_to(_uniform(3)(rng, (size[0], 1, size[2])), size)


def _large(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    """Up to 1e4; multiples of 128 in Q and K, so that sums of products are exact and no other key wins by a rounding.

    Two keys may have the very same score, in one row of some thousands: programs that scale Q may take either.
    """
    qkv = _uniform(1e4)(rng, size)
    qkv[:2] = np.round(qkv[:2] / 128) * 128
    return qkv


def _very_negative(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    """Every score below -120: Q and K point opposite ways. Not much below, where float32 is coarse."""
    qkv = _uniform(3)(rng, size)
    push = np.float32((121 / np.sqrt(size[2])) ** 0.5)
    qkv[0] = push + np.abs(qkv[0]) / 3
    qkv[1] = -push - np.abs(qkv[1]) / 3
    return qkv


DISTRIBUTIONS: dict[str, Draw] = {
    "uniform": _uniform(3),
    "normal": lambda rng, size: rng.standard_normal(size, np.float32),
    "tiny": _uniform(1e-6),
    "large": _large,
    "outlier": _outlier,
    "equal": _equal_rows,
    "negative": _very_negative,
}


def draw(shape: Shape, batches: range, seed: int, distribution: str = "uniform") -> np.ndarray:
    """Q, K, V of some batches, float32 [batches, 3, N, d]. Each batch has its own stream of random numbers."""
    qkv = np.empty((len(batches), 3, shape.N, shape.d), np.float32)
    for index, batch in enumerate(batches):
        qkv[index] = DISTRIBUTIONS[distribution](np.random.default_rng([seed, batch]), qkv.shape[1:])
    return qkv


def generate(path: str, shape: Shape, seed: int, distribution: str, reference_path: str | None = None) -> Iterator[int]:
    """Write an input file, and its float64 answer if wanted; yields the number of batches done, step by step."""
    from flashcli.files.verify import reference

    answer_file = create_output(reference_path, shape) if reference_path else contextlib.nullcontext()
    with create_input(path, shape) as inputs, answer_file as answers:
        for batches in shape.batch_ranges(16 * 2**20):
            qkv = draw(shape, batches, seed, distribution)
            inputs.write(shape.whole(batches), qkv)
            if answers:
                answers.write(shape.whole(batches), np.stack([reference(batch) for batch in qkv]))
            yield len(batches)
        for file in filter(None, (inputs, answers)):
            file.commit()
