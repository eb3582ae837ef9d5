"""CuPy's arrays on a GPU, and any others that tell where they lie, read and written there.

The answer is CuPy's if Q is, else a `DeviceArray`, or what the caller gives as ``out``. It is queued on CuPy's current
stream; for others on the one that Q says it is ready on, or the default stream.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

from flashcli.arrays import memory
from flashcli.arrays.memory import DeviceArray
from flashcli.arrays.places import common_place
from flashcli.arrays.protocols import LEGACY_STREAM, Found, find, refuse_host
from flashcli.asked.attention import call
from flashcli.asked.shape import FLOAT_BYTES, ceil_div
from flashcli.gpu.launcher import Prepared, allowed_while_capturing, bindings, place_of_device
from flashcli.gpu.prepared import Options, check_options, is_aligned, prepare, refuse_overlap

ZERO, MINUS_INFINITY = 0, 0xFF800000  # as float32
_unread: list[tuple[Any, list[object]]] = []  # events, and what has to live until they have happened
_looking = threading.Lock()


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: Any = None,
    q_start: int = 0,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    precision: str = "fp32",
    batch_invariant: bool = True,
) -> Any:
    """`flashcli.attention` of these arrays."""
    refuse_host("q", q)
    options = Options(backend, kernel, precision, batch_invariant, return_lse)
    check_options(options)
    bindings()  # first: where there is no driver, nothing else would say so
    stream = stream_of(q)
    given = {"q": q, "k": k, "v": v, "bias": bias, "out": out}
    found = {
        name: find(name, x, stream or LEGACY_STREAM) for name, x in given.items() if x is not None or name in "qkv"
    }
    where = found.get("out")
    of = {name: x.operand for name, x in found.items()}
    what = call(of["q"], of["k"], of["v"], of.get("bias"), of.get("out"), causal, scale, q_start)
    place = common_place(found) or place_of_device(0)
    if where is not None:
        inputs = {name: (x.address, x.operand) for name, x in found.items() if name != "out"}
        refuse_overlap(where.address, where.operand, inputs)
    addresses = functools.reduce(
        operator.or_, (found[name].address for name in ("q", "k", "v", "out") if name in found)
    )
    prepared = None if what.empty else prepare(place, what, is_aligned(what, addresses), options)
    with place.current():  # nothing has been queued yet; what is allocated is aligned
        for other in found.values():
            if other.stream is not None:
                memory.wait_for(stream, other.stream)
        empty = cupys_empty(q) or functools.partial(DeviceArray, place, stream)
        o = empty(what.shape) if out is None else out
        lse = empty(what.lse_shape) if return_lse else None
        found |= {name: find(name, x) for name, x in {"out": o, "lse": lse}.items() if x is not None and x is not out}
        if prepared is None:
            _fill(found, stream)
        else:
            _launch(prepared, found, stream, empty)
        keep_until_read(stream, [x.keep for x in found.values() if x.keep is not None])
    return o if lse is None else (o, lse)


def _fill(found: dict[str, Found], stream: int) -> None:
    """Queue the answer to no keys."""
    for name, bits in {"out": ZERO, "lse": MINUS_INFINITY}.items():
        if name in found and 0 not in found[name].operand.shape:
            memory.fill(stream, found[name].address, *found[name].operand[:2], bits)


def _launch(prepared: Prepared, found: dict[str, Found], stream: int, empty: Callable[..., Any]) -> None:
    at = {name: x.address for name, x in found.items()}
    scratch = empty((ceil_div(prepared.workspace, FLOAT_BYTES),))  # what comes later on the stream may have it again
    prepared.launch(
        stream, at["q"], at["k"], at["v"], at["out"], at.get("lse", 0), at.get("bias", 0),
        find("scratch", scratch).address,
    )  # fmt: skip


def stream_of(q: Any) -> int:
    """The stream on which the caller would do the next thing with Q."""
    if cupy := _cupy(q):
        return cupy.cuda.get_current_stream().ptr
    return (getattr(q, "__cuda_array_interface__", None) or {}).get("stream") or 0


def _cupy(q: Any) -> Any:
    """CuPy, if Q is an array of its."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(q, cupy.ndarray) else None


def cupys_empty(q: Any) -> Any:
    """What makes an array of CuPy's, on Q's GPU, if Q is one."""
    cupy = _cupy(q)
    if cupy is None:
        return None

    def empty(shape: tuple[int, ...]) -> Any:
        with cupy.cuda.Device(q.device.id):
            return cupy.empty(shape, cupy.float32)

    return empty


def keep_until_read(stream: int, owners: list[object]) -> None:
    """Hold on to what others may give away as soon as this call is over, until the GPU has read it."""
    if not owners and not _unread:
        return
    driver, read = bindings(), []  # what is given up lives until the lock is free: anything may follow from its end
    with _looking, allowed_while_capturing(driver):  # else to ask for an event would end somebody's capture
        for entry in [*_unread]:
            if int(driver.cuEventQuery(entry[0])[0]) == 0:
                _unread.remove(entry)
                driver.cuEventDestroy(entry[0])
                read.append(entry)
        if owners:
            _unread.append((memory.mark(stream), owners))
