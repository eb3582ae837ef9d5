// The forms of 15_wgmma.cu where the plain one does not do: the keys of row tiles in chunks (chunks.cuh), two
// warpgroups for the same 64 rows (paired.cuh), heads of more than 128 numbers (long.cuh), also in clusters (joined.cuh)
// or without a pre-pass (splitters.cuh).
//
// The kernel differs from the plain one in that a block has assignments, some chunks of a row tile's keys each, instead
// of row tiles.
#pragma once
#include "chunks.cuh"

// There is a block for each assignment. Those that split have one length, whatever the mask.
constexpr bool SINGLE = PAIRED || (CAUSAL && !SPLITTERS) || SHARING == JOIN;

// Whether a block reads the rows of Q of its next assignment before it has ended the present one: where it has several,
// and registers suffice.
constexpr bool READ_AHEAD = !SINGLE && HEAD_DIM <= 64 && !BIAS && (SHARING == FOLD || SHARING == FOLD_SHARED);

#if PAIRED
#include "paired.cuh"
using Source = PairTiles;
#elif HEAD_DIM > 128
#if SHARING == JOIN
#include "joined.cuh"
using Source = JoinedPanels;
#elif SPLITTERS
#include "splitters.cuh"
using Source = Splitters;
#else
#include "long.cuh"
using Source = Panels;
#endif
#else

// The plain consumer's way past the keys of an assignment: where a chunk begins, the one before it is closed.
struct ChunkedConsumer : Consumer {
    using Consumer::Consumer;

    // With READ_AHEAD, read_next() is called while the last products run, which hide its reads.
    template <class Function>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, const Query &Q, int2 q_exponent,
                                           int factor_exponent, Policy chunks, Function read_next) {
        Passage pass(*this, a, here, Q, q_exponent, factor_exponent);
        pass.exponentiate(chunks.first_tile, pass.first_S(chunks.first_tile));
        split_P(pass.S, pass.P_hi, pass.P_lo);
        for (int j = chunks.first_tile + 1, next = chunks.next_chunk(); j < chunks.end_tile; ++j) {
            const float r[2] = {pass.rows.rescale[0], pass.rows.rescale[1]};
            const int k_exponent = pass.next_S_and_T(j);
            const bool closes = j == next;
            if (closes) pass.sum.take(pass.rows), pass.rows.restart();
            pass.exponentiate(j, k_exponent);
            pass.add(r);
            if (closes) {
                chunks.close(pass.sum);
                pass.sum = {};
                next = chunks.next_chunk();
            }
            split_P(pass.S, pass.P_hi, pass.P_lo);
        }
        pass.last_T(chunks.end_tile - 1);
        if (READ_AHEAD) read_next();
        pass.add(pass.rows.rescale);
        pass.sum.take(pass.rows);
        if (chunks.finish(pass.sum)) deliver(a, chunks.recall(here), pass.sum);
    }
};
struct Source : Tiles {
    static __device__ __forceinline__ Source here() { return {Tiles::here()}; }
    __device__ __forceinline__ ChunkedConsumer consumer(unsigned char *tiles, int group) const {
        return {*this, tiles, group};
    }
};
#endif

constexpr int PRODUCERS = SPLITTERS ? SPLITTERS : 128;  // threads
static_assert(THREADS == PRODUCERS + 128 * WARPGROUPS * (1 + PAIRED), "one warpgroup copies, or some split");
static_assert(SHARED == WARPGROUPS * Q_TILE + Source::BYTES + PARKED + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 1024 <= 227 * 1024, "tiles must fit shared memory");

__device__ __forceinline__ void produce(const Attention &a, Source &source, unsigned char *tiles) {
    Ring ring;
    Assignment mine;
    for (mine.next = Policy::begin(a); Policy::find(mine, a);) {
        const RowTile &here = mine.rows;
#if SPLITTERS
        source.split_head(ring, tiles, a, here.head);
#else
        const int before = first_tile_of(a, here.head);
#pragma unroll 1
        for (int t = before + mine.first_tile(a), end = before + mine.end_tile(a, here); t < end; ++t)
            source.copy_tile(ring, tiles, a, t);
#endif
        if (SINGLE) break;
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) attention(const Attention a) {
    extern __shared__ unsigned char unaligned[];
    auto &&source = Source::here();
    __shared__ int message[WARPGROUPS];
    __shared__ Assignment current[WARPGROUPS];  // what each warpgroup is doing
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const tiles = Q_tiles + WARPGROUPS * Q_TILE, *const parked = tiles + Source::BYTES;

    if (threadIdx.x == 0) {
        source.init();
        barrier_init_done();
    }
    if (CLUSTER > 1) cluster_arrive();
    __syncthreads();

    if (threadIdx.x < PRODUCERS) {
        if (MOVE_REGISTERS) registers_down<PRODUCER_REGISTERS>();
        if (unsigned(uniform(threadIdx.x / 32)) < Source::WARPS) produce(a, source, tiles);
        if (CLUSTER > 1) cluster_wait(), cluster_arrive();  // as those do that multiply, with nothing to send
        if (SHARING == JOIN) cluster_wait(), cluster_arrive();
        return;
    }
    if (MOVE_REGISTERS) registers_up<CONSUMER_REGISTERS>();
    // With a bias, to know that all lanes have the same costs registers, instead of saving them.
    const int number = (BIAS ? threadIdx.x / 128 : uniform(threadIdx.x / 128)) + 1 - PRODUCERS / 128;
    const int group = WARPGROUPS == 1 ? 0 : number - 1, q_barrier = 1 + (SPLITTERS ? 0 : group);
    // That split the same rows of Q, or whose Q lies where others have read V.
    constexpr int Q_THREADS = 128 * (SPLITTERS ? WARPGROUPS : 1 + PAIRED);
    const bool first_of_pair = !PAIRED || number == 1;
    auto consumer = source.consumer(tiles, group);
    unsigned char *const Q_tile = Q_tiles + group * Q_TILE;

    if (group == WARPGROUPS - 1) consumer.pass_turn();
    Assignment mine;
    const auto recall_next = [&] {  // rather than to keep it in a register
        if (SHARING != WHOLE) mine.next = const_cast<volatile Assignment &>(current[group]).next;
    };
    const auto read_rows = [&](Head head, int i) {
        return TwoRows(rows_of(a.Q, a.q, head.b, head.h), row_stride(a.q), i, a.M);
    };
    bool found = false;
    TwoRows ahead;
    const auto read_ahead = [&] {
        found = Policy::find(mine, a);
        // Beyond the last assignment zeros, so that no older rows need be kept.
        ahead = read_rows(mine.rows.head, found ? mine.rows.i0 + group * 64 + consumer.row : a.M);
    };
    mine.next = Policy::begin(a);
    if (READ_AHEAD) read_ahead();
    while (READ_AHEAD ? found : Policy::find(mine, a)) {
        const RowTile here = mine.rows;
        int factor_exponent;
        const float factor = frexpf(factor_of_scores(a), &factor_exponent);
        named_sync(q_barrier, Q_THREADS);
        TwoRows rows = READ_AHEAD ? ahead : read_rows(here.head, here.i0 + group * 64 + consumer.row);
        const int2 s = consumer.split_Q(rows, Q_tile, factor);
        fence_for_async();
        await_launch_before();
        if (SHARING != WHOLE && first_of_pair && threadIdx.x % 128 == 0) {
            mine.slots = Policy::slots_of(a, mine, group, parked);
            current[group] = mine;
        }
        named_sync(q_barrier, Q_THREADS);
        const Policy chunks{{a, current[group], &message[group], group, q_barrier + PAIRED, uniform(mine.first_tile(a)),
                             uniform(mine.end_tile(a, here)), uniform(mine.first)}};
        Query query;
        take(query, Q_tile);
        consumer.attend(a, here, query, s, factor_exponent, chunks, [&] { recall_next(), read_ahead(); });
        if (SINGLE) break;
        if (!READ_AHEAD) recall_next();
    }
    if (SHARING == MEET && !first_of_pair) cluster_wait(), cluster_arrive();
    if (group == 0) consumer.await_turn();
}
