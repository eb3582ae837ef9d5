"""Random calls of every public function, right ones and wrong ones. `make torture` prints a summary.

Arrays are NumPy's and PyTorch's on the CPU, or PyTorch's and CuPy's on a GPU, if PyTorch finds one.

An answer is compared with float64 in a statement of its own; the same numbers in another place in memory, and each
batch alone, have the same bytes; no input changes. A call that cannot be is refused by TypeError, ValueError or
FlashError, and changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torturing
from gradients_oracle import NAMES, gradients
from layouts import LAYOUTS
from oracle import Asked, plain
from paged_oracle import oracle
from torturing import Choose, demand, near

import flashcli
from flashcli.asked.decode import OPTIONAL, BlockSparse, cache_shapes
from flashcli.cpu.decode import DecodeCpu
from flashcli.errors import FlashError
from flashcli.files.decode.cases import Case, make
from flashcli.files.decode.tensors import dtype

REFUSALS = (TypeError, ValueError, FlashError)
FLAGS = ("return_lse", "return_dbias", "batch_invariant")
NUMBERS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "normal": lambda x, rng: x,
    "sharp": lambda x, rng: x * 12,
    "tiny": lambda x, rng: x * 1e-30,
    "huge": lambda x, rng: x * 1e19,
    "outliers": lambda x, rng: np.where(rng.random(x.shape) < 0.02, x * 1000, x),
    "whole": lambda x, rng: np.round(x),
    "equal": lambda x, rng: np.broadcast_to(x[..., :1, :], x.shape) if x.shape[-2] else x,
}
ROUNDED = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # by an answer of paged decode, of its largest number


def same(array: Any, other: np.ndarray, otherwise: str) -> None:
    """Demand the same bytes of an array of any library and of one of NumPy's."""
    array = array.get() if hasattr(array, "get") else array.cpu().numpy() if hasattr(array, "cpu") else array
    demand(array.tobytes() == np.ascontiguousarray(other).tobytes(), otherwise)


def near_lse(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    near(got, want, tolerance + 1e-6 * float(np.abs(want[np.isfinite(want)]).max(initial=0)), "the LSE")


# ---- a question of attention


def place(choose: Choose, x: np.ndarray) -> np.ndarray:
    """The same numbers somewhere else in memory."""
    if x.ndim == 4 and choose.random() < 0.6:
        x = LAYOUTS[choose.choice(list(LAYOUTS))](x)
    elif choose.random() < 0.3:
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype)
        wide[..., 1::2] = x
        x = wide[..., 1::2]
    if choose.random() < 0.3:
        x = x.view()
        x.flags.writeable = False
    return x


def length(choose: Choose, most: int) -> int:
    return choose.choice([0, 1, 1, 2, 3, choose.randint(1, most), choose.randint(1, most), choose.randint(1, most)])


def question(choose: Choose, rng: np.random.Generator) -> tuple[Asked, np.ndarray, str]:
    """A call of attention, dO, and a name for its numbers."""
    B, Hkv, group = (choose.choice([1, 1, 2, 3]) for _ in range(3))
    M, N = length(choose, 300), length(choose, 700)
    d = choose.choice([33, 64] if gpu() else [1, 2, 3, 8, 16, 33, 64, 100])  # of which each is compiled for a GPU
    B, H = B * choose.choice([1] * 9 + [0]), Hkv * group
    kind = choose.choice([name for name in NUMBERS if not gpu() or name != "huge"])
    with np.errstate(over="ignore"):
        do, q, k, v = (
            NUMBERS[kind](rng.normal(size=shape), rng).astype(np.float32)
            for shape in ((B, H, M, d), (B, H, M, d), (B, Hkv, N, d), (B, Hkv, N, d))
        )
    if choose.random() < 0.2:  # strides of 0, as of what is broadcast
        k = np.broadcast_to(k[:, :, :1], k.shape)
    bias = mask = None
    if form := choose.choice(["", "", "numbers", "mask", "-inf"]):
        drawn = of_scores(choose, rng, B, H, M, N)
        bias = np.asarray(drawn > choose.choice([-2, 0, 9])) if form == "mask" else drawn.astype(np.float32)
        if form == "-inf":
            bias = np.where(drawn > 1, np.float32(-np.inf), bias)
        bias = np.asarray(bias)
    if form != "mask" and choose.random() < 0.4:
        mask = np.asarray(of_scores(choose, rng, B, H, M, N) > choose.choice([-2, 0, 9]))
    if choose.random() < 0.4:
        do, q, k, v = do[:, 0], q[:, 0], k[:, 0], v[:, 0]
        bias, mask = (x if x is None or x.ndim < 3 else x[..., 0, :, :] for x in (bias, mask))
    scale = choose.choice([None, None, 1.0, -0.3, 0.0, 0.25, np.float16(0.1)])
    q_start = choose.choice([0, N - M, choose.randint(-5, N + 5), 2**40, -(2**40)])
    return Asked(q, k, v, choose.random() < 0.5, scale, bias, q_start, mask), do, kind


def of_scores(choose: Choose, rng: np.random.Generator, *lengths: int) -> np.ndarray:
    """Numbers that are broadcast to scores [B, H, M, N]."""
    return rng.normal(size=[n if choose.random() < 0.6 else 1 for n in lengths][choose.randint(0, 4) :])


def changes(asked: Asked, way: Callable[[Any], Any]) -> dict[str, Any]:
    """The bias and the mask, as far as they are given, in a library."""
    return {name: way(x) for name in ("bias", "mask") if (x := getattr(asked, name)) is not None}


def rounding(asked: Asked) -> float:
    """How far a row's weights and their sums may be off, relatively: by what fp32 rounds of scores of these sizes."""
    largest = [float(np.abs(x).max(initial=0)) for x in (asked.q, asked.k)]
    d = asked.q.shape[-1]
    score = largest[0] * largest[1] * d * abs(float(d**-0.5 if asked.scale is None else asked.scale))
    finite = asked.bias is not None and asked.bias.dtype != bool and np.isfinite(asked.bias)
    bias = float(np.abs(asked.bias[finite]).max(initial=0)) if asked.bias is not None and finite is not False else 0.0
    return min(2.0, float(np.expm1(min(10.0, 2.0**-21 * (score + bias))))) + 2.0**-19 + 2.0**-24 * asked.k.shape[-2]


# ---- libraries of arrays


class Library(NamedTuple):
    """A library of arrays: its ways from NumPy and back, and to NumPy's for the same arrays without gaps."""

    name: str
    there: Callable[[Any], Any]
    back: Callable[[Any], np.ndarray]
    dense: Callable[[Any], Any]


@functools.cache
def gpu() -> str:
    """PyTorch's name of the GPU; empty if there is none."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    return "cuda" if torch.cuda.is_available() else ""


def library(choose: Choose) -> Library:
    if gpu():
        with_cupy = importlib.util.find_spec("cupy") and choose.random() < 0.4
        return _cupys() if with_cupy else _pytorchs(gpu())
    if importlib.util.find_spec("torch") is None or choose.random() < 0.6:
        return Library("NumPy", lambda x: x, lambda x: x, np.ascontiguousarray)
    return _pytorchs("cpu")._replace(name="PyTorch", dense=np.ascontiguousarray)


def laid_out(x: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """All memory of an array, and its strides there in elements; of a copy, if it lies as only NumPy's can."""
    size = x.itemsize or 1
    rows = x.ndim == 0 or x.shape[-1] <= 1 or x.strides[-1] == size
    if not rows or any(step < 0 or step % size for step in x.strides):
        x = np.array(x, order="C")
    memory = np.zeros(1 + sum((n - 1) * step // size for n, step in zip(x.shape, x.strides, strict=True) if n), x.dtype)
    np.lib.stride_tricks.as_strided(memory, x.shape, x.strides)[...] = x
    return memory, [step // size for step in x.strides]


def _pytorchs(device: str) -> Library:
    import torch

    def there(x: np.ndarray) -> Any:
        memory, strides = laid_out(x)
        return torch.from_numpy(memory).to(device).as_strided(x.shape, strides)

    return Library("PyTorch, GPU", there, lambda x: x.detach().cpu().numpy(), lambda x: there(np.ascontiguousarray(x)))


def _cupys() -> Library:
    import cupy

    def there(x: np.ndarray) -> Any:
        memory, strides = laid_out(x)
        in_bytes = [step * x.itemsize for step in strides]
        return cupy.lib.stride_tricks.as_strided(cupy.asarray(memory), x.shape, in_bytes)

    return Library("CuPy", there, cupy.asnumpy, lambda x: there(np.ascontiguousarray(x)))


def on_gpu(x: np.ndarray) -> Any:
    """An array of any type of paged decode, as PyTorch's tensor."""
    import torch

    whole = torch.from_numpy(np.array(x, order="C").view(np.uint8)).to(gpu())
    return whole.view(getattr(torch, x.dtype.name))


def attention(choose: Choose, rng: np.random.Generator) -> str:
    asked, _, kind = question(choose, rng)
    name, there, back, dense = library(choose)
    before = [x.copy() for x in asked[:3]]
    placed = asked._replace(**{name: place(choose, getattr(asked, name)) for name in "qkv"})
    out, options = None, asked.keywords | changes(asked, there)
    if choose.random() < 0.3:
        shape = asked.q.shape
        whole = np.full((*shape[:-2], shape[-2] + 1, 2 * shape[-1]), 7, np.float32)
        out = whole[..., : shape[-2], : shape[-1]] if choose.random() < 0.5 else np.empty(shape, np.float32)
        options["out"] = there(out)
    o, lse = flashcli.attention(*map(there, placed[:3]), **options, return_lse=True)
    demand(out is None or o is options["out"], "out is not what was returned")
    o, lse = back(o), back(lse)
    demand(all(np.array_equal(x, y) for x, y in zip(before, placed[:3], strict=True)), "an input changed")
    want, want_lse = plain(asked)
    most = float(np.abs(asked.v).max(initial=0))
    near(o, want, most * rounding(asked), f"{name} O of {kind} numbers, {asked.q.shape}, {asked.k.shape}")
    near_lse(lse, want_lse, 4 * rounding(asked))
    options = asked.keywords | changes(asked, dense)
    without_gaps = flashcli.attention(*map(dense, asked[:3]), **options)
    same(without_gaps, o, f"bytes depend on strides, or on the library: {name}, {asked.q.shape}, {asked.k.shape}")
    if len(asked.q) > 1 and not changes(asked, dense):
        b = choose.randrange(len(asked.q))
        alone = flashcli.attention(*(dense(x[b : b + 1]) for x in asked[:3]), **options)
        same(alone, o[b : b + 1], f"bytes depend on other batches: {name}, {asked.q.shape}, {asked.k.shape}")
    return f"right, {name}"


def attention_backward(choose: Choose, rng: np.random.Generator) -> str:
    asked, do, kind = question(choose, rng)
    of, there, back, dense = library(choose)
    numbers = asked.bias is not None and asked.bias.dtype != bool
    dlse = rng.normal(size=asked.q.shape[:-1]).astype(np.float32) if choose.random() < 0.3 else None
    placed = [place(choose, x) for x in (do, *asked[:3])]
    options = dict(asked.keywords, return_dbias=numbers, dlse=dlse)
    if choose.random() < 0.3:
        both = flashcli.attention(*map(there, asked[:3]), **asked.keywords | changes(asked, there), return_lse=True)
        options["o"], options["lse"] = map(back, both)
    arrays = {name: options[name] for name in ("bias", "mask", "o", "lse", "dlse") if options.get(name) is not None}
    lying, dense_ones = ({name: way(x) for name, x in arrays.items()} for way in (there, dense))
    got = [back(x) for x in flashcli.attention_backward(*map(there, placed), **options | lying)]
    others = flashcli.attention_backward(*map(dense, (do, *asked[:3])), **options | dense_ones)
    for name, mine, other in zip(NAMES, got, others, strict=False):
        same(
            other, mine, f"bytes of {name} depend on strides, or on the library: {of}, {asked.q.shape}, {asked.k.shape}"
        )
    if kind in ("huge", "tiny"):
        demand(kind == "tiny" or all(not np.isnan(x).any() for x in got), "NaN of finite numbers")
        return f"right bytes, {of}"
    right, naive = gradients(asked, do, dlse), gradients(asked, do, dlse, np.float32)
    for name, mine, want, other, most in zip(NAMES, got, right, naive, largest(asked, do, dlse), strict=False):
        off = float(np.abs(other - want).max(initial=0))
        close = max(2 * off, rounding(asked) * most)  # equal terms round alike, by more than is usual
        close = close if kind == "sharp" else min(close, 20 * off + 1e-6 * most)
        near(mine, want, close, f"{of} {name} of {kind} numbers, {asked.q.shape}, {asked.k.shape}")
    return f"right, {of}"


def largest(asked: Asked, do: np.ndarray, dlse: np.ndarray | None) -> tuple[float, float, float, float]:
    """Bounds of the gradients' terms, summed: no dQ, dK, dV, dbias is larger."""
    of_do, q, k, v = (float(np.abs(x).max(initial=0)) for x in (do, *asked[:3]))
    d, rows = asked.q.shape[-1], asked.q.size // max(1, asked.q.shape[-1])
    scale = abs(float(d**-0.5 if asked.scale is None else asked.scale))
    of_ds = 4 * d * of_do * v + (0 if dlse is None else float(np.abs(dlse).max(initial=0)))
    return scale * of_ds * k, scale * of_ds * q * rows, of_do * rows, of_ds * rows


# ---- paged decode


def decode_case(choose: Choose) -> Case:
    layout, query = choose.choice(["vllm", "nhd", "hnd"]), choose.choice(["float32", "float16", "bfloat16"])
    D, page, T = choose.choice([8, 16, 32, 80, 256]), choose.choice([1, 4, 16, 64]), choose.choice([1, 1, 2, 5, 8])
    cache = choose.choice(["", "", "float8_e4m3fn", "float8_e5m2"])
    if layout == "vllm" and (cache or query != "float32"):
        D = 16 * max(1, D // 16)
    S, Hkv = choose.choice([1, 2, 3]), choose.choice([1, 2])
    sparse = None
    if choose.random() < 0.2:
        sparse = BlockSparse(choose.randint(2, 5), page * choose.randint(1, 3), choose.randint(0, 2),
                             choose.randint(-2, 2), choose.randint(0, 2))  # fmt: skip
    lengths = ",".join(str(choose.choice([0, 1, 2, choose.randint(1, 70)])) for _ in range(S))
    queries = [choose.choice([0, 1, 1, 2, 9]) for _ in range(S)] if choose.random() < 0.4 else []
    return Case(
        S, Hkv * choose.choice([1, 2, 3]), Hkv, D, lengths if S > 1 else f"{lengths}x1", T, page, layout, query, cache,
        choose.choice(["unique", "reversed", "shared"]), choose.choice([0.1, 3.0, 12.0]), 1.0, choose.random() < 0.3,
        choose.choice([0, 0, 1, 7]), sparse, choose.randrange(10**6),
        ",".join(f"{n}x1" for n in queries) * any(queries), choose.choice([0.0, 0.0, 3.0]), choose.random() < 0.2,
        not any(queries) or choose.random() < 0.8,
    )  # fmt: skip


def decode(choose: Choose, rng: np.random.Generator) -> str:
    case = decode_case(choose)
    asked = make(case)
    if asked.cache_type == "float32" and choose.random() < 0.1 and not gpu():
        asked = dataclasses.replace(asked, query=asked.query * np.float32(1e25))
    arrays = {name: getattr(asked, name) for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens")}
    if asked.T == 1:
        arrays["query"] = asked.query[:, 0]
    for name, x in arrays.items():
        if choose.random() < 0.3:  # with gaps between the outermost
            wide = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
            wide[::2] = x
            arrays[name] = wide[::2]
        if choose.random() < 0.3:
            arrays[name] = arrays[name].view()
            arrays[name].flags.writeable = False
    options: dict[str, Any] = {
        "layout": asked.layout, "scale": asked.scale, "alibi_slopes": asked.alibi_slopes, "block_sparse": asked.sparse,
        "sliding_window": asked.window, "k_scale": asked.k_scale, "v_scale": np.float32([asked.v_scale]),
        "query_starts": asked.query_starts, "sinks": asked.sinks, "softcap": asked.softcap, "causal": asked.causal,
    }  # fmt: skip
    if asked.is_scaled and choose.random() < 0.5:
        options["cache_dtype"] = asked.cache_type
        arrays |= {name: arrays[name].view(np.uint8) for name in ("key_cache", "value_cache")}
    if gpu():
        arrays = {name: on_gpu(x) for name, x in arrays.items()}
        options["v_scale"] = on_gpu(options["v_scale"])
        for name in OPTIONAL:
            options[name] = None if options[name] is None else on_gpu(options[name])
        found = flashcli.decode(**arrays, **options, return_lse=True)
        out, lse = (x.float().cpu().numpy() for x in found)
    else:
        out, lse = flashcli.decode(**arrays, **options, return_lse=True, backend="cpu")
        demand(out.shape == arrays["query"].shape and out.dtype == asked.query.dtype, "another shape or type")
        with DecodeCpu(1) as alone:
            same(alone.decode(asked, range(asked.S))[0], out, "bytes depend on strides or threads")
    want, want_lse = oracle(asked)
    used = np.nan_to_num(asked.key_cache.astype(np.float32)), np.nan_to_num(asked.value_cache.astype(np.float32))
    score = float(np.abs(asked.query.astype(np.float64)).max()) * float(np.abs(used[0]).max()) * asked.D
    weights = min(2.0, float(np.expm1(min(10.0, 2.0**-21 * score * asked.scale * abs(asked.k_scale)))))
    most = float(np.abs(used[1]).max()) * abs(asked.v_scale)
    near(out.reshape(want.shape), want, most * (ROUNDED[asked.query.dtype.name] + weights), f"out of {case}")
    near_lse(lse.reshape(want_lse.shape), want_lse, 2 * weights + 1e-6)
    return f"right, {asked.query.dtype}"


def write_kv(choose: Choose, rng: np.random.Generator) -> str:
    layout, kind = choose.choice(["vllm", "nhd", "hnd"]), choose.choice(["float32", "float16", "bfloat16"])
    stored = choose.choice([kind, "float8_e4m3fn", "float8_e5m2"])
    tokens, heads, D = choose.choice([0, 1, 5, 9]), choose.choice([1, 2]), choose.choice([16, 32, 48])
    page, pages = choose.choice([1, 4, 8]), choose.randint(1, 5)
    new = (rng.normal(size=(2, tokens, heads, D)) * choose.choice([1, 1000, 1e30])).astype(np.float32)
    with np.errstate(over="ignore"):
        key, value = new.astype(dtype(kind))
    shapes = cache_shapes(layout, pages, heads, page, D, dtype(stored).itemsize)
    caches = [np.full((2 * shape[0], *shape[1:]), 7, dtype(stored))[:: choose.choice([1, 2])] for shape in shapes]
    caches = [cache[:pages] for cache in caches]
    slots = rng.integers(-2, pages * page, tokens)
    scales = [choose.choice([1.0, 0.5, np.float32(3)]) for _ in range(2)]
    want = [cache.copy() for cache in caches]
    largest = None if stored == kind else np.float32(finfo(stored))
    for into, some, factor in zip(want, (key, value), scales, strict=True):
        for token, at in zip(some, slots.tolist(), strict=True):
            if at < 0:
                continue
            which, slot = divmod(at, page)
            if largest is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    token = np.clip(token.astype(np.float32) / np.float32(factor), -largest, largest)
            for h, e in np.ndindex(heads, D):
                x = shapes[0][-1]
                where = {
                    "nhd": (which, slot, h, e), "hnd": (which, h, slot, e),
                    "vllm": (which, h, e // x, slot, e % x) if into is want[0] else (which, h, e, slot),
                }[layout]  # fmt: skip
                into[where] = token[h, e].astype(dtype(stored))
    flashcli.write_kv(key, value, *caches, slots, k_scale=scales[0], v_scale=scales[1], layout=layout)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(caches, want, strict=True))
    demand(same, f"another cache: {layout}, {kind} in {stored}, slots {slots}")
    return "right"


def finfo(kind: str) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype(kind)).max)


# ---- calls that cannot be


def odd_things(choose: Choose, x: Any) -> Any:
    """Something else in the place of an argument."""
    array = np.atleast_1d(x) if isinstance(x, np.ndarray) else np.ones(3, np.float32)
    return choose.choice([
        None, 3, -1.5, float("nan"), float("inf"), 2**70, -(2**70), 10**400, "x", b"x", [], [1.0, 2.0], {}, object(),
        True, 1j, np.float64(2), np.ma.masked_array(array), array.astype("V4") if array.dtype == np.float32 else array,
        np.zeros(array.shape, "V0"), array.astype(">f4") if array.dtype.kind == "f" else array, array.astype(object),
        array.astype(np.float64), array.astype(np.int32), array[..., None], array[None], array[:0], array[..., :0],
        np.array(3.0, np.float32), np.zeros(0, np.float32), np.array("x"), array.astype(complex),
        np.array("2020-01-01", "M8[s]"), np.zeros(2, [("a", "f4")]), np.float32, lambda: None, array.tolist(),
    ])  # fmt: skip


def refused(choose: Choose, rng: np.random.Generator) -> str:
    """A call with one or two odd arguments: it is refused, or it does what they say."""
    name = choose.choice(["attention", "attention_backward", "decode", "write_kv"])
    arguments: dict[str, Any]
    if name.startswith("attention"):
        asked, do, _ = question(choose, rng)
        arguments = {**asked._asdict(), "out": None} if name == "attention" else {"do": do, **asked._asdict()}
        more = ["backend", "kernel", "return_lse", "precision", "batch_invariant"] if name == "attention" else [
            "backend", "kernel", "o", "lse", "dlse", "return_dbias"]  # fmt: skip
    else:
        whole = make(decode_case(choose))
        arguments = {x: getattr(whole, x) for x in ("key_cache", "value_cache", "layout", "k_scale", "v_scale")}
        if name == "decode":
            arguments |= {x: getattr(whole, x) for x in ("query", "block_tables", "seq_lens", "scale", *OPTIONAL)}
            arguments |= {"sliding_window": whole.window, "block_sparse": whole.sparse}
            more = ["backend", "cache_dtype", "return_lse"]
        else:
            rows = np.ones((3, whole.Hkv, whole.D), whole.query.dtype)
            arguments |= {"key": rows, "value": rows, "slot_mapping": np.array([0, -1, 1])}
            more = ["cache_dtype"]
    with np.errstate(all="ignore"):
        for which in choose.sample([*arguments, *more], choose.choice([1, 1, 2])):
            arguments[which] = odd_things(choose, arguments.get(which))
            if which in FLAGS and isinstance(arguments[which], np.ndarray):
                arguments[which] = []  # an array that is asked whether it is true has errors of its own
    if name == "attention" and choose.random() < 0.1:
        arguments["out"] = arguments["q"]
    before = {key: x.copy() for key, x in arguments.items() if isinstance(x, np.ndarray)}
    of, there, _, _ = library(choose)
    with contextlib.suppress(TypeError, ValueError):  # numbers that PyTorch has not
        arguments |= {key: there(arguments[key]) for key in before}
    try:
        with np.errstate(all="ignore"):
            getattr(flashcli, name)(**arguments)
    except REFUSALS as error:
        demand(str(error).strip(), "refused without a word")
        for key, x in before.items():
            as_it_was = x.dtype == object or not of.startswith(("NumPy", "PyTorch")) or gpu() or (
                x.tobytes() == np.asarray(arguments[key]).tobytes())  # fmt: skip
            demand(as_it_was, f"{key} changed though the call was refused: {error}")
        return f"{name} refused, {of}"
    return f"{name} taken, {of}"


TRIALS = {
    "attention": attention, "attention_backward": attention_backward, "decode": decode, "write_kv": write_kv,
    "odd arguments": refused,
}  # fmt: skip


def main(trials: int, seconds: int, seed: int) -> torturing.Tally:
    print(f"{trials} calls of each function, and {trials} with odd arguments:", flush=True)
    wanted = {name: trial for name, trial in TRIALS.items() if not gpu() or name != "write_kv"}
    return torturing.tried(wanted, trials, seconds, seed)


if __name__ == "__main__":
    torturing.end(main, __doc__, trials=600, seconds=3600)
