// A program's blocks, its memory on the "GPU", and what it does wrong.
//
// Each access to memory of a program's own code calls a function here: a program is compiled as for a check of threads
// (-fsanitize=thread), and these functions are in the place of that check's library. So are those that are told of
// indices, addresses and divisors that may not be (-fsanitize=bounds, alignment, null, integer-divide-by-zero). The
// first fault is told, with its line, and ends the program.
//
// Two accesses of different threads to the same bytes are a race if one writes, not both are atomic, and nothing makes
// one come first: of a block, a __syncthreads, or in a warp a __syncwarp; of different blocks of a launch, the launch's
// end. Who writes what is there already changes nothing, and is let pass.
#define FINDINGS
#define OF_ALL_BLOCKS
#include "program.h"

#include "block.cpp"

#include <limits.h>
#include <link.h>
#include <sys/auxv.h>
#include <sys/mman.h>

#include <chrono>
#include <fstream>

namespace emulator {

struct Range {
    uintptr_t start = 0, bytes = 0;
    bool holds(uintptr_t at) const { return at - start < bytes; }
};
static Range whole_program, static_shared, arguments;
static uintptr_t loaded_at;
static char path_of_program[PATH_MAX];

// ---- accesses, as they are remembered

// Of a word of four bytes. Moments count barriers and blocks, from one: 0 is no access at all.
struct Access {
    uint32_t moment, from;  // where the code is, from the program's start
    uint16_t thread;
    uint8_t bytes;  // of the word, as a mask
    bool atomic;
    uint32_t syncs;  // of the thread's warp, that it had come to
};
struct Cell {
    Access write, read, other_read;  // the last ones; the last read of another thread than `read`
};
static uint32_t moment = 1, launched = 1, block_began = 1;
static bool fenced;  // a launch with __threadfence: its blocks may wait for each other in ways that are not seen

static Cell *cells_for(size_t bytes) {
    const size_t count = (bytes + 3) / 4 + 4;
    void *const cells =
        mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return cells == MAP_FAILED ? nullptr : (Cell *)cells;
}
static Cell *cells_of_static, *cells_of_dynamic;

// ---- the GPU's memory

struct Allocation {
    uintptr_t start;
    size_t bytes;
    Place place;
    bool managed, freed;
    Cell *cells;
    bool holds(uintptr_t at) const { return at - start < bytes; }
};
// In order of their addresses. Freed ones are there, too: their memory is not used again.
static std::vector<Allocation> allocations;
static Range around_all;

// The last allocation that begins at or before an address; null if there is none.
static Allocation *allocation_before(uintptr_t at) {
    auto after = std::upper_bound(allocations.begin(), allocations.end(), at,
                                  [](uintptr_t at, const Allocation &one) { return at < one.start; });
    return after == allocations.begin() ? nullptr : &*--after;
}
static Allocation *allocation_of(uintptr_t at) {
    Allocation *const one = around_all.holds(at) ? allocation_before(at) : nullptr;
    return one && one->holds(at) && !one->freed ? one : nullptr;
}

// ---- telling

static const Launch *launch_now;
std::string text(const Launch &launch) {
    std::string lines = std::string(launch.kernel) + "<<<" + text(launch.grid) + ", " + text(launch.block);
    if (launch.shared) lines += ", " + std::to_string(launch.shared);
    return lines + ">>>";
}

// The line of a source that code comes from: the innermost one that is not the emulator's.
static Place place_of(uint32_t from) {
    char command[128], line[4096];
    snprintf(command, sizeof command, "addr2line -i -e \"$EMULATED_PROGRAM\" 0x%lx 2>/dev/null",
             (unsigned long)(whole_program.start + from - loaded_at - 1));
    setenv("EMULATED_PROGRAM", path_of_program, 1);
    Place found;
    if (FILE *const told = popen(command, "r")) {
        while (!found.file && fgets(line, sizeof line, told)) {
            const std::string all = line;
            const size_t colon = all.rfind(':');
            if (colon == std::string::npos || all[0] == '?' || all.find("/flashcli/emulator/") != std::string::npos ||
                all.find("/include/c++/") != std::string::npos)
                continue;
            found = {strdup(all.substr(0, colon).c_str()), atoi(all.c_str() + colon + 1)};
        }
        pclose(told);
    }
    return found;
}
static std::string line_of(Place place) {
    std::ifstream file(place.file ? place.file : "");
    std::string line;
    for (int i = 0; i < place.line && std::getline(file, line); ++i) {}
    const size_t begin = line.find_first_not_of(" \t");
    return !file || begin == std::string::npos ? "" : ":  " + line.substr(begin);
}
static std::string shown(Place place) { return "\n  " + text(place) + line_of(place); }
static std::string bytes_text(size_t bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

// A fault in words, last what it is: who sees one line of all, as in a table of verdicts, sees that.
[[noreturn]] static void tell(Place place, const std::string &what, std::string details) {
    if (launch_now) details += "\n  " + text(launch_now->place) + ": in " + text(*launch_now);
    if (block) details += ", block " + text(block_index);
    if (block && block->now) details += ", thread " + text(thread_index);
    fflush(stdout);
    fprintf(stderr, "emulated: a fault in the program, which ends here with exit code %d%s\n%s: %s\n", FAULT,
            details.c_str(), text(place).c_str(), what.c_str());
    _exit(FAULT);
}
void fail(const char *what, Place place) {
    if (!place.file && block && block->now) place = block->now->place;
    tell(place, what, block ? block->waiting() : "");
}
static uint32_t here(void *from) { return (uintptr_t)from - whole_program.start; }

// ---- races

struct Race {
    Access before, now;
    bool wrote, writes, shared;
    uintptr_t word;
    uint32_t old;
    uint3 thread;
};
static Race suspected;  // a write over a write, until it is seen whether it changes anything
static bool suspects;

static void tell_race(const Race &race) {
    const Place now = place_of(race.now.from), before = place_of(race.before.from);
    const bool apart = race.before.moment < block_began;
    const uint3 size = block_size, other = {race.before.thread % size.x, race.before.thread / size.x % size.y,
                                            race.before.thread / size.x / size.y};
    std::string what = apart ? "a race between blocks: they access the same bytes, and may run at the same time"
                             : std::string("a race in ") + (race.shared ? "shared" : "global") +
                                   " memory: threads access the same bytes, with no barrier between";
    std::string details =
        "\n  " + text(now) + ": thread " + text(race.thread) + (race.writes ? " writes" : " reads") + line_of(now);
    details += "\n  " + text(before) + ": thread " + text(other) + (apart ? " of another block" : "") +
               (race.wrote ? " wrote" : " read") + " before" + line_of(before);
    thread_index = race.thread;
    tell(now, what, details);
}
static void look_at_suspected() {
    suspects = false;
    if (memcmp(&suspected.old, (const void *)suspected.word, 4)) tell_race(suspected);
}

static bool conflict(const Access &before, const Access &now, bool shared) {
    if (before.moment < launched || !(before.bytes & now.bytes) || (before.atomic && now.atomic)) return false;
    if (before.moment < block_began) return !shared && !fenced;
    if (before.moment < now.moment || before.thread == now.thread) return false;
    return before.thread / 32 != now.thread / 32 || before.syncs >= now.syncs;
}

static void remember(Cell &cell, const Access &now, bool write, bool shared, uintptr_t word) {
    const auto race = [&](const Access &before, bool wrote) {
        uint32_t old;
        memcpy(&old, (const void *)word, 4);
        return Race{before, now, wrote, write, shared, word, old, thread_index};
    };
    if (conflict(cell.write, now, shared)) {
        if (!write) tell_race(race(cell.write, true));
        if (!suspects) suspected = race(cell.write, true), suspects = true;
    }
    if (write) {
        for (const Access &read : {cell.read, cell.other_read})
            if (conflict(read, now, shared)) tell_race(race(read, false));
        cell.write = now;
    } else {
        if (cell.read.thread != now.thread || cell.read.moment < block_began) cell.other_read = cell.read;
        cell.read = now;
    }
}

// ---- each access

[[noreturn]] static void tell_access(uintptr_t at, unsigned size, bool write, void *from, const std::string &what) {
    const Place place = place_of(here(from));
    tell(place, (write ? "writes " : "reads ") + bytes_text(size) + " " + what, shown(place));
}
[[noreturn]] static void tell_outside(uintptr_t at, unsigned size, bool write, void *from) {
    constexpr uintptr_t NEAR = 1 << 28;
    const Allocation *const before = allocation_before(at), *after = before ? before + 1 : allocations.data();
    const bool is_last = after == allocations.data() + allocations.size();
    const uintptr_t gap = before ? at - before->start - before->bytes : ~0ul;
    const uintptr_t to_next = is_last ? ~0ul : after->start - at;
    std::string what;
    const auto given = [](const Allocation &one) {
        return "the " + bytes_text(one.bytes) + " of cudaMalloc at " + text(one.place);
    };
    if (before && before->holds(at) && before->freed) what = "of memory that is free again: of " + given(*before);
    else if (gap < NEAR && gap <= to_next)
        what = "out of bounds: " + (gap ? bytes_text(gap) : std::string("right")) + " behind " + given(*before);
    else if (to_next < NEAR) what = "out of bounds: " + bytes_text(to_next) + " before " + given(*after);
    else if (at < 4096) what = "at a null pointer";
    else what = "that are not the GPU's: a pointer to memory of the host, or one that was never set";
    tell_access(at, size, write, from, what);
}

static inline void look(const void *address, unsigned size, bool write, void *from, bool atomic = false) {
    const uintptr_t at = (uintptr_t)address;
    if (suspects) look_at_suspected();
    if (!block || !block->now) {
        if (const Allocation *const one = allocation_of(at); one && !one->managed)
            tell_access(at, size, write, from, "of the GPU's memory, on the CPU: copy it with cudaMemcpy");
        return;
    }
    Cell *cells;
    bool shared = true;
    uintptr_t offset = at - (uintptr_t)dynamic_shared;
    if (offset < sizeof dynamic_shared) {
        if (offset + size > (unsigned)block->grid.shared)
            tell_access(
                at, size, write, from,
                "out of bounds: behind the end of the " + bytes_text(block->grid.shared) + " of dynamic shared memory");
        cells = cells_of_dynamic;
    } else if (static_shared.holds(at)) {
        offset = at - static_shared.start;
        cells = cells_of_static;
    } else if (whole_program.holds(at) || at - (uintptr_t)block->now->stack.get() < STACK || arguments.holds(at)) {
        return;
    } else {
        Allocation *const one = allocation_of(at);
        if (!one || at + size > one->start + one->bytes)
            tell_outside(one ? one->start + one->bytes : at, size, write, from);
        if (one->managed && !one->cells) return;
        offset = at - one->start, cells = one->cells, shared = false;
    }
    const uint64_t bytes = ((1ull << size) - 1) << offset % 4;
    for (uintptr_t word = offset / 4; word * 4 < offset + size; ++word) {
        const uint8_t mask = bytes >> (word - offset / 4) * 4 & 15;
        remember(cells[word], {moment, here(from), (uint16_t)number, mask, atomic, block->now->syncs}, write, shared,
                 at - offset + word * 4);
    }
}
void look_at_atomic(const void *address, unsigned size, void *from) { look(address, size, true, from, true); }

static void block_begins() {
    if (suspects) look_at_suspected();
    block_began = ++moment;
    memset((void *)static_shared.start, 0xff, static_shared.bytes);  // NaN
}
static void all_have_met() {
    if (suspects) look_at_suspected();
    if (block->now) ++moment;
}

// ---- launches

static cudaError_t last_error;
static Place unasked;  // a launch that failed, of which nobody has asked yet: other calls return their errors
static long launches, threads_run;
static size_t most_dynamic = 48 * 1024;

static cudaError_t failed(cudaError_t error) { return last_error = error; }

void Launch::run(void (*one)(const void *), const void *given, size_t bytes) const {
    const auto count = [](uint3 of) { return (double)of.x * of.y * of.z; };
    if (count(block) < 1 || count(block) > 1024 || block.z > 64 || count(grid) < 1 || grid.x > 0x7fffffff ||
        grid.y > 65535 || grid.z > 65535) {
        unasked = place, failed(cudaErrorInvalidConfiguration);
        return;
    }
    if (shared > most_dynamic) {
        unasked = place, failed(cudaErrorInvalidValue);
        return;
    }
    if (emulator::block) fail("a kernel is launched by a kernel, which the emulator does not know", place);
    launch_now = this, arguments = {(uintptr_t)given, bytes};
    launched = ++moment, fenced = false;
    launch({grid, block, (int)shared, 1, 0, (long)count(grid)}, one, given);
    if (suspects) look_at_suspected();
    ++launches, threads_run += count(grid) * count(block);
    launch_now = nullptr;
}

// ---- the program's begin and end

static struct Begin {
    Begin() {
        realpath((const char *)getauxval(AT_EXECFN), path_of_program);
        dl_iterate_phdr(
            [](dl_phdr_info *info, size_t, void *) {
                loaded_at = info->dlpi_addr;
                uintptr_t first = ~0ul, last = 0;
                for (int i = 0; i < info->dlpi_phnum; ++i) {
                    const auto &part = info->dlpi_phdr[i];
                    if (part.p_type == PT_TLS) static_shared = {(uintptr_t)info->dlpi_tls_data, part.p_memsz};
                    if (part.p_type != PT_LOAD) continue;
                    first = std::min<uintptr_t>(first, loaded_at + part.p_vaddr);
                    last = std::max<uintptr_t>(last, loaded_at + part.p_vaddr + part.p_memsz);
                }
                whole_program = {first, last - first};
                return 1;  // the program comes first
            },
            nullptr);
        cells_of_dynamic = cells_for(MOST_SHARED), cells_of_static = cells_for(static_shared.bytes);
        atexit([] {
            fflush(stdout);
            if (unasked.line)
                fprintf(stderr, "emulated: nobody asked for the error at %s: %s.\n", text(unasked).c_str(),
                        cudaGetErrorString(last_error));
            if (launches)
                fprintf(stderr,
                        "emulated: %ld launch%s, %ld threads, on the CPU; no fault was seen. Times say nothing about a "
                        "GPU.\n",
                        launches, launches > 1 ? "es" : "", threads_run);
        });
    }
} begin;

}  // namespace emulator

void __threadfence() { emulator::fenced = true; }

// ---- CUDA's functions

using emulator::allocation_of;
using emulator::failed;
using emulator::Place;

static cudaError_t allocate(void **address, size_t bytes, bool managed, Place place) {
    const size_t page = 4096, whole = (bytes + page - 1) / page * page;
    if (bytes == 0) return *address = nullptr, cudaSuccess;
    void *const memory =
        mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    emulator::Cell *const cells = emulator::cells_for(bytes);
    if (memory == MAP_FAILED || !cells) return failed(cudaErrorMemoryAllocation);
    mprotect((char *)memory + whole, page, PROT_NONE);
    memset(memory, 0xff, whole);  // NaN
    auto &all = emulator::allocations;
    const uintptr_t start = (uintptr_t)memory;
    const auto after = std::find_if(all.begin(), all.end(), [&](const auto &one) { return one.start > start; });
    all.insert(after, {start, bytes, place, managed, false, cells});
    emulator::around_all = {all.front().start, all.back().start + all.back().bytes - all.front().start};
    return *address = memory, cudaSuccess;
}
cudaError_t cudaMalloc(void **address, size_t bytes, Place place) { return allocate(address, bytes, false, place); }
cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned, Place place) {
    return allocate(address, bytes, true, place);
}
cudaError_t cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height, Place place) {
    *pitch = (width + 511) / 512 * 512;
    return allocate(address, *pitch * height, false, place);
}
cudaError_t cudaFree(void *address, Place place) {
    if (!address) return cudaSuccess;
    emulator::Allocation *const one = allocation_of((uintptr_t)address);
    if (!one || one->start != (uintptr_t)address)
        emulator::tell(place, "cudaFree of an address that cudaMalloc has not given, or that is free already", "");
    one->freed = true;
    madvise(address, one->bytes, MADV_DONTNEED);
    munmap(one->cells, (one->bytes + 3) / 4 * sizeof(emulator::Cell));
    return cudaSuccess;
}

// Look at one side of a copy: whether it is on the GPU as it should be, with so many bytes.
static void look_at_side(const char *function, const char *side, const void *address, size_t bytes, bool on_gpu,
                         bool either, Place place) {
    const emulator::Allocation *const one = allocation_of((uintptr_t)address);
    const std::string name = std::string(function) + ": the " + side + " is ";
    if (one && (uintptr_t)address + bytes > one->start + one->bytes)
        emulator::tell(place, name + "too small: " + emulator::bytes_text(bytes) + " are copied or set",
                       "\n  " + text(one->place) + ": cudaMalloc of " + emulator::bytes_text(one->bytes) +
                           (one->start == (uintptr_t)address ? "" : ", not all of them behind the address"));
    if (either || (one && one->managed)) return;
    if (on_gpu && !one) emulator::tell(place, name + "not memory of the GPU that cudaMalloc has given", "");
    if (!on_gpu && one)
        emulator::tell(place, name + "memory of the GPU, not of the host: are two arguments exchanged?", "");
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, Place place) {
    return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind, place);
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind, Place place) {
    if (width == 0 || height == 0) return cudaSuccess;
    const bool any = kind == cudaMemcpyDefault;
    look_at_side("cudaMemcpy", "destination", to, to_pitch * (height - 1) + width,
                 kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, any, place);
    look_at_side("cudaMemcpy", "source", from, from_pitch * (height - 1) + width,
                 kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, any, place);
    for (size_t i = 0; i < height; ++i) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes, Place place) {
    look_at_side("cudaMemset", "destination", to, bytes, true, false, place);
    return memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = (size_t)8 << 30, cudaSuccess; }

cudaError_t cudaPeekAtLastError() { return emulator::unasked = {}, emulator::last_error; }
cudaError_t cudaGetLastError() { return cudaPeekAtLastError(), std::exchange(emulator::last_error, cudaSuccess); }
static const struct {
    cudaError_t error;
    const char *name, *meaning;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
};
const char *cudaGetErrorName(cudaError_t error) {
    for (const auto &one : ERRORS)
        if (one.error == error) return one.name;
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (const auto &one : ERRORS)
        if (one.error == error) return one.meaning;
    return "unrecognized error code";
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    *found = {"a CPU, emulating a GPU (flashcli emulate)"};
    found->totalGlobalMem = (size_t)8 << 30, found->totalConstMem = 65536;
    found->sharedMemPerBlock = 48 * 1024, found->sharedMemPerBlockOptin = emulator::MOST_SHARED;
    found->sharedMemPerMultiprocessor = 228 * 1024, found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32, found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 0x7fffffff, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = 9, found->multiProcessorCount = 1, found->clockRate = found->memoryClockRate = 1000000;
    found->memoryBusWidth = 64, found->unifiedAddressing = found->managedMemory = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp has;
    cudaGetDeviceProperties(&has, device);
    const std::pair<cudaDeviceAttr, size_t> known[] = {
        {cudaDevAttrMaxThreadsPerBlock, (size_t)has.maxThreadsPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlock, has.sharedMemPerBlock},
        {cudaDevAttrWarpSize, (size_t)has.warpSize},
        {cudaDevAttrMultiProcessorCount, (size_t)has.multiProcessorCount},
        {cudaDevAttrComputeCapabilityMajor, (size_t)has.major},
        {cudaDevAttrComputeCapabilityMinor, (size_t)has.minor},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, has.sharedMemPerMultiprocessor},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, has.sharedMemPerBlockOptin},
    };
    for (const auto &[one, found] : known)
        if (one == attribute) return *value = (int)found, cudaSuccess;
    return failed(cudaErrorInvalidValue);
}
cudaError_t allow_dynamic_shared(size_t bytes) {
    if (bytes > (size_t)emulator::MOST_SHARED) return failed(cudaErrorInvalidValue);
    emulator::most_dynamic = std::max(emulator::most_dynamic, bytes);
    return cudaSuccess;
}

struct EmulatedEvent {
    std::chrono::steady_clock::time_point when;
};
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return *event = new EmulatedEvent, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    return event->when = std::chrono::steady_clock::now(), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }

// ---- what the compiler calls: at each access, and where something may not be

#define FROM __builtin_return_address(0)
#define ACCESSES(size)                                                                    \
    void __tsan_read##size(void *at) { emulator::look(at, size, false, FROM); }           \
    void __tsan_write##size(void *at) { emulator::look(at, size, true, FROM); }           \
    void __tsan_unaligned_read##size(void *at) { emulator::look(at, size, false, FROM); } \
    void __tsan_unaligned_write##size(void *at) { emulator::look(at, size, true, FROM); } \
    void __tsan_read_write##size(void *at) {                                              \
        emulator::look(at, size, false, FROM), emulator::look(at, size, true, FROM);      \
    }                                                                                     \
    void __tsan_unaligned_read_write##size(void *at) {                                    \
        emulator::look(at, size, false, FROM), emulator::look(at, size, true, FROM);      \
    }
#define ATOMICS(bits)                                                                                                  \
    using T##bits = uint##bits##_t;                                                                                    \
    T##bits __tsan_atomic##bits##_load(const volatile T##bits *p, int) { return __atomic_load_n(p, 5); }               \
    void __tsan_atomic##bits##_store(volatile T##bits *p, T##bits x, int) { __atomic_store_n(p, x, 5); }               \
    T##bits __tsan_atomic##bits##_exchange(volatile T##bits *p, T##bits x, int) {                                      \
        return __atomic_exchange_n(p, x, 5);                                                                           \
    }                                                                                                                  \
    T##bits __tsan_atomic##bits##_fetch_add(volatile T##bits *p, T##bits x, int) {                                     \
        return __atomic_fetch_add(p, x, 5);                                                                            \
    }                                                                                                                  \
    T##bits __tsan_atomic##bits##_fetch_sub(volatile T##bits *p, T##bits x, int) {                                     \
        return __atomic_fetch_sub(p, x, 5);                                                                            \
    }                                                                                                                  \
    T##bits __tsan_atomic##bits##_fetch_and(volatile T##bits *p, T##bits x, int) {                                     \
        return __atomic_fetch_and(p, x, 5);                                                                            \
    }                                                                                                                  \
    T##bits __tsan_atomic##bits##_fetch_or(volatile T##bits *p, T##bits x, int) { return __atomic_fetch_or(p, x, 5); } \
    T##bits __tsan_atomic##bits##_fetch_xor(volatile T##bits *p, T##bits x, int) {                                     \
        return __atomic_fetch_xor(p, x, 5);                                                                            \
    }                                                                                                                  \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T##bits *p, T##bits *want, T##bits x, int, int) {       \
        return __atomic_compare_exchange_n(p, want, x, false, 5, 5);                                                   \
    }                                                                                                                  \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T##bits *p, T##bits *want, T##bits x, int, int) {         \
        return __atomic_compare_exchange_n(p, want, x, false, 5, 5);                                                   \
    }
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_read_range(void *at, unsigned long bytes) {
    for (unsigned long i = 0; i < bytes; ++i) emulator::look((char *)at + i, 1, false, FROM);
}
void __tsan_write_range(void *at, unsigned long bytes) {
    for (unsigned long i = 0; i < bytes; ++i) emulator::look((char *)at + i, 1, true, FROM);
}
void *__tsan_memcpy(void *to, const void *from, unsigned long bytes) { return memcpy(to, from, bytes); }
void *__tsan_memmove(void *to, const void *from, unsigned long bytes) { return memmove(to, from, bytes); }
void *__tsan_memset(void *to, int value, unsigned long bytes) { return memset(to, value, bytes); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
ATOMICS(8)
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

struct Location {
    const char *file;
    uint32_t line, column;
    Place place() const { return {file, (int)line}; }
};
struct Type {
    uint16_t kind, info;
    char name[1];
};
struct Bounds {
    Location location;
    const Type *array, *index;
};
struct Mismatch {
    Location location;
    const Type *type;
    unsigned char log_alignment, kind;
};
void __ubsan_handle_out_of_bounds(Bounds *found, uintptr_t index) {
    const Place place = found->location.place();
    emulator::tell(place, "index " + std::to_string((intptr_t)index) + " is out of bounds of " + found->array->name,
                   emulator::shown(place));
}
void __ubsan_handle_type_mismatch_v1(Mismatch *found, uintptr_t address) {
    if (!emulator::block) return;
    const Place place = found->location.place();
    const std::string what = address ? "an address is not aligned: it is no multiple of " +
                                           std::to_string(1 << found->log_alignment) + ", as " + found->type->name +
                                           " has to be"
                                     : std::string("a null pointer is followed");
    emulator::tell(place, what, emulator::shown(place));
}
void __ubsan_handle_divrem_overflow(Location *location, uintptr_t, uintptr_t) {
    emulator::tell(location->place(), "a division of integers by zero", emulator::shown(location->place()));
}
}
