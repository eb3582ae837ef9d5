"""First calls on arrays on a GPU: answered by quick builds, one after the other, until the full ones are there."""

from __future__ import annotations

import numpy as np
import pytest
from fake_driver import OnGpu

from flashcli.api import attention, attention_backward
from flashcli.compiler import compiler, quick
from flashcli.errors import KernelFailure

STREAM = 7


class Maker:
    """Quick builds of explicit kernels while full ones are under way, in the place of `flashcli.compiler.quick`."""

    def __init__(self) -> None:
        self.under_way = True
        self.first: list[str] = []  # kernels that were asked for

    def first_cubin(self, build, arch):
        self.first.append(build.kernel.name)
        code = compiler.cubin(build, arch)
        return (code + b" -DQUICK=1", True) if build.kernel.explicit and self.under_way else (code, False)

    def is_under_way(self, build, arch):
        return self.under_way


@pytest.fixture
def maker(monkeypatch) -> Maker:
    made = Maker()
    for name in ("first_cubin", "is_under_way"):
        monkeypatch.setattr(quick, name, getattr(made, name))
    return made


@pytest.fixture
def call(driver):
    """A function that computes attention of the same arrays each time."""
    random = np.random.default_rng(5)
    q, k, v = (OnGpu(driver, random.normal(size=(2, 3, 40, 64)).astype(np.float32), stream=STREAM) for _ in range(3))
    return lambda: attention(q, k, v)


def of_quick(driver) -> list[bool]:
    """Whether each build that was loaded is a quick one."""
    return ["QUICK" in macros for macros in driver.loaded]


def test_calls_wait_for_quick_builds_until_the_full_one_is_there(driver, maker, call):
    call(), call()
    assert of_quick(driver) == [True] and driver.waited_for == [STREAM] * 2
    maker.under_way = False
    call(), call()
    assert of_quick(driver) == [True, False] and driver.waited_for == [STREAM] * 2
    assert len({name for name, _, _ in driver.launches}) * 4 == len(driver.launches)


def test_another_shape_of_the_same_tiles_takes_the_quick_build_too(driver, maker, call):
    call()
    x = OnGpu(driver, np.ones((2, 4, 40, 64), np.float32), stream=STREAM)
    attention(x, x, x)
    assert of_quick(driver) == [True] and len(driver.waited_for) == 2


def test_a_graph_gets_the_full_build(driver, maker, call):
    driver.capturing = 1
    call()
    assert of_quick(driver) == [True, False] and not driver.waited_for
    driver.capturing = 0
    call()
    assert not driver.waited_for  # though another process still makes what is here already


def test_gradients_are_answered_by_quick_builds_until_the_full_ones_are_there(driver, maker):
    x = OnGpu(driver, np.ones((1, 2, 40, 64), np.float32), stream=STREAM)
    attention_backward(x, x, x, x)
    assert len(of_quick(driver)) == 3 and all(of_quick(driver))  # attention's, and two of gradients
    maker.under_way = False
    attention_backward(x, x, x, x)
    assert of_quick(driver) == [True] * 3 + [False] * 3


def test_where_memory_is_short_the_full_build_answers(driver, maker, call, monkeypatch):
    launched = driver.cuLaunchKernelEx

    def launch(config, function, parameters, extra):
        return (2,) if "QUICK" in driver._functions[function][1] else launched(config, function, parameters, extra)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    call()
    assert of_quick(driver) == [True, False] and driver.launches


def test_a_quick_build_that_fails_is_told(driver, maker, call):
    driver.fails["launch"] = 700
    with pytest.raises(KernelFailure, match=r"kernel mma(_short)? failed on GPU 0: fake failure 700"):
        call()
