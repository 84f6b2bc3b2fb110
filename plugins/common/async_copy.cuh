//! Asynchronous copies from global to shared memory: bulk copies that complete on an mbarrier from sm_90 on, 16-byte
//! cp.async before. Sizes, addresses and strides are multiples of 16 bytes.
#pragma once

#include "numeric.cuh"

namespace replayssm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define REPLAYSSM_BULK_COPY 1
#else
#define REPLAYSSM_BULK_COPY 0
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

//! One buffer that is filled again and again. Every fill is announced once, before or among its copies.
class CopyBarrier {
public:
    //! By one thread, which may go on to announce and copy; a __syncthreads must lie between this and any wait.
    static __device__ __forceinline__ void init(uint64_t* barrier) {
#if REPLAYSSM_BULK_COPY
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }

    //! By one thread: this fill has `bytes` bytes.
    static __device__ __forceinline__ void announce(uint64_t* barrier, uint32_t bytes) {
#if REPLAYSSM_BULK_COPY
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
            : "memory");
#endif
    }

    //! By every thread of the block, the same number of times as fills: returns when fill number `fill` is in shared
    //! memory.
    static __device__ __forceinline__ void wait(uint64_t* barrier, int fill) {
#if REPLAYSSM_BULK_COPY
        const uint32_t parity = fill & 1;
        uint32_t done = 0;
        while (!done) {
            asm volatile("{\n .reg .pred p;\n"
                         " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                         " selp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(shared_address(barrier)), "r"(parity)
                : "memory");
        }
#else
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
#endif
    }
};

//! One warp's own buffer, otherwise as CopyBarrier: every lane waits, and reads what the warp's own fills brought.
class WarpCopyBarrier {
public:
    static __device__ __forceinline__ void wait(uint64_t* barrier, int fill) {
#if REPLAYSSM_BULK_COPY
        CopyBarrier::wait(barrier, fill);
#else
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
#endif
    }
};

//! What becomes of copied bytes: never needed again; no statement; written back soon, and then best still in the L2
//! (an update in place is 4 to 6 % faster on an H200 where its reads ask to be the last that leave, and its writes ask
//! for nothing).
enum class CopyUse { kReadOnce, kPlain, kWrittenBack };

__device__ __forceinline__ uint64_t copy_policy(CopyUse use) {
    uint64_t policy = 0;
#if REPLAYSSM_BULK_COPY
    if (use == CopyUse::kReadOnce) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else if (use == CopyUse::kPlain) {
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
#endif
    return policy;
}

//! By one thread: kBytes (8 or 16) from source to shared memory, there after wait_for_own_copies and a barrier.
template <int kBytes>
__device__ __forceinline__ void copy_piece(void* target, const void* source) {
    static_assert(kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(target)), "l"(source) : "memory");
    }
}
__device__ __forceinline__ void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if REPLAYSSM_BULK_COPY
//! By one thread: a whole fill.
__device__ __forceinline__ void bulk_copy(
    void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
    CopyBarrier::announce(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
#endif

//! By every thread of the block: a whole fill of one contiguous piece.
__device__ __forceinline__ void copy_block(
    void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
#if REPLAYSSM_BULK_COPY
    if (threadIdx.x == 0) bulk_copy(target, source, bytes, barrier, policy);
#else
    for (uint32_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
        copy_piece<16>(static_cast<char*>(target) + i, static_cast<const char*>(source) + i);
    }
#endif
}

//! By every lane of a warp: a whole fill of one contiguous piece into a buffer that this warp alone uses.
__device__ __forceinline__ void copy_warp_block(
    void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
    const int lane = threadIdx.x & (kWarp - 1);
#if REPLAYSSM_BULK_COPY
    if (lane == 0) bulk_copy(target, source, bytes, barrier, policy);
#else
    for (uint32_t i = lane * 16; i < bytes; i += kWarp * 16) {
        copy_piece<16>(static_cast<char*>(target) + i, static_cast<const char*>(source) + i);
    }
#endif
}

//! Programmatic dependent launch: wait until the kernels before this one are done and visible, and let the next one's
//! blocks start as this one's leave. Both do nothing in a plain launch.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if REPLAYSSM_BULK_COPY
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if REPLAYSSM_BULK_COPY
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace replayssm
