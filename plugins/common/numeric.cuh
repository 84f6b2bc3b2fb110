//! Element types, 16-byte vectors and scalar tensors of any float dtype, as device code sees them.
#pragma once

#include "../c_api/replayssm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace replayssm {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}

//! kCount elements of T that move as one access of kCount * sizeof(T) bytes (at most 16).
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
    T value[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const void* address) {
    return *static_cast<const Pack<T, kCount>*>(address);
}

template <class T, int kCount>
__device__ __forceinline__ void store_pack(void* address, const Pack<T, kCount>& pack) {
    *static_cast<Pack<T, kCount>*>(address) = pack;
}

//! 16 bytes of global memory that this kernel reads once: kept out of L1, first to leave L2.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
    return __ldcs(static_cast<const uint4*>(address));
}

template <class T>
__device__ __forceinline__ void unpack16(uint4 bits, float (&out)[16 / sizeof(T)]) {
    const auto pack = *reinterpret_cast<const Pack<T, 16 / sizeof(T)>*>(&bits);
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
        out[i] = to_float(pack.value[i]);
}

template <class T>
__device__ __forceinline__ uint4 pack16(const float (&in)[16 / sizeof(T)]) {
    Pack<T, 16 / sizeof(T)> pack;
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
        pack.value[i] = from_float<T>(in[i]);
    return *reinterpret_cast<const uint4*>(&pack);
}

//! Element of a tensor whose dtype is known at run time only (dt, A, D, biases, convolution weights), in two halves:
//! the load, which nothing waits for, and its meaning.
__device__ __forceinline__ unsigned load_bits(const void* data, int dtype, int64_t index) {
    if (dtype == REPLAYSSM_FLOAT32) return __ldg(static_cast<const unsigned*>(data) + index);
    return __ldg(static_cast<const unsigned short*>(data) + index);
}
__device__ __forceinline__ unsigned load_bits(const void* address, int dtype) { return load_bits(address, dtype, 0); }
__device__ __forceinline__ const void* element_at(const void* data, int dtype, int64_t index) {
    return static_cast<const char*>(data) + index * (dtype == REPLAYSSM_FLOAT32 ? 4 : 2);
}
__device__ __forceinline__ float bits_to_float(unsigned bits, int dtype) {
    if (dtype == REPLAYSSM_FLOAT32) return __uint_as_float(bits);
    if (dtype == REPLAYSSM_BFLOAT16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float load_scalar(const void* data, int dtype, int64_t index) {
    return bits_to_float(load_bits(data, dtype, index), dtype);
}

//! Entry of an int32 or int64 index vector.
__device__ __forceinline__ int64_t load_index(const replayssm_index& index, int64_t i) {
    if (index.bits == 64) return __ldg(static_cast<const long long*>(index.data) + i);
    return __ldg(static_cast<const int*>(index.data) + i);
}

//! A number of 4 or 8 bytes is worked out here, not where it is used.
template <class T>
__device__ __forceinline__ void settle(T& value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register or two");
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) == 8) {
        asm volatile("" : "+l"(value));
    } else {
        asm volatile("" : "+r"(value));
    }
#endif
}

__device__ __forceinline__ float silu(float value) { return value / (1.0f + expf(-value)); }

//! softplus, x above 20
__device__ __forceinline__ float softplus(float value) { return value > 20.0f ? value : log1pf(expf(value)); }

} // namespace replayssm
