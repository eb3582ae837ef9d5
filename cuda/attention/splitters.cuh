// Many heads of more than 128 numbers with few rows and keys: blocks split K and V themselves, without a pre-pass.
//
// What changed: two warpgroups, in place of the one that copies, read K and V and split them to shared memory. The tiles
// are those of `prepare`, and so are all bytes. One or two others multiply, 64 rows each. They take all scores before
// the first P V, so that V may lie where Q has been; and then of 64 columns all P V, which are written at once, so that
// O takes no registers: those that split need them.
// Why it is faster: K and V go through memory once, where the pre-pass writes as many bytes and they are read again.
// What it costs: keys are two tiles at most, and no column of O is done before V of the last one is there.
//
// Macros: SPLITTERS, their number of threads; KEY_TILES, how many tiles the keys are; STAGES is 1, for K.
#pragma once
#include "long.cuh"

static_assert(STAGES == 1 && KEY_TILES <= 2 && WARPGROUPS <= 2 && IN_PLACE && !BIAS, "registers hold P of two tiles");

struct SplitConsumer;

// Three tiles of shared memory: the first warpgroup's Q, later V of the second tile of keys; the second one's Q, if
// there is one, later V of the first; and K. What tells that they are there; and that K is free again, and Q with the
// last K of a head; and the exponents of their scales.
struct Splitters {
    static constexpr int WARPS = SPLITTERS / 32, BARRIER = 7;
    static constexpr int BYTES = (3 - WARPGROUPS) * K_TILE;
    uint64_t K_full, K_free, V_full[KEY_TILES];
    int K_exponent[KEY_TILES], V_exponent[KEY_TILES];
    unsigned scratch[2][2 * WARPS];  // two in turn: a slow warp may still read the one before

    // Bytes from the end of Q to a tile.
    static constexpr int K_PLACE = (2 - WARPGROUPS) * K_TILE;
    static __device__ __forceinline__ constexpr int V_place(int j) { return (1 - WARPGROUPS - j) * V_TILE; }

    static __device__ __forceinline__ Splitters &here() {
        __shared__ Splitters splitters;
        return splitters;
    }

    __device__ __forceinline__ void init() {
        barrier_init(&K_full, SPLITTERS), barrier_init(&K_free, 4 * WARPGROUPS);
        for (int j = 0; j < KEY_TILES; ++j) barrier_init(&V_full[j], SPLITTERS);
    }

    // Splits K of a head, and then V, each tile as soon as there is room; called by all of these threads.
    __device__ __forceinline__ void split_head(Ring &ring, unsigned char *tiles, const Attention &a, Head head) {
        // All K so far has been multiplied, and addresses to store at are not computed before: registers are few.
        const auto await_room = [&](unsigned &thread) {
            wait(&K_free, ring.parity ^ 1);
            asm volatile("" : "+r"(thread));
        };
#pragma unroll 1
        for (int j = 0; j < KEY_TILES; ++j) {
            give(&K_full, &K_exponent[j],
                 split_K<SPLITTERS>(rows_of(a.K, a.k, head.b, head.kv), row_stride(a.k), j * BC, a.N, tiles + K_PLACE,
                                    scratch[j], threadIdx.x, BARRIER, await_room));
            ring.next();
        }
#pragma unroll 1
        for (int j = 0; j < KEY_TILES; ++j)
            give(
                &V_full[j], &V_exponent[j],
                split_V<SPLITTERS>(rows_of(a.V, a.v, head.b, head.kv), row_stride(a.v), j * BC, a.N, tiles + V_place(j),
                                   scratch[(KEY_TILES + j) % 2], threadIdx.x, BARRIER, await_room));
    }

    // A tile is there, and the exponent of its scale.
    static __device__ __forceinline__ void give(uint64_t *full, int *exponent, int s) {
        if (threadIdx.x == 0) *exponent = s;
        fence_for_async();
        arrive(full);  // each thread for itself: racecheck sees no __syncwarp
    }

    __device__ __forceinline__ SplitConsumer consumer(unsigned char *tiles, int group);
};

// A warpgroup that multiplies; `desc` is of the end of Q.
struct SplitConsumer : Warpgroup {
    Splitters &source;
    const uint64_t desc;
    Ring K_ring, V_ring;  // of a tile of K; of V of a head

    __device__ __forceinline__ SplitConsumer(Splitters &source, const unsigned char *tiles, int group)
        : Warpgroup(group), source(source), desc(descriptor(shared_address(tiles))) {}

    // Splits Q like Warpgroup::split_Q, but one row after the other, as registers are few.
    __device__ __forceinline__ int2 split_Q(TwoRows &two, unsigned char *tile, float factor) const {
        int s[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            s[r] = row_scale<TwoRows::EIGHTS * 8>(&two.x[r][0][0]);
#pragma unroll
            for (int c = 0; c < TwoRows::EIGHTS; ++c) {
#pragma unroll
                for (int e = 0; e < 8; ++e) two.x[r][c][e] *= power_of_two(s[r]);
                store_split<64, D>(tile, row + 8 * r, two.column(c), two.x[r][c], mantissa_of_Q(factor));
            }
        }
        return make_int2(s[0], s[1]);
    }

    // S of tile j of K; returns its exponent.
    __device__ __forceinline__ int take_S(float (&S)[32], uint64_t Q_desc, int j) {
        float small[32];
        wait(&source.K_full, K_ring.parity);
        const int exponent = read_by_lane_0(source.K_exponent[j]);
        const uint64_t K = uniform_descriptor(desc + Splitters::K_PLACE / 16);  // anew: its steps would take registers
        pin(S), pin(small);
#pragma unroll
        for (int p = 0; p < PANELS; ++p) issue_S(S, small, Q_desc, K + p * (HALF_PANEL / 16), p);
        wgmma_wait<0>();
        pin(S), pin(small);
        release(&source.K_free);
        K_ring.next();
#pragma unroll
        for (int x = 0; x < 32; ++x) S[x] += small[x];
        return exponent;
    }

    using Halves = uint32_t[KEY_TILES][4][4];  // of P

    // Attention of this warpgroup's rows of a row tile.
    template <class Function>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, uint64_t Q_desc, int2 q_exponent,
                                           int factor_exponent, Policy, Function) {
        const int first = here.i0 + group * 64, i = first + row;
        RowState rows = RowState::fresh(factor_exponent, q_exponent);
        Halves P_hi, P_lo;
#pragma unroll
        for (int j = 0; j < KEY_TILES; ++j) {
            const int key = j * BC + first_key_of_lane(lane % 4);
            float S[32];
            // S = Q Kᵀ
            const int exponent = take_S(S, Q_desc, j);
            // softmax: m, P, l
            softmax(S, rows, exponent, (j + 1) * BC > keys_of(a, first), {keys_of(a, i) - key, keys_of(a, i + 8) - key},
                    Bias());
            split_P(S, P_hi[j], P_lo[j]);
        }
        if (!__all_sync(~0u, give_PV(a, here.head, i, rows, P_hi, P_lo))) redo_rows(a, here.head, i - lane / 4, 16);
    }

    // O = P V, 64 columns at a time, of this thread's rows, i and i + 8; and their LSE. Whether they are finite.
    __device__ __forceinline__ bool give_PV(const Attention &a, Head head, int i, const RowState &rows,
                                            const Halves &P_hi, const Halves &P_lo) {
        float factor[2];
        Answer *out[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = opaque(i + 8 * r);  // nothing of which is kept while Q is split
            const float inverse_l = inverse(a, at, quad_sum(rows.l[r]));
            factor[r] = given_back(inverse_l, LARGEST_P);
            out[r] = rows_of(a.O, a.o, head.b, head.h) + at * row_stride(a.o);
            if (at < a.M && lane % 4 == 0) give_lse(a, head, at, rows.shift[r], inverse_l);
        }
        bool finite = true;
        Unit unit;
        float c[2], T_factor;  // of the last tile
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            float O[32] = {}, T[KEY_TILES][32];
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j) {
                if (p == 0) wait(&source.V_full[j], V_ring.parity);
                issue_PV(T[j], P_hi[j], P_lo[j], desc + (Splitters::V_place(j) + p * HALF_PANEL) / 16);
                if (p > 0) continue;
                float O_factor;
                T_factor = unit.next(read_by_lane_0(source.V_exponent[j]), &O_factor);
                c[0] = rows.rescale[0] * O_factor, c[1] = rows.rescale[1] * O_factor;
            }
            wgmma_wait<KEY_TILES - 1>();
            pin(T[0]);
            add_T(O, T[0], {0, 0}, 1);  // to nothing yet
            if (KEY_TILES == 2) {
                wgmma_wait<0>();
                pin(T[KEY_TILES - 1]);
                add_T(O, T[KEY_TILES - 1], c, T_factor);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (i + 8 * r >= a.M) continue;
                Finiteness finiteness;
                give_columns(out[r], 64 * p, O, r, factor[r], power_of_two(-unit.exponent), finiteness);
                finite &= finiteness.finite();
            }
        }
        V_ring.next();
        return finite;
    }
};

__device__ __forceinline__ SplitConsumer Splitters::consumer(unsigned char *tiles, int group) {
    return {*this, tiles, group};
}
