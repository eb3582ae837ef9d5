"""Seeded inputs: the same seed gives the same file, whatever range of batches is made at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from flashcli.files.fileformat import create_input, create_output
from flashcli.shape import Shape

Draw = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]


def _uniform(limit: float) -> Draw:
    return lambda rng, size: (rng.random(size, np.float32) * 2 - 1) * np.float32(limit)


def _outlier(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    qkv = _uniform(3)(rng, size)
    for matrix in qkv:
        matrix.flat[rng.integers(matrix.size)] = 1000
    return qkv


def _equal_rows(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    return np.broadcast_to(_uniform(3)(rng, (size[0], 1, size[2])), size)


def _very_negative(rng: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
    """Every score below -500: Q and K point opposite ways."""
    qkv = _uniform(3)(rng, size)
    push = np.float32(2 * (500 / np.sqrt(size[2])) ** 0.5)
    qkv[0] = push + np.abs(qkv[0])
    qkv[1] = -push - np.abs(qkv[1])
    return qkv


DISTRIBUTIONS: dict[str, tuple[str, Draw]] = {
    "uniform": ("uniform in [-3, 3], as in the course", _uniform(3)),
    "normal": ("standard normal", lambda rng, size: rng.standard_normal(size, np.float32)),
    "tiny": ("uniform in [-1e-6, 1e-6]", _uniform(1e-6)),
    "large": ("uniform in [-1e4, 1e4]", _uniform(1e4)),
    "outlier": ("uniform in [-3, 3] with one value of 1000 in each of Q, K, V", _outlier),
    "equal": ("all rows of a matrix alike", _equal_rows),
    "negative": ("every score below -500", _very_negative),
}


def draw(shape: Shape, batches: range, seed: int, distribution: str = "uniform") -> np.ndarray:
    """Q, K, V of some batches, float32 [batches, 3, N, d]. Each batch has its own stream of random numbers."""
    qkv = np.empty((len(batches), 3, shape.N, shape.d), np.float32)
    for index, batch in enumerate(batches):
        qkv[index] = DISTRIBUTIONS[distribution][1](np.random.default_rng([seed, batch]), qkv.shape[1:])
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
