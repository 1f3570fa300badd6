// Gradient of the mHC site's fn on Hopper.
#include "hopper.cuh"

constexpr int GROUP = 4;  // tiles whose weights are brought in at once

// Partial gradients of fn [shares, 24, columns]: weight^T times new streams [T, columns]. A warp has 64 columns, lane
// 4g + q the columns 8g..8g+7 of tokens 2q, 2q + 1, 2q + 8, 2q + 9 of a tile. Grid: 512 columns x (shares, and one more if
// they leave tokens).
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
    const int first = rest ? limit : share, stride = rest ? 1 : shares;
    const int tiles = rest ? all_tiles : min(all_tiles, limit * GROUP);
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
