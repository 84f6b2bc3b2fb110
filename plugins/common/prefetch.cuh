//! What a kernel may do before it waits for the kernels in front of it (programmatic dependent launch): find out where
//! its data will lie, and have the L2 fetch it. Values that a kernel in front still changes lead to other lines being
//! fetched, never to another result: nothing read here is used for anything else.
#pragma once

#include "numeric.cuh"

namespace replayssm {

//! 8 aligned bytes as they are at the moment, past the L1: what is read there again after the wait is not this copy.
template <class T>
__device__ __forceinline__ T peek(const void* address) {
    static_assert(sizeof(T) == 8, "one 8-byte access");
    uint64_t bits;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
#else
    bits = *static_cast<const uint64_t*>(address);
#endif
    return *reinterpret_cast<const T*>(&bits);
}

//! Entry of an index vector, likewise.
__device__ __forceinline__ int64_t peek_index(const replayssm_index& index, int64_t i) {
    if (index.bits == 64) return peek<int64_t>(static_cast<const long long*>(index.data) + i);
    int value;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
        : "=r"(value)
        : "l"(static_cast<const int*>(index.data) + i)
        : "memory");
#else
    value = static_cast<const int*>(index.data)[i];
#endif
    return value;
}

//! The 128-byte line of an address, to L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
#elif defined(REPLAYSSM_EMULATOR)
    emulator::prefetched(address, 1);
#endif
}

//! By one thread: `bytes` bytes, 0 or a multiple of 16 on 16, to L2. From sm_90 on.
__device__ __forceinline__ void prefetch_block(const void* address, uint32_t bytes) {
    if (bytes == 0) return;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#elif defined(REPLAYSSM_EMULATOR)
    emulator::prefetched(address, bytes, 16);
#endif
}

} // namespace replayssm
