// The formulas as they stand, tile by tile: the backward kernel for any GPU.
//
// What it computes, for each pair of a tile of Br queries and one of Bc keys: S = scale Q Kᵀ, P = exp(S - LSE), dP = dO
// Vᵀ, dS = P (dP - D), and then dQ += scale dS K, dK += scale dSᵀ Q, dV += Pᵀ dO. The first four are computed twice:
// once by blocks that own a tile of queries and meet all tiles of keys (`dq`), once by blocks that own keys and meet
// all queries (`dk_dv`). So each block adds up what it owns by itself, in one order: the answer is the same every time.
// What it costs: a thread owns one score, then some elements of the sums, and reads two numbers of shared memory for
// each FFMA; and seven products where five would do, with additions to memory in any order, plus one to mend D with.
//
// Accuracy: each tile's sums start from zero, as do those of eight products in a score.
#include "backward.cuh"

static_assert(THREADS == BR * BC, "a thread a score");
static_assert(SHARED == 4 * (2 * (BR + BC) * (HEAD_DIM + 1) + 2 * BR * (BC + 1)), "room for these");
constexpr int EACH = ceil_div(HEAD_DIM, BC < BR ? BC : BR);  // elements of a sum that a thread owns, at most

// Lines of shared memory are one float longer, so that a column's elements are in different banks.
typedef float Line[HEAD_DIM + 1];
struct Tiles {
    Line Q[BR], dO[BR], K[BC], V[BC];
    float P[BR][BC + 1], dS[BR][BC + 1];
};
extern __shared__ float shared[];

// Rows `first` on of a matrix; zeros beyond its end.
template <class Number>
__device__ void load(Line *to, int count, const Number *matrix, long long stride, int first, int rows) {
    for (int e = threadIdx.x; e < count * HEAD_DIM; e += THREADS) {
        const int r = e / HEAD_DIM, x = e % HEAD_DIM;
        to[r][x] = first + r < rows ? float(matrix[(first + r) * stride + x]) : 0;
    }
}

template <class Left, class Right>
__device__ float dot(const Left *x, const Right *y) {
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < HEAD_DIM; first += 8) {
        float part = 0;
        for (int c = first; c < min(first + 8, HEAD_DIM); ++c) part += float(x[c]) * float(y[c]);
        sum += part;
    }
    return sum;
}

// P and dS of the pair of tiles at (i0, j0), a score a thread; with `all` that `dq` has found of a row.
__device__ void scores(const Backward &a, Tiles &t, Head head, int i0, int j0, bool all) {
    const int r = threadIdx.x / BC, c = threadIdx.x % BC, i = i0 + r, j = j0 + c;
    float p = 0, ds = 0;
    if (i < a.M && j < a.N) {
        const Row row = row_of(a, head, i);
        p = dot(t.Q[r], t.K[c]), ds = dot(t.dO[r], t.V[c]);
        p_and_ds(p, ds, a.scale * LOG2E, row.above, all ? row.mended : row.D, bias_of(a, head, i, j), sees(a, i, j), 1,
                 all ? row.inverse : 1);
    }
    t.P[r][c] = p, t.dS[r][c] = ds;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq(const Backward all) {
    Tiles &t = *reinterpret_cast<Tiles *>(shared);
    const int Tr = tiles_of_head<false>(all, BR);
    const Backward &a = of_tile<false>(all, BR, blockIdx.x % Tr);
    if (!has_tile(a)) return;
    const int i0 = tile_with(a, blockIdx.x % Tr) * BR;
    const Head head = head_of(a, blockIdx.x / Tr);
    const Input *const K = rows_of(a.K, a.k, head.b, head.kv), *const V = rows_of(a.V, a.v, head.b, head.kv);
    load(t.Q, BR, rows_of(a.Q, a.q, head.b, head.h), a.q.row, i0, a.M);
    load(t.dO, BR, rows_of(a.dO, a.d_o, head.b, head.h), a.d_o.row, i0, a.M);

    // This thread's elements of dS K and P K: row r, columns c, c + Bc, ..
    const int r = threadIdx.x / BC, c = threadIdx.x % BC, i = i0 + r;
    float dS_K[EACH] = {}, P_K[EACH] = {}, total = 0, sum_ds = 0;
    const int keys = keys_seen(a, min(i0 + BR, a.M) - 1);  // that some row of this tile sees
    for (int j0 = keys_hidden(a, i0) / BC * BC; j0 < keys; j0 += BC) {
        load(t.K, BC, K, a.k.row, j0, a.N);
        load(t.V, BC, V, a.v.row, j0, a.N);
        __syncthreads();
        scores(a, t, head, i0, j0, false);
        __syncthreads();
        float p = 0, ds = 0;
        for (int j = 0; j < BC; ++j) p += t.P[r][j], ds += t.dS[r][j];
        total += p, sum_ds += ds;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int x = c + e * BC;
            if (x >= HEAD_DIM) break;
            float of_ds = 0, of_p = 0;
            for (int j = 0; j < min(BC, a.N - j0); ++j) {
                if (is_hidden(t.P[r][j])) continue;  // 0 times a K that is not finite would be NaN
                of_ds += t.dS[r][j] * t.K[j][x];
                of_p += t.P[r][j] * t.K[j][x];
            }
            dS_K[e] += of_ds, P_K[e] += of_p;
        }
        __syncthreads();
    }
    if (i >= a.M) return;
    Row &kept = row_of(a, head, i);
    const Found found(a, head, i, kept.above, total, sum_ds);
    Gradient *const row = rows_of(a.dQ, a.dq, head.b, head.h) + i * a.dq.row;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (c + e * BC < HEAD_DIM)
            row[c + e * BC] = found.inverse == 0 ? 0 : a.scale * found.inverse * (dS_K[e] - found.error * P_K[e]);
    if (c == 0) found.keep(kept);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dk_dv(const Backward all) {
    Tiles &t = *reinterpret_cast<Tiles *>(shared);
    const int Tc = tiles_of_head<true>(all, BC);
    const Backward &a = of_tile<true>(all, BC, blockIdx.x % Tc);
    if (!has_tile(a)) return;
    const int j0 = tile_with(a, blockIdx.x % Tc) * BC, group = a.H / a.Hkv;
    const int b = blockIdx.x / Tc / a.Hkv, kv = blockIdx.x / Tc % a.Hkv;
    load(t.K, BC, rows_of(a.K, a.k, b, kv), a.k.row, j0, a.N);
    load(t.V, BC, rows_of(a.V, a.v, b, kv), a.v.row, j0, a.N);

    const int r = threadIdx.x / BR, c = threadIdx.x % BR;  // a key, and columns c, c + Br, .. of its dK and dV
    float dK[EACH] = {}, dV[EACH] = {};
    for (int h = kv * group; h < (kv + 1) * group; ++h)
        for (int i0 = first_query(a, j0) / BR * BR; i0 < end_query(a, j0 + BC - 1); i0 += BR) {
            load(t.Q, BR, rows_of(a.Q, a.q, b, h), a.q.row, i0, a.M);
            load(t.dO, BR, rows_of(a.dO, a.d_o, b, h), a.d_o.row, i0, a.M);
            __syncthreads();
            scores(a, t, {b, h, kv}, i0, j0, true);
            __syncthreads();
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int x = c + e * BR;
                if (x >= HEAD_DIM) break;
                float of_k = 0, of_v = 0;
                for (int i = 0; i < min(BR, a.M - i0); ++i) {
                    if (is_hidden(t.P[i][r])) continue;
                    of_k += t.dS[i][r] * t.Q[i][x];
                    of_v += t.P[i][r] * t.dO[i][x];
                }
                dK[e] += of_k, dV[e] += of_v;
            }
            __syncthreads();
        }
    if (j0 + r >= a.N) return;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int x = c + e * BR;
        if (x >= HEAD_DIM) break;
        rows_of(a.dK, a.dk, b, kv)[(j0 + r) * a.dk.row + x] = a.scale * dK[e];
        rows_of(a.dV, a.dv, b, kv)[(j0 + r) * a.dv.row + x] = dV[e];
    }
}

// dbias is dS, summed over the axes that it has not: a thread an element, each axis a sum of its own.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dbias(const Backward a) {
    const Strides at = a.dbias_at;
    const int B = at.batch ? a.B : 1, H = at.head ? a.H : 1, M = at.row ? a.M : 1, N = a.dbias_column ? a.N : 1;
    long long e = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (e >= (long long)B * H * M * N) return;
    const int j = e % N, i = e / N % M, h = e / N / M % H, b = e / N / M / H;
    float of_batches = 0;
    for (int y = b; y < (at.batch ? b + 1 : a.B); ++y) {
        float of_heads = 0;
        for (int z = h; z < (at.head ? h + 1 : a.H); ++z) {
            const Head head = {y, z, z / (a.H / a.Hkv)};
            float of_rows = 0;
            for (int r = i; r < (at.row ? i + 1 : a.M); ++r) {
                const Row row = row_of(a, head, r);
                const Input *const q = rows_of(a.Q, a.q, y, z) + r * a.q.row;
                const Answer *const d_o = rows_of(a.dO, a.d_o, y, z) + r * a.d_o.row;
                float of_keys = 0;
                for (int c = j; c < (a.dbias_column ? j + 1 : keys_seen(a, r)); ++c) {
                    float p = dot(q, rows_of(a.K, a.k, y, head.kv) + c * a.k.row);
                    float ds = dot(d_o, rows_of(a.V, a.v, y, head.kv) + c * a.v.row);
                    p_and_ds(p, ds, a.scale * LOG2E, row.above, row.mended, bias_of(a, head, r, c), sees(a, r, c), 1,
                             row.inverse);
                    of_keys += ds;
                }
                of_rows += of_keys;
            }
            of_heads += of_rows;
        }
        of_batches += of_heads;
    }
    a.dbias[b * at.batch + h * at.head + i * at.row + j * a.dbias_column] = of_batches;
}
