"""attention(q, k, v), decode() of a cache in pages, write_kv() into one, merge(): who computes for which library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashcli.arrays.protocols import speaks
from flashcli.asked.attention import NO_WINDOW
from flashcli.asked.decode import BlockSparse


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: Any = None,
    mask: Any = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    alibi_slopes: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    precision: str = "fp32",
    batch_invariant: bool = True,
    out_dtype: Any = None,
) -> Any:
    """softmax(scale · Q Kᵀ + bias) V for each batch and head, accurate to fp32.

    Arrays on a GPU are read and written where they lie, on the caller's current stream; the call returns at once, and
    can be captured in a CUDA graph. They may be PyTorch's, CuPy's, or of any library with ``__cuda_array_interface__``
    or DLPack. NumPy's arrays, and PyTorch's tensors on the CPU, are computed on the CPU, or on a GPU by way of it.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array [B, M, d] or [B, H, M, d], 1 <= d <= 256
    k, v : arrays of q's type, [B, N, d] or [B, Hkv, N, d]; H / Hkv heads of q that follow one another share one of k
        and v
    causal : query i sees keys 0 to q_start + i only
    scale : factor on Q Kᵀ; 1/sqrt(d) if None
    backend : "cuda", "cpu", or "auto": the GPU on which the arrays are, or else a usable one, else the CPU
    bias : float32, added to scores, or bool, which is a mask; broadcast to [B, H, M, N], or [B, M, N]
    mask : bool, False where a key is taken away from a query; broadcast like ``bias``, which may be given, too
    q_start : the position of the first query in the sequence of keys; may be negative
    window : (left, right): query i sees keys q_start + i - left to q_start + i + right; -1 is no limit. With ``causal``
        right is 0. Tiles of keys that no query of a tile sees are passed over
    alibi_slopes : float32 [H] or [B, H]; slope · |q_start + i - j| is taken from the score of query i and key j
    cu_seqlens_q, cu_seqlens_k : int32 [S + 1], from 0 to the number of tokens, where packed sequences start in q
        [tokens, H, d], and in k and v [tokens, Hkv, d]. Keys start where queries do, if only the first is given. A
        sequence's last query is at the position of its last key, as in flash-attn and PyTorch's varlen_attn. Slopes may
        be [S, H]; q_start, bias and mask are not given. The bytes of a sequence do not depend on what it is packed with
    return_lse : the natural logarithm of each row's sum of exp(score), too
    out : array of q's shape, and of q's type or float32, for the answer, which overlaps nothing else
    kernel : name of the kernel that computes, on a GPU; the fastest if None
    precision : "fp32", or "fp16": faster, with a relative error of some 7e-4, on a GPU
    batch_invariant : each row has the same bytes whatever else is in the batch; False may be faster, on a GPU
    out_dtype : type of the answer: q's if None, or "float32"; everything before its last rounding is in float32

    All arrays are of one library, and in one place. Strides are free, but the last axis of an array on a GPU is
    contiguous.

    Returns
    -------
    ``out``, or else an array of q's library and shape, contiguous; with ``return_lse``, a tuple of it and a float32
    array [B, H, M] or [B, M], or [H, tokens] of packed sequences. A query that sees no key has zeros and an
    LSE of -inf. Libraries with no allocator that is known get a `DeviceArray` with both protocols.

    Raises
    ------
    TypeError, ValueError
        for arguments of another type or shape, or in another place; then nothing has been queued. So are starts of
        sequences that do not fit. The host does not look at those on a GPU: they are cut to the arrays
    flashcli.errors.FlashError
        where the backend is missing or fails, or does not compute what is asked for

    Source: FlashAttention-2, arXiv 2307.08691, algorithm 1; ALiBi, arXiv 2108.12409.
    """
    return _of("attention", q)(
        q=q, k=k, v=v, causal=causal, scale=scale, backend=backend, bias=bias, mask=mask, q_start=q_start,
        window=window, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        return_lse=return_lse, out=out, kernel=kernel, precision=precision, batch_invariant=batch_invariant,
        out_dtype=out_dtype,
    )  # fmt: skip


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: Any = None,
    mask: Any = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    alibi_slopes: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    o: Any = None,
    lse: Any = None,
    dlse: Any = None,
    return_dbias: bool = False,
    kernel: str | None = None,
    out_dtype: Any = None,
) -> tuple[Any, ...]:
    """The gradients of `attention`, accurate to fp32: (dq, dk, dv), or with ``return_dbias`` (dq, dk, dv, dbias).

    Given dO, the gradient of a loss with respect to O, they are those with respect to Q, K, V and the bias. Arrays on a
    GPU are read where they lie, on the caller's current stream; the call returns at once, and can be captured in a
    CUDA graph. NumPy's arrays, and PyTorch's tensors on the CPU, are computed on the CPU.

    Parameters
    ----------
    do : array of q's shape, and of q's type or float32
    q, k, v, causal, scale, backend, bias, mask, q_start : as they were given to `attention`
    window, alibi_slopes, cu_seqlens_q, cu_seqlens_k : as they were given to `attention`
    o, lse : what ``attention(..., return_lse=True)`` gave, both, o of do's type; without them it is computed again
    dlse : the gradient with respect to the LSE, float32, of its shape; zeros if None
    return_dbias : the gradient with respect to a bias of numbers, too
    kernel : name of the kernel that computes, on a GPU; the fastest if None
    out_dtype : type of dq, dk and dv: q's if None, or "float32"

    All arrays are of one library, and in one place. Strides are free, but the last axis of a matrix on a GPU is
    contiguous. Memory beyond the gradients grows with M + N, not with M · N.

    Returns
    -------
    arrays of q's library, contiguous: dq of q's shape, dk and dv of k's, summed over the heads of q that share them,
    dbias, float32, of the bias's, summed over the axes along which it is broadcast. A query that sees no key has a dq
    of zeros and adds nothing to the others. The same call has the same bytes every time, and those of a batch and head
    do not depend on what else there is.

    Raises
    ------
    TypeError, ValueError
        for arguments of another type or shape, or in another place; then nothing has been queued
    flashcli.errors.FlashError
        where the backend is missing or fails, or does not compute what is asked for

    Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
    """
    return _of("attention_backward", q)(
        do=do, q=q, k=k, v=v, causal=causal, scale=scale, backend=backend, bias=bias, mask=mask, q_start=q_start,
        window=window, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, o=o, lse=lse,
        dlse=dlse, return_dbias=return_dbias, kernel=kernel, out_dtype=out_dtype,
    )  # fmt: skip


def decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    query_starts: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float = 0.0,
    causal: bool = True,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    layout: str = "vllm",
    scale: float | None = None,
    sliding_window: int = 0,
    block_sparse: BlockSparse | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    cache_dtype: str | None = None,
    one_result: bool = False,
    max_query_len: int | None = None,
    kernel: str | None = None,
) -> Any:
    """Attention of query tokens, the last ones of each sequence, against a cache of keys and values in pages.

    A query token sees the tokens of its sequence up to itself. One call may mix single tokens that continue a text,
    drafts to be verified, chunks of prompts and whole ones.

    Arrays on a GPU are read where they lie, on the caller's current stream; the call returns at once, and can be
    captured in a CUDA graph. They may be PyTorch's, CuPy's, or of any library with ``__cuda_array_interface__`` or
    DLPack. NumPy's arrays, and PyTorch's tensors on the CPU, are computed on the CPU, or on a GPU by way of it.

    Parameters
    ----------
    query : [S, H, D], one query token a sequence; [S, T, H, D], T of each, up to eight; or [tokens, H, D] with
        ``query_starts``. They are the last ones of their sequence
    key_cache, value_cache : pages as ``layout`` has them, of the query's type, fp8 or int8
    block_tables : int32 [S, most pages], each sequence's pages in order
    seq_lens : int32 [S], with the query tokens
    query_starts : int32 [S + 1], from 0 to ``tokens``, ascending: sequence s has the query tokens
        ``query_starts[s]`` to ``query_starts[s + 1] - 1``, any number of them, also none
    alibi_slopes : float32 [H]; slope · (token - query's own) is added to a score
    sinks : float32 [H]; one more score of each head, which counts in the sum of exp(score) and has no value
    softcap : a score x becomes softcap · tanh(x / softcap), before ALiBi is added; 0: it stays as it is
    causal : False lets each of ragged query tokens see all tokens of its sequence, as its last one does
    k_scale, v_scale : factors on a cache of fp8 or int8, numbers or arrays of one float32; else ignored
    layout : "vllm", keys [pages, Hkv, D/x, page, x] with x numbers in 16 bytes and values [pages, Hkv, D, page];
        "nhd", both [pages, page, Hkv, D]; "hnd", both [pages, Hkv, page, D]
    scale : factor on q·k; 1/sqrt(D) if None
    sliding_window : number of tokens that a query token sees, itself among them; all if 0
    block_sparse : which blocks a head sees, a `BlockSparse` of `flashcli.asked.decode`; all if None
    return_lse : the logarithm of the sum of exp(score) too, float32 [S, H], [S, T, H] or [tokens, H]
    backend : "cuda", "cpu", or "auto": the GPU on which the arrays are, or else a usable one, else the CPU
    cache_dtype : "float8_e4m3fn", "float8_e5m2" or "int8": the type of the bytes of a cache of uint8
    one_result : True: a query token has the same bytes decoded alone, among others, in a chunk and in a whole prompt,
        if each of these calls asks for it; small batches of long sequences then take longer
    max_query_len : the most query tokens that ``query_starts`` give to a sequence, which the host cannot see on a GPU;
        with 1, the kernel for single tokens computes them. A number too small costs time there, and is no error;
        elsewhere it is one
    kernel : name of the kernel that computes, on a GPU, such as "paged_v1"; the fastest if None

    All arrays are of one library, and in one place. On a GPU, sequences and tokens of the query, and pages, heads and
    slots of the cache, may be any number of aligned bytes apart; all else is contiguous.

    Returns
    -------
    an array of the query's library, shape and type, contiguous; with ``return_lse``, a tuple of it and the LSE. A query
    token that sees nothing has zeros and an LSE of -inf, or of its sink. Libraries with no allocator that is known get
    a `DeviceArray` with both protocols.

    Raises
    ------
    TypeError, ValueError
        for arrays of other types or shapes, or in another place; then nothing has been queued. Lengths beyond the
        tables and pages beyond the cache are refused, too, but not in arrays on a GPU, which the host does not look at.
        There a length is cut to its table, another page is read in place of one that does not exist, and a query token
        that ``query_starts`` give to no sequence sees nothing.
    flashcli.errors.FlashError
        where the backend is missing or fails, or the kernel does not compute what is asked for

    Source: vLLM's PagedAttention, arXiv 2309.06180.
    """
    return _of("decode", query)(
        query, key_cache, value_cache, block_tables, seq_lens, query_starts=query_starts, alibi_slopes=alibi_slopes,
        sinks=sinks, softcap=softcap, causal=causal, k_scale=k_scale, v_scale=v_scale, layout=layout, scale=scale,
        sliding_window=sliding_window, block_sparse=block_sparse, return_lse=return_lse, backend=backend,
        cache_dtype=cache_dtype, one_result=one_result, max_query_len=max_query_len, kernel=kernel,
    )  # fmt: skip


def write_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    layout: str = "vllm",
    cache_dtype: str | None = None,
) -> None:
    """Write new keys and values into the slots of a cache in pages, where it lies.

    Arrays on a GPU are read and written on the caller's current stream; the call returns at once, and can be captured
    in a CUDA graph. They may be PyTorch's, CuPy's, or of any library with ``__cuda_array_interface__`` or DLPack.
    NumPy's arrays, and PyTorch's tensors on the CPU, are written when the call returns.

    Parameters
    ----------
    key, value : [tokens, Hkv, D], float32, float16 or bfloat16
    key_cache, value_cache : pages as ``layout`` has them, of the key's type, fp8 or int8; see `decode`
    slot_mapping : int64 [tokens]; token i goes to slot ``slot_mapping[i] % page`` of page ``slot_mapping[i] // page``,
        and nowhere if that number is negative
    k_scale, v_scale : factors by which numbers of fp8 and int8 are multiplied when they are read; numbers, or arrays of
        one float32. For a cache of another type they are ignored
    layout : "vllm", "nhd" or "hnd"; see `decode`
    cache_dtype : "float8_e4m3fn", "float8_e5m2" or "int8": the type of the bytes of a cache of uint8

    A number is stored in fp8 or int8 divided by its scale, rounded to even, and cut to the type's range. All arrays are
    of one library, and in one place. On a GPU, tokens and heads of keys and values, and pages, heads and slots of the
    cache, may be any number of aligned bytes apart; all else is contiguous. Two tokens with one slot leave either of
    them there; of NumPy's arrays, the later one.

    Raises
    ------
    TypeError, ValueError
        for arrays of other types or shapes, or in another place; then nothing has been written. Slots beyond the cache
        are refused in arrays that are not on a GPU; on a GPU, their tokens go nowhere.
    flashcli.errors.FlashError
        where the GPU fails

    Source: vLLM's `reshape_and_cache`, arXiv 2309.06180.
    """
    _of("write_kv", key)(
        key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, layout=layout,
        cache_dtype=cache_dtype,
    )  # fmt: skip


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Make the answer to all keys of the answers to parts of them, such as a prefix that sequences share and the rest.

    Arrays on a GPU are read where they lie, on the caller's current stream; the call returns at once, and can be
    captured in a CUDA graph.

    Parameters
    ----------
    outs : the parts' answers, up to 16 arrays [.., H, D] of one shape and type, float32, float16 or bfloat16; D is a
        multiple of 8 up to 256
    lses : their LSE, as many float32 arrays [.., H]: what `decode` gives with ``return_lse``

    All arrays are of one library, in one place, and on a GPU contiguous.

    Returns
    -------
    a tuple of the answer and its LSE, of the shapes and types of a part's. A part that has seen no key, whose LSE is
    -inf, counts nothing, whatever its answer is; where all have seen none, the answer is zeros and -inf. Parts must not
    share keys, and sinks belong to one of them alone.

    Raises
    ------
    TypeError, ValueError
        for arrays of other types or shapes, or in another place; then nothing has been queued
    flashcli.errors.FlashError
        where the GPU fails

    Source: FlashInfer's ``merge_states``, arXiv 2501.01005.
    """
    try:
        outs, lses = tuple(outs), tuple(lses)
    except TypeError:
        raise TypeError("outs and lses must be sequences of arrays, one of each for a part") from None
    if not outs:
        raise ValueError("cannot merge: there are no outs")
    return _of("merge", outs[0])(outs, lses)


_known: dict[tuple[str, type], Callable[..., Any]] = {}


def _of(name: str, first: Any) -> Callable[..., Any]:
    """The function of that name for arrays of the library of its first argument."""
    return _known.get((name, type(first))) or _find(name, first)


def _find(name: str, first: Any) -> Callable[..., Any]:
    """Find the function of that name for the library of ``first``, and remember it by the type of ``first``."""
    if any(kind.__module__.partition(".")[0] == "torch" for kind in type(first).__mro__):  # without importing PyTorch
        from flashcli import torch as room  # torch.compile goes through a statement, not through importlib
    else:
        is_numpys = isinstance(first, np.ndarray) or not speaks(first)
        room = importlib.import_module(f"flashcli.arrays.{'numpys' if is_numpys else 'on_gpu'}")
    _known[name, type(first)] = found = getattr(room, name)
    return found
