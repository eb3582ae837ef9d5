"""The gradients of attention on CuPy's arrays on a GPU, and on any others that tell where they lie."""

from __future__ import annotations

import functools
import operator
from typing import Any

from flashcli.arrays import memory
from flashcli.arrays.anyones import attention, cupys_empty, keep_until_read, stream_of
from flashcli.arrays.memory import DeviceArray
from flashcli.arrays.places import common_place
from flashcli.arrays.protocols import LEGACY_STREAM, find, refuse_host
from flashcli.asked.attention import backward
from flashcli.asked.shape import FLOAT_BYTES, ceil_div
from flashcli.gpu.launcher import bindings, place_of_device
from flashcli.gpu.prepared_backward import check_names, is_aligned, prepare
from flashcli.kernels.backward import POINTERS


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
    q_start: int = 0,
    o: Any = None,
    lse: Any = None,
    dlse: Any = None,
    return_dbias: bool = False,
    kernel: str | None = None,
) -> tuple[Any, ...]:
    """`flashcli.attention_backward` of these arrays."""
    refuse_host("q", q)
    check_names(backend, kernel)
    bindings()  # first: where there is no driver, nothing else would say so
    stream = stream_of(q)
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse, "bias": bias}
    required = ("do", "q", "k", "v")
    found = {
        name: find(name, x, stream or LEGACY_STREAM) for name, x in given.items() if x is not None or name in required
    }
    of = {name: x.operand for name, x in found.items()}
    asked = backward(
        of["do"], of["q"], of["k"], of["v"], of.get("o"), of.get("lse"), of.get("dlse"), of.get("bias"), causal, scale,
        q_start, return_dbias,
    )  # fmt: skip
    place = common_place(found) or place_of_device(0)
    if o is None and not asked.of.empty:  # what is computed again is contiguous, as `asked` has it
        o, lse = attention(q, k, v, causal, scale, bias=bias, q_start=q_start, return_lse=True)
        found |= {"o": find("o", o, stream or LEGACY_STREAM), "lse": find("lse", lse, stream or LEGACY_STREAM)}
    with place.current():
        for other in found.values():
            if other.stream is not None:
                memory.wait_for(stream, other.stream)
        empty = cupys_empty(q) or functools.partial(DeviceArray, place, stream)
        answer = [empty(of[name].shape) for name in "qkv"]
        if asked.dbias_shape is not None:
            answer.append(empty(asked.dbias_shape))
        into = dict(zip(("dQ", "dK", "dV", "dbias"), (find("out", x) for x in answer), strict=False))
        if asked.of.empty:
            for x in into.values():
                if 0 not in x.operand.shape:
                    memory.fill(stream, x.address, *x.operand[:2], 0)
        else:
            names = {"do": "dO", "q": "Q", "k": "K", "v": "V", "o": "O"}
            at = {names.get(name, name): x.address for name, x in (found | into).items()}
            matrices = (at[name] for name in ("dO", "Q", "K", "V", "O", "dQ", "dK", "dV"))
            prepared = prepare(place, asked, is_aligned(asked, functools.reduce(operator.or_, matrices)), kernel)
            scratch = empty((ceil_div(prepared.workspace, FLOAT_BYTES),))
            at["workspace"] = find("scratch", scratch).address
            prepared.launch(stream, *(at.get(name, 0) for name in POINTERS[:-1]))
        keep_until_read(stream, [x.keep for x in found.values() if x.keep is not None])
    return tuple(answer)
