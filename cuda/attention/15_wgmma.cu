// Tensor cores at fp32 accuracy on Hopper: warps specialised, copies in the background.
//
// What changed: the matrix products run on wgmma, still three fp16 products for one in fp32 (split.cuh). `prepare`
// writes K and V once as scaled, split, swizzled tiles. In `attention` one warpgroup, the producer, only copies tiles
// to shared memory; each of the others, the consumers, owns 64 rows of Q and O, and takes the exponentials of a tile
// while the tensor cores multiply P V of the tile before. The products of its neighbour fill the gaps that are left.
// Why it is faster: wgmma reads its operands from shared memory by itself, at twice the rate of mma.sync; and nothing
// waits for copies, which run ahead by STAGES tiles.
// What it costs: three times the products, hi and lo of K and V in memory (as many bytes as fp32), and a pre-pass.
//
// This is the plain form, in reading order: the tiles, the producer, a consumer, the kernel. The steps of a consumer
// are functions in warpgroup.cuh. Where several blocks share a row tile, or two warpgroups share 64 rows, or heads are
// longer than 128 numbers, another form is compiled (forms.cuh).
//
// Launches: `prepare`, then `attention` with any number of blocks.
#define INTERLEAVES 1  // keys, where biases are read
#define BESIDE 4       // threads of the pre-pass that read 64 bytes of a row of V
#ifndef SPLITTERS
#define SPLITTERS 0  // threads that split K and V of a block's heads, where there is no pre-pass (splitters.cuh)
#endif
#define PAIRED (THREADS == 128 + 4 * BR && !SPLITTERS)  // two warpgroups have the same 64 rows
#define PAD (HEAD_DIM <= 16 ? 16 : HEAD_DIM <= 128 ? 32 : 64)
#include "prepare.cuh"
#include "warpgroup.cuh"
#include "mma.cuh"

// An SM has 512 registers for each of 128 threads. A block of 256 threads has all that they can address.
constexpr bool MOVE_REGISTERS = THREADS > 256;
constexpr int PRODUCER_REGISTERS = SPLITTERS ? (WARPGROUPS == 1 ? 144 : 96) : WARPGROUPS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = SPLITTERS ? (WARPGROUPS == 1 ? 208 : 160) : WARPGROUPS == 3 ? 160 : 240;
constexpr int CONSUMERS = WARPGROUPS * (1 + PAIRED);
static_assert(!MOVE_REGISTERS || (THREADS / 128 - CONSUMERS) * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                                     THREADS / 128 * (65536 / THREADS / 8 * 8),
              "a block that asks for more registers than it has begun with waits for ever");

static_assert(K_TILE % 1024 == 0 && V_TILE % 1024 == 0 && Q_TILE % 1024 == 0, "the swizzle repeats every 1024 bytes");

// ---- the tiles in shared memory

// The state of a ring of `K_STAGES` tiles of K and one of `STAGES` tiles of V: for each place a barrier that tells when
// the tile is there (full), one that tells when its place may be overwritten (free), and the exponent of its scale.
template <int K_STAGES>
struct Rings {
    uint64_t *const K_full, *const K_free, *const V_full, *const V_free;
    int4 *const K_exponent, *const V_exponent;

    static __device__ __forceinline__ Rings here() {
        struct State {
            int4 K_exponent[K_STAGES], V_exponent[STAGES];
            uint64_t K_full[K_STAGES], K_free[K_STAGES], V_full[STAGES], V_free[STAGES];
        };
        __shared__ State state;
        State *const s = where_it_is(&state);
        return {s->K_full, s->K_free, s->V_full, s->V_free, s->K_exponent, s->V_exponent};
    }

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) {
            const bool K = s < K_STAGES;
            if (K) barrier_init(&K_full[s], 1);
            barrier_init(&V_full[s], 1);
            if (K) barrier_init(&K_free[s], 4 * WARPGROUPS);  // each warp for itself
            barrier_init(&V_free[s], 4 * WARPGROUPS);
        }
    }

    // Copies a tile of K, or of V, and its exponents to a place of the ring; called by one thread. The wait for
    // `prepare` is here, as late as can be: what comes before has run then, and the code has been fetched.
    __device__ __forceinline__ void copy_K(int stage, unsigned char *K_tiles, const unsigned char *from,
                                           const int4 *exponents) const {
        arrive_expecting(&K_full[stage], K_TILE + 16);
        await_launch_before();
        bulk_copy(shared_address(K_tiles + stage * K_TILE), from, K_TILE, &K_full[stage]);
        bulk_copy(shared_address(&K_exponent[stage]), exponents, 16, &K_full[stage]);
    }
    __device__ __forceinline__ void copy_V(int stage, unsigned char *V_tiles, const unsigned char *from,
                                           const int4 *exponents) const {
        arrive_expecting(&V_full[stage], V_TILE + 16);
        await_launch_before();
        bulk_copy(shared_address(V_tiles + stage * V_TILE), from, V_TILE, &V_full[stage]);
        bulk_copy(shared_address(&V_exponent[stage]), exponents, 16, &V_full[stage]);
    }
};

// Tiles of K in shared memory, then tiles of V.
struct Tiles : Rings<STAGES> {
    static constexpr int K_BYTES = STAGES * K_TILE, BYTES = K_BYTES + STAGES * V_TILE;
    static constexpr int WARPS = 1;  // that copy

    static __device__ __forceinline__ Tiles here() { return {Rings<STAGES>::here()}; }

    // Copies tile t of K and of V, counted over all heads, as soon as there is room; called by a whole warp, so that
    // its lanes take the same branches, of which lane 0 copies.
    __device__ __forceinline__ void copy_tile(Ring &ring, unsigned char *tiles, const Attention &a, int t) const {
        const unsigned char *const from = split_tile(a, t);
        const int4 *const exponents = tile_exponents(a) + 2ll * t;
        wait(&K_free[ring.stage], ring.parity ^ 1);
        if (threadIdx.x == 0) copy_K(ring.stage, tiles, from, exponents);
        wait(&V_free[ring.stage], ring.parity ^ 1);
        if (threadIdx.x == 0) copy_V(ring.stage, tiles + K_BYTES, from + K_TILE, exponents + 1);
        ring.next();
    }
};

// ---- a consumer

// Q as an operand: the descriptor of its tile in shared memory. Short heads leave registers for its fragments, so that
// S asks shared memory only for K.
#if HEAD_DIM <= 32 && BR <= 128 && PRODUCTS == 3 && !BIAS && !PAIRED
using Query = QFragments;
#else
using Query = uint64_t;
#endif
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

// A warpgroup that multiplies whole tiles, and where it is in their rings.
struct Consumer : Warpgroup {
    const Tiles rings;
    const uint64_t K_desc, V_desc;
    Ring K_ring, V_ring;

    __device__ __forceinline__ Consumer(const Tiles &rings, const unsigned char *tiles, int group)
        : Warpgroup(group),
          rings(rings),
          K_desc(descriptor(shared_address(tiles))),
          V_desc(descriptor(shared_address(tiles + Tiles::K_BYTES))) {}

    // The tile of K whose turn it is, once it is there, and the exponent of its scale.
    __device__ __forceinline__ int await_K() const {
        wait(&rings.K_full[K_ring.stage], K_ring.parity);
        return read_by_lane_0(rings.K_exponent[K_ring.stage].x);
    }
    __device__ __forceinline__ void await_V() const { wait(&rings.V_full[V_ring.stage], V_ring.parity); }

    __device__ __forceinline__ uint64_t K() const { return uniform_descriptor(K_desc + K_ring.stage * (K_TILE / 16)); }
    __device__ __forceinline__ uint64_t V() const { return uniform_descriptor(V_desc + V_ring.stage * (V_TILE / 16)); }
    __device__ __forceinline__ void release_K() {
        release(&rings.K_free[K_ring.stage]);
        K_ring.next();
    }
    __device__ __forceinline__ void release_V() {
        release(&rings.V_free[V_ring.stage]);
        V_ring.next();
    }
};

// A consumer's 64 rows on their way past the tiles of keys: what one of its threads has in registers.
struct Passage {
    Consumer &by;
    const Attention &a;
    const Query &Q;
    const Head head;
    const int first, i;  // rows: the first of the 64, and the first of this thread's two
    const BiasRows biases;
    RowState rows;
    Partial sum = {};
    float S[S_REGISTERS], T[T_REGISTERS];
    Bias bias;
    uint32_t P_hi[V_STEPS][4], P_lo[V_STEPS][4];

    // The exponents of the rows' scales are `q_exponent`, that of `factor_of_scores` is `factor_exponent`.
    __device__ __forceinline__ Passage(Consumer &by, const Attention &a, const FirstRow &here, const Query &Q,
                                       int2 q_exponent, int factor_exponent)
        : by(by),
          a(a),
          Q(Q),
          head(here.head),
          first(here.i0 + by.group * 64),
          i(first + by.row),
          biases(a, head, i),
          rows(RowState::fresh(factor_exponent, q_exponent, mantissa_of_S(a))) {}

    // S = Q Kᵀ of tile j, the first one. Returns the exponent of K's scale.
    __device__ __forceinline__ int first_S(int j) {
        const int k_exponent = by.await_K();
        issue_S(S, Q, by.K());
        read_numbers(j);
        read_mask(j);
        wgmma_wait<0>();
        pin(S);
        by.release_K();
        return k_exponent;
    }

    // S = Q Kᵀ of tile j, and T = P V of the tile before, which still runs when S is there.
    __device__ __forceinline__ int next_S_and_T(int j) {
        const int k_exponent = by.await_K();
        by.await_V();
        by.await_turn();
        issue_S(S, Q, by.K());
        issue_T(T, P_hi, P_lo, by.V());
        by.pass_turn();
        read_mask(j);
        wgmma_wait<1>();
        pin(S);
        by.release_K();
        return k_exponent;
    }

    // T = P V of tile j, the last one. Of a window's, the first warpgroup sees the first half alone.
    __device__ __forceinline__ void last_T(int j) {
        using Half = uint32_t[V_STEPS / 2][4];
        by.await_V();
        if (WINDOW && CAUSAL && BC == 128 && keys_of(first + 63) <= j * BC + BC / 2)
            issue_T(T, reinterpret_cast<Half &>(P_hi), reinterpret_cast<Half &>(P_lo), by.V());
        else issue_T(T, P_hi, P_lo, by.V());
    }

    // m, l, and S := P, of tile j. Biases of the next tile begin their way; beyond the last, to no use.
    __device__ __forceinline__ void exponentiate(int j, int k_exponent) {
        if (WINDOW && j * BC < keys_hidden(a, first + 63)) hide_before(S, a.first + i - first_key(j));
        softmax(S, rows, k_exponent, (j + 1) * BC > keys_of(first),
                {keys_of(i) - first_key(j), keys_of(i + 8) - first_key(j)}, bias);
        read_numbers(j + 1);
    }

    // O = O r + T, once T is there: until then P is an operand.
    __device__ __forceinline__ void add(const float (&r)[2]) {
        float O_factor;
        const float T_factor = sum.unit.next(read_by_lane_0(by.rings.V_exponent[by.V_ring.stage].x), &O_factor);
        const float c[2] = {r[0] * O_factor, r[1] * O_factor};
        wgmma_wait<0>();
        pin(T);
        add_T(sum.O[0], T, c, T_factor);
        by.release_V();
    }

    __device__ __forceinline__ void read_numbers(int j) {
        biases.read_numbers<S_REGISTERS>(bias, a, head, first_key(j));
    }
    __device__ __forceinline__ void read_mask(int j) { biases.read_mask<S_REGISTERS>(bias, a, first_key(j)); }

    // The first key of tile j that this thread has, and the number of keys that a row sees.
    __device__ __forceinline__ int first_key(int j) const { return j * BC + first_key_of_lane(by.lane % 4); }
    __device__ __forceinline__ int keys_of(int row) const { return by.keys_of(a, row); }
};

// ---- the kernel

#if SHARING == WHOLE && HEAD_DIM <= 128 && !PAIRED

static_assert(THREADS == 128 * (1 + WARPGROUPS), "one warpgroup copies");
static_assert(SHARED == WARPGROUPS * Q_TILE + Tiles::BYTES + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 1024 <= 227 * 1024, "tiles must fit shared memory");

// The producer keeps the rings full, for the same row tiles as the consumers.
__device__ __forceinline__ void produce(const Attention &a, const Tiles &source, unsigned char *tiles) {
    Ring ring;
    for (unsigned w = blockIdx.x; w < RowTile::count(a); w += gridDim.x) {
        const RowTile here(w, a);
        const int first = first_tile_of(a, here.head);
#pragma unroll 1
        for (int t = first + first_tile_seen(a, here.i0), end = first + here.tiles; t < end; ++t)
            source.copy_tile(ring, tiles, a, t);
    }
}

// A consumer's rows of a row tile.
__device__ __forceinline__ void consume(Consumer &consumer, const Attention &a, const RowTile &here, const Query &Q,
                                        int2 q_exponent, int factor_exponent) {
    Passage pass(consumer, a, here, Q, q_exponent, factor_exponent);
    const int first = first_tile_seen(a, here.i0);

    // S = Q Kᵀ
    int k_exponent = pass.first_S(first);
    // softmax: m, P, l
    pass.exponentiate(first, k_exponent);
    split_P(pass.S, pass.P_hi, pass.P_lo);

    for (int j = first + 1; j < here.tiles; ++j) {
        const float r[2] = {pass.rows.rescale[0], pass.rows.rescale[1]};  // of the tile before
        // S = Q Kᵀ, and T = P V of the tile before
        k_exponent = pass.next_S_and_T(j);
        // softmax: m, P, l
        pass.exponentiate(j, k_exponent);
        // O = O r + T
        pass.add(r);
        split_P(pass.S, pass.P_hi, pass.P_lo);
    }

    // O = O r + P V of the last tile
    pass.last_T(here.tiles - 1);
    pass.add(pass.rows.rescale);

    // the epilogue: O / l, and the LSE
    pass.sum.take(pass.rows);
    consumer.deliver(a, here, pass.sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Attention all) {
    const Attention &a = of_block(all);
    if (!has_tile(a)) return;
    extern __shared__ unsigned char unaligned[];
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const tiles = Q_tiles + WARPGROUPS * Q_TILE;
    const Tiles source = Tiles::here();
    if (threadIdx.x == 0) {
        source.init();
        barrier_init_done();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        if (MOVE_REGISTERS) registers_down<PRODUCER_REGISTERS>();
        if (uniform(threadIdx.x / 32) == 0) produce(a, source, tiles);
        return;
    }
    if (MOVE_REGISTERS) registers_up<CONSUMER_REGISTERS>();

    // With a bias, to know that all lanes have the same costs registers, instead of saving them.
    const int group = WARPGROUPS == 1 ? 0 : (BIAS ? threadIdx.x / 128 : uniform(threadIdx.x / 128)) - 1;
    unsigned char *const Q_tile = Q_tiles + group * Q_TILE;
    Consumer consumer(source, tiles, group);
    if (group == WARPGROUPS - 1) consumer.pass_turn();
    for (unsigned w = blockIdx.x; w < RowTile::count(a); w += gridDim.x) {
        const RowTile here(w, a);
        // Q, scaled and split.
        const Input *const rows = rows_of(a.Q, a.q, here.head.b, here.head.h);
        int factor_exponent;
        const float factor = frexpf(factor_of_scores(a), &factor_exponent);
        named_sync(1 + group, 128);  // all threads have waited for the products that read the tile last
        TwoRows two(rows, row_stride(a.q), here.i0 + group * 64 + consumer.row, a.M);
        const int2 s = consumer.split_Q(two, Q_tile, factor);
        fence_for_async();
        await_launch_before();  // Q needs nothing of `prepare`, what follows does
        named_sync(1 + group, 128);
        Query query;
        take(query, Q_tile);
        consume(consumer, a, here, query, s, factor_exponent);
    }
    if (group == 0) consumer.await_turn();  // the turn that nobody took
}

#else
#include "forms.cuh"
#endif
