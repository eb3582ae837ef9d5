"""flashcli.attention: what it takes, refuses and gives back. Its answers: see tests/backends."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings

import numpy as np
import pytest
from support import python, random_qkv
from tolerances import assert_accurate

from flashcli.api import attention, decode
from flashcli.compiler.compiler import find_cc
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files import cut
from flashcli.terminal.messages import explain


def test_attention_of_arrays():
    qkv = random_qkv(3, 50, 16)
    out = attention(*qkv.transpose(1, 0, 2, 3), backend="cpu", causal=True, scale=0.3)
    assert_accurate(out, qkv, causal=True, scale=0.3)


CALL = """
import numpy as np, flashcli
{first}
ones = np.ones((1, 2, 3), np.float32)
for _ in range(2):
    assert (flashcli.attention(ones, ones, ones, backend="cpu") == 1).all()
"""


def test_the_package_has_the_function_again_and_again():
    assert python("-c", CALL.format(first=""), cold=True).code == 0


def test_the_package_has_the_function_after_its_module_was_imported():
    assert python("-c", CALL.format(first="import flashcli.api"), cold=True).code == 0


def test_attention_takes_batches_a_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr(cut, "CHUNK_BYTES", 2 * 3 * 50 * 16 * 4)
    qkv = random_qkv(25, 50, 16)
    assert_accurate(attention(*qkv.transpose(1, 0, 2, 3), backend="cpu"), qkv)


def test_attention_leaves_its_arguments_alone():
    q, k, v = qkv = random_qkv(3, 50, 16).transpose(1, 0, 2, 3)
    before = qkv.copy()
    attention(q, k, v, backend="cpu")
    attention(q, k, v, bias=v[:, :, :1], backend="cpu")
    np.testing.assert_array_equal(qkv, before)


def test_a_call_enters_few_modules_and_functions():
    """Counted where another has been, so that nothing is imported or checked for the first time."""
    x, functions = np.ones((1, 2, 40, 8), np.float32), set()

    def note(frame, event: str, argument: object) -> None:
        if event == "call" and f"{os.sep}flashcli{os.sep}" in frame.f_code.co_filename:
            functions.add(frame.f_code)

    attention(x, x, x, backend="cpu")
    sys.setprofile(note)
    try:
        attention(x, x, x, backend="cpu")
    finally:
        sys.setprofile(None)
    entered = {code.co_filename.rpartition(f"flashcli{os.sep}")[2] for code in functions}
    assert {"api.py", "arrays/numpys.py", "cpu/attention.py"} < entered and len(entered) <= 6, entered
    assert len(functions) <= 31, functions


GOOD = np.ones((1, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("error", "arguments", "match"),
    [
        (TypeError, {"q": GOOD.astype(np.float64)}, "q must be a float32, float16 or bfloat16 array, not float64"),
        (TypeError, {"q": np.zeros(GOOD.shape, "V0")}, "q must be a float32, float16 or bfloat16 array, not void"),
        (TypeError, {"k": GOOD.astype(">f4")}, "k must be a float32 array, not >f4"),
        (TypeError, {"v": GOOD.tolist()}, "v must be a NumPy array, not list"),
        (TypeError, {"q": np.ma.array(GOOD, mask=True)}, "q must not be a masked array"),
        (TypeError, {"bias": 1.0}, "bias must be a NumPy array, not float"),
        (TypeError, {"bias": GOOD[0].astype(int)}, "bias must be a float32 or bool array, not int64"),
        (TypeError, {"out": [1]}, "out must be a NumPy array, not list"),
        (TypeError, {"out": np.ma.array(GOOD * 0)}, "out must not be a masked array"),
        (UsageError, {"kernel": ["mma"]}, r"there is no kernel \['mma'\]"),
        (ValueError, {"precision": ["fp32"]}, r"precision must be one of fp32, fp16, not \['fp32'\]"),
        (TypeError, {"causal": GOOD}, "causal must be True or False, not ndarray"),
        (ValueError, {"q": GOOD[0]}, r"q must have shape \[B, M, d\] or \[B, H, M, d\], not \[2, 3\]"),
        (ValueError, {"k": GOOD[:, :1]}, r"v must have the shape of k, \[1, 1, 3\]"),
        (ValueError, {"q": GOOD.repeat(90, 2)}, "q must have a last axis, d, of 1 to 256, not 270"),
        (ValueError, {"out": GOOD}, "out must not overlap q"),
        (ValueError, {"out": np.broadcast_to(np.float32(0), GOOD.shape)}, "out must be writeable"),
        (ValueError, {"out": np.frombuffer(bytearray(25), np.float32, 6, 1).reshape(1, 2, 3)}, "out must be aligned"),
        (ValueError, {"out": np.zeros((1, 2, 6), np.float32)[..., ::2]}, "out must be contiguous along its last axis"),
        (ValueError, {"backend": "tpu"}, "'tpu'"),
    ],
)
def test_attention_refuses_other_arguments(error, arguments, match):
    with pytest.raises(error, match=match):
        attention(**{"q": GOOD, "k": GOOD, "v": GOOD, "backend": "cpu"} | arguments)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e39, -2.36e38])
def test_attention_refuses_a_scale_that_no_float32_holds(scale):
    with pytest.raises(ValueError, match="scale must be finite"), warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(GOOD, GOOD, GOOD, scale=scale, backend="cpu")


@pytest.mark.parametrize("scale", [np.float16(0.3), np.int8(-128)])
def test_a_short_number_of_numpys_is_a_scale_like_others(scale):
    q, k, v = random_qkv(3, 50, 16).transpose(1, 0, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = attention(q, k, v, scale=scale, backend="cpu")
    assert got.tobytes() == attention(q, k, v, scale=float(scale), backend="cpu").tobytes()


def test_attention_on_the_cpu_where_there_is_no_gpu(no_pycuda):
    np.testing.assert_allclose(attention(GOOD, GOOD, GOOD), 1)
    np.testing.assert_allclose(attention(GOOD[None], GOOD[None], GOOD[None]), 1)


def test_paged_decode_is_not_computed_on_the_cpu_where_a_gpu_was_asked_for(no_pycuda):
    cache, of_two = np.ones((3, 4, 2, 16), np.float32), np.ones(2, np.int32)
    arrays = np.ones((2, 4, 16), np.float32), cache, cache, of_two[:, None], of_two
    assert decode(*arrays, layout="nhd").shape == (2, 4, 16)
    with pytest.raises(BackendUnavailable):
        decode(*arrays, layout="nhd", backend="cuda")


def test_what_a_gpu_does_not_do_for_numpy_arrays_is_refused_on_it():
    for asked in ({"backend": "cuda"}, {"kernel": "mma"}, {"precision": "fp16"}):
        with pytest.raises(UsageError, match="bias") as caught:
            attention(GOOD, GOOD, GOOD, bias=GOOD[:, :, :2], **asked)
        assert caught.value.hint.startswith('leave out backend="cuda", kernel and precision')


def test_a_kernel_of_the_host_computes_heads_too():
    if find_cc() is None:
        pytest.skip("there is no C compiler here")
    q, k, v = random_qkv(6, 9, 5).transpose(1, 0, 2, 3).reshape(3, 2, 3, 9, 5)
    np.testing.assert_allclose(attention(q, k, v, kernel="sequential"), attention(q, k, v, backend="cpu"), rtol=1e-5)


def test_precisions_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="precision must be one of fp32, fp16, not 'tf32'"):
        attention(GOOD, GOOD, GOOD, precision="tf32")


@pytest.mark.parametrize("options", [{}, {"bias": np.zeros((9, 9), np.float32)}], ids=["as files", "with a bias"])
@pytest.mark.parametrize("heads", [(), (4,)], ids=["batches", "heads"])
def test_out_is_filled_and_given_back(heads, options):
    x = np.random.default_rng(0).uniform(-1, 1, (3, 2, *heads, 9, 5)).astype(np.float32)
    wide = np.full((9, 2, *heads, 7), np.nan, np.float32)
    out = np.moveaxis(wide, 0, -2)[..., 1:6]
    assert attention(*x, **options, backend="cpu", out=out) is out
    np.testing.assert_array_equal(out, attention(*x, **options, backend="cpu"))
    assert np.isnan(wide[..., [0, 6]]).all()


def test_out_may_lie_between_its_inputs():
    x = np.random.default_rng(0).uniform(-1, 1, (2, 4, 9, 5)).astype(np.float32)
    want = attention(*x.swapaxes(0, 1)[:3], backend="cpu")
    attention(x[:, 0], x[:, 1], x[:, 2], out=x[:, 3], backend="cpu")
    np.testing.assert_array_equal(x[:, 3], want)


@pytest.mark.parametrize(("B", "M", "N"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_nothing_to_compute_has_an_empty_answer(B, M, N, backend):
    q, k = np.ones((B, 4, M, 8), np.float32), np.ones((B, 2, N, 8), np.float32)
    out, lse = attention(q, k, k, return_lse=True, backend=backend)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert (out == 0).all() and (lse == -np.inf).all()
    assert attention(q[:, 0], k[:, 0], k[:, 0], backend=backend).shape == (B, M, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_heads_on_a_gpu_are_so_many_batches(gpu, causal):
    x = np.random.default_rng(0).uniform(-3, 3, (3, 2, 300, 4, 64)).astype(np.float32)
    out = attention(*x.swapaxes(2, 3), causal=causal, backend="cuda")
    flat = (np.ascontiguousarray(part.swapaxes(1, 2)).reshape(8, 300, 64) for part in x)
    np.testing.assert_array_equal(out.reshape(8, 300, 64), attention(*flat, causal=causal, backend="cuda"))


def test_a_fresh_session_lists_the_public_names():
    done = python("-c", "import flashcli; print(set(flashcli.__all__) <= set(dir(flashcli)))", cold=True)
    assert done.out == "True\n"


def test_the_traceback_of_an_error_has_its_hint_in_pythons_words_and_the_command_line_tells_it_once(
    monkeypatch, capsys
):
    error = BackendUnavailable("there is no GPU.", "or use --backend cpu.")
    error.add_note("Where: rank 1.")
    assert traceback.format_exception_only(error)[1:] == ['Hint: or use backend="cpu".\n', "Where: rank 1.\n"]
    assert explain(pickle.loads(pickle.dumps(error))) == 69
    assert capsys.readouterr().err == "Error: there is no GPU.\nHint: or use --backend cpu.\nWhere: rank 1.\n"


def test_a_wrong_argument_is_a_value_error_whichever_it_is():
    with pytest.raises(ValueError, match="there is no kernel 'wgm'"):
        attention(GOOD, GOOD, GOOD, kernel="wgm")
