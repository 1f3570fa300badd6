// What the kernels of joint sparse attention on Hopper (SM90a) share. hopper_attend.py compiles and launches them;
// ref.sparse_attend defines the result.
//
// A token's heads are the 64 rows of every product, its slots come in blocks of 64. Rows of both latents stand in one
// table, packed by `prepare`: channel 4c + 2j + e of each 16 lies at 8j + 2c + e. A thread's accumulators of two
// neighbouring 8-column tiles are then 4 neighbouring channels: one 16-byte access. Sums over channels do not see the
// order as long as q and grad_out are packed the same way.
//
// Tiles of 64 rows x 512 channels lie in shared memory as 8 column blocks of 64 rows x 128 bytes, 128-byte swizzled.

#include "hopper_instructions.cuh"

constexpr int DIM = 512, ROWS = 64;
constexpr int COLUMN_BLOCK = ROWS * 128;    // bytes of 64 rows x 64 channels
constexpr int TILE = ROWS * DIM * 2;        // bytes of 64 rows x 512 channels
constexpr float LOG2E = 1.4426950408889634f;
#define INFINITE __int_as_float(0x7f800000)

struct alignas(16) Vec { u32 x, y, z, w; };

// The thread's index, read anew: what follows from it is computed again instead of kept in registers.
__device__ __forceinline__ int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
    return index;
}

__device__ __forceinline__ u32 swizzled(int row, int chunk) {  // byte of 16-byte chunk 0..63 of a row of a tile
    return (chunk >> 3) * COLUMN_BLOCK + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
// Steps of a descriptor's start: 16 channels of every row further, 16 rows further, 64 channels further.
__device__ __forceinline__ u64 channels(int k) { return (k / 4 * COLUMN_BLOCK + k % 4 * 32) >> 4; }
__device__ __forceinline__ u64 rows(int k) { return (k * 16 * 128) >> 4; }
__device__ __forceinline__ u64 column_blocks(int k) { return (k * COLUMN_BLOCK) >> 4; }
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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
__device__ __forceinline__ float low_half(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ void store4(u16* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(a, b), pack(c, d));
}
__device__ __forceinline__ float dot2(u32 a, u32 b) {
    return low_half(a) * low_half(b) + high_half(a) * high_half(b);
}

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

// The slots of a call: `window` rows up to the token's own, oldest first, then `num_topk` chosen rows.
struct Slots {
    const int* topk;
    const long long* start;
    int window, num_topk, offset, num_window;

    // What says which row stands behind a slot: the first row of the window, or the chosen one.
    __device__ __forceinline__ int load(int token, int slot) const {
        if (slot < window) return (int)start[token];
        return slot < window + num_topk ? topk[(long long)token * num_topk + slot - window] : -1;
    }
    // Row of the table, -1 = none, from what `load` returned.
    __device__ __forceinline__ int row(int token, int slot, int loaded) const {
        const int near = token + offset - (window - 1) + slot;
        if (slot < window) return near >= loaded ? near : -1;
        return loaded >= 0 ? loaded + num_window : -1;
    }
};

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
