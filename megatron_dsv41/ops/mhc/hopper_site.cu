// The single-pass mHC site on Hopper: hopper_site.py compiles and launches it; ref.site defines the result.
//
// A CTA owns a chunk of the channels, keeps its slice of `fn` in shared memory and walks over the tokens. Its warps copy
// ahead into their own parts of shared memory: 8 tokens x 64 channels of all streams at a time in the backward, 4 x 128 in
// the forward. Lanes side by side copy one token's 128 or 256 bytes, in and out: the L2 serves a whole line per request, and
// requests are what it runs out of first; memory likes longer pieces still.
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
constexpr int ROWS = 16;                   // tokens of a tile of fn's gradient
constexpr int UNIT = 8, BLOCK = 64;        // tokens and channels that a warp has at once; in the forward SPAN channels of
constexpr int SPAN = 128, HALF = 4;        // HALF the tokens
constexpr int ARRAY = UNIT * BLOCK * 2;    // bytes of a unit of one array
constexpr int TERMS = 3;                   // bf16 terms of fn in the forward: products with bf16 are exact to fp32
constexpr int WIDTH = 32, SQUARES = 24;    // a row of sums: 24 projections, the sum of squares, padding
constexpr int FORWARD_STAGES = 2, BACKWARD_STAGES = 2, FN_STAGES = 4;  // units copied ahead
constexpr int FORWARD_SPANS = 2, BACKWARD_BLOCKS = 2;  // that a CTA owns, at most
constexpr int FORWARD_ARRAYS = 5, BACKWARD_ARRAYS = 10;
constexpr int FN_BLOCK = 2 * TERMS * 24 * 128;  // bytes of 64 summed channels of fn's terms, of both blocks of a span
constexpr int GROUP = 4;                   // tiles whose weights fn_gradient brings in at once
constexpr u32 FULL = 0xffffffffu;

struct alignas(16) Vec { u32 w[4]; };

__device__ __forceinline__ float half_of(u32 word, int e) {  // of a pair of bf16
    return __uint_as_float(e ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

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

// Where a warp of the backward is: a tile of tokens, a block of its channels.
struct Step {
    int tile, block, slot, turn;

    __device__ __forceinline__ void next(int blocks, int tile_stride) {
        if (++slot == BACKWARD_STAGES) slot = 0;
        if (++block < blocks) return;
        block = 0;
        tile += tile_stride;
        turn ^= 1;
    }
};

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

// A chunk's slice of fn as TERMS bf16 whose sum it is, for mma144: [span][64 channels of a block's 256, of all streams]
// [block, term, row of fn], rows of 128 bytes. A thread splits eight channels of a row at a time.
template <int DIM>
__device__ __forceinline__ void split_fn(const float* fn, unsigned char* fn_parts, Chunk<DIM, SPAN, FORWARD_SPANS> chunk) {
    constexpr int EACH = 2 * 2 * 4 * 3 * 32 / THREADS;  // of [stream][32 channels][block][8 rows][lane], by a thread
    const int row = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int span = 0; span < chunk.count(); ++span) {
        float4 ahead[EACH][2];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int part = threadIdx.x / 32 + i * WARPS, eight = part % 3, block = part / 3 % 2, half = part / 6 % 2;
            const int channel = chunk.column(span) + block * BLOCK + half * 32 + q * 8;
            ahead[i][0] = ahead[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (DIM % SPAN == 0 || channel < DIM) {
                const float* from = fn + ((8ll * eight + row) * 4 + part / 12) * DIM + channel;
                ahead[i][0] = __ldg(reinterpret_cast<const float4*>(from));
                ahead[i][1] = __ldg(reinterpret_cast<const float4*>(from) + 1);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int part = threadIdx.x / 32 + i * WARPS, eight = part % 3, block = part / 3 % 2, half = part / 6 % 2;
            const float4 &low = ahead[i][0], &high = ahead[i][1];
            float rest[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                unsigned char* to = fn_parts + span * 4 * FN_BLOCK + row * 128 + q * 4;
                to += (3 * (TERMS * block + term) + eight) * 1024;
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const u32 word = pack(rest[2 * p], rest[2 * p + 1]);
                    rest[2 * p] -= half_of(word, 0);
                    rest[2 * p + 1] -= half_of(word, 1);
                    const int sixteen = (half * 4 + part / 12) * 2 + p / 2;
                    *reinterpret_cast<u32*>(to + sixteen / 4 * FN_BLOCK + ((sixteen % 4 * 2 + p % 2 ^ row) << 4)) = word;
                }
            }
        }
    }
    fence_async();
}

// Streams in; new streams, site input and partial sums [T, chunks, WIDTH] out. UPDATE: the streams change.
// Grid: see Work. A warp's tile is 8 tokens, a unit 4 of them: 256 bytes of each row at once.
//
// A warpgroup multiplies: rows g and g + 8 of a warp's 16 are tokens g % 4 of either unit, and channels of block g / 4 of
// the span. So all rows are multiplied with fn's slices of both blocks, and of either half of the results half is used:
// tensor cores have time for it, and nothing is moved between lanes.
template <bool UPDATE, int DIM>
__global__ void __launch_bounds__(THREADS, 1)
site_forward(const u16* y, const u16* x, const float* post, const float* comb, const float* pre, const float* fn,
             u16* out, u16* site_input, float* partial, int num_tokens, int shares, int limit) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int SLOT = FORWARD_ARRAYS * ARRAY, TABLE = HALF * 24, LAST = 4, STEPS = SPAN / 2 * 4 / 16;
    static_assert(FORWARD_STAGES == 2, "either half has a place of the ring");
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    constexpr int CHUNKS = Chunk<DIM, SPAN, FORWARD_SPANS>::CHUNKS;
    const Work work(num_tokens, CHUNKS, shares, limit);
    const Chunk<DIM, SPAN, FORWARD_SPANS> chunk = {work.chunk};
    unsigned char* fn_parts = memory;
    unsigned char* rings = memory + FORWARD_SPANS * STEPS / 4 * FN_BLOCK;
    unsigned char* ring = rings + warp * FORWARD_STAGES * SLOT;
    float* table = reinterpret_cast<float*>(rings + WARPS * FORWARD_STAGES * SLOT) + warp * TABLE;
    const Rows<256, 3, 4> rows(lane);

    next_may_start();
    auto fetch_table = [&](int tile, int half) {
        const u32 at = shared_address(table);
        if (tile < work.end)
            copy_tables<UPDATE, HALF, 6>(at, post, comb, pre, nullptr, tile * UNIT + HALF * half, num_tokens);
        copy_commit();
    };
    auto fetch = [&](int tile, int span, int half) {
        if (tile < work.end) {
            const u32 to = shared_address(ring + half * SLOT);
            const int column = chunk.column(span) + rows.channel;
            const bool inside = DIM % SPAN == 0 || column < DIM;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = tile * UNIT + HALF * half + rows.row[i];
                const int bytes = token < num_tokens && inside ? 16 : 0;
                const long long row = min(token, num_tokens - 1);
                const u16* from = x + row * 4 * DIM + column;
#pragma unroll
                for (int j = 0; j < 4; ++j) copy16(to + j * ARRAY + rows.offset[i], from + j * DIM, bytes);
                if (UPDATE) copy16(to + LAST * ARRAY + rows.offset[i], y + row * DIM + column, bytes);
            }
        }
        copy_commit();
    };
    int tile = work.tile + warp, span = 0;
    fetch_table(tile, 0);
    fetch(tile, 0, 0);
    fetch(tile, 0, 1);
    split_fn<DIM>(fn, fn_parts, chunk);
    __syncthreads();

    const u64 parts = descriptor(shared_address(fn_parts), 16);
    float sums[72], squares[2];  // [block][term][8 rows of fn][unit][2 rows]
    while (tile / 4 * 4 < work.end) {  // the same for a whole warpgroup
        const bool whole = span == chunk.count() - 1;  // of the tile, after this step
        const int next_tile = whole ? tile + work.stride : tile, next_span = whole ? 0 : span + 1;
        Vec news[2][2][4];  // [unit][32 channels][stream]
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            copy_wait<1>();  // for all but the other half's unit
            __syncwarp();
            Coefficients mix;
            mix.load(table + g % 4 * 24);
            __syncwarp();
            fetch_table(r == 0 ? tile : next_tile, 1 - r);
            unsigned char* slot = ring + r * SLOT;
            if (span == 0) squares[r] = 0.0f;
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                Vec* mine = reinterpret_cast<Vec*>(slot + rows.at(g % 4, g / 4 * 8 + 4 * b + q));
                Vec(&unit)[4] = news[r][b];
                Vec input, last;
#pragma unroll
                for (int j = 0; j < 4; ++j) unit[j] = mine[j * (ARRAY / 16)];
                if (UPDATE) last = mine[LAST * (ARRAY / 16)];
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    if (UPDATE) {
                        float pair[2][4];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float old[4] = {half_of(unit[0].w[p], e), half_of(unit[1].w[p], e),
                                                  half_of(unit[2].w[p], e), half_of(unit[3].w[p], e)};
                            mix.update(pair[e], half_of(last.w[p], e), old);
                        }
#pragma unroll
                        for (int j = 0; j < 4; ++j) unit[j].w[p] = pack(pair[0][j], pair[1][j]);
                    }
                    float pair[2] = {0.0f, 0.0f};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float rounded = half_of(unit[j].w[p], e);
                            squares[r] += rounded * rounded;
                            pair[e] += mix.pre[j] * rounded;
                        }
                    }
                    input.w[p] = pack(pair[0], pair[1]);
                }
                if (UPDATE) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) mine[j * (ARRAY / 16)] = unit[j];
                }
                mine[LAST * (ARRAY / 16)] = input;
            }
            __syncwarp();
            if (r == 1) {
                // read from a lane, so that the compiler sees that it is the same in all
                const u64 slice = parts + (u32)__shfl_sync(FULL, span, 0) * (4 * FN_BLOCK >> 4);
                mma_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const Vec &low = news[0][i / 8][i / 2 % 4], &high = news[1][i / 8][i / 2 % 4];
                    const int k = i % 2 * 2;
                    const u32 a[4] = {low.w[k], high.w[k], low.w[k + 1], high.w[k + 1]};
                    mma144(sums, a, slice + (i / 4 * FN_BLOCK + i % 4 * 32 >> 4), i > 0 || span > 0);
                }
                mma_commit();
            }
            const int column = chunk.column(span) + rows.channel;
            const bool inside = DIM % SPAN == 0 || column < DIM;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long long row = tile * UNIT + HALF * r + rows.row[i];
                const Vec* from = reinterpret_cast<const Vec*>(slot + rows.offset[i]);
                if (row < num_tokens && inside) {
                    if (UPDATE) {
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            *reinterpret_cast<Vec*>(out + (row * 4 + j) * DIM + column) = from[j * (ARRAY / 16)];
                    }
                    *reinterpret_cast<Vec*>(site_input + row * DIM + column) = from[LAST * (ARRAY / 16)];
                }
            }
            __syncwarp();
            fetch(next_tile, next_span, r);
        }
        mma_wait<0>();
        const int t = tile * UNIT + g;
        tile = next_tile, span = next_span;
        if (!whole) continue;
        // This lane has sums over its block of tokens g % 4 of both units; it keeps token g, and sends the other one's to
        // the lane that has that token's other block.
        const bool second = g >= 4;
        auto over_blocks = [&](float of_first, float of_second) {
            return (second ? of_second : of_first) + __shfl_xor_sync(FULL, second ? of_first : of_second, 16);
        };
        float* to = partial + ((long long)t * CHUNKS + chunk.index) * WIDTH + 2 * q;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            float pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float of[2] = {0.0f, 0.0f};
#pragma unroll
                for (int term = TERMS - 1; term >= 0; --term) {
                    const int at = (3 * term + a) * 4 + e;
                    of[0] += second ? sums[36 + at] : sums[at];
                    of[1] += second ? sums[36 + at + 2] : sums[at + 2];
                }
                pair[e] = over_blocks(of[0], of[1]);
            }
            if (t < num_tokens) *reinterpret_cast<float2*>(to + 8 * a) = make_float2(pair[0], pair[1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            squares[r] += __shfl_xor_sync(FULL, squares[r], 1);
            squares[r] += __shfl_xor_sync(FULL, squares[r], 2);
        }
        const float all = over_blocks(squares[0], squares[1]);
        if (t < num_tokens) *reinterpret_cast<float2*>(to + SQUARES) = make_float2(q == 0 ? all : 0.0f, 0.0f);
    }
}

// A 4 x 4 matrix over 16 lanes, row-major: sums over each row, over each column.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}
__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 4);
    return x + __shfl_xor_sync(FULL, x, 8);
}
__device__ __forceinline__ float row_softmax(float x) {
    float top = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float weight = expf(x - top);
    return weight / row_sum(weight);
}

__device__ __forceinline__ void add(float4& sum, const float4& x) {
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// Sums of `count` fours that lie `stride` floats apart, from `from` on: AHEAD of them are on their way at once. They are
// added in order.
template <int AHEAD>
__device__ __forceinline__ void add_all(float4& sum, const float* from, int count, long long stride) {
    for (int begin = 0; begin < count; begin += AHEAD) {
        float4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (begin + i < count) x[i] = *reinterpret_cast<const float4*>(from + (begin + i) * stride);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) add(sum, x[i]);
    }
}

// Partials of a token -> sums [T, WIDTH]; then RMS, scale, base, sigmoids and Sinkhorn. Half a warp takes a token: eight of
// its lanes every other partial, four columns each; then a lane per cell of the mixing matrix.
template <int COUNT>
__global__ void __launch_bounds__(COUNT * 32, 2)
predict_forward(const float* partial, const float* base, const float* scale, float* sums, float* pre, float* post,
                float* comb, int num_tokens, int chunks, int channels, int iters, double eps64, double rms_eps) {
    const int lane = threadIdx.x % 32, cell = lane % 16, pair = (blockIdx.x * COUNT + threadIdx.x / 32) * 2;
    wait_for_last();
    if (pair >= num_tokens) return;
    const float eps = (float)eps64;
    const int token = pair + lane / 16, parity = lane / 8 % 2, four = lane % 8;
    const long long row = min(token, num_tokens - 1);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* from = partial + (row * chunks + parity) * WIDTH + four * 4;
    add_all<20>(sum, from, (chunks - parity + 1) / 2, 2 * WIDTH);
    add(sum, make_float4(__shfl_xor_sync(FULL, sum.x, 8), __shfl_xor_sync(FULL, sum.y, 8), __shfl_xor_sync(FULL, sum.z, 8),
                         __shfl_xor_sync(FULL, sum.w, 8)));
    if (parity == 0) *reinterpret_cast<float4*>(sums + row * WIDTH + four * 4) = sum;
    auto of_token = [&](int column) {
        const int from_lane = lane / 16 * 16 + column / 4;
        const float x = __shfl_sync(FULL, sum.x, from_lane), y = __shfl_sync(FULL, sum.y, from_lane);
        const float z = __shfl_sync(FULL, sum.z, from_lane), w = __shfl_sync(FULL, sum.w, from_lane);
        return column % 4 < 2 ? (column % 2 ? y : x) : (column % 2 ? w : z);
    };
    const float rms = 1.0f / sqrtf(of_token(SQUARES) / channels + (float)rms_eps);
    const float gate = of_token(cell % 8) * rms, logit = of_token(8 + cell) * rms * scale[2] + base[8 + cell];
    float mix = row_softmax(logit) + eps;
    mix = __fdividef(mix, column_sum(mix) + eps);
    for (int i = 1; i < iters; ++i) {
        mix = __fdividef(mix, row_sum(mix) + eps);
        mix = __fdividef(mix, column_sum(mix) + eps);
    }
    if (token >= num_tokens) return;
    comb[token * 16ll + cell] = mix;
    if (cell < 8) {
        const float open = sigmoid(gate * scale[cell / 4] + base[cell]);
        if (cell < 4) pre[token * 4ll + cell] = open + eps;
        else post[token * 4ll + cell - 4] = 2.0f * open;
    }
}

// Gradients of the coefficients -> weight [T, WIDTH]: what multiplies fn's rows, then (SQUARES) what multiplies X'. Again
// in two bf16 terms, as fn_gradient's operand. param [tiles, 48]: this tile's part of the gradients of base and, before
// summing groups, of scale. Half a warp per token, a tile of 16 tokens per CTA. has: bits of pre, post, comb.
template <int COUNT>
__global__ void __launch_bounds__(COUNT * 16)
predict_backward(const float* sums, const float* base, const float* scale, const float* grad_pre, const float* grad_post,
                 const float* grad_comb, float* weight, u16* operand, float* param, int num_tokens, int channels, int iters,
                 int has, double eps64, double rms_eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* parts = reinterpret_cast<float*>(memory);      // [COUNT][48]
    float* divisors = parts + COUNT * 48 + threadIdx.x;   // [2 * iters - 1][COUNT * 16]
    constexpr int NEXT = COUNT * 16;
    const int cell = threadIdx.x % 16, place = threadIdx.x / 16, token = blockIdx.x * COUNT + place;
    next_may_start();
    const bool live = token < num_tokens;
    const long long row = min(token, num_tokens - 1);
    const float eps = (float)eps64;
    const float* of = sums + row * WIDTH;
    const float rms = 1.0f / sqrtf(of[SQUARES] / channels + (float)rms_eps);

    float gate = 0.0f, gate_u = 0.0f;
    if (cell < 8) {
        gate_u = of[cell] * rms;
        const float open = sigmoid(gate_u * scale[cell / 4] + base[cell]);
        float grad = 0.0f;
        if (live && cell < 4 && (has & 1)) grad = grad_pre[row * 4 + cell];
        if (live && cell >= 4 && (has & 2)) grad = 2.0f * grad_post[row * 4 + cell - 4];
        gate = grad * open * (1.0f - open);
    }
    const float comb_u = of[8 + cell] * rms;
    float grad = 0.0f;
    if (has & 4) {
        const float soft = row_softmax(comb_u * scale[2] + base[8 + cell]);
        float mix = soft + eps, sum = column_sum(mix) + eps;
        mix = __fdividef(mix, sum);
        divisors[0] = sum;
        for (int i = 1; i < iters; ++i) {
            sum = row_sum(mix) + eps;
            mix = __fdividef(mix, sum);
            divisors[(2 * i - 1) * NEXT] = sum;
            sum = column_sum(mix) + eps;
            mix = __fdividef(mix, sum);
            divisors[2 * i * NEXT] = sum;
        }
        if (live) grad = grad_comb[row * 16 + cell];
        for (int i = iters - 1; i > 0; --i) {  // undoes the steps one by one
            sum = divisors[2 * i * NEXT];
            grad = __fdividef(grad - column_sum(grad * mix), sum);
            mix *= sum;
            sum = divisors[(2 * i - 1) * NEXT];
            grad = __fdividef(grad - row_sum(grad * mix), sum);
            mix *= sum;
        }
        grad = (grad - column_sum(grad * mix)) / divisors[0];
        grad = soft * (grad - row_sum(grad * soft));
    }
    if (cell < 8) {
        parts[place * 48 + cell] = gate;
        parts[place * 48 + 24 + cell] = gate * gate_u;
    }
    parts[place * 48 + 8 + cell] = grad;
    parts[place * 48 + 32 + cell] = grad * comb_u;
    gate *= scale[cell / 4 % 2];
    grad *= scale[2];
    const float through_rms = column_sum(row_sum(gate * gate_u + grad * comb_u));
    auto put = [&](int k, float value) {
        if (live) weight[row * WIDTH + k] = value;
        const int tile = token / ROWS, t = token % ROWS;
        u16* to = operand + ((tile * 3ll + k / 8) * 32 + k % 8 * 4 + t % 8 / 2) * 8 + t / 8 * 2 + t % 2;
        const u32 high = pack(value, 0.0f);
        to[0] = (u16)high;
        to[4] = (u16)pack(value - half_of(high, 0), 0.0f);
    };
    if (cell < 8) put(cell, gate * rms);
    put(8 + cell, grad * rms);
    if (live && cell == 0) weight[row * WIDTH + SQUARES] = -through_rms * rms * rms / channels;
    __syncthreads();
    if (threadIdx.x < 48) {
        float sum = 0.0f;
        for (int i = 0; i < COUNT; ++i) sum += parts[i * 48 + threadIdx.x];
        param[blockIdx.x * 48ll + threadIdx.x] = sum;
    }
}

// Gradients of streams and y, and partial gradients of the coefficients [T, chunks, 24] (pre, post, comb). The gradient of
// new stream j is G_j = grad_new_j + pre_j grad_input + own X'_j + sum_k weight_k fn_kj. Grid as in the forward.
template <bool UPDATE, int DIM>
__global__ void __launch_bounds__(THREADS, 1)
site_backward(const u16* y, const u16* x, const u16* grad_new, const u16* grad_input, const float* post, const float* comb,
              const float* pre, const float* weight, const float* fn, u16* grad_y, u16* grad_x, float* partial,
              int num_tokens, int shares, int limit, int has_new, int has_input) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = BACKWARD_ARRAYS * ARRAY, NEW = 4, INPUT = 8, LAST = 9, FOURS = 7, TABLE = UNIT * FOURS * 4;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    constexpr int CHUNKS = Chunk<DIM, BLOCK, BACKWARD_BLOCKS>::CHUNKS;
    const Work work(num_tokens, CHUNKS, shares, limit);
    const Chunk<DIM, BLOCK, BACKWARD_BLOCKS> chunk = {work.chunk};
    const int blocks = chunk.count();
    unsigned char* ring = memory + warp * BACKWARD_STAGES * SLOT;
    float* tables = reinterpret_cast<float*>(memory + WARPS * BACKWARD_STAGES * SLOT) + warp * 2 * TABLE;
    // [block][stream][pair of channels][8 rows of fn][lane]
    Vec* fn_parts = reinterpret_cast<Vec*>(memory + WARPS * (BACKWARD_STAGES * SLOT + 8 * TABLE));
    const Rows<128, 1, 6> rows(lane);

    next_may_start();
    auto fetch_unit = [&](const Step& step) {
        if (step.tile < work.end) {
            const int column = chunk.column(step.block) + rows.channel;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = step.tile * UNIT + rows.row[i], bytes = token < num_tokens ? 16 : 0;
                const long long row = min(token, num_tokens - 1), at = row * 4 * DIM + column;
                const u32 to = shared_address(ring + step.slot * SLOT) + rows.offset[i];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    copy16(to + j * ARRAY, x + at + j * DIM, bytes);
                    copy16(to + (NEW + j) * ARRAY, grad_new + at + j * DIM, has_new ? bytes : 0);
                }
                copy16(to + INPUT * ARRAY, grad_input + row * DIM + column, has_input ? bytes : 0);
                if (UPDATE) copy16(to + LAST * ARRAY, y + row * DIM + column, bytes);
            }
        }
    };
    auto fetch_tables = [&](const Step& step) {
        if (step.tile >= work.end || step.block > 0) return;
        const u32 table = shared_address(tables + step.turn * TABLE);
        copy_tables<UPDATE, UNIT, FOURS>(table, post, comb, pre, weight, step.tile * UNIT, num_tokens);
    };
    float next_weights[6];
    auto fetch_weights = [&](int tile) {
        const float* from = weight + (long long)min(tile * UNIT + g, num_tokens - 1) * WIDTH + q;
#pragma unroll
        for (int i = 0; i < 6; ++i) next_weights[i] = from[4 * i];
    };
    Step step = {work.tile + warp, 0, 0, 0}, ahead = step;
#pragma unroll
    for (int i = 0; i < BACKWARD_STAGES; ++i) {
        fetch_unit(ahead);
        ahead.next(blocks, work.stride);
    }
    // row g of product p is channel 8g + 2p, row g + 8 the one after it
#pragma unroll 4
    for (int at = tid; at < blocks * 4 * 12 * 32; at += THREADS) {
        const int part = at / 32, k = part % 3 * 8 + at % 4, p = part / 3 % 4, j = part / 12 % 4;
        const float* from = fn + ((long long)k * 4 + j) * DIM + chunk.column(part / 48) + at % 32 / 4 * 8 + 2 * p;
        const float2 a = __ldg(reinterpret_cast<const float2*>(from));
        const float2 b = __ldg(reinterpret_cast<const float2*>(from + 16ll * DIM));
        fn_parts[at] = {to_tf32(a.x), to_tf32(a.y), to_tf32(b.x), to_tf32(b.y)};
    }
    wait_for_last();  // weight is its work, or of the one before it
    fetch_weights(step.tile);
    ahead = step;
#pragma unroll
    for (int i = 0; i < BACKWARD_STAGES; ++i) {  // the first group of copies has all units so far
        fetch_tables(ahead);
        copy_commit();
        ahead.next(blocks, work.stride);
    }
    __syncthreads();

    float dots[2][24];
    u32 weights[6];
    for (; step.tile < work.end; step.next(blocks, work.stride)) {
        if (step.block == 0) {
#pragma unroll
            for (int i = 0; i < 48; ++i) dots[i / 24][i % 24] = 0.0f;
#pragma unroll
            for (int i = 0; i < 6; ++i) weights[i] = to_tf32(next_weights[i]);
            fetch_weights(step.tile + work.stride);
        }
        copy_wait<BACKWARD_STAGES - 1>();
        __syncwarp();
        unsigned char* slot = ring + step.slot * SLOT;
        float G[4][4][4];  // [stream][pair of channels][channel, token]: grad_new_j + sum_k weight_k fn_kj
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Vec* mine = reinterpret_cast<const Vec*>(slot + rows.at(2 * q + r, g));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const Vec grad = mine[(NEW + j) * (ARRAY / 16)];
#pragma unroll
                for (int i = 0; i < 8; ++i) G[j][i / 2][i % 2 * 2 + r] = half_of(grad.w[i / 2], i % 2);
            }
        }
        const Vec* parts = fn_parts + step.block * 48 * 32 + lane;
#pragma unroll
        for (int i = 0; i < 48; ++i) {
            const Vec a = parts[i * 32];
            mma_tf32(G[i / 12][i / 3 % 4], a.w, weights[i % 3 * 2], weights[i % 3 * 2 + 1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* table = tables + step.turn * TABLE + (2 * q + r) * FOURS * 4;
            Coefficients mix;
            mix.load(table);
            const float own = table[24];
            Vec* mine = reinterpret_cast<Vec*>(slot + rows.at(2 * q + r, g));
            Vec of_x[4], of_y, old[4], input, last;
#pragma unroll
            for (int j = 0; j < 4; ++j) old[j] = mine[j * (ARRAY / 16)];
            input = mine[INPUT * (ARRAY / 16)];
            if (UPDATE) last = mine[LAST * (ARRAY / 16)];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                float pair_x[2][4], pair_y[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float xs[4] = {half_of(old[0].w[p], e), half_of(old[1].w[p], e), half_of(old[2].w[p], e),
                                         half_of(old[3].w[p], e)};
                    const float ys = UPDATE ? half_of(last.w[p], e) : 0.0f;
                    const float in = half_of(input.w[p], e);
                    float news[4] = {xs[0], xs[1], xs[2], xs[3]};
                    if (UPDATE) mix.update(news, ys, xs);
                    pair_y[e] = 0.0f;
#pragma unroll
                    for (int i = 0; i < 4; ++i) pair_x[e][i] = 0.0f;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float grad = G[j][p][2 * e + r];
                        grad += mix.pre[j] * in;
                        grad += own * news[j];
                        dots[r][j] += in * news[j];
                        if (UPDATE) {
                            dots[r][4 + j] += ys * grad;
                            pair_y[e] += mix.post[j] * grad;
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                dots[r][8 + 4 * i + j] += xs[i] * grad;
                                pair_x[e][i] += mix.comb[4 * i + j] * grad;
                            }
                        } else {
                            pair_x[e][j] = grad;
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) of_x[j].w[p] = pack(pair_x[0][j], pair_x[1][j]);
                if (UPDATE) of_y.w[p] = pack(pair_y[0], pair_y[1]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) mine[j * (ARRAY / 16)] = of_x[j];
            if (UPDATE) mine[LAST * (ARRAY / 16)] = of_y;
        }
        __syncwarp();
        const int column = chunk.column(step.block) + rows.channel;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const long long row = step.tile * UNIT + rows.row[i];
            const Vec* from = reinterpret_cast<const Vec*>(slot + rows.offset[i]);
            if (row < num_tokens) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    *reinterpret_cast<Vec*>(grad_x + (row * 4 + j) * DIM + column) = from[j * (ARRAY / 16)];
                if (UPDATE) *reinterpret_cast<Vec*>(grad_y + row * DIM + column) = from[LAST * (ARRAY / 16)];
            }
        }
        __syncwarp();
        fetch_unit(ahead);
        fetch_tables(ahead);
        copy_commit();
        ahead.next(blocks, work.stride);
        if (step.block == blocks - 1) {  // over the eight lanes of a token: lane 4g + q keeps columns g, g + 8, g + 16
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = step.tile * UNIT + 2 * q + r;
                float* to = partial + ((long long)t * CHUNKS + chunk.index) * 24 + g;
#pragma unroll
                for (int a = 0; a < 3; ++a) {
                    const float* eight = dots[r] + 8 * a;
                    float four[4], two[2];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float got = __shfl_xor_sync(FULL, g & 4 ? eight[i] : eight[4 + i], 16);
                        four[i] = (g & 4 ? eight[4 + i] : eight[i]) + got;
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float got = __shfl_xor_sync(FULL, g & 2 ? four[i] : four[2 + i], 8);
                        two[i] = (g & 2 ? four[2 + i] : four[i]) + got;
                    }
                    const float got = __shfl_xor_sync(FULL, g & 1 ? two[0] : two[1], 4);
                    if (t < num_tokens) to[8 * a] = (g & 1 ? two[1] : two[0]) + got;
                }
            }
        }
    }
}

// Partial gradients of fn [shares, 24, columns]: weight^T times new streams [T, columns]. A warp has 64 columns, lane
// 4g + q the columns 8g..8g+7 of tokens 2q, 2q + 1, 2q + 8, 2q + 9 of a tile. Grid: 512 columns x (shares, and one more if they leave tokens).
template <int STAGES>
__global__ void __launch_bounds__(THREADS, 2)
fn_gradient(const u16* streams, const u16* operand, float* partial, int num_tokens, int columns, int chunks, int shares,
            int limit) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = 4 * 512, WEIGHTS = GROUP * 96;  // Vecs of a group of tiles
    static_assert(STAGES <= GROUP, "a group's weights are copied while the group before is at work");
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    const int share = blockIdx.x / chunks, all_tiles = (num_tokens + ROWS - 1) / ROWS;
    // The shares take turns over groups of GROUP tiles, up to group `limit`; one more has what is left.
    const bool rest = share == shares;
    const int first = rest ? limit : share, stride = rest ? 1 : shares, tiles = rest ? all_tiles : min(all_tiles, limit * GROUP);
    const int warp_column = (blockIdx.x % chunks * WARPS + warp) * 64;
    const bool mine = warp_column < columns;  // of whole warps: columns is a multiple of 64
    unsigned char* ring = memory + warp * STAGES * SLOT;
    const Rows<128, 1, 6> rows(lane);
    Vec* weights = reinterpret_cast<Vec*>(memory + WARPS * STAGES * SLOT);
    auto tile_at = [&](int at) { return (at / GROUP * stride + first) * GROUP + at % GROUP; };
    auto fetch_weights = [&](int at) {
        if (at % GROUP != 0) return;
        const u32 to = shared_address(weights + at / GROUP % 2 * WEIGHTS);
        for (int i = tid; i < min(WEIGHTS, (tiles - tile_at(at)) * 96); i += THREADS)
            copy16(to + i * 16, operand + (tile_at(at) * 96ll + i) * 8, 16);
    };
    auto fetch_streams = [&](int at, int slot) {
        if (tile_at(at) >= tiles || !mine) return;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int token = tile_at(at) * ROWS + rows.row[r % 2] + r / 2 * 8;
            const u16* from = streams + (long long)min(token, num_tokens - 1) * columns + warp_column + rows.channel;
            copy16(shared_address(ring + slot * SLOT + r / 2 * 1024 + rows.offset[r % 2]), from, token < num_tokens ? 16 : 0);
        }
    };
    next_may_start();
    float sums[4][3][4];
#pragma unroll
    for (int i = 0; i < 48; ++i) sums[i / 12][i % 12 / 4][i % 4] = 0.0f;
    for (int i = 0; i < STAGES; ++i) fetch_streams(i, i);
    wait_for_last();  // operand is its work
    fetch_weights(0);
    for (int i = 0; i < STAGES; ++i) copy_commit();  // the first group of copies has all so far
    for (int at = 0, slot = 0; tile_at(at) < tiles; ++at) {
        copy_wait<STAGES - 1>();
        if (at % GROUP == 0) __syncthreads();
        else __syncwarp();
        Vec x[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
            x[r] = *reinterpret_cast<const Vec*>(ring + slot * SLOT + r / 2 * 1024 + rows.at(2 * q + r % 2, g));
        __syncwarp();
        fetch_weights(at + STAGES);
        fetch_streams(at + STAGES, slot);
        copy_commit();
        if (++slot == STAGES) slot = 0;
        const Vec* b = weights + (at / GROUP % 2 * GROUP + at % GROUP) * 96 + lane;
        const Vec b0 = b[0], b1 = b[32], b2 = b[64];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 a[4] = {__byte_perm(x[0].w[i], x[1].w[i], 0x5410), __byte_perm(x[0].w[i], x[1].w[i], 0x7632),
                              __byte_perm(x[2].w[i], x[3].w[i], 0x5410), __byte_perm(x[2].w[i], x[3].w[i], 0x7632)};
#pragma unroll
            for (int term = 1; term >= 0; --term) {
                mma_bf16(sums[i][0], a, b0.w[2 * term], b0.w[2 * term + 1]);
                mma_bf16(sums[i][1], a, b1.w[2 * term], b1.w[2 * term + 1]);
                mma_bf16(sums[i][2], a, b2.w[2 * term], b2.w[2 * term + 1]);
            }
        }
    }
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int n = i / 2, e = i % 2;
        float4* to = reinterpret_cast<float4*>(partial + (share * 24ll + 8 * n + 2 * q + e) * columns + warp_column + 8 * g);
        to[0] = make_float4(sums[0][n][e], sums[0][n][2 + e], sums[1][n][e], sums[1][n][2 + e]);
        to[1] = make_float4(sums[2][n][e], sums[2][n][2 + e], sums[3][n][e], sums[3][n][2 + e]);
    }
}

// The partials of all the above, summed. CTAs from 0: gradients of base and scale, if `project`, as those take longest; of
// the coefficients; of fn, if there are several partials of it.
template <int COUNT>
__global__ void __launch_bounds__(COUNT, 2)
sum_gradients(const float* of_mix, const float* of_fn, const float* param, float* grad_pre, float* grad_post,
              float* grad_comb, float* grad_fn, float* grad_base, float* grad_scale, int num_tokens, int chunks, int columns,
              int shares, int tiles, int mix_ctas, int project) {
    __shared__ float parts[COUNT];
    wait_for_last();
    const int cta = blockIdx.x - project;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (cta >= mix_ctas) {
        const long long at = (long long)(cta - mix_ctas) * COUNT + threadIdx.x, size = columns * 6ll;  // in fours
        if (at >= size) return;
        add_all<8>(sum, of_fn + at * 4, shares, size * 4);
        reinterpret_cast<float4*>(grad_fn)[at] = sum;
        return;
    }
    if (cta >= 0) {
        const long long at = (long long)cta * COUNT + threadIdx.x, token = at / 6;
        if (token >= num_tokens) return;
        const int four = at % 6;
        add_all<14>(sum, of_mix + token * chunks * 24 + four * 4, chunks, 24);
        float* to = four == 0 ? grad_pre + token * 4 : grad_post + token * 4;
        if (four > 1) to = grad_comb + token * 16 + four * 4 - 8;
        *reinterpret_cast<float4*>(to) = sum;
        return;
    }
    const int k = threadIdx.x % 48;
    float one = 0.0f;
#pragma unroll 16
    for (int tile = threadIdx.x / 48; tile < tiles; tile += COUNT / 48) one += param[tile * 48ll + k];
    parts[threadIdx.x] = one;
    __syncthreads();
    if (threadIdx.x < 48) {
        one = 0.0f;
        for (int i = 0; i < COUNT / 48; ++i) one += parts[i * 48 + k];
        if (k < 24) grad_base[k] = one;
    }
    __syncthreads();
    if (threadIdx.x < 48) parts[threadIdx.x] = one;
    __syncthreads();
    if (threadIdx.x < 3) {
        const int begin = 24 + (threadIdx.x == 2 ? 8 : 4 * threadIdx.x), count = threadIdx.x == 2 ? 16 : 4;
        one = 0.0f;
        for (int i = 0; i < count; ++i) one += parts[begin + i];
        grad_scale[threadIdx.x] = one;
    }
}
