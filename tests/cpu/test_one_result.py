"""A row has one result on the CPU, whatever its company, its strides, and who computes beside it, on any BLAS core."""

from __future__ import annotations

import numpy as np
import pytest
from support import flashcli, input_bytes, python, random_qkv, sampled

from flashcli import attention

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from threadpoolctl import threadpool_info
from flashcli import attention, attention_backward

[blas] = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
if blas["internal_api"] != "openblas" or blas["architecture"] != sys.argv[1]:
    print("another BLAS:", blas["internal_api"], blas.get("architecture"))
    sys.exit()
rng = np.random.default_rng(0)


def numbers(*shape):
    return rng.standard_normal(shape, np.float32)


def same(one, other, what):
    assert np.array_equal(one.view(np.uint32), np.ascontiguousarray(other).view(np.uint32)), what


def company():
    for N, d, causal in ((700, 64, True), (200, 48, True), (97, 64, False), (385, 24, True), (1, 8, False)):
        q, k, v = numbers(3, 40, N, d)
        together = attention(q, k, v, causal, backend="cpu")
        for b in (0, 17, 39):
            alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal, backend="cpu")
            same(together[b : b + 1], alone, (N, d, causal, b))
            head = attention(*(x[b][None, None] for x in (q, k, v)), causal, backend="cpu")
            same(together[b], head[0, 0], (N, d, causal, b, "as a head"))


def strides():
    for call in range(150):
        B, Hkv, group = (int(n) for n in rng.integers(1, 4, 3))
        M, N = int(rng.choice([1, 1, 1, 2, 31, 385])), int(rng.choice([1, 2, 7, 65, 255, 385]))
        d = int(rng.choice([1, 2, 5, 33, 64, 127]))
        q, do, k, v = (numbers(B, h, n, d) for h, n in ((Hkv * group, M),) * 2 + ((Hkv, N),) * 2)
        causal = bool(rng.integers(2))
        lies = [
            lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
            lambda x: np.concatenate([x, x[..., :3]], -1)[..., : x.shape[-1]],
            lambda x: np.stack([x, x, x], 2)[:, :, 1],
            lambda x: np.asfortranarray(x),
            lambda x: x[:, ::-1].copy()[:, ::-1],
            lambda x: np.frombuffer(b"?" + x.tobytes(), np.float32, x.size, 1).reshape(x.shape),
        ]
        other = [lies[int(rng.integers(len(lies)))](x) for x in (do, q, k, v)]
        what = call, B, Hkv, group, M, N, d, causal
        same(attention(q, k, v, causal, backend="cpu"), attention(*other[1:], causal, backend="cpu"), what)
        for one, two in zip(attention_backward(do, q, k, v, causal), attention_backward(*other, causal)):
            same(one, two, what)


def callers():
    x = [numbers(2, 3, 300, 24) for _ in "qkv"]
    want, gradients = attention(*x, backend="cpu"), attention_backward(x[0], *x)
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: attention(*x, backend="cpu"), range(24)):
            same(out, want, "callers")
        for found in pool.map(lambda _: attention_backward(x[0], *x), range(8)):
            for one, other in zip(found, gradients):
                same(one, other, "callers of gradients")


company(), strides(), callers()
print("one result")
"""


@pytest.mark.parametrize("core", sampled(["Haswell", "SkylakeX"]))
def test_a_row_has_one_result_whatever_its_company_its_strides_and_the_callers(core):
    env = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "4", "PYTHONWARNINGS": ""}
    done = python("-c", PROGRAM, core, env=env, cold=True)
    if done.out.startswith("another BLAS") or done.code == -4:  # SIGILL: the machine has no such core
        pytest.skip(f"NumPy computes here by no OpenBLAS for {core}: {done.out.strip()}")
    assert (done.code, done.out) == (0, "one result\n"), done.err


@pytest.mark.parametrize(
    ("B", "N", "d", "causal"), [(3, 700, 64, True), (5, 97, 48, False), (1, 2500, 32, True), (2, 1, 8, False)]
)
def test_run_and_attention_give_the_same_bytes(tmp_path, B, N, d, causal):
    qkv = random_qkv(B, N, d)
    (tmp_path / "x.in").write_bytes(input_bytes(qkv))
    options = ["--causal"] if causal else []
    done = flashcli("run", "x.in", "x.out", "--backend", "cpu", *options, cwd=tmp_path)
    assert done.code == 0, done.err
    want = attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], causal, backend="cpu")
    assert (tmp_path / "x.out").read_bytes() == np.asarray(want, "<f4").tobytes()
