// Heads of more than 128 numbers on Hopper's warpgroups: K and V in panels, and one tile after the other.
//
// What changed: hi and lo of Q take half of shared memory and more, so that K and V have room for a tile of 32
// keys and a half of the next. But products with so few columns wait for shared memory, for Q is read again for each.
// So tiles have 64 keys, and come in panels: 64 keys and 64 columns of K, from the first columns to the last; then 64
// columns of V and its 64 keys. A panel is free again as soon as both warpgroups have multiplied it, and STAGES of them
// are on their way. S is summed in two parts, small products and large ones, so that K can come in turn and yet no
// small product meets a large sum.
// O takes more than half of the registers, which leaves none for two tiles at a time. A warpgroup's P V waits for its
// exponentials (elsewhere they overlap: warpgroup.cuh), and the products of the other fill the gap.
//
// Macros: as warpgroup.cuh; STAGES are panels, PINGPONG is turns at S.
#pragma once
#include "chunks.cuh"

constexpr int PANEL = split_bytes(64, 64);                        // bytes: 64 rows, 64 columns of hi, and 64 of lo
constexpr int HALF_PANEL = 64 * 128;                              // that of hi, or of lo
constexpr int PANELS = ceil_div(D, 64);                           // of a tile of K; and of V
constexpr int LO = SPLITTERS ? PANELS * HALF_PANEL : HALF_PANEL;  // from hi to lo: in a whole tile, all hi come first

struct LongConsumer;

// A ring of panels in shared memory: what tells that one is there, or free again; and the exponent of the scale of the
// tile that it is of, four times.
struct Panels {
    static constexpr int BYTES = STAGES * PANEL, WARPS = 1;  // that copy
    uint64_t full[STAGES], free[STAGES];
    int4 exponent[STAGES];

    static __device__ __forceinline__ Panels &here() {
        __shared__ Panels panels;
        return panels;
    }

    __device__ __forceinline__ void init() {
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s], 1), barrier_init(&free[s], 4 * WARPGROUPS);
    }

    // Tile t, of those of all heads, by a warp: its lane 0 copies, and waits for `prepare` as late as it can.
    __device__ __forceinline__ void copy_tile(Ring &ring, unsigned char *panels, const Attention &a, int t) {
        const unsigned char *const K = split_tile(a, t), *const V = K + K_TILE;
        const int4 *const exponents = tile_exponents(a) + 2ll * t;
#pragma unroll 1
        for (int p = 0; p < PANELS; ++p) copy(ring, panels, K + p * HALF_PANEL, exponents);
#pragma unroll 1
        for (int p = 0; p < PANELS; ++p) copy(ring, panels, V + p * HALF_PANEL, exponents + 1);
    }

    // In a tile, first all hi follow one another.
    __device__ __forceinline__ void copy(Ring &ring, unsigned char *panels, const unsigned char *from,
                                         const int4 *exponents) {
        uint64_t *const there = &full[ring.stage];
        wait(&free[ring.stage], ring.parity ^ 1);
        if (threadIdx.x == 0) {
            const uint32_t to = shared_address(panels + ring.stage * PANEL);
            arrive_expecting(there, PANEL + 16);
            await_launch_before();
            bulk_copy(to, from, HALF_PANEL, there);
            if (PRODUCTS == 3) bulk_copy(to + HALF_PANEL, from + PANELS * HALF_PANEL, HALF_PANEL, there);
            bulk_copy(shared_address(&exponent[ring.stage]), exponents, 16, there);
        }
        ring.next();
    }

    __device__ __forceinline__ LongConsumer consumer(unsigned char *panels, int group);
};

// Adds to S, in its two parts, what columns 64p.. of Q and a panel of K give.
__device__ __forceinline__ void issue_S(float (&large)[32], float (&small)[32], uint64_t Q, uint64_t K, int p) {
    asm volatile("" : "+l"(Q));  // else the address of each step is kept in a register of its own
    wgmma_fence();
#pragma unroll
    for (int k = 4 * p; k < min(4 * p + 4, K_STEPS); ++k) {
        const uint64_t Q_hi = Q + split_offset<64>(0, 16 * k) / 16, Q_lo = Q + split_offset<64>(0, D + 16 * k) / 16;
        const uint64_t K_hi = K + split_offset<64>(0, 16 * (k % 4)) / 16, K_lo = K_hi + LO / 16;
        if (PRODUCTS == 3) {
            wgmma(small, Q_lo, K_hi, k > 0);
            wgmma(small, Q_hi, K_lo, 1);
        }
        wgmma(large, Q_hi, K_hi, k > 0);
    }
    wgmma_commit();
}

// T = P V of the columns of a panel. Small products first.
__device__ __forceinline__ void issue_PV(float (&T)[32], const uint32_t (&P_hi)[4][4], const uint32_t (&P_lo)[4][4],
                                         uint64_t V) {
    pin(T);
    wgmma_fence();
    if (PRODUCTS >= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma(T, P_lo[k], V + split_offset<64>(0, 16 * k) / 16, k > 0);
    }
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma(T, P_hi[k], V + (LO + split_offset<64>(0, 16 * k)) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(T, P_hi[k], V + split_offset<64>(0, 16 * k) / 16, PRODUCTS >= 2 || k > 0);
    wgmma_commit();
}

// A warpgroup that multiplies panels; `desc` is of the first one's place.
struct LongConsumer : Warpgroup {
    Panels &panels;
    const uint64_t desc;
    Ring ring;

    __device__ __forceinline__ LongConsumer(Panels &panels, const unsigned char *first, int group)
        : Warpgroup(group), panels(panels), desc(descriptor(shared_address(first))) {}

    // The panel whose turn it is, once it is there.
    __device__ __forceinline__ uint64_t panel() const {
        wait(&panels.full[ring.stage], ring.parity);
        return desc + ring.stage * (PANEL / 16);
    }

    // S of a tile of K; returns its exponent.
    __device__ __forceinline__ int take_S(float (&S)[32], uint64_t Q_desc) {
        float small[32];
        int exponent = 0, before = 0;
        pin(S), pin(small);
        await_turn();
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            issue_S(S, small, Q_desc, panel(), p);
            if (p > 0) {
                wgmma_wait<1>();
                release(&panels.free[before]);
            } else exponent = read_by_lane_0(panels.exponent[ring.stage].x);
            before = ring.stage;
            ring.next();
        }
        pass_turn();
        wgmma_wait<0>();
        pin(S), pin(small);
        release(&panels.free[before]);
        if (PRODUCTS == 3)
#pragma unroll
            for (int x = 0; x < 32; ++x) S[x] += small[x];
        return exponent;
    }

    // O += P V of a tile of V.
    __device__ __forceinline__ void add_PV(Partial &sum, const uint32_t (&P_hi)[4][4], const uint32_t (&P_lo)[4][4],
                                           const float (&rescale)[2]) {
        float T[32], c[2], T_factor;
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            issue_PV(T, P_hi, P_lo, panel());
            if (p == 0) {
                float O_factor;
                T_factor = sum.unit.next(read_by_lane_0(panels.exponent[ring.stage].x), &O_factor);
                c[0] = rescale[0] * O_factor, c[1] = rescale[1] * O_factor;
            }
            wgmma_wait<0>();
            pin(T);
            release(&panels.free[ring.stage]);
            ring.next();
            add_T(sum.O[p], T, c, T_factor);
        }
    }

    // Attention of this warpgroup's rows of a row tile, for the keys of an assignment; nothing is read ahead.
    template <class Function>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, uint64_t Q_desc, int2 q_exponent,
                                           int factor_exponent, Policy chunks, Function) {
        const int first = here.i0 + group * 64, i = first + row;
        RowState rows = RowState::fresh(factor_exponent, q_exponent, mantissa_of_S(a));
        Partial sum = {};

        const auto step = [&](int j) {
            const int key = j * BC + first_key_of_lane(lane % 4);
            float S[32];
            Bias bias;
            uint32_t P_hi[4][4], P_lo[4][4];
            // S = Q Kᵀ
            const int exponent = take_S(S, Q_desc);
            // softmax: m, P, l
            const BiasRows biases(a, here.head, i);
            biases.read_numbers<32>(bias, a, here.head, key);
            biases.read_mask<32>(bias, a, key);
            softmax(S, rows, exponent, (j + 1) * BC > keys_of(a, first), {keys_of(a, i) - key, keys_of(a, i + 8) - key},
                    bias);
            split_P(S, P_hi, P_lo);
            // O = O r + P V
            add_PV(sum, P_hi, P_lo, rows.rescale);
        };

        for (int j = chunks.first_tile;;) {
            for (const int stop = min(chunks.next_chunk(), chunks.end_tile); j < stop; ++j) step(j);
            sum.take(rows);
            if (SHARING == WHOLE || j == chunks.end_tile) break;
            chunks.close(sum);
            sum = {};
            rows.restart();
        }
        if (chunks.finish(sum)) deliver(a, chunks.recall(here), sum);
    }
};

__device__ __forceinline__ LongConsumer Panels::consumer(unsigned char *panels, int group) {
    return {*this, panels, group};
}
