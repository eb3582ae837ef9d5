"""Arrays of any library that say they are on a GPU, computed where they lie: on a driver that is a fake."""

from __future__ import annotations

import ctypes
import sys
import threading

import fake_driver
import numpy as np
import pytest
from fake_driver import DLPACK, Driver, FromDlpack, OnGpu, WithoutAStream

from flashcli.api import attention, attention_backward, write_kv
from flashcli.arrays import memory
from flashcli.arrays import on_gpu as room
from flashcli.arrays.memory import DeviceArray
from flashcli.asked.attention import Operand
from flashcli.errors import FlashError, KernelFailure, OutOfMemory, UsageError
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu.overlap import refuse_overlap
from flashcli.kernels.tuning.chunks import SPREAD

B, H, Hkv, M, N, d = 2, 4, 2, 5, 9, 8


def oracle(q, k, v, bias=None, causal=False, q_start=0):
    """O and the LSE in float64, of q [B, H, M, d], k and v [B, Hkv, N, d]."""
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if bias is not None:
        scores = np.where(bias, scores, -np.inf) if bias.dtype == bool else scores + bias
    if causal:
        scores = np.where(np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + q_start, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top))
        total = weights.sum(-1, keepdims=True)
        return np.where(total > 0, weights @ v / total, 0), (np.log(total) + top)[..., 0]


def numbers(answer) -> np.ndarray:
    """What is in an array that says where it is."""
    interface = answer.__cuda_array_interface__
    size = 4 * int(np.prod(interface["shape"]))
    return np.frombuffer(ctypes.string_at(interface["data"][0], size), np.float32).reshape(interface["shape"])


@pytest.fixture
def on_gpu(driver):
    """``on_gpu(*shape)`` is an array of random numbers on a GPU; other arrays are put there as they lie."""
    random = np.random.default_rng(5)

    def make(*shape, **options):
        if isinstance(shape[0], np.ndarray):
            return OnGpu(driver, shape[0], **options)
        return OnGpu(driver, random.normal(size=shape).astype(np.float32), **options)

    return make


@pytest.fixture
def qkv(on_gpu):
    return on_gpu(B, H, M, d), on_gpu(B, Hkv, N, d), on_gpu(B, Hkv, N, d)


def test_grouped_heads_and_the_causal_mask(qkv):
    o, lse = attention(*qkv, causal=True, q_start=N - M, return_lse=True)
    right, right_lse = oracle(*(x.array for x in qkv), causal=True, q_start=N - M)
    assert o.shape == (B, H, M, d) and lse.shape == (B, H, M)
    np.testing.assert_allclose(numbers(o), right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(lse), right_lse, rtol=1e-5, atol=1e-6)


def test_rows_that_see_nothing_are_zero(qkv):
    o, lse = attention(*qkv, causal=True, q_start=-2, return_lse=True)
    assert not numbers(o)[:, :, :2].any() and numbers(o)[:, :, 2:].all()
    assert (numbers(lse)[:, :, :2] == -np.inf).all()


def layouts():
    """Ways in which [B, H, M, d] may lie."""
    flat = np.random.default_rng(6).normal(size=B * H * M * d * 3 + 1).astype(np.float32)
    whole = flat[: B * H * M * d]
    yield "contiguous", whole.reshape(B, H, M, d)
    yield "rows first", whole.reshape(B, M, H, d).transpose(0, 2, 1, 3)
    yield "fused", flat[:-1].reshape(B, M, 3, H, d)[:, :, 1].transpose(0, 2, 1, 3)
    yield "broadcast", np.broadcast_to(whole[: H * M * d].reshape(1, H, M, d), (B, H, M, d))
    yield "odd", flat[1 : 1 + B * H * M * d].reshape(B, H, M, d)


@pytest.mark.parametrize(("name", "lies"), list(layouts()), ids=lambda x: x if isinstance(x, str) else "")
def test_arrays_are_read_as_they_lie(on_gpu, driver, name, lies):
    base = lies
    while base.base is not None:
        base = base.base
    driver.own(base)
    q = on_gpu(B, H, M, d)
    out = np.full((B, M, H, d), 7, np.float32).transpose(0, 2, 1, 3)
    found = OnGpu(driver, out)
    assert attention(q, OnGpu(driver, lies), OnGpu(driver, lies), out=found) is found
    np.testing.assert_allclose(out, oracle(q.array, lies, lies)[0], rtol=1e-5, atol=1e-6)
    assert {macros["ALIGNED"] for macros in driver.loaded} == {str(int(name != "odd"))}


@pytest.mark.parametrize("shape", [(B, H, M, N), (B, 1, 1, N), (M, N), (H, 1, N), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bool])
def test_a_bias_is_broadcast(qkv, on_gpu, shape, dtype):
    bias = (np.random.default_rng(7).normal(size=shape) + 0.5).astype(np.float32)
    bias = bias > 0 if dtype is bool else bias
    o = attention(*qkv, bias=on_gpu(bias))
    np.testing.assert_allclose(numbers(o), oracle(*(x.array for x in qkv), bias)[0], rtol=1e-5, atol=1e-6)


def test_what_says_which_keys_are_seen_is_passed_on(on_gpu, driver, monkeypatch):
    launched = []
    for name in ("attention", "differentiate"):
        monkeypatch.setattr(fake_driver, name, lambda given, macros, *_: launched.append((given, macros)))
    q, k, slopes = on_gpu(20, H, d), on_gpu(30, Hkv, d), on_gpu(2, H)
    of_q, of_k = (on_gpu(np.array(x, np.int32)) for x in ([0, 5, 20], [0, 30, 30]))
    options = {"window": (3, 2), "alibi_slopes": slopes, "cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    o, lse = attention(q, k, k, **options, return_lse=True)
    dq, dk, _ = attention_backward(q, q, k, k, **options, o=o, lse=lse)
    assert (o.shape, lse.shape, dq.shape, dk.shape) == (q.array.shape, (H, 20), q.array.shape, k.array.shape)
    assert len(launched) == 3  # attention, dQ, then dK and dV
    for given, macros in launched:
        at = [x.array.ctypes.data for x in (slopes, of_q, of_k)]
        assert [given.slopes, given.q_starts, given.k_starts] == at
        assert (given.S, given.B, given.M, given.N, given.q_start, given.first) == (2, 1, 20, 30, 2, -3)
        assert (given.slopes_batch, given.slopes_head, given.q.row, given.q.head) == (H, 1, H * d, d)
        assert [macros[name] for name in ("PACKED", "WINDOW", "BIAS")] == ["1", "1", "4"]


def test_a_single_head_needs_no_axis(on_gpu):
    q, k = on_gpu(B, M, d), on_gpu(B, N, d)
    o, lse = attention(q, k, k, return_lse=True)
    assert o.shape == (B, M, d) and lse.shape == (B, M)
    right = oracle(*(x.array[:, None] for x in (q, k, k)))[0][:, 0]
    np.testing.assert_allclose(numbers(o), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_need_no_other_launch(on_gpu, driver, value):
    q, k = on_gpu(1, 2, M, 32), on_gpu(1, 2, N, 32)
    q.array[0, 1, 2, 3] = value
    o = numbers(attention(q, k, k, kernel="mma"))
    assert [name for name, *_ in driver.launches] == ["prepare", "attention"]
    assert not any(driver.early)  # on this GPU
    assert np.isnan(o[0, 1, 2]).all() and np.isfinite(o).sum() == o.size - 32


def test_on_hopper_a_launch_may_begin_before_the_one_before_it_ends(driver, on_gpu):
    driver.capability = 9, 0
    q, k, v = on_gpu(1, 1, 60, 64), on_gpu(1, 1, 5000, 64), on_gpu(1, 1, 5000, 64)
    np.testing.assert_allclose(numbers(attention(q, k, v)), oracle(q.array, k.array, v.array)[0], rtol=1e-5, atol=1e-6)
    assert [name for name, *_ in driver.launches] == ["prepare", "attention"]
    assert driver.early == [True, True]
    assert driver.loaded[0]["SHARING"] == str(SPREAD)  # blocks share a row tile


def test_no_keys_make_zeros(on_gpu, driver):
    q, k = on_gpu(B, H, M, d), on_gpu(B, H, 0, d)
    o, lse = attention(q, k, k, return_lse=True)
    assert not numbers(o).any() and (numbers(lse) == -np.inf).all() and not driver.launches


def test_no_rows_make_none(on_gpu, driver):
    o, lse = attention(on_gpu(B, H, 0, d), on_gpu(B, H, N, d), on_gpu(B, H, N, d), return_lse=True)
    assert o.shape == (B, H, 0, d) and lse.shape == (B, H, 0) and not driver.launches


# Streams, contexts, memory


def test_it_runs_on_the_stream_of_q_and_waits_for_those_of_the_others(on_gpu, driver):
    q, k, v = on_gpu(1, M, d, stream=11), on_gpu(1, N, d, stream=12), on_gpu(1, N, d)
    attention(q, k, v)
    assert {stream for _, stream, _ in driver.launches} == {11}
    assert driver.waits == [(11, 12)]


def test_a_call_that_is_remembered_runs_on_the_stream_that_is_asked_for(on_gpu, driver):
    for stream in (11, None, 11, 12):
        attention(*(on_gpu(1, rows, d, stream=stream) for rows in (M, N, N)))
        assert driver.launches[-1][1] == (stream or 0)


def test_without_a_stream_it_is_the_default_one(qkv, driver):
    o = attention(*qkv)
    assert {stream for _, stream, _ in driver.launches} == {0} and not driver.waits
    assert o.__cuda_array_interface__["stream"] == 1


def test_the_primary_context_becomes_current_where_none_is_and_nothing_else_changes(qkv, driver):
    attention(*qkv)
    assert driver.contexts == [1000]
    driver.contexts[:] = [2000]
    attention(*qkv)
    assert driver.contexts == [2000] and {context for *_, context in driver.launches} == {1000}


def test_any_thread_may_call(qkv, driver):
    right, wrong = oracle(*(x.array for x in qkv))[0], []

    def ask():
        for _ in range(5):
            if not np.allclose(numbers(attention(*qkv, kernel="register_tiled")), right, rtol=1e-5, atol=1e-6):
                wrong.append(threading.current_thread())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(driver.launches) == 40


def test_shapes_of_the_same_tiles_share_what_is_loaded(on_gpu, driver):
    for rows in range(3, 8):
        attention(on_gpu(1, rows, d), on_gpu(1, rows, d), on_gpu(1, rows, d), kernel="register_tiled")
    assert len(driver.loaded) == 1


def test_memory_is_given_back(qkv, driver):
    o, lse = attention(*qkv, kernel="mma", return_lse=True)
    assert len(driver.allocated) == 2  # the scratch has gone
    del o
    assert len(driver.allocated) == 1 and lse.shape
    del lse
    assert not driver.allocated


# What others make of the answer


def test_the_answer_goes_on_by_dlpack(qkv, driver):
    o = attention(*qkv)
    assert o.__dlpack_device__() == (2, 0)
    capsule = o.__dlpack__(stream=17)
    assert driver.waits == [(17, 0)]
    del o
    assert driver.allocated
    del capsule
    assert not driver.allocated


def test_the_answer_is_not_copied(qkv):
    o = attention(*qkv)
    for wish in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="without a copy"):
            o.__dlpack__(**wish)
    assert o.__dlpack__(max_version=(1, 1), dl_device=(2, 0), copy=False)


def test_dlpack_is_read(qkv):
    others = [FromDlpack(x) for x in qkv]
    np.testing.assert_allclose(numbers(attention(*others)), oracle(*(x.array for x in qkv))[0], rtol=1e-5, atol=1e-6)
    assert [x.streams for x in others] == [[1]] * 3  # the default stream, to which they then see


def test_what_does_not_say_when_it_is_ready_is_asked_for_by_dlpack_which_waits(qkv, driver):
    q, k, v = qkv
    others = [WithoutAStream(x) for x in qkv]
    want = oracle(*(x.array for x in qkv))[0]
    np.testing.assert_allclose(numbers(attention(*others)), want, rtol=1e-5, atol=1e-6)
    assert [x.streams for x in others] == [[1]] * 3
    with pytest.raises(ValueError, match="out must be writeable"):
        attention(q, k, v, out=WithoutAStream(q))


def test_several_threads_give_up_what_was_read(qkv, driver, monkeypatch):
    destroyed, wrong = [], []
    monkeypatch.setattr(driver, "cuEventDestroy", lambda event: destroyed.append(event) or (0,))
    monkeypatch.setattr(room, "_unread", [(event, []) for event in range(-3000, 0)])

    def give_up():
        try:
            room._keep_until_read(0, [])
        except ValueError as error:
            wrong.append(error)

    threads = [threading.Thread(target=give_up) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and destroyed == list(range(-3000, 0))


def test_what_was_read_is_asked_for_as_a_capture_allows(qkv, driver, monkeypatch):
    modes, asked = ["global"], []

    def exchange(mode):
        modes.append(mode)
        return 0, modes[-2]

    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
    monkeypatch.setattr(driver, "cuEventQuery", lambda event: asked.append(modes[-1]) or (0,))
    for _ in range(2):
        attention(*map(FromDlpack, qkv))
    assert asked and set(asked) == {"relaxed"} and modes[-1] == "global"


def test_a_capsule_that_is_taken_keeps_its_owner():
    numpy_array, before = np.arange(6, dtype=np.float32).reshape(2, 3), len(memory._exported)

    class OnCpu(FromDlpack):
        def __dlpack__(self, **options):
            return super().__dlpack__()

    taken = np.from_dlpack(OnCpu(type("", (), {"array": numpy_array})(), kind=1))
    assert (taken == numpy_array).all() and len(memory._exported) == before + 1
    del taken
    assert len(memory._exported) == before


# Bad input: nothing is queued


BAD = {
    "a list": ("k", lambda g: [1.0], TypeError, "k must be an array on a GPU"),
    "nothing": ("v", lambda g: None, TypeError, "v must be an array on a GPU, as q is, .* not NoneType"),
    "NumPy's": ("v", lambda g: np.ones((B, Hkv, N, d), np.float32), TypeError, "v must be an array on a GPU"),
    "float64": ("k", lambda g: g(np.ones((B, Hkv, N, d))), TypeError, "k must be a float32 array, not float64"),
    "a wrong shape": ("v", lambda g: g(B, Hkv, N + 1, d), ValueError, "v must have the shape of k"),
    "heads that do not divide": ("k", lambda g: g(B, 3, N, d), ValueError, "k must have a number of heads"),
    "another GPU": ("k", lambda g: g(B, Hkv, N, d, device=1), ValueError, "k must be on GPU 0, as q is, not on GPU 1"),
    "columns apart": (
        "q", lambda g: g(np.ones((B, H, d, M), np.float32).swapaxes(2, 3)), ValueError,
        "q must be contiguous along its last axis",
    ),
    "DLPack on the CPU": ("k", lambda g: FromDlpack(g(B, Hkv, N, d), kind=1), TypeError, "k must be an array on a GPU"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "make", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_arrays_are_told_by_name(qkv, on_gpu, driver, name, make, kind, message):
    driver.count = 2
    given = [*qkv]
    given["qkv".index(name)] = make(on_gpu)
    if message.endswith("of heads"):
        given[2] = given[1]
    with pytest.raises(kind, match=message):
        attention(*given)
    assert not driver.launches and not driver.allocated


class Refusing(FromDlpack):
    """Whose owner does not share it, as PyTorch's tensors with gradients: by one protocol, or by the other."""

    def __dlpack__(self, *, stream=None):
        raise BufferError("Can't export tensors that require gradient")


class RefusingInterface:
    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("make", [Refusing, lambda x: RefusingInterface()], ids=["DLPack", "interface"])
def test_arrays_that_are_not_to_be_shared_are_told_by_name(qkv, driver, make, name):
    given = [*qkv]
    given["qkv".index(name)] = make(qkv[0])
    with pytest.raises(TypeError, match=f"{name} must be an array that can be shared, .*: Can't .* require"):
        attention(*given)
    assert not driver.launches and not driver.allocated


def test_numbers_that_are_several_in_one_are_refused(qkv, monkeypatch):
    monkeypatch.setitem(DLPACK, "float32", (2, 32, 4))
    with pytest.raises(TypeError, match="k must be a float32 array, not float32x4"):
        attention(qkv[0], FromDlpack(qkv[1]), qkv[2])


def test_an_array_on_the_cpu_is_told_so_where_there_is_no_gpu(qkv):
    x = FromDlpack(qkv[0], kind=1)
    for compute in (lambda: attention(x, x, x), lambda: attention_backward(x, x, x, x, backend="cpu")):
        with pytest.raises(TypeError, match="q must be an array on a GPU, but it is on the CPU: give a NumPy array"):
            compute()


def test_memory_of_the_host_is_refused(qkv, driver):
    driver.owned.pop(qkv[2].array.ctypes.data)
    with pytest.raises(ValueError, match="v must be in the memory of a GPU"):
        attention(*qkv)


def test_nothing_waits_where_nothing_is_computed(on_gpu, driver):
    q, k = on_gpu(1, M, d, stream=11), on_gpu(1, N, d, stream=12)
    with pytest.raises(FlashError, match="wgmma needs"):
        attention(q, k, k, kernel="wgmma")
    assert not driver.waits and not driver.allocated


def test_an_out_that_overlaps_an_input_is_refused(qkv, on_gpu, driver):
    q, k, v = qkv
    with pytest.raises(ValueError, match="out must not share memory with q"):
        attention(q, k, v, out=q)
    assert not driver.launches


class ReadOnly(OnGpu):
    """An array that must not be written."""

    @property
    def __cuda_array_interface__(self):
        found = super().__cuda_array_interface__
        return found | {"data": (found["data"][0], True)}


def test_an_out_that_is_read_only_is_refused(qkv, on_gpu, driver):
    with pytest.raises(ValueError, match="out must be writeable"):
        attention(*qkv, out=ReadOnly(driver, np.zeros((B, H, M, d), np.float32)))
    assert not driver.launches


@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_that_is_read_only_is_not_written_to(on_gpu, driver, which):
    new, slots = (OnGpu(driver, x) for x in (np.ones((3, 2, 32), np.float32), np.arange(3)))
    kinds = [OnGpu, OnGpu]
    kinds[which] = ReadOnly
    caches = [kind(driver, np.zeros((2, 4, 2, 32), np.float32)) for kind in kinds]
    with pytest.raises(ValueError, match=f"^{['key', 'value'][which]}_cache must be writeable$"):
        write_kv(new, new, *caches, slots, layout="nhd")
    assert not driver.launches


def test_an_out_between_the_inputs_is_none_that_overlaps(driver):
    fused = np.random.default_rng(8).normal(size=(B, M, 4, H, d)).astype(np.float32)
    driver.own(fused)
    q, k, v, out = (OnGpu(driver, fused[:, :, i].transpose(0, 2, 1, 3)) for i in range(4))
    right = oracle(q.array, k.array, v.array)[0]
    attention(q, k, v, out=out)
    np.testing.assert_allclose(out.array, right, rtol=1e-5, atol=1e-6)


def test_an_out_of_which_it_takes_too_long_to_tell_whether_it_overlaps_is_refused():
    """These two have no number in common, which NumPy does not find out within the steps that it is given."""
    out, q = (
        Operand((27, 4, 13, 6), strides, "float32")
        for strides in ((17_537, 25_222, 7_129, 6), (394_335, 433_510, 31_050, 22))
    )
    places = [sum(np.ix_(*map(np.multiply, map(np.arange, x.shape), x.strides))) for x in (out, q)]
    assert not np.isin(places[0], places[1] + 1758).any()
    with pytest.raises(ValueError, match="out must not share memory with q"):
        refuse_overlap(4096, out, {"q": (4096 + 4 * 1758, q)})


OPTIONS = [
    ({"backend": "cpu"}, ValueError, "backend must be 'auto' or 'cuda' for arrays on a GPU"),
    ({"kernel": "float4"}, UsageError, "there is no kernel 'float4' for arrays on a GPU"),
    ({"kernel": "wgmma"}, FlashError, "kernel wgmma needs sm_90a"),
    ({"precision": "tf32"}, ValueError, "precision must be one of fp32, fp16"),
    ({"kernel": "register_tiled", "precision": "fp16"}, UsageError, "has no fp16"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    ({"q_start": 0.5}, TypeError, "q_start must be a whole number"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_options_are_told(qkv, driver, options, kind, message):
    with pytest.raises(kind, match=message):
        attention(*qkv, **options)
    assert not driver.launches


@pytest.mark.parametrize(
    ("step", "code", "kind", "message"),
    [
        ("launch", 700, KernelFailure, "kernel register_tiled failed on GPU 0: fake failure 700"),
        ("launch", 2, OutOfMemory, "the GPU has no memory left"),
        ("load", 209, KernelFailure, "the GPU does not load kernel register_tiled: fake failure 209"),
        ("allocate", 2, OutOfMemory, "cannot be allocated: the GPU has no memory left"),
        ("context", 46, KernelFailure, "GPU 0 gives no context: fake failure 46"),
    ],
)
def test_errors_of_the_driver_are_told_in_our_words(qkv, driver, step, code, kind, message):
    driver.fails[step] = code
    with pytest.raises(kind, match=message) as caught:
        attention(*qkv, kernel="register_tiled")
    assert caught.value.hint


def test_without_a_driver_what_is_missing_is_told():
    if not cuda_driver.problem():
        pytest.skip("there is a GPU")
    x = OnGpu(Driver(), np.ones((1, 2, 8), np.float32))
    with pytest.raises(FlashError, match=r"no NVIDIA driver|no GPU"):
        attention(x, x, x)


def test_what_is_no_array_is_told():
    with pytest.raises(TypeError, match="q must be a"):
        attention([1.0], [1.0], [1.0])


@pytest.mark.parametrize(("dtype", "one"), [("float32", 0x3F800000), ("float16", 0x3C00)])
def test_filling_reaches_every_number_and_no_other(driver, dtype, one):
    array = np.zeros((4, 3, 5, 8), dtype)
    part = array.transpose(1, 0, 2, 3)[:, 1:3, ::2, :6]
    memory.fill(0, part.ctypes.data, part.shape, [stride // part.itemsize for stride in part.strides], dtype, one)
    assert (part == 1).all() and array.sum() == part.size


def test_an_answer_says_what_it_is(qkv):
    o = attention(*qkv)
    assert isinstance(o, DeviceArray) and repr(o) == "<float32 array of shape [2, 4, 5, 8] on GPU 0>"
    assert o.dtype == "float32"
