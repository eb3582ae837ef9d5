// Tensor: products on tensor cores, and each warp with copies of its own under way.
//
// What changed: a warp takes 16 tokens at a time, which lie in its own part of shared memory, brought there by asynchronous
// copies, several such tiles ahead. It computes Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ, with the tokens (and then the numbers of the head)
// where tensor cores want 16 rows, and the query rows where they want 8 columns: a group of up to 8 heads costs no padding
// to 16. Warps have maxima and sums of their own, and meet at the end of a piece only. fp8 becomes half in registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 150 instructions to do instead of
// thousands, so it always waits for memory, never memory for it; and what is under way does not need registers.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which split is there. Tiles fill shared
// memory: two blocks to a multiprocessor at D = 128.
#include "answer.cuh"
#include "pieces.cuh"

constexpr int WARPS = THREADS / 32, TILE = 16;  // tokens of a warp's tile
constexpr int COLUMNS = ROWS / 8;               // eight query rows each
constexpr int STEPS = ceil_div(HEAD_DIM, 16);   // of 16 numbers of a head
constexpr bool FP8 = CACHE_BYTES == 1;
static_assert(ROWS % 8 == 0 && VECTOR_BYTES == 16 && QUERY_TYPE != FP32,
              "what tensor cores and copies of 16 bytes take");
static_assert(!TRANSPOSED || PAGE * CACHE_BYTES >= 16, "16 bytes of values are slots of one page");

// A tile: rows of keys [TILE], each CHUNKS vectors of 16 bytes; then of values, the same, or, with TRANSPOSED, a row
// for each number of the head with the 16 tokens in one or two vectors. Rows are an odd number of vectors long, so that eight
// of them, read at once, lie in different banks.
constexpr int PADDED = 16 * STEPS * CACHE_BYTES / 16;  // vectors of a row with D rounded up to 16
constexpr int KEY_ROW = PADDED | 1;
constexpr int VALUE_ROW = TRANSPOSED ? (FP8 ? 1 : 3) : KEY_ROW, VALUE_ROWS = TRANSPOSED ? 16 * STEPS : TILE;
constexpr int TILE_VECTORS = TILE * KEY_ROW + VALUE_ROWS * VALUE_ROW;
constexpr int V_SLOTS = X, SLOT_VECTORS = TILE / X;  // TRANSPOSED: slots of a vector, and vectors of a row

extern __shared__ __align__(16) uint4 tiles_of_block[];  // [WARPS][STAGES][TILE_VECTORS]; afterwards the warps' O
static_assert(WARPS * STAGES * TILE_VECTORS * 16 >= WARPS * ROWS * HEAD_DIM * 4,
              "the warps' O have room where tiles were");

// ---- instructions

__device__ __forceinline__ unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }

// 16 bytes to shared memory, or zeros in their place.
__device__ __forceinline__ void copy16(uint4 *to, const unsigned char *from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Matrices of 8 rows of 16 bytes, whose addresses lanes 0 to 7, 8 to 15, .. have. Lane 4g + t gets bytes 4t to 4t + 3 of
// row g of each; transposed, 16-bit numbers g of rows 2t and 2t + 1.
__device__ __forceinline__ void load4(unsigned (&x)[4], const uint4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load4_transposed(unsigned (&x)[4], const uint4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load2(unsigned (&x)[2], const uint4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load2_transposed(unsigned (&x)[2], const uint4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a b: a is 16 x 16, b 16 x 8. Lane 4g + t has of a rows g and g + 8, columns 2t, 2t + 1 (a[0], a[1]) and 8 more to the
// right (a[2], a[3]); of b rows 2t, 2t + 1 (b[0]) and 8 further down (b[1]) of column g; of d rows g (d[0], d[1]) and g + 8
// (d[2], d[3]), columns 2t, 2t + 1.
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if QUERY_TYPE == FP16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two floats as 16-bit numbers of the query's type, the first in the low bits.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned y;
#if QUERY_TYPE == FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
    return y;
}

// An 8 x 8 matrix of 16-bit numbers, lane 4g + t with numbers 2t and 2t + 1 of row g, transposed.
__device__ __forceinline__ unsigned transpose(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Two fp8 numbers, in the low 16 bits, as 16-bit numbers of the query's type: exact in either.
__device__ __forceinline__ unsigned widened(unsigned bits) {
    const unsigned halves = halves_of_fp8(bits);
    return QUERY_TYPE == FP16 ? halves : pack(from_half(halves & 0xffff), from_half(halves >> 16));
}

// ---- a warp's tiles

struct Warp {
    int lane, g, t;
    uint4 *tiles;  // its STAGES tiles
};

// The page of the lane's token in a tile that begins with token0: what `page_of` says, one load a lane.
__device__ __forceinline__ int page_of_lane(const Decode &a, const Sequence &of, const Warp &w, int token0, int end) {
    const int token = token0 + w.lane % TILE;
    return token0 >= 0 && token0 < end ? (int)page_of(a, of, token < end ? token : token0) : 0;
}

// Have the keys and values of 16 tokens from token0 on copied; zeros for those before `first` and from `end` on.
__device__ __forceinline__ void copy_tile(const Decode &a, const Sequence &of, const Warp &w, uint4 *tile,
                                          int page_of_lane, int token0, int first, int end) {
    const unsigned char *const keys =
        static_cast<const unsigned char *>(a.key_cache) + of.kv_head * a.key_head * CACHE_BYTES;
    const unsigned char *const values =
        static_cast<const unsigned char *>(a.value_cache) + of.kv_head * a.value_head * CACHE_BYTES;
#pragma unroll
    for (int i = 0; i < ceil_div(TILE * CHUNKS, 32); ++i) {
        const int which = i * 32 + w.lane;
        // In vLLM's layout slots are neighbours, else chunks are.
        const int row = TRANSPOSED ? which % TILE : which / CHUNKS, c = TRANSPOSED ? which / TILE : which % CHUNKS;
        const int page = PAGE >= TILE ? page_of_lane : __shfl_sync(~0u, page_of_lane, row % TILE);
        if (TILE * CHUNKS % 32 != 0 && which >= TILE * CHUNKS) break;
        const int token = token0 + row, slot = token % PAGE;
        const bool wanted = token >= first && token < end;
        copy16(tile + row * KEY_ROW + c, keys + (page * a.key_page + slot * a.key_slot + c * a.key_chunk) * CACHE_BYTES,
               wanted);
        if (!TRANSPOSED)
            copy16(tile + TILE * KEY_ROW + row * VALUE_ROW + c,
                   values + (page * a.value_page + slot * a.value_slot) * CACHE_BYTES + c * 16, wanted);
    }
    if (TRANSPOSED) {
#pragma unroll
        for (int i = 0; i < ceil_div(HEAD_DIM * SLOT_VECTORS, 32); ++i) {
            const int which = i * 32 + w.lane, d = which / SLOT_VECTORS, part = which % SLOT_VECTORS;
            const int page = PAGE >= TILE ? page_of_lane : __shfl_sync(~0u, page_of_lane, part * V_SLOTS);
            if (HEAD_DIM * SLOT_VECTORS % 32 != 0 && which >= HEAD_DIM * SLOT_VECTORS) break;
            const int token = token0 + part * V_SLOTS;
            copy16(tile + TILE * KEY_ROW + d * VALUE_ROW + part,
                   values + (page * a.value_page + d * PAGE + token % PAGE) * CACHE_BYTES,
                   token + V_SLOTS > first && token < end);
        }
    }
}

// TRANSPOSED: values of tokens that are not among those from `first` to `end` came with others of the same vector. They may be
// anything, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_values(const Warp &w, uint4 *tile, int token0, int first, int end) {
    for (int i = w.lane; i < HEAD_DIM * TILE; i += 32) {
        const int token = token0 + i % TILE;
        unsigned char *const row = reinterpret_cast<unsigned char *>(tile + TILE * KEY_ROW + i / TILE * VALUE_ROW);
        if (token < first || token >= end)
            for (int byte = 0; byte < CACHE_BYTES; ++byte) row[i % TILE * CACHE_BYTES + byte] = 0;
    }
    __syncwarp();
}

// Which token of the tile is row i of Sᵀ. Where fp8 values stand transposed, a lane finds four neighbouring tokens in its
// word, which are to be columns 2t, 2t + 1 and 8 further on.
__device__ __forceinline__ int token_of(int i) { return FP8 && TRANSPOSED ? i % 8 / 2 * 4 + i / 8 * 2 + i % 2 : i; }

// 16 columns of K, of all 16 tokens: a of the product for Sᵀ. Of fp8 a lane has four neighbours in its word, which the query's
// fragments take into account.
__device__ __forceinline__ void key_fragment(unsigned (&a)[4], const Warp &w, const uint4 *tile, int step) {
    const int row = token_of(w.lane % 16);
    if constexpr (!FP8) load4(a, tile + row * KEY_ROW + step * 2 + w.lane / 16);
    else {
        unsigned x[2];
        load2(x, tile + row * KEY_ROW + step);
        a[0] = widened(x[0]), a[2] = widened(x[0] >> 16), a[1] = widened(x[1]), a[3] = widened(x[1] >> 16);
    }
}

// 16 numbers of V of all 16 tokens: a of the product for Oᵀ. Its row i is number `number_of(i)` of the 16.
__device__ __forceinline__ int number_of(int i) { return FP8 && !TRANSPOSED ? i % 8 * 2 + i / 8 : i; }
__device__ __forceinline__ void value_fragment(unsigned (&a)[4], const Warp &w, const uint4 *tile, int step) {
    const uint4 *const values = tile + TILE * KEY_ROW;
    if constexpr (!FP8 &&
                  !TRANSPOSED) {  // matrices: tokens 0 to 7 and 8 to 15 below, numbers 0 to 7 and 8 to 15 beside
        const int token = w.lane % 8 + w.lane / 16 * 8;
        load4_transposed(a, values + token * VALUE_ROW + step * 2 + w.lane / 8 % 2);
    } else if constexpr (!FP8) load4(a, values + (step * 16 + w.lane % 16) * VALUE_ROW + w.lane / 16);
    else if constexpr (!TRANSPOSED) {  // a word has numbers 2g and 2g + 1 of token 2t, then of token 2t + 1
        unsigned x[2];
        load2_transposed(x, values + w.lane % 16 * VALUE_ROW + step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = widened(__byte_perm(x[i], 0, 0x4420));
            a[2 * i + 1] = widened(__byte_perm(x[i], 0, 0x4431));
        }
    } else {
        unsigned x[2];
        load2(x, values + (step * 16 + w.lane % 16) * VALUE_ROW);
        a[0] = widened(x[0]), a[2] = widened(x[0] >> 16), a[1] = widened(x[1]), a[3] = widened(x[1] >> 16);
    }
}

// What a warp has of its tokens so far: rows 2t and 2t + 1 of each eight, l of its own tokens only.
struct State {
    float m[COLUMNS][2], l[COLUMNS][2];
    float o[COLUMNS][STEPS][4];  // Oᵀ
};

__device__ __forceinline__ unsigned query_pair(const Decode &a, const Sequence &of, int row, int d) {
    if (row >= rows_of(a) || d >= HEAD_DIM) return 0;
    const long long at = of.s * a.query_sequence + token_of_row(a, row) * a.query_token;
    return *reinterpret_cast<const unsigned *>(static_cast<const unsigned short *>(a.query) + at +
                                               head_of_row(a, of.kv_head, row) * HEAD_DIM + d);
}

__device__ __forceinline__ void load_query(const Decode &a, const Sequence &of, const Warp &w,
                                           unsigned (&q)[COLUMNS][STEPS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                q[n][step][half] = query_pair(a, of, of.row0 + n * 8 + w.g,
                                              step * 16 + (FP8 ? w.t * 4 + half * 2 : w.t * 2 + half * 8));
}

// One tile joins the state. `plain`: all its tokens are seen by all rows, and there is no ALiBi.
__device__ __forceinline__ void join(const Decode &a, const Sequence &of, const Warp &w, const uint4 *tile,
                                     const unsigned (&q)[COLUMNS][STEPS][2], float factor, int token0, int first,
                                     int end, bool plain, State &state) {
    float s[COLUMNS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned k[4];
        key_fragment(k, w, tile, step);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) multiply(s[n], k, q[n][step]);
    }
    unsigned p[COLUMNS][2];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= factor;
        if (!plain)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = of.row0 + n * 8 + w.t * 2 + i % 2, token = token0 + token_of(w.g + i / 2 * 8);
                if (token < first || token >= end || row >= rows_of(a) || !sees(a, of, row, token)) s[n][i] = NEG_INF;
                else if (a.alibi_slopes)
                    s[n][i] +=
                        a.alibi_slopes[head_of_row(a, of.kv_head, row)] * LOG2E * (token - position_of_row(a, of, row));
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // NaN needs no care here: P and with it l are NaN where a score is.
            float m = fmaxf(fmaxf(s[n][i], s[n][i + 2]), state.m[n][i]);
#pragma unroll
            for (int other = 4; other < 32; other *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
            const float shift = finite_or_zero(m), rescale = exp2_fast(state.m[n][i] - shift);
            state.m[n][i] = m;
            s[n][i] = exp2_fast(s[n][i] - shift), s[n][i + 2] = exp2_fast(s[n][i + 2] - shift);
            state.l[n][i] = state.l[n][i] * rescale + s[n][i] + s[n][i + 2];
            if (__any_sync(~0u, rescale != 1)) {  // Oᵀ has row 2t + i of Q in columns 2t + i, as Sᵀ has
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    state.o[n][step][i] *= rescale, state.o[n][step][i + 2] *= rescale;
            }
        }
        p[n][0] = transpose(pack(s[n][0], s[n][1])), p[n][1] = transpose(pack(s[n][2], s[n][3]));
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned v[4];
        value_fragment(v, w, tile, step);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) multiply(state.o[n][step], v, p[n]);
    }
}

// ---- a block's pieces

struct Meeting {
    float m[WARPS][ROWS], l[WARPS][ROWS];
};

// The warps' states to shared memory; O where the tiles were.
__device__ __forceinline__ void hand_in(const Warp &w, int warp, State &state, Meeting &meeting, float *O) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float l = state.l[n][i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) l += __shfl_xor_sync(~0u, l, other);
            const int r = n * 8 + w.t * 2 + i;
            if (w.g == 0) meeting.m[warp][r] = state.m[n][i], meeting.l[warp][r] = l;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int d = step * 16 + number_of(w.g + half * 8);
                    if (d < HEAD_DIM) O[(warp * ROWS + r) * HEAD_DIM + d] = state.o[n][step][i + half * 2];
                }
        }
    }
}

// m, l and number d of O of row r, of all warps, in their order.
struct Sum {
    float m, l, o;
};
__device__ __forceinline__ Sum sum_of(const Meeting &meeting, const float *O, int r, int d) {
    Sum sum = {NEG_INF, 0, 0};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum.m = fmaxf(sum.m, meeting.m[warp][r]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float weight = exp2_fast(meeting.m[warp][r] - finite_or_zero(sum.m));
        sum.l += weight * meeting.l[warp][r], sum.o += weight * O[(warp * ROWS + r) * HEAD_DIM + d];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) tensor(const __grid_constant__ Decode a) {
    __shared__ Finder finder;
    __shared__ Meeting meeting;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Warp w = {lane, lane / 4, lane % 4, tiles_of_block + warp * STAGES * TILE_VECTORS};
    float *const O = reinterpret_cast<float *>(tiles_of_block);
    const int tiles = ceil_div(rows_of(a), ROWS), together = a.kv_heads * tiles, parts = most_pieces(a);
    float *const partials = partials_of(a, tiles);
    const float factor = a.scale * (a.k_scale ? *a.k_scale : 1.0f) * LOG2E;
    const bool simple = a.tokens == 1 && a.sparse_stride <= 1 && !a.alibi_slopes;

    finder.start(a);
    for (long long task = blockIdx.x;; task += gridDim.x) {
        int s, part;
        if (!finder.find(a, task / together, s, part)) break;
        const int kv_head = task % together % a.kv_heads, tile = task % together / a.kv_heads;
        const Sequence of = sequence_of(a, s, kv_head, tile * ROWS);
        const Cut has = cut(a, of.length);
        const long long start = has.begin + (long long)part * has.piece;
        const int first = max(start, (long long)first_used(a, of.length)),
                  end = min((long long)of.length, start + has.piece);
        const int from = first / TILE * TILE + warp * TILE;  // this warp's first tile; the next is WARPS further on
        const int count = end > from ? ceil_div(end - from, WARPS * TILE) : 0;
        auto token_of_tile = [&](int i) { return i < count ? from + i * WARPS * TILE : end; };

        if (16 * STEPS > HEAD_DIM)  // columns that nobody copies are multiplied by zero, and so must be finite
            for (int i = lane; i < STAGES * TILE_VECTORS; i += 32) w.tiles[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        int pages[STAGES];
#pragma unroll
        for (int i = 0; i < STAGES; ++i) pages[i] = page_of_lane(a, of, w, token_of_tile(i), end);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i < count) copy_tile(a, of, w, w.tiles + i * TILE_VECTORS, pages[i], token_of_tile(i), first, end);
            commit_copies();
        }
        int next = pages[STAGES - 1];  // of the tile that is copied next
        unsigned q[COLUMNS][STEPS][2];
        load_query(a, of, w, q);
        State state = {};
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) state.m[n][0] = state.m[n][1] = NEG_INF;

        for (int i = 0, stage = 0; i < count; ++i) {
            wait_for_copies<STAGES - 2>();
            __syncwarp();
            const int ahead = i + STAGES - 1, token0 = token_of_tile(i);
            if (ahead < count) {
                uint4 *const free = w.tiles + (stage == 0 ? STAGES - 1 : stage - 1) * TILE_VECTORS;
                copy_tile(a, of, w, free, next, token_of_tile(ahead), first, end);
                next = page_of_lane(a, of, w, token_of_tile(ahead + 1), end);
            }
            commit_copies();
            uint4 *const here = w.tiles + stage * TILE_VECTORS;
            const bool whole = token0 >= first && token0 + TILE <= end;
            if (TRANSPOSED && !whole) clear_values(w, here, token0, first, end);
            join(a, of, w, here, q, factor, token0, first, end, whole && simple, state);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        wait_for_copies<0>();
        __syncthreads();  // O takes the place of all tiles
        hand_in(w, warp, state, meeting, O);
        __syncthreads();

        for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, d = i % HEAD_DIM, row = of.row0 + r;
            if (row >= rows_of(a)) break;
            const Sum sum = sum_of(meeting, O, r, d);
            const long long place = place_of_row(a, of, row);
            if (has.count == 1) answer_number(a, place, d, sum.m, sum.l, sum.o);
            else keep_number(partials, place * parts + part, d, sum.m, sum.l, sum.o);
        }
        if (has.count > 1 && last_of(counter_of(a, s, tile, tiles, kv_head), has.count))
            for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS)
                if (const int row = of.row0 + i / HEAD_DIM; row < rows_of(a))
                    merge_number(a, partials, parts, place_of_row(a, of, row), 0, has.count, i % HEAD_DIM);
        __syncthreads();  // before the next piece's tiles
    }
}
