// Backward of joint sparse attention on Hopper: 256 threads per multiprocessor take one token after the other.
//
// Warpgroup 0 forms S and P, warpgroup 1 dP and dS; each owns half of the channels of grad_q and of the latents. While
// the last block's key gradients of a token are formed, the next token's first keys, q and grad_out are on their way.
#include "hopper.cuh"

constexpr int THREADS = 256;

// Sums of x[0] .. x[2 * HALF - 1] over lanes that differ in the bits of 4 * HALF - 1: row r is left in lanes 2r, 2r + 1.
template <int HALF> __device__ __forceinline__ float sum_rows(float* x, int lane) {
    if constexpr (HALF == 0) {
        return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
    } else {
        const bool upper = lane & 2 * HALF;
#pragma unroll
        for (int r = 0; r < HALF; ++r) {
            const float other = __shfl_xor_sync(0xffffffffu, upper ? x[r] : x[r + HALF], 2 * HALF);
            x[r] = (upper ? x[r + HALF] : x[r]) + other;
        }
        return sum_rows<HALF / 2>(x, lane);
    }
}

// Lanes 2n and 2n + 1 hold 16 channels, 8 each: into packed order.
__device__ __forceinline__ Vec pack_lanes(Vec a) {
    const bool odd = thread() % 2;
    const u32 first = __shfl_xor_sync(0xffffffffu, odd ? a.x : a.y, 1);
    const u32 second = __shfl_xor_sync(0xffffffffu, odd ? a.z : a.w, 1);
    return odd ? Vec{first, second, a.y, a.w} : Vec{a.x, a.z, first, second};
}

// grad_q, delta = sum(out * grad_out), and both latents' gradients: added to fp32 `sums` [window rows + entries, 512] or,
// ORDERED, one row per slot in bf16 `partial` [tokens * slots, 512]; rows of slots not in use stay unwritten.
// HEAD_STEPS * 16 is at least the number of heads. The last tokens come first, for they have the most slots, and whoever
// is free takes the next one; `tickets` is 0 at the start.
template <bool ORDERED, int HEAD_STEPS>
__global__ void __launch_bounds__(THREADS, 1)
attend_backward(const u16* q, const u16* out, const u16* grad_out, const u16* table, const int* topk, const float* lse,
                const long long* start, const int* blocks_of, int* tickets, u16* grad_q, float* sums, u16* partial, float* delta,
                int num_tokens, int num_heads, int window, int num_topk, int offset, int num_window, double scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *q_tile = memory, *g_tile = memory + TILE, *k_tile = memory + 2 * TILE, *p_tile = memory + 3 * TILE;
    unsigned char *rest_tile = p_tile + COLUMN_BLOCK, *ds_tile = p_tile + 2 * COLUMN_BLOCK;
    int* tile_ids = reinterpret_cast<int*>(p_tile + 3 * COLUMN_BLOCK);  // [4][64]: rows behind the last blocks' slots
    float* row_stats = reinterpret_cast<float*>(tile_ids + 4 * ROWS);   // [3][64]: lse in log2, halves of delta
    const int tid = threadIdx.x;
    const int group = __shfl_sync(0xffffffffu, tid / 128, 0);  // uniform, so descriptors live in uniform registers
    const float scale_log2 = (float)scale * LOG2E;
    const Slots slots = {topk, start, window, num_topk, offset, num_window};
    const u32 q_at = shared_address(q_tile), g_at = shared_address(g_tile), k_at = shared_address(k_tile);
    const u32 p_at = shared_address(p_tile), ds_at = shared_address(ds_tile), half = group * 4 * COLUMN_BLOCK;
    const u64 mine = descriptor(group == 0 ? q_at : g_at, 16), keys = descriptor(k_at, 16);
    const u64 keys_half = descriptor(k_at + half, COLUMN_BLOCK), ds_rows = descriptor(ds_at, 16);
    const u64 q_half = descriptor(q_at + half, COLUMN_BLOCK), g_half = descriptor(g_at + half, COLUMN_BLOCK);
    const u64 p_columns = descriptor(p_at, COLUMN_BLOCK), ds_columns = descriptor(ds_at, COLUMN_BLOCK);

    float dq[128], grad[64];  // grad: 128 channels of the block's key gradients, 64 rows
    // Brings q and grad_out of a token into this warpgroup's half of both tiles, and the rows' statistics. A warp has 16
    // heads, a lane 8 channels of each.
    auto bring = [&](int token) {
        const int tid = thread(), lane = tid % 32, head = tid % 128 / 32 * 16, chunk = tid / 128 * 32 + lane;
        const long long at = ((long long)token * num_heads + head) * DIM + chunk * 8;
        const Vec zero = {0, 0, 0, 0};
        auto load = [&](Vec(&rows)[16], const u16* from) {
#pragma unroll
            for (int r = 0; r < 16; ++r)
                rows[r] = head + r < num_heads ? *reinterpret_cast<const Vec*>(from + at + r * DIM) : zero;
        };
        auto store = [&](const Vec(&rows)[16], unsigned char* tile) {
#pragma unroll
            for (int r = 0; r < 16; ++r) *reinterpret_cast<Vec*>(tile + swizzled(head + r, chunk)) = pack_lanes(rows[r]);
        };
        Vec a[16], b[16];
        float dots[16];
        load(a, q);
        load(b, grad_out);
        const int mine = head + lane / 2;
        const float head_lse = mine < num_heads ? lse[(long long)token * num_heads + mine] * LOG2E : INFINITE;
        store(a, q_tile);
        load(a, out);
        store(b, g_tile);
#pragma unroll
        for (int r = 0; r < 16; ++r)
            dots[r] = dot2(a[r].x, b[r].x) + dot2(a[r].y, b[r].y) + dot2(a[r].z, b[r].z) + dot2(a[r].w, b[r].w);
        const float dot = sum_rows<8>(dots, lane);
        if (lane % 2 == 0) {
            if (tid < 128) row_stats[mine] = head_lse;
            row_stats[(1 + tid / 128) * ROWS + mine] = dot;
        }
        fence_async();
    };
    // Adds `grad` to memory. Lanes of rows 2n and 2n + 1 trade halves, so that 8 lanes add one row's 32 channels: a whole
    // 128-byte line per request. Half lines halve the rate of the L2's reductions.
    auto add_sums = [&](const int* row_ids, int chunk) {
        const int tid = thread(), lane = tid % 32, quad = lane % 4, row = tid % 128 / 32 * 16 + lane / 4;
        const int odd = lane / 4 % 2;
        float* to = sums + group * 256 + chunk * 128 + odd * 16 + quad * 4;
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
    // Stores `grad` in the partial rows from first_row on. Lanes trade words until 8 lanes hold a whole 128-byte line.
    auto store_rows = [&](const int* row_ids, int first_row, int chunk) {
        const int tid = thread(), lane = tid % 32, quad = lane % 4, row = tid % 128 / 32 * 16 + lane / 4;
        const int odd = lane / 4 % 2;
        u16* to = partial + (long long)(first_row + row - odd) * DIM + group * 256 + chunk * 128 +
                  odd * 32 + quad % 2 * 16 + quad / 2 * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool even_used = row_ids[row - odd + 8 * i] >= 0, odd_used = row_ids[row - odd + 1 + 8 * i] >= 0;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {  // 64 channels each
                Vec words[2];
#pragma unroll
                for (int l = 0; l < 2; ++l) {  // 32 channels: a lane of a quad gets 8 neighbours
                    const float* x = grad + (j + l) * 16 + i * 2;
                    const u32 a = pack(x[0], x[1]), b = pack(x[4], x[5]), c = pack(x[8], x[9]), d = pack(x[12], x[13]);
                    const u32 first = __shfl_xor_sync(0xffffffffu, quad % 2 ? a : c, 1);
                    const u32 second = __shfl_xor_sync(0xffffffffu, quad % 2 ? b : d, 1);
                    words[l] = quad % 2 ? Vec{first, second, c, d} : Vec{a, b, first, second};
                }
                const Vec kept = odd ? words[1] : words[0], given = odd ? words[0] : words[1];
                const Vec got = {__shfl_xor_sync(0xffffffffu, given.x, 4), __shfl_xor_sync(0xffffffffu, given.y, 4),
                                 __shfl_xor_sync(0xffffffffu, given.z, 4), __shfl_xor_sync(0xffffffffu, given.w, 4)};
                u16* place = to + 8 * i * DIM + j * 32;
                if (even_used) *reinterpret_cast<Vec*>(place) = odd ? got : kept;
                if (odd_used) *reinterpret_cast<Vec*>(place + DIM) = odd ? kept : got;
            }
        }
    };
    auto store_dq = [&](int token) {
        const int tid = thread(), lane = tid % 32, quad = lane % 4, row = tid % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = row + 8 * i;
            if (r < num_heads) {
                u16* to = grad_q + ((long long)token * num_heads + r) * DIM + group * 256 + quad * 4;
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float* from = dq + j * 8 + i * 2;
                    store4(to + j * 16, from[0], from[1], from[4], from[5]);
                }
            }
        }
    };
    int* coming = reinterpret_cast<int*>(row_stats + 3 * ROWS);  // blocks of the next token, and the token after it
    int token = num_tokens - 1 - blockIdx.x, blocks = __shfl_sync(0xffffffffu, blocks_of[token], 0);
    int turn = 0;                     // blocks so far
    int first_row = 0, last_row = 0;  // partial rows of this block and of the one before
    auto put = [&](const int* row_ids, int from_row, int chunk) {
        if (ORDERED) store_rows(row_ids, from_row, chunk);
        else add_sums(row_ids, chunk);
    };
    auto add_product = [&](u64 weights, u64 heads_at, int chunk, int add) {  // 128 channels of this half
#pragma unroll
        for (int k = 0; k < HEAD_STEPS; ++k)
            mma128<1, 1>(grad, weights + rows(k), heads_at + column_blocks(2 * chunk) + rows(k), add || k > 0);
    };

    auto draw = [&] { return num_tokens - 1 - (int)gridDim.x - atomicAdd(tickets, 1); };  // the next token, < 0: none

    if (tid < ROWS) tile_ids[tid] = slots.row(token, tid, slots.load(token, tid));
    if (tid == ROWS) coming[1] = draw();
    __syncthreads();
    int next = __shfl_sync(0xffffffffu, coming[1], 0);
    gather(k_at, table, tile_ids, tid);
    copy_commit();
    bring(token);
    for (;;) {
        if (threadIdx.x == 0 && next >= 0) {
            const long long at = (long long)next * num_heads * DIM;
            prefetch_l2(q + at, num_heads * DIM * 2);
            prefetch_l2(grad_out + at, num_heads * DIM * 2);
            prefetch_l2(out + at, num_heads * DIM * 2);
        }
#pragma unroll
        for (int i = 0; i < 128; ++i) dq[i] = 0.0f;
        for (int block = 0; block < blocks; ++block, ++turn) {
            const int* ids = tile_ids + turn % 4 * ROWS;
            const int* last_ids = tile_ids + (turn + 3) % 4 * ROWS;
            int* next_ids = tile_ids + (turn + 1) % 4 * ROWS;
            const bool last = block + 1 == blocks, more = !last || next >= 0;
            if (ORDERED) {
                last_row = first_row;
                first_row = token * (window + num_topk) + block * ROWS;
            }
            copy_wait<0>();
            __syncthreads();
            float s[32];
            if (group == 1) {
                const int tid = thread(), their = last ? next : token, slot = (last ? 0 : (block + 1) * ROWS) + tid - 128;
                int loaded = 0;
                if (more && tid < 128 + ROWS) loaded = slots.load(their, slot);
                else if (more && last && tid == 128 + ROWS) loaded = blocks_of[next];
                else if (more && last && tid == 128 + ROWS + 1) loaded = draw();
                if (turn > 0) put(last_ids, last_row, 1);  // while warpgroup 0 forms S
                if (more && tid < 128 + ROWS) next_ids[tid - 128] = slots.row(their, slot, loaded);
                else if (more && last && tid < 128 + ROWS + 2) coming[tid - 128 - ROWS] = loaded;
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
                const int tid = thread(), lane = tid % 32, quad = lane % 4, row = tid % 128 / 32 * 16 + lane / 4;
                const float lse0 = row_stats[row], lse1 = row_stats[row + 8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int2 id = *reinterpret_cast<const int2*>(ids + j * 8 + quad * 2);
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
                if (turn > 0) put(last_ids, last_row, 1);  // while warpgroup 1 forms dP and dS
            } else {
                meet<6, THREADS>();
            }
            mma_fence();
            add_product(p_columns, g_half, 0, 0);  // runs while warpgroup 1 forms dS
            mma_commit();
            if (group == 1) {
                const int tid = thread(), lane = tid % 32, quad = lane % 4, row = tid % 128 / 32 * 16 + lane / 4;
                const float delta0 = row_stats[ROWS + row] + row_stats[2 * ROWS + row];
                const float delta1 = row_stats[ROWS + row + 8] + row_stats[2 * ROWS + row + 8];
                if (block == 0 && quad == 0) {
                    if (row < num_heads) delta[(long long)token * num_heads + row] = delta0;
                    if (row + 8 < num_heads) delta[(long long)token * num_heads + row + 8] = delta1;
                }
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
            if (group == 1 && more) gather(k_at, table, next_ids, thread());
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                if (last && chunk != group) store_dq(token);
                // The warpgroups take turns: one's products run while the other adds its sums to memory.
                if (group == 1) meet<1, THREADS>();
                else if (chunk == 1) meet<2, THREADS>();
                mma_fence();
                if (chunk == 1) add_product(p_columns, g_half, 1, 0);
                add_product(ds_columns, q_half, chunk, 1);
                mma_commit();
                if (chunk == 0) {
                    if (group == 0 && more) gather(k_at, table, next_ids, thread());
                    copy_commit();
                }
                mma_wait<0>();
                if (group == 0) announce<1, THREADS>();
                else if (chunk == 0) announce<2, THREADS>();
                if (chunk == 0) put(ids, first_row, 0);  // the other half is added while the next block's scores are formed
            }
        }
        if (next < 0) break;
        token = next;
        blocks = __shfl_sync(0xffffffffu, coming[0], 0);
        next = __shfl_sync(0xffffffffu, coming[1], 0);
        if (group == 0) meet<5, 128>();  // this warpgroup is done with its half of q and grad_out
        else meet<3, 128>();
        bring(token);
    }
    put(tile_ids + (turn + 3) % 4 * ROWS, first_row, 1);
}
