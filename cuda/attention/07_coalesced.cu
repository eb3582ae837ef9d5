// Coalesced: neighbouring threads touch neighbouring addresses of global memory.
//
// What changed: tiles are copied by all threads in the order in which they lie in memory, not each row by a thread. And
// O, which grows in global memory, grows in the workspace, by columns of float4 [d/4][Br], where the threads, one row
// each, are neighbours; it is moved to its place at the end. So are m and l.
// Why it is faster: a warp's 32 reads of 16 bytes are the 512 bytes that memory delivers together, in 4 pieces of 128,
// where they were 32 pieces of which 16 bytes each were asked for. And all threads copy K and V, not the first 16 or
// 32.
// What it costs: copying Q now meets its rows crosswise: a warp writes one row of Q to addresses in the same banks,
// once. The final O still goes out row by row, also once.
#include "attention.cuh"

constexpr int D = round_up(HEAD_DIM, 4);

static_assert(THREADS == BR, "one thread a row");
static_assert((BR * D + 2 * BC * D + BR * BC) * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

// Four floats of row `row`, starting at column 4 * chunk; zeros beyond the matrix.
__device__ float4 load4(const float *matrix, long long row, int chunk, int rows) {
    const float *x = matrix + row * HEAD_DIM + 4 * chunk;
    if (row >= rows) return make_float4(0, 0, 0, 0);
    if (ALIGNED) return *reinterpret_cast<const float4 *>(x);
    const int left = HEAD_DIM - 4 * chunk;
    return make_float4(x[0], left > 1 ? x[1] : 0, left > 2 ? x[2] : 0, left > 3 ? x[3] : 0);
}

__device__ void store4(float *matrix, long long row, int chunk, float4 v) {
    float *x = matrix + row * HEAD_DIM + 4 * chunk;
    if (ALIGNED) {
        *reinterpret_cast<float4 *>(x) = v;
        return;
    }
    const int left = HEAD_DIM - 4 * chunk;
    x[0] = v.x;
    if (left > 1) x[1] = v.y;
    if (left > 2) x[2] = v.z;
    if (left > 3) x[3] = v.w;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    const int M = a.M, N = a.N;
    __shared__ float4 Qi[D / 4][BR], Kj[BC][D / 4], Vj[BC][D / 4];  // Q by columns: threads read neighbours
    __shared__ float S[BR][BC];

    const int Tr = ceil_div(M, BR);
    const long long b = blockIdx.x / Tr;
    const int r = threadIdx.x, i0 = blockIdx.x % Tr * BR;
    const long long i = i0 + r;                              // this thread's query row
    const int seen = keys_seen(a.q_start + i, N);            // keys that it sees
    const int keys = keys_seen(a.q_start + i0 + BR - 1, N);  // keys that some row of the tile sees
    const auto [Q, K, V, O] = batch_of(a, b);

    // The block's workspace: O of the tile by columns, then m and l
    float4 *const Oi = reinterpret_cast<float4 *>(a.workspace + blockIdx.x * (D + 2LL) * BR * 4);
    float *const m = reinterpret_cast<float *>(Oi + D / 4 * BR), *const l = m + BR;

    for (int x = threadIdx.x; x < BR * (D / 4); x += THREADS) {
        Qi[x % (D / 4)][x / (D / 4)] = load4(Q, i0 + x / (D / 4), x % (D / 4), M);
        Oi[x] = make_float4(0, 0, 0, 0);
    }
    m[r] = NEG_INF;
    l[r] = 0;

    for (int j0 = 0; j0 < keys; j0 += BC) {
        __syncthreads();
        for (int x = threadIdx.x; x < BC * (D / 4); x += THREADS) {
            Kj[x / (D / 4)][x % (D / 4)] = load4(K, j0 + x / (D / 4), x % (D / 4), N);
            Vj[x / (D / 4)][x % (D / 4)] = load4(V, j0 + x / (D / 4), x % (D / 4), N);
        }
        __syncthreads();

        // S = Q Kᵀ in units of log2, and the new m
        const float m_old = m[r];
        float m_new = m_old;
        for (int j = 0; j < BC; ++j) {
            float4 sum = make_float4(0, 0, 0, 0);
            for (int c = 0; c < D / 4; ++c) {
                const float4 q = Qi[c][r], k = Kj[j][c];
                sum.x += q.x * k.x;
                sum.y += q.y * k.y;
                sum.z += q.z * k.z;
                sum.w += q.w * k.w;
            }
            float s = (sum.x + sum.y) + (sum.z + sum.w);
            s = j0 + j < seen ? s * (a.scale * LOG2E) : NEG_INF;
            S[r][j] = s;
            m_new = fmaxf(m_new, s);
        }

        // P = exp(S - m), and l in units of the new m
        const float shift = finite_or_zero(m_new), rescale = exp2_fast(m_old - shift);
        float row_sum = 0;
        for (int j = 0; j < BC; ++j) {
            const float p = exp2_fast(S[r][j] - shift);
            S[r][j] = p;
            row_sum += p;
        }
        m[r] = m_new;
        l[r] = l[r] * rescale + row_sum;

        // T = P V from zero, O = O * rescale + T: rounding errors grow with the terms of a tile, not with N
        for (int c = 0; c < D / 4; ++c) {
            float4 t = make_float4(0, 0, 0, 0);
            for (int j = 0; j < BC; ++j) {
                const float p = S[r][j];
                const float4 v = Vj[j][c];
                t.x += p * v.x;
                t.y += p * v.y;
                t.z += p * v.z;
                t.w += p * v.w;
            }
            float4 &o = Oi[c * BR + r];
            o = make_float4(o.x * rescale + t.x, o.y * rescale + t.y, o.z * rescale + t.z, o.w * rescale + t.w);
        }
    }

    if (i >= M) return;
    const float factor = 1 / l[r];
    for (int c = 0; c < D / 4; ++c) {
        const float4 o = Oi[c * BR + r];
        store4(O, i, c, make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor));
    }
}
