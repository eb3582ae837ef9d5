// Fused: one kernel for all five steps, with the tiles in shared memory.
//
// What changed: the loops over tile pairs moved from the host into the kernel, one block a batch. A pair's tiles of Q,
// K and V are copied into shared memory, and S and P never leave it. O, m and l stay in global memory.
// Why it is faster: one launch instead of five for each tile pair; a barrier instead of a launch between the steps; and
// each number of a tile is read from global memory once for the whole block, not once for each score that needs it.
// What it costs: the tiles must fit 48 KB of shared memory, so that they are smaller for a long head. A batch still
// keeps one multiprocessor busy, and Q and O travel to and fro for every tile of keys.
#include "attention.cuh"

static_assert(BR == BC && THREADS == BR * BC, "one thread a score; and r counts the rows of all tiles");
static_assert((3 * BR * HEAD_DIM + BR * BC + 2 * BR) * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    const int M = a.M, N = a.N;
    __shared__ float Qi[BR][HEAD_DIM], Kj[BC][HEAD_DIM], Vj[BC][HEAD_DIM], S[BR][BC], tile_max[BR], tile_sum[BR];

    const int r = threadIdx.x / BC, c = threadIdx.x % BC;
    const long long b = blockIdx.x;
    const auto [Q, K, V, O] = batch_of(a, b);
    float *const m = reinterpret_cast<float *>(a.workspace) + b * 2 * M, *const l = m + M;

    for (int i0 = 0; i0 < M; i0 += BR) {
        const long long i = i0 + r;                              // this thread's query row
        const int keys = keys_seen(a.q_start + i0 + BR - 1, N);  // keys that some row of the tile sees
        for (int j0 = 0; j0 < keys; j0 += BC) {
            const long long j = j0 + r;  // the row of K and V that it copies
            __syncthreads();
            for (int x = c; x < HEAD_DIM; x += BC) {
                Qi[r][x] = i < M ? Q[i * HEAD_DIM + x] : 0;
                Kj[r][x] = j < N ? K[j * HEAD_DIM + x] : 0;
                Vj[r][x] = j < N ? V[j * HEAD_DIM + x] : 0;
            }
            __syncthreads();

            // S = Q Kᵀ · scale
            float s = 0;
            for (int x = 0; x < HEAD_DIM; ++x) s += Qi[r][x] * Kj[c][x];
            S[r][c] = j0 + c < keys_seen(a.q_start + i, N) ? s * a.scale : NEG_INF;
            __syncthreads();

            // Row maxima, P = exp(S - max), row sums
            if (threadIdx.x < BR) {
                float largest = NEG_INF;
                for (int x = 0; x < BC; ++x) largest = fmaxf(largest, S[threadIdx.x][x]);
                tile_max[threadIdx.x] = largest;
            }
            __syncthreads();
            S[r][c] = expf(S[r][c] - finite_or_zero(tile_max[r]));
            __syncthreads();
            if (threadIdx.x < BR) {
                float sum = 0;
                for (int x = 0; x < BC; ++x) sum += S[threadIdx.x][x];
                tile_sum[threadIdx.x] = sum;
            }
            __syncthreads();

            // O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l
            float m_new, l_new;
            if (i < M) {
                const float m_old = j0 == 0 ? NEG_INF : m[i], l_old = j0 == 0 ? 0 : l[i];
                m_new = fmaxf(m_old, tile_max[r]);
                const float old_weight = expf(m_old - finite_or_zero(m_new)) * l_old;
                const float new_weight = expf(tile_max[r] - finite_or_zero(m_new));
                l_new = old_weight + new_weight * tile_sum[r];
                for (int x = c; x < HEAD_DIM; x += BC) {
                    float PV = 0;  // of this tile alone, from zero: rounding errors do not grow with N
                    for (int j = 0; j < BC; ++j) PV += S[r][j] * Vj[j][x];
                    float &o = O[i * HEAD_DIM + x];
                    o = ((l_old == 0 ? 0 : old_weight * o) + new_weight * PV) / l_new;  // l = 0: there is no O yet
                }
            }
            __syncthreads();  // all have read the old m and l
            if (i < M && c == 0) m[i] = m_new, l[i] = l_new;
        }
    }
}
