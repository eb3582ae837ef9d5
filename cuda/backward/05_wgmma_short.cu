// Tensor cores for short heads on Hopper: a block has all of a head in shared memory, and computes dQ, dK and dV of it.
//
// What changed: nothing of a head is split beforehand, kept in global memory or waited for. Each of GROUPS warpgroups
// splits 64 keys of K and V at a time; then it owns 64 rows of Q and dO, multiplies them with all of K and V, writes
// their dQ, and splits them as dK and dV want them, in their place; then it owns 64 keys. The arithmetic is `wgmma`'s
// (warpgroup.cuh), and so are the bytes.
// Why it is faster: each matrix is read once and written once, where `wgmma` reads and writes some 3 times as much; and
// while one block of a multiprocessor waits for memory, another one multiplies.
// What it costs: shared memory has room for 6 tiles of 64 rows, 13 where heads have up to 32 numbers; each head of Q
// needs its own of K.
//
// Macros beyond those of warpgroup.cuh: ROW_TILES and KEY_TILES, of 64 rows, of a head; BLOCKS of a multiprocessor;
// NOTES 1: heads that are not finite are left to another kernel, for dbias is wanted, a sum over heads. Launches:
// `gradients`, and those of dbias.cuh.
#include "warpgroup.cuh"
#include "exact_head.cuh"

#ifdef DBIAS_SLOTS
constexpr bool WITH_DBIAS = true;
#else
constexpr bool WITH_DBIAS = false;
#endif
constexpr int GROUPS = THREADS / 128, TILES = ROW_TILES + KEY_TILES;
static_assert(PASS == OWN, "a tile that is multiplied with is all of a record");
static_assert(SHARED == TILES * 2 * OWN_TILE + 1024, "tiles start on 1024 bytes");

// K and V of 64 keys, into a record. Returns whether all that this thread has split is finite.
__device__ __forceinline__ bool split_keys(const Backward &a, int b, int kv, int first, unsigned char *record,
                                           Tail &tail, unsigned *scratch, int barrier) {
    const int thread = threadIdx.x % 128;
    const auto plain = [](int) { return 1.0f; };
    Unsplit<128, true> K, V;  // both on their way before one is waited for
    K.load(rows_of(a.K, a.k, b, kv), a.k.row, first, a.N, thread);
    V.load(rows_of(a.V, a.v, b, kv), a.v.row, first, a.N, thread);
    const Taken of_K = K.split(record, scratch, thread, barrier, plain);
    const Taken of_V = V.split(record + OWN_TILE, scratch + 8, thread, barrier, plain);
    const bool zero = group_max<128>(of_V.sum, scratch + 16, thread, barrier) == 0;
    if (thread == 0) {
        tail.first = of_K.exponent, tail.second = of_V.exponent, tail.dS = 0;
        tail.other = __float_as_int(largest_of_scale(of_V.exponent, zero));
    }
    return of_K.sum + of_V.sum < INFINITY_F;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const Backward a) {
    extern __shared__ unsigned char unaligned[];
    __shared__ __align__(16) Tail tails[TILES];  // those of queries, then those of keys
    __shared__ float inverses[GROUPS][OWN];
    __shared__ unsigned scratch[GROUPS][24];
    unsigned char *const records = unaligned + (-shared_address(unaligned) & 1023);
    const auto record = [&](int tile) { return records + tile * 2 * OWN_TILE; };
    const auto numbers = [&](int tile) { return *reinterpret_cast<const int4 *>(&tails[tile].first); };
    const int group = uniform(threadIdx.x / 128);
    const Head head = head_of(a, blockIdx.x);
    bool finite = true;

#pragma unroll 1
    for (int j = group; j < KEY_TILES; j += GROUPS)
        finite &= split_keys(a, head.b, head.kv, j * OWN, record(ROW_TILES + j), tails[ROW_TILES + j], scratch[group],
                             1 + group);
    fence_for_async();
    __syncthreads();

#pragma unroll 1
    for (int i = group; i < ROW_TILES; i += GROUPS) {
        const uint32_t Q = shared_address(record(i));
        OfQueries rows(a, head, i * OWN, record(i), scratch[group], 1 + group);
        const int end = keys_seen(a, min(i * OWN + OWN, a.M) - 1);  // of keys that some row sees
#pragma unroll 1
        for (int j = 0; j * OWN < end; ++j) {
            const uint64_t K = descriptor(shared_address(record(ROW_TILES + j))), V = K + OWN_TILE / 16;
            rows.multiply_with(a, head, Q, K, V, numbers(ROW_TILES + j), j * OWN);
        }
        named_sync(1 + group, 128);  // all have multiplied with the rows that are split once more
        finite &= rows.finish(a, head, i * OWN, record(i), tails[i], inverses[group], scratch[group], 1 + group);
    }
    fence_for_async();
    __syncthreads();  // racecheck takes a meeting at a named barrier for that of the block, which is the next one
    if (__syncthreads_or(!finite)) {
        if (!NOTES) return exact_head(a, reinterpret_cast<ExactRow *>(records));
        if (threadIdx.x == 0) note_not_finite(a, head.b, head.kv);
    }

    // A loop of its own, for with a branch in it the loop takes a third more instructions.
    const auto of_keys = [&](auto lone) {
#pragma unroll 1
        for (int j = group; j < KEY_TILES; j += GROUPS) {
            const uint32_t K = shared_address(record(ROW_TILES + j));
            OfKeys keys = {j * OWN, tails[ROW_TILES + j].first, tails[ROW_TILES + j].second};
#pragma unroll 1
            for (int i = first_query(a, j * OWN) / OWN; i < ROW_TILES; ++i) {
                const uint64_t Q = descriptor(shared_address(record(i))), dO = Q + OWN_TILE / 16;
                keys.multiply_with(a, head, K, Q, dO, tails[i].rows[0], numbers(i), lone.value, i * OWN);
            }
            keys.finish(a, head.b, head.kv, j * OWN);
        }
    };
    int other = 0;
    for (int i = 0; i < ROW_TILES; ++i) other |= tails[i].other;
    if (other & LONE) of_keys(Flag<true>());
    else of_keys(Flag<false>());
    if (!WITH_DBIAS) return;
    // For dbias, which is a sum over heads of several blocks, all that is split goes to memory after all.
    const Workspace to(a);
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
        const int of_head = tile < ROW_TILES ? to.of_queries(a, head.b, head.h) + tile
                                             : to.of_keys(a, head.b, head.kv) + tile - ROW_TILES;
        uint4 *const out = reinterpret_cast<uint4 *>(to.at(of_head));
        const uint4 *const split = reinterpret_cast<const uint4 *>(record(tile));
        const uint4 *const tail = reinterpret_cast<const uint4 *>(&tails[tile]);
        for (int x = threadIdx.x; x < RECORD / 16; x += THREADS)
            out[x] = x < 2 * OWN_TILE / 16 ? split[x] : tail[x - 2 * OWN_TILE / 16];
    }
}

#ifdef DBIAS_SLOTS
#include "dbias.cuh"
#endif
