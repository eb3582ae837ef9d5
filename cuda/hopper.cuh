// Hopper's own instructions (sm_90a) as one-line functions: barriers in shared memory that count bytes, bulk copies,
// matrix products of a warpgroup (four warps), registers moved between warpgroups.
#pragma once
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// The pointer itself, in a register. Else the address of what is in shared memory is made anew wherever it is used,
// from the place of the block in its cluster.
template <class T>
__device__ __forceinline__ T *where_it_is(T *shared) {
    uint32_t address = shared_address(shared);
    asm volatile("" : "+r"(address));
    return static_cast<T *>(__cvta_shared_to_generic(address));
}

// ---- mbarrier: a phase ends when `count` threads arrived and all announced bytes landed. Phases alternate parity 0,
// 1.

__device__ __forceinline__ void barrier_init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine; then __syncthreads.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t *barrier) { arrive_at(shared_address(barrier)); }

__device__ __forceinline__ void arrive_expecting(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase of this parity. On a fresh barrier parity 1 counts as ended.
__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) {
    for (uint32_t done = 0; !done;) {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// Whether it has ended.
__device__ __forceinline__ bool has_ended(uint64_t *barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

// A position in a ring of so many slots, and the parity of its present round.
template <int SLOTS>
struct RingOf {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == SLOTS) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ RingOf after() const {
        RingOf one = *this;
        one.next();
        return one;
    }
    __device__ __forceinline__ void skip(unsigned count) {
        const unsigned to = stage + count;
        stage = to % SLOTS, parity ^= to / SLOTS & 1;
    }
    __device__ __forceinline__ int odd() const { return (stage + SLOTS * parity) % 2; }  // 0, 1, 0, 1, ...
};

// ---- clusters: blocks that run at the same time, and reach each other's shared memory

// The address, in the shared memory of the cluster's block with that rank, of what is there where `here` is in this
// one.
template <class T>
__device__ __forceinline__ T *in_block(T *here, int rank) {
    T *there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return there;
}

// All threads of all blocks of the cluster meet: what they wrote before they arrive is seen by those that have waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- copies

// Global to shared memory, one thread for all; `bytes` a multiple of 16, as both addresses. Counts on `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t to_shared, const void *from, int bytes, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_shared),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// A box of an array of four axes to shared memory, one thread for all, as the driver's map of 128 bytes says. Counts on
// `barrier`.
__device__ __forceinline__ void copy_box(uint32_t to_shared, const void *map, int x, int y, int z, int w,
                                         uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], [%6];" ::"r"(to_shared),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
        : "memory");
}

// 16 bytes, both addresses multiples of 16, by each thread for itself; it arrives at the barrier when all its copies
// landed.
__device__ __forceinline__ void copy16(uint32_t to_shared, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
// The first bytes of BYTES by cp.async, as many as are wanted, and zeros in the place of the others.
template <int BYTES>
__device__ __forceinline__ void copy_some(uint32_t to_shared, const void *from, int wanted) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what one cp.async copies");
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(wanted)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to_shared), "l"(from), "n"(BYTES),
                     "r"(wanted)
                     : "memory");
}
__device__ __forceinline__ void arrive_after_copies(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Ordinary stores to shared memory become visible to wgmma and the copy engine (after this, a barrier).
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Ordinary stores to global memory become visible to the copy engine: called by the thread that has stored and, within
// a launch, by the one that copies.
__device__ __forceinline__ void fence_for_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- atomics

// Adds to a number in global memory and returns what it was. What is before it, here and in threads that this one has
// met at a barrier, is before what comes after another's that has seen it.
__device__ __forceinline__ int add_in_order(int *to, int x) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
    return before;
}

// Waits until a number in global memory, to which others add so, is `wanted`.
__device__ __forceinline__ void await_number(const int *from, int wanted) {
    for (int x;;) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        if (x == wanted) return;
        __nanosleep(100);
    }
}

// ---- named barriers among `threads` threads

__device__ __forceinline__ void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- registers

template <int N>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// The number that lane 0 has. The compiler knows that the lanes of a warp then have the same, which saves registers and
// instructions.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A number in shared memory, for all lanes, read by lane 0. Where that is the one which then gives the number's slot
// free, its own order is enough for the read to come before what is written next; else it would take a __syncwarp,
// which is no instruction where a warp has converged, so that racecheck does not see it.
__device__ __forceinline__ int read_by_lane_0(const int &from) {
    int x = 0;
    if (threadIdx.x % 32 == 0) x = from;
    return uniform(x);
}

// ---- wgmma: D[64, N] (+)= A[64, 16] B[16, N], fp16 to fp32. It runs behind the thread's back between commit and wait.

// How wgmma finds an operand in shared memory: K-major rows of 128 bytes with 128-byte swizzle, groups of 8 rows 1024
// bytes apart, the base on 1024 bytes. Moving 16 columns on adds 32 bytes = 2 to the descriptor. The upper half is
// always the same.
constexpr uint64_t SWIZZLED_ROWS = (uint64_t)(1u << 30 | 1024 >> 4) << 32;
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return SWIZZLED_ROWS | 1 << 16 | (address & 0x3ffff) >> 4;
}

// A descriptor that the lanes of a warp have in common. Where the compiler does not see that they do, it has those of
// all k-steps in registers of each lane, and moves each from there for its product.
__device__ __forceinline__ uint64_t uniform_descriptor(uint64_t descriptor) {
    return SWIZZLED_ROWS | (uint32_t)uniform(int(descriptor));
}

// Keeps the compiler from moving or copying accumulators across: call it before the first wgmma and after the wait.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N of the committed groups still run.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The accumulators are N / 2 registers a thread. Lane 4g + t of warp w holds of row 16w + g the columns 8j + 2t, +1 in
// d[4j], d[4j+1], and of row 16w + g + 8 the same columns in d[4j+2], d[4j+3]. A in registers has the same layout, two
// columns a register: a[0..3] = columns 2t of row g, of row g + 8, columns 8 + 2t of row g, of row g + 8.
#define D_REGS_4 "%0, %1, %2, %3"
#define D_REGS_8 D_REGS_4 ", %4, %5, %6, %7"
#define D_REGS_12 D_REGS_8 ", %8, %9, %10, %11"
#define D_REGS_16 D_REGS_12 ", %12, %13, %14, %15"
#define D_REGS_20 D_REGS_16 ", %16, %17, %18, %19"
#define D_REGS_24 D_REGS_20 ", %20, %21, %22, %23"
#define D_REGS_28 D_REGS_24 ", %24, %25, %26, %27"
#define D_REGS_32 D_REGS_28 ", %28, %29, %30, %31"
#define D_REGS_36 D_REGS_32 ", %32, %33, %34, %35"
#define D_REGS_40 D_REGS_36 ", %36, %37, %38, %39"
#define D_REGS_44 D_REGS_40 ", %40, %41, %42, %43"
#define D_REGS_48 D_REGS_44 ", %44, %45, %46, %47"
#define D_REGS_52 D_REGS_48 ", %48, %49, %50, %51"
#define D_REGS_56 D_REGS_52 ", %52, %53, %54, %55"
#define D_REGS_60 D_REGS_56 ", %56, %57, %58, %59"
#define D_REGS_64 D_REGS_60 ", %60, %61, %62, %63"

#define D_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_8(d, i) D_4(d, i), D_4(d, i + 4)
#define D_12(d, i) D_8(d, i), D_4(d, i + 8)
#define D_16(d, i) D_12(d, i), D_4(d, i + 12)
#define D_20(d, i) D_16(d, i), D_4(d, i + 16)
#define D_24(d, i) D_20(d, i), D_4(d, i + 20)
#define D_28(d, i) D_24(d, i), D_4(d, i + 24)
#define D_32(d, i) D_28(d, i), D_4(d, i + 28)
#define D_36(d, i) D_32(d, i), D_4(d, i + 32)
#define D_40(d, i) D_36(d, i), D_4(d, i + 36)
#define D_44(d, i) D_40(d, i), D_4(d, i + 40)
#define D_48(d, i) D_44(d, i), D_4(d, i + 44)
#define D_52(d, i) D_48(d, i), D_4(d, i + 48)
#define D_56(d, i) D_52(d, i), D_4(d, i + 52)
#define D_60(d, i) D_56(d, i), D_4(d, i + 56)
#define D_64(d, i) D_60(d, i), D_4(d, i + 60)

// wgmma(d, A, B, accumulate) for N columns, H = N / 2 accumulators; R0.. are the numbers of the operands after them.
#define WGMMA(N, H, R0, R1, R2, R3, R4, R5)                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[H], uint64_t A, uint64_t B, int accumulate) {             \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N  \
                     "k16.f32.f16.f16 {" D_REGS_##H "}, %" #R0 ", %" #R1 ", p, 1, 1, 0, 0;\n}"                 \
                     : D_##H(d, 0)                                                                             \
                     : "l"(A), "l"(B), "r"(accumulate));                                                       \
    }                                                                                                          \
    __device__ __forceinline__ void wgmma(float (&d)[H], const uint32_t (&a)[4], uint64_t B, int accumulate) { \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N  \
                     "k16.f32.f16.f16 {" D_REGS_##H "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4       \
                                                    ", p, 1, 1, 0;\n}"                                         \
                     : D_##H(d, 0)                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(B), "r"(accumulate));                   \
    }

WGMMA(8, 4, 4, 5, 6, 7, 8, 9)
WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA(24, 12, 12, 13, 14, 15, 16, 17)
WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA(40, 20, 20, 21, 22, 23, 24, 25)
WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA(56, 28, 28, 29, 30, 31, 32, 33)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA(72, 36, 36, 37, 38, 39, 40, 41)
WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA(88, 44, 44, 45, 46, 47, 48, 49)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA(104, 52, 52, 53, 54, 55, 56, 57)
WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA(120, 60, 60, 61, 62, 63, 64, 65)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69)

// wgmma with A in registers and 64 columns, for a B that lies the other way, K rows of 128 bytes: moving 16 rows on
// adds 2048 bytes = 128 to the descriptor.
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], const uint32_t (&a)[4], uint64_t B, int accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D_REGS_32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : D_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(B), "r"(accumulate));
}
// wgmma with A in shared memory, which lies as B does: K rows of 64 halves.
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], uint64_t A, uint64_t B, int accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D_REGS_32
        "}, %32, %33, p, 1, 1, 1, 1;\n}"
        : D_32(d, 0)
        : "l"(A), "l"(B), "r"(accumulate));
}
