// Forward of joint sparse attention on Hopper: 384 threads per multiprocessor take one token after the other.
//
// Warpgroup 0 keeps q in registers (the last 64 channels in shared memory) and turns blocks of 64 slots into
// probabilities; warpgroups 1 and 2 gather the keys, three blocks ahead and across tokens, and each sums half of the
// output's channels. The running maximum moves only by more than 2^8, so the sums are rarely rescaled.
#include "hopper.cuh"

constexpr int THREADS = 384;
constexpr int KEPT = 28;  // steps of 16 channels of q in registers

// out [T, H, 512] and lse: the log of the denominator, fp32 [T, H]. `tickets` is 0 at the start.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_forward(const u16* q, const u16* table, const int* topk, const float* sink, const long long* start,
               const int* blocks_of, int* tickets, u16* out, float* lse, int num_tokens, int num_heads, int window, int num_topk,
               int offset, int num_window, double scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *k_tiles = memory, *p_tiles = memory + 3 * TILE, *q_tail = p_tiles + 2 * COLUMN_BLOCK;
    int* tile_ids = reinterpret_cast<int*>(q_tail + COLUMN_BLOCK);   // [3][64], by buffer
    float* shrinks = reinterpret_cast<float*>(tile_ids + 3 * ROWS);  // [2][64], by block parity
    float* inverses = shrinks + 2 * ROWS;                            // [2][64]
    int* shrunk = reinterpret_cast<int*>(inverses + 2 * ROWS);       // [2][4 warps]
    int* tile_info = shrunk + 8;  // [4], by block: 2 * token + (1 if it is the token's last block); -1 behind the last one
    int* further = tile_info + 4;                                    // [2]: the token after the one that is gathered
    u64* keys_ready = reinterpret_cast<u64*>(further + 2);           // [3]
    u64 *p_ready = keys_ready + 3, *p_free = keys_ready + 5;         // [2], [2]
    const int tid = threadIdx.x;
    const int group = __shfl_sync(0xffffffffu, tid / 128, 0);  // uniform, so descriptors live in uniform registers
    const int warp = __shfl_sync(0xffffffffu, tid % 128 / 32, 0);

    if (tid == 0) {
        for (int i = 0; i < 3; ++i) barrier_init(keys_ready + i, 256);
        for (int i = 0; i < 2; ++i) barrier_init(p_ready + i, 128);
        for (int i = 0; i < 2; ++i) barrier_init(p_free + i, 256);
    }
    __syncthreads();
    if (group == 0) {
        more_registers<184>();
        const float scale_log2 = (float)scale * LOG2E;
        const u64 tail = descriptor(shared_address(q_tail), 16);
        u32 q_rows[KEPT * 4];
        float top[2], sum[2];
        auto load_q = [&](int token) {
            const int lane = thread() % 32, quad = lane % 4, row = warp * 16 + lane / 4;  // and row + 8
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool real = row + 8 * i < num_heads;
                const u16* from = q + ((long long)token * num_heads + (real ? row + 8 * i : 0)) * DIM + quad * 4;
#pragma unroll
                for (int k = 0; k < KEPT; ++k) {
                    const uint2 words = real ? *reinterpret_cast<const uint2*>(from + k * 16) : make_uint2(0, 0);
                    q_rows[k * 4 + i] = words.x;
                    q_rows[k * 4 + 2 + i] = words.y;
                }
#pragma unroll
                for (int k = 0; k < DIM / 16 - KEPT; ++k) {
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        copy4(shared_address(q_tail) + swizzled(row + 8 * i, 2 * k + j) + quad * 4,
                              from + (KEPT + k) * 16 + 2 * j, real ? 4 : 0);
                }
            }
            copy_commit();
        };
        // The sink is the first logit of the online softmax; it has no value. A sink of -inf is no logit at all.
        auto start_softmax = [&] {
            const int lane = thread() % 32, quad = lane % 4, row = warp * 16 + lane / 4;  // and row + 8
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float logit = row + 8 * i < num_heads ? sink[row + 8 * i] * LOG2E : 0.0f;
                top[i] = fmaxf(logit, -1e30f);
                sum[i] = quad == 0 ? exp2_fast(logit - top[i]) : 0.0f;
            }
            copy_wait<0>();
            fence_async();
            meet<3, 128>();
        };
        barrier_wait(keys_ready, 0);
        int info = tile_info[0];
        load_q(info / 2);
        start_softmax();
        for (int turn = 0, buffer = 0, phase = 0;; ++turn) {
            const int parity = turn % 2;
            const u64 keys = descriptor(shared_address(k_tiles) + buffer * TILE, 16);
            float s[32];
            mma_fence();
#pragma unroll
            for (int k = 0; k < KEPT; ++k) mma64_registers<0>(s, q_rows + k * 4, keys + channels(k), k > 0);
#pragma unroll
            for (int k = KEPT; k < DIM / 16; ++k) mma64<0, 0>(s, tail + channels(k - KEPT), keys + channels(k), 1);
            mma_commit();
            mma_wait<0>();
            const int lane = thread() % 32, quad = lane % 4, row = warp * 16 + lane / 4;  // and row + 8
            const int token = info / 2, last = info % 2;
            float best[2] = {-INFINITE, -INFINITE}, shrink[2];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int2 id = *reinterpret_cast<const int2*>(tile_ids + buffer * ROWS + j * 8 + quad * 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    s[j * 4 + i * 2] = id.x >= 0 ? s[j * 4 + i * 2] * scale_log2 : -INFINITE;
                    s[j * 4 + i * 2 + 1] = id.y >= 0 ? s[j * 4 + i * 2 + 1] * scale_log2 : -INFINITE;
                    best[i] = fmaxf(best[i], fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                best[i] = fmaxf(best[i], __shfl_xor_sync(0xffffffffu, best[i], 1));
                best[i] = fmaxf(best[i], __shfl_xor_sync(0xffffffffu, best[i], 2));
                const float old = top[i];
                top[i] = best[i] > old + 8.0f ? best[i] : old;
                shrink[i] = exp2_fast(old - top[i]);
                sum[i] *= shrink[i];
            }
            if (turn >= 2) barrier_wait(p_free + parity, (turn / 2 - 1) % 2);
            unsigned char* p_tile = p_tiles + parity * COLUMN_BLOCK;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float a = exp2_fast(s[j * 4 + i * 2] - top[i]), b = exp2_fast(s[j * 4 + i * 2 + 1] - top[i]);
                    sum[i] += a + b;
                    *reinterpret_cast<u32*>(p_tile + swizzled(row + 8 * i, j) + quad * 4) = pack(a, b);
                }
            }
            if (quad == 0) {
                shrinks[parity * ROWS + row] = shrink[0];
                shrinks[parity * ROWS + row + 8] = shrink[1];
            }
            const int any = __any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f);
            if (lane == 0) shrunk[parity * 4 + warp] = any;
            if (last) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
                    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
                    if (quad == 0) {
                        inverses[parity * ROWS + row + 8 * i] = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
                        if (row + 8 * i < num_heads)
                            lse[(long long)token * num_heads + row + 8 * i] =
                                sum[i] > 0.0f ? (top[i] + log2f(sum[i])) / LOG2E : INFINITE;
                    }
                }
            }
            fence_async();
            barrier_arrive(p_ready + parity);
            if (++buffer == 3) {
                buffer = 0;
                phase ^= 1;
            }
            barrier_wait(keys_ready + buffer, phase);
            info = tile_info[(turn + 1) % 4];
            if (last) {
                if (info < 0) break;
                meet<3, 128>();  // all are done with the tail of q
                load_q(info / 2);
                start_softmax();
            }
        }
    } else {
        fewer_registers<160>();
        const Slots slots = {topk, start, window, num_topk, offset, num_window};
        const int half = group - 1;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        // The next block to gather (token -1: the end, -2: beyond it), what `slots.load` said about its slot, and the token
        // after its own: the last tokens come first, and whoever is free takes the next one.
        int next_token = num_tokens - 1 - (int)blockIdx.x, next_block = 0, next_blocks = blocks_of[next_token];
        int loaded = 0, ticket = 0, place = 0;
        auto look_up = [&] {
            const int worker = thread() - 128;
            if (worker < ROWS && next_token >= 0) loaded = slots.load(next_token, next_block * ROWS + worker);
        };
        auto draw = [&] {
            if (thread() == 128 + ROWS) ticket = max(num_tokens - 1 - (int)gridDim.x - atomicAdd(tickets, 1), -1);
        };
        auto announce_block = [&](int turn, int buffer) {
            const int worker = thread() - 128;
            if (worker < ROWS && next_token >= 0)
                tile_ids[buffer * ROWS + worker] = slots.row(next_token, next_block * ROWS + worker, loaded);
            if (worker == ROWS) {
                tile_info[turn % 4] = next_token < 0 ? -1 : 2 * next_token + (next_block + 1 == next_blocks);
                further[place] = ticket;
            }
        };
        auto fetch = [&](int buffer) {
            if (next_token >= 0)
                gather(shared_address(k_tiles) + buffer * TILE, table, tile_ids + buffer * ROWS, thread() - 128);
            barrier_arrive_copies(keys_ready + buffer);
            if (next_token < 0) {
                next_token = -2;
            } else if (++next_block == next_blocks) {
                next_block = 0;
                next_token = further[place];
                place ^= 1;
                if (next_token >= 0) {
                    next_blocks = blocks_of[next_token];
                    draw();
                    if (thread() == 128)
                        prefetch_l2(q + (long long)next_token * num_heads * DIM, num_heads * DIM * 2);
                }
            }
            look_up();
        };
        look_up();
        draw();
        for (int buffer = 0; buffer < 3; ++buffer) {
            if (next_token == -2) break;
            announce_block(buffer, buffer);
            meet<2, 256>();
            fetch(buffer);
        }
        int first = 1;  // whether the block is its token's first
        for (int turn = 0, buffer = 0;; ++turn) {
            const int parity = turn % 2, info = tile_info[turn % 4];
            if (info < 0) break;
            const u64 weights = descriptor(shared_address(p_tiles) + parity * COLUMN_BLOCK, 16);
            const u64 keys = descriptor(shared_address(k_tiles) + buffer * TILE + half * 4 * COLUMN_BLOCK, COLUMN_BLOCK);
            barrier_wait(p_ready + parity, turn / 2 % 2);
            const int row = warp * 16 + thread() % 32 / 4;  // and row + 8
            if (!first && shrunk[parity * 4 + warp]) {
                const float shrink0 = shrinks[parity * ROWS + row], shrink1 = shrinks[parity * ROWS + row + 8];
#pragma unroll
                for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? shrink1 : shrink0;
            }
            const float inverse0 = inverses[parity * ROWS + row], inverse1 = inverses[parity * ROWS + row + 8];
            mma_fence();
#pragma unroll
            for (int k = 0; k < ROWS / 16; ++k) mma256<0, 1>(o, weights + channels(k), keys + rows(k), !first || k > 0);
            mma_commit();
            if (next_token != -2) announce_block(turn + 3, buffer);
            mma_wait<0>();
            barrier_arrive(p_free + parity);
            if (next_token != -2) {
                meet<2, 256>();  // both warpgroups are done with this block's keys
                fetch(buffer);
            }
            if (++buffer == 3) buffer = 0;
            first = info % 2;
            if (first) {
                const int lane = thread() % 32, quad = lane % 4, row = warp * 16 + lane / 4;  // and row + 8
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int r = row + 8 * i;
                    if (r < num_heads) {
                        const float inverse = i == 0 ? inverse0 : inverse1;
                        u16* to = out + ((long long)(info / 2) * num_heads + r) * DIM + half * 256 + quad * 4;
#pragma unroll
                        for (int j = 0; j < 16; ++j) {
                            const float* from = o + j * 8 + i * 2;
                            store4(to + j * 16, from[0] * inverse, from[1] * inverse, from[4] * inverse, from[5] * inverse);
                        }
                    }
                }
            }
        }
    }
}
