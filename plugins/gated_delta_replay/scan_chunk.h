//! The chunked scans: which calls they take, and their launch.
#pragma once

#include "params.h"

namespace replayssm {

//! bf16 activations, normalised keys of at most 128 channels, strides in 31 bits of bytes, and a device with enough
//! shared memory.
bool has_scan_chunk(const GatedDeltaScanParams& p, int act_dtype);
void launch_scan_heads(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream);    // GDN
void launch_scan_channels(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream); // KDA

} // namespace replayssm
