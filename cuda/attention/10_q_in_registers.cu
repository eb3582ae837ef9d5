// Q in registers: tiles of K and V take the room that Q leaves. The course report's last step.
//
// What changed: a thread keeps its row of Q in registers, and Bc becomes 64 (d = 32) or 32 (d = 64).
// Why it is faster: half as many tiles of keys are half as many barriers, and half as many times O is read and written.
// One operand less of each product comes from shared memory.
// What it costs: d registers a thread, of 255 that it can have: heads of more than 128 numbers have to be refused.
#include "attention.cuh"

constexpr int D = round_up(HEAD_DIM, 4);

static_assert(THREADS == BR, "one thread a row");
static_assert((2 * BC * D + BR * BC) * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

// Four floats of row `row`, starting at column 4 * chunk; zeros beyond the matrix.
__device__ float4 load4(const float *matrix, long long row, int chunk, int rows) {
    const float *x = matrix + row * HEAD_DIM + 4 * chunk;
    if (row >= rows) return make_float4(0, 0, 0, 0);
    if (ALIGNED) return *reinterpret_cast<const float4 *>(x);
    const int left = HEAD_DIM - 4 * chunk;
    return make_float4(x[0], left > 1 ? x[1] : 0, left > 2 ? x[2] : 0, left > 3 ? x[3] : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    const int M = a.M, N = a.N;
    __shared__ float4 Kj[BC][D / 4], Vj[BC][D / 4];
    __shared__ float S[BC][BR];

    const int Tr = ceil_div(M, BR);
    const long long b = blockIdx.x / Tr;
    const int r = threadIdx.x, i0 = blockIdx.x % Tr * BR;
    const long long i = i0 + r;                              // this thread's query row
    const int seen = keys_seen(a.q_start + i, N);            // keys that it sees
    const int keys = keys_seen(a.q_start + i0 + BR - 1, N);  // keys that some row of the tile sees
    const auto [Q, K, V, O] = batch_of(a, b);

    float4 q[D / 4];
    for (int c = 0; c < D / 4; ++c) q[c] = load4(Q, i, c, M);
    float m = NEG_INF, l = 0;
    for (int j0 = 0; j0 < keys; j0 += BC) {
        __syncthreads();
        for (int x = threadIdx.x; x < BC * (D / 4); x += THREADS) {
            Kj[x / (D / 4)][x % (D / 4)] = load4(K, j0 + x / (D / 4), x % (D / 4), N);
            Vj[x / (D / 4)][x % (D / 4)] = load4(V, j0 + x / (D / 4), x % (D / 4), N);
        }
        __syncthreads();
        if (i >= M || j0 >= seen) continue;

        // S = Q Kᵀ · scale, and the row maximum
        float tile_max = NEG_INF;
        for (int j = 0; j < BC; ++j) {
            float s = 0;
#pragma unroll  // registers have no addresses
            for (int c = 0; c < D / 4; ++c) {
                const float4 k = Kj[j][c];
                s += q[c].x * k.x + q[c].y * k.y + q[c].z * k.z + q[c].w * k.w;
            }
            s = j0 + j < seen ? s * a.scale : NEG_INF;
            S[j][r] = s;
            tile_max = fmaxf(tile_max, s);
        }

        // P = exp(S - max), and the row sum
        float tile_sum = 0;
        for (int j = 0; j < BC; ++j) {
            const float p = __expf(S[j][r] - finite_or_zero(tile_max));
            S[j][r] = p;
            tile_sum += p;
        }

        // O = (exp(m - m_new) l O + exp(tile_max - m_new) P V) / l_new, and m and l
        const float m_new = fmaxf(m, tile_max), shift = finite_or_zero(m_new);
        const float old_weight = __expf(m - shift) * l, new_weight = __expf(tile_max - shift);
        const float l_new = old_weight + new_weight * tile_sum, scale = __fdividef(1, l_new);
        const float old_scale = old_weight * scale, new_scale = new_weight * scale;
        for (int c = 0; c < D / 4; ++c) {
            float4 PV = make_float4(0, 0, 0, 0);  // of this tile alone, from zero: rounding errors do not grow with N
            for (int j = 0; j < BC; ++j) {
                const float p = S[j][r];
                const float4 v = Vj[j][c];
                PV.x += p * v.x;
                PV.y += p * v.y;
                PV.z += p * v.z;
                PV.w += p * v.w;
            }
            const float columns[4] = {PV.x, PV.y, PV.z, PV.w};
            for (int x = 0; x < 4 && 4 * c + x < HEAD_DIM; ++x) {
                float &o = O[i * HEAD_DIM + 4 * c + x];  // l = 0: there is no O yet
                o = (l == 0 ? 0 : old_scale * o) + new_scale * columns[x];
            }
        }
        m = m_new;
        l = l_new;
    }
}
