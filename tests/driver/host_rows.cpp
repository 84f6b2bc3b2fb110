//! In place of row_kernels.cu and of CUDA, so that plugins/tensorrt builds with a C++ compiler alone: the rows of a scan
//! are mapped here and now, in host memory. The driver records the scans that follow.
#include "../../plugins/common/checks.h"
#include "../../plugins/tensorrt/row_kernels.h"

namespace replayssm::plugin {

size_t scan_rows_bytes(int64_t rows) { return 256 * (3 + static_cast<size_t>(rows)); }

ScanRows launch_scan_rows(const ScanRowsParams& params, void* workspace, cudaStream_t) {
    require(workspace != nullptr, "workspace is NULL");
    const int sequences = params.padded_length > 0 ? 2 * params.rows : params.rows;
    auto* cu_seqlens = static_cast<int32_t*>(workspace);
    int32_t* slots = cu_seqlens + sequences + 1;
    auto* has_initial = reinterpret_cast<uint8_t*>(slots + sequences);
    for (int row = 0; row <= params.rows; ++row)
        map_row(params, {cu_seqlens, slots, has_initial}, row);
    ScanRows out;
    out.sequences = sequences;
    out.tokens = params.tokens;
    out.cu_seqlens = cu_seqlens;
    out.slots = params.padded_length > 0 ? slots : params.slot_mapping;
    out.has_initial = params.has_initial != nullptr ? has_initial : nullptr;
    return out;
}

} // namespace replayssm::plugin

extern "C" {

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*) { return cudaErrorNoDevice; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

// Never reached: the driver's own come first in the search order.
#define UNREACHED(op)                                                                                                  \
    REPLAYSSM_API int32_t replayssm_##op(const replayssm_##op##_params*, void*) { return REPLAYSSM_UNSUPPORTED; }
UNREACHED(conv_step)
UNREACHED(conv_scan)
UNREACHED(mamba2_step)
UNREACHED(mamba2_scan)
UNREACHED(gated_delta_step)
UNREACHED(gated_delta_scan)

} // extern "C"
