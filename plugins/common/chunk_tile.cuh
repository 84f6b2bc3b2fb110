//! What the tensor-core scans share: how a chunk's tokens lie in shared memory, where they come from, and the state as
//! the lanes of a fragment hold it.
#pragma once

#include "tensor_core.cuh"

namespace replayssm {

constexpr int kChunk = 64; // tokens that are turned into matrix products at a time
constexpr int kSpan = 16;  // tokens of a span: exponents are sums over at most one span, or products
constexpr int kSpans = kChunk / kSpan;
constexpr uint32_t kPanelBytes = kChunk * 128; // a chunk of 64 columns, bf16
constexpr uint32_t kStripBytes = kChunk * 32;  // of 16 columns

//! Offset of 16-byte piece `piece` of row `row` in a tile; of half `half` in a strip.
__device__ __forceinline__ uint32_t tile_offset(int row, int piece) {
    return (piece >> 3) * kPanelBytes + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}
__device__ __forceinline__ uint32_t strip_offset(int row, int half) {
    return row * 32 + ((half ^ (row >> 2 & 1)) << 4);
}

//! Whether a tensor's strides in bytes fit in 31 bits; absent ones do.
inline bool fits_31_bits(const replayssm_tensor& tensor) {
    const auto fits = [](int64_t stride) { return stride >= 0 && stride <= INT32_MAX / 2; };
    return tensor.data == nullptr || (fits(tensor.strides[1]) && fits(tensor.strides[2]));
}

//! Bytes from token to token, and where a head or group of a token begins, of a tensor that fits_31_bits.
__device__ __forceinline__ int token_bytes(const replayssm_tensor& tensor) {
    return static_cast<int>(tensor.strides[1]) * 2;
}
__device__ __forceinline__ const __nv_bfloat16* element(const replayssm_tensor& tensor, int token, int head) {
    const auto* start = static_cast<const __nv_bfloat16*>(tensor.data);
    return advance(advance(start, token, token_bytes(tensor)), head, static_cast<int>(tensor.strides[2]) * 2);
}

//! Two neighbouring state elements.
__device__ __forceinline__ float2 load_state_pair(const char* state, int dtype, int64_t index) {
    if (dtype == REPLAYSSM_FLOAT32) return *reinterpret_cast<const float2*>(state + index * 4);
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(state + index * 2);
    if (dtype == REPLAYSSM_BFLOAT16) return make_float2(low_bf16(bits), high_bf16(bits));
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

__device__ __forceinline__ void store_state_pair(char* state, int dtype, int64_t index, float a, float b) {
    if (dtype == REPLAYSSM_FLOAT32) {
        *reinterpret_cast<float2*>(state + index * 4) = make_float2(a, b);
    } else if (dtype == REPLAYSSM_BFLOAT16) {
        *reinterpret_cast<uint32_t*>(state + index * 2) = pack_bf16(a, b);
    } else {
        *reinterpret_cast<__half2*>(state + index * 2) = __floats2half2_rn(a, b);
    }
}

} // namespace replayssm
