// Split Q: a block for each tile of Q, where there was one for each batch.
//
// What changed: the loop over tiles of Q is gone. Block number b * Tr + i takes tile i of batch b: a grid of B x Tr
// blocks, each of which goes over the tiles of K and V.
// Why it is faster: rows of Q do not depend on each other, so a batch can keep Tr multiprocessors busy, not one. A few
// batches of long sequences were the worst case, and are now as good as many short ones.
// What it costs: K and V are read by Tr blocks, which the second-level cache must make up for.
#include "attention.cuh"

static_assert(THREADS == BR, "one thread a row");
static_assert(BC <= THREADS, "one thread a row of K and V, in copying");
static_assert((BR * HEAD_DIM + 2 * BC * HEAD_DIM + BR * BC) * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    const int M = a.M, N = a.N;
    __shared__ float Qi[BR][HEAD_DIM], Kj[BC][HEAD_DIM], Vj[BC][HEAD_DIM], S[BR][BC];

    const int Tr = ceil_div(M, BR);
    const long long b = blockIdx.x / Tr;
    const int r = threadIdx.x, i0 = blockIdx.x % Tr * BR;
    const long long i = i0 + r;                              // this thread's query row
    const int seen = keys_seen(a.q_start + i, N);            // keys that it sees
    const int keys = keys_seen(a.q_start + i0 + BR - 1, N);  // keys that some row of the tile sees
    const auto [Q, K, V, O] = batch_of(a, b);
    float *const m = reinterpret_cast<float *>(a.workspace) + b * 2 * M, *const l = m + M;

    for (int j0 = 0; j0 < keys; j0 += BC) {
        const long long j = j0 + r;  // the row of K and V that it copies
        __syncthreads();
        for (int x = 0; r < BC && x < HEAD_DIM; ++x) {
            Kj[r][x] = j < N ? K[j * HEAD_DIM + x] : 0;
            Vj[r][x] = j < N ? V[j * HEAD_DIM + x] : 0;
        }
        __syncthreads();
        if (i >= M || j0 >= seen) continue;
        for (int x = 0; x < HEAD_DIM; ++x) Qi[r][x] = Q[i * HEAD_DIM + x];

        // S = Q Kᵀ · scale, and the row maximum
        float tile_max = NEG_INF;
        for (int j = 0; j < BC; ++j) {
            float s = 0;
            for (int x = 0; x < HEAD_DIM; ++x) s += Qi[r][x] * Kj[j][x];
            s = j0 + j < seen ? s * a.scale : NEG_INF;
            S[r][j] = s;
            tile_max = fmaxf(tile_max, s);
        }

        // P = exp(S - max), and the row sum
        float tile_sum = 0;
        for (int j = 0; j < BC; ++j) {
            const float p = expf(S[r][j] - finite_or_zero(tile_max));
            S[r][j] = p;
            tile_sum += p;
        }

        // O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l
        const float m_old = j0 == 0 ? NEG_INF : m[i], l_old = j0 == 0 ? 0 : l[i];
        const float m_new = fmaxf(m_old, tile_max), shift = finite_or_zero(m_new);
        const float l_new = expf(m_old - shift) * l_old + expf(tile_max - shift) * tile_sum;
        for (int x = 0; x < HEAD_DIM; ++x) {
            float PV = 0;  // of this tile alone, from zero: rounding errors do not grow with N
            for (int j = 0; j < BC; ++j) PV += S[r][j] * Vj[j][x];
            const float scale = 1 / l_new, old_scale = expf(m_old - shift) * l_old * scale;
            float &o = O[i * HEAD_DIM + x];  // l = 0: there is no O yet
            o = (l_old == 0 ? 0 : old_scale * o) + expf(tile_max - shift) * scale * PV;
        }
        m[i] = m_new;
        l[i] = l_new;
    }
}
