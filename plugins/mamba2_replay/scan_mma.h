//! The tensor-core scan: which calls it takes, and its launch.
#pragma once

#include "params.h"

namespace replayssm {

//! bf16 activations, strides in 31 bits of bytes, and a device with enough shared memory for one head.
bool has_scan_mma(const Mamba2ScanParams& p, int act_dtype);
void launch_scan_mma(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream);

} // namespace replayssm
