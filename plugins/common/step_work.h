//! What the step kernels of every kind are told about tensors and about the cut of a batch into blocks, and how the
//! launchers work that out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace replayssm {

//! A step's tensor [rows, tokens, heads or groups, ...]: 32-bit strides (checked by c_api) keep addresses cheap.
struct StepTensor {
    const void* data = nullptr;
    int row = 0;
    int token = 0;
    int head = 0;
    int dtype = 0;
};

//! Division of numbers below 2^31 by a number known on the host: a multiplication and a correction.
struct Divisor {
    uint32_t value = 1;
    uint32_t multiplier = 0; // ceil(2^32 / value), 0 for 1

    Divisor() = default;
    explicit Divisor(uint32_t by)
        : value(by), multiplier(by == 1 ? 0 : static_cast<uint32_t>((0x100000000ull + by - 1) / by)) {}
};

//! Largest divisor of value that is at most limit.
inline int largest_divisor(int value, int limit) {
    for (int d = limit; d > 1; --d)
        if (value % d == 0) return d;
    return 1;
}

//! Offset of the next `size` bytes of a block's shared memory, on 16 bytes; moves `end` behind them.
inline __host__ __device__ uint32_t take_shared(uint32_t& end, uint32_t size) {
    const uint32_t offset = end;
    end = (end + size + 15) / 16 * 16;
    return offset;
}

} // namespace replayssm
