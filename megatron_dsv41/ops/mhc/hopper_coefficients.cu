// The mHC site's coefficients on Hopper: from sums over the channels, and back to what multiplies fn's rows; and the sums of
// all partial gradients.
#include "hopper.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

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

// The partial gradients of all kernels, summed. CTAs from 0: gradients of base and scale, if `project`, as those take
// longest; of the coefficients; of fn, if there are several partials of it.
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
