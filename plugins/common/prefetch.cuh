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
#elif defined(REPLAYSSM_EMULATOR)
    bits = emulator::peeked(*static_cast<const uint64_t*>(address));
#endif
    return *reinterpret_cast<const T*>(&bits);
}

//! 8 aligned bytes past the L1, that nothing here waits for. kEarly: before the wait, as peek.
template <bool kEarly>
__device__ __forceinline__ uint2 word_bits(const void* address) {
    uint2 bits;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(address) : "memory");
#elif defined(REPLAYSSM_EMULATOR)
    bits = *static_cast<const uint2*>(address);
    if (kEarly) bits = emulator::peeked(bits);
#endif
    return bits;
}

//! The same of an entry of an index vector; its upper half is 0 where an entry has 32 bits.
template <bool kEarly>
__device__ __forceinline__ uint2 index_bits(const replayssm_index& index, int64_t i) {
    const char* const address = static_cast<const char*>(index.data) + i * (index.bits == 64 ? 8 : 4);
    uint2 bits;
#if defined(__CUDA_ARCH__)
    asm volatile("{\n .reg .pred wide;\n setp.eq.s32 wide, %3, 64;\n mov.b32 %1, 0;\n"
                 " @wide ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];\n"
                 " @!wide ld.relaxed.gpu.global.u32 %0, [%2];\n}"
        : "=&r"(bits.x), "=&r"(bits.y)
        : "l"(address), "r"(index.bits)
        : "memory");
#elif defined(REPLAYSSM_EMULATOR)
    bits = index.bits == 64 ? *reinterpret_cast<const uint2*>(address)
                            : make_uint2(*reinterpret_cast<const unsigned*>(address), 0);
    if (kEarly && index.bits == 64) bits = emulator::peeked(bits);
    if (kEarly && index.bits != 64) bits.x = emulator::peeked(bits.x);
#endif
    return bits;
}

//! What the bits of such an entry mean.
__device__ __forceinline__ int64_t index_of_bits(uint2 bits, int index_bits) {
    return index_bits == 64 ? static_cast<int64_t>(static_cast<uint64_t>(bits.y) << 32 | bits.x)
                            : static_cast<int64_t>(static_cast<int>(bits.x));
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
#elif defined(REPLAYSSM_EMULATOR)
    value = emulator::peeked(static_cast<const int*>(index.data)[i]);
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
