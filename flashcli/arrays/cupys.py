"""`flashcli.decode` and `flashcli.write_kv` for CuPy's arrays, read and written where they lie.

Out, LSE and scratch are CuPy's, of its current pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from flashcli.arrays import memory
from flashcli.arrays.anyones import keep_until_read
from flashcli.arrays.places import common_place
from flashcli.arrays.protocols import LEGACY_STREAM, Found, find
from flashcli.asked.decode import check_option_types
from flashcli.gpu import decode as paged
from flashcli.gpu import write_kv as paged_write
from flashcli.gpu.launcher import Place, bindings
from flashcli.gpu.prepared import ALIGNMENT


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
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, **({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}),
    }  # fmt: skip
    lies = _lies("query", given, options, {"k_scale": k_scale, "v_scale": v_scale})
    check_option_types(options)
    arrays = paged.Arrays(**{name: x.operand for name, x in lies.found.items()})
    addresses = lies.addresses("query", "key_cache", "value_cache")
    prepared = paged.prepare(lies.place, arrays, addresses, paged.Options(**options))
    import cupy

    with lies.waited_for() as stream:
        out = cupy.empty(query.shape, query.dtype)
        lse = cupy.empty(query.shape[:-1], "float32")
        scratch = cupy.empty(prepared.workspace, "uint8")  # what comes later on the stream may have it again
        prepared.launch(stream, *lies.at(paged.Arrays), out.data.ptr, lse.data.ptr, scratch.data.ptr)
    return (out, lse) if return_lse else out


def write_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    **options: Any,
) -> None:
    """Parameters and errors are those of `flashcli.write_kv`; the other arrays may be anybody's."""
    given = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping,
    }  # fmt: skip
    lies = _lies("key", given, options, {"k_scale": k_scale, "v_scale": v_scale})
    check_option_types(options)
    arrays = paged_write.Arrays(**{name: x.operand for name, x in lies.found.items()})
    addresses = lies.addresses("key", "value", "key_cache", "value_cache")
    prepared = paged_write.prepare(lies.place, arrays, addresses, paged_write.Options(**options))
    with lies.waited_for() as stream:
        prepared.launch(stream, *lies.at(paged_write.Arrays))


class Lies(NamedTuple):
    """Where arrays are, and CuPy's current stream."""

    found: dict[str, Found]
    place: Place
    stream: int

    def at(self, kind: Any) -> list[int]:
        """The addresses of all that ``kind`` has fields for, 0 for what there is not."""
        return [self.found[name].address if name in self.found else 0 for name in kind._fields]

    def addresses(self, *names: str) -> int:
        """The lowest bits of those, or'ed."""
        lowest = 0
        for name in names:
            lowest |= self.found[name].address
        return lowest % ALIGNMENT

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[int]:
        """The stream, after whatever somebody else still fills, with the place current during a ``with`` block.

        Afterwards what others may give away is held on to until what has been queued there has read it.
        """
        import cupy

        with cupy.cuda.Device(self.place.device), self.place.current():
            for x in self.found.values():
                if x.stream is not None:
                    memory.wait_for(self.stream, x.stream)
            yield self.stream
            keep_until_read(self.stream, [x.keep for x in self.found.values() if x.keep is not None])


def _lies(first: str, given: dict[str, Any], options: dict[str, Any], scales: dict[str, Any]) -> Lies:
    """Where the arrays lie, of which the ``first`` is CuPy's; a scale that is a number is put to the options."""
    kind = type(given[first])
    if kind.__module__.partition(".")[0] != "cupy":
        wanted = "a NumPy or CuPy array or a PyTorch tensor"
        raise TypeError(f"{first} must be {wanted}, not {kind.__name__}: try numpy.asarray, or cupy.asarray")
    import cupy

    bindings()  # first: where there is no driver, nothing else would say so
    for name, scale in scales.items():
        (given if hasattr(scale, "__cuda_array_interface__") else options)[name] = scale
    for name, array in given.items():
        if not hasattr(array, "__cuda_array_interface__"):
            raise TypeError(f"{name} must be a CuPy array, as {first} is, not {type(array).__name__}")
    stream = cupy.cuda.get_current_stream().ptr
    found = {name: find(name, array, stream or LEGACY_STREAM) for name, array in given.items()}
    place = common_place(found)
    if place is None:
        raise ValueError("all arrays are empty")
    return Lies(found, place, stream)
