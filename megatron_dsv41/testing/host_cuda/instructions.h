// Instructions on the host, as PTX defines them, by their names in the headers of ops/ whose guards are defined here: those
// headers, which have the same in inline PTX, are then empty.
//
// Products are summed in fp64 and rounded once. A copy lands when its thread waits for it, or at once (runtime.h).
#pragma once
#define HOPPER_INSTRUCTIONS
#define SITE_INSTRUCTIONS
#include "runtime.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

namespace host {

struct Operands { const unsigned* a; unsigned b[2]; };
inline Operands operands[MOST_WARPS][WARP];

inline float from_bf16(unsigned word, int half) { return __uint_as_float(half ? word & 0xffff0000u : word << 16); }
inline unsigned to_bf16(float x) {  // to the nearest, ties to even
    unsigned word;
    memcpy(&word, &x, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

// m16n8: d = a b + d. A lane holds d of rows g and g + 8, columns 2q and 2q + 1, for g = lane / 4 and q = lane % 4. A
// register of a or b has PER numbers of neighbouring k; number(word, i) is one of them.
template <int DEPTH, int PER, class Number>
void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Number number) {
    operands[warp()][lane()] = {a, {b0, b1}};
    meet_warp("an mma");
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < DEPTH; ++k) {
            const int upper = k >= DEPTH / 2, holder = k % (DEPTH / 2) / PER;
            const Operands& of_a = operands[warp()][row % 8 * 4 + holder];
            const Operands& of_b = operands[warp()][column * 4 + holder];
            sum += (double)number(of_a.a[row / 8 + 2 * upper], k % PER) * number(of_b.b[upper], k % PER);
        }
        sums[i] = (float)sum;
    }
    meet_warp("an mma's end");
    std::copy(sums, sums + 4, d);
}

// wgmma m64nNk16: a lane has N / 2 sums, of the rows and columns of N / 8 products of its warp. `b` are N rows of 128
// bytes, swizzled by 128 bytes. The sums are unreadable until the wait, which is when `b` is read.
template <int N> void group_multiply(float (&d)[N / 2], const unsigned (&a)[4], uint64_t b, int add) {
    if (current->products.empty()) {
        current->sums = d;
        current->before.assign(d, d + N / 2);
    }
    if (current->sums != d) fail("a warpgroup's products in flight have several sums");
    current->products.push_back({{a[0], a[1], a[2], a[3]}, b, add});
    std::fill(d, d + N / 2, NAN);
}
inline void group_wait() {
    meet_group("the wait for products");
    Fiber& mine = *current;
    std::vector<float> sums = mine.before;
    for (size_t n = 0; n < mine.products.size(); ++n) {
        const Product& product = mine.products[n];
        const unsigned start = (unsigned)(product.b << 4) & 0x3ffff;
        for (unsigned other = mine.index / GROUP * GROUP, i = 0; i < (unsigned)GROUP; ++i) {
            const auto& theirs = fibers[other + i].products;
            if (theirs.size() != mine.products.size() || theirs[n].b != product.b || theirs[n].add != product.add)
                fail("threads of a warpgroup multiply by different things");
        }
        for (size_t i = 0; i < sums.size(); ++i) {
            const int row = lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
            double sum = product.add ? sums[i] : 0.0;
            for (int k = 0; k < 16; ++k) {
                const Fiber& holder = fibers[mine.index / WARP * WARP + row % 8 * 4 + k % 8 / 2];
                unsigned at = start + column / 8 * 1024 + column % 8 * 128 + k * 2;
                at ^= (at >> 7 & 7) << 4;
                unsigned short half;
                memcpy(&half, shared + at, 2);
                sum += (double)from_bf16(holder.products[n].a[row / 8 + k / 8 * 2], k % 2) * from_bf16(half, 0);
            }
            sums[i] = (float)sum;
        }
    }
    meet_group("the end of products");
    if (!mine.products.empty()) std::copy(sums.begin(), sums.end(), mine.sums);
    mine.products.clear();
}

}  // namespace host

inline unsigned shared_address(const void* p) { return (unsigned)(static_cast<const unsigned char*>(p) - host::shared); }
inline void copy_commit() {
    host::current->committed.push_back(host::current->open);
    host::current->open.clear();
}
template <int LEFT> void copy_wait() {
    auto& groups = host::current->committed;
    while (groups.size() > LEFT) {
        if (host::copies_wait) std::for_each(groups.front().begin(), groups.front().end(), host::land);
        groups.pop_front();
    }
}
inline void copy16(unsigned to, const void* from, int bytes) {
    if (to % 16 || (uintptr_t)from % 16) host::fail("a copy is not aligned");
    if (to + 16 > host::shared_bytes) host::fail("a copy lands beyond shared memory");
    if (bytes) host::require_tensor(from, bytes, "a copy");
    const host::Copy copy = {host::shared + to, static_cast<const unsigned char*>(from), bytes};
    if (host::copies_wait) host::current->open.push_back(copy);
    else host::land(copy);
}
inline unsigned pack(float low, float high) { return host::to_bf16(low) | host::to_bf16(high) << 16; }
inline unsigned to_tf32(float x) {  // to the nearest, ties away from zero
    unsigned word;
    memcpy(&word, &x, 4);
    return (word & 0x7fffffff) < 0x7f800000 ? (word + 0x1000) & ~0x1fffu : word;
}
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    host::multiply<16, 2>(d, a, b0, b1, host::from_bf16);
}
inline void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    host::multiply<8, 1>(d, a, b0, b1, [](unsigned word, int) { return __uint_as_float(word); });
}
inline void prefetch_l2(const void* from, int bytes) { host::require_tensor(from, bytes, "a prefetch"); }
inline void next_may_start() {}  // kernels run one after another
inline void wait_for_last() {}
inline void mma_fence() {}  // memory has one order
inline void fence_async() {}
inline u64 descriptor(unsigned address, unsigned lead) {
    if (address % 1024) host::fail("a matrix does not start at a swizzle's period");
    if (lead != 16) host::fail("a matrix is transposed, which is not done here");
    return (address & 0x3ffff) >> 4;
}
inline void mma144(float (&d)[72], const unsigned (&a)[4], uint64_t b, int add) { host::group_multiply<144>(d, a, b, add); }
inline void mma_commit() {}
template <int LEFT> void mma_wait() {
    static_assert(LEFT == 0, "products are waited for all at once");
    host::group_wait();
}
