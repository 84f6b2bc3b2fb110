//! What the causal convolution's kernels are launched with. Pointers are device memory, strides in elements.
#pragma once

#include "../c_api/replayssm.h"

#include <cuda_runtime.h>

namespace replayssm {

struct ConvPool {
    char* base = nullptr;
    int64_t stride_bytes = 0;
    int64_t slots = 0;
    int64_t cursor = 0;  // byte offset: int16 [ceil(C / 64), 4 words], pending_len is word 2
    int64_t columns = 0; // byte offset: act_t [kernel - 1 + spec_len, C]
    int channels = 0;
    int taps = 0; // kernel
};

struct ConvParams {
    ConvPool pool;
    replayssm_index slots{};                     // [rows] or [sequences]; materialize: dst
    replayssm_index accepted{};                  // step: [rows] or absent; materialize: count
    replayssm_index cu_seqlens{};                // scan; materialize: src
    const uint8_t* has_initial = nullptr;        // scan
    replayssm_tensor x{}, weight{}, bias{}, y{}; // token axis is axis 1; the scan has a row stride of 0
    int rows = 0;                                // rows, sequences or pairs
    int tokens = 0;                              // of one row (step) or of all sequences (scan)
    bool silu = true;
};

void launch_conv_step(const ConvParams& params, int act_dtype, cudaStream_t stream);
void launch_conv_scan(const ConvParams& params, int act_dtype, cudaStream_t stream);
void launch_conv_materialize(const ConvParams& params, int act_dtype, cudaStream_t stream);
void launch_conv_reset(const ConvParams& params, int act_dtype, cudaStream_t stream);

} // namespace replayssm
