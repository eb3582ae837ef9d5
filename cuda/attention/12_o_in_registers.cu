// O in registers: the last rung with a row a thread, and the first that those after it are measured against.
//
// What changed: O, which went to global memory and back for every tile of keys, is in registers, beside Q, m and l. The
// loops over its columns are unrolled for that, some columns at a time; and four sums of a dot product, of four keys at
// a time, do not wait for each other.
// Why it is faster: O is written once. (The throughput of global memory falls: fewer round trips are the point.)
// What it costs: 2 d registers a thread. And what is left is a limit: every four FFMA take their K or V operands from
// shared memory. All threads of a warp read the same address (a broadcast), yet each 16-byte read still delivers 512
// bytes to registers, through a pipe that the SM's four quarters share; it ends at half of the fp32 rate.
//
// A head longer than 64 does not fit one thread's registers twice (Q and O). Then LANES threads share a row, each with
// every LANES-th float4, and BR shrinks to THREADS / LANES.
#include "attention.cuh"

constexpr int LANES = THREADS / BR;
constexpr int D = round_up(HEAD_DIM, 4 * LANES);  // zero-padded, so that every lane has whole float4s
constexpr int CHUNKS = D / (4 * LANES);           // float4s of a row that one thread keeps
constexpr int GROUP = 4;                          // float4s of O updated together

static_assert(THREADS % BR == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 32, "the lanes of a row reduce by shuffles");
static_assert(CHUNKS <= 16, "q and o, 4 * CHUNKS floats each, must stay in registers");
static_assert(BC * (2 * D + BR) * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

// Four floats of row `row`, starting at column 4 * chunk; zeros beyond the matrix.
__device__ float4 load4(const float *matrix, long long row, int chunk, int rows) {
    const float *x = matrix + row * HEAD_DIM + 4 * chunk;
    if (row >= rows || 4 * chunk >= HEAD_DIM) return make_float4(0, 0, 0, 0);
    if (ALIGNED) return *reinterpret_cast<const float4 *>(x);
    const int left = HEAD_DIM - 4 * chunk;
    return make_float4(x[0], left > 1 ? x[1] : 0, left > 2 ? x[2] : 0, left > 3 ? x[3] : 0);
}

__device__ void store4(float *matrix, long long row, int chunk, float4 v) {
    float *x = matrix + row * HEAD_DIM + 4 * chunk;
    const int left = HEAD_DIM - 4 * chunk;
    if (ALIGNED && left > 0) {
        *reinterpret_cast<float4 *>(x) = v;
        return;
    }
    if (left > 0) x[0] = v.x;
    if (left > 1) x[1] = v.y;
    if (left > 2) x[2] = v.z;
    if (left > 3) x[3] = v.w;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    const int M = a.M, N = a.N;
    __shared__ float4 Kj[BC][D / 4], Vj[BC][D / 4];
    __shared__ float S[BC][BR];  // key-major: the threads of a warp, one row each, write 32 different banks

    const int Tr = ceil_div(M, BR);
    const long long b = blockIdx.x / Tr;
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES;
    const int i = (blockIdx.x % Tr) * BR + r;  // this thread's query row
    const auto [Q, K, V, O] = batch_of(a, b);

    float4 q[CHUNKS], o[CHUNKS];
    for (int c = 0; c < CHUNKS; ++c) {
        q[c] = load4(Q, i, c * LANES + lane, M);
        o[c] = make_float4(0, 0, 0, 0);
    }
    float m = NEG_INF, l = 0;

    const int seen = keys_seen(a.q_start + i, N);
    const int keys = keys_seen(a.q_start + (i - r) + BR - 1, N);  // keys that some row of this block sees
    for (int j0 = 0; j0 < keys; j0 += BC) {
        __syncthreads();
        for (int x = threadIdx.x; x < BC * (D / 4); x += THREADS) {
            Kj[x / (D / 4)][x % (D / 4)] = load4(K, j0 + x / (D / 4), x % (D / 4), N);
            Vj[x / (D / 4)][x % (D / 4)] = load4(V, j0 + x / (D / 4), x % (D / 4), N);
        }
        __syncthreads();

        // S = Q Kᵀ, and the new m
        float m_new = m;
#pragma unroll 4  // independent sums hide the latency of an FFMA
        for (int j = 0; j < BC; ++j) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const float4 k = Kj[j][c * LANES + lane];
                sum.x += q[c].x * k.x;
                sum.y += q[c].y * k.y;
                sum.z += q[c].z * k.z;
                sum.w += q[c].w * k.w;
            }
            float s = (sum.x + sum.y) + (sum.z + sum.w);
#pragma unroll
            for (int x = LANES / 2; x > 0; x /= 2) s += __shfl_xor_sync(~0u, s, x);
            s = j0 + j < seen ? s * (a.scale * LOG2E) : NEG_INF;
            if (j % LANES == lane) S[j][r] = s;  // the lane that will read it
            m_new = fmaxf(m_new, s);
        }

        // P = exp(S - m), and l in units of the new m: each lane for its own keys
        const float shift = finite_or_zero(m_new), rescale = exp2_fast(m - shift);
        float row_sum = 0;
#pragma unroll 4
        for (int j = lane; j < BC; j += LANES) {
            const float p = exp2_fast(S[j][r] - shift);
            S[j][r] = p;
            row_sum += p;
        }
        m = m_new;
        l = l * rescale + row_sum;
        __syncwarp();

        // T = P V from zero, O = O * rescale + T: rounding errors grow with the terms of a tile, not with N. Some
        // columns at a time, for registers.
#pragma unroll
        for (int c0 = 0; c0 < CHUNKS; c0 += GROUP) {
            float4 t[GROUP] = {};
#pragma unroll 4
            for (int j = 0; j < BC; ++j) {
                const float p = S[j][r];
#pragma unroll
                for (int c = 0; c < GROUP && c0 + c < CHUNKS; ++c) {
                    const float4 v = Vj[j][(c0 + c) * LANES + lane];
                    t[c].x += p * v.x;
                    t[c].y += p * v.y;
                    t[c].z += p * v.z;
                    t[c].w += p * v.w;
                }
            }
#pragma unroll
            for (int c = 0; c < GROUP && c0 + c < CHUNKS; ++c) {
                o[c0 + c].x = o[c0 + c].x * rescale + t[c].x;
                o[c0 + c].y = o[c0 + c].y * rescale + t[c].y;
                o[c0 + c].z = o[c0 + c].z * rescale + t[c].z;
                o[c0 + c].w = o[c0 + c].w * rescale + t[c].w;
            }
        }
    }

#pragma unroll
    for (int x = LANES / 2; x > 0; x /= 2) l += __shfl_xor_sync(~0u, l, x);
    if (i >= M) return;
    for (int c = 0; c < CHUNKS; ++c) {
        const float4 x = o[c];
        store4(O, i, c * LANES + lane, make_float4(x.x / l, x.y / l, x.z / l, x.w / l));
    }
}
