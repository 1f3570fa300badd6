// Instructions of the mHC site's kernels beside those that kernels of several ops use.
//
// On the host, testing/host_cuda/instructions.h takes the place of what the guard guards.
#ifndef SITE_INSTRUCTIONS
#define SITE_INSTRUCTIONS
#include "hopper_instructions.cuh"

__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // zeros where bytes is 0
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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
// The next kernel of the stream, if launched early, may start once all CTAs have said this or ended.
__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }
// In a kernel launched early: until the kernel before it has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// d += a b^T of a warpgroup: 16 rows of `a` a warp, 144 of b, 16 channels. add 0: d = a b^T.
__device__ __forceinline__ void mma144(float (&d)[72], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %77, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71"
        "}, {%72,%73,%74,%75}, %76, p, 1, 1, 0;\n}\n"
        :
          D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28), D4(32),
          D4(36), D4(40), D4(44), D4(48), D4(52), D4(56), D4(60), D4(64), D4(68)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#endif
