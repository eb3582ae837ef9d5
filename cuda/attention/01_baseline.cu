// Baseline: the five steps of the sequential program as five kernels, launched for each pair of tiles from the host.
//
// What changed: a block for each batch takes the tile pair (tile_i, tile_j): a thread for each of the Br x Bc scores, or for
// each of the Br rows. S, m and l are in the workspace in global memory, O in its place there.
// Why it is faster: a thousand threads a batch instead of one, and all batches at a time.
// What it costs: everything passes through global memory between one kernel and the next, five launches take their time for
// each tile pair, however little work it is, and a batch keeps only one multiprocessor busy.
#include "common.cuh"

static_assert(THREADS == BR * BC, "one thread a score");

// The workspace of a batch: m and l of all rows; of the tile pair, the row maxima, the row sums, and S, later P.
struct Scratch {
    float *m, *l, *tile_max, *tile_sum, *S;
};

__device__ Scratch scratch_of(unsigned char *workspace, int b, int M) {
    float *const m = reinterpret_cast<float *>(workspace) + b * (2LL * M + 2 * BR + BR * BC);
    return {m, m + M, m + 2LL * M, m + 2LL * M + BR, m + 2LL * M + 2 * BR};
}

// S = Q Kᵀ · scale; -inf where a row does not see the key
extern "C" __global__ void scores(ATTENTION_ARGUMENTS) {
    const Scratch scratch = scratch_of(workspace, blockIdx.x, M);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    const long long i = tile_i * BR + r, j = tile_j * BC + c;
    if (i >= M) return;
    float s = NEG_INF;
    if (j < keys_seen(first_row + i, N)) {
        const float *q = Q + blockIdx.x * q_stride + i * HEAD_DIM, *k = K + blockIdx.x * kv_stride + j * HEAD_DIM;
        s = 0;
        for (int x = 0; x < HEAD_DIM; ++x) s += q[x] * k[x];
        s *= scale;
    }
    scratch.S[r * BC + c] = s;
}

extern "C" __global__ void row_max(ATTENTION_ARGUMENTS) {
    const Scratch scratch = scratch_of(workspace, blockIdx.x, M);
    const int r = threadIdx.x;
    if (tile_i * BR + r >= M) return;
    float s = NEG_INF;
    for (int c = 0; c < BC; ++c) s = fmaxf(s, scratch.S[r * BC + c]);
    scratch.tile_max[r] = s;
}

// P = exp(S - max), in the place of S
extern "C" __global__ void minus_max_and_exp(ATTENTION_ARGUMENTS) {
    const Scratch scratch = scratch_of(workspace, blockIdx.x, M);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    if (tile_i * BR + r >= M) return;
    scratch.S[r * BC + c] = expf(scratch.S[r * BC + c] - finite_or_zero(scratch.tile_max[r]));
}

extern "C" __global__ void row_sum(ATTENTION_ARGUMENTS) {
    const Scratch scratch = scratch_of(workspace, blockIdx.x, M);
    const int r = threadIdx.x;
    if (tile_i * BR + r >= M) return;
    float sum = 0;
    for (int c = 0; c < BC; ++c) sum += scratch.S[r * BC + c];
    scratch.tile_sum[r] = sum;
}

// O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l. A thread has every Bc-th column of a row.
extern "C" __global__ void update(ATTENTION_ARGUMENTS) {
    const Scratch scratch = scratch_of(workspace, blockIdx.x, M);
    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    const long long i = tile_i * BR + r;
    V += blockIdx.x * kv_stride + (long long)tile_j * BC * HEAD_DIM, O += ((long long)blockIdx.x * M + i) * HEAD_DIM;

    float m_new, l_new;
    if (i < M) {
        const float m = tile_j == 0 ? NEG_INF : scratch.m[i], l = tile_j == 0 ? 0 : scratch.l[i];
        m_new = fmaxf(m, scratch.tile_max[r]);
        const float old_weight = expf(m - finite_or_zero(m_new)) * l;
        const float new_weight = expf(scratch.tile_max[r] - finite_or_zero(m_new));
        l_new = old_weight + new_weight * scratch.tile_sum[r];
        for (int x = c; x < HEAD_DIM; x += BC) {
            float PV = 0;  // of this tile alone, from zero: rounding errors do not grow with N
            for (int j = 0; j < min(BC, N - tile_j * BC); ++j) PV += scratch.S[r * BC + j] * V[j * HEAD_DIM + x];
            O[x] = ((l == 0 ? 0 : old_weight * O[x]) + new_weight * PV) / l_new;  // l = 0: there is no O yet
        }
    }
    __syncthreads();  // all have read the old m and l
    if (i < M && c == 0) scratch.m[i] = m_new, scratch.l[i] = l_new;
}
