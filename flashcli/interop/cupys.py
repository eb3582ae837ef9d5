"""`flashcli.decode` for CuPy's arrays, read where they lie; out, LSE and scratch are CuPy's, of its current pool."""

from __future__ import annotations

from typing import Any

from flashcli.gpu.launcher import bindings
from flashcli.interop import memory
from flashcli.interop.paged import Arrays, Options, prepare
from flashcli.interop.places import common_place
from flashcli.interop.prepared import ALIGNMENT
from flashcli.interop.protocols import find


def decode(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    alibi_slopes: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Parameters, the answer and errors are those of `flashcli.decode`; the other arrays may be anybody's."""
    if type(query).__module__.partition(".")[0] != "cupy":
        kind = type(query).__name__
        raise TypeError(f"query must be a NumPy or CuPy array or a PyTorch tensor, not {kind}: try cupy.asarray")
    import cupy

    bindings()  # first: where there is no driver, nothing else would say so
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    for name, scale in {"k_scale": k_scale, "v_scale": v_scale}.items():
        (given if hasattr(scale, "__cuda_array_interface__") else options)[name] = scale
    for name, array in given.items():
        if array is not None and not hasattr(array, "__cuda_array_interface__"):
            raise TypeError(f"{name} must be a CuPy array, as query is, not {type(array).__name__}")
    stream = cupy.cuda.get_current_stream().ptr
    found = {name: find(name, array) for name, array in given.items() if array is not None}
    at = {name: x.address for name, x in found.items()}
    arrays = Arrays(**{name: x.operand for name, x in found.items()})
    addresses = (at["query"] | at["key_cache"] | at["value_cache"]) % ALIGNMENT
    place = common_place(found)
    if place is None:
        raise ValueError("cannot decode: all arrays are empty")
    prepared = prepare(place, arrays, addresses, Options(**options))
    with cupy.cuda.Device(place.device), place.current():
        for x in found.values():
            if x.stream is not None:
                memory.wait_for(stream, x.stream)
        out = cupy.empty(query.shape, query.dtype)
        lse = cupy.empty(query.shape[:-1], "float32")
        scratch = cupy.empty(prepared.workspace, "uint8")  # what comes later on the stream may have it again
        prepared.launch(stream, at | {"out": out.data.ptr, "lse": lse.data.ptr, "workspace": scratch.data.ptr})
    return (out, lse) if return_lse else out
