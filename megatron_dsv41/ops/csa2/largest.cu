// Exact top-k of rows of 16-bit sort keys, ascending by position; among equal keys the smaller position wins.
// triton_select.py launches it; ref.select defines the result. One CTA per row.
//
// The row is read twice. First every thread keeps the maximum of 8 groups of keys; the k-th largest of the 2048 maxima
// is a bound that at least k keys reach. Then the keys that reach it, little more than k of them, are listed in shared
// memory in order, and an exact threshold search runs over the list. A row whose list overflows (many equal keys) is
// searched in memory instead.

typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 256, WARPS = THREADS / 32, LISTED = 3072;
constexpr int NOTHING = -32768;  // below every score: may not be selected

struct alignas(16) Vec { u32 word[4]; };

__device__ __forceinline__ int low(u32 word) { return (int)(short)(word & 0xffff); }
__device__ __forceinline__ int high(u32 word) { return (int)(short)(word >> 16); }

// Sum over the CTA. `scratch` holds a word per warp and alternates between two halves, so one barrier is enough.
__device__ __forceinline__ int total(int count, int* scratch, int& turn) {
    count = __reduce_add_sync(0xffffffffu, count);
    int* half = scratch + turn * WARPS;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) half[threadIdx.x / 32] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) count += half[warp];
    return count;
}

// The largest threshold in -32767 .. 32767 that at least k keys reach, or -32767. `reach` counts this thread's.
template <class Reach> __device__ __forceinline__ int threshold(int k, int* scratch, int& turn, Reach reach) {
    int found = 0;  // threshold + 32768
    for (int bit = 15; bit >= 0; --bit) {
        const int wanted = found | 1 << bit;
        if (total(reach(wanted - 32768), scratch, turn) >= k) found = wanted;
    }
    return max(found - 32768, NOTHING + 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
largest(const short* keys, const i64* first_entry, const i64* num_visible, int* out, int begin_token, int stride, int k,
        int per_block) {
    __shared__ int scratch[2 * WARPS];
    __shared__ int places[LISTED];
    __shared__ short listed[LISTED];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const i64 token = begin_token + (i64)blockIdx.x;
    int count = (int)num_visible[token], first = (int)first_entry[token], turn = 0;
    if (per_block > 0) {  // keys are blocks of per_block entries, numbered within the document
        count = (count + per_block - 1) / per_block;
        first = 0;
    }
    const i64 begin = (i64)blockIdx.x * stride + first;
    const int skew = (int)(begin & 7);  // keys before the row in its first 16-byte word
    const Vec* row = reinterpret_cast<const Vec*>(keys + (begin - skew));
    const int num_words = (skew + count + 7) / 8;
    auto load = [&](int word) {  // 8 keys; those outside the row are NOTHING
        Vec v = row[word];
        const int at = word * 8 - skew;
        if (at < 0 || at + 8 > count) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (at + i < 0 || at + i >= count)
                    v.word[i / 2] = i % 2 ? (v.word[i / 2] & 0xffff) | 0x80000000u : (v.word[i / 2] & 0xffff0000u) | 0x8000u;
        }
        return v;
    };

    Vec best = {{0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u}};
    for (int word = tid; word < num_words; word += THREADS) {
        const Vec v = load(word);
#pragma unroll
        for (int i = 0; i < 4; ++i) best.word[i] = __vmaxs2(best.word[i], v.word[i]);
    }
    const int bound = threshold(k, scratch, turn, [&](int wanted) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) reached += (low(best.word[i]) >= wanted) + (high(best.word[i]) >= wanted);
        return reached;
    });

    int num_listed = 0;
    for (int from = 0; from < num_words && num_listed <= LISTED; from += THREADS) {
        const int word = from + tid;
        u32 reach = 0;
        Vec v;
        if (word < num_words) {
            v = load(word);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                reach |= (u32)(low(v.word[i]) >= bound) << (2 * i);
                reach |= (u32)(high(v.word[i]) >= bound) << (2 * i + 1);
            }
        }
        const int mine = __popc(reach);
        int before = mine;  // in this warp, this thread's included
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int got = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += got;
        }
        int* half = scratch + turn * WARPS;
        turn ^= 1;
        if (lane == 31) half[warp] = before;
        __syncthreads();
        int at = num_listed + before - mine;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            if (other < warp) at += half[other];
            num_listed += half[other];
        }
        for (; reach; reach &= reach - 1, ++at) {
            const int i = __ffs(reach) - 1;
            u32 pair = v.word[0];
#pragma unroll
            for (int j = 1; j < 4; ++j) pair = i / 2 == j ? v.word[j] : pair;
            if (at < LISTED) {
                places[at] = word * 8 - skew + i;
                listed[at] = (short)(i % 2 ? high(pair) : low(pair));
            }
        }
    }
    __syncthreads();

    const bool fits = num_listed <= LISTED;
    const short* plain = keys + begin;
    const int searched = fits ? num_listed : count;
    auto key_at = [&](int i) { return (int)(fits ? listed[i] : plain[i]); };
    const int exact = threshold(k, scratch, turn, [&](int wanted) {
        int reached = 0;
        for (int i = tid; i < searched; i += THREADS) reached += key_at(i) >= wanted;
        return reached;
    });
    int larger = 0;
    for (int i = tid; i < searched; i += THREADS) larger += key_at(i) > exact;
    const int equal_wanted = k - total(larger, scratch, turn);
    if (warp > 0) return;
    int equal_seen = 0, taken = 0;
    int* to = out + token * k;
    const u32 below = (1u << lane) - 1;
    for (int from = 0; from < searched; from += 32) {
        const int i = from + lane, key = i < searched ? key_at(i) : NOTHING;
        const u32 equal = __ballot_sync(0xffffffffu, key == exact);
        const bool take = key > exact || (key == exact && equal_seen + __popc(equal & below) < equal_wanted);
        const u32 takers = __ballot_sync(0xffffffffu, take);
        if (take) to[taken + __popc(takers & below)] = first + (fits ? places[i] : i);
        equal_seen += __popc(equal);
        taken += __popc(takers);
    }
    for (int i = taken + lane; i < k; i += 32) to[i] = -1;
}
