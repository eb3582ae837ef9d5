"""Where the error of `wgmma` comes from: its arithmetic emulated in NumPy, one kind of rounding left out at a time.

``python -m bench.roundings [--json FILE]`` needs no GPU. The tensor core is modelled as in arXiv 2512.07004:
sixteen exact products and the accumulator are aligned to the largest of them, with two bits more than a float32 has,
truncated, added, and the sum truncated to a float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

from bench import scripts
from bench.rows import Emulated
from flashcli.asked.shape import Shape
from flashcli.files.verify import Comparison, reference
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
from flashcli.measure import machine
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

DEPTH = 16  # products that the tensor core adds at a time
EXTRA_BITS = 2
P_BIAS = 6  # as in cuda/attention/warpgroup.cuh
EXP_ERROR = 2**-22.5  # relative, at most: PTX's ex2.approx.ftz.f32
ULP = 2.0**-24

Halves = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Arithmetic:
    """The parts that are rounded as the kernel does it, and not left in float64."""

    splits: bool = True  # each number to hi + lo, 22 bits
    scores: bool = True  # S, as the tensor core adds
    outputs: bool = True  # P V of a tile, as the tensor core adds
    exponentials: bool = True  # the argument of 2^x, and ex2.approx
    sums: bool = True  # l, and O over tiles, in fp32
    gives_back: bool = True  # to S and to O what truncation takes of them on average, where they are truncated


def given_back(d: int, Bc: int) -> tuple[float, float]:
    """The loss by truncation on average, (of S, of P V of a tile), in units of 2^-24, as cuda/split.cuh has it.

    That of S is a regression over d = 16 to 256, with uniform or normal inputs. That of P V lies between the loss with
    a V of both signs, 0.4 + 0.015 Bc, and the loss with a positive one.
    """
    return 0.38 + 0.0175 * d, 0.4 + 0.022 * Bc


def variants() -> dict[str, Arithmetic]:
    """The arithmetics to compare, by name: one with all roundings, and others with some left out."""
    return {
        "all roundings": Arithmetic(),
        "S added exactly": Arithmetic(scores=False),
        "P V added exactly": Arithmetic(outputs=False),
        "S and P V added exactly": Arithmetic(scores=False, outputs=False),
        "the same, and nothing split": Arithmetic(splits=False, scores=False, outputs=False),
        "exact exponentials": Arithmetic(exponentials=False),
        "l and O exact": Arithmetic(sums=False),
        "all, and nothing given back": Arithmetic(gives_back=False),
    }


def split(x: np.ndarray, splits: bool) -> Halves:
    if not splits:
        return x, np.zeros_like(x)
    hi = x.astype(np.float16).astype(np.float64)
    return hi, (x - hi).astype(np.float16).astype(np.float64)


def truncated(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def multiplied_and_added(accumulator: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The tensor core's sum of accumulator [R, C] + a [R, 16] b [C, 16]ᵀ."""
    products = a[:, None, :] * b[None]
    largest = np.maximum(np.abs(products).max(-1), np.abs(accumulator))
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 24 - EXTRA_BITS)
    return truncated((np.trunc(products / unit[..., None]).sum(-1) + np.trunc(accumulator / unit)) * unit)


def product(a: Halves, b: Halves, rounds: bool) -> np.ndarray:
    """A Bᵀ of split matrices, three products for one, the small ones first, from zero."""
    found = np.zeros((len(a[0]), len(b[0])))
    for left, right in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):
        for k in range(0, left.shape[1], DEPTH):
            columns = slice(k, k + DEPTH)
            if rounds:
                found = multiplied_and_added(found, left[:, columns], right[:, columns])
            else:
                found += left[:, columns] @ right[:, columns].T
    return found


def scaled(x: np.ndarray, axis: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """An array times the power of two that brings its largest magnitude into [2^14, 2^15), and its exponent."""
    exponent = 15 - np.frexp(np.abs(x).max(axis, keepdims=True))[1]
    return np.ldexp(x.astype(np.float64), exponent), exponent


def attention(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, Bc: int, how: Arithmetic, rng: np.random.Generator
) -> np.ndarray:
    """softmax(Q Kᵀ / sqrt(d)) V, float64 [R, d], as `wgmma` computes it: cuda/attention/warpgroup.cuh."""

    def fp32(x: np.ndarray, rounds: bool) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64) if rounds else x

    def exp2(x: np.ndarray) -> np.ndarray:
        found = np.exp2(fp32(x, how.exponentials))
        off = rng.uniform(-EXP_ERROR, EXP_ERROR, x.shape) if how.exponentials else 0.0
        return fp32(found * (1 + off), how.exponentials)

    more_S, more_O = given_back(Q.shape[1], Bc)
    more_S, more_O = more_S * (how.gives_back and how.scores), more_O * (how.gives_back and how.outputs)
    factor, exponent = math.frexp(np.float32(math.log2(math.e) * Q.shape[1] ** -0.5 * (1 + more_S * ULP)))
    Q_scaled, q_exponent = scaled(Q, axis=1)
    Q_halves = split(Q_scaled * factor, how.splits)
    m, l, O = np.full((len(Q), 1), -np.inf), np.zeros((len(Q), 1)), np.zeros(Q.shape)
    for j in range(0, len(K), Bc):
        (Kj, k_exponent), (Vj, v_exponent) = scaled(K[j : j + Bc]), scaled(V[j : j + Bc])
        S = product(Q_halves, split(Kj, how.splits), how.scores)
        S = np.ldexp(S, exponent - q_exponent - k_exponent)
        m_new = np.maximum(m, fp32(S.max(1, keepdims=True) - P_BIAS, how.exponentials))
        P, rescale = exp2(S - m_new), exp2(m - m_new)
        T = product(split(P, how.splits), split(Vj.T, how.splits), how.outputs)
        l = fp32(l * rescale + _row_sums(P, how.sums), how.sums)
        O = fp32(O * rescale + np.ldexp(T, -v_exponent), how.sums)
        m = m_new
    spread = np.maximum(0, 1 - 2**P_BIAS / l)  # a row that looks at one key only loses nothing
    return O / l * (1 + more_O * ULP * spread)


def _row_sums(P: np.ndarray, rounds: bool) -> np.ndarray:
    """Sums of a tile's rows: four threads share a row, each adds pairs of columns in order."""
    if not rounds:
        return P.sum(1, keepdims=True)
    parts = P.reshape(len(P), -1, 4, 2).transpose(0, 2, 1, 3).reshape(len(P), 4, -1).astype(np.float32)
    return np.cumsum(parts, axis=-1, dtype=np.float32)[..., -1:].sum(1).astype(np.float64)


def measured(N: int, d: int, rows: int, seeds: int) -> Iterator[Row]:
    """For each variant the error on some rows of uniform inputs in [-3, 3], over all seeds."""
    Bc = KERNELS["wgmma"].tiling(Problem(1, N, N, d, batch_invariant=True)).Bc
    for name, how in variants().items():
        comparison = Comparison()
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            Q, K, V = qkv = rng.uniform(-3, 3, (3, N, d)).astype(np.float32)
            some = np.sort(rng.choice(N, rows, replace=False))
            comparison.add(attention(Q[some], K, V, Bc, how, rng), reference(qkv, rows=some), seed, some)
        about = Row.about(str(shape := Shape(1, N, d)), shape, name)
        yield Emulated(**vars(about), relative_l2=comparison.relative_l2, rows=rows * seeds)


@click.command()
@click.option("--rows", type=click.IntRange(1), default=16, show_default=True, help="So many rows of each input.")
@click.option("--seeds", type=click.IntRange(1), default=4, show_default=True, help="So many inputs.")
@as_json.json_option
def main(rows: int, seeds: int, json_path: str | None) -> None:
    """Emulate `wgmma` on uniform inputs of 2048 rows, with all its roundings and with some of them."""
    found = [row for d in (32, 64, 128) for row in measured(2048, d, rows, seeds)]
    scripts.publish("roundings", machine.cpu_circumstances(1), found, json_path)


if __name__ == "__main__":
    scripts.run(main)
