// What the threads of a block do together on a CPU, compiled once for all kernels.
//
// A block is an OS thread, and shared memory what is that thread's; a thread of the block is a fiber, which runs until it
// has to wait for others. Stricter than a GPU: a copy has arrived when it is waited for, and not before; threads that wait
// for each other or at different barriers, lanes that do different things together, addresses that are not aligned, and
// what is written beyond dynamic shared memory end the process, with a word. Not seen: what a GPU's threads do at the
// same time; of a program, findings.cpp sees that, too.
#include <setjmp.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda.h"

namespace emulator {

OF_A_BLOCK uint3 thread_index, block_index, grid_size, block_size;
OF_A_BLOCK int number;
alignas(1024) OF_A_BLOCK char dynamic_shared[MOST_SHARED + BEYOND];

constexpr int FAULT = 70;  // the exit code
#ifndef OF_ALL_BLOCKS
#define OF_ALL_BLOCKS thread_local
#endif

static std::string text(Place place) {
    if (!place.file) return "an unknown line";
    const char *file = place.file;
    while (strncmp(file, "./", 2) == 0) file += 2;
    return file + (":" + std::to_string(place.line));
}
static std::string text(uint3 at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

// ---- a block

// Blocks that meet: all that are still there.
struct Cluster {
    std::mutex mutex;
    int there, arrived = 0;
    std::atomic<int> meetings{0};
    std::vector<char *> shared;  // of each block
    explicit Cluster(int blocks) : there(blocks), shared(blocks) {}
    void arrive(bool to_leave = false) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (to_leave) --there;
        else ++arrived;
        if (arrived > 0 && arrived == there) arrived = 0, ++meetings;
    }
};

struct Copy {
    char *to;
    const char *from;
    int bytes, given;             // those that are read; the others are zeros
    uint32_t begun = checksum();  // of what is read, when the copy begins
    uint32_t checksum() const {
        uint32_t sum = 0;
        for (int at = 0; at < given; at += 4) {
            uint32_t word = 0;
            memcpy(&word, from + at, std::min(4, given - at));
            sum = (sum ^ word) * 16777619;
        }
        return sum;
    }
    void arrive() const {
        if (checksum() != begun) fail("what a copy reads is written while it is under way");
        memcpy(to, from, given), memset(to + given, 0, bytes - given);
    }
};

// A warpgroup's product, as far as it is one lane's. A is in shared memory, or these two rows of 16.
struct Product {
    ptx::Number number;
    std::vector<float *> d;
    std::array<std::array<double, 16>, 2> a;
    uint64_t A, B;
    bool in_shared, transposed_B, accumulate;
    int row;  // of the lane; another one is eight below
    void compute();
};

constexpr int STACK = 1 << 18;
#ifndef FINDINGS
constexpr size_t KEPT = 0;  // fibers after a launch: many libraries may be loaded
#else
constexpr size_t KEPT = 1024;
#endif

// A thread, and after it the thread of that number of the next block: to make one takes longer than most of them run.
struct Fiber {
    int number;
    uint3 index;
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t beginning;
    jmp_buf where;
    bool done;
    const char *doing;  // with others, and where
    Place place;
    unsigned syncs;  // of its warp
    int meetings;    // of its cluster
    int multiplied;  // by wgmma
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;                     // copies that are in no group yet
    std::deque<std::vector<Product>> products;  // of a warpgroup; the last group is open
    explicit Fiber(int number) : number(number) {}
    void start(uint3 block) {
        index = {number % block.x, number / block.x % block.y, number / block.x / block.y};
        done = false, doing = nullptr, syncs = 0, meetings = multiplied = 0;
        groups.clear(), open.clear(), products.clear(), products.emplace_back();
    }
};
OF_ALL_BLOCKS std::deque<Fiber> fibers;

// What lanes of a warp do together. Who has gone on may already give to the next one, but never to one after that.
struct Exchange {
    unsigned mask;           // of the lanes
    unsigned come = 0;       // lanes, to all of these exchanges
    unsigned turn[32] = {};  // how often a lane has come
    const char *what[2];
    uint64_t given[2][32][WORDS];
};
struct Warp {
    unsigned lanes;
    std::deque<Exchange> exchanges;  // one for each mask
    Exchange &of(unsigned mask) {
        for (Exchange &one : exchanges)
            if (one.mask == mask) return one;
        exchanges.emplace_back().mask = mask;
        return exchanges.back();
    }
};

OF_A_BLOCK struct Block *block;

// What findings have to know of: a block begins, and all threads of it have met.
static void block_begins();
static void all_have_met();

struct Barrier {
    int come = 0, meetings = 0;
    Place place;  // of who came first
};

// A barrier in shared memory, and the bulk copies that it counts: they arrive when somebody looks at it.
struct CountingBarrier {
    int count = 0, missing = 0, bytes = 0, phase = 0;
    std::vector<Copy> copies;
    void look() {
        for (const Copy &copy : std::exchange(copies, {})) copy.arrive(), bytes -= copy.bytes;
        end_phase();
    }
    void arrive() {
        if (--missing < 0) fail("more threads arrive at a barrier than it counts");
        end_phase();
    }
    void end_phase() {
        if (missing == 0 && bytes == 0) missing = count, phase ^= 1;
    }
};

struct Block {
    int threads, alive, in_cluster = 0;
    int arrived = 0, arrivals = 0;  // the cluster's meetings that it has come to, and threads at the next one
    bool progress = false;
    Barrier barriers[16];
    int votes[3] = {};  // at one meeting of all, the one after it, and the one before, which all have counted
    std::map<int, CountingBarrier> counting;  // by their addresses
    std::deque<Warp> warps;
    Fiber *now = nullptr;
    jmp_buf turn;
    Cluster *cluster;
    const Grid &grid;
    void (*kernel)(const void *);
    const void *given;

    Block(const Grid &grid, void (*kernel)(const void *), const void *given, Cluster *cluster)
        : threads(grid.threads.x * grid.threads.y * grid.threads.z),
          alive(threads),
          cluster(cluster),
          grid(grid),
          kernel(kernel),
          given(given) {
        for (int left = threads; left > 0; left -= 32) warps.push_back({left < 32 ? (1u << left) - 1 : ~0u});
    }

    void run(long which) {
        block_size = grid.threads, grid_size = grid.blocks;
        block_index.x = which % grid_size.x, which /= grid_size.x;
        block_index.y = which % grid_size.y, block_index.z = which / grid_size.y;
        block = this;
        memset(dynamic_shared, 0xff, grid.shared + BEYOND);  // NaN
        block_begins();
        while ((int)fibers.size() < threads) begin(fibers.emplace_back(fibers.size()));
        for (int i = 0; i < threads; ++i) fibers[i].start(grid.threads);
        while (alive > 0) {
            progress = false;
            for (int i = 0; i < threads; ++i)
                if (Fiber &fiber = fibers[grid.backwards ? threads - 1 - i : i]; !fiber.done) go_on(fiber);
            if (!progress && in_cluster == 0) fail("threads wait for each other");
            if (!progress) std::this_thread::yield();
        }
        now = nullptr;
        for (int i = 0; i < threads; ++i)
            if (fibers[i].multiplied != fibers[i / 128 * 128].multiplied)
                fail("warps of a warpgroup do not have the same wgmma");
        for (int i = grid.shared; i < grid.shared + BEYOND; ++i)
            if (dynamic_shared[i] != (char)0xff) fail("something was written beyond dynamic shared memory");
        block = nullptr;
    }
    // Until it waits, or has ended.
    void go_on(Fiber &fiber) {
        now = &fiber, number = fiber.number, thread_index = fiber.index;
        if (!_setjmp(turn)) _longjmp(fiber.where, 1);
    }
    void begin(Fiber &fiber) {
        now = &fiber;
        getcontext(&fiber.beginning);
        fiber.beginning.uc_stack.ss_sp = fiber.stack.get(), fiber.beginning.uc_stack.ss_size = STACK;
        makecontext(&fiber.beginning, live, 0);
        if (!_setjmp(turn)) setcontext(&fiber.beginning);
    }
    static void live();
    void leave() {
        if (now->meetings > arrived) --arrivals;
        now->done = progress = true, --alive;
        meet_cluster();
    }
    // Come to the cluster's meeting once all threads are there that have not left.
    void meet_cluster() {
        if (arrivals > 0 && arrivals == alive) arrivals = 0, ++arrived, cluster->arrive();
    }

    // A line for each thing that threads wait for, and for those that wait for nothing any more.
    std::string waiting() const {
        std::map<std::string, std::pair<int, int>> groups;  // how many, and the first
        for (int i = threads - 1; i >= 0; --i) {
            const Fiber &fiber = fibers[i];
            const std::string what = fiber.done    ? "left the kernel"
                                     : fiber.doing ? std::string("wait at ") + fiber.doing + ", " + text(fiber.place)
                                                   : "wait for memory";
            ++groups[what].first, groups[what].second = i;
        }
        std::string lines;
        for (const auto &[what, group] : groups)
            lines += "\n  " + std::to_string(group.first) + " threads, the first of them " +
                     text(fibers[group.second].index) + ", " + what;
        return lines;
    }
};

void wait() {
    Block &b = *block;
    if (!_setjmp(b.now->where)) _longjmp(b.turn, 1);
}
void Block::live() {
    while (true) {
        wait();
        block->kernel(block->given);
        block->leave();
    }
}

// Note what a thread is about to wait for, in words.
static void waits(const char *doing, Place place) { block->now->doing = doing, block->now->place = place; }

void barrier(int which, int threads, bool stay, Place place) {
    Barrier &here = block->barriers[which];
    const int mine = here.meetings;
    if (here.come == 0) here.place = place;
    if (here.place.line != place.line)
        fail("threads of a block are at different __syncthreads(), and so never meet", place);
    waits(which ? "a barrier" : "__syncthreads()", place);
    ++here.come, block->progress = true;
    while (stay && here.meetings == mine && here.come < (threads ? threads : block->alive)) wait();
    if (!stay && here.come < threads) return;
    if (here.meetings == mine) here.come = 0, ++here.meetings, block->progress = true, all_have_met();
}

unsigned lanes() { return block->warps[number / 32].lanes; }

const uint64_t (&exchange(const char *what, std::initializer_list<uint64_t> words, unsigned mask,
                          Place place))[32][WORDS] {
    Warp &warp = block->warps[number / 32];
    if (!(mask >> lane() & 1)) fail("a lane does with others what only the others were to do, by the mask", place);
    mask &= warp.lanes;
    Exchange &here = warp.of(mask);
    const unsigned mine = here.turn[lane()]++, side = mine % 2, all = __builtin_popcount(mask);
    if (here.come == mine * all) here.what[side] = what;
    if (strcmp(here.what[side], what)) fail("lanes of a warp do different things together", place);
    std::copy(words.begin(), words.end(), here.given[side][lane()]);
    waits(what, place);
    ++here.come, block->progress = true;
    while (here.come < (mine + 1) * all) wait();
    return here.given[side];
}

void launch(const Grid &grid, void (*kernel)(const void *), const void *given) {
    if (grid.shared > MOST_SHARED) fail("that is more shared memory than a block can have");
    for (long first = grid.first; first < grid.last; first += grid.cluster) {
        Cluster blocks(grid.cluster);
        const auto run = [&](int rank) {
            Block(grid, kernel, given, &blocks).run(first + rank);
            blocks.arrive(true);
        };
        if (grid.cluster == 1) {
            run(0);
            continue;
        }
        std::vector<std::thread> side_by_side;
        std::atomic<int> ready{0};
        for (int rank = 0; rank < grid.cluster; ++rank)
            side_by_side.emplace_back([&, rank] {
                blocks.shared[rank] = dynamic_shared, ++ready;
                while (ready < grid.cluster) std::this_thread::yield();
                run(rank);
            });
        for (std::thread &one : side_by_side) one.join();
    }
    if (fibers.size() > KEPT) fibers.clear();
}

#ifndef FINDINGS
static void block_begins() {}
static void all_have_met() {}
void fail(const char *what, Place place) {
    std::string lines = std::string("the emulator: ") + what;
    if (place.file) lines += ", " + text(place);
    if (block && block->now) lines += "\n  thread " + text(thread_index) + " of block " + text(block_index);
    if (block) lines += block->waiting();
    fprintf(stderr, "%s\n", lines.c_str());
    _exit(FAULT);
}
#endif

}  // namespace emulator

#ifndef FINDINGS
void __threadfence() {}
#endif
int __syncthreads_count(int vote, emulator::Place place) {
    emulator::Block &b = *emulator::block;
    const int turn = b.barriers[0].meetings % 3;
    b.votes[(turn + 1) % 3] = 0, b.votes[turn] += vote != 0;
    emulator::barrier(0, 0, true, place);
    return b.votes[turn];
}
void __syncwarp(unsigned mask, emulator::Place place) {
    emulator::exchange("__syncwarp", {}, mask, place);
    emulator::block->now->syncs++;
}

namespace ptx {
using emulator::aligned;
using emulator::lane;

// ---- copies to shared memory, until which nothing good is there

void cp_async(int to, const void *from, int bytes, int given) {
    emulator::Fiber &me = *emulator::block->now;
    char *const there = aligned(emulator::dynamic_shared + to, bytes);
    for (const auto &group : me.groups)
        for (const emulator::Copy &copy : group)
            if (copy.to == there) emulator::fail("two copies to one place are under way");
    memset(there, 0xdb, bytes);
    me.open.push_back({there, given ? aligned((const char *)from, bytes) : nullptr, bytes, given});
}
void cp_async_commit_group() {
    emulator::Fiber &me = *emulator::block->now;
    me.groups.push_back(std::move(me.open));
    me.open.clear();
}
void cp_async_wait_group(unsigned left) {
    auto &groups = emulator::block->now->groups;
    for (; groups.size() > left; groups.pop_front())
        for (const emulator::Copy &copy : groups.front()) copy.arrive();
}

void st_shared_v2_u32(int to, unsigned x, unsigned y) {
    unsigned *const there = (unsigned *)aligned(emulator::dynamic_shared + to, 8);
    there[0] = x, there[1] = y;
}
void st_shared_v4_u32(int to, unsigned x, unsigned y, unsigned z, unsigned w) {
    unsigned *const there = (unsigned *)aligned(emulator::dynamic_shared + to, 16);
    there[0] = x, there[1] = y, there[2] = z, there[3] = w;
}

// ---- products

// Four blocks of 8 x 8, a word of each to a lane; lane 8i + r knows where row r of block i is.
void ldmatrix(bool transposed, int at, std::initializer_list<unsigned *> words) {
    const auto &given = emulator::exchange("ldmatrix", {(uint64_t)aligned(emulator::dynamic_shared + at, 16)});
    const int row = lane() / 4, column = lane() % 4 * 2;
    int i = 0;
    const auto number = [&](int r, int c) { return (unsigned)((const unsigned short *)given[8 * i + r][0])[c]; };
    for (unsigned *const word : words) {
        *word = transposed ? number(column, row) | number(column + 1, row) << 16
                           : number(row, column) | number(row, column + 1) << 16;
        ++i;
    }
}

static double power_of_two(int exponent) { return bits_as<double>((uint64_t)(1023 + exponent) << 52); }

// A row of A or a column of B: the numbers whose bits are at(0) to at(15).
template <class At>
static std::array<double, 16> sixteen(Number number, At at) {
    unsigned short bits[16];
    std::array<double, 16> x;
    for (int k = 0; k < 16; ++k) bits[k] = at(k);
    if (number == Number::half)
        for (int k = 0; k < 16; ++k) x[k] = from_half(bits[k]);
    else
        for (int k = 0; k < 16; ++k) x[k] = from_bf16(bits[k]);
    return x;
}

// Products are nearly all of a long run: where a processor has wide registers, they are used.
#if defined __x86_64__ && defined __GLIBC__
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

// c and 16 products, as Hopper's tensor cores add them (MTC, arXiv 2512.07004): all cut to the last place but two of the
// largest, and their sum to the last place of a float, toward zero.
WIDE static float sum_of_products(float c, const std::array<double, 16> &a, const std::array<double, 16> &b) {
    constexpr int64_t SIZE = INT64_MAX,
                      INFINITE = 0x7ff;  // a number's bits but for its sign; the exponent of Inf and NaN
    double terms[16];
    int64_t largest = bits_as<int64_t>((double)c) & SIZE;
    for (int k = 0; k < 16; ++k) terms[k] = a[k] * b[k];
    for (int k = 0; k < 16; ++k) largest = std::max(largest, bits_as<int64_t>(terms[k]) & SIZE);
    if (largest == 0 || largest >> 52 == INFINITE) {
        double sum = c;
        for (const double term : terms) sum += term;
        return sum;
    }
    const int place = (int)(largest >> 52) - 1023 - 25;
    const double scale = power_of_two(-place);
    int units = (int)(c * scale);  // 17 times less than 2^26
    for (int k = 0; k < 16; ++k) units += (int)(terms[k] * scale);
    const int cut = max(0, 8 - __builtin_clz(std::abs(units) | 1));
    return (units / (1 << cut)) * power_of_two(place + cut);
}

// Each lane widens the numbers that it gives, two of them a word, for it gives each to several others.
void m16n8k16(Number number, std::initializer_list<float *> d, std::initializer_list<uint64_t> words) {
    const auto wide = [&](int word) -> uint64_t {
        const unsigned both = words.begin()[word];
        const auto one = [&](unsigned short x) { return number == Number::half ? from_half(x) : from_bf16(x); };
        return __float_as_uint(one(both)) | (uint64_t)__float_as_uint(one(both >> 16)) << 32;
    };
    const auto &given = emulator::exchange("mma", {wide(0), wide(1), wide(2), wide(3), wide(4), wide(5)});
    const auto part = [&](int lane, int word, int k) { return __uint_as_float(given[lane][word] >> k % 2 * 32); };
    std::array<double, 16> rows[2], columns[2];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) {
            rows[i][k] = part(lane() / 4 * 4 + k % 8 / 2, i + k / 8 * 2, k);
            columns[i][k] = part((lane() % 4 * 2 + i) * 4 + k % 8 / 2, 4 + k / 8, k);
        }
    for (int i = 0; i < 4; ++i) *d.begin()[i] = sum_of_products(*d.begin()[i], rows[i / 2], columns[i % 2]);
}

// ---- barriers that count

static emulator::CountingBarrier &counting(int at) { return emulator::block->counting[at]; }
void mbarrier_init_shared__cta_b64(int at, int count) { counting(at) = {count, count}; }
void mbarrier_arrive_shared__cta_b64(int at) { counting(at).arrive(), emulator::block->progress = true; }
void mbarrier_arrive_expect_tx_shared__cta_b64(int at, int bytes) {
    counting(at).bytes += bytes;
    mbarrier_arrive_shared__cta_b64(at);
}
void selp_u32(unsigned &ended, int at, unsigned parity) {
    emulator::CountingBarrier &barrier = counting(at);
    const int before = barrier.phase;
    barrier.look();
    if (barrier.phase != before) emulator::block->progress = true;
    ended = barrier.phase != (int)parity;
    if (!ended) emulator::wait();
}
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(int to, const void *from, int bytes, int at) {
    if (bytes % 16) emulator::fail("a bulk copy is not whole 16 bytes");
    char *const there = aligned(emulator::dynamic_shared + to, 16);
    memset(there, 0xdb, bytes);
    counting(at).copies.push_back({there, aligned((const char *)from, 16), bytes, bytes});
}

// Boxes as flashcli/kernels/boxes.py tells of them. Beyond the array's ends are zeros.
struct Boxes {
    const char *array;
    uint64_t strides[3];
    unsigned sizes[4], box[4], row;
};
void cp_async_bulk_tensor_4d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(int to, const void *map, int x,
                                                                                      int y, int z, int w, int at) {
    static const char zeros[16] = {};
    const Boxes &boxes = *(const Boxes *)map;
    const unsigned begin[4] = {(unsigned)x, (unsigned)y, (unsigned)z, (unsigned)w};
    unsigned bytes = 2;
    for (unsigned extent : boxes.box) bytes *= extent;
    for (unsigned done = 0; done < bytes; done += 16) {
        const char *from = boxes.array;
        bool inside = true;
        for (unsigned axis = 0, left = done / 2; axis < 4; ++axis) {
            const unsigned i = begin[axis] + left % boxes.box[axis];
            inside &= i < boxes.sizes[axis];
            from += i * (axis ? boxes.strides[axis - 1] : 2);
            left /= boxes.box[axis];
        }
        const unsigned there = to + done,
                       swizzled = boxes.row ? there ^ (there >> 7 & (boxes.row / 16 - 1)) << 4 : there;
        char *const chunk = aligned(emulator::dynamic_shared + swizzled, 16);
        memset(chunk, 0xdb, 16);
        counting(at).copies.push_back({chunk, inside ? aligned(from, 16) : zeros, 16, 16});
    }
}

// ---- products of a warpgroup

// Where a descriptor's number of a row and a column is, after which come those of as many columns as are left of eight.
// Eight rows are together, of 16 bytes or, swizzled, of 128, 64 or 32; it says how far the next eight rows and the next
// columns are.
static const unsigned short *of_descriptor(uint64_t descriptor, int row, int column) {
    const unsigned from = (descriptor & 0x3fff) * 16, across = (descriptor >> 16 & 0x3fff) * 16;
    const unsigned down = (descriptor >> 32 & 0x3fff) * 16, mode = descriptor >> 62, bytes = mode ? 256 >> mode : 16;
    const unsigned at = from + row / 8 * down + row % 8 * bytes + column * 2 / bytes * across + column * 2 % bytes;
    return (const unsigned short *)(emulator::dynamic_shared + (at ^ (at >> 7 & (bytes / 16 - 1)) << 4));
}

// A row of 16 numbers that a descriptor leads to.
static std::array<double, 16> row_of(Number number, uint64_t descriptor, int row) {
    const unsigned short *const halves[2] = {of_descriptor(descriptor, row, 0), of_descriptor(descriptor, row, 8)};
    return sixteen(number, [&](int k) { return halves[k / 8][k % 8]; });
}

}  // namespace ptx

void emulator::Product::compute() {
    for (int i = 0; i < 2 && in_shared; ++i)  // where B lies the other way, so does an A in shared memory
        a[i] = transposed_B ? ptx::sixteen(number, [&](int k) { return *ptx::of_descriptor(A, k, row + i * 8); })
                            : ptx::row_of(number, A, row + i * 8);
    for (int i = 0; i < (int)d.size(); i += i % 2 ? 3 : 1) {  // each column's two numbers
        const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
        const auto b = transposed_B ? ptx::sixteen(number, [&](int k) { return *ptx::of_descriptor(B, k, column); })
                                    : ptx::row_of(number, B, column);
        for (int j = 0; j < 2; ++j) {
            float &sum = *d[i + 2 * j];
            sum = ptx::sum_of_products(accumulate ? sum : 0, a[j], b);
        }
    }
}

namespace ptx {

void wgmma(Number number, bool transposed_B, std::initializer_list<Operand> operands) {
    const Operand *after = operands.begin();
    while (after->number) ++after;
    const int rest = operands.end() - after;  // A's descriptor, or its four registers; B's; a flag; whether B lies so
    const int flag = rest == 3 ? 2 : 5;
    emulator::Product product{number,
                              {},
                              {},
                              after[0].word,
                              after[flag - 1].word,
                              rest == 3,
                              transposed_B || (rest == 7 && after[6].word != 0),
                              after[flag].word != 0,
                              emulator::number % 128 / 32 * 16 + lane() / 4};
    for (const Operand *one = operands.begin(); one < after; ++one) product.d.push_back(one->number);
    if (!product.in_shared) {
        const auto &given = emulator::exchange("wgmma", {after[0].word, after[1].word, after[2].word, after[3].word});
        for (int row = 0; row < 2; ++row)
            product.a[row] = sixteen(number, [&](int k) {
                return (unsigned short)(given[lane() / 4 * 4 + k % 8 / 2][row + k / 8 * 2] >> k % 2 * 16);
            });
    }
    emulator::block->now->products.back().push_back(std::move(product)), ++emulator::block->now->multiplied;
}
void wgmma_commit_group_sync_aligned() { emulator::block->now->products.emplace_back(); }
void wgmma_wait_group_sync_aligned(int left) {
    auto &products = emulator::block->now->products;
    for (; (int)products.size() > left + 1; products.pop_front())
        for (emulator::Product &product : products.front()) product.compute();
}

// ---- clusters

void barrier_cluster_arrive_release() {
    emulator::Block &b = *emulator::block;
    ++b.now->meetings, ++b.in_cluster, b.progress = true;
    ++b.arrivals, b.meet_cluster();
}
void barrier_cluster_wait_acquire() {
    emulator::Block &b = *emulator::block;
    while (b.cluster->meetings < b.now->meetings) emulator::wait();
    --b.in_cluster, b.progress = true;
}
void *of_cluster(void *here, int rank) {
    return emulator::block->cluster->shared[rank] + __cvta_generic_to_shared(here);
}

}  // namespace ptx
