//! Which kernel takes a scan.
#include "scan_chunk.h"
#include "scan_launch.cuh"

void replayssm::launch_gated_delta_scan(
    const GatedDeltaScanParams& p, int state_dtype, int act_dtype, cudaStream_t stream) {
    if (!p.exact && has_scan_chunk(p, act_dtype)) {
        return p.shape.channel_gates ? launch_scan_channels(p, state_dtype, stream)
                                     : launch_scan_heads(p, state_dtype, stream);
    }
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_delta_scan_bf16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_delta_scan_fp16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_delta_scan_fp32(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; gated_delta_scan has bfloat16, float16 and float32");
    }
}
