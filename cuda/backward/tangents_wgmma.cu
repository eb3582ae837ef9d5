// Tangents by tensor cores at fp32 accuracy, on Hopper: for heads of up to 128 numbers.
//
// What changed: products run on wgmma, as in `wgmma` of the gradients (warpgroup.cuh): each number is two fp16 halves,
// each product three. `prepare` splits all seven matrices, in tiles of 64 rows. A warpgroup owns 64 rows of three or
// four of them, the left operands of five products for scores; a thread of another one brings what passes by, 32 rows of
// the others. P, tP, dS and tdS are split in registers, and are the left operands of the sums.
// Why it is faster: three products of halves take a third of the time of one by FFMA; nothing of a score goes to shared
// memory.
// What it costs: scratch for the halves, as much as the matrices take. In each of P, tP, dS and tdS a row takes its
// power of two from the largest number of the tile.
//
// Macros beyond those of warpgroup.cuh: STAGES; BLOCKS of a multiprocessor; PREPARE_THREADS.
#include "tangents.cuh"
#include "warpgroup.cuh"

constexpr int TURNS = THREADS / 128 - 1;  // warpgroups that multiply, and take tiles that pass by in turn
static_assert((D == 64 || D == 128) && PASS == 32 && TURNS >= 1 && TURNS <= 2, "one warpgroup copies, others multiply");
constexpr int OF_QUERIES = GRADIENTS ? 3 : 2, OF_KEYS_ = 4;  // tiles: of Q, tQ and dO; of K, tK, V and tV
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = TURNS == 1 ? 232 : 240;
constexpr int MOST_TILES =
    larger(OF_QUERIES * OWN_TILE + STAGES * OF_KEYS_ * PASS_TILE, OF_KEYS_ *OWN_TILE + STAGES * OF_QUERIES * PASS_TILE);
static_assert(SHARED >= MOST_TILES + 8 * (2 * STAGES + 1), "room for tiles and barriers");

// ---- the workspace: what rows have in common; records of queries and of keys; the exponents of their tiles

struct Places {
    unsigned char *behind_rows, *records;
    int queries, *exponents;  // the number of records of queries
    __device__ __forceinline__ explicit Places(const Backward &a) {
        const long long rows = (long long)a.B * a.H * a.M * sizeof(Common);
        behind_rows = a.workspace + rows, records = a.workspace + (rows + 1023) / 1024 * 1024;
        queries = a.B * a.H * ceil_div(a.M, OWN);
        exponents = reinterpret_cast<int *>(of_keys(queries + a.B * a.Hkv * ceil_div(a.N, OWN)));
    }
    __device__ __forceinline__ unsigned char *of_queries(int record) const {
        return records + (long long)record * OF_QUERIES * OWN_TILE;
    }
    // Records of keys are numbered behind those of queries.
    __device__ __forceinline__ unsigned char *of_keys(int record) const {
        return of_queries(queries) + (long long)(record - queries) * OF_KEYS_ * OWN_TILE;
    }
    __device__ __forceinline__ int *exponents_of(int record) const { return exponents + 4ll * record; }
};

// A block a tile.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const Tangents a) {
    __shared__ unsigned scratch[2 * PREPARE_THREADS / 32];
    let_next_launch_begin();
    const Places at(a.of);
    // What rows have in common is read to the end of the last tile.
    for (unsigned char *x = at.behind_rows + threadIdx.x; blockIdx.x == 0 && x < at.records; x += PREPARE_THREADS)
        *x = 0;
    const bool keys = blockIdx.x >= unsigned(OF_QUERIES * at.queries);
    const int n = keys ? blockIdx.x - OF_QUERIES * at.queries : blockIdx.x, tiles = keys ? OF_KEYS_ : OF_QUERIES;
    const int which = n % tiles, heads = keys ? a.of.Hkv : a.of.H, rows = keys ? a.of.N : a.of.M;
    const int of_head = ceil_div(rows, OWN), index = n / tiles, h = index / of_head % heads,
              b = index / of_head / heads;
    const int record = keys ? at.queries + index : index;
    const float *matrix = which == 0   ? (keys ? a.of.K : a.of.Q)
                          : which == 1 ? (keys ? a.tK : a.tQ)
                          : which == 3 ? a.tV
                          : keys       ? a.of.V
                                       : a.of.dO;
    const Strides by = which == 0   ? (keys ? a.of.k : a.of.q)
                       : which == 1 ? (keys ? a.tk : a.tq)
                       : which == 3 ? a.tv
                       : keys       ? a.of.v
                                    : a.of.d_o;
    unsigned char *const to = (keys ? at.of_keys(record) : at.of_queries(record)) + which * OWN_TILE;
    const Taken taken = split_tile<PREPARE_THREADS, false>(rows_of(matrix, by, b, h), by.row, index % of_head * OWN,
                                                           rows, to, scratch, threadIdx.x, 0, [](int) { return 1.0f; });
    if (!(taken.sum < INFINITY_F)) note_not_finite(a.of, b, keys ? h : h / (a.of.H / a.of.Hkv));
    if (threadIdx.x == 0) at.exponents_of(record)[which] = taken.exponent;
}

// ---- shared memory: OWNED tiles, then stages of PASSING tiles of 32 rows, then barriers

// The place of a warpgroup that multiplies among these.
__device__ __forceinline__ int turn() { return threadIdx.x / 128 - 1; }
__device__ __forceinline__ void meet() { named_sync(1, TURNS * 128); }  // warpgroups that multiply

template <int OWNED, int PASSING>
struct Block {
    unsigned char *tiles;
    uint64_t *full, *free, *owned;
    RingOf<STAGES> ring;
    __device__ __forceinline__ Block() {
        extern __shared__ __align__(1024) unsigned char shared[];
        tiles = shared;
        full = reinterpret_cast<uint64_t *>(shared + MOST_TILES), free = full + STAGES, owned = free + STAGES;
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) barrier_init(&full[s], 1), barrier_init(&free[s], 128);
            barrier_init(owned, 1);
            barrier_init_done();
        }
        __syncthreads();
        let_next_launch_begin(), await_launch_before();
    }
    __device__ __forceinline__ unsigned char *stage() const {
        return tiles + OWNED * OWN_TILE + ring.stage * PASSING * PASS_TILE;
    }
    __device__ __forceinline__ void copy_own(const unsigned char *record) {
        arrive_expecting(owned, OWNED * OWN_TILE);
        bulk_copy(shared_address(tiles), record, OWNED * OWN_TILE, owned);
    }
    // The n-th PASS rows of records that follow one another.
    __device__ __forceinline__ void copy_next(const unsigned char *records, int n) {
        const int row = n * PASS % OWN;
        const unsigned char *const from = records + (long long)(n * PASS / OWN) * PASSING * OWN_TILE + row * 128;
        wait(&free[ring.stage], ring.parity ^ 1);
        arrive_expecting(&full[ring.stage], PASSING * PASS_TILE);
        const uint32_t to = shared_address(stage());
#pragma unroll
        for (int panel = 0; panel < PASSING * PANELS; ++panel)
            bulk_copy(to + (panel / PANELS * PANELS + place_of_panel(panel % PANELS)) * PASS * 128,
                      from + panel * OWN * 128, PASS * 128, &full[ring.stage]);
        ring.next();
    }
    // The warpgroup whose turn it is with the first tile is the one behind that which copies.
    __device__ __forceinline__ void await_own() { ring.skip(turn()), wait(owned, 0); }
    __device__ __forceinline__ void await_next() const { wait(&full[ring.stage], ring.parity); }
    __device__ __forceinline__ void let_go() { arrive(&free[ring.stage]), ring.skip(TURNS); }
};
using Rows = Block<OF_QUERIES, OF_KEYS_>;
using Keys = Block<OF_KEYS_, OF_QUERIES>;

// ---- a tile of queries, from i0 on, and one of keys, from j0 on: a warpgroup owns the queries, or with OF_KEYS the keys

template <bool OF_KEYS, bool SUMS = true>
struct Pair {
    const Tangents &a;
    const Head head;
    const int i0, j0;
    const uint32_t own;
    const uint64_t pass;
    const int *const of_queries, *const of_keys;  // exponents

    __device__ __forceinline__ int owned(int x) const { return row_of_thread() + x / 2 % 2 * 8; }
    __device__ __forceinline__ int passing(int x) const { return x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2; }
    __device__ __forceinline__ int query(int x) const { return i0 + (OF_KEYS ? passing(x) : owned(x)); }
    __device__ __forceinline__ int key(int x) const { return j0 + (OF_KEYS ? owned(x) : passing(x)); }

    // compute(whether some scores may not be seen): mostly none, and each instruction for each score counts.
    template <class Compute>
    __device__ __forceinline__ void masked(Compute compute) const {
        constexpr int QUERIES = OF_KEYS ? PASS : OWN, KEYS = OF_KEYS ? OWN : PASS;
        const bool all = BIAS == 0 && i0 + QUERIES <= a.of.M && sees(a.of, i0, j0 + KEYS - 1) &&
                         (!WINDOW || sees(a.of, i0 + QUERIES - 1, j0));
        if (all) compute(Flag<false>());
        else compute(Flag<true>());
    }
    // s = the product of two matrices, by their places in a record of queries, and in one of keys.
    __device__ __forceinline__ void issue(Scores &s, int queries, int keys) const {
        multiply(s, own + (OF_KEYS ? keys : queries) * OWN_TILE, pass + (OF_KEYS ? queries : keys) * (PASS_TILE / 16));
    }
    __device__ __forceinline__ float unit_of(int queries, int keys) const {
        return unit(of_queries[queries] + of_keys[keys]);
    }
    // Five products: Q Kᵀ, tQ Kᵀ and Q tKᵀ, with which it calls with_S(s, ts); dO Vᵀ and dO tVᵀ, which run meanwhile, if
    // there are registers for them.
    template <class With>
    __device__ __forceinline__ void products(Scores &dp, Scores &tdp, With with_S) const {
        constexpr bool AHEAD = GRADIENTS && (D == 64 || !SUMS);
        Scores s, ts, other;
        issue(s, 0, 0), issue(ts, 1, 0), issue(other, 0, 1);
        if (AHEAD) issue(dp, 2, 2), issue(tdp, 2, 3);
        wgmma_wait<AHEAD ? 2 : 0>();
        pin(s), pin(ts), pin(other);
        const float first = unit_of(1, 0), second = unit_of(0, 1);
#pragma unroll
        for (int x = 0; x < SCORES; ++x) ts[x] = fmaf(ts[x], first, other[x] * second);
        with_S(s, ts);
        if (GRADIENTS && !AHEAD) issue(dp, 2, 2), issue(tdp, 2, 3);
        wgmma_wait<0>();
        if (GRADIENTS) pin(dp), pin(tdp);
        const float of_dP = unit_of(2, 2), of_tdP = unit_of(2, 3);
#pragma unroll
        for (int x = 0; x < (GRADIENTS ? SCORES : 0); ++x) dp[x] *= of_dP, tdp[x] *= of_tdP;
    }
    // Beyond the last query there are numbers, too, of no consequence.
    __device__ __forceinline__ Common common(int x) const { return common_of(a.of, head, query(x)); }
    // with_P(p, tp), then dS and tdS.
    template <class With>
    __device__ __forceinline__ void scores(Scores &ds, Scores &tds, With with_P) const {
        Scores p, tp;
        products(ds, tds, [&](Scores &s, Scores &ts) {
            const float factor = unit_of(0, 0) * (a.of.scale * LOG2E);
            masked([&](auto masked) {
#pragma unroll
                for (int x = 0; x < SCORES; ++x) {
                    if (OF_KEYS && x % 4 == 0 && never(x)) break;  // else rows' numbers are fetched for all at once
                    const Common row = common(x);
                    p[x] = p_of<masked.value>(a.of, head, query(x), key(x), s[x], factor, row.above, row.inverse);
                    tp[x] = masked.value && is_unseen(p[x]) ? 0 : p[x] * ((ts[x] - row.R) * a.of.scale);
                }
            });
            with_P(p, tp);
        });
        masked([&](auto masked) {
#pragma unroll
            for (int x = 0; x < (GRADIENTS ? SCORES : 0); ++x) {
                if (OF_KEYS && x % 4 == 0 && never(x)) break;
                const Common row = common(x);
                const float dp = ds[x] - row.D, tdp = tds[x] - row.tD;
                ds[x] = masked.value && is_unseen(p[x]) ? 0 : p[x] * dp;
                tds[x] = masked.value && is_unseen(p[x]) ? 0 : fmaf(tp[x], dp, p[x] * tdp);
            }
        });
    }
    // sum += the n scores, each times a matrix that passes by. All of a row take one power of two, from the largest number
    // that is to be added.
    template <int n>
    __device__ __forceinline__ void add(Sum &sum, const Scores *const (&scores)[n], const int (&matrices)[n]) const {
        int exponent[2], of_tile[n];
        uint32_t hi[n * STEPS][4], lo[n * STEPS][4];
#pragma unroll
        for (int m = 0; m < n; ++m) of_tile[m] = (OF_KEYS ? of_queries : of_keys)[matrices[m]];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = 0;
#pragma unroll
            for (int m = 0; m < n; ++m) {
                const Scores &x = *scores[m];
                float of_matrix = 0;
#pragma unroll
                for (int y = 0; y < SCORES / 2; ++y) of_matrix = fmaxf(of_matrix, fabsf(x[y / 2 * 4 + 2 * r + y % 2]));
                largest = fmaxf(largest, of_matrix * power_of_two(-of_tile[m]));
            }
            exponent[r] = scale_exponent(quad_max(largest));
#pragma unroll
            for (int m = 0; m < n; ++m) {
                const Scores &x = *scores[m];
                const float factor = unit(of_tile[m] - exponent[r]);
#pragma unroll
                for (int y = 0; y < SCORES / 4; ++y)
                    split_scaled(x[4 * y + 2 * r], x[4 * y + 2 * r + 1], factor, hi[m * STEPS + y / 2][y % 2 * 2 + r],
                                 lo[m * STEPS + y / 2][y % 2 * 2 + r]);
            }
        }
        float T[32];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const auto tile = [&](int k) { return pass + matrices[k / STEPS] * (PASS_TILE / 16) + k % STEPS * STEP; };
            issue_T(T, hi, lo, tile, c);
            wgmma_wait<0>();
            pin(T);
            add_T(sum[c], T, power_of_two(-exponent[0]), power_of_two(-exponent[1]));
        }
    }
};

// ---- what warpgroups that take turns have each found of the same rows

// Whether this one has the n-th sum of all.
__device__ __forceinline__ bool gathers(int n) { return TURNS == 1 || turn() == n; }

// The n-th sum of all, of which tiles' place is free now.
__device__ __forceinline__ void gather(Sum &sum, unsigned char *tiles, int n) {
    if (TURNS == 1) return;
    float *const to = reinterpret_cast<float *>(tiles) + threadIdx.x % 128;
    meet();
#pragma unroll
    for (int x = 0; x < CHUNKS * SUM; ++x)
        if (!gathers(n)) to[128 * x] = sum[x / SUM][x % SUM];
    meet();
#pragma unroll
    for (int x = 0; x < CHUNKS * SUM; ++x)
        if (gathers(n)) sum[x / SUM][x % SUM] += to[128 * x];
}

// ---- sums over keys

// The queries that a block owns, and the tiles of keys that some of them see.
struct Owned {
    Head head;
    int first, begin, end;
    __device__ __forceinline__ explicit Owned(const Backward &a) {
        const int Tr = ceil_div(a.M, OWN), tile = blockIdx.x % Tr;
        head = head_of(a, blockIdx.x / Tr), first = (CAUSAL ? Tr - 1 - tile : tile) * OWN;  // the longest rows first
        begin = keys_hidden(a, first) / PASS, end = ceil_div(keys_seen(a, min(first + OWN, a.M) - 1), PASS);
    }
};

// compute(pair) for all of them, by the warpgroups that multiply, then finish(shared memory, which is free again). The
// other one copies; it must not meet them again, or has all that they have to finish in its few registers.
template <bool SUMS, class Compute, class Finish>
__device__ __forceinline__ void with_keys(const Tangents &a, const Owned &at, Compute compute, Finish finish) {
    Rows block;
    const Places from(a.of);
    const int own = (at.head.b * a.of.H + at.head.h) * ceil_div(a.of.M, OWN) + at.first / OWN;
    const int keys = from.queries + (at.head.b * a.of.Hkv + at.head.kv) * ceil_div(a.of.N, OWN);
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        block.copy_own(from.of_queries(own));
        for (int j = at.begin; j < at.end; ++j) block.copy_next(from.of_keys(keys), j);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    block.await_own();
#pragma unroll 1
    for (int j = at.begin + turn(); j < at.end; j += TURNS) {
        block.await_next();
        const Pair<false, SUMS> pair = {a,
                                        at.head,
                                        at.first,
                                        j * PASS,
                                        uint32_t(uniform(shared_address(block.tiles))),
                                        uniform_descriptor(descriptor(shared_address(block.stage()))),
                                        from.exponents_of(own),
                                        from.exponents_of(keys + j * PASS / OWN)};
        compute(pair);
        block.let_go();
    }
    finish(block.tiles);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) of_rows(const Tangents a) {
    const Owned at(a.of);
    float above[2];
    Means means[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) above[r] = above_of(a.of, at.head, min(at.first + row_of_thread() + 8 * r, a.of.M - 1));
    const auto compute = [&](const Pair<false, false> &pair) {
        Scores p, ts, dp, tdp;
        bool unseen[SCORES];
        pair.products(dp, tdp, [&](const Scores &s, const Scores &of_s) {
            const float factor = pair.unit_of(0, 0) * (a.of.scale * LOG2E);
#pragma unroll
            for (int x = 0; x < SCORES; ++x) {
                p[x] = p_of(a.of, at.head, pair.query(x), pair.key(x), s[x], factor, above[x / 2 % 2], 1);
                unseen[x] = is_unseen(p[x]);
                ts[x] = unseen[x] ? 0 : of_s[x];
            }
        });
#pragma unroll
        for (int x = 0; x < SCORES; ++x)
            if (GRADIENTS) dp[x] = unseen[x] ? 0 : dp[x], tdp[x] = unseen[x] ? 0 : tdp[x];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            means[r].add<SCORES / 2>(p, ts, dp, tdp, a.of.scale, [r](int y) { return y / 2 * 4 + 2 * r + y % 2; });
    };
    with_keys<false>(a, at, compute, [&](unsigned char *tiles) {
#pragma unroll
        for (int r = 0; r < 2; ++r) means[r].merge_lanes(1, a.of.scale), means[r].merge_lanes(2, a.of.scale);
        if (TURNS > 1) {
            meet();
            Means *const of_other = reinterpret_cast<Means *>(tiles) + row_of_thread();
            if (turn() > 0 && threadIdx.x % 4 == 0) of_other[0] = means[0], of_other[8] = means[1];
            meet();
            if (turn() > 0) return;
            means[0].merge(of_other[0], a.of.scale), means[1].merge(of_other[8], a.of.scale);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = at.first + row_of_thread() + 8 * r;
            if (threadIdx.x % 4 == 0 && i < a.of.M) means[r].keep(a.of, a.tlse, at.head, i, above[r]);
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rows(const Tangents a) {
    const Owned at(a.of);
    Sum tO = {}, tdQ = {};
    const auto compute = [&](const Pair<false> &pair) {
        Scores ds, tds;
        pair.scores(ds, tds, [&](const Scores &p, const Scores &tp) { pair.add<2>(tO, {&tp, &p}, {2, 3}); });
        if (GRADIENTS) pair.add<2>(tdQ, {&tds, &ds}, {0, 1});
    };
    with_keys<true>(a, at, compute, [&](unsigned char *tiles) {
        gather(tO, tiles, 0);
        if (GRADIENTS) gather(tdQ, tiles, 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = at.first + row_of_thread() + 8 * r;
            if (i >= a.of.M) continue;
            if (gathers(0)) write(rows_of(a.tO, a.to, at.head.b, at.head.h) + i * a.to.row, tO, r, 1);
            if (GRADIENTS && gathers(1))
                write(rows_of(a.of.dQ, a.of.dq, at.head.b, at.head.h) + i * a.of.dq.row, tdQ, r, a.of.scale);
        }
    });
}

// ---- sums over queries

#if GRADIENTS
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) keys(const Tangents a) {
    Keys block;
    const Places from(a.of);
    const int Tc = ceil_div(a.of.N, OWN), Tr = ceil_div(a.of.M, OWN), first = blockIdx.x % Tc * OWN;
    const int b = blockIdx.x / Tc / a.of.Hkv, kv = blockIdx.x / Tc % a.of.Hkv, group = a.of.H / a.of.Hkv;
    const int own = from.queries + blockIdx.x;
    const int begin = first_query(a.of, first) / PASS, end = ceil_div(end_query(a.of, first + OWN - 1), PASS);
    const int of_head = end - begin;
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        block.copy_own(from.of_keys(own));
        for (int h = kv * group; h < (kv + 1) * group; ++h)
            for (int i = begin; i < end; ++i) block.copy_next(from.of_queries((b * a.of.H + h) * Tr), i);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    block.await_own();
    Sum tdK = {}, tdV = {};
#pragma unroll 1
    for (int n = turn(); n < of_head * group; n += TURNS) {
        const int h = kv * group + n / of_head, i = begin + n % of_head;
        block.await_next();
        const Pair<true> pair = {a,
                                 {b, h, kv},
                                 i * PASS,
                                 first,
                                 uint32_t(uniform(shared_address(block.tiles))),
                                 uniform_descriptor(descriptor(shared_address(block.stage()))),
                                 from.exponents_of((b * a.of.H + h) * Tr + i * PASS / OWN),
                                 from.exponents_of(own)};
        Scores ds, tds;
        pair.scores(ds, tds, [&](const Scores &, const Scores &tp) { pair.add<1>(tdV, {&tp}, {2}); });
        if (D == 64) pair.add<2>(tdK, {&tds, &ds}, {0, 1});
        else pair.add<1>(tdK, {&tds}, {0}), pair.add<1>(tdK, {&ds}, {1});  // for both there are too few registers
        block.let_go();
    }
    gather(tdK, block.tiles, 0), gather(tdV, block.tiles, 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = first + row_of_thread() + 8 * r;
        if (key >= a.of.N) continue;
        if (gathers(0)) write(rows_of(a.of.dK, a.of.dk, b, kv) + key * a.of.dk.row, tdK, r, a.of.scale);
        if (gathers(1)) write(rows_of(a.of.dV, a.of.dv, b, kv) + key * a.of.dv.row, tdV, r, 1);
    }
}
#endif
