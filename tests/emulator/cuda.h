// CUDA's language on a CPU, as far as the kernels need it that a CPU can run: what translate.py leaves of a kernel is C++.
//
// A block is an OS thread, and shared memory what is that thread's; a thread of the block is a fiber, which runs until it
// has to wait for others. Stricter than a GPU: a copy has arrived when it is waited for, and not before; what threads that
// wait for each other never get, lanes that do different things together, addresses that are not aligned, and what is
// written beyond dynamic shared memory end the process, with a word. Not seen: what a GPU's threads do at the same time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

// ---- words of the language

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local
#define __CUDA_ARCH__ 900

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    return a < b ? a : b;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    return a > b ? a : b;
}

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __log2f(float x) { return std::log2(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= (((uint64_t)b << 32 | a) >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return y;
}

namespace emulator {

[[noreturn]] inline void fail(const char *what) {
    fprintf(stderr, "the emulator: %s\n", what);
    abort();
}

// ---- a block

// Blocks that meet: all that are still there.
struct Cluster {
    std::mutex mutex;
    int there, arrived = 0;
    std::atomic<int> meetings{0};
    std::vector<char *> shared;  // of each block
    explicit Cluster(int blocks) : there(blocks), shared(blocks) {}
    void arrive(bool to_leave = false) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (to_leave) --there;
        else ++arrived;
        if (arrived > 0 && arrived == there) arrived = 0, ++meetings;
    }
};

struct Copy {
    char *to;
    const char *from;
    int bytes, given;  // those that are read; the others are zeros
};

constexpr int STACK = 1 << 18;

// A thread, and after it the thread of that number of the next block: to make one takes longer than most of them run.
struct Fiber {
    int x;
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t beginning;
    jmp_buf where;
    bool done;
    unsigned exchanges;  // of its warp, that it has come to
    int meetings;        // of its cluster
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;                                   // copies that are in no group yet
    std::deque<std::vector<std::function<void()>>> products;  // of a warpgroup; the last group is open
    explicit Fiber(int x) : x(x) {}
    void start() {
        done = false, exchanges = meetings = 0;
        groups.clear(), open.clear(), products.clear(), products.emplace_back();
    }
};
inline thread_local std::deque<Fiber> fibers;

constexpr int WORDS = 6;  // that a lane gives to an exchange at most

// What the lanes of a warp do together. Who has gone on may already give to the next one, but never to one after that.
struct Warp {
    unsigned come = 0;  // lanes, to all exchanges
    const char *what[2];
    uint64_t given[2][32][WORDS];
};

inline thread_local struct Block *block;

// Shared memory whose size comes with the launch.
constexpr int MOST_SHARED = 227 * 1024, BEYOND = 1024;
alignas(1024) inline thread_local char dynamic_shared[MOST_SHARED + BEYOND];

struct Barrier {
    int come = 0, meetings = 0;
};

// A barrier in shared memory, and the bulk copies that it counts: they arrive when somebody looks at it.
struct CountingBarrier {
    int count = 0, missing = 0, bytes = 0, phase = 0;
    std::vector<Copy> copies;
    void look() {
        for (const Copy &copy : std::exchange(copies, {})) memcpy(copy.to, copy.from, copy.bytes), bytes -= copy.bytes;
        end_phase();
    }
    void arrive() {
        if (--missing < 0) fail("more threads arrive at a barrier than it counts");
        end_phase();
    }
    void end_phase() {
        if (missing == 0 && bytes == 0) missing = count, phase ^= 1;
    }
};

struct Block {
    int threads, alive, shared, arrivals = 0, in_cluster = 0;
    bool progress = false;
    Barrier barriers[16];
    int against[3] = {};  // votes at one meeting of all, the one after it, and the one before, which all have counted
    std::map<int, CountingBarrier> counting;  // by their addresses
    std::vector<Warp> warps;
    Fiber *now = nullptr;
    jmp_buf turn;
    Cluster *cluster;
    const std::function<void()> &body;

    Block(const std::function<void()> &body, int threads, int shared, Cluster *cluster)
        : threads(threads), alive(threads), shared(shared), warps((threads + 31) / 32), cluster(cluster), body(body) {}

    void run(bool backwards) {
        block = this;
        memset(dynamic_shared, 0xff, shared + BEYOND);  // NaN
        while ((int)fibers.size() < threads) begin(fibers.emplace_back(fibers.size()));
        for (Fiber &fiber : fibers) fiber.start();
        while (alive > 0) {
            progress = false;
            for (int i = 0; i < threads; ++i)
                if (Fiber &fiber = fibers[backwards ? threads - 1 - i : i]; !fiber.done) go_on(fiber);
            if (!progress && in_cluster == 0) fail("threads wait for each other");
            if (!progress) std::this_thread::yield();
        }
        for (int i = shared; i < shared + BEYOND; ++i)
            if (dynamic_shared[i] != (char)0xff) fail("something was written beyond dynamic shared memory");
    }
    // Until it waits, or has ended.
    void go_on(Fiber &fiber) {
        now = &fiber;
        if (!_setjmp(turn)) _longjmp(fiber.where, 1);
    }
    void begin(Fiber &fiber) {
        now = &fiber;
        getcontext(&fiber.beginning);
        fiber.beginning.uc_stack.ss_sp = fiber.stack.get(), fiber.beginning.uc_stack.ss_size = STACK;
        makecontext(&fiber.beginning, live, 0);
        if (!_setjmp(turn)) setcontext(&fiber.beginning);
    }
    static void live();
};

// Others' turn. Who comes back looks again at what it waits for.
inline void wait() {
    Block &b = *block;
    if (!_setjmp(b.now->where)) _longjmp(b.turn, 1);
}
inline void Block::live() {
    while (true) {
        wait();
        block->body();
        block->now->done = block->progress = true, --block->alive;
    }
}

// Of so many threads, or of all that are there; some may only come by.
inline void barrier(int which = 0, int threads = 0, bool stay = true) {
    Barrier &here = block->barriers[which];
    const int mine = here.meetings;
    ++here.come, block->progress = true;
    while (stay && here.meetings == mine && here.come < (threads ? threads : block->alive)) wait();
    if (!stay && here.come < threads) return;
    if (here.meetings == mine) here.come = 0, ++here.meetings, block->progress = true;
}

inline void cluster_arrive() {
    Block &b = *block;
    ++b.now->meetings, ++b.in_cluster, b.progress = true;
    if (++b.arrivals % b.alive == 0) b.cluster->arrive();
}
inline void cluster_wait() {
    Block &b = *block;
    while (b.cluster->meetings < b.now->meetings) wait();
    --b.in_cluster, b.progress = true;
}

inline int lane() { return block->now->x % 32; }

// What each lane of the warp has given.
inline const uint64_t (&exchange(const char *what, std::initializer_list<uint64_t> words = {}))[32][WORDS] {
    Warp &warp = block->warps[block->now->x / 32];
    const unsigned mine = block->now->exchanges++, side = mine % 2;
    if (warp.come == mine * 32) warp.what[side] = what;
    if (strcmp(warp.what[side], what)) fail("lanes of a warp do different things together");
    std::copy(words.begin(), words.end(), warp.given[side][lane()]);
    ++warp.come, block->progress = true;
    while (warp.come < (mine + 1) * 32) wait();
    return warp.given[side];
}
template <class T>
inline T of_lane(const char *what, T x, int which) {
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    word = exchange(what, {word})[which][0];
    memcpy(&x, &word, sizeof x);
    return x;
}

template <class T>
inline T *aligned(T *address, int bytes) {
    if ((uintptr_t)address % bytes) fail("an address is not aligned");
    return address;
}

// ---- a launch

struct Index {
    int x;
};
inline thread_local Index block_index, grid_size, block_size;

// `cluster` blocks at a time; one after the other, or, where they meet, side by side.
inline void launch(const std::function<void()> &body, int grid, int threads, int shared, int cluster, bool backwards) {
    if (shared > MOST_SHARED) fail("that is more shared memory than a block can have");
    for (int first = 0; first < grid; first += cluster) {
        Cluster blocks(cluster);
        const auto run = [&](int rank) {
            block_index.x = first + rank, grid_size.x = grid, block_size.x = threads;
            Block(body, threads, shared, &blocks).run(backwards);
            blocks.arrive(true);
        };
        if (cluster == 1) {
            run(0);
            continue;
        }
        std::vector<std::thread> side_by_side;
        std::atomic<int> ready{0};
        for (int rank = 0; rank < cluster; ++rank)
            side_by_side.emplace_back([&, rank] {
                blocks.shared[rank] = dynamic_shared, ++ready;
                while (ready < cluster) std::this_thread::yield();
                run(rank);
            });
        for (std::thread &one : side_by_side) one.join();
    }
    fibers.clear();  // many libraries may be loaded
}

}  // namespace emulator

#define threadIdx (emulator::Index{emulator::block->now->x})
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size
#define blockDim emulator::block_size

// ---- what threads do together

inline void __syncthreads() { emulator::barrier(); }
inline bool __syncthreads_and(bool vote) {
    emulator::Block &b = *emulator::block;
    const int turn = b.barriers[0].meetings % 3;
    b.against[(turn + 1) % 3] = 0, b.against[turn] += !vote;
    emulator::barrier();
    return b.against[turn] == 0;
}
inline void __syncwarp(unsigned = ~0u) { emulator::exchange("syncwarp"); }
inline void __nanosleep(unsigned) { emulator::wait(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T>
inline T __shfl_sync(unsigned, T x, int lane) {
    return emulator::of_lane("shfl", x, lane % 32);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulator::of_lane("shfl_xor", x, emulator::lane() ^ mask);
}
template <class T>
inline T __shfl_up_sync(unsigned, T x, int by) {
    return emulator::of_lane("shfl_up", x, max(emulator::lane() - by, emulator::lane() < by ? emulator::lane() : 0));
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const auto &given = emulator::exchange("ballot", {x});
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (unsigned)given[i][0] << i;
    return y;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const auto &given = emulator::exchange("reduce_max", {x});
    for (int i = 0; i < 32; ++i) x = max(x, (unsigned)given[i][0]);
    return x;
}
inline int atomicAdd(int *to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
inline unsigned atomicInc(unsigned *to, unsigned most) {
    unsigned before = *to;
    while (!__atomic_compare_exchange_n(to, &before, before < most ? before + 1 : 0, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {}
    return before;
}
template <class T>
inline T __ldg(const T *from) {
    return *emulator::aligned(from, sizeof(T));
}
inline long long __cvta_generic_to_shared(const void *p) { return (const char *)p - emulator::dynamic_shared; }

// ---- instructions, each by its opcode

namespace ptx {
using emulator::aligned;
using emulator::lane;

// -- numbers

// Of all numbers of 16 bits, for it takes a CPU long to find one.
inline std::vector<float> all_halves() {
    std::vector<float> y(1 << 16);
    for (int x = 0; x < 1 << 16; ++x) y[x] = bits_as<_Float16>((unsigned short)x);
    return y;
}
inline const std::vector<float> halves = all_halves();
inline float from_half(unsigned short x) { return halves[x]; }
inline unsigned to_half(float x) { return bits_as<unsigned short>((_Float16)x); }
inline float from_bf16(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
inline unsigned to_bf16(float x) {
    const unsigned wide = __float_as_uint(x);
    return x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
inline float from_e4m3(unsigned char x) {
    const int exponent = x >> 3 & 15, digits = x & 7;
    const float y = exponent == 0 ? std::ldexp(digits, -9) : std::ldexp(8 + digits, exponent - 10);
    return std::copysign((x & 127) == 127 ? NAN : y, x & 128 ? -1.0f : 1.0f);
}
inline void nothing(...) {}
// To the nearest number of so many digits after the first, or the largest.
inline unsigned to_fp8(float x, int digits, int bias, unsigned largest) {
    const unsigned sign = std::signbit(x) ? 128 : 0;
    if (std::isnan(x)) return sign | 127;
    if (std::isinf(x)) return sign | largest;
    const int exponent = max(x == 0 ? 1 - bias : std::ilogb(x), 1 - bias);
    const unsigned places = std::nearbyint(std::ldexp(std::abs(x), digits - exponent));
    return sign | min(((exponent + bias - 1) << digits) + places, largest);
}
inline void cvt_rn_satfinite_e4m3x2_f32(unsigned short &y, float high, float low) {
    y = to_fp8(high, 3, 7, 0x7e) << 8 | to_fp8(low, 3, 7, 0x7e);
}
inline void cvt_rn_satfinite_e5m2x2_f32(unsigned short &y, float high, float low) {
    y = to_fp8(high, 2, 15, 0x7b) << 8 | to_fp8(low, 2, 15, 0x7b);
}
inline void ex2_approx_ftz_f32(float &y, float x) { y = std::exp2(x); }
inline void lg2_approx_f32(float &y, float x) { y = std::log2(x); }
inline void cvt_f32_f16(float &y, unsigned short x) { y = from_half(x); }
inline void cvt_f32_f16(float &low, float &high, unsigned both) {  // two, of a word
    low = from_half(both), high = from_half(both >> 16);
}
inline void cvt_rn_f16_f32(unsigned short &y, float x) { y = to_half(x); }
inline void cvt_rn_f16x2_f32(unsigned &y, float high, float low) { y = to_half(high) << 16 | to_half(low); }
inline void cvt_rn_bf16x2_f32(unsigned &y, float high, float low) { y = to_bf16(high) << 16 | to_bf16(low); }
inline void cvt_rn_f16x2_e4m3x2(unsigned &y, unsigned short x) {
    y = to_half(from_e4m3(x >> 8)) << 16 | to_half(from_e4m3(x & 255));
}
inline void cvt_rn_f16x2_e5m2x2(unsigned &y, unsigned short x) { y = (x >> 8) << 24 | (x & 255) << 8; }
inline void mul_rn_f16x2(unsigned &y, unsigned a, unsigned b) {
    y = to_half(from_half(a >> 16) * from_half(b >> 16)) << 16 | to_half(from_half(a) * from_half(b));
}
inline void mov_u32_ctaid_x(unsigned &y) { y = emulator::block_index.x; }
inline void mov_b32(unsigned short &low, unsigned short &high, unsigned x) { low = x, high = x >> 16; }

// -- memory

inline void ld_global_nc_L1__no_allocate_L2__128B_v4_u32(unsigned &a, unsigned &b, unsigned &c, unsigned &d,
                                                         const void *from, bool wanted) {
    if (!wanted) return;
    const uint4 x = *aligned((const uint4 *)from, 16);
    a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void ld_global_nc_L1__no_allocate_L2__128B_v2_u32(unsigned &a, unsigned &b, const void *from, bool wanted) {
    if (!wanted) return;
    const uint2 x = *aligned((const uint2 *)from, 8);
    a = x.x, b = x.y;
}
inline void ld_global_nc_L1__no_allocate_L2__128B_u32(unsigned &a, const void *from, bool wanted) {
    if (wanted) a = *aligned((const unsigned *)from, 4);
}
inline void ld_shared_v4_b32(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    const uint4 x = *aligned((const uint4 *)(emulator::dynamic_shared + at), 16);
    a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void prefetch_global_L2(const void *) {}

// -- copies to shared memory, until which nothing good is there

// So many bytes to there, of which the first are read and the others zeros.
inline void cp_async(int to, const void *from, int bytes, int given) {
    emulator::Fiber &me = *emulator::block->now;
    char *const there = aligned(emulator::dynamic_shared + to, bytes);
    for (const auto &group : me.groups)
        for (const emulator::Copy &copy : group)
            if (copy.to == there) emulator::fail("two copies to one place are under way");
    memset(there, 0xdb, bytes);
    me.open.push_back({there, given ? aligned((const char *)from, bytes) : nullptr, bytes, given});
}
inline void cp_async_ca_shared_global(int to, const void *from, int given) { cp_async(to, from, 4, given); }
inline void cp_async_cg_shared_global(int to, const void *from, int given = 16) { cp_async(to, from, 16, given); }
inline void cp_async_commit_group() {
    emulator::Fiber &me = *emulator::block->now;
    me.groups.push_back(std::move(me.open));
    me.open.clear();
}
inline void cp_async_wait_group(unsigned left) {
    auto &groups = emulator::block->now->groups;
    for (; groups.size() > left; groups.pop_front())
        for (const emulator::Copy &copy : groups.front())
            memset(copy.to, 0, copy.bytes), memcpy(copy.to, copy.from, copy.given);
}
inline void cp_async_wait_all() { cp_async_commit_group(), cp_async_wait_group(0); }

// -- products

// Four blocks of 8 x 8, a word of each to a lane; lane 8i + r knows where row r of block i is.
template <bool TRANSPOSED, class... Words>
inline void ldmatrix(int at, Words &...words) {
    const auto &given = emulator::exchange("ldmatrix", {(uint64_t)aligned(emulator::dynamic_shared + at, 16)});
    const int row = lane() / 4, column = lane() % 4 * 2;
    int i = 0;
    const auto number = [&](int r, int c) { return (unsigned)((const unsigned short *)given[8 * i + r][0])[c]; };
    const auto word = [&] {
        return TRANSPOSED ? number(column, row) | number(column + 1, row) << 16
                          : number(row, column) | number(row, column + 1) << 16;
    };
    ((words = word(), ++i), ...);
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    ldmatrix<false>(at, a, b, c, d);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    ldmatrix<true>(at, a, b, c, d);
}

inline double power_of_two(int exponent) { return bits_as<double>((uint64_t)(1023 + exponent) << 52); }

// c and 16 products, as Hopper's tensor cores add them (MTC, arXiv 2512.07004): all cut to the last place but two of the
// largest, and their sum to the last place of a float, toward zero.
template <class A, class B>
inline float sum_of_products(float c, A a, B b) {
    double terms[17] = {c}, largest = std::abs(c), sum = c;
    for (int k = 0; k < 16; ++k) {
        terms[k + 1] = (double)a(k) * b(k);
        largest = max(largest, std::abs(terms[k + 1])), sum += terms[k + 1];
    }
    if (!std::isfinite(sum) || largest == 0) return sum;
    const int place = (int)(bits_as<uint64_t>(largest) >> 52) - 1023 - 25;
    int64_t units = 0;
    for (const double term : terms) units += (int64_t)(term * power_of_two(-place));
    const int cut = max(0, 40 - __builtin_clzll(std::abs(units) | 1));
    return units / ((int64_t)1 << cut) * power_of_two(place + cut);
}

template <float number(unsigned short)>
inline void m16n8k16(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
    const auto &given = emulator::exchange("mma", {a0, a1, a2, a3, b0, b1});
    float *const d[] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        const auto part = [&](int lane, int word, int k) { return number(given[lane][word] >> k % 2 * 16); };
        *d[i] = sum_of_products(
            *d[i], [&](int k) { return part(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k); },
            [&](int k) { return part(column * 4 + k % 8 / 2, 4 + k / 8, k); });
    }
}
template <class... Registers>
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Registers &&...all) {
    m16n8k16<from_half>(all...);
}
template <class... Registers>
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Registers &&...all) {
    m16n8k16<from_bf16>(all...);
}

// -- Hopper's barriers that count, and bulk copies: what is copied is not there before somebody has waited for it

inline emulator::CountingBarrier &counting(int at) { return emulator::block->counting[at]; }
inline void mbarrier_init_shared__cta_b64(int at, int count) { counting(at) = {count, count}; }
inline void mbarrier_arrive_shared__cta_b64(int at) { counting(at).arrive(), emulator::block->progress = true; }
inline void mbarrier_arrive_expect_tx_shared__cta_b64(int at, int bytes) {
    counting(at).bytes += bytes;
    mbarrier_arrive_shared__cta_b64(at);
}
inline void selp_u32(unsigned &ended, int at, unsigned parity) {  // the phase of that parity, by try_wait or test_wait
    emulator::CountingBarrier &barrier = counting(at);
    const int before = barrier.phase;
    barrier.look();
    if (barrier.phase != before) emulator::block->progress = true;
    ended = barrier.phase != (int)parity;
    if (!ended) emulator::wait();
}
inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(int to, const void *from, int bytes,
                                                                              int at) {
    if (bytes % 16) emulator::fail("a bulk copy is not whole 16 bytes");
    char *const there = aligned(emulator::dynamic_shared + to, 16);
    memset(there, 0xdb, bytes);
    counting(at).copies.push_back({there, aligned((const char *)from, 16), bytes, bytes});
}
inline void cp_async_mbarrier_arrive_noinc_shared__cta_b64(int at) {
    cp_async_wait_all();
    mbarrier_arrive_shared__cta_b64(at);
}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared__cta() {}
inline void fence_proxy_async_global() {}

// -- products of a warpgroup: each lane computes its own numbers of D when they are waited for, from what is there then

// Where a descriptor's number of a row and a column is: rows of 128 bytes, swizzled, each eight of them together.
inline float of_descriptor(uint64_t descriptor, int row, int column) {
    const unsigned at = (descriptor & 0x3fff) * 16 + row / 8 * 1024 + row % 8 * 128 + column * 2;
    return from_half(*(const unsigned short *)(emulator::dynamic_shared + (at ^ (at >> 7 & 7) << 4)));
}

template <bool TRANSPOSED_B, class Operands, size_t... I>
inline void multiply_by_warpgroup(Operands operands, std::index_sequence<I...>) {
    constexpr int D = sizeof...(I), REST = std::tuple_size_v<Operands> - D;
    const uint64_t B = std::get<D + REST - 2>(operands);
    const bool accumulate = std::get<D + REST - 1>(operands);
    const std::array<float *, D> d = {&std::get<I>(operands)...};
    const int mine = emulator::block->now->x % 128 / 32 * 16 + lane() / 4;  // and the row eight below
    std::array<float, 32> a;                                                // of both rows
    uint64_t A = 0;
    if constexpr (REST == 3) A = std::get<D>(operands);
    else {
        const auto &given = emulator::exchange("wgmma", {std::get<D>(operands), std::get<D + 1>(operands),
                                                         std::get<D + 2>(operands), std::get<D + 3>(operands)});
        for (int i = 0; i < 32; ++i) {
            const int k = i % 16, row = i / 16;
            a[i] = from_half(given[lane() / 4 * 4 + k % 8 / 2][row + k / 8 * 2] >> k % 2 * 16);
        }
    }
    emulator::block->now->products.back().push_back([=]() mutable {
        for (int i = 0; i < 32 && REST == 3; ++i) a[i] = of_descriptor(A, mine + i / 16 * 8, i % 16);
        for (int i = 0; i < D; ++i) {
            const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
            *d[i] = sum_of_products(
                accumulate ? *d[i] : 0, [&](int k) { return a[i / 2 % 2 * 16 + k]; },
                [&](int k) { return TRANSPOSED_B ? of_descriptor(B, k, column) : of_descriptor(B, column, k); });
        }
    });
}
template <bool TRANSPOSED_B, class... Operands>
inline void wgmma(Operands &&...operands) {
    constexpr int REST = sizeof...(Operands) % 8 == 3 ? 3 : 6;  // A's descriptor, or its four registers; B's; a flag
    multiply_by_warpgroup<TRANSPOSED_B>(std::forward_as_tuple(operands...),
                                        std::make_index_sequence<sizeof...(Operands) - REST>());
}
template <class... Operands>
inline void wgmma_mma_async_sync_aligned_m64nk16_f32_f16_f16(Operands &&...all) {  // of any number of columns
    wgmma<false>(all...);
}
template <class... Operands>
inline void wgmma_mma_async_sync_aligned_m64n64k16_f32_f16_f16(Operands &&...all) {
    wgmma<true>(all...);
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { emulator::block->now->products.emplace_back(); }
inline void wgmma_wait_group_sync_aligned(int left) {
    auto &products = emulator::block->now->products;
    for (; (int)products.size() > left + 1; products.pop_front())
        for (const auto &product : products.front()) product();
}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}

// -- barriers, launches and clusters

inline void bar_sync(int which, int threads) { emulator::barrier(which, threads); }
inline void bar_arrive(int which, int threads) { emulator::barrier(which, threads, false); }
inline void atom_add_acq_rel_gpu_global_s32(int &before, int *to, int x) { before = atomicAdd(to, x); }
inline void ld_acquire_gpu_global_s32(int &x, const int *from) { x = __atomic_load_n(from, __ATOMIC_SEQ_CST); }
inline void griddepcontrol_wait() {}  // launches run one after the other
inline void griddepcontrol_launch_dependents() {}
inline void barrier_cluster_arrive_release() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait_acquire() { emulator::cluster_wait(); }
template <class T>
inline void mapa_u64(T *&there, T *here, int rank) {
    there = (T *)(emulator::block->cluster->shared[rank] + __cvta_generic_to_shared(here));
}

}  // namespace ptx
