// Forward of the mHC site on Hopper, up to partial sums of the projections.
#include "hopper.cuh"

constexpr int SPAN = 128, HALF = 4;             // channels and tokens that a warp has at once
constexpr int TERMS = 3;                        // bf16 terms of fn: products with bf16 are exact to fp32
constexpr int ARRAYS = 5, STAGES = 2;           // arrays that a unit has parts of; units copied ahead
constexpr int SPANS = 2;                        // that a CTA owns, at most
constexpr int FN_BLOCK = 2 * TERMS * 24 * 128;  // bytes of 64 summed channels of fn's terms, of both blocks of a span

// A chunk's slice of fn as TERMS bf16 whose sum it is, for mma144: [span][64 channels of a block's 256, of all streams]
// [block, term, row of fn], rows of 128 bytes. A thread splits eight channels of a row at a time.
template <int DIM>
__device__ __forceinline__ void split_fn(const float* fn, unsigned char* fn_parts, Chunk<DIM, SPAN, SPANS> chunk) {
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
    constexpr int SLOT = ARRAYS * ARRAY, TABLE = HALF * 24, LAST = 4, STEPS = SPAN / 2 * 4 / 16;
    static_assert(STAGES == 2, "either half has a place of the ring");
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    constexpr int CHUNKS = Chunk<DIM, SPAN, SPANS>::CHUNKS;
    const Work work(num_tokens, CHUNKS, shares, limit);
    const Chunk<DIM, SPAN, SPANS> chunk = {work.chunk};
    unsigned char* fn_parts = memory;
    unsigned char* rings = memory + SPANS * STEPS / 4 * FN_BLOCK;
    unsigned char* ring = rings + warp * STAGES * SLOT;
    float* table = reinterpret_cast<float*>(rings + WARPS * STAGES * SLOT) + warp * TABLE;
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
