"""The public functions on CuPy's arrays, and any others on a GPU that tell where they lie, read and written there.

An answer is CuPy's if the first array is, else a `DeviceArray`, or what the caller gives as ``out``. It is queued on
CuPy's current stream; for others on the one that the first array says it is ready on, or the default stream.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

from flashcli.arrays import memory
from flashcli.arrays.memory import DeviceArray
from flashcli.arrays.protocols import LEGACY_STREAM, Found, find, refuse_host, refuse_read_only
from flashcli.asked import decode as pages
from flashcli.asked import merge as merging
from flashcli.asked import write_kv as writing
from flashcli.asked.attention import Operand, Operands, Options, backward, call, check_backend_on_gpu, contiguous
from flashcli.asked.how import How
from flashcli.gpu.overlap import refuse_overlap
from flashcli.gpu.place import Place, allowed_while_capturing, bindings, place_of_device, place_of_memory
from flashcli.gpu.prepared import Prepared, prepare
from flashcli.kernels import plan
from flashcli.kernels.backward import BACKWARD, check_name
from flashcli.kernels.decode import DECODE
from flashcli.kernels.merge import MERGE
from flashcli.kernels.operation import Operation
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.write_kv import WRITE_KV

ZERO, MINUS_INFINITY = 0, 0xFF800000  # as float32
SIGHT = {"alibi_slopes": "slopes", "cu_seqlens_q": "q_starts", "cu_seqlens_k": "k_starts"}  # how kernels call them
GRADIENTS = {"do": "dO", "q": "Q", "k": "K", "v": "V", "o": "O", **SIGHT}  # and what gradients are made of
_unread: list[tuple[Any, list[object]]] = []  # events, and what has to live until they have happened
_looking = threading.Lock()


class Arguments:
    """The arrays of one call: the address of each, their GPU, and the caller's stream, which the first array tells."""

    def __init__(self, given: dict[str, Any], optional: tuple[str, ...] = ()) -> None:
        """Find the addresses of all arrays; those named in ``optional`` may be None."""
        self._first = next(iter(given.values()))
        refuse_host(next(iter(given)), self._first)
        bindings()  # first: where there is no driver, nothing else would say so
        self.stream = _stream_of(self._first)
        self.found: dict[str, Found] = {}
        self.find(**{name: x for name, x in given.items() if x is not None or name not in optional})
        self.place = _common_place(self.found) or place_of_device(0)

    def find(self, **arrays: Any) -> None:
        """Add arrays that have been computed since, by name."""
        for name, x in arrays.items():
            self.found[name] = find(name, x, self.stream or LEGACY_STREAM)

    def of(self, name: str) -> Operand:
        return self.found[name].operand

    def outlines(self) -> dict[str, Any]:
        """The outlines of all arguments that were given, by name."""
        return {name: x.operand for name, x in self.found.items()}

    def take_mask_apart(self) -> None:
        """Call a bias of bools a mask, which it is."""
        if "bias" in self.found and self.of("bias").dtype == "bool":
            self.found["mask"] = self.found.pop("bias")

    def addresses(self, *names: str) -> int:
        """The addresses, or'ed, of the arguments named, as far as they were given."""
        return functools.reduce(operator.or_, (self.found[name].address for name in names if name in self.found), 0)

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Make the place current during a ``with`` block, once the stream waits for arrays that others still fill.

        Afterwards, arrays that their owners may free are kept alive until the queued work has read them.
        """
        streams = [x.stream for x in self.found.values() if x.stream is not None]
        with self.place.current():
            for stream in streams:
                memory.wait_for(self.stream, stream)
            yield
            _keep_until_read(self.stream, self.found.values())

    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> tuple[Any, int]:
        """An array for an answer, of the library of the first argument if it is CuPy's, and its address."""
        cupy = _cupy(self._first)
        if cupy is None:
            array = DeviceArray(self.place, self.stream, shape, dtype)
            return array, array.address
        with cupy.cuda.Device(self._first.device.id):
            array = cupy.empty(shape, dtype)
            return array, array.data.ptr

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """An array for an answer, which is one of the call's from now on."""
        array, address = self.empty(shape, dtype)
        self.found[name] = Found(contiguous(shape, dtype), address)
        return array

    def launch(self, prepared: Prepared, operation: Operation, names: dict[str, str] | None = None) -> None:
        """Queue it, with all arrays in the order of the operation's pointers; ``names`` are other ones for them."""
        at = {(names or {}).get(name, name): x.address for name, x in self.found.items()}
        if prepared.workspace:  # what comes later on the stream may have its memory again
            _kept, at["workspace"] = self.empty((prepared.workspace,), "uint8")
        prepared.launch(self.stream, *(at.get(name, 0) for name in operation.pointers))

    def fill(self, name: str, bits: int) -> None:
        """Queue a fill of an argument, if it is given: every number gets these bits."""
        if name in self.found and 0 not in self.of(name).shape:
            memory.fill(self.stream, self.found[name].address, *self.of(name), bits)


def attention(backend: str = "auto", out: Any = None, out_dtype: Any = None, **arguments: Any) -> Any:
    """`flashcli.attention` of arrays on a GPU, by the names of its parameters."""
    how = How(*map(arguments.pop, How._fields))
    options = Options(*map(arguments.pop, Options._fields))._asdict()
    refuse_host("q", arguments["q"])
    check_backend_on_gpu(backend)
    plan.check(how)
    given = _found(("q", "k", "v"), out=out, **arguments)
    asked = call(**given.outlines(), **options, out_dtype=out_dtype)
    given.take_mask_apart()
    if out is not None:
        places = {name: (x.address, x.operand) for name, x in given.found.items()}
        refuse_overlap(*places.pop("out"), places)
    prepared = None
    if not asked.empty:  # what is allocated is aligned
        asked = asked.at(given.addresses("q", "k", "v", "out"), *map(given.addresses, ("bias", "mask")))
        prepared = prepare(given.place, ATTENTION, asked, how)
    with given.waited_for():
        o = given.add("out", asked.shape, asked.out_dtype) if out is None else out
        lse = given.add("lse", asked.lse_shape) if how.return_lse else None
        if prepared is None:
            given.fill("out", ZERO)
            given.fill("lse", MINUS_INFINITY)
        else:
            given.launch(prepared, ATTENTION, {"q": "Q", "k": "K", "v": "V", "out": "O", **SIGHT})
    return o if lse is None else (o, lse)


def _found(required: Sequence[str], **arrays: Any) -> Arguments:
    """The arrays of a call, those ``required`` first, in which keys start where queries do, if nobody says."""
    if arrays.get("cu_seqlens_k") is None:
        arrays["cu_seqlens_k"] = arrays.get("cu_seqlens_q")
    return Arguments({name: arrays.pop(name) for name in required} | arrays, tuple(arrays))


def attention_backward(
    backend: str = "auto",
    return_dbias: bool = False,
    kernel: str | None = None,
    out_dtype: Any = None,
    **arguments: Any,
) -> tuple[Any, ...]:
    """`flashcli.attention_backward` of arrays on a GPU, by the names of its parameters."""
    options = Options(*map(arguments.pop, Options._fields))._asdict()
    refuse_host("q", arguments["q"])
    check_backend_on_gpu(backend)
    check_name(kernel)
    given = _found(("q", "do", "k", "v"), **arguments)
    asked = backward(**given.outlines(), **options, return_dbias=return_dbias, out_dtype=out_dtype)
    given.take_mask_apart()
    if "o" not in given.found and not asked.of.empty:  # what is computed again is contiguous, as `asked` has it
        again: dict[str, Any] = {name: arguments.get(name) for name in Operands._fields}
        how = How(return_lse=True)._asdict()
        o, lse = attention(**again, **options, **how, out_dtype=asked.of.out_dtype)
        given.find(o=o, lse=lse)
    with given.waited_for():
        answer = {
            f"d{name.upper()}": given.add(f"d{name.upper()}", given.of(name).shape, asked.out_dtype) for name in "qkv"
        }
        if asked.dbias_shape is not None:
            answer["dbias"] = given.add("dbias", asked.dbias_shape)
        if asked.of.empty:
            for name in answer:
                given.fill(name, ZERO)
        else:
            at = given.addresses("do", "q", "k", "v", "o", "dQ", "dK", "dV")
            given.launch(
                prepare(given.place, BACKWARD, asked.at(at, *map(given.addresses, ("bias", "mask"))), How(kernel)),
                BACKWARD,
                GRADIENTS,
            )
    return tuple(answer.values())


def decode(
    *required: Any, return_lse: bool = False, backend: str = "auto", kernel: str | None = None, **others: Any
) -> Any:
    """`flashcli.decode` of arrays on a GPU."""
    check_backend_on_gpu(backend)
    given, options = _by_name(pages.ARRAYS, required, others, pages.OPTIONAL)
    pages.check_option_types(options | {"kernel": kernel})
    asked = pages.ask(**given.outlines(), **options)
    addresses = given.addresses("query", "key_cache", "value_cache")
    prepared = prepare(given.place, DECODE, asked.at(addresses), How(kernel))
    with given.waited_for():
        shape = given.of("query").shape
        out, lse = given.add("out", shape, asked.query.dtype), given.add("lse", shape[:-1])
        given.launch(prepared, DECODE)
    return (out, lse) if return_lse else out


def write_kv(*required: Any, **others: Any) -> None:
    """`flashcli.write_kv` of arrays on a GPU."""
    given, options = _by_name(writing.ARRAYS, required, others)
    for name, cache in (dict(zip(writing.ARRAYS, required, strict=False)) | others).items():
        if name in ("key_cache", "value_cache"):
            refuse_read_only(name, cache)
    pages.check_option_types(options)
    asked = writing.ask(**given.outlines(), **options)
    prepared = prepare(given.place, WRITE_KV, asked.at(given.addresses("key", "value", "key_cache", "value_cache")))
    with given.waited_for():
        given.launch(prepared, WRITE_KV)


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """`flashcli.merge` of arrays on a GPU."""
    parts = {"outs": outs, "lses": lses}
    given = Arguments({f"{name}[{i}]": x for name, arrays in parts.items() for i, x in enumerate(arrays)})
    found = {name: tuple(given.of(f"{name}[{i}]") for i in range(len(arrays))) for name, arrays in parts.items()}
    asked = merging.ask(**found)
    prepared = prepare(given.place, MERGE, asked.at(given.addresses(*(f"outs[{i}]" for i in range(len(outs))))))
    with given.waited_for():
        out, lse = given.add("out", found["outs"][0].shape, asked.type), given.add("lse", found["lses"][0].shape)
        given.launch(prepared, MERGE)
    return out, lse


def _by_name(
    names: Sequence[str], required: Sequence[Any], others: dict[str, Any], optional: tuple[str, ...] = ()
) -> tuple[Arguments, dict[str, Any]]:
    """The arrays of a call by pages, the first of ``names`` by their places, scales among them, and its options."""
    given = dict(zip(names, required, strict=False)) | others
    are_arrays = {*names, *(name for name in pages.FACTORS if not isinstance(given.get(name, 1), Real))}
    arrays = {name: given.pop(name) for name in [*given] if name in are_arrays}
    return Arguments(arrays, optional), given


def _common_place(found: dict[str, Found]) -> Place | None:
    """The place that all arrays with elements share, None if there are none; ValueError names one elsewhere."""
    places = {}
    for name, x in found.items():
        if 0 not in x.operand.shape:
            place = place_of_memory(x.address)
            if place is None:
                raise ValueError(f"{name} must be in the memory of a GPU")
            places[name] = place
    if not places:
        return None
    first, place = next(iter(places.items()))
    for name, other in places.items():
        if other is not place:
            raise ValueError(f"{name} must be on GPU {place.device}, as {first} is, not on GPU {other.device}")
    return place


def _stream_of(array: Any) -> int:
    """The stream on which the caller would queue the next work on an array."""
    if cupy := _cupy(array):
        return cupy.cuda.get_current_stream().ptr
    return (getattr(array, "__cuda_array_interface__", None) or {}).get("stream") or 0


def _cupy(array: Any) -> Any:
    """The module CuPy, if the array is CuPy's, else None."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else None


def _keep_until_read(stream: int, found: Iterable[Found]) -> None:
    """Keep the owners of arrays alive until the GPU has read them, and let go of those that it has read."""
    owners: list[object] = [x.keep for x in found if x.keep is not None]
    if not owners and not _unread:
        return
    driver, read = bindings(), []  # what is given up lives until the lock is free: anything may follow from its end
    with _looking, allowed_while_capturing(driver):  # else to ask for an event would end somebody's capture
        for entry in [*filter(_is_read, _unread)]:
            _unread.remove(entry)
            driver.cuEventDestroy(entry[0])
            read.append(entry)
        if owners:
            _unread.append((memory.mark(stream), owners))


def _is_read(entry: tuple[Any, list[object]]) -> bool:
    return int(bindings().cuEventQuery(entry[0])[0]) == 0
