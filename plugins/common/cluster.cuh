//! Blocks that reach each other's shared memory: a cluster, from sm_90 on. Before that nothing here does anything, and
//! kernels that need it are not launched.
#pragma once

#include "tensor_core.cuh"

namespace replayssm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define REPLAYSSM_CLUSTERS 1
#else
#define REPLAYSSM_CLUSTERS 0
#endif

//! By every thread of all the cluster's blocks: behind it each sees what the others have done before it, barriers that
//! they have initialised included.
__device__ __forceinline__ void meet_cluster() {
#if REPLAYSSM_CLUSTERS
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#endif
}

//! What this thread has written to shared memory becomes visible to copies between blocks.
__device__ __forceinline__ void publish_to_copies() {
#if REPLAYSSM_CLUSTERS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

//! The same place in the shared memory of the cluster's block number `rank`.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
    uint32_t out = address;
#if REPLAYSSM_CLUSTERS
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
#endif
    return out;
}

//! By a warp: one arrival at a SplitBarrier of another block, for what all lanes have done.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier, int rank) {
#if REPLAYSSM_CLUSTERS
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
    }
#endif
}

//! By a thread: `bytes` bytes of this block's shared memory to the same place of another's, multiples of 16. They and
//! their arrival are one arrival at the other's `barrier`.
__device__ __forceinline__ void send_to_block(uint32_t address, uint32_t bytes, uint32_t barrier, int rank) {
#if REPLAYSSM_CLUSTERS
    const uint32_t there = in_block(barrier, rank);
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(bytes)
        : "memory");
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_block(address, rank)),
        "r"(address), "r"(bytes), "r"(there)
        : "memory");
#endif
}

} // namespace replayssm
