// What stands before and behind the attention kernels: the packed table of latents, the number of slot blocks of every
// token, and the ordered sums of partial gradient rows.
#include "hopper.cuh"

constexpr int THREADS = 256;

// The first `pack_blocks` blocks write the table of latents: window rows, then compressed rows, packed; one thread per
// 16 channels. With `clear`, they also zero the fp32 rows that the backward adds to. The others count, a warp per token:
// blocks[t] is the number of blocks of 64 slots up to the last used one, at least 1. The `num_tickets` numbers behind
// them become 0.
extern "C" __global__ void prepare(const u16* window_kv, const u16* keys, u16* table, float* sums, const int* topk,
                                   const long long* start, int* blocks, int pack_blocks, int num_window, int num_rows,
                                   int clear, int num_tokens, int num_tickets, int window, int num_topk,
                                   int offset) {
    if (blockIdx.x < pack_blocks) {
        const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
        const long long row = at / (DIM / 16);
        if (row >= num_rows) return;
        const u16* from = row < num_window ? window_kv + at * 16 : keys + (at - (long long)num_window * (DIM / 16)) * 16;
        Vec a = reinterpret_cast<const Vec*>(from)[0], b = reinterpret_cast<const Vec*>(from)[1];
        pack16(a, b);
        reinterpret_cast<Vec*>(table + at * 16)[0] = a;
        reinterpret_cast<Vec*>(table + at * 16)[1] = b;
        if (clear) {
#pragma unroll
            for (int i = 0; i < 4; ++i) reinterpret_cast<Vec*>(sums + at * 16)[i] = {0, 0, 0, 0};
        }
        return;
    }
    const int token = (blockIdx.x - pack_blocks) * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token == num_tokens)
        for (int i = lane; i < num_tickets; i += 32) blocks[num_tokens + i] = 0;
    if (token >= num_tokens) return;
    int used = token + offset >= start[token] ? window : 0;  // the newest window row comes last
    for (int place = lane; place < num_topk; place += 32)
        if (topk[(long long)token * num_topk + place] >= 0) used = window + place + 1;
    used = __reduce_max_sync(0xffffffffu, used);
    if (lane == 0) blocks[token] = max(1, (used + ROWS - 1) / ROWS);
}

// Adds to sums fp32 [rows, 512] the partial rows bf16 [tokens * (window + num_topk), 512] of each table row, in token
// order: bitwise repeatable. A block per table row; the tokens whose window holds row j are j - offset and its window - 1
// followers, those that chose entry c are order[offsets[c]] .. order[offsets[c + 1] - 1], flat positions in topk.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_rows(const u16* partial, const long long* order, const long long* offsets, const long long* start, float* sums,
         int num_window, int num_tokens, int window, int num_topk, int offset) {
    constexpr int LANES = DIM / 8, PARTS = THREADS / LANES, DEPTH = 8;  // a thread has 8 channels of every PARTS-th row
    __shared__ float others[PARTS - 1][DIM];
    const int row = blockIdx.x, part = threadIdx.x / LANES, channel = threadIdx.x % LANES * 8, slots = window + num_topk;
    const bool near = row < num_window;
    const long long begin = near ? max(row - offset, 0) : offsets[row - num_window];
    const long long end = near ? min(row - offset + window, num_tokens) : offsets[row - num_window + 1];
    float sum[8] = {};
    for (long long at = begin + part; at < end; at += PARTS * DEPTH) {
        Vec words[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const long long place = at + i * PARTS;
            long long from = -1;
            if (place < end) {
                if (near) {
                    if (row >= start[place]) from = place * slots + row - offset + window - 1 - place;
                } else {
                    const u32 flat = (u32)order[place];
                    from = flat + (long long)window * (flat / num_topk + 1);
                }
            }
            words[i] = {0, 0, 0, 0};
            if (from >= 0) words[i] = *reinterpret_cast<const Vec*>(partial + from * DIM + channel);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const u32 word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum[2 * j] += low_half(word[j]);
                sum[2 * j + 1] += high_half(word[j]);
            }
        }
    }
    if (part > 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j) others[part - 1][channel + j] = sum[j];
    }
    __syncthreads();
    if (part > 0) return;
    float4* to = reinterpret_cast<float4*>(sums + (long long)row * DIM + channel);
#pragma unroll
    for (int other = 0; other < PARTS - 1; ++other) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += others[other][channel + j];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 old = to[i];
        to[i] = make_float4(old.x + sum[4 * i], old.y + sum[4 * i + 1], old.z + sum[4 * i + 2], old.w + sum[4 * i + 3]);
    }
}
