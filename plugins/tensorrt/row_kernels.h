//! Small kernels in front of a scan: from TensorRT-LLM's row inputs to the C interface's packed sequences.
#pragma once

#include "row_map.h"

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace replayssm::plugin {

//! Packed sequences in the workspace. Padded input has two for each row: its tokens, then its padding with slot -1,
//! whose outputs a scan sets to zero.
struct ScanRows {
    int sequences = 0;
    int64_t tokens = 0;
    int32_t* cu_seqlens = nullptr;  // [sequences + 1]
    const int32_t* slots = nullptr; // [sequences]
    const uint8_t* has_initial = nullptr;
};

//! Bytes of workspace for calls of up to `rows` rows.
size_t scan_rows_bytes(int64_t rows);

//! Lengths that exceed the tensors are clamped, so that a scan stays within them. Throws Error if the launch fails.
ScanRows launch_scan_rows(const ScanRowsParams& params, void* workspace, cudaStream_t stream);

#if defined(REPLAYSSM_DEBUG_CHECKS)
//! Prints, from the device, slots outside the pool and slots that two rows share.
void launch_slot_check(const int32_t* slot_mapping, int rows, int64_t slots, cudaStream_t stream);
#endif

} // namespace replayssm::plugin
