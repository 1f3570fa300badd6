// Backward of joint sparse attention on Hopper with one CTA per token and fp32 reductions. It does what the kernel of
// hopper_backward.cu does; at 64 heads it takes 2% less time (docs/benchmarks.md), with few heads 14% more.
#include "hopper.cuh"

constexpr int THREADS = 256, MAX_SLOTS = 1024;

// Table rows behind the token's slots, -1 = none, padded to whole blocks. Returns how many blocks hold a used slot.
// Window slots come first, oldest first. `scratch` holds a word per warp. Ends with the CTA in step.
template <int COUNT>
__device__ __forceinline__ int list_slots(int* ids, int* scratch, const int* topk, long long first, long long start,
                                          int window, int num_topk, int num_window) {
    const int tid = threadIdx.x, slots = window + num_topk;
    int used = 0;
    for (int slot = tid; slot < ((slots + ROWS - 1) / ROWS + 1) * ROWS; slot += COUNT) {
        int id = -1;
        if (slot < window) {
            if (first + slot >= start) id = (int)(first + slot);
        } else if (slot < slots) {
            const int chosen = topk[slot - window];
            if (chosen >= 0) id = chosen + num_window;
        }
        ids[slot] = id;
        if (id >= 0) used = slot + 1;
    }
    used = __reduce_max_sync(0xffffffffu, used);
    if (tid % 32 == 0) scratch[tid / 32] = used;
    __syncthreads();
    for (int warp = 0; warp < COUNT / 32; ++warp) used = max(used, scratch[warp]);
    return (used + ROWS - 1) / ROWS;
}

// Four of the eight 16-channel pieces of q, grad_out and out that a thread of the backward brings in: thread t has row
// t / 4. Kept in registers between `load` and `store`, so that other latencies hide behind these.
struct Heads {
    Vec q[4][2], grad[4][2], out[4][2];

    __device__ __forceinline__ void load(const u16* q_row, const u16* grad_row, const u16* out_row, int part, bool real) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = (i * 4 + threadIdx.x % 4) * 2 + j + part * 32;
                const Vec zero = {0, 0, 0, 0};
                q[i][j] = real ? reinterpret_cast<const Vec*>(q_row)[at] : zero;
                grad[i][j] = real ? reinterpret_cast<const Vec*>(grad_row)[at] : zero;
                out[i][j] = real ? reinterpret_cast<const Vec*>(out_row)[at] : zero;
            }
        }
    }
    // Writes both tiles, packed; returns this thread's part of sum(out * grad_out).
    __device__ __forceinline__ float store(unsigned char* q_tile, unsigned char* grad_tile, int part) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const Vec a = out[i][j], b = grad[i][j];
                dot += dot2(a.x, b.x) + dot2(a.y, b.y) + dot2(a.z, b.z) + dot2(a.w, b.w);
            }
            pack16(q[i][0], q[i][1]);
            pack16(grad[i][0], grad[i][1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 at = swizzled(threadIdx.x / 4, (i * 4 + threadIdx.x % 4) * 2 + j + part * 32);
                *reinterpret_cast<Vec*>(q_tile + at) = q[i][j];
                *reinterpret_cast<Vec*>(grad_tile + at) = grad[i][j];
            }
        }
        return dot;
    }
};

// grad_q, delta = sum(out * grad_out), and both latents' gradients, added to fp32 grad_table [window rows + entries, 512].
// Warpgroup 0 forms S and P, warpgroup 1 dP and dS; each owns half of the channels of grad_q and of the latents.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_backward_token(const u16* q, const u16* out, const u16* grad_out, const u16* table, const int* topk, const float* lse,
                      const long long* start, u16* grad_q, float* grad_table, float* delta, int num_tokens, int num_heads,
                      int window, int num_topk, int offset, int num_window, double scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *q_tile = memory, *g_tile = memory + TILE, *k_tile = memory + 2 * TILE, *p_tile = memory + 3 * TILE;
    unsigned char *rest_tile = p_tile + COLUMN_BLOCK, *ds_tile = p_tile + 2 * COLUMN_BLOCK;
    int* ids = reinterpret_cast<int*>(p_tile + 3 * COLUMN_BLOCK);
    float* row_stats = reinterpret_cast<float*>(ids + MAX_SLOTS + ROWS);  // [2][64]: lse in log2, delta
    int* scratch = reinterpret_cast<int*>(row_stats + 2 * ROWS);
    const int tid = threadIdx.x, lane = tid % 32, quad = lane % 4;
    const int group = __shfl_sync(0xffffffffu, tid / 128, 0);  // uniform, so descriptors live in uniform registers
    const int row = (tid % 128) / 32 * 16 + lane / 4;  // and row + 8
    const long long token = blockIdx.x, heads_at = token * num_heads * DIM;
    const float scale_log2 = (float)scale * LOG2E;

    Heads heads;
    const int head = tid / 4;
    const long long head_at = heads_at + head * DIM;
    const bool real = head < num_heads;
    const float head_lse = real ? lse[token * num_heads + head] * LOG2E : INFINITE;
    heads.load(q + head_at, grad_out + head_at, out + head_at, 0, real);
    const int blocks = list_slots<THREADS>(ids, scratch, topk + token * num_topk, token + offset - (window - 1), start[token],
                                  window, num_topk, num_window);
    if (blocks > 0) gather(shared_address(k_tile), table, ids, tid);
    copy_commit();
    float dot = heads.store(q_tile, g_tile, 0);
    heads.load(q + head_at, grad_out + head_at, out + head_at, 1, real);
    dot += heads.store(q_tile, g_tile, 1);
    dot += __shfl_xor_sync(0xffffffffu, dot, 1);
    dot += __shfl_xor_sync(0xffffffffu, dot, 2);
    if (tid % 4 == 0) {
        row_stats[head] = head_lse;
        row_stats[ROWS + head] = dot;
        if (real) delta[token * num_heads + head] = dot;
    }
    if (tid == 0 && token + 132 < num_tokens) {
        const long long next = heads_at + 132ll * num_heads * DIM;
        prefetch_l2(q + next, num_heads * DIM * 2);
        prefetch_l2(out + next, num_heads * DIM * 2);
        prefetch_l2(grad_out + next, num_heads * DIM * 2);
    }

    float dq[128], grad[64];  // grad: 128 channels of the block's key gradients, 64 rows
#pragma unroll
    for (int i = 0; i < 128; ++i) dq[i] = 0.0f;
    // Adds `grad` to memory. Lanes of rows 2n and 2n + 1 trade halves, so that 8 lanes add one row's 32 channels: a whole
    // 128-byte line per request. Half lines halve the rate of the L2's reductions.
    const int odd = lane / 4 % 2;
    auto add_sums = [&](const int* row_ids, int chunk) {
        float* to = grad_table + group * 256 + chunk * 128 + odd * 16 + quad * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // rows, rows + 8
            const int even_id = row_ids[row - odd + 8 * i], odd_id = row_ids[row - odd + 1 + 8 * i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // 32 channels each
                const float* x = grad + j * 16 + i * 2;
                float first[4], second[4];
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    const int at = l % 2 + l / 2 * 4;
                    const float got = __shfl_xor_sync(0xffffffffu, odd ? x[at] : x[at + 8], 4);
                    first[l] = odd ? got : x[at];
                    second[l] = odd ? x[at + 8] : got;
                }
                if (even_id >= 0) add4(to + (long long)even_id * DIM + j * 32, first[0], first[1], first[2], first[3]);
                if (odd_id >= 0) add4(to + (long long)odd_id * DIM + j * 32, second[0], second[1], second[2], second[3]);
            }
        }
    };
    const u32 q_at = shared_address(q_tile), g_at = shared_address(g_tile), k_at = shared_address(k_tile);
    const u32 p_at = shared_address(p_tile), ds_at = shared_address(ds_tile), half = group * 4 * COLUMN_BLOCK;
    const u64 mine = descriptor(group == 0 ? q_at : g_at, 16), keys = descriptor(k_at, 16);
    const u64 keys_half = descriptor(k_at + half, COLUMN_BLOCK), ds_rows = descriptor(ds_at, 16);
    const u64 q_half = descriptor(q_at + half, COLUMN_BLOCK), g_half = descriptor(g_at + half, COLUMN_BLOCK);
    const u64 p_columns = descriptor(p_at, COLUMN_BLOCK), ds_columns = descriptor(ds_at, COLUMN_BLOCK);
    fence_async();
    for (int block = 0; block < blocks; ++block) {
        const int* block_ids = ids + block * ROWS;
        copy_wait<0>();
        __syncthreads();
        float s[32];
        if (group == 1) {
            if (block > 0) add_sums(block_ids - ROWS, 1);  // while warpgroup 0 forms S
            meet<4, THREADS>();  // S comes first, so that P is formed while dP runs
        }
        mma_fence();
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k)  // warpgroup 0: S = q . k; warpgroup 1: dP = grad_out . k
            mma64<0, 0>(s, mine + channels(k), keys + channels(k), k > 0);
        mma_commit();
        mma_wait<0>();
        if (group == 0) {
            announce<4, THREADS>();
            const float lse0 = row_stats[row], lse1 = row_stats[row + 8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int2 id = *reinterpret_cast<const int2*>(block_ids + j * 8 + quad * 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float base = i == 0 ? lse0 : lse1;
                    const float a = id.x >= 0 ? exp2_fast(s[j * 4 + i * 2] * scale_log2 - base) : 0.0f;
                    const float b = id.y >= 0 ? exp2_fast(s[j * 4 + i * 2 + 1] * scale_log2 - base) : 0.0f;
                    const u32 word = pack(a, b), at = swizzled(row + 8 * i, j) + quad * 4;
                    // P goes on as two bf16: its rounded value for the products, and the rest for an exact dS.
                    *reinterpret_cast<u32*>(p_tile + at) = word;
                    *reinterpret_cast<u32*>(rest_tile + at) = pack(a - low_half(word), b - high_half(word));
                }
            }
            fence_async();
            meet<5, 128>();
            announce<6, THREADS>();
            if (block > 0) add_sums(block_ids - ROWS, 1);  // while warpgroup 1 forms dP and dS
        } else {
            meet<6, THREADS>();
        }
        auto add_product = [&](u64 weights, u64 heads, int chunk, int add) {  // 128 channels of this half
#pragma unroll
            for (int k = 0; k < ROWS / 16; ++k)
                mma128<1, 1>(grad, weights + rows(k), heads + column_blocks(2 * chunk) + rows(k), add || k > 0);
        };
        mma_fence();
        add_product(p_columns, g_half, 0, 0);  // runs while warpgroup 1 forms dS
        mma_commit();
        if (group == 1) {
            const float delta0 = row_stats[ROWS + row], delta1 = row_stats[ROWS + row + 8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float base = i == 0 ? delta0 : delta1;
                    const u32 at = swizzled(row + 8 * i, j) + quad * 4;
                    const u32 word = *reinterpret_cast<const u32*>(p_tile + at);
                    const u32 rest = *reinterpret_cast<const u32*>(rest_tile + at);
                    const float a = (low_half(word) + low_half(rest)) * (s[j * 4 + i * 2] - base) * (float)scale;
                    const float b = (high_half(word) + high_half(rest)) * (s[j * 4 + i * 2 + 1] - base) * (float)scale;
                    *reinterpret_cast<u32*>(ds_tile + at) = pack(a, b);
                }
            }
            fence_async();
        }
        __syncthreads();
        mma_fence();
#pragma unroll
        for (int k = 0; k < ROWS / 16; ++k) mma256<0, 1>(dq, ds_rows + channels(k), keys_half + rows(k), 1);
        mma_commit();
        mma_wait<0>();
        __syncthreads();  // both warpgroups are done with this block's keys
        const bool more = block + 1 < blocks;
        if (group == 1 && more) gather(k_at, table, block_ids + ROWS, tid);
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            // The warpgroups take turns: one's products run while the other adds its sums to memory.
            if (group == 1) meet<1, THREADS>();
            else if (chunk == 1) meet<2, THREADS>();
            mma_fence();
            if (chunk == 1) add_product(p_columns, g_half, 1, 0);
            add_product(ds_columns, q_half, chunk, 1);
            mma_commit();
            if (chunk == 0) {
                if (group == 0 && more) gather(k_at, table, block_ids + ROWS, tid);
                copy_commit();
            }
            mma_wait<0>();
            if (group == 0) announce<1, THREADS>();
            else if (chunk == 0) announce<2, THREADS>();
            if (chunk == 0) add_sums(block_ids, 0);  // the other half is added while the next block's scores are formed
        }
    }
    if (blocks > 0) add_sums(ids + (blocks - 1) * ROWS, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = row + 8 * i;
        if (r < num_heads) {
            u16* to = grad_q + heads_at + r * DIM + group * 256 + quad * 4;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float* from = dq + j * 8 + i * 2;
                store4(to + j * 16, from[0], from[1], from[4], from[5]);
            }
        }
    }
}
