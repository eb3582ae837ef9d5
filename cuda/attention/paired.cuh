// Two warpgroups for the same 64 rows, which take tiles of keys in turn.
//
// What changed: where row tiles are few, a block has 64 rows, for which it has two consumers instead of one. A tile
// needs little of those before it: the rows' maxima so far. Its exponentials wait for them, and the other warpgroup
// tells them as soon as it has scores. The first warpgroup has O and l, and adds to them, in the order of the tiles,
// also the other's P V. So each number is computed by the same arithmetic as if one warpgroup had all tiles: no byte
// depends on it.
// Why it is faster: one warpgroup alone would wait for its own products and exponentials in turn; two fill each other's
// gaps.
// What it costs: messages through shared memory, for each tile the maxima, and for every other one its P V.
//
// Blocks have a third warpgroup then: THREADS, which is 128 + 4 BR, tells it. There is a block for each row tile, or
// for each chunk of one.
#pragma once
#include "chunks.cuh"

static_assert(WARPGROUPS == 1 && HEAD_DIM <= 128 && !BIAS, "two have 64 rows, and registers for no bias");
static_assert(!(SHARING == FOLD || SHARING == FOLD_SHARED), "what several chunks come to would have no registers");

// From the second warpgroup to the first, of each thread: T, and what is to be known to add it.
constexpr int MAIL_BYTES = SLOT_BYTES;

// The messages of the two warpgroups to each other, in shared memory. Each thread arrives for itself, and waits for
// what it is told.
struct PairShared {
    uint64_t told[2], sent, read;  // maxima of each; T; and that it has been read
    float maxima[2][64];           // of the rows, up to the last tile of each warpgroup

    static __device__ __forceinline__ PairShared &here() {
        __shared__ PairShared shared;
        return shared;
    }
    __device__ __forceinline__ void init() {
        barrier_init(&told[0], 128), barrier_init(&told[1], 128), barrier_init(&sent, 128), barrier_init(&read, 128);
    }
};

struct Pair;

// Tiles in shared memory: of K as many as there are warpgroups, for a tile of K is soon free again; and room for the
// mail. One warp copies K, another one V.
struct PairTiles : Rings<2> {
    static constexpr int K_STAGES = 2, K_BYTES = K_STAGES * K_TILE, V_END = K_BYTES + STAGES * V_TILE;
    static constexpr int BYTES = V_END + MAIL_BYTES;
    static constexpr int WARPS = 2;

    static __device__ __forceinline__ PairTiles here() { return {Rings<2>::here()}; }

    __device__ __forceinline__ void init() const {
        Rings<2>::init();
        PairShared::here().init();
    }

    __device__ __forceinline__ void copy_tile(Ring &ring, unsigned char *tiles, const Attention &a, int t) const {
        const unsigned char *const from = split_tile(a, t);
        const int4 *const exponents = tile_exponents(a) + 2ll * t;
        const bool K = uniform(threadIdx.x / 32) == 0;
        if (K) {
            wait(&K_free[ring.stage], ring.parity ^ 1);
            if (threadIdx.x == 0) copy_K(ring.stage, tiles, from, exponents);
        } else {
            wait(&V_free[ring.stage], ring.parity ^ 1);
            if (threadIdx.x == 32) copy_V(ring.stage, tiles + K_BYTES, from + K_TILE, exponents + 1);
        }
        if (K && ring.stage == K_STAGES - 1) ring.stage = STAGES - 1;  // K's ring is shorter
        ring.next();
    }

    __device__ __forceinline__ Pair consumer(unsigned char *tiles, int group) const;
};

struct Pair : Warpgroup {
    const PairTiles rings;
    const uint64_t K_desc, V_desc;
    PairShared &shared;
    float4 *const mail;
    const int member;
    RingOf<1> told, mails;  // parities of what is to be waited for

    __device__ __forceinline__ Pair(const PairTiles &rings, unsigned char *tiles)
        : Warpgroup(0),
          rings(rings),
          K_desc(descriptor(shared_address(tiles))),
          V_desc(descriptor(shared_address(tiles + PairTiles::K_BYTES))),
          shared(PairShared::here()),
          mail(reinterpret_cast<float4 *>(tiles + PairTiles::V_END) + threadIdx.x % 128),
          member(uniform(threadIdx.x / 128) - 1) {}

    // Splits Q like Warpgroup::split_Q. But both warpgroups have the same rows, and each stores one of two.
    __device__ __forceinline__ int2 split_Q(const TwoRows &two, unsigned char *tile, float factor) const {
        const int2 s = two.scales();
        const bool second = threadIdx.x / 128 == 2;
        const float scale = power_of_two(second ? s.y : s.x);
#pragma unroll
        for (int c = 0; c < TwoRows::EIGHTS; ++c) {
            float mine[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) mine[e] = (second ? two.x[1][c][e] : two.x[0][c][e]) * scale;
            if (D % 32 == 0 || two.column(c) < D)
                store_split<64, D>(tile, row + 8 * second, two.column(c), mine, mantissa_of_Q(factor));
        }
        return s;
    }

    // They take no turns.
    __device__ __forceinline__ void pass_turn() const {}
    __device__ __forceinline__ void await_turn() const {}

    // A tile's own sums, to be added to those of the tiles before it.
    struct TileSum {
        float rescale[2], l[2];
        int V_exponent;
    };

    __device__ __forceinline__ void send(float (&T)[T_REGISTERS], const TileSum &tile, const float (&shift)[2]) {
        wait(&shared.read, mails.parity ^ 1);
        mails.next();
#pragma unroll
        for (int x = 0; x < T_REGISTERS / 4; ++x)
            mail[128 * x] = make_float4(T[4 * x], T[4 * x + 1], T[4 * x + 2], T[4 * x + 3]);
        mail[128 * SLOT_NUMBERS] = make_float4(tile.rescale[0], tile.rescale[1], tile.l[0], tile.l[1]);
        mail[128 * (SLOT_NUMBERS + 1)] = make_float4(__int_as_float(tile.V_exponent), shift[0], shift[1], 0);
        arrive(&shared.sent);
    }

    // The factors for O and for T.
    struct Factors {
        float O[2], T;
    };
    static __device__ __forceinline__ Factors add_rows(Partial &sum, const TileSum &tile) {
        float O_factor;
        const float T_factor = sum.unit.next(tile.V_exponent, &O_factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum.l[r] = fmaf(sum.l[r], tile.rescale[r], tile.l[r]);
        return {{tile.rescale[0] * O_factor, tile.rescale[1] * O_factor}, T_factor};
    }

    __device__ __forceinline__ void add_mail(Partial &sum) {
        wait(&shared.sent, mails.parity);
        mails.next();
        const float4 x = mail[128 * SLOT_NUMBERS], y = mail[128 * (SLOT_NUMBERS + 1)];
        const Factors by = add_rows(sum, {{x.x, x.y}, {x.z, x.w}, __float_as_int(y.x)});
        constexpr int SOME = T_REGISTERS % 16 == 0 ? 16 : T_REGISTERS % 8 == 0 ? 8 : 4;  // registers at a time
#pragma unroll
        for (int from = 0; from < T_REGISTERS; from += SOME) {
            float T[SOME];
#pragma unroll
            for (int x = 0; x < SOME; x += 4) {
                const float4 four = mail[128 * (from + x) / 4];
                T[x] = four.x, T[x + 1] = four.y, T[x + 2] = four.z, T[x + 3] = four.w;
            }
            add_T(reinterpret_cast<float (&)[SOME]>(sum.O[0][from]), T, by.O, by.T);
        }
        sum.shift[0] = y.y, sum.shift[1] = y.z;  // the last one is that of all
        arrive(&shared.read);
    }

    // Attention of the 64 rows of a row tile, for the keys of an assignment, a block's only one.
    template <class Function>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, uint64_t Q_desc, int2 q_exponent,
                                           int factor_exponent, Policy chunks, Function) {
        const int i = here.i0 + row, first_tile = chunks.first_tile, end_tile = chunks.end_tile;
        float S[S_REGISTERS], T[T_REGISTERS];
        uint32_t P_hi[V_STEPS][4], P_lo[V_STEPS][4];
        RowState rows = RowState::fresh(factor_exponent, q_exponent, mantissa_of_S(a));
        Partial sum = {};

        RingOf<PairTiles::K_STAGES> K;
        RingOf<STAGES> V;
        K.stage = V.stage = member;

        // The maxima up to the tile before, or none; and for the other warpgroup, those up to this one.
        const auto exchange = [&](int j, const float (&m)[2]) {
            float before[2] = {NEG_INF, NEG_INF};
            if (j > first_tile) {
                wait(&shared.told[1 - member], told.parity);
                told.next();
                before[0] = shared.maxima[1 - member][row], before[1] = shared.maxima[1 - member][row + 8];
            }
            if (j + 1 < end_tile) {
                if (lane % 4 == 0)
#pragma unroll
                    for (int r = 0; r < 2; ++r) shared.maxima[member][row + 8 * r] = fmaxf(before[r], m[r]);
                arrive(&shared.told[member]);
            }
            rows.shift[0] = before[0], rows.shift[1] = before[1];
        };

        // S := P of tile j, and l that of its keys alone.
        const auto softmax_of_tile = [&](int j, int k_exponent) {
            const auto end_of = [&](int x) { return keys_seen(a.q_start + x, a.N); };
            const int column = j * BC + lane % 4 * 2;
            const Bias no_bias = {};
            rows.l[0] = rows.l[1] = 0;
            float2 factor = mask_scores(S, rows, k_exponent, (j + 1) * BC > end_of(here.i0),
                                        {end_of(i) - column, end_of(i + 8) - column}, no_bias);
            const float m[2] = {maximum_of_row(S, 0, factor.x), maximum_of_row(S, 1, factor.y)};
            exchange(j, m);
            exponentiate_row(S, rows, 0, m[0], factor.x);
            exponentiate_row(S, rows, 1, m[1], factor.y);
        };
        const auto K_done = [&] {
            release(&rings.K_free[K.stage]);
            K.skip(2);
        };

        // T of tile j, which is on its way, and what was before it, if that is this warpgroup's to add.
        const auto finish = [&](int j, TileSum tile) {
            tile.V_exponent = read_by_lane_0(rings.V_exponent[V.stage].x);
            wgmma_wait<0>();
            pin(T);
            release(&rings.V_free[V.stage]);
            V.skip(2);
            if (member == 0) {
                if (j > first_tile) add_mail(sum);
                const Factors by = add_rows(sum, tile);
                add_T(sum.O[0], T, by.O, by.T);
            } else send(T, tile, rows.shift);
        };
        const auto present = [&]() -> TileSum {
            return {{rows.rescale[0], rows.rescale[1]}, {rows.l[0], rows.l[1]}, 0};
        };

        int j = first_tile + member;
        if (j < end_tile) {
            wait(&rings.K_full[K.stage], K.parity);
            int k_exponent = read_by_lane_0(rings.K_exponent[K.stage].x);
            issue_S(S, Q_desc, K_desc + K.stage * (K_TILE / 16));
            wgmma_wait<0>();
            pin(S);
            K_done();
            softmax_of_tile(j, k_exponent);
            split_P(S, P_hi, P_lo);
#pragma unroll 1
            for (j += 2; j < end_tile; j += 2) {
                const TileSum tile = present();
                wait(&rings.K_full[K.stage], K.parity);
                k_exponent = read_by_lane_0(rings.K_exponent[K.stage].x);
                wait(&rings.V_full[V.stage], V.parity);
                issue_S(S, Q_desc, K_desc + K.stage * (K_TILE / 16));
                issue_T(T, P_hi, P_lo, V_desc + V.stage * (V_TILE / 16));
                wgmma_wait<1>();  // S is there, T still runs
                pin(S);
                K_done();
                softmax_of_tile(j, k_exponent);
                finish(j - 2, tile);  // until T is there, P is an operand
                split_P(S, P_hi, P_lo);
            }
            wait(&rings.V_full[V.stage], V.parity);
            issue_T(T, P_hi, P_lo, V_desc + V.stage * (V_TILE / 16));
            finish(j - 2, present());
        }
        if (member == 1) return;
        sum.shift[0] = rows.shift[0], sum.shift[1] = rows.shift[1];
        if (j - 1 < end_tile) add_mail(sum);
        if (chunks.finish(sum)) deliver(a, chunks.recall(here), sum);
    }
};

__device__ __forceinline__ Pair PairTiles::consumer(unsigned char *tiles, int) const { return {*this, tiles}; }
