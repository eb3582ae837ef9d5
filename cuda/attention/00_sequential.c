// Sequential: plain C on one CPU core, the zero point of the ladder.
//
// What it does: algorithm 1 of the FlashAttention paper (arXiv 2205.14135). Q is cut into tiles of Br rows, K and V
// into tiles of Bc rows; each pair of tiles takes five steps, a function each: the scores S, the largest score of each
// row, P = exp(S - max), the sum of each row of P, and the update of the running row maxima m, row sums l and output O.
// Why in tiles, where a plain loop over rows would do: the steps and the tiles are those of the kernels after it, so
// that the next file differs only in who does the work; and a tile of K and V stays in the first-level cache for Br
// rows.
// What it costs: a dot product adds one product at a time, since without -ffast-math C keeps the order of additions.
// The sums of P V run along a row of V, where the compiler may use vector instructions.
#include "arguments.h"

#include <math.h>

enum { d = HEAD_DIM };

static int min(int a, int b) { return a < b ? a : b; }

// How many keys, of N, the query at a position in the sequence sees: keys 0 to that many - 1.
static int keys_seen(int position, int N) { return CAUSAL ? min(N, position + 1) : N; }

// The value to subtract from scores whose maximum is m. Where all are -inf, subtracting -inf would make NaN of what
// must be exp(-inf) = 0.
static float finite_or_zero(float m) { return m == -INFINITY ? 0 : m; }

// S = Q Kᵀ · scale; -inf where a row, at its position in the sequence, does not see the key
static void scores(const float *Q, const float *K, float S[BR][BC], int rows, int position, int j0, int N,
                   float scale) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < BC; ++c) {
            S[r][c] = -INFINITY;
            if (j0 + c >= keys_seen(position + r, N)) continue;
            const float *q = Q + r * d, *k = K + c * d;
            float sum = 0;
            for (int x = 0; x < d; ++x) sum += q[x] * k[x];
            S[r][c] = sum * scale;
        }
}

static void row_max(float S[BR][BC], float tile_max[BR], int rows) {
    for (int r = 0; r < rows; ++r) {
        tile_max[r] = -INFINITY;
        for (int c = 0; c < BC; ++c)
            if (S[r][c] > tile_max[r]) tile_max[r] = S[r][c];
    }
}

// P = exp(S - max), in the place of S
static void minus_max_and_exp(float S[BR][BC], const float tile_max[BR], int rows) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < BC; ++c) S[r][c] = expf(S[r][c] - finite_or_zero(tile_max[r]));
}

static void row_sum(float P[BR][BC], float tile_sum[BR], int rows) {
    for (int r = 0; r < rows; ++r) {
        tile_sum[r] = 0;
        for (int c = 0; c < BC; ++c) tile_sum[r] += P[r][c];
    }
}

// O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l
static void update(float P[BR][BC], const float *V, const float tile_max[BR], const float tile_sum[BR], float m[BR],
                   float l[BR], float *O, int rows, int keys) {
    for (int r = 0; r < rows; ++r) {
        const float m_new = tile_max[r] > m[r] ? tile_max[r] : m[r];
        const float old_weight = expf(m[r] - finite_or_zero(m_new)) * l[r];
        const float new_weight = expf(tile_max[r] - finite_or_zero(m_new));
        const float l_new = old_weight + new_weight * tile_sum[r];
        float PV[d] = {0};  // of this tile alone, from zero: rounding errors do not grow with N
        for (int c = 0; c < keys; ++c)
            for (int x = 0; x < d; ++x) PV[x] += P[r][c] * V[c * d + x];
        float *o = O + r * d;
        for (int x = 0; x < d; ++x) o[x] = ((l[r] == 0 ? 0 : old_weight * o[x]) + new_weight * PV[x]) / l_new;
        m[r] = m_new;
        l[r] = l_new;
    }
}

_Static_assert(sizeof(Attention) == ARGUMENT_BYTES, "as flashcli/kernels/arguments.py packs them");

// A single head, whose rows follow one another.
void attention(Attention a) {
    float S[BR][BC], tile_max[BR], tile_sum[BR], m[BR], l[BR];
    for (int b = 0; b < a.B; ++b) {
        const float *Q = a.Q + b * a.q.batch, *K = a.K + b * a.k.batch, *V = a.V + b * a.v.batch;
        float *O = a.O + b * a.o.batch;
        for (int i0 = 0; i0 < a.M; i0 += BR) {
            const int rows = min(BR, a.M - i0), position = a.q_start + i0;
            const long long i = (long long)i0 * d;
            for (int r = 0; r < BR; ++r) m[r] = -INFINITY, l[r] = 0;
            for (int j0 = 0; j0 < keys_seen(position + rows - 1, a.N); j0 += BC) {
                const long long j = (long long)j0 * d;
                scores(Q + i, K + j, S, rows, position, j0, a.N, a.scale);
                row_max(S, tile_max, rows);
                minus_max_and_exp(S, tile_max, rows);
                row_sum(S, tile_sum, rows);
                update(S, V + j, tile_max, tile_sum, m, l, O + i, rows, min(BC, a.N - j0));
            }
        }
    }
}
