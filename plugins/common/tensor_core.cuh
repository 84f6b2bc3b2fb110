//! Warp and warpgroup instructions of the kernels that use tensor cores: 16-bit matrix fragments, bf16 products with
//! fp32 sums, splits of fp32 into bf16 terms. Fragment names as in the PTX manual: lane = 4 g + q.
//!
//!   A (16 x 16)  a0 (g, 2q..)  a1 (g+8, 2q..)  a2 (g, 2q+8..)  a3 (g+8, 2q+8..)    two bf16 a register, low first
//!   B (16 x 8)   b0 (2q.., g)  b1 (2q+8.., g)                D (16 x 8)   d0 d1 (g, 2q..)  d2 d3 (g+8, 2q..)
//! A warpgroup's 64-row product has the same fragments, 16 rows a warp.
#pragma once

#include "async_copy.cuh"

namespace replayssm {

//! Whether this pass has warpgroup products (sm_90a).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define REPLAYSSM_WGMMA 1
#else
#define REPLAYSSM_WGMMA 0
#endif

//! The same value, of which the compiler does not know that: it keeps nothing that follows from it.
__device__ __forceinline__ int fresh(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

//! start + count stride bytes, in one instruction.
template <class T>
__device__ __forceinline__ const T* advance(const T* start, int count, int stride_bytes) {
    int64_t out;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(out) : "r"(count), "r"(stride_bytes), "l"(start));
    return reinterpret_cast<const T*>(out);
}

//! False, which the compiler does not know. It moves nothing across the branch that follows: where it would prepare the
//! operands of many products ahead, and spill the state for them, it prepares those of the next one.
__device__ __forceinline__ bool never(int heads_of_a_block, int place) { return heads_of_a_block > 1000 + place; }

//! Four 8 x 8 matrices of 16-bit elements; lane 8 m + r passes the address of row r (16 bytes) of matrix m.
__device__ __forceinline__ void ldmatrix(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(address)
        : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(address)
        : "memory");
}

//! The inverse of ldmatrix_trans.
__device__ __forceinline__ void stmatrix_trans(uint32_t address, const uint32_t (&in)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(in[0]),
        "r"(in[1]), "r"(in[2]), "r"(in[3])
        : "memory");
#else
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        uint32_t turned;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(in[m]));
        const uint32_t row = __shfl_sync(kFullMask, address, m * 8 + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(turned) : "memory");
    }
#endif
}

//! d += a b
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

//! d += a b, of the first eight columns of a and rows of b
__device__ __forceinline__ void mma_half(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
}

//! d = a b
__device__ __forceinline__ void mma_from_zero(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

//! 16 bytes to shared memory, or zeros; L2 fetches the whole 128-byte line.
__device__ __forceinline__ void copy16(uint32_t target, const void* source, bool exists) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
        : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

//! By all warps of a warpgroup: from here on each thread has kCount registers, a multiple of 8; more than before waits
//! until others of the block have given theirs.
template <int kCount>
__device__ __forceinline__ void take_registers() {
#if REPLAYSSM_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
#if REPLAYSSM_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

//! Until at most kPending of this thread's committed groups are still on their way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

//! Barrier of kCount threads of the block; 0 < id < 16.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

//! Barrier on which some report (arrive) and others, or the same later, wait.
class SplitBarrier {
public:
    //! By one thread; a __syncthreads must lie between this and any other use.
    static __device__ __forceinline__ void init(uint32_t barrier, int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
    }
    //! By a warp: one arrival, for what all its lanes have done.
    static __device__ __forceinline__ void arrive(uint32_t barrier) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) {
            asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
                : "memory");
        }
    }
    //! By a thread: one arrival, for what it has done.
    static __device__ __forceinline__ void arrive_alone(uint32_t barrier) {
        asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
            : "memory");
    }
    //! One arrival, as soon as all copies that this thread has begun are in shared memory.
    static __device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    }
    //! parity: number of earlier completions, modulo 2.
    static __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define REPLAYSSM_MBARRIER_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define REPLAYSSM_MBARRIER_WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
        uint32_t done = 0;
        while (!done) {
            asm volatile("{\n .reg .pred p;\n " REPLAYSSM_MBARRIER_WAIT " p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(barrier), "r"(parity)
                : "memory");
        }
#undef REPLAYSSM_MBARRIER_WAIT
    }
};

__device__ __forceinline__ float exp2_fast(float value) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}

__device__ __forceinline__ float reciprocal_fast(float value) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}

__device__ __forceinline__ float silu_fast(float value) {
    return __fdividef(value, 1.0f + exp2_fast(-1.4426950408889634f * value));
}

//! bf16 in the low half of a register, and in the high half.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

//! The kTerms bf16 terms whose sum is closest to fp32: out[0] the nearest, each further one what is still missing.
//! Three terms carry all 24 bits of a float, two carry 16.
template <int kTerms>
__device__ __forceinline__ void split(float low, float high, uint32_t (&out)[kTerms]) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
        out[term] = pack_bf16(low, high);
        low -= low_bf16(out[term]);
        high -= high_bf16(out[term]);
    }
}

//! Shared-memory matrix as a warpgroup product reads it: rows of 128 bytes, swizzled over as many, groups of eight rows
//! dense.
struct SharedMatrix {
    uint32_t low; // start / 16, and the distance of groups of columns, which none of ours has

    __device__ __forceinline__ explicit SharedMatrix(uint32_t address) : low(((address & 0x3ffffu) >> 4) | 64u << 16) {}
    //! The descriptor from `offset` bytes on: whole groups of rows, or steps of 32 bytes along a row.
    __device__ __forceinline__ uint64_t at(uint32_t offset) const {
        constexpr uint64_t kGroupOfRows = 128 * 8 / 16, kSwizzle128 = 1;
        return static_cast<uint64_t>(low + (offset >> 4)) | kGroupOfRows << 32 | kSwizzle128 << 62;
    }
};

#if REPLAYSSM_WGMMA
//! One warpgroup product on d[8][4]. The sums are outputs alone where it starts them: the compiler must not see them
//! read, or it keeps 32 registers for them everywhere.
#define REPLAYSSM_D(access, t) access(d[t][0]), access(d[t][1]), access(d[t][2]), access(d[t][3])
#define REPLAYSSM_SUMS(access)                                                                                         \
    REPLAYSSM_D(access, 0), REPLAYSSM_D(access, 1), REPLAYSSM_D(access, 2), REPLAYSSM_D(access, 3),                    \
        REPLAYSSM_D(access, 4), REPLAYSSM_D(access, 5), REPLAYSSM_D(access, 6), REPLAYSSM_D(access, 7)
#define REPLAYSSM_PRODUCT(scale, operands)                                                                             \
    "{\n .reg .pred p;\n setp.ne.b32 p, " scale ", 0;\n"                                                               \
    " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"                                                            \
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                          \
    " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " operands ";\n}"
#define REPLAYSSM_STARTS "=f"
#define REPLAYSSM_ADDS "+f"
#endif

//! d (64 x 64, d[tile] of this warp's rows) = or += a b, asynchronous. b: kTransposed ? [k][n] rows : [n][k] rows.
template <int kTransposed, int kAccumulate>
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
#if REPLAYSSM_WGMMA
    if constexpr (kAccumulate) {
        asm volatile(REPLAYSSM_PRODUCT("1", "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
            : REPLAYSSM_SUMS(REPLAYSSM_ADDS)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
    } else {
        asm volatile(REPLAYSSM_PRODUCT("0", "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
            : REPLAYSSM_SUMS(REPLAYSSM_STARTS)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
    }
#endif
}

//! The same with both operands in shared memory. a: kTransposedA ? [k][m] rows : [m][k] rows.
template <int kTransposedA, int kTransposedB, int kAccumulate>
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], uint64_t a, uint64_t b) {
#if REPLAYSSM_WGMMA
    if constexpr (kAccumulate) {
        asm volatile(REPLAYSSM_PRODUCT("1", "%32, %33, p, 1, 1, %34, %35")
            : REPLAYSSM_SUMS(REPLAYSSM_ADDS)
            : "l"(a), "l"(b), "n"(kTransposedA), "n"(kTransposedB));
    } else {
        asm volatile(REPLAYSSM_PRODUCT("0", "%32, %33, p, 1, 1, %34, %35")
            : REPLAYSSM_SUMS(REPLAYSSM_STARTS)
            : "l"(a), "l"(b), "n"(kTransposedA), "n"(kTransposedB));
    }
#endif
}

//! Registers written so far are visible to the products that follow.
__device__ __forceinline__ void warpgroup_fence() {
#if REPLAYSSM_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void warpgroup_commit() {
#if REPLAYSSM_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
#if REPLAYSSM_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

//! Ties sums to this place in the program: the compiler may not read them before a wait above, nor write them below a
//! product.
__device__ __forceinline__ void hold(float (&d)[8][4]) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
        asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])::"memory");
}

//! Shared-memory writes that this thread has made, or has waited for, become visible to its warpgroup's products.
__device__ __forceinline__ void publish_to_products() {
#if REPLAYSSM_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

} // namespace replayssm
