// Tensor cores at fp32 accuracy on Hopper: every number split into two fp16, warps specialised, copies in the background.
//
// What changed: the matrix products run on wgmma, three fp16 products for one in fp32 (split.cuh). `prepare` writes K and
// V once as scaled, split, swizzled tiles. In `attention` one warpgroup only copies tiles to shared memory; each of the
// other BR / 64 owns 64 rows of Q and O, and overlaps its exponentials with its products (warpgroup.cuh). Heads of more
// than 128 numbers have too much of both for that (long.cuh).
// Why it is faster: wgmma reads its operands from shared memory by itself, at twice the rate of mma.sync; and nothing waits
// for copies, which run ahead by STAGES tiles, or panels of them.
// What it costs: three times the products, hi and lo of K and V in memory (as many bytes as fp32), and a pre-pass.
//
// Where row tiles are fewer than multiprocessors, or do not go round evenly, several blocks share one (chunks.cuh);
// and where blocks have but 64 rows, two warpgroups share those (paired.cuh).
//
// Launches: `prepare`, then `attention` with any number of blocks.
#define PAD (HEAD_DIM <= 16 ? 16 : HEAD_DIM <= 128 ? 32 : 64)
#include "chunks.cuh"
#include "long.cuh"
#include "mma.cuh"
#include "paired.cuh"

static_assert(THREADS == 128 * (1 + WARPGROUPS * (1 + PAIRED)), "one warpgroup copies");
// An SM has 512 registers for each of 128 threads.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24, CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 240;
constexpr bool MOVE_REGISTERS = WARPGROUPS > 1 || PAIRED;  // else 256 threads have all they can address

static_assert(K_TILE % 1024 == 0 && V_TILE % 1024 == 0 && Q_TILE % 1024 == 0, "the swizzle repeats every 1024 bytes");

// Whole tiles in shared memory, first all of K's: rings of them, and the exponents of their scales.
struct Tiles {
    static constexpr int K_BYTES = K_STAGES * K_TILE, V_END = K_BYTES + STAGES * V_TILE;
    static constexpr int BYTES = V_END + PAIRED * MAIL_BYTES;
    static constexpr int WARPS = 1 + PAIRED;  // that copy: one for both matrices, or one for each
    uint64_t *const K_full, *const K_free, *const V_full, *const V_free;
    int4 *const K_exponent, *const V_exponent;

    static __device__ __forceinline__ Tiles here() {
        __shared__ uint64_t K_full[K_STAGES], K_free[K_STAGES], V_full[STAGES], V_free[STAGES];
        __shared__ int4 K_exponent[K_STAGES], V_exponent[STAGES];
        return {K_full, K_free, V_full, V_free, K_exponent, V_exponent};
    }

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) {
            const bool K = s < K_STAGES;
            if (K) barrier_init(&K_full[s], 1);
            barrier_init(&V_full[s], 1);
            if (K) barrier_init(&K_free[s], 4 * WARPGROUPS);  // each warp for itself
            barrier_init(&V_free[s], 4 * WARPGROUPS);
        }
        if (PAIRED) PairShared::here().init();
    }

    // Tile t, of those of all heads, by a warp, or by two: their lanes 0 copy. They wait for `prepare` as late as they can:
    // then what comes before has run, and the code is there.
    __device__ __forceinline__ void copy_tile(Ring &ring, unsigned char *tiles, const Attention &a, int t) const {
        const unsigned char *const from = a.workspace + (long long)t * (K_TILE + V_TILE);
        const int4 *const exponents = tile_exponents(a) + 2ll * t;
        const bool K = !PAIRED || uniform(threadIdx.x / 32) == 0;
        if (K) {
            wait(&K_free[ring.stage], ring.parity ^ 1);
            if (threadIdx.x == 0) {
                arrive_expecting(&K_full[ring.stage], K_TILE + 16);
                await_launch_before();
                bulk_copy(shared_address(tiles + ring.stage * K_TILE), from, K_TILE, &K_full[ring.stage]);
                bulk_copy(shared_address(&K_exponent[ring.stage]), exponents, 16, &K_full[ring.stage]);
            }
        }
        if (!PAIRED || !K) {
            wait(&V_free[ring.stage], ring.parity ^ 1);
            if (threadIdx.x == (PAIRED ? 32 : 0)) {
                arrive_expecting(&V_full[ring.stage], V_TILE + 16);
                await_launch_before();
                bulk_copy(shared_address(tiles + K_BYTES + ring.stage * V_TILE), from + K_TILE, V_TILE,
                          &V_full[ring.stage]);
                bulk_copy(shared_address(&V_exponent[ring.stage]), exponents + 1, 16, &V_full[ring.stage]);
            }
        }
        if (PAIRED && K && ring.stage == K_STAGES - 1) ring.stage = STAGES - 1;  // K has fewer
        ring.next();
    }

    __device__ __forceinline__ typename Choose<PAIRED, Pair, Consumer<K_TILE, V_TILE>>::Type consumer(
        unsigned char *tiles, int group) const {
        const Rings rings = {K_full, K_free, V_full, V_free, K_exponent, V_exponent};
        return consumer_of(rings, tiles, group, Bool<PAIRED>());
    }
    static __device__ __forceinline__ Consumer<K_TILE, V_TILE> consumer_of(const Rings &rings, unsigned char *tiles,
                                                                           int group, Bool<false>) {
        return {rings, tiles, tiles + K_BYTES, group};
    }
    static __device__ __forceinline__ Pair consumer_of(const Rings &rings, unsigned char *tiles, int, Bool<true>) {
        return {rings, tiles, tiles + K_BYTES, PairShared::here(), tiles + V_END};
    }
};
using Source = Choose<IS_LONG, Panels, Tiles>::Type;

static_assert(SHARED == WARPGROUPS * Q_TILE + Source::BYTES + PARKED + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 1024 <= 227 * 1024, "tiles must fit shared memory");

// Q as an operand: where its tile is; or, of short heads, in registers, for which there is room, so that shared memory has
// only K to feed S with.
constexpr bool Q_IN_REGISTERS = D <= 32 && WARPGROUPS <= 2 && PRODUCTS == 3 && !BIAS && !PAIRED;
using Query = Choose<Q_IN_REGISTERS, QFragments, uint64_t>::Type;
__device__ __forceinline__ void take(uint64_t &Q, const unsigned char *tile) { Q = descriptor(shared_address(tile)); }
__device__ __forceinline__ void take(QFragments &Q, const unsigned char *tile) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, column = threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        const Fragment hi = ldmatrix(tile + split_offset<64>(row, 16 * k + column));
        const Fragment lo = ldmatrix(tile + split_offset<64>(row, D + 16 * k + column));
#pragma unroll
        for (int x = 0; x < 4; ++x) Q.hi[k][x] = hi.x[x], Q.lo[k][x] = lo.x[x];
    }
}

// The producer: a thread keeps the rings full. Its warp goes along, so that branches are the same for all lanes.
__device__ __forceinline__ void copy_tiles(const Attention &a, Source &source, unsigned char *tiles) {
    Ring ring;
    Part part;
    for (part.next = first_piece(a); part.find(a);) {
        const Work &here = part.work;
        const int before = (here.head.b * a.Hkv + here.head.kv) * ceil_div(a.N, BC);  // tiles of other heads
#pragma unroll 1
        for (int t = before + part.first_tile(a), end = before + part.end_tile(a, here); t < end; ++t)
            source.copy_tile(ring, tiles, a, t);
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) attention(const Attention a) {
    extern __shared__ unsigned char unaligned[];
    auto &&source = Source::here();
    __shared__ int message[WARPGROUPS];
    __shared__ Part current[WARPGROUPS];  // what each warpgroup is doing
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const tiles = Q_tiles + WARPGROUPS * Q_TILE, *const parked = tiles + Source::BYTES;

    if (threadIdx.x == 0) {
        source.init();
        barrier_init_done();
    }
    if (CLUSTER > 1) cluster_arrive();
    __syncthreads();

    if (threadIdx.x < 128) {
        if (MOVE_REGISTERS) registers_down<PRODUCER_REGISTERS>();
        if (unsigned(uniform(threadIdx.x / 32)) < Source::WARPS) copy_tiles(a, source, tiles);
        if (CLUSTER > 1) cluster_wait(), cluster_arrive();  // as `meet` does, with nothing to send
        return;
    }
    if (MOVE_REGISTERS) registers_up<CONSUMER_REGISTERS>();
    // With a bias, to know that all lanes have the same costs registers, instead of saving them.
    const int number = BIAS ? threadIdx.x / 128 : uniform(threadIdx.x / 128);
    const int group = WARPGROUPS == 1 ? 0 : number - 1, q_barrier = 1 + group;
    constexpr int Q_THREADS = 128 * (1 + PAIRED);  // that split the same rows of Q
    const bool first_of_pair = !PAIRED || number == 1;
    auto consumer = source.consumer(tiles, group);
    unsigned char *const Q_tile = Q_tiles + group * Q_TILE;

    if (group == WARPGROUPS - 1) consumer.pass_turn();
    Part part;
    for (part.next = first_piece(a); part.find(a);) {
        const Work here = part.work;
        const float *const Q = rows_of(a.Q, a.q, here.head.b, here.head.h);
        int factor_exponent;
        // S in powers of two: exp(x) = 2^(x log2(e))
        const float factor = frexpf(a.scale * log2e_given_back(HEAD_DIM), &factor_exponent);
        named_sync(q_barrier, Q_THREADS);  // the tile was last read by products for which each thread has waited before
        const int2 s = split_Q(Q, row_stride(a.q), here.i0 + group * 64 + consumer.row, a.M, Q_tile, factor, [] {});
        fence_for_async();
        await_launch_before();  // Q needs nothing of `prepare`, what follows does
        if (SPLIT && first_of_pair && threadIdx.x % 128 == 0) {
            part.slots = slots_of(a, part, group, parked);
            current[group] = part;
        }
        named_sync(q_barrier, Q_THREADS);
        const Chunks chunks = {a,
                               current[group],
                               &message[group],
                               group,
                               q_barrier + PAIRED,
                               part.first_tile(a),
                               part.end_tile(a, here),
                               part.first};
        Query query;
        take(query, Q_tile);
        consumer.attend(a, here, query, s, factor_exponent, chunks);
        if (PAIRED) break;
        if (SPLIT)
            part.next = const_cast<volatile Part &>(current[group]).next;  // rather than to keep it in a register
    }
    if (CLUSTER > 1 && !first_of_pair) cluster_wait(), cluster_arrive();
    if (group == 0) consumer.await_turn();  // the turn that nobody took
}
