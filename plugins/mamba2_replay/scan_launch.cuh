//! Launch chain of the scan for one act_dtype; scan_<act>.cu instantiate it.
#pragma once

#include "../common/launch.h"
#include "scan_kernel.cuh"

namespace replayssm {

void launch_scan_bf16(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream);
void launch_scan_fp16(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream);
void launch_scan_fp32(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream);

template <class act_t, class state_t>
void launch_scan_kernel(const Mamba2ScanParams& p, cudaStream_t stream) {
    using Tile = StateTile<state_t, 0, 1>;
    const BatchShared s(Tile::padded_dstate(p.shape.dstate), p.shape.headdim / kQuarter, true);
    launch<mamba2_scan_kernel<act_t, state_t>>(
        "mamba2_scan", dim3(p.shape.nheads * kQuarter, p.sequences), 2 * p.shape.headdim, s.bytes, stream, p);
}

template <class act_t>
void launch_scan(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32: return launch_scan_kernel<act_t, float>(p, stream);
        case REPLAYSSM_BFLOAT16: return launch_scan_kernel<act_t, __nv_bfloat16>(p, stream);
        case REPLAYSSM_FLOAT16: return launch_scan_kernel<act_t, __half>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; mamba2_scan has float32, bfloat16 and float16");
    }
}

} // namespace replayssm
