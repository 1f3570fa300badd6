// A CUDA block on the host: what a kernel's source gets in place of a GPU.
//
// Every thread is a fiber. It runs until it must meet others, at a barrier, a shuffle or a product of a warp; in which
// order fibers take turns is a setting. A mistake ends the run with a message.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __align__(...)
#define __shared__ static  // arrays of a fixed size; the rest is host::shared
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace host {

constexpr int WARP = 32, MOST_WARPS = 32, GROUP = 128, MOST_SHARED = 232448;  // bytes that a block may have on SM90
constexpr unsigned char UNWRITTEN = 0xff;                         // NaN in every float format

struct Index { unsigned x = 0, y = 0, z = 0; };
struct Copy { unsigned char* to; const unsigned char* from; int bytes; };
struct Meeting { int arrived = 0; unsigned long round = 0; const char* where = nullptr; };
struct Range { const unsigned char *begin, *end; };
struct Product { unsigned a[4]; uint64_t b; int add; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(128 << 10);
    unsigned index = 0;
    bool done = false;
    const char* where = "the start";
    std::vector<Copy> open;                  // copies since the last commit
    std::deque<std::vector<Copy>> committed;
    float* sums = nullptr;                   // of the warpgroup's products that were not waited for
    std::vector<float> before;               // what they held
    std::vector<Product> products;
};

inline std::vector<Fiber> fibers;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline Index block, grid, block_size;
inline Meeting warps[MOST_WARPS], groups[MOST_WARPS / 4], everyone;
inline uint64_t exchanged[MOST_WARPS][WARP];
alignas(1024) inline unsigned char shared[2 * MOST_SHARED];  // more, to see what is written beyond
inline unsigned shared_bytes = 0;
inline std::vector<Range> tensors;
inline std::function<void()> body;
inline std::string failure;
inline unsigned long met = 0;
inline int order = 0;             // of fibers: ascending, descending, mixed
inline bool copies_wait = true;   // cp.async lands at the wait that asks for it, or at once

inline void leave() { swapcontext(&current->context, &scheduler); }
[[noreturn]] inline void fail(const std::string& message) {
    failure = message + ", thread " + std::to_string(current->index) + " of block " + std::to_string(block.x);
    for (;;) leave();
}
inline int warp() { return current->index / WARP; }
inline int lane() { return current->index % WARP; }

// Returns when `count` threads have come, all of them to the same kind of place.
inline void meet(Meeting& meeting, unsigned count, const char* where) {
    const unsigned long round = meeting.round;
    if (meeting.arrived && strcmp(meeting.where, where))
        fail(std::string("threads of one warp are at ") + meeting.where + " and at " + where);
    current->where = meeting.where = where;
    ++met;
    if (++meeting.arrived == (int)count) {
        meeting.arrived = 0;
        ++meeting.round;
        return;
    }
    while (meeting.round == round) leave();
}
inline void meet_warp(const char* where) { meet(warps[warp()], WARP, where); }

inline void meet_group(const char* where) { meet(groups[current->index / GROUP], GROUP, where); }

inline void require_tensor(const void* from, size_t bytes, const char* what) {
    const auto* begin = static_cast<const unsigned char*>(from);
    for (const Range& tensor : tensors)
        if (begin >= tensor.begin && begin + bytes <= tensor.end) return;
    fail(std::string(what) + " reads outside of every tensor");
}
inline void land(const Copy& copy) {
    if (copy.bytes) memcpy(copy.to, copy.from, copy.bytes);
    memset(copy.to + copy.bytes, 0, 16 - copy.bytes);
}

inline void start() {
    body();
    current->done = true;
    leave();
}
inline void run_block() {
    memset(shared, UNWRITTEN, sizeof shared);
    for (Meeting& meeting : warps) meeting = {};
    for (Meeting& meeting : groups) meeting = {};
    everyone = {};
    const unsigned threads = block_size.x;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.index = i, fiber.done = false, fiber.where = "the start";
        fiber.open.clear(), fiber.committed.clear(), fiber.products.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start, 0);
    }
    int idle = 0;
    for (unsigned left = threads; left;) {
        const unsigned long before = met;
        const unsigned running = left;
        for (unsigned turn = 0; turn < threads; ++turn) {
            current = &fibers[order == 0 ? turn : order == 1 ? threads - 1 - turn : (turn * 97 + 13) % threads];
            if (current->done) continue;
            swapcontext(&scheduler, &current->context);
            if (!failure.empty()) return;
            left -= current->done;
        }
        idle = met == before && left == running ? idle + 1 : 0;
        if (idle > 1) {
            for (Fiber& fiber : fibers)
                if (!fiber.done && fiber.index < threads) current = &fiber;
            failure = std::string("threads wait for one another at ") + current->where + " in block " + std::to_string(block.x);
            return;
        }
    }
    for (unsigned at = shared_bytes; at < sizeof shared; ++at)
        if (shared[at] != UNWRITTEN) {
            failure = "block " + std::to_string(block.x) + " writes beyond its shared memory";
            return;
        }
}

// Runs all blocks, one after another. "" or what went wrong.
template <class Kernel, class... Arguments>
const char* launch(Kernel kernel, unsigned blocks, unsigned threads, unsigned bytes, Arguments... arguments) {
    failure.clear();
    if (threads % WARP || threads > WARP * MOST_WARPS) failure = "threads are no whole warps, or too many";
    if (bytes > MOST_SHARED) failure = "more shared memory than a multiprocessor has";
    if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
    grid = {blocks, 1, 1}, block_size = {threads, 1, 1}, shared_bytes = bytes;
    body = [=] { kernel(arguments...); };
    for (block = {0, 0, 0}; block.x < blocks && failure.empty(); ++block.x) run_block();
    return failure.c_str();
}

template <class T> T shuffle(T value, int from) {
    memcpy(&exchanged[warp()][lane()], &value, sizeof value);
    meet_warp("a shuffle");
    T got;
    memcpy(&got, &exchanged[warp()][from % WARP], sizeof got);
    meet_warp("a shuffle's end");
    return got;
}

}  // namespace host

extern "C" void host_settings(int order, int copies_wait) {
    host::order = order;
    host::copies_wait = copies_wait;
}
extern "C" void host_tensor(const void* begin, long long bytes) {
    if (bytes < 0) return host::tensors.clear();
    const auto* at = static_cast<const unsigned char*>(begin);
    host::tensors.push_back({at, at + bytes});
}

#define threadIdx (host::Index{host::current->index, 0, 0})
#define blockIdx host::block
#define gridDim host::grid
#define blockDim host::block_size

inline void __syncthreads() { host::meet(host::everyone, host::block_size.x, "__syncthreads"); }
inline void __syncwarp() { host::meet_warp("__syncwarp"); }
template <class T> T __shfl_xor_sync(unsigned, T value, int bits) { return host::shuffle(value, host::lane() ^ bits); }
template <class T> T __shfl_sync(unsigned, T value, int from) { return host::shuffle(value, from); }
template <class T> T __ldg(const T* from) {
    host::require_tensor(from, sizeof(T), "__ldg");
    return *from;
}
inline float __uint_as_float(unsigned word) {
    float x;
    memcpy(&x, &word, 4);
    return x;
}
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return word;
}
