"""Device memory is host memory, and launching a kernel's last function, ``attention`` or ``update``, computes it in
float64, all of it. What launches of paged decode do, `fake_driver.decode` says.

The environment sets up the devices: FAKE_GPU_COUNT, FAKE_GPU_BYTES of memory each, FAKE_GPU_TAKEN of them by others,
FAKE_GPU_CAPABILITY such as 8.0, and FAKE_GPU_FAILS, the one step that fails: init, context, load, launch or
synchronize, or launch:7, the seventh time only, or launch@1, on device 1 only, and FAKE_GPU_LACKS_MEMORY_FOR, a step
for which there is none left. FAKE_GPU_PAUSE is how many seconds a launch takes at least. ``launches`` and
``open_contexts`` keep record. A context belongs to the thread that opened it; memory and streams to their context.

``laziness(number)`` says whether the number-th stream does its work as late as it may, when somebody waits for it, or,
by default, as early as it may: both are what a GPU might do.
"""

import collections
import itertools
import os
import struct
import threading
import time
import weakref

import numpy as np

launches = []  # (function, B, N) of each launch
open_contexts = []
_allocations = {}  # address -> bytearray
_devices = {}  # address -> number of the device
_lock = threading.RLock()
_current = threading.local()  # its ``contexts``, the last of which is current
_prepared = {}  # address of a workspace -> K and V as they were when it was prepared
_numbers = itertools.count()  # of streams
_streams = weakref.WeakSet()
laziness = lambda number: False  # noqa: E731 (to be replaced by tests)
_times = collections.Counter()  # how often each step was taken
_TOTAL = int(os.environ.get("FAKE_GPU_BYTES", 2**30))
_TAKEN = int(os.environ.get("FAKE_GPU_TAKEN", 0))


class Error(Exception):
    pass


class MemoryError(Error):
    pass


def _device():
    """The number of the current context's device."""
    if not getattr(_current, "contexts", []):
        raise Error("there is no current context on this thread")
    return _current.contexts[-1].index


def _step(name, device=None):
    _times[name] += 1
    if os.environ.get("FAKE_GPU_FAILS") in (name, f"{name}:{_times[name]}", f"{name}@{device}"):
        raise Error(f"fake failure of {name}")
    if os.environ.get("FAKE_GPU_LACKS_MEMORY_FOR") == name:
        raise MemoryError(f"{name} failed: out of memory")


def init():
    _step("init")


def get_driver_version():
    return 13000


class device_attribute:  # the names of the driver, with the values of an A100 of few multiprocessors
    MULTIPROCESSOR_COUNT = 4
    MAX_THREADS_PER_MULTIPROCESSOR = 2048
    MAX_BLOCKS_PER_MULTIPROCESSOR = 32
    MAX_REGISTERS_PER_MULTIPROCESSOR = 65536
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 164 * 1024
    RESERVED_SHARED_MEMORY_PER_BLOCK = 1024


class function_attribute:
    MAX_DYNAMIC_SHARED_SIZE_BYTES = "shared"


class Device:
    def __init__(self, index):
        self.index = index

    @staticmethod
    def count():
        return int(os.environ.get("FAKE_GPU_COUNT", 1))

    def name(self):
        return "Fake GPU"

    def compute_capability(self):
        return tuple(int(part) for part in os.environ.get("FAKE_GPU_CAPABILITY", "8.0").split("."))

    def total_memory(self):
        return _TOTAL

    def get_attribute(self, attribute):
        return attribute

    def pci_bus_id(self):
        return f"0000:{self.index:02X}:00.0"

    def retain_primary_context(self):
        _step("context", self.index)
        return Context(self.index)


class Context:
    def __init__(self, index):
        self.index = index

    def push(self):
        _current.contexts = [*getattr(_current, "contexts", []), self]
        open_contexts.append(self)

    @staticmethod
    def synchronize():
        for stream in list(_streams):
            stream.synchronize()

    def pop(self):
        assert _current.contexts.pop() is self
        open_contexts.remove(self)

    def detach(self):
        assert self not in open_contexts


class Stream:
    def __init__(self, flags=0):
        self.lazy, self.work = laziness(next(_numbers)), collections.deque()
        _streams.add(self)

    def push(self, work):
        """``work`` is a function, or a Mark to wait for."""
        self.work.append(work)
        if not self.lazy:
            self.run()

    def run(self, until=None):
        """All that can be done; or, all that is before a Mark, and what that waits for."""
        while self.work and not (until and until.time):
            if isinstance(self.work[0], Mark) and not self.work[0].time:
                if not until:
                    return
                self.work[0].stream.run(self.work[0])
            work = self.work.popleft()
            if callable(work):
                work()

    def wait_for_event(self, event):
        self.push(event.mark)

    def is_done(self):
        return not self.work

    def synchronize(self):
        _step("synchronize", _device())
        end = Mark(self)
        self.push(end.reach)
        self.run(end)


def _push(stream, work):
    """Have a stream do ``work``; the default stream does it at once."""
    stream.push(work) if stream else work()


class Mark:
    """A place in a stream's work, passed once it has a time."""

    def __init__(self, stream):
        self.stream, self.time = stream, None

    def reach(self):
        self.time = time.perf_counter()


class Event:
    def record(self, stream=None):
        self.mark = Mark(stream)
        _push(stream, self.mark.reach)

    def synchronize(self):
        _step("synchronize", _device())
        if self.mark.stream:
            self.mark.stream.run(self.mark)

    def time_till(self, end):
        return (end.mark.time - self.mark.time) * 1e3


class DeviceAllocation:
    def __init__(self, size):
        with _lock:
            ends = (address + len(memory) for address, memory in _allocations.copy().items())
            self.address = max(ends, default=0) + 4096
            _allocations[self.address] = bytearray(b"\xff" * size)  # NaN, if read as floats
            _devices[self.address] = _device()

    def __int__(self):
        return self.address

    def __del__(self):
        with _lock:  # another thread may be looking through them
            _allocations.pop(self.address, None)
            _prepared.pop(self.address, None)


def mem_alloc(size):
    if size > mem_get_info()[0]:
        raise MemoryError("cuMemAlloc failed: out of memory")
    return DeviceAllocation(size)


def memset_d8(target, value, size):
    _allocations[int(target)][:size] = bytes([value]) * size


def mem_get_info():
    with _lock:
        used = sum(len(memory) for address, memory in _allocations.copy().items() if _devices[address] == _device())
    return _TOTAL - _TAKEN - used, _TOTAL


def _bytes(pointer):
    """The bytes from an address to the end of its allocation."""
    with _lock:
        ours = [(address, memory) for address, memory in _allocations.copy().items() if _devices[address] == _device()]
    for address, memory in ours:
        if address <= pointer < address + len(memory):
            return np.frombuffer(memory, np.uint8, offset=pointer - address)
    raise Error(f"an illegal memory access was encountered at {pointer}")


def _floats(pointer):
    found = _bytes(pointer)
    return found[: len(found) // 4 * 4].view(np.float32)


def memcpy_htod_async(target, source, stream):
    _push(stream, lambda: memcpy_htod(target, source))


def memcpy_dtoh_async(target, source, stream):
    _push(stream, lambda: memcpy_dtoh(target, source))


def memcpy_htod(target, source):
    _bytes(int(target))[: source.nbytes] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)


def memcpy_dtoh(target, source):
    assert target.flags.c_contiguous
    target.reshape(-1).view(np.uint8)[...] = _bytes(int(source))[: target.nbytes]


def to_device(source):
    memory = mem_alloc(source.nbytes)
    memcpy_htod(memory, source)
    return memory


def module_from_buffer(code):
    _step("load", _device())
    return Module(dict(part[2:].split("=") for part in code.decode().split() if part.startswith("-D")))


class Module:
    def __init__(self, macros):
        self.macros = macros

    def get_function(self, name):
        return Function(name, self.macros)


class Function:
    num_regs, local_size_bytes, shared_size_bytes = 128, 0, 32768

    def __init__(self, name, macros):
        self.name, self.macros, self.shared = name, macros, 0
        self.d, self.causal = int(macros["HEAD_DIM"]), macros.get("CAUSAL") == "1"

    def prepare(self, arguments):
        self.arguments = "".join(arguments)

    def set_attribute(self, attribute, value):
        assert attribute == function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared = value

    def prepared_async_call(self, grid, block, stream, *arguments, shared_size=0):
        from flashcli.kernels.arguments import Attention

        _step("launch", _device())
        if shared_size > self.shared:  # stricter than CUDA, which gives 48 KiB, static shared memory included
            raise Error(f"{self.name} was not given {shared_size} bytes of shared memory")
        if "PAGE" in self.macros:
            return self._decode(arguments[0])
        given = Attention.from_buffer_copy(struct.pack(self.arguments, *arguments))
        if self.name != "find_nonfinite":
            launches.append((self.name, given.B, given.N))
        _push(stream, lambda: self._run(given))

    def _run(self, given):
        from flashcli.files.verify import reference

        time.sleep(float(os.environ.get("FAKE_GPU_PAUSE", 0)))
        B, M, N, d = given.B, given.M, given.N, self.d
        if self.name == "find_nonfinite":
            matrices = ((given.Q, given.q, M), (given.K, given.k, N), (given.V, given.v, N))
            if not all(np.isfinite(self._matrices(*matrix, B)).all() for matrix in matrices if matrix[0]):
                _floats(given.nonfinite)[:1].view(np.int32)[:] = 1
        if self.name == "prepare":
            _prepared[given.workspace] = [
                self._matrices(*matrix, N, B).copy() for matrix in ((given.K, given.k), (given.V, given.v))
            ]
        if self.name not in ("attention", "update"):
            return  # one of a kernel's steps before
        keys = _prepared.get(given.workspace) or [
            self._matrices(*matrix, N, B) for matrix in ((given.K, given.k), (given.V, given.v))
        ]
        rows = np.arange(given.q_start, given.q_start + M)
        queries = self._matrices(given.Q, given.q, M, B)
        for b in range(B):
            qkv = np.zeros((3, N, d), np.float32)
            qkv[0, rows] = queries[b]
            qkv[1], qkv[2] = keys[0][b], keys[1][b]
            out = reference(qkv, self.causal, given.scale, rows).ravel()
            _floats(given.O)[b * given.o.batch :][: M * d] = out

    def _decode(self, packed):
        import fake_driver

        from flashcli.kernels.decode import POINTERS, Argument

        given = Argument.from_buffer_copy(packed)
        for name in POINTERS:
            if at := getattr(given, name):
                setattr(given, name, _bytes(at).ctypes.data)
        launches.append((self.name, given.sequences, given.pages))
        if self.name in ("tensor", "grouped"):
            fake_driver.decode(given, self.macros)

    def _matrices(self, pointer, by, rows, B):
        """Q, K or V, [B, rows, d]."""
        assert by.row == self.d
        floats = _floats(pointer)
        return np.stack([floats[b * by.batch :][: rows * self.d].reshape(rows, self.d) for b in range(B)])
