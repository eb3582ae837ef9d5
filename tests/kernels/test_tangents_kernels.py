"""Kernels of tangents: their argument, their tiles, and the registers that they take."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from emulator import claims
from gradients_oracle import gradients, tangents
from oracle import Asked, plain

from flashcli.asked.attention import contiguous
from flashcli.asked.how import How
from flashcli.asked.shape import MAX_D
from flashcli.asked.tangents import tangents as ask
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels import backward
from flashcli.kernels.operation import Gpu
from flashcli.kernels.tangents import COMMON_BYTES, KERNELS, Argument, choose, plan

HOPPER = Gpu((9, 0), 132)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def test_every_field_is_where_python_puts_it(emulated, tmp_path):
    macros = {
        "HEAD_DIM": 64, "CAUSAL": 0, "ROW_THREADS": 32, "ARGUMENT_BYTES": ctypes.sizeof(backward.Argument),
        "GRADIENTS": 1, "TANGENTS_BYTES": ctypes.sizeof(Argument), "COMMON_BYTES": COMMON_BYTES,
    }  # fmt: skip
    claims.check(tmp_path, "backward/tangents.cuh", claims.of_fields(Argument, "Tangents"), macros)


@every_kernel
def test_every_head_size_has_tiles_that_fit(kernel):
    for d in range(1, MAX_D + 1):
        problem = backward.of_sizes(d, N=2)
        if not kernel.refuses(problem):
            assert kernel.tiling(problem).shared <= ((113 if d <= 64 else 227) if kernel.arch_only else 99) * 1024


def planned(name=None, capability=(9, 0), do=True, q_shape=(2, 4, 70, 64)):
    q, k = contiguous(q_shape, "float32"), contiguous((2, 2, 90, 64), "float32")
    return plan(ask(q, k, k, q, k, k, do=q if do else None).at(0), Gpu(capability, 132), How(name))


def test_tangents_of_gradients_are_a_launch_more():
    by_ffma = planned("register_tiled"), planned("register_tiled", do=False)
    launched = [[step.launch.function for step in plan.steps] for plan in by_ffma]
    assert launched == [["of_rows", "rows", "keys"], ["of_rows", "rows"]]
    assert by_ffma[0].workspace == 2 * 4 * 70 * COMMON_BYTES


def test_halves_are_followed_by_a_kernel_without_for_heads_that_are_noted():
    found = planned()
    names = [step.build.kernel.name for step in found.steps]
    assert names == ["wgmma"] * 4 + ["register_tiled"] * 3 and found.steps[0].launch.function == "prepare"
    [(_, notes)], [(cleared, word, words)] = found.inside, found.clear
    assert (cleared, word, words) == (notes, 0, 1 + 2 * 2) and found.workspace == notes + 4 * words


@pytest.mark.parametrize(
    ("d", "N", "chosen"),
    [
        (64, 90, "wgmma"),
        (16, 90, "wgmma"),
        (15, 90, "register_tiled"),
        (65, 90, "wgmma"),
        (128, 90, "wgmma"),
        (129, 90, "register_tiled"),
        (64, 1, "register_tiled"),
    ],
)
def test_tensor_cores_multiply_where_halves_are_right(d, N, chosen):
    assert choose((9, 0), backward.of_sizes(d, N=N)).name == chosen
    assert choose((8, 0), backward.of_sizes(d, N=N)).name == "register_tiled"


def test_a_kernel_that_cannot_be_says_why():
    with pytest.raises(UsageError, match="there is no kernel 'fast' for tangents"):
        planned("fast")
    with pytest.raises(BackendUnavailable, match="kernel register_tiled needs sm_80"):
        planned(capability=(7, 5))


def test_what_does_not_fit_is_told_by_name():
    q, k = contiguous((2, 70, 64), "float32"), contiguous((2, 90, 64), "float32")
    with pytest.raises(ValueError, match="tk must have the shape of k"):
        ask(q, q, k, q, k, k)
    with pytest.raises(TypeError, match="tv must be a float32 array"):
        ask(q, k, contiguous(k.shape, "float16"), q, k, k)


@pytest.mark.parametrize("causal", [False, True])
def test_the_formulas_are_how_fast_gradients_change(causal):
    """The oracle that kernels are compared with, against differences of gradients and of O, in float64."""
    rng, step = np.random.default_rng(0), 1e-6
    do, q, tq = rng.normal(size=(3, 2, 4, 6, 3))
    k, v, tk, tv = rng.normal(size=(4, 2, 2, 5, 3))
    dlse = rng.normal(size=do.shape[:-1])

    def at(t):
        asked = Asked(q + t * tq, k + t * tk, v + t * tv, causal)
        return [*plain(asked), *gradients(asked, do, dlse)]

    found = tangents(Asked(q, k, v, causal), (tq, tk, tv), do, dlse)
    for mine, ahead, behind in zip(found, at(step), at(-step), strict=True):
        np.testing.assert_allclose(mine, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)
