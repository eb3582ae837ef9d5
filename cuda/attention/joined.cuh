// Heads of more than 128 numbers where row tiles are few: a cluster of blocks has a row tile, a tile of keys each.
//
// What changed: blocks tell each other the largest score that each row has in their tile. So each knows m as it is after
// its own tile, and P V follows from that. Then each block adds up P V of all tiles, of some rows, in the order of the
// keys. Every sum is that of a block that takes one tile after the other, so that the bytes are its bytes, too.
// Why it is faster: a tile of such heads takes 3 us, and here all tiles are on their way at the same time.
// What it costs: P V goes through the shared memory of other blocks; the cluster meets three times; its blocks read Q
// each.
//
// The 64 rows are dealt out by eights: to a block go those of one or more warps, of which each adds up eight of its own.
// P V for them lies where Q and K have been, which nobody reads after the second meeting.
#pragma once
#include "long.cuh"

static_assert(SHARING == JOIN && WARPGROUPS == 1 && !CAUSAL && !BIAS, "each block has a tile of the same 64 rows");
static_assert(STAGES >= 2 * PANELS, "no panel of V lies where one of K has been");
static_assert(CLUSTER <= 8, "a block has eight rows to add up");

// Of P V of a tile, eight rows as the lanes of a warp have them: their numbers, and in the last float4 their l.
constexpr int EIGHT_FLOAT4S = 4 * PANELS + 1;
static_assert(14 * 512 * EIGHT_FLOAT4S <= Q_TILE + PANELS * PANEL, "seven blocks have two eights of seven tiles each");

struct JoinedConsumer : LongConsumer {
    float4 *const inbox;  // for P V of this block's rows: where Q is, and behind it K

    __device__ __forceinline__ JoinedConsumer(Panels &panels, unsigned char *first, int group)
        : LongConsumer(panels, first, group), inbox(reinterpret_cast<float4 *>(first - Q_TILE) + lane) {}

    template <class Function>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, uint64_t Q_desc, int2 q_exponent,
                                           int factor_exponent, Policy chunks, Function) {
        __shared__ float largest[CLUSTER][64];  // scores of rows in each tile, as `maximum_of_row` has them
        const int rank = chunks.first_tile, warp = uniform(threadIdx.x % 128 / 32), first = here.i0;
        const int key = rank * BC + first_key_of_lane(lane % 4), visible = a.N - key;
        RowState rows = RowState::fresh(factor_exponent, q_exponent, mantissa_of_S(a));

        // S = Q Kᵀ
        float S[32];
        const Bias bias = {};
        const int k_exponent = take_S(S, Q_desc);
        float2 factor = mask_scores(S, rows, k_exponent, (rank + 1) * BC > a.N, {visible, visible}, bias);
        const float maximum[2] = {maximum_of_row(S, 0, factor.x), maximum_of_row(S, 1, factor.y)};
        cluster_wait();  // all blocks have begun
        for (int block = lane % 4; block < CLUSTER; block += 4)
#pragma unroll
            for (int r = 0; r < 2; ++r) *in_block(&largest[rank][row + 8 * r], block) = maximum[r];
        cluster_arrive();
        cluster_wait();

        // softmax: m, P, l
        for (int t = 0; t < rank; ++t)
#pragma unroll
            for (int r = 0; r < 2; ++r) rows.shift[r] = fmaxf(rows.shift[r], largest[t][row + 8 * r]);
        exponentiate_row(S, rows, 0, maximum[0], factor.x);
        exponentiate_row(S, rows, 1, maximum[1], factor.y);
        uint32_t P_hi[4][4], P_lo[4][4];
        split_P(S, P_hi, P_lo);

        // T = P V, sent to the blocks that add it up
        float T[PANELS][32];
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            issue_PV(T[p], P_hi, P_lo, panel());
            ring.next();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int eight = 2 * warp + r;
            float4 *const to = in_block(inbox + place(eight, rank), eight % CLUSTER);
#pragma unroll
            for (int p = 0; p < PANELS; ++p) {
                if (r == 0) pin(T[p]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float *const t = &T[p][8 * j + 2 * r];
                    to[32 * (4 * p + j)] = make_float4(t[0], t[1], t[4], t[5]);
                }
            }
            to[32 * 4 * PANELS] = make_float4(rows.l[r], 0, 0, 0);
        }
        const int exponent_of_V = tile_exponents(a)[2 * (first_tile_of(a, here.head) + min(lane, CLUSTER - 1)) + 1].x;
        cluster_arrive();
        cluster_wait();

        // O = O r + T, in the order of the keys
        const int odd = 2 * warp % CLUSTER != rank, eight = 2 * warp + odd, i = first + row + 8 * odd;
        if (eight % CLUSTER != rank) return;
        Partial sum = {};
        float m = NEG_INF;
#pragma unroll 1
        for (int t = 0; t < CLUSTER; ++t) {
            const float4 *const from = inbox + place(eight, t);
            const float before = m;
            m = fmaxf(m, largest[t][row + 8 * odd]);
            const float rescale = exp2_fast(before - m);
            float O_factor;
            const float T_factor = sum.unit.next(__shfl_sync(~0u, exponent_of_V, t), &O_factor), c = rescale * O_factor;
#pragma unroll
            for (int x = 0; x < 4 * PANELS; ++x) {
                const float4 four = from[32 * x];
                float *const o = &sum.O[x / 4][x % 4 * 8];  // as if they were the first of the two rows
                o[0] = fmaf(o[0], c, four.x * T_factor), o[1] = fmaf(o[1], c, four.y * T_factor);
                o[4] = fmaf(o[4], c, four.z * T_factor), o[5] = fmaf(o[5], c, four.w * T_factor);
            }
            sum.l[0] = fmaf(sum.l[0], rescale, from[32 * 4 * PANELS].x);
        }
        sum.shift[0] = m;
        const bool finite = give_row(a, here.head, i, 0, sum);
        if (IN_PLACE && !__all_sync(~0u, finite)) redo_rows(a, here.head, i - lane / 4, 8);
    }

    // Where in a block's inbox eight rows of a tile are.
    static __device__ __forceinline__ int place(int eight, int tile) {
        return (eight / CLUSTER * CLUSTER + tile) * 32 * EIGHT_FLOAT4S;
    }
};

struct JoinedPanels : Panels {
    static __device__ __forceinline__ JoinedPanels &here() {
        __shared__ JoinedPanels panels;
        return panels;
    }
    __device__ __forceinline__ JoinedConsumer consumer(unsigned char *panels, int group) {
        return {*this, panels, group};
    }
};
