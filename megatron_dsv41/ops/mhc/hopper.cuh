// What the kernels of the single-pass mHC site on Hopper share. hopper_site.py compiles and launches them; ref.site defines
// the result.
//
// The large ones: a CTA owns a chunk of the channels, keeps its slice of `fn` in shared memory and walks over the tokens.
// Its warps copy ahead into their own parts of shared memory: 8 tokens x 64 channels of all streams at a time in the
// backward, 4 x 128 in the forward. Lanes side by side copy one token's 128 or 256 bytes, in and out: the L2 serves a whole
// line per request, and requests are what it runs out of first; memory likes longer pieces still.
// Between, lane 4g + q holds what it needs as operand of a product, as long as `fn` is permuted alike: channels 8q.. of
// tokens g % 4 in the forward, channels 8g.. of tokens 2q and 2q + 1 in the backward.
//
// What is summed over channels (24 projections, the sum of squares, 24 gradients of coefficients) leaves as one partial
// per chunk, and is summed in a fixed order by a small kernel: results are the same on every run.
//
// Kernels behind another one are launched early (cuda_kernels.py): they start while it ends, do what needs nothing of it,
// and wait. All threads of a kernel that is launched early wait, so whoever waits for it has waited for those before it.

#include "site_instructions.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 16;                 // tokens of a tile of fn's gradient
constexpr int UNIT = 8, BLOCK = 64;      // tokens and channels that a warp has at once; in the forward in another shape
constexpr int ARRAY = UNIT * BLOCK * 2;  // bytes of a unit of one array
constexpr int WIDTH = 32, SQUARES = 24;  // a row of sums: 24 projections, the sum of squares, padding
constexpr u32 FULL = 0xffffffffu;

struct alignas(16) Vec { u32 w[4]; };

__device__ __forceinline__ float half_of(u32 word, int e) {  // of a pair of bf16
    return __uint_as_float(e ? word & 0xffff0000u : word << 16);
}

// Coefficients of one token. comb[4i + j]: source i, destination j.
struct Coefficients {
    float post[4], comb[16], pre[4];

    __device__ __forceinline__ void load(const float* from) {
        four(post, from);
#pragma unroll
        for (int i = 0; i < 4; ++i) four(comb + 4 * i, from + 4 + 4 * i);
        four(pre, from + 20);
    }
    __device__ __forceinline__ static void four(float* to, const float* from) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    // New streams of one channel before rounding: X'_j = post_j y + sum_i comb[i, j] X_i.
    __device__ __forceinline__ void update(float (&out)[4], float y, const float (&x)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            out[j] = post[j] * y;
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j] += comb[4 * i + j] * x[i];
        }
    }
};

// A tile's tables in a warp's shared memory: FOURS groups of four floats per token. post, comb, pre; then, in the
// backward, the end of a row of `weight`. Every lane copies some, so a warp meets before it reads them and before the
// next copy.
template <bool UPDATE, int TOKENS, int FOURS>
__device__ __forceinline__ void copy_tables(u32 to, const float* post, const float* comb, const float* pre,
                                            const float* weight, int first, int num_tokens) {
#pragma unroll
    for (int i = 0; i < (TOKENS * FOURS + 31) / 32; ++i) {
        const int at = i * 32 + threadIdx.x % 32, four = at % FOURS;
        const long long token = min(first + at / FOURS, num_tokens - 1);
        const float* from = four == 0 ? post + token * 4 : four < 5 ? comb + token * 16 + four * 4 - 4 : pre + token * 4;
        if (FOURS > 6 && four == 6) from = weight + token * WIDTH + SQUARES;
        if (at < TOKENS * FOURS && (four >= 5 || UPDATE)) copy16(to + at * 16, from, 16);
    }
}

// What a CTA has of all tokens: up to EACH blocks of SIZE channels.
template <int DIM, int SIZE, int EACH> struct Chunk {
    static constexpr int BLOCKS = (DIM + SIZE - 1) / SIZE, CHUNKS = (BLOCKS + EACH - 1) / EACH;
    int index;

    __device__ __forceinline__ int count() const {
        return BLOCKS % EACH == 0 ? EACH : min(EACH, BLOCKS - index * EACH);
    }
    __device__ __forceinline__ int column(int block) const { return (index * EACH + block) * SIZE; }
};

// What a CTA does: of which chunk, which tiles of 8 tokens its first warp has. A chunk's tokens are shared by `shares` CTAs,
// in rounds of a tile for every warp, up to round `limit`. What is left is done by one CTA more for each chunk, on the
// multiprocessors that are left. hopper_site.py chooses the numbers.
struct Work {
    int chunk, tile, stride, end;

    __device__ __forceinline__ Work(int num_tokens, int chunks, int shares, int limit) {
        const int share = blockIdx.x / chunks, tiles = (num_tokens + UNIT - 1) / UNIT;
        const bool rest = share == shares;
        chunk = blockIdx.x % chunks;
        tile = (rest ? limit : share) * WARPS;
        stride = (rest ? 1 : shares) * WARPS;
        end = rest ? tiles : min(tiles, limit * WARPS);
    }
};

// A lane's part of copies of units, 1024 bytes of each array in rows of 16-byte chunks: one chunk of each of two rows.
// SHIFT and MASK say how rows are swizzled, so that neither these accesses nor the operands' meet in a bank.
template <int BYTES, int SHIFT, int MASK> struct Rows {
    static constexpr int CHUNKS = BYTES / 16;
    int row[2], offset[2], channel;

    __device__ __forceinline__ Rows(int lane) : channel(lane % CHUNKS * 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row[i] = lane / CHUNKS + 32 / CHUNKS * i;
            offset[i] = at(row[i], lane % CHUNKS);
        }
    }
    __device__ __forceinline__ static int at(int row, int chunk) {
        return row * BYTES + ((chunk ^ (row << SHIFT >> 1 & MASK)) << 4);
    }
};
