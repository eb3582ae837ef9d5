// Tensor: products on tensor cores, keys and values straight from memory into their registers.
//
// What changed: a warp takes 16 tokens at a time and computes Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ, with the tokens (and then the numbers
// of the head) where tensor cores want 16 rows, and the query rows where they want 8 columns: a group of up to 8 heads costs no
// padding to 16. Each lane loads what it will multiply (see tiles.cuh); shared memory has only the query. The next tile's
// keys are loaded as soon as S has been computed, its values as soon as O has, and the next piece's while this one's
// answer is put together. Warps have maxima and sums of their own, and meet at the end of a piece. fp8 becomes half in
// registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 200 instructions to do instead of thousands,
// so it always waits for memory, never memory for it; 12 warps to a multiprocessor have up to 96 KB under way, more than twice
// what the memory's rate needs.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which split is there. Two tiles' registers
// leave room for 12 warps only.
#include "tiles.cuh"

constexpr int COLUMNS = ROWS / 8;  // eight query rows each
constexpr bool FP8 = CACHE_BYTES == 1;
constexpr int KEY_STEPS = KEY_VECTORS * X / 4;  // of 16 columns of Q; of a lane's 16 bytes, four numbers each
constexpr int VALUE_STEPS = TRANSPOSED ? VALUE_VECTORS / 2 : VALUE_VECTORS * X / 2;  // of 16 rows of Oᵀ
constexpr int O_ROW = HEAD_DIM + 4;                                                  // shifts banks
static_assert(ROWS % 8 == 0 && QUERY_TYPE != FP32, "what tensor cores take");

extern __shared__ __align__(16) uint4 tiles_of_block[];  // the warps' O: [WARPS][ROWS][O_ROW] floats; a Part a thread

// ---- instructions

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

// ---- a tile

// a of the product for Sᵀ: 16 tokens, and of each lane's keys four numbers.
__device__ __forceinline__ void key_fragment(unsigned (&a)[4], const Keys &keys, int step) {
    const int j = step / (X / 4), part = step % (X / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned *const words = keys.of[half][j];
        if constexpr (FP8) a[half] = widened(words[part]), a[half + 2] = widened(words[part] >> 16);
        else a[half] = words[part * 2], a[half + 2] = words[part * 2 + 1];
    }
}

// The number of the head that column 2t (+ 1) of a step of Q is, plus 2 for column 2t + 8 (+ 1).
__device__ __forceinline__ int column_of(int step, int t) { return (step / (X / 4) * 4 + t) * X + step % (X / 4) * 4; }

// a of the product for Oᵀ: 16 numbers of the head, and the lane's four tokens.
__device__ __forceinline__ void value_fragment(unsigned (&a)[4], const Values &values, int step) {
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned *const words = values.of[step * 2 + half];
            if constexpr (FP8) a[half] = widened(words[0]), a[half + 2] = widened(words[0] >> 16);
            else a[half] = words[0], a[half + 2] = words[1];
        }
    } else {
        const int vector = step / (X / 2), pair = step % (X / 2);
#pragma unroll
        for (int both = 0; both < 2; ++both) {  // two neighbours of one token and of another become pairs of tokens
            const unsigned *const one = values.of[2 * both * VALUE_VECTORS + vector];
            const unsigned *const other = values.of[(2 * both + 1) * VALUE_VECTORS + vector];
            if constexpr (FP8) {
                const unsigned pairs = __byte_perm(one[pair / 2], other[pair / 2], pair % 2 ? 0x7362 : 0x5140);
                a[both * 2] = widened(pairs), a[both * 2 + 1] = widened(pairs >> 16);
            } else {
                a[both * 2] = __byte_perm(one[pair], other[pair], 0x5410);
                a[both * 2 + 1] = __byte_perm(one[pair], other[pair], 0x7632);
            }
        }
    }
}

// The number of the head that row g + half * 8 of a step of Oᵀ is.
__device__ __forceinline__ int number_of(int step, int g, int half) {
    return TRANSPOSED ? step * 16 + half * 8 + g : (step / (X / 2) * 8 + g) * X + step % (X / 2) * 2 + half;
}

// Q as b of the product for Sᵀ, a lane's words beside each other.
struct Query {
    uint2 of[COLUMNS][KEY_STEPS][32];
};

__device__ __forceinline__ unsigned query_pair(const Decode &a, const Sequence &of, int row, int d) {
    if (row >= rows_of(a) || d >= HEAD_DIM) return 0;
    const long long at = of.s * a.query_sequence + token_of_row(a, row) * a.query_token;
    return *reinterpret_cast<const unsigned *>(static_cast<const unsigned short *>(a.query) + at +
                                               head_of_row(a, of.kv_head, row) * HEAD_DIM + d);
}

__device__ __forceinline__ void load_query(const Decode &a, const Sequence &of, Query &query) {
#pragma unroll
    for (int i = threadIdx.x; i < COLUMNS * KEY_STEPS * 32; i += THREADS) {
        const int lane = i % 32, step = i / 32 % KEY_STEPS, n = i / 32 / KEY_STEPS;
        const int row = of.row0 + n * 8 + lane / 4, d = column_of(step, lane % 4);
        query.of[n][step][lane] = {query_pair(a, of, row, d), query_pair(a, of, row, d + 2)};
    }
}

// What a warp has of its tokens so far: rows 2t and 2t + 1 of each eight, l of its own tokens only.
struct State {
    float m[COLUMNS][2], l[COLUMNS][2];
    float o[COLUMNS][VALUE_STEPS][4];  // Oᵀ
};

// Sᵀ of a tile, in two sums, for one product has to wait for the one before.
struct Scores {
    float of[COLUMNS][2][4];
};

__device__ __forceinline__ void multiply_keys(const Way &way, const Keys &keys, const Query &query, Scores &s) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        unsigned k[4];
        key_fragment(k, keys, step);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const uint2 pair = query.of[n][step][way.lane()];
            const unsigned q[2] = {pair.x, pair.y};
            multiply(s.of[n][step % 2], k, q);
        }
    }
}

// S becomes P, as b of the product for Oᵀ, and the state is that after this tile, but for the product. `plain`: all its tokens
// are seen by all rows, and there is no ALiBi.
__device__ __forceinline__ void softmax(const Decode &a, const Piece &piece, const Way &way, Scores &scores,
                                        float factor, int token0, bool plain, State &state, unsigned (&p)[COLUMNS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = (scores.of[n][0][i] + scores.of[n][1][i]) * factor;
        if (!plain)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = piece.of.row0 + n * 8 + way.t() * 2 + i % 2;
                const int token = token0 + token_of_row_of_tile(way.g() + i / 2 * 8);
                if (token < piece.first || token >= piece.end || row >= rows_of(a) || !sees(a, piece.of, row, token))
                    s[i] = NEG_INF;
                else if (a.alibi_slopes)
                    s[i] += a.alibi_slopes[head_of_row(a, piece.of.kv_head, row)] * LOG2E *
                            (token - position_of_row(a, piece.of, row));
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // NaN needs no care here: P and with it l are NaN where a score is.
            float m = fmaxf(fmaxf(s[i], s[i + 2]), state.m[n][i]);
#pragma unroll
            for (int other = 4; other < 32; other *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
            const float shift = finite_or_zero(m), rescale = exp2_fast(state.m[n][i] - shift);
            state.m[n][i] = m;
            s[i] = exp2_fast(s[i] - shift), s[i + 2] = exp2_fast(s[i + 2] - shift);
            state.l[n][i] = state.l[n][i] * rescale + s[i] + s[i + 2];
            if (__any_sync(~0u, rescale != 1)) {  // Oᵀ has row 2t + i of Q in columns 2t + i, as Sᵀ has
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; ++step)
                    state.o[n][step][i] *= rescale, state.o[n][step][i + 2] *= rescale;
            }
        }
        p[n][0] = transpose(pack(s[0], s[1])), p[n][1] = transpose(pack(s[2], s[3]));
    }
}

__device__ __forceinline__ void multiply_values(const Values &values, const unsigned (&p)[COLUMNS][2], State &state) {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
        unsigned v[4];
        value_fragment(v, values, step);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) multiply(state.o[n][step], v, p[n]);
    }
}

// ---- a block's pieces

struct Meeting {
    float m[WARPS][ROWS], l[WARPS][ROWS];
};

// The warps' states to shared memory.
__device__ __forceinline__ void hand_in(const Way &way, State &state, Meeting &meeting, float *O) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float l = state.l[n][i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) l += __shfl_xor_sync(~0u, l, other);
            const int r = n * 8 + way.t() * 2 + i;
            if (way.g() == 0) meeting.m[warp][r] = state.m[n][i], meeting.l[warp][r] = l;
            float *const row = O + (warp * ROWS + r) * O_ROW;
            if constexpr (TRANSPOSED) {
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (const int d = number_of(step, way.g(), half); d < HEAD_DIM)
                            row[d] = state.o[n][step][i + half * 2];
            } else {
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; step += 2)  // whose numbers are neighbours
                    if (const int d = number_of(step, way.g(), 0); d < HEAD_DIM)
                        *reinterpret_cast<float4 *>(row + d) =
                            make_float4(state.o[n][step][i], state.o[n][step][i + 2], state.o[n][step + 1][i],
                                        state.o[n][step + 1][i + 2]);
            }
        }
    }
}

// All warps' parts of row r, in their order.
__device__ __forceinline__ Part sum_of(const Meeting &meeting, const float *O, int r, int quad) {
    Part sum = nothing(), parts[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
        parts[warp] = {meeting.m[warp][r], meeting.l[warp][r],
                       reinterpret_cast<const float4 *>(O + (warp * ROWS + r) * O_ROW)[quad]};
    join_parts(sum, parts);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tensor(const __grid_constant__ Decode a) {
    __shared__ Pieces pieces;
    __shared__ Meeting meeting;
    __shared__ __align__(16) Query query;
    __shared__ Piece piece;  // not in registers, which are full
    __shared__ int taken;
    float *const O = reinterpret_cast<float *>(tiles_of_block);
    const float factor = a.scale * (a.k_scale ? *a.k_scale : 1.0f) * LOG2E;
    const bool simple = a.tokens == 1 && a.sparse_stride <= 1 && !a.alibi_slopes;

    Piece next;
    Way way;
    Keys keys;
    Values values;
    pieces.start(a);
    bool more = pieces.find(a, blockIdx.x, next);
    if (more) {
        way.start(a, next);
        if (way.count > 0) way.load(a, 0, keys), way.load(a, 0, values);
    }
    while (more) {
        int number = 0;  // of the next one, asked for now, for the answer takes a while
        if (threadIdx.x == 0) number = take(a), piece = next;
        load_query(a, next.of, query);
        __syncthreads();

        State state = {};
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) state.m[n][0] = state.m[n][1] = NEG_INF;
        for (int i = 0; i < way.count; ++i) {
            const int token0 = way.token0(i);
            const bool whole = token0 >= piece.first && token0 + TILE <= way.end, another = i + 1 < way.count;
            Scores s = {};
            multiply_keys(way, keys, query, s);
            if (another) way.reach(a, i + 1), way.load(a, i + 1, keys);
            unsigned p[COLUMNS][2];
            softmax(a, piece, way, s, factor, token0, whole && simple, state, p);
            if (!whole) way.clear(i, piece.first, values);
            multiply_values(values, p, state);
            if (another) way.load(a, i + 1, values);
        }
        hand_in(way, state, meeting, O);
        if (threadIdx.x == 0) taken = number;
        __syncthreads();

        more = pieces.find(a, taken, next);
        if (more) way.start(a, next);
        const int rows = smaller(ROWS, rows_of(a) - piece.of.row0);
        for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
            const int r = i / QUADS, quad = i % QUADS;
            const Part sum = sum_of(meeting, O, r, quad);
            const long long place = place_of_row(a, piece.of, piece.of.row0 + r);
            if (piece.count == 1) answer_quad(a, place, quad, sum);
            else keep_quad(partials_of(a), place * most_pieces(a) + piece.part, quad, sum);
        }
        if (more && way.count > 0) way.load(a, 0, keys), way.load(a, 0, values);
        if (piece.count > 1 && last_of(counter_of(a, piece), piece.count))
            merge_pieces(a, piece, reinterpret_cast<Part *>(tiles_of_block));
        __syncthreads();  // before the next piece's query
    }
    if (threadIdx.x == 0) leave(a);
}
