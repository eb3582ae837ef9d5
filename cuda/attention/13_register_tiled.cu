// Register tiles: the fp32 kernel for any GPU.
//
// What changed: a thread no longer owns a row. The threads of a warp, 4 down and 8 across, own a tile of S together,
// each a register tile of ROWS x BC/8 elements of it, and afterwards a register tile of O, ROWS x 8 columns a panel.
// Why it is faster: a float4 of Q read from shared memory now serves BC/8 keys and a float4 of K serves ROWS queries,
// so that with 8 x 8 tiles one 16-byte read feeds 16 FFMA instead of 4 and the memory pipe keeps up with the
// arithmetic. Half as many shared reads would do no good any more; the FFMA are what is left. The next panel of K or V
// travels from global memory (cp.async, where there is such a thing) while this one is multiplied.
// What it costs: P must change owners between the two products, through shared memory; few threads, with up to 255
// registers each; and a barrier a panel.
//
// Accuracy: rounding errors grow with the number of additions to a large sum. So S adds up eight products at a time,
// each eight starting from zero (one FADD to eight FFMA), and each tile's P V and row sum start from zero too: an
// element of O meets Bc + N / Bc roundings, not N.
#include "exact.cuh"
#include "float4.cuh"

constexpr int PANEL = HEAD_DIM <= 32 ? 32 : 64;    // columns of K or V in shared memory at a time
constexpr int PANELS = ceil_div(HEAD_DIM, PANEL);  // a longer head passes by in panels
constexpr int D = PANELS * PANEL;                  // zero-padded, so that every panel is whole
constexpr int CHUNKS = PANEL / 4;                  // float4s in a row of a panel

constexpr int ACROSS = 8;                                    // threads of a warp that share a row
constexpr int ROWS = PANELS == 1 ? 8 : PANELS == 2 ? 4 : 2;  // rows a thread: O takes ROWS * D / 8 registers
constexpr int KEYS = BC / ACROSS;                            // keys a thread, in the tile of S
constexpr int UNROLLED = BIAS ? 1 : 2;                       // steps of P V: a bias takes the registers of the second
constexpr int COLUMNS = PANEL / ACROSS;                      // columns a thread, in a panel of O

static_assert(THREADS % 32 == 0 && BR == THREADS / ACROSS * ROWS, "every warp owns 4 * ROWS rows");
static_assert(BC % 32 == 0, "a thread's keys come in fours, and the swizzle moves float4s within groups of eight");
static_assert(THREADS % CHUNKS == 0 && BC % (THREADS / CHUNKS) == 0,
              "a thread copies one column of float4s of a panel");
static_assert(PANELS <= 4 && COLUMNS % 4 == 0, "registers for O; V is read as float4");

// Shared memory, in float4s. Rows are multiples of 128 bytes, so equal columns of different rows are in the same banks.
// To keep apart the addresses that a warp reads at once, float4 c of row r is stored at c ^ swizzle(r).
extern __shared__ __align__(128) float4 shared[];
constexpr int Q_SIZE = BR * D / 4, PANEL_SIZE = BC * CHUNKS;  // Qi[BR][D], two panels [BC][PANEL], P[BR][BC]
static_assert(SHARED == 16 * (Q_SIZE + 2 * PANEL_SIZE + BR * BC / 4), "room for these");

__device__ constexpr int swizzle_key(int j) { return j / 4 % 8; }         // K: the 8 threads across read keys 4 apart
__device__ constexpr int swizzle_row(int r) { return r / ROWS % 2 * 4; }  // Q, P: two threads down share a transaction

// One panel of K or V: rows j0 to j0 + Bc, columns panel * PANEL on. (V needs no swizzle, but does not mind it.)
__device__ __forceinline__ void copy_panel(float4 *to, const Input *matrix, long long stride, int j0, int panel,
                                           int N) {
    const int c = threadIdx.x % CHUNKS, r = threadIdx.x / CHUNKS;
#pragma unroll
    for (int x = 0; x < BC; x += THREADS / CHUNKS)
        copy4(to + (r + x) * CHUNKS + (c ^ swizzle_key(r + x)), matrix, stride, j0 + r + x, panel * PANEL + 4 * c, N);
}

// One block a multiprocessor at least, so that a thread may have all registers: else ptxas spills some.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Attention all) {
    const Attention &a = of_block(all);
    if (!has_tile(a)) return;
    const int M = a.M, N = a.N;
    float4 *const Qi = shared, *const panels = Qi + Q_SIZE, *const P = panels + 2 * PANEL_SIZE;

    // Neighbours in a row are lanes 1, 4 and 8 apart, neighbours in a column 2 and 16: the pipe merges the 16-byte
    // reads of a half warp into one transaction only if lanes 1 apart, or lanes 2 apart, read the same address.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int across = (lane & 1) | (lane >> 1 & 6), down = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int r0 = (warp * 4 + down) * ROWS;  // this thread's rows of the tile: r0 to r0 + ROWS

    const int Tr = ceil_div(M, BR), tile = tile_of_block(a, Tr);
    const Head head = head_of_block(a, Tr);
    const int i0 = (CAUSAL ? Tr - 1 - tile : tile) * BR;  // causal: the longest rows first
    const Input *const Q = rows_of(a.Q, a.q, head.b, head.h);
    const Input *const K = rows_of(a.K, a.k, head.b, head.kv), *const V = rows_of(a.V, a.v, head.b, head.kv);
    const long long k_stride = row_stride(a.k), v_stride = row_stride(a.v);

    const int first_j0 = first_tile_seen(a, i0) * BC;
    copy_panel(panels, K, k_stride, first_j0, 0, N);
    for (int x = threadIdx.x; x < Q_SIZE; x += THREADS) {  // Q carries the scale, so that S is in powers of two
        const int r = x / (D / 4), c = x % (D / 4), left = i0 + r < M ? HEAD_DIM - 4 * c : 0;
        const Input *q = Q + (i0 + r) * row_stride(a.q) + 4 * c;
        const float factor = a.scale * LOG2E;
        Qi[r * (D / 4) + (c ^ swizzle_row(r))] =
            make_float4(left > 0 ? q[0] * factor : 0, left > 1 ? q[1] * factor : 0, left > 2 ? q[2] * factor : 0,
                        left > 3 ? q[3] * factor : 0);
    }

    float o[PANELS][ROWS][COLUMNS] = {}, m[ROWS], l[ROWS] = {}, rescale[ROWS];  // l: of this thread's keys only
    for (int i = 0; i < ROWS; ++i) m[i] = NEG_INF;

    const int keys = keys_seen(a.q_start + i0 + BR - 1, N);  // keys that some row of this block sees
#pragma unroll 1
    for (int j0 = first_j0; j0 < keys; j0 += BC) {
        // S = Q Kᵀ. The thread's keys are 4 * across + 32 * (j / 4) + j % 4.
        float s[ROWS][KEYS] = {};
#pragma unroll 1
        for (int panel = 0; panel < PANELS; ++panel) {
            await_tiles();
            if (panel + 1 < PANELS) copy_panel(panels + (panel + 1) % 2 * PANEL_SIZE, K, k_stride, j0, panel + 1, N);
            else copy_panel(panels + PANELS % 2 * PANEL_SIZE, V, v_stride, j0, 0, N);

            const float4 *const Kj = panels + panel % 2 * PANEL_SIZE;
            const int q_at = r0 * (D / 4) + swizzle_row(r0), k_at = 4 * across * CHUNKS + swizzle_key(4 * across);
            // Columns of padding add nothing.
            const int chunks = min(CHUNKS, round_up(HEAD_DIM, 8) / 4 - panel * CHUNKS);
#pragma unroll 1
            for (int c = 0; c < chunks; c += 2) {  // eight columns at a time: columns 4c to 4c + 7
                float4 q[ROWS][2];
#pragma unroll
                for (int x = 0; x < 2 * ROWS; ++x)
                    q[x / 2][x % 2] = Qi[(q_at ^ (c + x % 2)) + x / 2 * (D / 4) + panel * CHUNKS];
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    const int key = (j / 4 * 32 + j % 4) * CHUNKS;
                    const float4 k[2] = {Kj[(k_at ^ c) + key], Kj[(k_at ^ (c + 1)) + key]};
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        float sum = part(q[i][0], 0) * part(k[0], 0);
#pragma unroll
                        for (int x = 1; x < 8; ++x) sum += part(q[i][x / 4], x % 4) * part(k[x / 4], x % 4);
                        s[i][j] += sum;
                    }
                }
            }
        }

        // Some row of this block does not see all of the tile, or there is a bias.
        if (BIAS || j0 + BC > keys_seen(a.q_start + i0, N) || (WINDOW && j0 < keys_hidden(a, i0 + BR - 1))) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = (BIAS ? opaque(i0) : i0) + r0 + i, key = j0 + 4 * across;  // else it keeps offsets
                Biases<KEYS, Neighbours<1, 2>> bias;
                if (BIAS) {
                    const BiasRow of(a, head, row);
                    bias.template read<KEYS>(
                        a, head, [&](int) { return of; }, [&](int j) { return key + j / 4 * 32 + j % 4; });
                }
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    if (BIAS) s[i][j] = biased(s[i][j], 1, bias, j);
                    if (!sees(a, row, key + j / 4 * 32 + j % 4)) s[i][j] = NEG_INF;
                }
            }
        }

        // m, P = exp(S - m), l
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float m_new = m[i], sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) m_new = fmaxf(m_new, s[i][j]);
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 4));
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 8));
            const float shift = finite_or_zero(m_new);
            rescale[i] = exp2_fast(m[i] - shift);
            m[i] = m_new;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) sum += s[i][j] = exp2_fast(s[i][j] - shift);
            l[i] = l[i] * rescale[i] + sum;
#pragma unroll
            for (int j = 0; j < KEYS; j += 4)
                P[(r0 + i) * (BC / 4) + (across ^ swizzle_row(r0)) + j * 2] =
                    make_float4(s[i][j], s[i][j + 1], s[i][j + 2], s[i][j + 3]);
        }

        // T = P V from zero; O = O * rescale + T. The thread's columns are 4 * across + 32 * (x / 4) + x % 4.
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            await_tiles();
            if (panel + 1 < PANELS)
                copy_panel(panels + (PANELS + panel + 1) % 2 * PANEL_SIZE, V, v_stride, j0, panel + 1, N);
            else if (j0 + BC < keys) copy_panel(panels, K, k_stride, j0 + BC, 0, N);

            const float4 *const Vj = panels + (PANELS + panel) % 2 * PANEL_SIZE;
            const int p_at = r0 * (BC / 4) + swizzle_row(r0);
            float t[ROWS][COLUMNS] = {};
#pragma unroll UNROLLED
            for (int c = 0; c < BC / 4; ++c) {  // keys 4c to 4c + 3
                float4 p[ROWS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) p[i] = P[(p_at ^ c) + i * (BC / 4)];
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int x = 0; x < COLUMNS; x += 4) {
                        const float4 v = Vj[(4 * c + j) * CHUNKS + (across ^ swizzle_key(4 * c)) + x * 2];
#pragma unroll
                        for (int y = 0; y < 4; ++y)
#pragma unroll
                            for (int i = 0; i < ROWS; ++i) t[i][x + y] += part(p[i], j) * part(v, y);
                    }
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int x = 0; x < COLUMNS; ++x) o[panel][i][x] = o[panel][i][x] * rescale[i] + t[i][x];
        }
    }

    bool finite = true;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 4);
        l[i] += __shfl_xor_sync(~0u, l[i], 8);
        const int row_index = opaque(i0) + r0 + i;
        if (row_index >= M) continue;
        const float factor = inverse(a, row_index, l[i]);
        Answer *const row = rows_of(a.O, a.o, head.b, head.h) + row_index * row_stride(a.o);
        if (across == 0) give_lse(a, head, row_index, m[i], factor);
        if (IN_PLACE && factor == 0)  // it sees no key: nor does it see what is not finite
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
                for (int x = 0; x < COLUMNS; ++x) o[panel][i][x] = 0;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
            for (int x = 0; x < COLUMNS; x += 4) {
                const float *y = &o[panel][i][x];
                const int column = panel * PANEL + 4 * across + x * 8, left = HEAD_DIM - column;
                if (BIAS || WINDOW)
                    finite &=
                        fabsf(y[0] * factor) + fabsf(y[1] * factor) + fabsf(y[2] * factor) + fabsf(y[3] * factor) <
                        INFINITY_F;
                if (ALIGNED) {
                    if (left > 0)
                        put(row + column, make_float4(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor));
                } else {
#pragma unroll
                    for (int z = 0; z < 4; ++z)
                        if (z < left) row[column + z] = y[z] * factor;
                }
            }
    }
    // A key that a bias, a mask or a window takes away has met P = 0 above: NaN, if its V is not finite.
    if ((BIAS || WINDOW) && !__all_sync(~0u, finite)) redo_rows(a, head, i0 + warp * 4 * ROWS, 4 * ROWS);
}
