// Joint sparse attention on Hopper (SM90a): wgmma, one CTA per query token, its heads as the 64 rows of every product.
// hopper_attend.py compiles and launches it; ref.sparse_attend defines the result.
//
// Rows of both latents stand in one table, packed by `pack_rows`: channel 4c + 2j + e of each 16 lies at 8j + 2c + e.
// A thread's accumulators of two neighbouring 8-column tiles are then 4 neighbouring channels: one 16-byte access.
// Sums over channels do not see the order as long as q and grad_out are packed the same way.
//
// Tiles of 64 rows x 512 channels lie in shared memory as 8 column blocks of 64 rows x 128 bytes, 128-byte swizzled.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int DIM = 512, ROWS = 64, THREADS = 256, FORWARD_THREADS = 384;
constexpr int COLUMN_BLOCK = ROWS * 128;    // bytes of 64 rows x 64 channels
constexpr int TILE = ROWS * DIM * 2;        // bytes of 64 rows x 512 channels
constexpr int MAX_SLOTS = 1024;
constexpr int KEPT = 28;                    // steps of 16 channels of q that the forward keeps in registers
constexpr float LOG2E = 1.4426950408889634f;
#define INFINITE __int_as_float(0x7f800000)

struct alignas(16) Vec { u32 x, y, z, w; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 swizzled(int row, int chunk) {  // byte of 16-byte chunk 0..63 of a row of a tile
    return (chunk >> 3) * COLUMN_BLOCK + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
// Matrix descriptor of a swizzled tile; groups of 8 rows are 1024 bytes apart. `lead` is the distance of 64-wide blocks
// of an operand that is not transposed in memory order (its rows are the summed dimension).
__device__ __forceinline__ u64 descriptor(u32 address, u32 lead) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
// Steps of a descriptor's start: 16 channels of every row further, 16 rows further, 64 channels further.
__device__ __forceinline__ u64 channels(int k) { return (k / 4 * COLUMN_BLOCK + k % 4 * 32) >> 4; }
__device__ __forceinline__ u64 rows(int k) { return (k * 16 * 128) >> 4; }
__device__ __forceinline__ u64 column_blocks(int k) { return (k * COLUMN_BLOCK) >> 4; }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
// Ordinary stores become visible to wgmma; cp.async needs no fence. It waits for this thread's reductions in flight, so
// it stands as far behind them as possible.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives when this thread's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}
template <int BARRIER, int COUNT> __device__ __forceinline__ void meet() {  // of COUNT threads
    asm volatile("bar.sync %0, %1;\n" ::"n"(BARRIER), "n"(COUNT) : "memory");
}
template <int BARRIER, int COUNT> __device__ __forceinline__ void announce() {  // arrive without waiting
    asm volatile("bar.arrive %0, %1;\n" ::"n"(BARRIER), "n"(COUNT) : "memory");
}
template <int COUNT> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
__device__ __forceinline__ void add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ float low_half(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ void store4(u16* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(a, b), pack(c, d));
}
__device__ __forceinline__ float dot2(u32 a, u32 b) {
    return low_half(a) * low_half(b) + high_half(a) * high_half(b);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void mma64(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
        "%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
        :
          D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void mma128(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
        "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,"
        "%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
        :
          D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28),
          D4(32), D4(36), D4(40), D4(44), D4(48), D4(52), D4(56), D4(60)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
// The same with A in registers: rows of one warpgroup, 16 channels.
template <int TRANSPOSE_B>
__device__ __forceinline__ void mma64_registers(float (&d)[32], const u32* a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        :
          D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSE_B));
}
template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void mma256(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
        "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,"
        "%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,"
        "%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,"
        "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
        :
          D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28),
          D4(32), D4(36), D4(40), D4(44), D4(48), D4(52), D4(56), D4(60),
          D4(64), D4(68), D4(72), D4(76), D4(80), D4(84), D4(88), D4(92),
          D4(96), D4(100), D4(104), D4(108), D4(112), D4(116), D4(120), D4(124)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}

// 16 channels from two 16-byte words into packed order.
__device__ __forceinline__ void pack16(Vec& a, Vec& b) {
    Vec even = {a.x, a.z, b.x, b.z}, odd = {a.y, a.w, b.y, b.w};
    a = even;
    b = odd;
}

// Table of latents: window rows, then compressed rows, packed. One thread per 16 channels. With `clear`, also zeroes the
// fp32 rows that the backward adds to.
extern "C" __global__ void pack_rows(const u16* window, const u16* keys, u16* table, float* sums, int num_window,
                                     int num_rows, int clear) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long row = at / (DIM / 16);
    if (row >= num_rows) return;
    const u16* from = row < num_window ? window + at * 16 : keys + (at - (long long)num_window * (DIM / 16)) * 16;
    Vec a = reinterpret_cast<const Vec*>(from)[0], b = reinterpret_cast<const Vec*>(from)[1];
    pack16(a, b);
    reinterpret_cast<Vec*>(table + at * 16)[0] = a;
    reinterpret_cast<Vec*>(table + at * 16)[1] = b;
    if (clear) {
#pragma unroll
        for (int i = 0; i < 4; ++i) reinterpret_cast<Vec*>(sums + at * 16)[i] = {0, 0, 0, 0};
    }
}

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

// 256 threads start copying the 64 table rows `ids` into a tile; unused slots become 0.
__device__ __forceinline__ void gather(u32 tile, const u16* table, const int* ids, int tid) {
    const int chunk = tid % 64, first = tid / 64 * 16;
    const u32 to = tile + chunk / 8 * COLUMN_BLOCK + first * 128;
    const u16* from = table + chunk * 8;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(ids + first + i);
        const int id[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = i + j;
            copy16(to + row * 128 + ((chunk % 8 ^ row % 8) << 4), from + (long long)max(id[j], 0) * DIM, id[j] >= 0 ? 16 : 0);
        }
    }
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

// Warpgroup 0 keeps q in registers (the last 64 channels in shared memory) and turns blocks of 64 slots into probabilities; warpgroups 1 and 2 gather the keys,
// three blocks ahead, and each sums half of the output's channels. The running maximum moves only by more than 2^8, so
// the sums are rarely rescaled.
extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 1)
attend_forward(const u16* q, const u16* table, const int* topk, const float* sink, const long long* start, u16* out,
               float* lse, int num_tokens, int num_heads, int window, int num_topk, int offset, int num_window,
               double scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *k_tiles = memory, *p_tiles = memory + 3 * TILE, *q_tail = p_tiles + 2 * COLUMN_BLOCK;
    float* shrinks = reinterpret_cast<float*>(q_tail + COLUMN_BLOCK);        // [2][64], by block parity
    int* shrunk = reinterpret_cast<int*>(shrinks + 2 * ROWS);               // [2][4 warps]
    float* inverses = reinterpret_cast<float*>(shrunk + 8);                 // [64]
    u64* keys_ready = reinterpret_cast<u64*>(inverses + ROWS);              // [3]
    u64 *p_ready = keys_ready + 3, *p_free = keys_ready + 5;                // [2], [2]
    int* scratch = reinterpret_cast<int*>(keys_ready + 7);
    int* ids = scratch + 14;
    const int tid = threadIdx.x, lane = tid % 32, quad = lane % 4;
    const int group = __shfl_sync(0xffffffffu, tid / 128, 0);  // uniform, so descriptors live in uniform registers
    const int warp = __shfl_sync(0xffffffffu, tid % 128 / 32, 0);
    const int row = warp * 16 + lane / 4;  // and row + 8
    const long long token = blockIdx.x;

    if (tid == 0) {
        for (int i = 0; i < 3; ++i) barrier_init(keys_ready + i, 256);
        for (int i = 0; i < 2; ++i) barrier_init(p_ready + i, 128);
        for (int i = 0; i < 2; ++i) barrier_init(p_free + i, 256);
    }
    const int blocks = list_slots<FORWARD_THREADS>(ids, scratch, topk + token * num_topk, token + offset - (window - 1),
                                                   start[token], window, num_topk, num_window);
    if (group == 0) {
        more_registers<184>();
        const float scale_log2 = (float)scale * LOG2E;
        u32 q_rows[KEPT * 4];
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint2 words = make_uint2(0, 0);
                if (row + 8 * i < num_heads)
                    words = *reinterpret_cast<const uint2*>(q + (token * num_heads + row + 8 * i) * DIM + k * 16 + quad * 4);
                if (k < KEPT) {
                    q_rows[k * 4 + i] = words.x;
                    q_rows[k * 4 + 2 + i] = words.y;
                } else {
                    unsigned char* to = q_tail + quad * 4;
                    *reinterpret_cast<u32*>(to + swizzled(row + 8 * i, (k - KEPT) * 2)) = words.x;
                    *reinterpret_cast<u32*>(to + swizzled(row + 8 * i, (k - KEPT) * 2 + 1)) = words.y;
                }
            }
        }
        fence_async();
        meet<3, 128>();
        const u64 tail = descriptor(shared_address(q_tail), 16);
        if (tid == 0 && token + 132 < num_tokens) prefetch_l2(q + (token + 132) * num_heads * DIM, num_heads * DIM * 2);
        // The sink is the first logit of the online softmax; it has no value. A sink of -inf is no logit at all.
        float top[2], sum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float logit = row + 8 * i < num_heads ? sink[row + 8 * i] * LOG2E : 0.0f;
            top[i] = fmaxf(logit, -1e30f);
            sum[i] = quad == 0 ? exp2_fast(logit - top[i]) : 0.0f;
        }
        for (int block = 0, buffer = 0, turn = 0; block < blocks; ++block) {
            const int parity = block % 2;
            const u64 keys = descriptor(shared_address(k_tiles) + buffer * TILE, 16);
            float s[32];
            barrier_wait(keys_ready + buffer, turn);
            mma_fence();
#pragma unroll
            for (int k = 0; k < KEPT; ++k) mma64_registers<0>(s, q_rows + k * 4, keys + channels(k), k > 0);
#pragma unroll
            for (int k = KEPT; k < DIM / 16; ++k) mma64<0, 0>(s, tail + channels(k - KEPT), keys + channels(k), 1);
            mma_commit();
            mma_wait<0>();
            float best[2] = {-INFINITE, -INFINITE}, shrink[2];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int2 id = *reinterpret_cast<const int2*>(ids + block * ROWS + j * 8 + quad * 2);
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
            if (block >= 2) barrier_wait(p_free + parity, (block / 2 - 1) % 2);
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
            fence_async();
            barrier_arrive(p_ready + parity);
            if (++buffer == 3) {
                buffer = 0;
                turn ^= 1;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            if (quad == 0) {
                inverses[row + 8 * i] = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
                if (row + 8 * i < num_heads)
                    lse[token * num_heads + row + 8 * i] = sum[i] > 0.0f ? (top[i] + log2f(sum[i])) / LOG2E : INFINITE;
            }
        }
        meet<1, FORWARD_THREADS>();
    } else {
        fewer_registers<160>();
        const int half = group - 1;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        for (int block = 0; block < min(blocks, 3); ++block) {
            gather(shared_address(k_tiles) + block * TILE, table, ids + block * ROWS, tid - 128);
            barrier_arrive_copies(keys_ready + block);
        }
        for (int block = 0, buffer = 0; block < blocks; ++block) {
            const int parity = block % 2;
            const u64 weights = descriptor(shared_address(p_tiles) + parity * COLUMN_BLOCK, 16);
            const u32 k_tile = shared_address(k_tiles) + buffer * TILE;
            const u64 keys = descriptor(k_tile + half * 4 * COLUMN_BLOCK, COLUMN_BLOCK);
            barrier_wait(p_ready + parity, block / 2 % 2);
            if (shrunk[parity * 4 + warp]) {
                const float shrink0 = shrinks[parity * ROWS + row], shrink1 = shrinks[parity * ROWS + row + 8];
#pragma unroll
                for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? shrink1 : shrink0;
            }
            mma_fence();
#pragma unroll
            for (int k = 0; k < ROWS / 16; ++k) mma256<0, 1>(o, weights + channels(k), keys + rows(k), 1);
            mma_commit();
            mma_wait<0>();
            barrier_arrive(p_free + parity);
            if (block + 3 < blocks) {
                meet<2, 256>();  // both warpgroups are done with this block's keys
                gather(k_tile, table, ids + (block + 3) * ROWS, tid - 128);
                barrier_arrive_copies(keys_ready + buffer);
            }
            if (++buffer == 3) buffer = 0;
        }
        meet<1, FORWARD_THREADS>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = row + 8 * i;
            const float inverse = inverses[r];
            if (r < num_heads) {
                u16* to = out + (token * num_heads + r) * DIM + half * 256 + quad * 4;
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float* from = o + j * 8 + i * 2;
                    store4(to + j * 16, from[0] * inverse, from[1] * inverse, from[4] * inverse, from[5] * inverse);
                }
            }
        }
    }
}

// grad_q, delta = sum(out * grad_out), and both latents' gradients, added to fp32 grad_table [window rows + entries, 512].
// Warpgroup 0 forms S and P, warpgroup 1 dP and dS; each owns half of the channels of grad_q and of the latents.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_backward(const u16* q, const u16* out, const u16* grad_out, const u16* table, const int* topk, const float* lse,
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
