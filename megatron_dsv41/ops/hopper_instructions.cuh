// Types and instructions of Hopper (SM90a) that kernels of several ops use. Tiles in shared memory have rows of 128 bytes,
// swizzled by 128 bytes.
//
// On the host, testing/host_cuda/instructions.h takes the place of what the guard guards.
#ifndef HOPPER_INSTRUCTIONS
#define HOPPER_INSTRUCTIONS

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
// Ordinary stores become visible to wgmma; cp.async needs no fence. It waits for this thread's reductions in flight, so
// it stands as far behind them as possible.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Matrix descriptor of a tile for wgmma; groups of 8 rows are 1024 bytes apart. `lead` is the distance of 64-wide blocks
// of an operand that is not transposed in memory order (its rows are the summed dimension), and 16 for others.
__device__ __forceinline__ u64 descriptor(u32 address, u32 lead) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
// Four accumulators of a wgmma as operands of its asm.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

#endif
