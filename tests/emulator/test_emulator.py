"""The emulator: what it computes, and what it does not let pass."""

from __future__ import annotations

import ctypes
import hashlib
import signal

import numpy as np
import pytest
from support import ROOT, python, python_path

from flashcli.emulator.machine import library

KERNEL = """
struct Given {
    const float *in;
    float *out;
};
extern __shared__ float room[];
__device__ __forceinline__ unsigned address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ask(float *to, const float *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(to)), "l"(from), "r"(4) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ float half_of(unsigned short bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(64) kernel(const Given a) {
    __shared__ float shared[128];
    const int i = threadIdx.x;
    BODY
}
"""


OUTPUTS = ", ".join(f"%{index}" for index in range(32))
WGMMA = (
    'float c[32]; asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; '
    f'wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{OUTPUTS}}}, %32, %33, p, 1, 1, 1, 1; }}" : '
    + ", ".join(f'"+f"(c[{index}])' for index in range(32))
    + ' : "l"(0ull), "l"(0ull), "r"(0));'
)


class Given(ctypes.Structure):
    _fields_ = (("given", ctypes.c_void_p), ("out", ctypes.c_void_p))


def built(folder, body, cluster=1):
    """The kernel with that body, in a library that is kept in ``folder``."""
    source = folder / f"{hashlib.sha256(body.encode()).hexdigest()}.cu"
    source.write_text(KERNEL.replace("BODY", body))
    return library(source, [], {"CLUSTER": cluster, "IN_CLUSTERS": ""}, folder)


def launched(folder, body, backwards=False, cluster=1):
    """64 numbers from 64, of two warps; of as many blocks, each its own 64."""
    given, out = np.arange(64, dtype=np.float32), np.zeros((cluster, 64), np.float32)
    argument = Given(given.ctypes.data, out.ctypes.data)
    some = ctypes.c_long(0), ctypes.c_long(cluster)
    built(folder, body, cluster).launch_kernel(ctypes.byref(argument), cluster, 64, 256, *some, backwards)
    return out[0] if cluster == 1 else out


def told(code, *arguments):
    """What a process of its own says, and how it ends."""
    return python("-c", code, *arguments, env={"PYTHONPATH": python_path(ROOT / "tests")})


NUMBERS = np.arange(64)
# Of 16 products one is 1, and four are 2^-25, the last place that is not cut off.
PRODUCT = """
    const int k = i % 4 * 2;
    const auto pair = [&](unsigned x) { return (k == 0 ? 0x3c00u : k <= 4 ? x : 0) | (k + 1 <= 4 ? x : 0) << 16; };
    float d[4] = {};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(pair(0x0c00)), "r"(0u), "r"(0u), "r"(0u), "r"(pair(0x0800)), "r"(0u));
    a.out[i] = d[0];
"""


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("a.out[i] = __shfl_xor_sync(~0u, a.in[i], 5);", NUMBERS ^ 5),
        ("a.out[i] = __shfl_up_sync(~0u, a.in[i], 4);", np.where(NUMBERS % 32 < 4, NUMBERS, NUMBERS - 4)),
        ("a.out[i] = __popc(__ballot_sync(~0u, i < 40));", np.where(NUMBERS < 32, 32, 8)),
        ("shared[i] = a.in[i]; __syncthreads(); a.out[i] = shared[63 - i];", NUMBERS[::-1]),
        ("room[i] = a.in[i]; __syncthreads(); a.out[i] = room[(i + 40) % 64];", (NUMBERS + 40) % 64),
        ('ask(shared + i, a.in + i); asm("cp.async.wait_group %0;" ::"n"(0)); a.out[i] = shared[i];', NUMBERS),
        ("a.out[i] = half_of(0x3c00 + i);", 1 + NUMBERS / 1024),
        ("a.out[i] = half_of(0xfbe0 + i);", (0xFBE0 + NUMBERS).astype(np.uint16).view(np.float16)),
        ("a.out[i] = half_of(17 * i);", (17 * NUMBERS).astype(np.uint16).view(np.float16)),
        (PRODUCT, np.full(64, 1 + 2.0**-23)),
        ("if (i == 0) atomicAdd((int *)a.out, 7);", np.where(NUMBERS == 0, np.float32(7 * 2.0**-149), 0)),
        ("if (i > 9) return; __syncthreads(); a.out[i] = blockIdx.x + blockDim.x + 1;", np.where(NUMBERS > 9, 0, 65)),
    ],
    ids=[
        "xor",
        "up",
        "ballot",
        "barrier",
        "dynamic",
        "copy",
        "half",
        "Inf",
        "small",
        "product",
        "atomic",
        "some leave",
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_threads_do_together(emulated, body, want, backwards):
    np.testing.assert_array_equal(launched(emulated, body, backwards), want.astype(np.float32))


def test_what_has_not_been_waited_for_is_not_there(emulated):
    assert (launched(emulated, "ask(shared + i, a.in + i); a.out[i] = shared[i];") != NUMBERS).all()


def test_without_a_barrier_there_is_an_order_in_which_the_answer_is_wrong(emulated):
    found = [launched(emulated, "shared[i] = i; a.out[i] = shared[63 - i];", way) for way in (False, True)]
    assert not (found[0] == found[1]).all()


def test_beyond_an_array_nothing_may_be_read():
    code = "import ctypes; from emulator.driver import EmulatedDriver; driver = EmulatedDriver(); size = 4352"
    code += "; _, at = driver.cuMemAlloc(size); print(at % 256, len(ctypes.string_at(at, size)), flush=True)"
    code += "; ctypes.string_at(at + size, 1)"
    done = told(code)
    assert done.out == "0 4352\n" and done.code == -signal.SIGSEGV, done.err


def test_blocks_of_a_cluster_read_each_others_shared_memory(emulated):
    body = """
    float *there;
    shared[i] = 100 * blockIdx.x + i;
    asm volatile("barrier.cluster.arrive.release;"); asm volatile("barrier.cluster.wait.acquire;");
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&shared[i]), "r"((blockIdx.x + 1) % 3));
    a.out[blockIdx.x * 64 + i] = *there;
    asm volatile("barrier.cluster.arrive.release;"); asm volatile("barrier.cluster.wait.acquire;");
    """
    np.testing.assert_array_equal(launched(emulated, body, cluster=3), 100 * np.array([[1], [2], [0]]) + NUMBERS)


def test_blocks_of_a_cluster_meet_when_all_their_threads_come_that_are_left(emulated):
    body = """
    float *there;
    asm volatile("barrier.cluster.arrive.release;"); asm volatile("barrier.cluster.wait.acquire;");
    if (i >= 40) return;
    if (i >= 32)
        for (int late = 0; late < 100; ++late) __syncwarp(0xff);
    shared[i] = 100 * blockIdx.x + i;
    asm volatile("barrier.cluster.arrive.release;"); asm volatile("barrier.cluster.wait.acquire;");
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&shared[39 - i]), "r"(1 - blockIdx.x));
    a.out[blockIdx.x * 64 + i] = *there;
    asm volatile("barrier.cluster.arrive.release;"); asm volatile("barrier.cluster.wait.acquire;");
    """
    np.testing.assert_array_equal(launched(emulated, body, cluster=2)[:, :40], np.array([[100], [0]]) + NUMBERS[39::-1])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("if (i == 40) __syncwarp();", "threads wait for each other"),
        ("if (i < 16) __syncwarp(); else __ballot_sync(~0u, true);", "lanes of a warp do different things together"),
        ("room[64 + i] = 1;", "something was written beyond dynamic shared memory"),
        ("ask(shared + i, (const float *)((const char *)a.in + 2));", "an address is not aligned"),
        ("ask(shared + i, a.in + i); ask(shared + i, a.in);", "two copies to one place are under way"),
        (
            'ask(shared + i, a.out + i); a.out[i] = 1; asm("cp.async.wait_group %0;" ::"n"(0));',
            "what a copy reads is written while it is under way",
        ),
        ('asm volatile("bar.warp.sync 1;");', "there is no bar_warp_sync here"),
        (f"if (i < 32) {{ {WGMMA} }}", "warps of a warpgroup do not have the same wgmma"),
    ],
)
def test_what_no_kernel_may_do_ends_the_process_with_a_word(emulated, body, word):
    code = "import ctypes, sys; numbers = (ctypes.c_float * 64)(); some = ctypes.c_long(0), ctypes.c_long(1)"
    code += "; argument = (ctypes.c_void_p * 2)(*[ctypes.addressof(numbers)] * 2)"
    code += "; ctypes.CDLL(sys.argv[1]).launch_kernel(argument, 1, 64, 256, *some, False)"
    done = told(code, built(emulated, body)._name)
    assert done.code == 70 and done.err.startswith(f"the emulator: {word}"), done.err
