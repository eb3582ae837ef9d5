// Tensor cores: each fp32 product becomes three fp16 products on mma.sync (sm_80 and later).
//
// What changed: the tile products S = Q Kᵀ and P V no longer run as FFMA. Every number is scaled by a power of two and
// split into fp16 hi + lo (split.cuh), x y = lo hi + hi lo + hi hi, and a warp multiplies 16 x 8 x 16 blocks at a time.
// `prepare` splits K and V once, into tiles that lie in global memory just as shared memory wants them; Q and P are
// split in registers, for the accumulator of one product has the layout of the other's left operand: P never leaves the
// warp.
// Why it is faster: fp16 tensor cores do 8 to 15 times the rate of FFMA, so three products instead of one still win. A
// warp owns ROW_TILES x 16 rows, so that what ldmatrix reads from shared memory serves several mma.
// What it costs: a pass over K and V before the first product, and care for the last bits, since the tensor cores round
// every sum towards zero: small products come first, while the accumulator is small; each tile's P V starts from zero
// and is added to O in fp32; P carries a factor of 2^P_BIAS, so that small p keep the bits of their lo.
#include "exact.cuh"
#include "mma.cuh"
#include "prepare.cuh"

constexpr int MIN_BLOCKS = D <= 32 ? 4 : 1;  // of an SM: short heads leave registers for more warps
constexpr int WARPS = THREADS / 32;
constexpr int ROW_TILES = BR / (16 * WARPS);                // 16-row tiles a warp
constexpr int DEPTH = D > 128 ? 32 : D % 64 == 0 ? 64 : D;  // columns of Q and K summed inside the tensor core
constexpr bool Q_IN_REGISTERS = D <= 128;                   // else in shared memory, each thread's fragments apart
// With HALF_CORRECTIONS, lo hi + hi lo are added in fp16, where a GeForce adds at twice the rate of fp32. Then Q is
// smaller by 2^10, and P by 2: no sum of DEPTH, or of BC, such products is beyond 49152.
#ifndef HALF_CORRECTIONS
#define HALF_CORRECTIONS 0
#endif
constexpr int Q_SMALLER = HALF_CORRECTIONS ? 10 : 0;
constexpr float P_BIAS = HALF_CORRECTIONS ? 5 : 6, LARGEST_P = HALF_CORRECTIONS ? 32 : 64;
static_assert(!HALF_CORRECTIONS || (DEPTH <= 96 && BC <= 64), "sums in fp16 are of few products");

// Columns of a product at a time: 32 / ROW_TILES make four independent chains of mma, half of it saves registers.
constexpr int STRIP = D >= 128 ? 16 : 32 / ROW_TILES;

static_assert(THREADS % 32 == 0 && BR == ROW_TILES * 16 * WARPS && ROW_TILES >= 1 && ROW_TILES <= 2,
              "whole row tiles a warp");
static_assert(BC % STRIP == 0 && D % STRIP == 0, "a tile is multiplied strip by strip");

// Shared memory: a tile of K, one of V, and for long heads Q.
static_assert(SHARED == K_TILE + V_TILE + (Q_IN_REGISTERS ? 0 : 2 * D / 16 * THREADS * 16), "room for these");
extern __shared__ __align__(1024) unsigned char shared[];

// This thread's share of a tile of R rows and C columns, as `prepare` laid it out, but for what it left out at the end
// of the last panel, where that is not full; both addresses are already the thread's own.
template <int R, int C>
__device__ __forceinline__ void copy_share(unsigned char *to, const unsigned char *from) {
    constexpr int AT_ONCE = 16 * THREADS, BYTES = split_bytes(R, C), COLUMNS = PRODUCTS == 3 ? 2 * C : C;
    constexpr int FULL = COLUMNS / 64 * R * 128, LEFT = COLUMNS % 64 / 8;  // LEFT chunks of 16 bytes a row after those
    static_assert(AT_ONCE % 1024 == 0 && (LEFT == 0 || FULL % AT_ONCE == 0), "a thread has one chunk of all its rows");
#pragma unroll
    for (int x = 0; x < BYTES; x += AT_ONCE)
        if ((BYTES % AT_ONCE == 0 || x + 16 * threadIdx.x < BYTES) &&
            (x < FULL || int((threadIdx.x ^ threadIdx.x / 8) % 8) < LEFT))
            copy16(to + x, from + x);
}

// c = the strip of A B' from column n of the result on (row n of the tile B); A's fragments are a(tile, k, lo?), the
// tile has C columns of hi, then as many of lo. Columns first to first + 16 * STEPS of the tile are summed.
template <int R, int C, int STEPS, class Left>
__device__ __forceinline__ void multiply_strip(float (&c)[ROW_TILES][STRIP / 8][4], Left a, const unsigned char *tile,
                                               int n, int first) {
    Fragment hi[STEPS][STRIP / 16];
    unsigned half[ROW_TILES][STRIP / 8][2] = {};
#pragma unroll
    for (int k = 0; k < STEPS; ++k)  // lo hi + hi lo
#pragma unroll
        for (int x = 0; x < STRIP / 16; ++x) {
            hi[k][x] = right_operand<R>(tile, n + 16 * x, first + 16 * k);
            if (PRODUCTS == 1) continue;
            Fragment lo = {};
            if (PRODUCTS == 3) lo = right_operand<R>(tile, n + 16 * x, C + first + 16 * k);
#pragma unroll
            for (int y = 0; y < (PRODUCTS == 3 ? 4 : 2); ++y)
#pragma unroll
                for (int t = 0; t < ROW_TILES; ++t) {
                    const unsigned *const b = (y < 2 ? hi[k][x] : lo).x + y % 2 * 2;
                    if (HALF_CORRECTIONS) mma(half[t][2 * x + y % 2], a(t, k, y < 2), b);
                    else mma(c[t][2 * x + y % 2], a(t, k, y < 2), b);
                }
        }
    if (HALF_CORRECTIONS) {
#pragma unroll
        for (int x = 0; x < ROW_TILES * STRIP / 4; ++x) {
            const float2 two = unpack(half[x / (STRIP / 4)][x / 2 % (STRIP / 8)][x % 2]);
            float *const to = c[x / (STRIP / 4)][x / 2 % (STRIP / 8)] + x % 2 * 2;
            to[0] = two.x, to[1] = two.y;
        }
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k)  // hi hi
#pragma unroll
        for (int x = 0; x < STRIP / 8; ++x)
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) mma(c[t][x], a(t, k, false), hi[k][x / 2].x + x % 2 * 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention(const Attention all) {
    const Attention &a = of_block(all);
    if (!has_tile(a)) return;
    const int M = a.M, N = a.N;
    unsigned char *const Kj = shared, *const Vj = shared + K_TILE;
    uint4 *const Qi = reinterpret_cast<uint4 *>(Vj + V_TILE);

    // In an accumulator a thread holds rows g and g + 8 and columns 2t, 2t + 1 of each 16 x 8 block, g = lane / 4,
    // t = lane % 4: the four threads of a quad share a row. Row r of this thread is row (r / 2 * 16 + r % 2 * 8).
    constexpr int ROWS = 2 * ROW_TILES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    const int Tr = ceil_div(M, BR), row_tile = tile_of_block(a, Tr);
    const Head head = head_of_block(a, Tr);
    const int i0 = (CAUSAL ? Tr - 1 - row_tile : row_tile) * BR;  // causal: the longest rows first
    const int row0 = warp * (16 * ROW_TILES) + lane / 4;          // of the tile: this thread's first one
    const int position = a.q_start + i0;                          // of the tile's first row in the sequence
    const long long first_tile = first_tile_of(a, head) + first_tile_seen(a, i0);                 // of K and V
    const unsigned char *tile = a.workspace + first_tile * (K_TILE + V_TILE) + 16 * threadIdx.x;  // this thread's share
    const int4 *exponents = tile_exponents(a) + 2 * first_tile;
    const Input *const Q = rows_of(a.Q, a.q, head.b, head.h);

    copy_share<BC, D>(Kj + 16 * threadIdx.x, tile);

    // Q = hi + lo, as left operands: x[0..3] are columns 2t of row g, of row g + 8, columns 8 + 2t of row g, of row g +
    // 8. It carries the scale, so that S is in powers of two, and each row a power of two of its own, q_exponent.
    Fragment q_registers[Q_IN_REGISTERS ? ROW_TILES : 1][Q_IN_REGISTERS ? D / 16 : 1][2];
    const float scale = a.scale * log2e_given_back(HEAD_DIM < DEPTH ? HEAD_DIM : DEPTH);
    int q_exponent[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = i0 + row0 + r / 2 * 16 + r % 2 * 8;
        const Input *const row = Q + i * row_stride(a.q);
        float2 q[D / 8];
        float largest = 0;
#pragma unroll
        for (int x = 0; x < D / 8; ++x) {
            const int column = 8 * x + 2 * t, left = i < M ? HEAD_DIM - column : 0;
            q[x] = make_float2(left > 0 ? row[column] * scale : 0, left > 1 ? row[column + 1] * scale : 0);
            largest = fmaxf(largest, fmaxf(fabsf(q[x].x), fabsf(q[x].y)));
        }
        q_exponent[r] = scale_exponent(quad_max(largest)) - Q_SMALLER;
        const float factor = power_of_two(q_exponent[r]);
#pragma unroll
        for (int x = 0; x < D / 8; ++x) {
            unsigned hi, lo;
            split(q[x].x * factor, q[x].y * factor, hi, lo);
            const int k = x / 2, word = x % 2 * 2 + r % 2;
            if (Q_IN_REGISTERS) {
                q_registers[r / 2][k][0].x[word] = hi, q_registers[r / 2][k][1].x[word] = lo;
            } else {
                reinterpret_cast<unsigned *>(&Qi[(2 * k + 0) * THREADS + threadIdx.x])[word] = hi;
                reinterpret_cast<unsigned *>(&Qi[(2 * k + 1) * THREADS + threadIdx.x])[word] = lo;
            }
        }
    }

    float o[ROW_TILES][D / 8][4] = {}, m[ROWS], l[ROWS] = {};  // l: of this thread's keys only
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = NEG_INF;

    const int keys = keys_seen(position + BR - 1, N);  // keys that some row of this block sees
    const int warp_keys = keys_seen(position + (warp + 1) * (16 * ROW_TILES) - 1, N);  // and of this warp
#pragma unroll 1
    for (int j0 = first_tile_seen(a, i0) * BC; j0 < keys; j0 += BC) {
        const int k_exponent = exponents[0].x, v_exponent = exponents[1].x;
        exponents += 2;

        // S = Q Kᵀ, in units of 2^(q_exponent + k_exponent); meanwhile V travels
        await_copies();
        __syncthreads();
        copy_share<D, BC>(Vj + 16 * threadIdx.x, tile + K_TILE);
        float s[ROW_TILES][BC / 8][4];
#pragma unroll
        for (int n = 0; n < BC; n += STRIP) {
            if (j0 + n >= warp_keys) {
#pragma unroll
                for (int x = 0; x < ROW_TILES * STRIP / 2; ++x)
                    s[x / (STRIP / 2)][n / 8 + x / 4 % (STRIP / 8)][x % 4] = NEG_INF;
                continue;
            }
#pragma unroll
            for (int first = 0; first < D; first += DEPTH) {
                float c[ROW_TILES][STRIP / 8][4] = {};
                multiply_strip<BC, D, DEPTH / 16>(
                    c,
                    [&](int rows, int k, bool lo) {
                        k += first / 16;
                        if (Q_IN_REGISTERS) return q_registers[rows][k][lo];
                        const uint4 q = Qi[(2 * k + lo) * THREADS + threadIdx.x];
                        return Fragment{q.x, q.y, q.z, q.w};
                    },
                    Kj, n, first);
#pragma unroll
                for (int x = 0; x < ROW_TILES * STRIP / 2; ++x) {
                    float &to = s[x / (STRIP / 2)][n / 8 + x / 4 % (STRIP / 8)][x % 4];
                    const float sum = c[x / (STRIP / 2)][x / 4 % (STRIP / 8)][x % 4];
                    to = first ? to + sum : sum;
                }
            }
        }

        const auto unit_of_S = [&](int r) { return power_of_two(max(-126, min(127, -q_exponent[r] - k_exponent))); };

        // Some row of this block does not see all of the tile, or there is a bias.
        if (BIAS || j0 + BC > keys_seen(position, N) || (WINDOW && j0 < keys_hidden(a, i0 + BR - 1))) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int row = row0 + r / 2 * 16 + r % 2 * 8, key = j0 + 2 * t;
                Biases<BC / 4, Neighbours<1, 0>> bias;
                if (BIAS) {
                    const BiasRow of(a, head, i0 + row);
                    bias.template read<BC / 4>(
                        a, head, [&](int) { return of; }, [&](int x) { return key + x / 2 * 8 + x % 2; });
                }
#pragma unroll
                for (int x = 0; x < BC / 4; ++x) {
                    float &score = s[r / 2][x / 2][r % 2 * 2 + x % 2];
                    if (ADDS) score = fmaf(score, unit_of_S(r), in_powers_of_two(bias.numbers[x]));
                    else if (BIAS) score *= unit_of_S(r);
                    if (bias.hides(x)) score = NEG_INF;
                    if (key + x / 2 * 8 + x % 2 >= keys_seen(position + row, N)) score = NEG_INF;
                    if (WINDOW && key + x / 2 * 8 + x % 2 < keys_hidden(a, i0 + row)) score = NEG_INF;
                }
            }
        }

        // m, P = exp(S - m) = hi + lo, l. The unit of S is a power of two: s * unit - m is exactly zero at the maximum.
        // Two neighbours in a row are one word of a left operand, two 16 x 8 blocks of S one left operand.
        Fragment p[ROW_TILES][BC / 16][2];
        float rescale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float largest = NEG_INF, sum = 0;
#pragma unroll
            for (int x = 0; x < BC / 8; ++x) {
                const float *const pair = s[r / 2][x] + r % 2 * 2;
                largest = fmaxf(largest, fmaxf(pair[0], pair[1]));
            }
            largest = quad_max(largest);
            const float unit = BIAS ? 1 : unit_of_S(r);
            const float m_new = fmaxf(m[r], largest * unit), shift = finite_or_zero(m_new);
            rescale[r] = exp2_fast(m[r] - shift);
            m[r] = m_new;
#pragma unroll
            for (int x = 0; x < BC / 8; ++x) {
                const float *const pair = s[r / 2][x] + r % 2 * 2;
                const float p0 = exp2_fast(fmaf(pair[0], unit, -(shift - P_BIAS))),
                            p1 = exp2_fast(fmaf(pair[1], unit, -(shift - P_BIAS)));
                sum = x == 0 ? p0 + p1 : sum + (p0 + p1);
                split(p0, p1, p[r / 2][x / 2][0].x[x % 2 * 2 + r % 2], p[r / 2][x / 2][1].x[x % 2 * 2 + r % 2]);
            }
            l[r] = fmaf(l[r], rescale[r], sum);
        }

        // T = P V from zero; O = O * rescale + T in the units of O; meanwhile the next K travels
        await_copies();
        __syncthreads();
        tile += K_TILE + V_TILE;
        if (j0 + BC < keys) copy_share<BC, D>(Kj + 16 * threadIdx.x, tile);
        const float unit = power_of_two(-v_exponent);
#pragma unroll
        for (int n = 0; n < D; n += STRIP) {
            if (never(v_exponent - n)) break;
            float T[ROW_TILES][STRIP / 8][4] = {};
            multiply_strip<D, BC, BC / 16>(T, [&](int rows, int k, bool lo) { return p[rows][k][lo]; }, Vj, n, 0);
#pragma unroll
            for (int x = 0; x < ROW_TILES * STRIP / 2; ++x) {
                const int rows = x / (STRIP / 2), block = x / 4 % (STRIP / 8);
                float &to = o[rows][n / 8 + block][x % 4];
                to = fmaf(to, rescale[rows * 2 + x % 4 / 2], T[rows][block][x % 4] * unit);
            }
        }
    }

    const Head out = head_of_block(a, ceil_div(opaque(a.M), BR));  // opaque: kept from above, it would take registers
    Answer *const O = rows_of(a.O, a.o, out.b, out.h);
    const int first = position - opaque(a.q_start) + row0;  // of this thread's rows
    bool finite = true;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        l[r] = quad_sum(l[r]);
        const int i = first + 8 * r;
        if (i >= M) continue;
        const float inverse_l = inverse(a, i, l[r]), factor = given_back(inverse_l, LARGEST_P);
        Answer *const row = O + i * row_stride(a.o);
        Finiteness finiteness;
#pragma unroll
        for (int x = 0; x < D / 8; ++x) {
            const int column = 8 * x + 2 * t, left = HEAD_DIM - column;
            const float first = o[r / 2][x][r % 2 * 2] * factor, second = o[r / 2][x][r % 2 * 2 + 1] * factor;
            finiteness.add(first, second);
            if (ALIGNED) {
                if (left > 0) put(row + column, make_float2(first, second));
            } else {
                if (left > 0) row[column] = first;
                if (left > 1) row[column + 1] = second;
            }
        }
        finite &= finiteness.finite();
        if (t == 0) give_lse(a, out, i, m[r] - P_BIAS, inverse_l);
    }
    if (IN_PLACE && !__all_sync(~0u, finite)) redo_rows(a, out, first - lane / 4, 16 * ROW_TILES);
}
