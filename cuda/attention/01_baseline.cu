// Baseline: the five steps of the sequential program as five kernels, launched for each pair of tiles from the host.
//
// What changed: a block for each batch takes the tile pair (tile_i, tile_j): a thread for each of the Br x Bc scores,
// or for each of the Br rows. S, m and l are in the workspace in global memory, O in its place there.
// Why it is faster: a thousand threads a batch instead of one, and all batches at a time.
// What it costs: everything passes through global memory between one kernel and the next, five launches take their time
// for each tile pair, however little work it is, and a batch keeps only one multiprocessor busy.
#include "attention.cuh"

static_assert(THREADS == BR * BC, "one thread a score");

// The workspace of a batch: m and l of all rows; of the tile pair, the row maxima, the row sums, and S, later P.
struct Scratch {
    float *m, *l, *tile_max, *tile_sum, *S;
};

__device__ Scratch scratch_of(const Attention &a, long long b) {
    float *const m = reinterpret_cast<float *>(a.workspace) + b * (2LL * a.M + 2 * BR + BR * BC);
    return {m, m + a.M, m + 2LL * a.M, m + 2LL * a.M + BR, m + 2LL * a.M + 2 * BR};
}

// S = Q Kᵀ · scale; -inf where a row does not see the key
extern "C" __global__ void scores(const Attention a) {
    const Scratch scratch = scratch_of(a, blockIdx.x);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    const long long i = a.tile_i * BR + r, j = a.tile_j * BC + c;
    if (i >= a.M) return;
    float s = NEG_INF;
    if (j < keys_seen(a.q_start + i, a.N)) {
        const float *q = batch_of(a, blockIdx.x).Q + i * HEAD_DIM, *k = batch_of(a, blockIdx.x).K + j * HEAD_DIM;
        s = 0;
        for (int x = 0; x < HEAD_DIM; ++x) s += q[x] * k[x];
        s *= a.scale;
    }
    scratch.S[r * BC + c] = s;
}

extern "C" __global__ void row_max(const Attention a) {
    const Scratch scratch = scratch_of(a, blockIdx.x);
    const int r = threadIdx.x;
    if (a.tile_i * BR + r >= a.M) return;
    float s = NEG_INF;
    for (int c = 0; c < BC; ++c) s = fmaxf(s, scratch.S[r * BC + c]);
    scratch.tile_max[r] = s;
}

// P = exp(S - max), in the place of S
extern "C" __global__ void minus_max_and_exp(const Attention a) {
    const Scratch scratch = scratch_of(a, blockIdx.x);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    if (a.tile_i * BR + r >= a.M) return;
    scratch.S[r * BC + c] = expf(scratch.S[r * BC + c] - finite_or_zero(scratch.tile_max[r]));
}

extern "C" __global__ void row_sum(const Attention a) {
    const Scratch scratch = scratch_of(a, blockIdx.x);
    const int r = threadIdx.x;
    if (a.tile_i * BR + r >= a.M) return;
    float sum = 0;
    for (int c = 0; c < BC; ++c) sum += scratch.S[r * BC + c];
    scratch.tile_sum[r] = sum;
}

// O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l. A thread has every Bc-th column of a row.
extern "C" __global__ void update(const Attention a) {
    const Scratch scratch = scratch_of(a, blockIdx.x);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    const long long i = a.tile_i * BR + r;
    const float *const V = batch_of(a, blockIdx.x).V + (long long)a.tile_j * BC * HEAD_DIM;
    float *const O = batch_of(a, blockIdx.x).O + i * HEAD_DIM;

    float m_new, l_new;
    if (i < a.M) {
        const float m = a.tile_j == 0 ? NEG_INF : scratch.m[i], l = a.tile_j == 0 ? 0 : scratch.l[i];
        m_new = fmaxf(m, scratch.tile_max[r]);
        const float old_weight = expf(m - finite_or_zero(m_new)) * l;
        const float new_weight = expf(scratch.tile_max[r] - finite_or_zero(m_new));
        l_new = old_weight + new_weight * scratch.tile_sum[r];
        for (int x = c; x < HEAD_DIM; x += BC) {
            float PV = 0;  // of this tile alone, from zero: rounding errors do not grow with N
            for (int j = 0; j < min(BC, a.N - a.tile_j * BC); ++j) PV += scratch.S[r * BC + j] * V[j * HEAD_DIM + x];
            O[x] = ((l == 0 ? 0 : old_weight * O[x]) + new_weight * PV) / l_new;  // l = 0: there is no O yet
        }
    }
    __syncthreads();  // all have read the old m and l
    if (i < a.M && c == 0) scratch.m[i] = m_new, scratch.l[i] = l_new;
}
