// Backward of the mHC site on Hopper. The gradient of fn has a file of its own.
#include "hopper.cuh"

constexpr int ARRAYS = 10, STAGES = 2;  // arrays that a unit has parts of; units copied ahead
constexpr int BLOCKS = 2;               // that a CTA owns, at most

// Where a warp is: a tile of tokens, a block of its channels.
struct Step {
    int tile, block, slot, turn;

    __device__ __forceinline__ void next(int blocks, int tile_stride) {
        if (++slot == STAGES) slot = 0;
        if (++block < blocks) return;
        block = 0;
        tile += tile_stride;
        turn ^= 1;
    }
};

// Gradients of streams and y, and partial gradients of the coefficients [T, chunks, 24] (pre, post, comb). The gradient of
// new stream j is G_j = grad_new_j + pre_j grad_input + own X'_j + sum_k weight_k fn_kj. Grid: see Work.
template <bool UPDATE, int DIM>
__global__ void __launch_bounds__(THREADS, 1)
site_backward(const u16* y, const u16* x, const u16* grad_new, const u16* grad_input, const float* post, const float* comb,
              const float* pre, const float* weight, const float* fn, u16* grad_y, u16* grad_x, float* partial,
              int num_tokens, int shares, int limit, int has_new, int has_input) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = ARRAYS * ARRAY, NEW = 4, INPUT = 8, LAST = 9, FOURS = 7, TABLE = UNIT * FOURS * 4;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    constexpr int CHUNKS = Chunk<DIM, BLOCK, BLOCKS>::CHUNKS;
    const Work work(num_tokens, CHUNKS, shares, limit);
    const Chunk<DIM, BLOCK, BLOCKS> chunk = {work.chunk};
    const int blocks = chunk.count();
    unsigned char* ring = memory + warp * STAGES * SLOT;
    float* tables = reinterpret_cast<float*>(memory + WARPS * STAGES * SLOT) + warp * 2 * TABLE;
    // [block][stream][pair of channels][8 rows of fn][lane]
    Vec* fn_parts = reinterpret_cast<Vec*>(memory + WARPS * (STAGES * SLOT + 8 * TABLE));
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
    for (int i = 0; i < STAGES; ++i) {
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
    for (int i = 0; i < STAGES; ++i) {  // the first group of copies has all units so far
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
        copy_wait<STAGES - 1>();
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
