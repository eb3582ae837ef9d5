// Short sequences on Hopper: K and V are split in shared memory, without a pre-pass.
//
// What changed: the copies bring K and V in fp32, and a warpgroup splits them in place, where there was one that only
// copied. The others, three to five, take row tiles of 64 in turn, each for itself, while a head's tiles of K and V
// stay where they are; each keeps its Q in registers, as fragments. Of heads of more than 64 numbers two split and two
// multiply. There is no workspace.
// Why it is faster: up to some hundred keys few blocks read the same K and V; to write both split to memory and to read
// them again would be most of the traffic. A head is split once, not once a row tile. Of a last tile of few keys only
// those are multiplied. And warpgroups that wait for nobody but the tiles fill each other's gaps: with so few keys,
// most of them are where a row tile begins and ends.
// What it costs: a head that does not fit is split over and over; a warpgroup that multiplies has registers for one S
// or P only, so that its own products and exponentials follow one another; and copies move 16 bytes at a time: heads of
// 4, 8, .. 128 numbers whose rows start on 16 bytes.
//
// Macro beyond those of warpgroup.cuh: Q_AHEAD, whether there is room for Q of the next rows.
// Launch: `attention` with any number of blocks.
#define INTERLEAVES 1                                                     // keys, where biases are read
#define MASK_IN_SUMS (MASK_OF_KEYS && BIAS == 2)                          // with a bias beside it nothing was gained
#define PAD (HEAD_DIM > 64 ? 128 : IN_PLACE && HEAD_DIM <= 16 ? 16 : 32)  // files' time is that of reading and writing
#define T_AT_A_TIME (HEAD_DIM > 64 ? 32 : 64)                             // columns of P V: registers end
#define BY_FOURS 1
#include "warpgroup.cuh"

constexpr int PRODUCERS = D > 64 ? 2 : 1, CONSUMERS = THREADS / 128 - PRODUCERS;  // warpgroups that split, and multiply
static_assert(BR == 64 && CONSUMERS >= 2, "a row tile is one warpgroup's");
// Threads that split a tile, 32 numbers each: all, or half of them, or a warp. So one tile is split at a time, or one
// of K and one of V, or two of each.
constexpr int SPLITTERS = BC * D / 32, AT_A_TIME = 128 * PRODUCERS / SPLITTERS;
static_assert(AT_A_TIME == 1 || AT_A_TIME == 2 || AT_A_TIME == 4, "a splitting thread has registers for 32 floats");
static_assert(ALIGNED && STAGES >= 3, "bulk copies move 16 bytes; tiles are copied ahead");
// Registers of a thread: as many at the launch, then more for those that multiply, and what is left for those that
// split, 64 at least; each a multiple of 8.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8, OF_ALL = REGISTERS * THREADS / 128;
constexpr int CONSUMER_REGISTERS = (OF_ALL - PRODUCERS * 64) / CONSUMERS / 8 * 8;
constexpr int PRODUCER_REGISTERS = (OF_ALL - CONSUMERS * CONSUMER_REGISTERS) / PRODUCERS / 8 * 8;

// A slot holds the fp32 tile first, then the split one. K and V have slots of one size, in turn.
constexpr int SLOT = larger(larger(K_TILE, V_TILE), round_up(BC * HEAD_DIM * 4, 1024));
constexpr int CUT = 32;  // keys of the last tile that one product has at full rate; of long heads also half as many
// What scores of a tile begin with, behind all slots: 0, or -inf where the mask takes a key away. Four at a time, in the
// order of accumulators: each lane of a quad has its own, for two rows the same.
constexpr int STARTS = MASK_IN_SUMS ? BC / 2 : 0;
__device__ __forceinline__ int start_of(int key) {
    return key / 16 * 32 + key % 2 * 16 + key / 4 % 4 * 4 + key / 2 % 2;
}
static_assert(!MASK_IN_SUMS || INTERLEAVED, "keys are where `start_of` says");
// Behind them, with Q_AHEAD, Q of the next rows of each warpgroup that multiplies.
constexpr int NEXT_Q = Q_AHEAD ? 64 * 16 * K_STEPS * 4 : 0;
static_assert(SHARED == STAGES * (2 * SLOT + 16 * STARTS) + CONSUMERS * NEXT_Q + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 2048 <= 227 * 1024, "tiles must fit shared memory");
static_assert(SLOT % 1024 == 0, "the swizzle repeats every 1024 bytes");
// Whether V is waited for before the softmax: ptxas puts the wait amid its instructions else, and cannot mix them across
// it. With longer heads V comes too late for that.
constexpr bool V_BEFORE = D <= 32;

// The jobs of all blocks. A job is some row tiles of a head, for which the tiles of K and V that they see are brought
// once. It has all of a head's row tiles, if K and V fit shared memory, as long as there are whole heads for all
// blocks; those of the heads that are left are shared out, to as many blocks a head as there are for each: a second,
// smaller job would cost a block more than larger ones cost all.
struct Jobs {
    int Tr, Tc;              // row tiles and key tiles of a head
    int share, of_head;      // row tiles of a job, and jobs of a head that is left
    unsigned wholes, count;  // jobs that are a whole head, and all jobs
    __device__ __forceinline__ Jobs(const Attention &a) : Tr(ceil_div(a.M, BR)), Tc(max(1, ceil_div(a.N, BC))) {
        const bool fits = Tc <= STAGES;
        const unsigned heads = unsigned(a.B) * a.H;
        wholes = fits && heads >= gridDim.x ? heads - heads % gridDim.x : 0;
        const unsigned left = heads - wholes;
        share = 2 * left > gridDim.x ? Tr : ceil_div(Tr, gridDim.x / max(left, 1u));
        if (!fits) share = min(share, CONSUMERS);
        of_head = share == Tr ? 1 : ceil_div(Tr, share);
        count = wholes + left * of_head;
    }
    // The head of a job, counted from the whole ones on; most often a job is a head: a division takes 100 ns.
    __device__ __forceinline__ unsigned head_left(unsigned left) const { return of_head == 1 ? left : left / of_head; }
    __device__ __forceinline__ int row_tiles(unsigned job) const {
        const unsigned left = job - wholes;
        return job < wholes ? Tr : min(share, Tr - int(left - head_left(left) * of_head) * share);
    }
    // A row tile of a job. Number 0 sees as many tiles of K as any.
    __device__ __forceinline__ RowTile row_tile(unsigned job, int number, const Attention &a) const {
        if (job >= wholes) {
            const unsigned left = job - wholes, head = head_left(left);
            job = wholes + head, number += (left - head * of_head) * share;
        }
        return RowTile(job, (CAUSAL ? Tr - 1 - number : number) * BR, a);
    }
    __device__ __forceinline__ int key_tiles(unsigned job, const Attention &a) const {
        return CAUSAL ? row_tile(job, 0, a).tiles : Tc;
    }
};

// The row tiles of a block's jobs that are for one of the warpgroups: they take turns. With the causal mask, with which
// row tiles become shorter, they take them there and back again, so that the last one has not the first of each turn.
struct Turns {
    unsigned job = blockIdx.x;
    int row_tile, step;
    __device__ __forceinline__ Turns(int group, const Jobs &jobs)
        : row_tile(group), step(CAUSAL ? 2 * (CONSUMERS - group) - 1 : CONSUMERS) {
        into(jobs);
    }
    __device__ __forceinline__ void next(const Jobs &jobs) {
        row_tile += step, step = 2 * CONSUMERS - step;
        into(jobs);
    }
    __device__ __forceinline__ void into(const Jobs &jobs) {  // the job in which that row tile is
        for (int n; job < jobs.count && row_tile >= (n = jobs.row_tiles(job)); job += gridDim.x) row_tile -= n;
    }
};

// The state of the slots: barriers that tell that a tile was copied (raw), was split (full), and is not needed any more
// (free); and the exponent of its scale. In a stage slot 0 is K's, slot 1 is V's.
struct Slots {
    uint64_t raw[STAGES][2], full[STAGES][2], free[STAGES][2];
    int exponent[STAGES][2];
    bool redo[THREADS / 32];  // whether a warp has written a row that is not finite
};

// The tiles of K, or of V, of all of a block's jobs, one after the other: their rows go to shared memory, where they
// follow one another. If they do so in memory, one thread of a warp copies them in one piece; else two warps do, 16
// bytes at a time.
constexpr int COPYING_WARPS = DENSE ? 1 : 2, COPIERS = DENSE ? 1 : 64;
constexpr int AT_ONCE = D > 64 ? 1 : 32;       // jobs whose beginnings are worked out; of long heads registers end
constexpr int AHEAD = AT_A_TIME == 4 ? 4 : 3;  // tiles that are on their way, or there, before they are split: at most
struct Copies {
    const bool values;
    unsigned job = blockIdx.x, turn = 0;  // it is the lane with the number `turn` that knows where the job begins
    Ring ring;
    const float *mine = nullptr, *from;
    int my_rows = 0, rows;  // from there on
    int lead = 0;           // tiles that were copied and are not split yet

    __device__ __forceinline__ Copies(bool values, const Jobs &jobs, const Attention &a) : values(values) {
        begin(jobs, a);
    }
    __device__ __forceinline__ void begin(const Jobs &jobs, const Attention &a) {
        if (turn == 0) {
            const unsigned next = job + threadIdx.x % AT_ONCE * gridDim.x;
            if (next < jobs.count) {
                const RowTile tile = jobs.row_tile(next, 0, a);
                mine = values ? rows_of(a.V, a.v, tile.head.b, tile.head.kv)
                              : rows_of(a.K, a.k, tile.head.b, tile.head.kv);
                my_rows = CAUSAL ? min(a.N, tile.tiles * BC) : a.N;
            }
        }
        from = reinterpret_cast<const float *>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), turn));
        rows = CAUSAL ? __shfl_sync(~0u, my_rows, turn) : a.N;
        turn = (turn + 1) % AT_ONCE;
    }
    __device__ __forceinline__ void go_on(const Jobs &jobs, const Attention &a, unsigned char *tiles, Slots &slots) {
        const long long stride = row_stride(values ? a.v : a.k);
        while (job < jobs.count && lead < AHEAD) {
            uint64_t *const free = &slots.free[ring.stage][values];
            if (lead == 0) wait(free, ring.parity ^ 1);
            else if (!__all_sync(~0u, has_ended(free, ring.parity ^ 1))) break;
            copy(tiles + (2 * ring.stage + values) * SLOT, stride, min(BC, rows), &slots.raw[ring.stage][values]);
            ++lead;
            ring.next();
            rows -= BC, from += BC * stride;
            if (rows <= 0) job += gridDim.x, begin(jobs, a);
        }
    }
    __device__ __forceinline__ void copy(unsigned char *to, long long stride, int count, uint64_t *arrival) const {
        if (DENSE) {
            if (threadIdx.x % 32 > 0) return;
            arrive_expecting(arrival, count * HEAD_DIM * 4);
            bulk_copy(shared_address(to), from, count * HEAD_DIM * 4, arrival);
            return;
        }
        constexpr int FOURS = HEAD_DIM / 4, ACROSS = FOURS > 16  ? 32
                                                     : FOURS > 8 ? 16
                                                     : FOURS > 4 ? 8
                                                                 : 4;  // of a row, and threads for them
        constexpr int DOWN = COPIERS / ACROSS;                         // rows at a time
        const int four = threadIdx.x % ACROSS, first = threadIdx.x % COPIERS / ACROSS;
        uint32_t target = shared_address(to) + (first * FOURS + four) * 16;
        const float *source = from + first * stride + four * 4;
        const auto copy_rows = [&](int rows) {
#pragma unroll
            for (int r = 0; r < rows; r += DOWN) {
                copy16(target, source);
                target += DOWN * FOURS * 16, source += DOWN * stride;
            }
        };
        // The others wait for these copies: where their number is known, nothing is compared between them.
        if (four < FOURS && count == BC) {
            copy_rows(BC);
        } else if (four < FOURS) {
            int r = first;
            if (count >= 32) copy_rows(32), r += 32;
#pragma unroll 1
            for (; r < count; r += DOWN) copy_rows(DOWN);
        }
        arrive_after_copies(arrival);
    }
};

// The producer: tiles are copied in fp32, then split in place. Its first 64 threads copy K, the next 64 V; all of them
// split a tile of K and then one of V, or each half splits what it has copied, or its warps do so in turn.
__device__ __forceinline__ void split_tiles(const Attention &a, const Jobs &jobs, unsigned char *tiles, Slots &slots,
                                            float *starts) {
    __shared__ unsigned scratch[2][2][8 * PRODUCERS];  // two in turn: a slow warp may still read the one before
    const int thread = threadIdx.x % SPLITTERS, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), half = warp / 2;
    unsigned job = blockIdx.x;
    int first = 0;  // key of the tile
    const auto split = [&](Ring ring, int rows, int values, int barrier) {
        wait(&slots.raw[ring.stage][values], ring.parity);  // not before has every warpgroup let go of the slot
        for (int key = thread; key < (MASK_IN_SUMS && !values ? BC : 0); key += SPLITTERS) {
            float *const start = starts + ring.stage * 4 * STARTS + start_of(key);
            const unsigned char *const mask = mask_at(a, jobs.row_tile(job, 0, a).head, 0, min(first + key, a.N - 1));
            start[0] = start[2] = *mask ? 0 : NEG_INF;
        }
        unsigned char *const tile = tiles + (2 * ring.stage + values) * SLOT;
        const float *const fp32 = reinterpret_cast<const float *>(tile);
        unsigned *const words = scratch[values][ring.odd()];
        const int s = values ? split_V<SPLITTERS, From::TILE>(fp32, HEAD_DIM, 0, rows, tile, words, thread, barrier)
                             : split_K<SPLITTERS, From::TILE>(fp32, HEAD_DIM, 0, rows, tile, words, thread, barrier);
        if (thread == 0) slots.exponent[ring.stage][values] = s;
        fence_for_async();
        arrive(&slots.full[ring.stage][values]);
    };

    // To ask for a whole tile takes no time. To copy rows does, and the others wait for the tile that is to be split:
    // so it is split first, but for long rows, with which that gains nothing.
    constexpr bool SPLIT_FIRST = !DENSE && D <= 32;
    Copies copies(half, jobs, a);
    const auto copy = [&] {
        if (warp < 4 && warp % 2 < COPYING_WARPS) copies.go_on(jobs, a, tiles, slots);
    };
    if (SPLIT_FIRST) copy();
    Ring ring;
    for (; job < jobs.count; job += gridDim.x) {
        const int end = CAUSAL ? min(a.N, jobs.row_tile(job, 0, a).tiles * BC) : a.N;
        for (first = 0; first < end; first += BC, ring.next()) {
            if (!SPLIT_FIRST) copy();
            --copies.lead;
            const int rows = min(BC, end - first);
            if (AT_A_TIME == 1) split(ring, rows, 0, 7), split(ring, rows, 1, 7);
            else if (AT_A_TIME == 2 || ring.odd() == warp % 2) split(ring, rows, half, 7 + half);
            if (SPLIT_FIRST) copy();
        }
    }
}

// The number of this thread. Where registers are few, what is made of it is made where it is needed.
__device__ __forceinline__ unsigned this_thread() { return FEW_REGISTERS ? opaque(threadIdx.x) : threadIdx.x; }

// A warpgroup that multiplies: 64 rows of Q and O at a time.
struct Multiplier {
    Slots &slots;
    const float4 *const starts;
    const uint64_t desc;
    unsigned char *const next_Qs;  // of all warpgroups that multiply
    static __device__ __forceinline__ int row_of(unsigned thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
    const int row = row_of(threadIdx.x);  // this one, and row + 8, are this thread's
    Ring ring;
    __device__ __forceinline__ Multiplier(Slots &slots, const unsigned char *tiles, const float *starts)
        : slots(slots),
          starts(reinterpret_cast<const float4 *>(starts)),
          desc(uniform_descriptor(descriptor(shared_address(tiles)))),
          next_Qs(reinterpret_cast<unsigned char *>(const_cast<float *>(starts) + 4 * STAGES * STARTS)) {}

    // The place of this warpgroup's numbers of Q of the next rows.
    __device__ __forceinline__ unsigned char *next_Q() const {
        return next_Qs + (this_thread() / 128 - PRODUCERS) * NEXT_Q;
    }

    // Where Q has no place in shared memory, it is read from the cache, where this brings it.
    __device__ __forceinline__ void prefetch_Q(const Attention &a, const RowTile &next) const {
        const int thread = threadIdx.x % 128, i = min(next.i0 + thread % 64, a.M - 1);
        for (int column = thread / 64 * 32; column < HEAD_DIM; column += 64)
            prefetch(rows_of(a.Q, a.q, next.head.b, next.head.h) + i * row_stride(a.q) + column);
    }

    // What a thread needs of its rows of Q for its fragments: [r][k][f] of row + 8r, columns 16k + 8f + 2t and the next.
    using Numbers = float[2][K_STEPS][2][2];

    // Q of this thread's row + 8r, from a column on.
    __device__ __forceinline__ const float *row_of_Q(const Attention &a, const RowTile &next, int r, int column) const {
        const float *const Q = rows_of(a.Q, a.q, next.head.b, next.head.h) + column;
        return Q + min(next.i0 + row + 8 * r, a.M - 1) * row_stride(a.q);
    }
    __device__ __forceinline__ void load_Q(Numbers &x, const Attention &a, const RowTile &next) const {
        const int t = threadIdx.x % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float *const from = row_of_Q(a, next, r, t);
#pragma unroll
            for (int c = 0; c < 2 * K_STEPS; ++c) {
                const bool there = 8 * c + 8 <= HEAD_DIM || 8 * c + t < HEAD_DIM;
                const float2 two = there ? *reinterpret_cast<const float2 *>(from + 8 * c) : make_float2(0, 0);
                x[r][c / 2][c % 2][0] = two.x, x[r][c / 2][c % 2][1] = two.y;
            }
        }
    }

    // With Q_AHEAD they are copied to shared memory, and taken from there: so no register waits for memory, and they
    // come while the rows before are multiplied. Each lane copies four neighbours of a row for all of its quad: 64 bytes
    // of 16 columns. In every second pair of rows their halves change places, so that no bank is read twice.
    __device__ __forceinline__ void copy_Q(const Attention &a, const RowTile &next) const {
        const int place = this_thread() % 128 * 16, t = threadIdx.x % 4 * 4;
        const uint32_t to = shared_address(next_Q()) + (place ^ (place >> 2 & 32));
        __syncwarp();  // all lanes have taken what was there
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float *const from = row_of_Q(a, next, r, t);
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                const bool there = 16 * k + 16 <= HEAD_DIM || 16 * k + t < HEAD_DIM;
                copy_some<16>(to + (r * K_STEPS + k) * 2048, there ? from + 16 * k : a.Q, there ? 16 : 0);
            }
        }
    }
    __device__ __forceinline__ void take_Q(Numbers &x) const {
        await_copies();
        __syncwarp();
        const unsigned thread = this_thread() % 128, place = thread / 4 * 64 + thread % 4 * 8, half = place >> 2 & 32;
#pragma unroll
        for (int i = 0; i < 4 * K_STEPS; ++i) {
            const unsigned char *const from = next_Q() + place + (half ^ i % 2 * 32) + i / 2 * 2048;
            *reinterpret_cast<float2 *>(&x[0][0][0][0] + 2 * i) = *reinterpret_cast<const float2 *>(from);
        }
    }

    // Where there is no next row tile: zeros, so that no register keeps what was there before.
    __device__ __forceinline__ void forget(Numbers &x) const {
#pragma unroll
        for (int e = 0; e < 8 * K_STEPS; ++e) (&x[0][0][0][0])[e] = 0;
    }

    // `factor` is the mantissa of `factor_of_scores`. Returns the exponents of the two rows' scales.
    __device__ __forceinline__ int2 split_Q(QFragments &to, const Numbers &x, float factor) const {
        int s[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            s[r] = row_scale<K_STEPS * 4>(&x[r][0][0][0]);
            const float scale = power_of_two(s[r]) * factor;
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
                for (int f = 0; f < 2; ++f)
                    split_scaled(x[r][k][f][0], x[r][k][f][1], scale, to.hi[k][2 * f + r], to.lo[k][2 * f + r]);
        }
        return make_int2(s[0], s[1]);
    }

    // The slot is free again, as far as this warp is concerned.
    __device__ __forceinline__ void release(int values) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&slots.free[ring.stage][values]);
    }

    // S := what products with the tile of K are added to.
    template <int n>
    __device__ __forceinline__ void start(float (&S)[n]) const {
#pragma unroll
        for (int x = 0; x < (MASK_IN_SUMS ? n : 0); x += 4) {
            const float4 four = starts[ring.stage * STARTS + x + opaque(threadIdx.x) % 4];
            S[x] = four.x, S[x + 1] = four.y, S[x + 2] = four.z, S[x + 3] = four.w;
        }
    }

    // Lets tiles pass that no rows of this warpgroup see.
    __device__ __forceinline__ void pass_by(int tiles) {
        for (; tiles > 0; --tiles, ring.next())
            for (int values = 0; values < 2; ++values) {
                wait(&slots.full[ring.stage][values], ring.parity);
                release(values);
            }
    }

    // Attention of the rows of a row tile; its tiles of K and V are released, if they need not `stay` for other rows.
    // Calls beside_products() while the first are computed, and after_products() where there are registers again.
    template <class Beside, class After>
    __device__ __forceinline__ void attend(const Attention &a, const RowTile &here, const QFragments &Q,
                                           int2 q_exponent, int factor_exponent, bool stay, Beside beside_products,
                                           After after_products) {
        const int i = here.i0 + row;
        RowState rows = RowState::fresh(factor_exponent, q_exponent);
        const BiasRows biases(a, here.head, i);
        Partial sum = {};
        // O += P V of tile j, or of its first keys: two for each number that S has.
        const auto step = [&](auto &S, int j, bool first) {
            constexpr int STEPS = sizeof(S) / 32;
            const uint64_t K = desc + ring.stage * (2 * SLOT / 16), V = K + SLOT / 16;
            wait(&slots.full[ring.stage][0], ring.parity);
            start(S);
            issue_S(S, Q, K);
            if (first) beside_products();
            const int column = j * BC + first_key_of_lane(threadIdx.x % 4);
            Bias bias;
            biases.read_numbers<8 * STEPS>(bias, a, here.head, column);
            biases.read_mask<8 * STEPS>(bias, a, column);
            const auto end_of = [&](int x) { return keys_seen(a.q_start + x, a.N); };
            const int k_exponent = read_by_lane_0(slots.exponent[ring.stage][0]);
            wgmma_wait<0>();
            pin(S);
            if (!stay) release(0);
            if (V_BEFORE) wait(&slots.full[ring.stage][1], ring.parity);
            softmax(S, rows, k_exponent, (j + 1) * BC > end_of(here.i0), {end_of(i) - column, end_of(i + 8) - column},
                    bias);
            uint32_t P_hi[STEPS][4], P_lo[STEPS][4];
            split_P(S, P_hi, P_lo);

            float T[T_REGISTERS], O_factor;
            if (!V_BEFORE) wait(&slots.full[ring.stage][1], ring.parity);
            issue_T(T, P_hi, P_lo, V);
            const float T_factor = sum.unit.next(read_by_lane_0(slots.exponent[ring.stage][1]), &O_factor);
            const float c[2] = {rows.rescale[0] * O_factor, rows.rescale[1] * O_factor};
#pragma unroll
            for (int part = 0; part < T_CHUNKS; ++part) {
                if (part > 0) issue_T(T, P_hi, P_lo, V + split_offset<D>(part * T_COLUMNS, 0) / 16);
                wgmma_wait<0>();
                pin(T);
                if (!stay && part == T_CHUNKS - 1) release(1);
                add_T(sum.O[part], T, c, T_factor);
            }
            ring.next();
        };
        const int left = keys_seen(a.q_start + here.i0 + BR - 1, a.N) - (here.tiles - 1) * BC;
        const int whole = here.tiles - (left <= CUT);
#pragma unroll 1
        for (int j = 0; j < whole; ++j) {
            float S[S_REGISTERS];
            step(S, j, j == 0);
        }
        if (whole == 0) beside_products();
        if (D > 32 && left <= CUT / 2) {
            float S[CUT / 4];
            step(S, whole, false);
        } else if (left <= CUT) {
            float S[CUT / 2];
            step(S, whole, false);
        }
        after_products();
        sum.take(rows);
        if (!__all_sync(~0u, give_rows(a, here.head, here.i0 + row_of(this_thread()), sum)) && threadIdx.x % 32 == 0)
            slots.redo[threadIdx.x / 32] = true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Attention a) {
    extern __shared__ unsigned char unaligned[];
    __shared__ Slots here;
    Slots &slots = *where_it_is(&here);
    unsigned char *const tiles = where_it_is(unaligned + (-shared_address(unaligned) & 1023));
    float *const starts = reinterpret_cast<float *>(tiles + STAGES * 2 * SLOT);

    if (threadIdx.x < 2 * STAGES) {
        const int stage = threadIdx.x / 2, values = threadIdx.x % 2;
        barrier_init(&slots.raw[stage][values], COPIERS), barrier_init(&slots.full[stage][values], SPLITTERS);
        barrier_init(&slots.free[stage][values], 4 * CONSUMERS);  // each warp for itself
        barrier_init_done();
    }
    if (threadIdx.x < THREADS / 32) slots.redo[threadIdx.x] = false;
    __syncthreads();
    const Jobs jobs(a);

    // From one lane, so that ptxas sees that all of a warp have the same, and keeps what follows from it but once a
    // warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup < PRODUCERS) {
        registers_down<PRODUCER_REGISTERS>();
        split_tiles(a, jobs, tiles, slots, starts);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    Multiplier multiplier(slots, tiles, starts);
    int factor_exponent;
    const float factor = frexpf(factor_of_scores(a), &factor_exponent);

    Turns mine(warpgroup - PRODUCERS, jobs);
    RowTile next;
    unsigned job = blockIdx.x;  // whose first tile is the ring's
    Multiplier::Numbers numbers;
    const auto load_next = [&] {
        if (Q_AHEAD) return;
        if (mine.job < jobs.count) multiplier.load_Q(numbers, a, next);
        else multiplier.forget(numbers);
    };
    const auto ask_for_next = [&] {
        if (mine.job >= jobs.count) return;
        next = jobs.row_tile(mine.job, mine.row_tile, a);
        if (Q_AHEAD) multiplier.copy_Q(a, next);
        else multiplier.prefetch_Q(a, next);
    };
    ask_for_next();
    load_next();
    while (mine.job < jobs.count) {
        for (; job < mine.job; job += gridDim.x) multiplier.pass_by(jobs.key_tiles(job, a));
        const RowTile here = next;
        QFragments Q;
        if (Q_AHEAD) multiplier.take_Q(numbers);
        const int2 s = multiplier.split_Q(Q, numbers, factor);
        mine.next(jobs);
        const bool stay = mine.job == job;
        const Ring first = multiplier.ring;
        multiplier.attend(a, here, Q, s, factor_exponent, stay, ask_for_next, load_next);
        if (stay) {
            multiplier.ring = first;
        } else {
            multiplier.pass_by(jobs.key_tiles(job, a) - here.tiles);
            job += gridDim.x;
        }
    }
    for (; job < jobs.count; job += gridDim.x) multiplier.pass_by(jobs.key_tiles(job, a));

    // Seldom: here, and not in the loop, where registers end.
    __syncwarp();
    if (IN_PLACE && slots.redo[threadIdx.x / 32])
        for (Turns done(uniform(this_thread() / 128) - PRODUCERS, jobs); done.job < jobs.count; done.next(jobs)) {
            const RowTile tile = jobs.row_tile(done.job, done.row_tile, a);
            redo_rows(a, tile.head, tile.i0 + threadIdx.x % 128 / 32 * 16, 16);
        }
}
