// Register tiles: FFMA near its full rate.
//
// What changed: a thread owns a register tile of scores, OWN_ROWS x PASS_ROWS, instead of one, and afterwards a
// register tile of each sum, as in the attention kernel of this name. Both passes are the same block: it owns OWN rows
// of two matrices (`dq`: of Q and dO; `dk_dv`: of K and V), of which the others pass by, PASS rows at a time. X = own1
// pass1ᵀ are the scores and own2 pass2ᵀ their dP; P and dS change owners in shared memory; then sum1 += dS pass1 (dQ,
// or dK), and sum2 += P pass2 (dV), or P pass1, which is what dQ is mended with.
// Why it is faster: one 16-byte read of shared memory feeds 10 to 21 FFMA instead of 2; a float4 goes to shared memory
// by cp.async, past the registers.
// What it costs: 96 KB of shared memory a block and up to 255 registers a thread: two blocks a multiprocessor, of which
// one multiplies while the other waits for its tile.
//
// Accuracy: a score adds up eight products at a time, each eight from zero, and each tile's sums start from zero.
#include "register_tiles.cuh"

static_assert(SHARED == 16 * 2 * (OWN_SIZE + PASS_SIZE + SCORES), "room for these");

// The first sum += x1 pass1, the second += x2 pass2, both from zero. The thread's columns are 4 * across + 32 * (y / 4)
// + y % 4, SOME columns of the tile at a time, for which there are registers. SPARED: what x2, which is P, says to be
// hidden meets nothing, for something is not finite.
template <bool SAME, bool SPARED = false>
__device__ __forceinline__ void accumulate(Sum &first, Sum &second, const float4 *x1, const float4 *x2,
                                           const float4 *pass1, const float4 *pass2, const Thread &t) {
    constexpr int SOME = COLUMNS % 8 == 0 ? 8 : 4;
    const int x_at = t.r0 * (PASS / 4), swizzle = swizzle_own(t.r0);
#pragma unroll
    for (int from = 0; from < COLUMNS; from += SOME) {
        float sum[2][OWN_ROWS][SOME] = {};
#pragma unroll 1
        for (int c = 0; c < PASS / 4; ++c) {
            float4 left[2][OWN_ROWS];
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) {
                left[0][i] = x1[x_at + i * (PASS / 4) + (c ^ swizzle)];
                left[1][i] = x2[x_at + i * (PASS / 4) + (c ^ swizzle)];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int y = 0; y < SOME; y += 4) {
                    const int at = (4 * c + j) * CHUNKS + ((t.across + 2 * (from + y)) ^ swizzle_pass(4 * c));
                    const float4 right1 = pass1[at], right2 = SAME ? right1 : pass2[at];
#pragma unroll
                    for (int z = 0; z < 4; ++z)
#pragma unroll
                        for (int i = 0; i < OWN_ROWS; ++i) {
                            if (SPARED && is_hidden(part(left[1][i], j))) continue;
                            float &sum1 = sum[0][i][y + z], &sum2 = sum[1][i][y + z];
                            sum1 = fmaf(part(left[0][i], j), part(right1, z), sum1);
                            sum2 = fmaf(part(left[1][i], j), part(right2, z), sum2);
                        }
                }
        }
#pragma unroll
        for (int e = 0; e < OWN_ROWS * SOME; ++e) {
            first[e / SOME][from + e % SOME] += sum[0][e / SOME][e % SOME];
            second[e / SOME][from + e % SOME] += sum[1][e / SOME][e % SOME];
        }
    }
}

struct Shared {
    float4 *const own1 = shared, *const own2 = own1 + OWN_SIZE, *const pass1 = own2 + OWN_SIZE,
                  *const pass2 = pass1 + PASS_SIZE, *const P = pass2 + PASS_SIZE, *const dS = P + SCORES;
};

// The tiles of all heads, `of_head` each, by blocks of which there may be fewer: what another kernel leaves is mostly
// nothing.
template <bool OF_KEYS, class Compute>
__device__ __forceinline__ void for_each_tile(const Backward &all, unsigned heads, Compute compute) {
    if (none_is_wanted(all)) return;
    const unsigned of_head = tiles_of_head<OF_KEYS>(all, OWN);
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < heads * of_head; tile += gridDim.x) {
        const Backward &a = of_tile<OF_KEYS>(all, OWN, tile % of_head);
        if (has_tile(a)) compute(a, tile / of_head, tile_with(a, tile % of_head));
        __syncthreads();
    }
}

__device__ __forceinline__ void dq_of(const Backward &a, int index, int tile) {
    const Shared at;
    const Thread t;
    const int i0 = (CAUSAL ? ceil_div(a.M, OWN) - 1 - tile : tile) * OWN;  // causal: the longest rows first
    const Head head = head_of(a, index);
    if (!is_wanted(a, head.b, head.kv)) return;
    const Input *const K = rows_of(a.K, a.k, head.b, head.kv), *const V = rows_of(a.V, a.v, head.b, head.kv);
    copy_own(at.own1, rows_of(a.Q, a.q, head.b, head.h), a.q.row, i0, a.M);
    copy_own(at.own2, rows_of(a.dO, a.d_o, head.b, head.h), a.d_o.row, i0, a.M);

    Sum dS_K = {}, P_K = {};
    float above[OWN_ROWS], D_[OWN_ROWS], total[OWN_ROWS] = {}, sum_ds[OWN_ROWS] = {};
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        const Row row = row_of(a, head, min(i0 + t.r0 + i, a.M - 1));
        above[i] = row.above, D_[i] = row.D;
    }
    const int keys = keys_seen(a, min(i0 + OWN, a.M) - 1);  // that some row of this tile sees
#pragma unroll 1
    for (int j0 = keys_hidden(a, i0) / PASS * PASS; j0 < keys; j0 += PASS) {
        copy_pass(at.pass1, K, a.k.row, j0, a.N);
        copy_pass(at.pass2, V, a.v.row, j0, a.N);
        await_tiles();
        Scores p, ds;
        multiply(p, at.own1, at.pass1, t);
        multiply(ds, at.own2, at.pass2, t);
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int row = i0 + t.r0 + i, seen = keys_seen(a, row), hidden = keys_hidden(a, row);
            float of_p = 0, of_ds = 0;
#pragma unroll
            for (int j = 0; j < PASS_ROWS; ++j) {
                if (READS && HIDES && j % 4 == 0 && never(j)) break;  // biases are fetched by fours
                const int key = j0 + t.passing(j);
                p_and_ds(p[i][j], ds[i][j], a.scale * LOG2E, above[i], D_[i], bias_of(a, head, row, key),
                         key < seen && (!WINDOW || key >= hidden));
                of_p += p[i][j], of_ds += ds[i][j];
            }
            total[i] += of_p, sum_ds[i] += of_ds;
        }
        store(at.P, p, t);
        store(at.dS, ds, t);
        __syncthreads();
        if (BIAS && are_spoilt(at.pass1, at.pass1))
            accumulate<true, true>(dS_K, P_K, at.dS, at.P, at.pass1, at.pass1, t);
        else accumulate<true>(dS_K, P_K, at.dS, at.P, at.pass1, at.pass1, t);
        __syncthreads();
    }
    if (keys == 0 || WINDOW) await_tiles();
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        total[i] = across(total[i]), sum_ds[i] = across(sum_ds[i]);
        const int row = i0 + t.r0 + i;
        if (row >= a.M) continue;
        const Found found(a, head, row, above[i], total[i], sum_ds[i]);
#pragma unroll
        for (int y = 0; y < COLUMNS; ++y)
            dS_K[i][y] = found.inverse == 0 ? 0 : fmaf(-found.error, P_K[i][y], dS_K[i][y]);
        write(rows_of(a.dQ, a.dq, head.b, head.h) + row * a.dq.row, dS_K[i], a.scale * found.inverse, t);
        if (t.across == 0) found.keep(row_of(a, head, row));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq(const Backward a) {
    for_each_tile<false>(a, a.B * a.H, dq_of);
}

__device__ __forceinline__ void dk_dv_of(const Backward &a, int index, int tile) {
    const Shared at;
    const Thread t;
    const int j0 = tile * OWN, group = a.H / a.Hkv, b = index / a.Hkv, kv = index % a.Hkv;
    if (!is_wanted(a, b, kv)) return;
    copy_own(at.own1, rows_of(a.K, a.k, b, kv), a.k.row, j0, a.N);
    copy_own(at.own2, rows_of(a.V, a.v, b, kv), a.v.row, j0, a.N);

    Sum dK = {}, dV = {};
#pragma unroll 1
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
        const Head head = {b, h, kv};
        const Input *const Q = rows_of(a.Q, a.q, b, h);
        const Answer *const dO = rows_of(a.dO, a.d_o, b, h);
#pragma unroll 1
        for (int i0 = first_query(a, j0) / PASS * PASS; i0 < end_query(a, j0 + OWN - 1); i0 += PASS) {
            copy_pass(at.pass1, Q, a.q.row, i0, a.M);
            copy_pass(at.pass2, dO, a.d_o.row, i0, a.M);
            await_tiles();
            Scores p, ds;
            multiply(p, at.own1, at.pass1, t);
            multiply(ds, at.own2, at.pass2, t);
#pragma unroll
            for (int j = 0; j < PASS_ROWS; ++j) {
                const int row = i0 + t.passing(j), there = min(row, a.M - 1), seen = row < a.M ? keys_seen(a, row) : 0;
                const int hidden = keys_hidden(a, row);
                const Row kept = row_of(a, head, there);
#pragma unroll
                for (int i = 0; i < OWN_ROWS; ++i) {
                    if (READS && HIDES && i % 4 == 0 && never(i)) break;
                    const int key = j0 + t.r0 + i;
                    p_and_ds(p[i][j], ds[i][j], a.scale * LOG2E, kept.above, kept.mended, bias_of(a, head, row, key),
                             key < seen && (!WINDOW || key >= hidden), 1, kept.inverse);
                }
            }
            store(at.P, p, t);
            store(at.dS, ds, t);
            __syncthreads();
            if (BIAS && are_spoilt(at.pass1, at.pass2))
                accumulate<false, true>(dK, dV, at.dS, at.P, at.pass1, at.pass2, t);
            else accumulate<false>(dK, dV, at.dS, at.P, at.pass1, at.pass2, t);
            __syncthreads();
        }
    }
    await_tiles();
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        const int key = j0 + t.r0 + i;
        if (key >= a.N) continue;
        write(rows_of(a.dK, a.dk, b, kv) + key * a.dk.row, dK[i], a.scale, t);
        write(rows_of(a.dV, a.dv, b, kv) + key * a.dv.row, dV[i], 1, t);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dk_dv(const Backward a) {
    for_each_tile<true>(a, a.B * a.Hkv, dk_dv_of);
}

// dbias is dS, summed over the axes that it has not: a block a tile of it, OWN x PASS, or of the rows or keys that it
// has.
__device__ __forceinline__ void dbias_of(const Backward &a) {
    if (!BIAS) return;  // it is not launched: so that nothing is compiled, which takes as long as `dq`
    const Shared at;
    const Thread t;
    const Strides by = a.dbias_at;
    const bool of_rows = by.row, of_keys = a.dbias_column;
    const int H = by.head ? a.H : 1, Tr = of_rows ? ceil_div(a.M, OWN) : 1, Tc = of_keys ? ceil_div(a.N, PASS) : 1;
    unsigned index = blockIdx.x;
    const int tile_j = index % Tc, tile_i = (index /= Tc) % Tr, first_h = (index /= Tr) % H, first_b = index / H;
    const int i_end = of_rows ? min(a.M, (tile_i + 1) * OWN) : a.M, j_end = of_keys ? (tile_j + 1) * PASS : a.N;

    Scores sum = {};
#pragma unroll 1
    for (int b = first_b; b < (by.batch ? first_b + 1 : a.B); ++b)
#pragma unroll 1
        for (int h = first_h; h < (by.head ? first_h + 1 : a.H); ++h) {
            const Head head = {b, h, h / (a.H / a.Hkv)};
            Scores of_head = {};
#pragma unroll 1
            for (int i0 = tile_i * OWN; i0 < i_end; i0 += OWN) {
                const int keys = min(j_end, keys_seen(a, min(i0 + OWN, a.M) - 1));
#pragma unroll 1
                for (int j0 = tile_j * PASS; j0 < keys; j0 += PASS) {
                    copy_own(at.own1, rows_of(a.Q, a.q, b, h), a.q.row, i0, a.M);
                    copy_own(at.own2, rows_of(a.dO, a.d_o, b, h), a.d_o.row, i0, a.M);
                    copy_pass(at.pass1, rows_of(a.K, a.k, b, head.kv), a.k.row, j0, a.N);
                    copy_pass(at.pass2, rows_of(a.V, a.v, b, head.kv), a.v.row, j0, a.N);
                    await_tiles();
                    Scores p, ds;
                    multiply(p, at.own1, at.pass1, t);
                    multiply(ds, at.own2, at.pass2, t);
                    __syncthreads();
#pragma unroll
                    for (int i = 0; i < OWN_ROWS; ++i) {
                        const int row = i0 + t.r0 + i, there = min(row, a.M - 1);
                        const int seen = row < a.M ? keys_seen(a, row) : 0;
                        const Row kept = row_of(a, head, there);
#pragma unroll
                        for (int j = 0; j < PASS_ROWS; ++j) {
                            if (READS && HIDES && j % 4 == 0 && never(j)) break;
                            const int key = j0 + t.passing(j);
                            p_and_ds(p[i][j], ds[i][j], a.scale * LOG2E, kept.above, kept.mended,
                                     bias_of(a, head, row, key), key < seen && (!WINDOW || key >= a.first + row), 1,
                                     kept.inverse);
                            of_head[i][j] += ds[i][j];
                        }
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < OWN_ROWS * PASS_ROWS; ++e)
                sum[e / PASS_ROWS][e % PASS_ROWS] += of_head[e / PASS_ROWS][e % PASS_ROWS];
        }

    // OWN x PASS numbers are left to be summed in this block: thread e sums up those of element e.
    float *const sums = reinterpret_cast<float *>(at.P);
    store(at.P, sum, t);
    __syncthreads();
    const int rows = of_rows ? OWN : 1, columns = of_keys ? PASS : 1;
    for (int e = threadIdx.x; e < rows * columns; e += THREADS) {
        const int r = e / columns, c = e % columns, i = tile_i * OWN + r, j = tile_j * PASS + c;
        if (i >= (of_rows ? a.M : 1) || j >= (of_keys ? a.N : 1)) continue;
        float of_element = 0;
        for (int x = r; x < (of_rows ? r + 1 : OWN); ++x)
            for (int y = c; y < (of_keys ? c + 1 : PASS); ++y)
                of_element += sums[x * PASS + ((y / 4 ^ swizzle_own(x)) * 4 + y % 4)];
        a.dbias[first_b * by.batch + first_h * by.head + i * by.row + j * a.dbias_column] = of_element;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dbias(const Backward a) { dbias_of(a); }

// dbias once more, where something is not finite and another kernel has split it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dbias_again(const Backward a) {
    if (!none_is_wanted(a)) dbias_of(a);
}
