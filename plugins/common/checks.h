//! Argument checks of the C interface: an Error carries a status and a message that names argument, value and what is
//! allowed.
#pragma once

#include "../c_api/replayssm.h"

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace replayssm {

class Error : public std::runtime_error {
public:
    Error(replayssm_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    replayssm_status status() const noexcept { return status_; }

private:
    replayssm_status status_;
};

template <class... Parts>
[[noreturn]] void fail(replayssm_status status, const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(status, text.str());
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) fail(REPLAYSSM_INVALID_ARGUMENT, parts...);
}

inline void require_range(const char* name, int64_t value, int64_t low, int64_t high) {
    require(value >= low && value <= high, name, " is ", value, "; it must be from ", low, " to ", high);
}

inline void require_size(const char* name, uint32_t got, uint64_t known) {
    require(
        got == known, name, ".struct_size is ", got, "; this library (ABI ", REPLAYSSM_ABI_VERSION, ") knows ", known);
}

inline int dtype_bytes(int32_t dtype) {
    switch (dtype) {
        case REPLAYSSM_FLOAT64: return 8;
        case REPLAYSSM_FLOAT32: return 4;
        case REPLAYSSM_BFLOAT16:
        case REPLAYSSM_FLOAT16:
        case REPLAYSSM_INT16: return 2;
        case REPLAYSSM_FLOAT8_E4M3:
        case REPLAYSSM_INT8: return 1;
        default: return 0;
    }
}

inline const char* dtype_name(int32_t dtype) {
    switch (dtype) {
        case REPLAYSSM_FLOAT64: return "float64";
        case REPLAYSSM_FLOAT32: return "float32";
        case REPLAYSSM_BFLOAT16: return "bfloat16";
        case REPLAYSSM_FLOAT16: return "float16";
        case REPLAYSSM_INT16: return "int16";
        case REPLAYSSM_FLOAT8_E4M3: return "float8_e4m3";
        case REPLAYSSM_INT8: return "int8";
        default: return "unknown";
    }
}

constexpr int64_t kAlignment = 16;

//! Data present and aligned; the named leading strides (elements) whole multiples of 16 bytes.
inline void require_vectors(const char* name, const replayssm_tensor& tensor, int32_t dtype, int strided_axes) {
    require(tensor.data != nullptr, name, " is NULL; it must be a device pointer");
    require(tensor.dtype == dtype, name, " has dtype ", dtype_name(tensor.dtype), "; it must be ", dtype_name(dtype),
        ", the spec's act_dtype");
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    require(address % kAlignment == 0, name, " starts at address ", address, "; it must be a multiple of ", kAlignment);
    for (int axis = 0; axis < strided_axes; ++axis) {
        const int64_t bytes = tensor.strides[axis] * dtype_bytes(dtype);
        require(bytes % kAlignment == 0, name, " has stride ", tensor.strides[axis], " along axis ", axis,
            "; in bytes it must be a multiple of ", kAlignment);
    }
}

//! A tensor read one element at a time: any strides, fp32, bf16 or fp16.
inline void require_scalars(const char* name, const replayssm_tensor& tensor, bool optional) {
    if (optional && tensor.data == nullptr) return;
    require(tensor.data != nullptr, name, " is NULL; it must be a device pointer");
    require(
        tensor.dtype == REPLAYSSM_FLOAT32 || tensor.dtype == REPLAYSSM_BFLOAT16 || tensor.dtype == REPLAYSSM_FLOAT16,
        name, " has dtype ", dtype_name(tensor.dtype), "; it must be float32, bfloat16 or float16");
}

inline void require_index(const char* name, const replayssm_index& index, bool optional) {
    if (optional && index.data == nullptr) return;
    require(index.data != nullptr, name, " is NULL; it must be a device pointer");
    require(index.bits == 32 || index.bits == 64, name, ".bits is ", index.bits, "; it must be 32 or 64");
}

inline void require_pool(const replayssm_pool& pool, int64_t slot_bytes) {
    require(pool.base != nullptr, "pool.base is NULL; it must be a device pointer");
    const auto address = reinterpret_cast<uintptr_t>(pool.base);
    require(address % kAlignment == 0, "pool.base is at address ", address, "; it must be a multiple of ", kAlignment);
    require(pool.stride_bytes >= slot_bytes && pool.stride_bytes % kAlignment == 0, "pool.stride_bytes is ",
        pool.stride_bytes, "; it must be a multiple of ", kAlignment, " and at least ", slot_bytes,
        ", the bytes of one slot");
    require_range("pool.slots", pool.slots, 1, INT32_MAX);
}

} // namespace replayssm
