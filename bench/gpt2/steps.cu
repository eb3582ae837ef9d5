// The steps of a case study on GPT-2's attention, one macro each, for heads of 64 numbers: an experiment, not a rung.
//
// The ladder in cuda/attention goes from one row a thread to register tiles of 8 x 8 in one step, and from one layout of
// shared memory to another with other changes beside it. Here every change stands alone, and the next keeps it. All are
// algorithm 1 of FlashAttention: O is divided by l after each tile of keys.
//
// Source: Gordon Gustafson, "llm-inference", of whose twelve versions only the descriptions were read.
#include "attention/attention.cuh"

#define GLOBAL 0  // where O is while tiles of keys pass by
#define IN_SHARED 1
#define IN_REGISTERS 2

constexpr int TX = ACROSS, TY = THREADS / TX;  // threads across and down a tile of S
constexpr int X = BC / TX, Y = BR / TY;        // of which each has X keys of Y rows
constexpr int C = HEAD_DIM / TX;               // and as many rows of C columns of O
constexpr int K_ROW = HEAD_DIM + PAD;          // floats from one key to the next

static_assert(HEAD_DIM == 64 && TX <= 32 && THREADS % TX == 0 && BC % TX == 0 && BR % TY == 0, "whole tiles");
static_assert(SHUFFLE || THREADS >= BR, "a thread for each row");
static_assert(SHARED ==
                  4 * (BR * HEAD_DIM + BC * (K_ROW + HEAD_DIM) + BR * BC + (O_PLACE == IN_SHARED) * BR * HEAD_DIM),
              "room for Q, K, V, S, and O perhaps");

extern __shared__ __align__(16) float shared[];

__device__ __forceinline__ float exponential(float x) { return FAST_EXP ? exp2_fast(x * LOG2E) : expf(x); }

// By the cache for what nobody writes, as `__restrict__` lets the compiler do with parameters that are pointers.
template <class T>
__device__ __forceinline__ T load(const T *from) {
    return READ_ONLY ? __ldg(from) : *from;
}

// Rows of a matrix to shared memory; zeros for those that are not there.
template <int ROWS, int TO_ROW>
__device__ __forceinline__ void copy(float *to, const float *from, long long stride, int there) {
    constexpr int WIDTH = FLOAT4 ? 4 : 1;
    for (int x = threadIdx.x; x < ROWS * HEAD_DIM / WIDTH; x += THREADS) {
        const int r = x / (HEAD_DIM / WIDTH), c = x % (HEAD_DIM / WIDTH) * WIDTH;
        float got[WIDTH] = {};
        if (r < there) {
            if (FLOAT4)
                *reinterpret_cast<float4 *>(got) = load(reinterpret_cast<const float4 *>(from + r * stride + c));
            else got[0] = load(from + r * stride + c);
        }
#pragma unroll
        for (int y = 0; y < WIDTH; ++y) to[r * TO_ROW + c + y] = got[y];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Attention a) {
    float *const Qi = shared, *const Kj = Qi + BR * HEAD_DIM, *const Vj = Kj + BC * K_ROW,
                 *const S = Vj + BC * HEAD_DIM;
    float *const Oi = S + BR * BC;
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;  // rows ty + i * TY, keys and columns tx + j * TX
    const int Tr = ceil_div(a.M, BR), i0 = blockIdx.x % Tr * BR;
    const Head head = head_of(a, blockIdx.x / Tr);
    const float *const Q = rows_of(a.Q, a.q, head.b, head.h) + i0 * row_stride(a.q);
    const float *const K = rows_of(a.K, a.k, head.b, head.kv);
    const float *const V = rows_of(a.V, a.v, head.b, head.kv);
    float *const O = rows_of(a.O, a.o, head.b, head.h) + i0 * row_stride(a.o);
    // Of the block's rows, where warps do not tell each other.
    float *const m_of = reinterpret_cast<float *>(a.workspace) + (long long)blockIdx.x * 3 * BR;
    float *const l_of = m_of + BR, *const weight_of = l_of + BR;

    float o[Y][C] = {}, m[Y], l[Y] = {}, weight[Y];  // weight: of the O so far
    for (int i = 0; i < Y; ++i) m[i] = NEG_INF;
    if (O_PLACE == IN_SHARED)
        for (int x = threadIdx.x; x < BR * HEAD_DIM; x += THREADS) Oi[x] = 0;
    copy<BR, HEAD_DIM>(Qi, Q, row_stride(a.q), a.M - i0);

    const int keys = keys_seen(a.q_start + i0 + BR - 1, a.N);  // tiles that no row of the block sees are passed over
    for (int j0 = 0; j0 < keys; j0 += BC) {
        __syncthreads();
        copy<BC, K_ROW>(Kj, K + j0 * row_stride(a.k), row_stride(a.k), a.N - j0);
        copy<BC, HEAD_DIM>(Vj, V + j0 * row_stride(a.v), row_stride(a.v), a.N - j0);
        __syncthreads();

        // S = Q Kᵀ · scale: a number read serves X or Y scores, or one
        float s[Y][X] = {};
        if (TILED) {
#pragma unroll 8
            for (int x = 0; x < HEAD_DIM; ++x) {
                const int c = SWIZZLE ? (x + tx) % HEAD_DIM : x;  // threads across begin at columns of their own
                float k[X];
#pragma unroll
                for (int j = 0; j < X; ++j) k[j] = Kj[(tx + j * TX) * K_ROW + c];
#pragma unroll
                for (int i = 0; i < Y; ++i) {
                    const float q = Qi[(ty + i * TY) * HEAD_DIM + c];
#pragma unroll
                    for (int j = 0; j < X; ++j) s[i][j] += q * k[j];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < Y; ++i)
#pragma unroll
            for (int j = 0; j < X; ++j) {
                const int r = ty + i * TY, key = tx + j * TX;
                if (!TILED) {
                    float sum = 0;
#pragma unroll 8
                    for (int x = 0; x < HEAD_DIM; ++x) sum += Qi[r * HEAD_DIM + x] * Kj[key * K_ROW + x];
                    s[i][j] = sum;
                    asm volatile("" ::: "memory");  // the next score reads again
                }
                s[i][j] = j0 + key < keys_seen(a.q_start + i0 + r, a.N) ? s[i][j] * a.scale : NEG_INF;
                if (!SHUFFLE) S[r * BC + key] = s[i][j];
            }

        // m, P = exp(S - m), l: by a thread of each row, in global memory, or by the lanes of a warp
        if (!SHUFFLE) {
            __syncthreads();
            const int r = threadIdx.x;
            if (r < BR) {
                const float m_old = j0 == 0 ? NEG_INF : m_of[r];
                float m_new = m_old;
                for (int j = 0; j < BC; ++j) m_new = fmaxf(m_new, S[r * BC + j]);
                m_of[r] = m_new;
                weight_of[r] = (j0 == 0 ? 0 : l_of[r]) * exponential(m_old - finite_or_zero(m_new));
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < Y; ++i) {
            const int r = ty + i * TY;
            float m_new = SHUFFLE ? m[i] : m_of[r], sum = 0;
            if (SHUFFLE) {
#pragma unroll
                for (int j = 0; j < X; ++j) m_new = fmaxf(m_new, s[i][j]);
#pragma unroll
                for (int x = 1; x < TX; x *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, x));
            }
#pragma unroll
            for (int j = 0; j < X; ++j) sum += S[r * BC + tx + j * TX] = exponential(s[i][j] - finite_or_zero(m_new));
            if (SHUFFLE) {
#pragma unroll
                for (int x = 1; x < TX; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
                weight[i] = l[i] * exponential(m[i] - finite_or_zero(m_new));
                l[i] = weight[i] + sum;
                m[i] = m_new;
            }
        }
        __syncthreads();
        if (!SHUFFLE) {
            if (threadIdx.x < BR) {
                float sum = 0;
                for (int j = 0; j < BC; ++j) sum += S[threadIdx.x * BC + j];
                l_of[threadIdx.x] = weight_of[threadIdx.x] + sum;
            }
            __syncthreads();
            for (int i = 0; i < Y; ++i) weight[i] = weight_of[ty + i * TY], l[i] = l_of[ty + i * TY];
        }

        // O = (weight O + P V) / l
        float PV[Y][C] = {};
        if (TILED) {
#pragma unroll 4
            for (int j = 0; j < BC; ++j) {
                float v[C];
#pragma unroll
                for (int c = 0; c < C; ++c) v[c] = Vj[j * HEAD_DIM + tx + c * TX];
#pragma unroll
                for (int i = 0; i < Y; ++i) {
                    const float p = S[(ty + i * TY) * BC + j];
#pragma unroll
                    for (int c = 0; c < C; ++c) PV[i][c] += p * v[c];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < Y; ++i)
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const int r = ty + i * TY, column = tx + c * TX;
                if (!TILED) {
                    float sum = 0;
#pragma unroll 8
                    for (int j = 0; j < BC; ++j) {
                        const float p = S[r * BC + j];
                        sum += (DIVIDE_LATE ? p : p / l[i]) * Vj[j * HEAD_DIM + column];
                    }
                    PV[i][c] = DIVIDE_LATE ? sum : sum * l[i];
                    asm volatile("" ::: "memory");
                }
                float *const there = O_PLACE == GLOBAL      ? &O[r * row_stride(a.o) + column]
                                     : O_PLACE == IN_SHARED ? &Oi[r * HEAD_DIM + column]
                                                            : &o[i][c];
                if (O_PLACE != GLOBAL || i0 + r < a.M) {
                    const float before = O_PLACE == GLOBAL && j0 == 0 ? 0 : *there;
                    *there = (weight[i] * before + PV[i][c]) / l[i];
                }
            }
    }

    if (O_PLACE == GLOBAL) return;
#pragma unroll
    for (int i = 0; i < Y; ++i)
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const int r = ty + i * TY, column = tx + c * TX;
            if (i0 + r < a.M)
                O[r * row_stride(a.o) + column] = O_PLACE == IN_SHARED ? Oi[r * HEAD_DIM + column] : o[i][c];
        }
}
