// The single-pass mHC site on Hopper: hopper_site.py compiles and launches it; ref.site defines the result.
//
// A CTA owns a chunk of the channels, keeps its slice of `fn` in shared memory and walks over the tokens. Its warps work
// alone: a warp takes 16 tokens x 32 channels of all streams at a time. Lane 4g + q has rows g and g + 8 and channels
// 8q..8q+7, which is the layout of an operand of mma.sync as long as `fn` is permuted alike. Every thread copies into
// shared memory what it reads itself, so the copies run ahead without any barrier.
//
// What is summed over channels (24 projections, the sum of squares, 24 gradients of coefficients) leaves as one partial
// per chunk, and is summed in a fixed order by a small kernel: results are the same on every run.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 16, BLOCK = 32;       // tokens and channels of a warp's step
constexpr int TERMS = 3;                   // bf16 terms of fn in the forward: products with bf16 are exact to fp32
constexpr int WIDTH = 32, SQUARES = 24;    // a row of sums: 24 projections, the sum of squares, padding
constexpr int FORWARD_STAGES = 3, BACKWARD_STAGES = 2, FN_STAGES = 4;
constexpr int FORWARD_ARRAYS = 5, BACKWARD_ARRAYS = 10;
constexpr u32 FULL = 0xffffffffu;

struct alignas(16) Vec { u32 w[4]; };

// -- instructions
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // zeros where bytes is 0
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ u32 to_tf32(float x) {
    u32 word;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(word) : "f"(x));
    return word;
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// -- end of instructions

__device__ __forceinline__ float half_of(u32 word, int e) {  // of a pair of bf16
    return __uint_as_float(e ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Coefficients of one token. comb[4i + j]: source i, destination j.
struct Coefficients {
    float post[4], comb[16], pre[4];

    template <bool UPDATE>
    __device__ __forceinline__ void load(const float* post_at, const float* comb_at, const float* pre_at, int token) {
        if (UPDATE) {
            four(post, post_at, token);
#pragma unroll
            for (int i = 0; i < 4; ++i) four(comb + 4 * i, comb_at, token * 4ll + i);
        }
        four(pre, pre_at, token);
    }
    __device__ __forceinline__ static void four(float* to, const float* from, long long at) {
        const float4 x = __ldg(reinterpret_cast<const float4*>(from) + at);
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

// Where a warp is: a tile of 16 tokens, a block of 32 channels of the CTA's chunk.
struct Step {
    int tile, block, slot;

    template <int STAGES> __device__ __forceinline__ void next(int blocks, int tile_stride) {
        if (++block == blocks) {
            block = 0;
            tile += tile_stride;
        }
        if (++slot == STAGES) slot = 0;
    }
};

// Streams in; new streams, site input and partial sums [T, chunks, WIDTH] out. UPDATE: the streams change.
// Grid: chunks of 32 * chunk_blocks channels x token shares.
template <bool UPDATE>
__global__ void __launch_bounds__(THREADS, 1)
site_forward(const u16* y, const u16* x, const float* post, const float* comb, const float* pre, const float* fn,
             u16* out, u16* site_input, float* partial, int num_tokens, int dim, int chunk_blocks, int chunks) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = FORWARD_ARRAYS * 2 * 512;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    const int chunk = blockIdx.x % chunks, share = blockIdx.x / chunks, stride = gridDim.x / chunks * WARPS;
    const int first = chunk * chunk_blocks * BLOCK, blocks = min(chunk_blocks, dim / BLOCK - chunk * chunk_blocks);
    const int tiles = (num_tokens + ROWS - 1) / ROWS;
    unsigned char* ring = memory + warp * FORWARD_STAGES * SLOT + lane * 16;
    Vec* fn_parts = reinterpret_cast<Vec*>(memory + WARPS * FORWARD_STAGES * SLOT);  // [block][stream][8 rows][term][lane]

    auto fetch = [&](const Step& step) {
        if (step.tile < tiles) {
            const u32 to = shared_address(ring + step.slot * SLOT);
            const int column = first + step.block * BLOCK + q * 8;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = step.tile * ROWS + g + 8 * r, bytes = token < num_tokens ? 16 : 0;
                const long long row = min(token, num_tokens - 1);
                const u16* from = x + row * 4 * dim + column;
#pragma unroll
                for (int j = 0; j < 4; ++j) copy16(to + (r * FORWARD_ARRAYS + j) * 512, from + j * dim, bytes);
                if (UPDATE) copy16(to + (r * FORWARD_ARRAYS + 4) * 512, y + row * dim + column, bytes);
            }
        }
        copy_commit();
    };
    Step step = {share * WARPS + warp, 0, 0}, ahead = step;
#pragma unroll
    for (int i = 0; i < FORWARD_STAGES; ++i) {
        fetch(ahead);
        ahead.next<FORWARD_STAGES>(blocks, stride);
    }
    // eight channels of a row of fn, as TERMS bf16 whose sum they are
    for (int at = tid; at < blocks * 4 * 3 * 32; at += THREADS) {
        const int part = at / 32, j = part / 3 % 4, row = part % 3 * 8 + at % 32 / 4;
        const float* from = fn + ((long long)row * 4 + j) * dim + first + part / 12 * BLOCK + at % 4 * 8;
        float rest[8];
        Coefficients::four(rest, from, 0);
        Coefficients::four(rest + 4, from, 1);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
            Vec v;
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                v.w[p] = pack(rest[2 * p], rest[2 * p + 1]);
                rest[2 * p] -= half_of(v.w[p], 0);
                rest[2 * p + 1] -= half_of(v.w[p], 1);
            }
            fn_parts[(part * TERMS + term) * 32 + at % 32] = v;
        }
    }
    __syncthreads();

    Coefficients mix[2];
    float sums[3][4], squares[2];
    for (; step.tile < tiles; step.next<FORWARD_STAGES>(blocks, stride)) {
        const int token = step.tile * ROWS + g;  // and token + 8
        if (step.block == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                mix[r].load<UPDATE>(post, comb, pre, min(token + 8 * r, num_tokens - 1));
                squares[r] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 12; ++i) sums[i / 4][i % 4] = 0.0f;
        }
        copy_wait<FORWARD_STAGES - 1>();
        const int column = first + step.block * BLOCK + q * 8;
        Vec news[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Vec* from = reinterpret_cast<const Vec*>(ring + step.slot * SLOT + r * FORWARD_ARRAYS * 512);
            Vec input, last;
#pragma unroll
            for (int j = 0; j < 4; ++j) news[r][j] = from[j * 32];
            if (UPDATE) last = from[4 * 32];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                if (UPDATE) {
                    float pair[2][4];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float old[4] = {half_of(news[r][0].w[p], e), half_of(news[r][1].w[p], e),
                                              half_of(news[r][2].w[p], e), half_of(news[r][3].w[p], e)};
                        mix[r].update(pair[e], half_of(last.w[p], e), old);
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) news[r][j].w[p] = pack(pair[0][j], pair[1][j]);
                }
                float pair[2] = {0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float rounded = half_of(news[r][j].w[p], e);
                        squares[r] += rounded * rounded;
                        pair[e] += mix[r].pre[j] * rounded;
                    }
                }
                input.w[p] = pack(pair[0], pair[1]);
            }
            if (token + 8 * r < num_tokens) {
                const long long row = token + 8 * r;
                if (UPDATE) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        *reinterpret_cast<Vec*>(out + (row * 4 + j) * dim + column) = news[r][j];
                }
                *reinterpret_cast<Vec*>(site_input + row * dim + column) = input;
            }
        }
        fetch(ahead);
        ahead.next<FORWARD_STAGES>(blocks, stride);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int n = 0; n < 3; ++n) {
#pragma unroll
                for (int term = TERMS - 1; term >= 0; --term) {
                    const Vec b = fn_parts[(((step.block * 4 + j) * 3 + n) * TERMS + term) * 32 + lane];
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        const u32 a[4] = {news[0][j].w[2 * k], news[1][j].w[2 * k], news[0][j].w[2 * k + 1],
                                          news[1][j].w[2 * k + 1]};
                        mma_bf16(sums[n], a, b.w[2 * k], b.w[2 * k + 1]);
                    }
                }
            }
        }
        if (step.block == blocks - 1) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float all = squares[r] + __shfl_xor_sync(FULL, squares[r], 1);
                all += __shfl_xor_sync(FULL, all, 2);
                if (token + 8 * r < num_tokens) {
                    float* to = partial + ((long long)(token + 8 * r) * chunks + chunk) * WIDTH + 2 * q;
#pragma unroll
                    for (int n = 0; n < 3; ++n)
                        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(sums[n][2 * r], sums[n][2 * r + 1]);
                    *reinterpret_cast<float2*>(to + SQUARES) = make_float2(q == 0 ? all : 0.0f, 0.0f);
                }
            }
        }
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

// Partials of a token -> sums [T, WIDTH]; then RMS, scale, base, sigmoids and Sinkhorn. A warp takes two tokens; each of
// its halves one of them, a lane per cell of the mixing matrix.
template <int COUNT>
__global__ void __launch_bounds__(COUNT * 32)
predict_forward(const float* partial, const float* base, const float* scale, float* sums, float* pre, float* post,
                float* comb, int num_tokens, int chunks, int channels, int iters, double eps64, double rms_eps) {
    const int lane = threadIdx.x % 32, cell = lane % 16, pair = (blockIdx.x * COUNT + threadIdx.x / 32) * 2;
    if (pair >= num_tokens) return;
    const float eps = (float)eps64;
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const long long token = min(pair + h, num_tokens - 1);
        const float* from = partial + token * chunks * WIDTH + lane;
        total[h] = 0.0f;
#pragma unroll 16
        for (int chunk = 0; chunk < chunks; ++chunk) total[h] += from[chunk * WIDTH];
        sums[token * WIDTH + lane] = total[h];
    }
    const int token = pair + lane / 16;
    auto of_token = [&](int column) {
        const float a = __shfl_sync(FULL, total[0], column), b = __shfl_sync(FULL, total[1], column);
        return lane < 16 ? a : b;
    };
    const float rms = 1.0f / sqrtf(of_token(SQUARES) / channels + (float)rms_eps);
    const float gate = of_token(cell % 8) * rms, logit = of_token(8 + cell) * rms * scale[2] + base[8 + cell];
    float mix = row_softmax(logit) + eps;
    mix = mix / (column_sum(mix) + eps);
    for (int i = 1; i < iters; ++i) {
        mix = mix / (row_sum(mix) + eps);
        mix = mix / (column_sum(mix) + eps);
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
        mix = mix / sum;
        divisors[0] = sum;
        for (int i = 1; i < iters; ++i) {
            sum = row_sum(mix) + eps;
            mix = mix / sum;
            divisors[(2 * i - 1) * NEXT] = sum;
            sum = column_sum(mix) + eps;
            mix = mix / sum;
            divisors[2 * i * NEXT] = sum;
        }
        if (live) grad = grad_comb[row * 16 + cell];
        for (int i = iters - 1; i > 0; --i) {  // undoes the steps one by one
            sum = divisors[2 * i * NEXT];
            grad = (grad - column_sum(grad * mix)) / sum;
            mix *= sum;
            sum = divisors[(2 * i - 1) * NEXT];
            grad = (grad - row_sum(grad * mix)) / sum;
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
template <bool UPDATE>
__global__ void __launch_bounds__(THREADS, 1)
site_backward(const u16* y, const u16* x, const u16* grad_new, const u16* grad_input, const float* post, const float* comb,
              const float* pre, const float* weight, const float* fn, u16* grad_y, u16* grad_x, float* partial,
              int num_tokens, int dim, int chunk_blocks, int chunks, int has_new, int has_input) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = BACKWARD_ARRAYS * 2 * 512, NEW = 4, INPUT = 8, LAST = 9;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    const int chunk = blockIdx.x % chunks, share = blockIdx.x / chunks, stride = gridDim.x / chunks * WARPS;
    const int first = chunk * chunk_blocks * BLOCK, blocks = min(chunk_blocks, dim / BLOCK - chunk * chunk_blocks);
    const int tiles = (num_tokens + ROWS - 1) / ROWS;
    unsigned char* ring = memory + warp * BACKWARD_STAGES * SLOT + lane * 16;
    Vec* fn_parts = reinterpret_cast<Vec*>(memory + WARPS * BACKWARD_STAGES * SLOT);  // [block][stream][6][lane]

    auto fetch = [&](const Step& step) {
        if (step.tile < tiles) {
            const u32 to = shared_address(ring + step.slot * SLOT);
            const int column = first + step.block * BLOCK + q * 8;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = step.tile * ROWS + g + 8 * r, bytes = token < num_tokens ? 16 : 0;
                const long long row = min(token, num_tokens - 1), at = row * 4 * dim + column;
                const u32 here = to + r * BACKWARD_ARRAYS * 512;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    copy16(here + j * 512, x + at + j * dim, bytes);
                    copy16(here + (NEW + j) * 512, grad_new + at + j * dim, has_new ? bytes : 0);
                }
                copy16(here + INPUT * 512, grad_input + row * dim + column, has_input ? bytes : 0);
                if (UPDATE) copy16(here + LAST * 512, y + row * dim + column, bytes);
            }
        }
        copy_commit();
    };
    Step step = {share * WARPS + warp, 0, 0}, ahead = step;
#pragma unroll
    for (int i = 0; i < BACKWARD_STAGES; ++i) {
        fetch(ahead);
        ahead.next<BACKWARD_STAGES>(blocks, stride);
    }
    // column n of product p is channel 8 (n / 2) + 2p + n % 2 of the block
    for (int at = tid; at < blocks * 4 * 6 * 32; at += THREADS) {
        const int part = at / 32, j = part / 6 % 4, n = at % 32 / 4;
        const float* from = fn + (long long)j * dim + first + part / 24 * BLOCK + n / 2 * 8 + n % 2;
        Vec v;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int word = part % 6 * 4 + e, p = word / 6, k = word % 6 / 2 * 8 + at % 4 + word % 2 * 4;
            v.w[e] = to_tf32(__ldg(from + (long long)k * 4 * dim + 2 * p));
        }
        fn_parts[at] = v;
    }
    __syncthreads();

    float dots[2][24];
    u32 weights[3][4];
    for (; step.tile < tiles; step.next<BACKWARD_STAGES>(blocks, stride)) {
        const int token = step.tile * ROWS + g;  // and token + 8
        if (step.block == 0) {
#pragma unroll
            for (int i = 0; i < 48; ++i) dots[i / 24][i % 24] = 0.0f;
#pragma unroll
            for (int i = 0; i < 12; ++i) {
                const long long row = min(token + i % 2 * 8, num_tokens - 1);
                weights[i / 4][i % 4] = to_tf32(__ldg(weight + row * WIDTH + i / 4 * 8 + q + i % 4 / 2 * 4));
            }
        }
        float through[4][4][4];  // [stream][pair of channels][row, channel]: sum_k weight_k fn_kj
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 b[24];
#pragma unroll
            for (int i = 0; i < 6; ++i) {
                const Vec v = fn_parts[((step.block * 4 + j) * 6 + i) * 32 + lane];
#pragma unroll
                for (int e = 0; e < 4; ++e) b[4 * i + e] = v.w[e];
            }
#pragma unroll
            for (int p = 0; p < 4; ++p) {
#pragma unroll
                for (int i = 0; i < 4; ++i) through[j][p][i] = 0.0f;
#pragma unroll
                for (int k = 0; k < 3; ++k) mma_tf32(through[j][p], weights[k], b[6 * p + 2 * k], b[6 * p + 2 * k + 1]);
            }
        }
        copy_wait<BACKWARD_STAGES - 1>();
        const int column = first + step.block * BLOCK + q * 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long row = min(token + 8 * r, num_tokens - 1);
            const Vec* from = reinterpret_cast<const Vec*>(ring + step.slot * SLOT + r * BACKWARD_ARRAYS * 512);
            Coefficients mix;
            mix.load<UPDATE>(post, comb, pre, (int)row);
            const float own = __ldg(weight + row * WIDTH + SQUARES);
            Vec of_x[4], of_y, old[4], grad[4], input, last;
#pragma unroll
            for (int j = 0; j < 4; ++j) old[j] = from[j * 32], grad[j] = from[(NEW + j) * 32];
            input = from[INPUT * 32];
            if (UPDATE) last = from[LAST * 32];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                float pair_x[2][4], pair_y[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float xs[4] = {half_of(old[0].w[p], e), half_of(old[1].w[p], e), half_of(old[2].w[p], e),
                                         half_of(old[3].w[p], e)};
                    const float ys = UPDATE ? half_of(last.w[p], e) : 0.0f;
                    const float in = half_of(input.w[p], e);
                    float news[4] = {xs[0], xs[1], xs[2], xs[3]}, G[4];
                    if (UPDATE) mix.update(news, ys, xs);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        G[j] = half_of(grad[j].w[p], e);
                        G[j] += through[j][p][2 * r + e];
                        G[j] += mix.pre[j] * in + own * news[j];
                        dots[r][j] += in * news[j];
                        if (UPDATE) {
                            dots[r][4 + j] += ys * G[j];
#pragma unroll
                            for (int i = 0; i < 4; ++i) dots[r][8 + 4 * i + j] += xs[i] * G[j];
                        } else {
                            pair_x[e][j] = G[j];
                        }
                    }
                    if (UPDATE) {
                        pair_y[e] = 0.0f;
#pragma unroll
                        for (int j = 0; j < 4; ++j) pair_y[e] += mix.post[j] * G[j];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            pair_x[e][i] = 0.0f;
#pragma unroll
                            for (int j = 0; j < 4; ++j) pair_x[e][i] += mix.comb[4 * i + j] * G[j];
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) of_x[j].w[p] = pack(pair_x[0][j], pair_x[1][j]);
                if (UPDATE) of_y.w[p] = pack(pair_y[0], pair_y[1]);
            }
            if (token + 8 * r < num_tokens) {
#pragma unroll
                for (int j = 0; j < 4; ++j) *reinterpret_cast<Vec*>(grad_x + (row * 4 + j) * dim + column) = of_x[j];
                if (UPDATE) *reinterpret_cast<Vec*>(grad_y + row * dim + column) = of_y;
            }
        }
        fetch(ahead);
        ahead.next<BACKWARD_STAGES>(blocks, stride);
        if (step.block == blocks - 1) {  // over the four lanes of a row: lane q keeps columns 6q..6q+5
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float twelve[12], six[6];
#pragma unroll
                for (int i = 0; i < 12; ++i) {
                    const float got = __shfl_xor_sync(FULL, q & 2 ? dots[r][i] : dots[r][12 + i], 2);
                    twelve[i] = (q & 2 ? dots[r][12 + i] : dots[r][i]) + got;
                }
#pragma unroll
                for (int i = 0; i < 6; ++i) {
                    const float got = __shfl_xor_sync(FULL, q & 1 ? twelve[i] : twelve[6 + i], 1);
                    six[i] = (q & 1 ? twelve[6 + i] : twelve[i]) + got;
                }
                if (token + 8 * r < num_tokens) {
                    float2* to = reinterpret_cast<float2*>(partial + ((long long)(token + 8 * r) * chunks + chunk) * 24 + 6 * q);
#pragma unroll
                    for (int i = 0; i < 3; ++i) to[i] = make_float2(six[2 * i], six[2 * i + 1]);
                }
            }
        }
    }
}

// Partial gradients of fn [shares, 24, columns]: weight^T times new streams [T, columns]. A warp has 64 columns, lane
// 4g + q the columns 8g..8g+7 of tokens 2q, 2q + 1, 2q + 8, 2q + 9. Grid: 512 columns x token shares.
template <int STAGES>
__global__ void __launch_bounds__(THREADS, 2)
fn_gradient(const u16* streams, const u16* operand, float* partial, int num_tokens, int columns, int chunks) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int SLOT = 4 * 512;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int share = blockIdx.x / chunks, shares = gridDim.x / chunks, tiles = (num_tokens + ROWS - 1) / ROWS;
    const int column = (blockIdx.x % chunks * WARPS + warp) * 64 + 8 * g;
    if (column >= columns) return;  // whole warps: columns is a multiple of 64
    unsigned char* ring = memory + warp * STAGES * SLOT + lane * 16;
    auto fetch = [&](int tile, int slot) {
        if (tile < tiles) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int token = tile * ROWS + 2 * q + r % 2 + r / 2 * 8;
                const u16* from = streams + (long long)min(token, num_tokens - 1) * columns + column;
                copy16(shared_address(ring + slot * SLOT + r * 512), from, token < num_tokens ? 16 : 0);
            }
        }
        copy_commit();
    };
    float sums[4][3][4];
#pragma unroll
    for (int i = 0; i < 48; ++i) sums[i / 12][i % 12 / 4][i % 4] = 0.0f;
    for (int i = 0; i < STAGES; ++i) fetch(share + i * shares, i);
    for (int tile = share, slot = 0; tile < tiles; tile += shares) {
        Vec b[3], x[4];
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(operand) + (tile * 3ll + n) * 32 + lane);
            b[n] = {v.x, v.y, v.z, v.w};
        }
        copy_wait<STAGES - 1>();
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = *reinterpret_cast<const Vec*>(ring + slot * SLOT + r * 512);
        fetch(tile + STAGES * shares, slot);
        if (++slot == STAGES) slot = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 a[4] = {__byte_perm(x[0].w[i], x[1].w[i], 0x5410), __byte_perm(x[0].w[i], x[1].w[i], 0x7632),
                              __byte_perm(x[2].w[i], x[3].w[i], 0x5410), __byte_perm(x[2].w[i], x[3].w[i], 0x7632)};
#pragma unroll
            for (int n = 0; n < 3; ++n) {
                mma_bf16(sums[i][n], a, b[n].w[2], b[n].w[3]);
                mma_bf16(sums[i][n], a, b[n].w[0], b[n].w[1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int n = i / 2, e = i % 2;
        float4* to = reinterpret_cast<float4*>(partial + (share * 24ll + 8 * n + 2 * q + e) * columns + column);
        to[0] = make_float4(sums[0][n][e], sums[0][n][2 + e], sums[1][n][e], sums[1][n][2 + e]);
        to[1] = make_float4(sums[2][n][e], sums[2][n][2 + e], sums[3][n][e], sums[3][n][2 + e]);
    }
}

// The partials of all the above, summed. CTAs from 0: gradients of the coefficients, where there are any; then of fn; the
// last one: of base and scale.
template <int COUNT>
__global__ void __launch_bounds__(COUNT)
sum_gradients(const float* of_mix, const float* of_fn, const float* param, float* grad_pre, float* grad_post,
              float* grad_comb, float* grad_fn, float* grad_base, float* grad_scale, int num_tokens, int chunks, int columns,
              int shares, int tiles, int mix_ctas, int fn_ctas) {
    __shared__ float parts[COUNT];
    int cta = blockIdx.x;
    if (cta < mix_ctas) {
        const long long at = (long long)cta * COUNT + threadIdx.x, token = at / 24;
        if (token >= num_tokens) return;
        const int k = at % 24;
        const float* from = of_mix + token * chunks * 24 + k;
        float sum = 0.0f;
#pragma unroll 16
        for (int chunk = 0; chunk < chunks; ++chunk) sum += from[chunk * 24];
        if (k < 4) grad_pre[token * 4 + k] = sum;
        else if (k < 8) grad_post[token * 4 + k - 4] = sum;
        else grad_comb[token * 16 + k - 8] = sum;
        return;
    }
    cta -= mix_ctas;
    if (cta < fn_ctas) {
        const long long at = (long long)cta * COUNT + threadIdx.x, size = columns * 6ll;  // in fours
        if (at >= size) return;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int share = 0; share < shares; ++share) {
            const float4 x = reinterpret_cast<const float4*>(of_fn)[share * size + at];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        reinterpret_cast<float4*>(grad_fn)[at] = sum;
        return;
    }
    const int k = threadIdx.x % 48;
    float sum = 0.0f;
#pragma unroll 8
    for (int tile = threadIdx.x / 48; tile < tiles; tile += COUNT / 48) sum += param[tile * 48ll + k];
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 48) {
        sum = 0.0f;
        for (int i = 0; i < COUNT / 48; ++i) sum += parts[i * 48 + k];
        if (k < 24) grad_base[k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 48) parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 3) {
        const int begin = 24 + (threadIdx.x == 2 ? 8 : 4 * threadIdx.x), count = threadIdx.x == 2 ? 16 : 4;
        sum = 0.0f;
        for (int i = 0; i < count; ++i) sum += parts[begin + i];
        grad_scale[threadIdx.x] = sum;
    }
}
