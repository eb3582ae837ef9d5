// Attention with tensor cores by pieces: what a warp does with a tile, and how the warps of a block meet.
//
// S = Q Kᵀ has the query rows where tensor cores want 16 rows (half of them zeros with ROWS = 8) and tokens where they
// want 8 columns, Oᵀ = Vᵀ Pᵀ numbers of the head and query rows: so S comes out where Pᵀ goes in, keys are multiplied
// as they came from memory, and a group of up to 8 heads needs no sums for 16.
#pragma once
#include "tiles.cuh"
#if TILED
#include "work.cuh"
#endif

constexpr int WARP_ROWS = BY_ROWS ? ROWS / WARPS : ROWS;  // of a warp
constexpr int COLUMNS = WARP_ROWS / 8;                    // of Oᵀ, eight query rows each
constexpr bool BYTES = CACHE_BYTES == 1;                  // fp8 or int8
constexpr int KEY_STEPS = KEY_VECTORS * X / 4;            // of 16 columns of Q; of a lane's 16 bytes, four numbers each
constexpr int VALUE_STEPS = TRANSPOSED ? VALUE_VECTORS / 2 : VALUE_VECTORS * X / 2;  // of 16 rows of Oᵀ
// Of a warp's O, in floats: a row and what shifts banks, or a row of queries, which are there before (see `query_of`).
constexpr int O_ROW = BY_ROWS && 8 * KEY_STEPS > HEAD_DIM + 4 ? 8 * KEY_STEPS : HEAD_DIM + 4;
static_assert((WARP_ROWS == 8 || WARP_ROWS == 16) && QUERY_TYPE != FP32, "what tensor cores take");

// ---- instructions

// d += a b: a is 16 x 16, b 16 x 8. Lane 4g + t has of a rows g and g + 8, columns 2t, 2t + 1 (a[0], a[1]) and 8 more
// to the right (a[2], a[3]); of b rows 2t, 2t + 1 (b[0]) and 8 further down (b[1]) of column g; of d rows g (d[0],
// d[1]) and g + 8 (d[2], d[3]), columns 2t, 2t + 1.
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if QUERY_TYPE == FP16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// ---- a tile

// b of the product for S: eight tokens, and of each lane's keys four numbers.
__device__ __forceinline__ void key_fragment(unsigned (&b)[2], const Keys &keys, int half, int step) {
    const unsigned *const words = keys.of[half * KEY_VECTORS + step / (X / 4)];
    const int part = step % (X / 4);
    if constexpr (BYTES) b[0] = widened(words[part], 0), b[1] = widened(words[part], 1);
    else b[0] = words[part * 2], b[1] = words[part * 2 + 1];
}

// The number of the head that column 2t (+ 1) of a step of Q is, plus 2 for column 2t + 8 (+ 1).
__device__ __forceinline__ int column_of(int step, int t) { return (step / (X / 4) * 4 + t) * X + step % (X / 4) * 4; }

// a of the product for Oᵀ: 16 numbers of the head, and the lane's four tokens.
__device__ __forceinline__ void value_fragment(unsigned (&a)[4], const Values &values, int step) {
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned *const words = values.of[step * 2 + half];
            if constexpr (BYTES) a[half] = widened(words[0], 0), a[half + 2] = widened(words[0], 1);
            else a[half] = words[0], a[half + 2] = words[1];
        }
    } else {
        const int vector = step / (X / 2), pair = step % (X / 2);
#pragma unroll
        for (int both = 0; both < 2; ++both) {  // two neighbours of one token and of another become pairs of tokens
            const unsigned *const one = values.of[2 * both * VALUE_VECTORS + vector];
            const unsigned *const other = values.of[(2 * both + 1) * VALUE_VECTORS + vector];
            if constexpr (BYTES) {
                const unsigned pairs = __byte_perm(one[pair / 2], other[pair / 2], pair % 2 ? 0x7362 : 0x5140);
                a[both * 2] = widened(pairs, 0), a[both * 2 + 1] = widened(pairs, 1);
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

// A row of a piece: where its answer goes, and what it sees.
struct Row {
    long long place;   // see place_of_row
    int position;      // -1: there is no such row
    int block, phase;  // block-sparse: blocks after this one are seen, and those that make a multiple with the phase
    float slope;       // of ALiBi, for scores in powers of two
};
struct __align__(8 * COLUMNS) Query {
    unsigned of[2][COLUMNS];  // a of the product for S, without rows 8 to 15 where those are zeros
};
// A piece in shared memory, as all threads of the block see it.
extern __shared__ __align__(16) float O_of_warps[];  // [WARPS][WARP_ROWS][O_ROW]

struct SharedPiece {
#if !BY_ROWS
    Query query[KEY_STEPS][32];
#endif
    Row rows[ROWS];
    Piece piece;
    Pages pages;
#if TILED
    Item item;                // the piece once more
    int all_from, all_until;  // tokens that all rows see
#else
    int after;  // the number of the piece after this one
#endif
};

// The query tokens of a sequence.
__device__ __forceinline__ int tokens_of(const Decode &a, const Sequence &sequence) {
#if TILED
    return sequence.tokens;
#else
    return a.tokens;
#endif
}
__device__ __forceinline__ int rows_of(const Decode &a, const Sequence &sequence) {
    return tokens_of(a, sequence) * a.group;
}

// The first of a block's rows that is this warp's.
__device__ __forceinline__ int first_row() { return BY_ROWS ? threadIdx.x / 32 * WARP_ROWS : 0; }
// The queries of this warp's rows: with rows of its own, they are where its O will be.
__device__ __forceinline__ Query &query_of(SharedPiece &present, int step) {
#if BY_ROWS
    static_assert(KEY_STEPS * 32 * sizeof(Query) <= WARP_ROWS * O_ROW * 4, "no more than there is room for");
    return reinterpret_cast<Query *>(O_of_warps + first_row() * O_ROW)[step * 32 + lane_of()];
#else
    return present.query[step][lane_of()];
#endif
}

// The rows that a lane asks for: g of each eight.
struct RowsOfLane {
    int row[COLUMNS], token[COLUMNS], head[COLUMNS];
};

__device__ __forceinline__ RowsOfLane rows_of_lane(const Decode &a, const Sequence &sequence) {
    RowsOfLane rows;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int row = rows.row[n] = sequence.row0 + first_row() + n * 8 + lane_g();
        const int token = rows.token[n] = tokens_of(a, sequence) > 1 ? (unsigned)row / (unsigned)a.group : 0;
        rows.head[n] = (sequence.kv_head - token) * a.group + row;
    }
    return rows;
}

// Where a query token of a sequence is, in numbers.
__device__ __forceinline__ long long query_at(const Decode &a, const Sequence &sequence, int token) {
#if TILED && RAGGED
    return (sequence.start + token) * a.query_sequence;
#else
    return sequence.s * a.query_sequence + token * a.query_token;
#endif
}

// A group of copies: the queries. RowsOfLane that there are none of are zero.
__device__ __forceinline__ void ask_for_queries(const Decode &a, const Sequence &sequence, const RowsOfLane &rows,
                                                SharedPiece &present) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const unsigned short *const from =
            static_cast<const unsigned short *>(a.query) + query_at(a, sequence, rows.token[n]);
#pragma unroll
        for (int i = 0; i < ceil_div(KEY_STEPS, TURNS); ++i) {
            const int step = i * TURNS + turn_of_warp(), d = column_of(step, lane_t());
            if (step >= KEY_STEPS) break;
            const bool wanted = rows.row[n] < rows_of(a, sequence) && d < HEAD_DIM;
            unsigned *const to = query_of(present, step).of[0] + n;
            const long long at = wanted ? rows.head[n] * HEAD_DIM + d : 0;
            copy(to, from + at, wanted), copy(to + COLUMNS, from + at + (wanted ? 2 : 0), wanted);
        }
    }
    commit_copies();
}

// Writes what scores depend on besides queries and keys; the first warp with these rows does.
__device__ __forceinline__ void know_rows(const Decode &a, const Sequence &sequence, const RowsOfLane &rows,
                                          SharedPiece &present) {
    if (turn_of_warp() != 0 || lane_t() != 0) return;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int token = rows.token[n], head = rows.head[n];
        const bool there = rows.row[n] < rows_of(a, sequence);
#if TILED
        const int last = RAGGED && !a.causal ? sequence.length - 1 : sequence.length - sequence.tokens + token;
        const long long asker = sequence.start + token;
#else
        const int last = sequence.length - a.tokens + token;
        const long long asker = (long long)sequence.s * a.tokens + token;
#endif
        const int position = there ? last : -1;
        Row &known = present.rows[first_row() + n * 8 + lane_g()];
        known.place = asker * a.heads + head, known.position = position;
        known.slope = a.alibi_slopes && there ? a.alibi_slopes[head] * LOG2E : 0;
        if (a.sparse_stride > 1) {
            known.block = position / a.sparse_block - a.sparse_local;
            known.phase = (slides_of(a, head, sequence.kv_head) + 1) % a.sparse_stride;
        }
    }
}

// Everything that a piece needs besides its tiles. It leaves two groups of copies: the first tiles' pages, and the
// queries.
__device__ __forceinline__ void prepare(const Decode &a, const Piece &piece, SharedPiece &present) {
    const RowsOfLane rows = rows_of_lane(a, piece.of);
    present.pages.start(piece);
    ask_for_queries(a, piece.of, rows, present);
    know_rows(a, piece.of, rows, present);
}

__device__ __forceinline__ bool is_seen(const Decode &a, const Row &row, int token) {
    if (token > row.position || (a.window && row.position - token >= a.window)) return false;
    if (a.sparse_stride <= 1) return true;
    const int block = (unsigned)token / (unsigned)a.sparse_block;
    return block > row.block || ((unsigned)block + row.phase) % (unsigned)a.sparse_stride == 0;
}

// A warp's sum over its tokens so far: a lane has m and l of row g of each eight, l of its own tokens only; of Oᵀ rows
// 2t and 2t + 1.
struct State {
    float m[COLUMNS], l[COLUMNS];
    float o[COLUMNS][VALUE_STEPS][4];

    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            m[n] = NEG_INF, l[n] = 0;
#pragma unroll
            for (int step = 0; step < VALUE_STEPS; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[n][step][i] = 0;
        }
    }
};

// S of a tile: rows g and g + 8, columns 2t and 2t + 1, of eight tokens and of eight more.
struct Scores {
    float of[2][4];
};

__device__ __forceinline__ void multiply_keys(const Keys &keys, SharedPiece &present, Scores &s) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        const Query words = query_of(present, step);
        unsigned q[4] = {};
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) q[i / COLUMNS * 2 + i % COLUMNS] = words.of[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned k[2];
            key_fragment(k, keys, half, step);
            multiply(s.of[half], q, k);
        }
    }
}

// By how much, in powers of two, scores may exceed the maximum that P is taken from before that is renewed: most tiles
// need not rescale O. P has 16 bits, so its largest must stay far from the largest half.
constexpr float SLACK = 8;

// S becomes P, as b of the product for Oᵀ, and the state is that after this tile, but for the product. `whole`: all its
// tokens are the piece's.
__device__ __forceinline__ void softmax(const Decode &a, const SharedPiece &present, Scores &scores, float factor,
                                        int token0, bool whole, State &state, unsigned (&p)[COLUMNS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = score_of(a, scores.of[i / 2][n * 2 + i % 2] * factor);
#if TILED
        const bool all_see = token0 >= present.all_from && token0 + TILE <= present.all_until;
#else
        const bool all_see = a.tokens == 1;
#endif
        if (!whole || !all_see || a.sparse_stride > 1 || a.alibi_slopes) {
            const Row row = present.rows[first_row() + n * 8 + lane_g()];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = token0 + token_of_column(i / 2 * 8 + lane_t() * 2 + i % 2);
                const bool seen = token >= present.piece.first && token < present.piece.end && is_seen(a, row, token);
                s[i] = seen ? fmaf(row.slope, token - row.position, s[i]) : NEG_INF;
            }
        }
        // NaN needs no care here: P and with it l are NaN where a score is.
        float m = quad_max(fmaxf(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), state.m[n]));
        if (m < state.m[n] + SLACK) m = state.m[n];
        const float shift = finite_or_zero(m), rescale = exp2_fast(state.m[n] - shift);
        state.m[n] = m;
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = exp2_fast(s[i] - shift);
        state.l[n] = fmaf(state.l[n], rescale, (s[0] + s[1]) + (s[2] + s[3]));
        if (__any_sync(~0u, rescale != 1)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float of_row = __shfl_sync(~0u, rescale, (lane_t() * 2 + i) * 4);
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; ++step)
                    state.o[n][step][i] *= of_row, state.o[n][step][i + 2] *= of_row;
            }
        }
        p[n][0] = pack(s[0], s[1]), p[n][1] = pack(s[2], s[3]);
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

// The tile at token0, if the piece has one.
__device__ __forceinline__ Tile tile_at(const Pages &pages, const Piece &piece, int token0) {
    return {pages.of_tile(token0), piece.of.kv_head, token0, token0 < piece.end};
}

// A tile's keys and values go into the state, if there is `any`, and those of the next one that the registers are for,
// at token `first` of `of`, are asked for, each as soon as can be. `whole`: all of the tile is the piece's.
__device__ __forceinline__ void take_tile(const Decode &a, SharedPiece &present, const float &factor, int token0,
                                          bool any, bool whole, const SharedPiece &of, int first, Keys &keys,
                                          Values &values, State &state) {
    Scores s = {};
    // Without a tile it is of no use, but a branch would keep addresses from being computed meanwhile. Those of 16
    // pages are too many for that.
    if (PAGE > 1 || any) multiply_keys(keys, present, s);
    const Tile next = tile_at(of.pages, of.piece, first);
    load_keys(a, next, keys);
    if (any) {
        unsigned p[COLUMNS][2];
        softmax(a, present, s, factor, token0, whole, state, p);
        if (!whole) clear(token0, present.piece.first, present.piece.end, values);
        multiply_values(values, p, state);
    }
    load_values(a, next, values);
}

// ---- where warps meet

struct Meeting {
    float m[WARPS][WARP_ROWS], l[WARPS][WARP_ROWS];
};

// The warps' states to shared memory.
__device__ __forceinline__ void hand_in(const State &state, Meeting &meeting, float *O) {
    const int warp = threadIdx.x / 32;
    if (BY_ROWS) __syncwarp();  // all have read the queries, which are overwritten
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const float l = quad_sum(state.l[n]);
        if (lane_t() == 0) meeting.m[warp][n * 8 + lane_g()] = state.m[n], meeting.l[warp][n * 8 + lane_g()] = l;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float *const row = O + (warp * WARP_ROWS + n * 8 + lane_t() * 2 + i) * O_ROW;
            if constexpr (TRANSPOSED) {
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (const int d = number_of(step, lane_g(), half); d < HEAD_DIM)
                            row[d] = state.o[n][step][i + half * 2];
            } else {
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; step += 2)  // whose numbers are neighbours
                    if (const int d = number_of(step, lane_g(), 0); d < HEAD_DIM)
                        *reinterpret_cast<float4 *>(row + d) =
                            make_float4(state.o[n][step][i], state.o[n][step][i + 2], state.o[n][step + 1][i],
                                        state.o[n][step + 1][i + 2]);
            }
        }
    }
}

// The parts of row r that warps have, in their order.
__device__ __forceinline__ Partial sum_of(const Meeting &meeting, const float *O, int r, int quad) {
    Partial sum = nothing(), parts[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int warp = BY_ROWS ? r / WARP_ROWS : turn, of_warp = BY_ROWS ? r % WARP_ROWS : r;
        parts[turn] = {meeting.m[warp][of_warp], meeting.l[warp][of_warp],
                       reinterpret_cast<const float4 *>(O + (warp * WARP_ROWS + of_warp) * O_ROW)[quad]};
    }
    join(sum, parts);
    return sum;
}

// The partial answers of a row in the workspace: as many as it may have pieces.
__device__ __forceinline__ float *partials_of_row(const Decode &a, long long place) {
    return static_cast<float *>(a.workspace) + LAUNCH_COUNTERS + place * most_pieces(a) * PARTIAL;
}

// How many of the block's rows there are.
__device__ __forceinline__ int rows_of_piece(const Decode &a, const Piece &piece) {
    return min(ROWS, rows_of(a, piece.of) - piece.of.row0);
}

// Adds up what the warps have handed in. That is an answer if the piece is all of its sequence, else a partial one,
// which keep(r, quad, sum) puts where it is to be.
template <typename Keep>
__device__ __forceinline__ void store_sums(const Decode &a, const SharedPiece &present, const Meeting &meeting,
                                           const float *O, Keep keep) {
    const int rows = rows_of_piece(a, present.piece);
    for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
        const int r = i / QUADS, quad = i % QUADS;
        const Partial sum = sum_of(meeting, O, r, quad);
        if (present.piece.count == 1) answer_quad(a, present.rows[r].place, quad, sum, v_scale_of(a));
        else keep(r, quad, sum);
    }
}

// `store_sums` with partial answers in the workspace.
__device__ __forceinline__ void store_sums(const Decode &a, const SharedPiece &present, const Meeting &meeting,
                                           const float *O) {
    store_sums(a, present, meeting, O, [&](int r, int quad, const Partial &sum) {
        keep_quad(partials_of_row(a, present.rows[r].place), present.piece.index, quad, sum);
    });
}
