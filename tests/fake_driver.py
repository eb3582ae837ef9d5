"""Enough of ``cuda.bindings.driver`` to compute attention on arrays "on a GPU", which are NumPy's here.

Launching a kernel's function ``attention`` computes it in float64, all of it, as the arguments say, by address, and so
do ``tensor``, ``prompt`` and ``grouped`` with paged decode, by the CPU's backend, which has tests of its own,
``write_kv`` with a cache, ``merge_answers`` with parts, and ``dq``, ``dk_dv`` and ``dbias`` with gradients, by the
formulas. A kernel that splits numbers gives nonsense where the inputs are not finite, and notes the rows, or heads,
which one that does not then computes once more. What has been launched, and which contexts are current, is kept record
of. ``owned`` are the address ranges of memory on a GPU, by its number; ``fails`` the functions that give a code other
than 0, and the code.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
from gradients_oracle import gradients
from oracle import Asked, times

from flashcli.arrays import memory
from flashcli.arrays.protocols import DataType
from flashcli.asked.attention import TYPES
from flashcli.asked.decode import BlockSparse, cache_shapes
from flashcli.cpu.decode import attend_group
from flashcli.cpu.merge import merge as merge_numpy
from flashcli.cpu.pages import DecodeArrays, WriteKvArrays
from flashcli.cpu.write_kv import write as write_numpy
from flashcli.files.decode.tensors import dtype
from flashcli.kernels import backward, write_kv
from flashcli.kernels import merge as merging
from flashcli.kernels.arguments import Attention
from flashcli.kernels.decode import Argument
from flashcli.kernels.pages import TYPE_NUMBERS

CUdevice_attribute = SimpleNamespace(
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE="khz",
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE="memory_khz",
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH="bits",
)
CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
CUpointer_attribute = SimpleNamespace(
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE="kind",
    CU_POINTER_ATTRIBUTE_CONTEXT="context",
)
CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1)
CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early")
INVALID_CONTEXT, INVALID_VALUE = 201, 1


class LaunchConfig:
    """``CUlaunchConfig``, as it is made."""

    def __init__(self) -> None:
        self.gridDimX = self.blockDimX = self.sharedMemBytes = self.hStream = self.numAttrs = 0
        self.attrs: list[SimpleNamespace] = []


class Driver:
    """One machine of ``count`` GPUs, whose primary contexts are 1000, 1001, .."""

    def __init__(self, capability: tuple[int, int] = (8, 0), count: int = 1) -> None:
        self.capability, self.count = capability, count
        self.launches: list[tuple[str, int, int]] = []  # function, stream, context
        self.early: list[bool] = []  # whether each launch may begin before the one before it has ended
        self.waits: list[tuple[int, int]] = []  # a stream, and the one it waits for
        self.owned: dict[int, tuple[int, int]] = {}  # address: bytes, GPU
        self.allocated: dict[int, object] = {}
        self.loaded: list[dict[str, str]] = []  # the macros of what was loaded
        self.fails: dict[str, int] = {}
        self.capturing = 0  # whether what is queued goes into a graph
        self.waited_for: list[int] = []  # streams, by the host
        self.shared: dict[int, int] = {}  # bytes that a function may have
        self._thread = threading.local()
        self._functions: dict[int, tuple[str, dict[str, str]]] = {}
        for names in ("CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureMode", "CUpointer_attribute"):
            setattr(self, names, globals()[names])
        self.CUmemorytype, self.CUevent_flags = CUmemorytype, CUevent_flags
        self.CUlaunchAttributeID, self.CUlaunchConfig = CUlaunchAttributeID, LaunchConfig
        self.CUlaunchAttribute = lambda: SimpleNamespace(id=None, value=SimpleNamespace())
        self._events: dict[int, int] = {}

    def own(self, array: np.ndarray, device: int = 0) -> np.ndarray:
        """From now on the array's memory is a GPU's."""
        base = array if array.base is None else array.base
        self.owned[base.ctypes.data] = base.nbytes, device
        return array

    # contexts

    @property
    def contexts(self) -> list[int]:
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts

    def cuDeviceGet(self, index):
        return (0, index) if index < self.count else (101, None)

    def cuDeviceGetCount(self):
        return 0, self.count

    def cuDeviceGetAttribute(self, attribute, device):
        rates = {"khz": 1_410_000, "memory_khz": 1_215_000, "bits": 5120}  # an A100's
        return 0, {"major": self.capability[0], "minor": self.capability[1], "sms": 4, **rates}[attribute]

    def cuDeviceGetName(self, length, device):
        return 0, b"Fake GPU".ljust(length, b"\0")

    def cuDevicePrimaryCtxRetain(self, device):
        return self.fails.get("context", 0), 1000 + device

    def cuCtxGetCurrent(self):
        return 0, self.contexts[-1] if self.contexts else 0

    def cuCtxSetCurrent(self, context):
        self.contexts[-1:] = [context]
        return (0,)

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return 0, self.contexts.pop()

    def cuCtxGetId(self, context):
        return 0, context

    def cuCtxGetDevice(self):
        return 0, self.contexts[-1] - 1000

    def cuGetErrorString(self, code):
        return 0, b"fake failure %d" % code

    def cuPointerGetAttribute(self, attribute, address):
        for start, (size, device) in self.owned.items():
            if start <= address < start + size:
                return 0, {"kind": 2, "context": 1000 + device}[attribute]
        return INVALID_VALUE, None

    # code

    def cuModuleLoadData(self, code):
        assert self.contexts
        macros = dict(part[2:].split("=") for part in code.decode().split() if part.startswith("-D"))
        self.loaded.append(macros)
        return self.fails.get("load", 0), macros

    def cuModuleGetFunction(self, module, name):
        self._functions[len(self._functions) + 1] = name.decode(), module
        return 0, len(self._functions)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.shared[function] = value
        return (0,)

    def cuFuncLoad(self, function):
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0, "global"

    # memory and events

    def cuMemAllocAsync(self, size, stream):
        memory = np.full(size, 0xFF, np.uint8)
        self.own(memory)
        self.allocated[memory.ctypes.data] = memory
        return self.fails.get("allocate", 0), memory.ctypes.data

    def cuMemFreeAsync(self, address, stream):
        self.allocated.pop(address, None)  # of an earlier fake, if somebody has kept an answer of its
        return (0,)

    def cuMemAlloc(self, size):
        return self.cuMemAllocAsync(size, 0)

    def cuMemFree(self, address):
        return self.cuMemFreeAsync(address, 0)

    def cuMemcpyHtoD(self, to, source, size):
        ctypes.memmove(to, source, size)
        return (0,)

    cuMemcpyDtoH = cuMemcpyHtoD

    def cuMemsetD2D32Async(self, address, pitch, bits, width, height, stream):
        rows = _view(address, np.uint32, (height, width), (pitch // 4, 1))
        rows[...] = bits
        return (0,)

    def cuMemsetD2D16Async(self, address, pitch, bits, width, height, stream):
        _view(address, np.uint16, (height, width), (pitch // 2, 1))[...] = bits
        return (0,)

    def cuMemsetD32Async(self, address, bits, count, stream):
        _view(address, np.uint32, (count,), (1,))[...] = bits
        return (0,)

    def cuEventCreate(self, flags):
        self._events[len(self._events) + 1] = 0
        return 0, len(self._events)

    def cuEventRecord(self, event, stream):
        self._events[event] = stream
        return (0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.waits.append((stream, self._events[event]))
        return (0,)

    def cuEventDestroy(self, event):
        return (0,)

    def cuStreamIsCapturing(self, stream):
        return 0, self.capturing

    def cuStreamSynchronize(self, stream):
        self.waited_for.append(stream)
        return (0,)

    def cuEventQuery(self, event):
        return (0,)

    # launches

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        stream, shared = config.hStream, config.sharedMemBytes
        assert config.gridDimX > 0 and config.blockDimX > 0 and config.numAttrs == len(config.attrs)
        if not self.contexts or self.contexts[-1] >= 2000:
            return (INVALID_CONTEXT,)
        if shared > self.shared.get(function, 0):
            return (INVALID_VALUE,)
        if code := self.fails.get("launch"):
            return (code,)
        name, macros = self._functions[function]
        self.launches.append((name, stream, self.contexts[-1]))
        self.early.append(any(attribute.id == "early" for attribute in config.attrs))
        if name == "attention":
            at = ctypes.c_void_p.from_address(parameters).value
            attention(Attention.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Attention))), macros)
        if name == "begin":
            at = ctypes.c_void_p.from_address(parameters).value
            _numbers_drawn(Argument.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Argument))))[...] = 0
        if name in ("tensor", "prompt", "grouped"):
            at = ctypes.c_void_p.from_address(parameters).value
            decode(Argument.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Argument))), macros)
        if name in ("dq", "dk_dv", "dbias"):
            at, of = ctypes.c_void_p.from_address(parameters).value, backward.Argument
            differentiate(of.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(of))), macros, name)
        if name == "write_kv":
            at, kind = ctypes.c_void_p.from_address(parameters).value, write_kv.Argument
            write(kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind))), macros)
        if name == "merge_answers":
            at, kind = ctypes.c_void_p.from_address(parameters).value, merging.Argument
            merge(kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind))), macros)
        return (0,)


def _view(address, dtype, shape, strides):
    if 0 in shape:
        return np.empty(shape, dtype)
    item = np.dtype(dtype).itemsize
    reach = item * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
    memory = (ctypes.c_uint8 * reach).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=[item * s for s in strides])


def _bias_and_mask(given, macros: dict[str, str]) -> list[np.ndarray | None]:
    """What changes scores, as a kernel is built for it."""
    found, kind = [], int(macros.get("BIAS", 0))
    for bit, name, kind_of in ((1, "bias", np.float32), (2, "mask", np.bool_)):
        if not kind & bit:
            found.append(None)
            continue
        by, column = getattr(given, f"{name}_strides"), getattr(given, f"{name}_column")
        assert column == 1 or macros.get("BIAS_COLUMN") != "1"  # what that promises
        shape = given.B, given.H, given.M, given.N
        found.append(_view(getattr(given, name), kind_of, shape, (by.batch, by.head, by.row, column)))
    return found


def _type(macros: dict[str, str], name: str) -> np.dtype:
    """The type of a kernel's matrices, by the macro of that name."""
    return dtype(TYPES[int(macros.get(name, 0))])


def attention(given: Attention, macros: dict[str, str]) -> None:
    """What a kernel does, in float64."""
    B, H, Hkv, M, N, d = given.B, given.H, given.Hkv, given.M, given.N, int(macros["HEAD_DIM"])

    def matrix(address, by, heads, rows, kind="INPUT"):
        return _view(address, _type(macros, kind), (B, heads, rows, d), (by.batch, by.head, by.row, 1))

    q, o = matrix(given.Q, given.q, H, M), matrix(given.O, given.o, H, M, "ANSWER")
    k, v = (matrix(at, by, Hkv, N) for at, by in ((given.K, given.k), (given.V, given.v)))
    if macros["ALIGNED"] == "1":
        addresses = given.Q | given.K | given.V | given.O
        strides = [
            getattr(by, axis) for by in (given.q, given.k, given.v, given.o) for axis in ("batch", "head", "row")
        ]
        assert addresses % 16 == 0 and all(stride % 4 == 0 for stride in strides)
    with np.errstate(all="ignore"):
        kk, vv = (np.repeat(x.astype(np.float64), H // Hkv, 1) for x in (k, v))
        scores = given.scale * q.astype(np.float64) @ kk.swapaxes(-1, -2)
        bias, mask = _bias_and_mask(given, macros)
        if bias is not None:
            scores = np.where(bias == -np.inf, bias, scores + bias)
        scores = scores if mask is None else np.where(mask, scores, -np.inf)
        if macros["CAUSAL"] == "1":
            seen = np.arange(N) <= np.arange(M)[:, None] + given.q_start
            scores = np.where(seen, scores, -np.inf)
        top = np.max(scores, -1, keepdims=True)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top))
        total = weights.sum(-1, keepdims=True)
        answer = np.where(total == 0, 0, times(weights, vv, scores == -np.inf) / np.where(total == 0, 1, total))
        lse = (np.log(total) + top)[..., 0]
    o[...] = answer.astype(o.dtype)
    if given.lse:
        _view(given.lse, np.float32, (B, H, M), (H * M, M, 1))[...] = lse


def differentiate(given: backward.Argument, macros: dict[str, str], function: str) -> None:
    """What a backward kernel's function does."""
    B, H, Hkv, M, N, d = given.B, given.H, given.Hkv, given.M, given.N, int(macros["HEAD_DIM"])

    def matrix(address, by, heads, rows, kind):
        return _view(address, _type(macros, kind), (B, heads, rows, d), (by.batch, by.head, by.row, 1))

    def row_numbers(address, by):
        return _view(address, np.float32, (B, H, M), (by.batch, by.head, by.row)) if address else None

    read = ("dO", "d_o", H, M), ("Q", "q", H, M), ("K", "k", Hkv, N), ("V", "v", Hkv, N), ("O", "o", H, M)
    do, q, k, v, o = (
        matrix(getattr(given, at), getattr(given, by), heads, rows, kind).astype(np.float32)
        for (at, by, heads, rows), kind in zip(read, ("ANSWER", *["INPUT"] * 3, "ANSWER"), strict=True)
    )
    if macros["ALIGNED"] == "1":
        for at, by, *_ in (*read, ("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
            assert getattr(given, at) % 16 == 0
            assert not any(getattr(getattr(given, by), axis) % 4 for axis in ("batch", "head", "row"))
    bias, mask = _bias_and_mask(given, macros)
    asked = Asked(q, k, v, macros["CAUSAL"] == "1", given.scale, bias, given.q_start, mask)
    assert np.isfinite(o).any() and not np.isnan(row_numbers(given.lse, given.lse_at)).all()
    found = gradients(asked, do, row_numbers(given.dlse, given.dlse_at))
    wanted = np.ones((B, Hkv), bool)
    if given.notes:
        notes = _view(given.notes, np.int32, (B, Hkv), (Hkv, 1))
        if "PREPARE_THREADS" in macros:
            of_queries = [x.reshape(B, Hkv, -1) for x in (do, q)]
            notes[...] |= sum(~np.isfinite(x).all((2, 3)) for x in (k, v)) > 0
            notes[...] |= sum(~np.isfinite(x).all(2) for x in of_queries) > 0
            for x in found[:3]:
                x.reshape(B, Hkv, -1)[notes != 0] = 7
        else:
            wanted = notes != 0
    if function == "dbias":
        shape = [n if stride else 1 for n, stride in zip((B, H, M, N), _four(given), strict=True)]
        summed = found[3].sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)
        _view(given.dbias, np.float32, shape, _four(given))[...] = summed
        return
    names = ("dQ",) if function == "dq" else ("dK", "dV")
    for name in names:
        x = found[("dQ", "dK", "dV").index(name)]
        heads, rows = x.shape[1:3]
        into = matrix(getattr(given, name), getattr(given, name.lower()), heads, rows, "GRADIENT")
        mask = np.repeat(wanted, heads // Hkv, axis=1)
        into[mask] = x[mask].astype(into.dtype)


def _four(given: backward.Argument) -> tuple[int, int, int, int]:
    at = given.dbias_at
    return at.batch, at.head, at.row, given.dbias_column


def _numbers_drawn(given: Argument) -> np.ndarray:
    return _view(given.workspace, np.int32, (1,), (1,))


def decode(given: Argument, macros: dict[str, str]) -> None:
    """What a kernel of paged decode does. One whose blocks take piece after piece draws numbers, from zero on."""
    D, page = (int(macros[name]) for name in ("HEAD_DIM", "PAGE"))
    S, T, H, Hkv = given.sequences, given.tokens, given.heads, given.kv_heads
    names = {number: name for name, number in TYPE_NUMBERS.items()}
    query_type, cache_type = (dtype(names[int(macros[name])]) for name in ("QUERY_TYPE", "CACHE_TYPE"))
    if macros.get("FINDS") == "0":
        drawn = _numbers_drawn(given)
        assert drawn == 0
        drawn[...] = 5
    layout = "hnd"  # by strides, nhd is one of these
    key_strides = given.key_page, given.key_head, given.key_slot, 1
    value_strides = given.value_page, given.value_head, given.value_slot, 1
    if int(macros["TRANSPOSED"]):
        layout, value_strides = "vllm", (given.value_page, given.value_head, page, 1)
        key_strides = given.key_page, given.key_head, given.key_chunk, given.key_slot, 1
    shapes = cache_shapes(layout, given.pages, Hkv, page, D, cache_type.itemsize)
    number = {name: 1.0 if not at else _view(at, np.float32, (1,), (1,))[0].item()
              for name, at in (("k_scale", given.k_scale), ("v_scale", given.v_scale))}  # fmt: skip
    sparse = BlockSparse(given.sparse_stride, given.sparse_block, given.sparse_local, given.sparse_slide, given.tp_rank)
    width = given.table_width
    lengths = _view(given.seq_lens, np.int32, (S,), (1,))
    starts = _view(given.query_starts, np.int32, (S + 1,), (1,)) if given.query_starts else None
    first = S if starts is None else given.total
    asked = DecodeArrays(
        _view(given.query, query_type, (first, T, H, D), (given.query_sequence, given.query_token, D, 1)),
        _view(given.key_cache, cache_type, shapes[0], key_strides),
        _view(given.value_cache, cache_type, shapes[1], value_strides),
        _view(given.block_tables, np.int32, (S, width), (given.table_row, 1)),
        np.clip(lengths, 0, width * page),
        _view(given.alibi_slopes, np.float32, (H,), (1,)) if given.alibi_slopes else None,
        layout=layout, scale=given.scale, window=given.window, sparse=sparse if sparse.vert_stride else None, **number,
        softcap=given.softcap, causal=bool(given.causal), query_starts=starts,
        sinks=_view(given.sinks, np.float32, (H,), (1,)) if given.sinks else None,
    )  # fmt: skip
    out, lse = np.zeros((first * T, H, D), query_type), np.full((first * T, H), -np.inf, np.float32)
    for s, kv_head in np.ndindex(S, Hkv):
        rows = slice(asked.starts[s], asked.starts[s + 1])
        attend_group(asked, s, kv_head, out[rows], lse[rows])
    _view(given.out, query_type, out.shape, (H * D, D, 1))[...] = out
    _view(given.lse, np.float32, lse.shape, (H, 1))[...] = lse


def write(given: write_kv.Argument, macros: dict[str, str]) -> None:
    """What the kernel that writes into a cache does; slots that the cache has not are left out."""
    D, page = (int(macros[name]) for name in ("HEAD_DIM", "PAGE"))
    names = {number: name for name, number in TYPE_NUMBERS.items()}
    kind, cache_type = (dtype(names[int(macros[name])]) for name in ("QUERY_TYPE", "CACHE_TYPE"))
    layout, key_strides = "hnd", (given.key_page, given.key_head, given.key_slot, 1)
    value_strides = given.value_page, given.value_head, given.value_slot, 1
    if int(macros["TRANSPOSED"]):
        layout, value_strides = "vllm", (given.value_page, given.value_head, page, 1)
        key_strides = given.key_page, given.key_head, given.key_chunk, given.key_slot, 1
    shapes = cache_shapes(layout, given.pages, given.kv_heads, page, D, cache_type.itemsize)
    rows = given.tokens, given.kv_heads, D
    slots = _view(given.slot_mapping, np.int64, rows[:1], (1,))
    scales = (_view(at, np.float32, (1,), (1,))[0].item() if at else factor
              for at, factor in ((given.k_scale, given.k_factor), (given.v_scale, given.v_factor)))  # fmt: skip
    write_numpy(
        WriteKvArrays(
            _view(given.key, kind, rows, (given.new_key_token, given.new_key_head, 1)),
            _view(given.value, kind, rows, (given.new_value_token, given.new_value_head, 1)),
            _view(given.key_cache, cache_type, shapes[0], key_strides),
            _view(given.value_cache, cache_type, shapes[1], value_strides),
            np.where(slots < given.pages * page, slots, -1), *scales, layout,
        )
    )  # fmt: skip


def merge(given: merging.Argument, macros: dict[str, str]) -> None:
    """What the kernel that merges parts does."""
    D, names = int(macros["HEAD_DIM"]), {number: name for name, number in TYPE_NUMBERS.items()}
    kind, rows = dtype(names[int(macros["QUERY_TYPE"])]), given.rows
    parts = range(given.parts)
    outs = [_view(getattr(given, f"outs[{i}]"), kind, (rows, D), (D, 1)) for i in parts]
    lses = [_view(getattr(given, f"lses[{i}]"), np.float32, (rows,), (1,)) for i in parts]
    out, lse = merge_numpy(outs, lses)
    _view(given.out, kind, (rows, D), (D, 1))[...] = out
    _view(given.lse, np.float32, (rows,), (1,))[...] = lse


DLPACK = {  # kind, bits and lanes of types
    "float32": (2, 32, 1), "float16": (2, 16, 1), "bfloat16": (4, 16, 1), "int32": (0, 32, 1), "int64": (0, 64, 1),
    "uint8": (1, 8, 1), "bool": (6, 8, 1), "float64": (2, 64, 1), "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
}  # fmt: skip


class OnGpu:
    """A NumPy array that says it is on a GPU, as Numba's arrays do."""

    def __init__(self, driver: Driver, array: np.ndarray, device: int = 0, stream: int | None = None) -> None:
        self.array, self.stream = driver.own(array, device), stream

    @property
    def __cuda_array_interface__(self) -> dict:
        return {**self.array.__array_interface__, "strides": self.array.strides, "version": 3, "stream": self.stream}


class FromDlpack:
    """An array of DLPack alone."""

    def __init__(self, array: OnGpu, kind: int = 2) -> None:
        self.array, self.kind, self.streams = array.array, kind, []

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        kind = DataType(*DLPACK[self.array.dtype.name])
        return memory.export(self, self.array.ctypes.data, self.array.shape, (self.kind, 0), kind)


class WithoutAStream(FromDlpack):
    """What JAX's arrays look like: the other protocol does not say when their numbers are ready."""

    @property
    def __cuda_array_interface__(self):
        found = self.array.__array_interface__
        return {**found, "data": (found["data"][0], True), "strides": None, "version": 2}
