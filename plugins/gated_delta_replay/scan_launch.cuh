//! Launch chain of the token-by-token scan for one act_dtype; scan_<act>.cu instantiate it.
#pragma once

#include "../common/launch.h"
#include "scan_kernel.cuh"

namespace replayssm {

void launch_delta_scan_bf16(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream);
void launch_delta_scan_fp16(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream);
void launch_delta_scan_fp32(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream);

//! Bytes of a row of KDA's raw gates if rows are dense and begin on 16 bytes, otherwise 0.
inline int gate_row_bytes(const GatedDeltaScanParams& p) {
    const replayssm_tensor& a = p.in.a;
    const int64_t bytes = dtype_bytes(a.dtype);
    if (!p.shape.channel_gates || a.data == nullptr || a.strides[3] != 1) return 0;
    if (reinterpret_cast<uintptr_t>(a.data) % 16 != 0) return 0;
    if (a.strides[1] * bytes % 16 != 0 || a.strides[2] * bytes % 16 != 0) return 0;
    return static_cast<int>(p.shape.dstate * bytes);
}

template <class act_t, int kDstate, int kRows, bool kChannels>
void launch_delta_scan_kernel(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    DeltaScanParams params;
    params.scan = p;
    params.state_dtype = state_dtype;
    params.state_bytes = dtype_bytes(state_dtype);
    params.shared = DeltaScanShared(
        p.shape.dstate, p.shape.headdim * kRows / kQuarters, sizeof(act_t), kChannels, gate_row_bytes(p));
    launch<gated_delta_scan_kernel<act_t, kDstate, kRows, kChannels>>("gated_delta_scan",
        dim3(p.shape.nheads * (kQuarters / kRows), p.sequences), 2 * p.shape.headdim, params.shared.bytes, stream,
        params);
}

template <class act_t, int kDstate, int kRows>
void launch_delta_scan_kind(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    if (p.shape.channel_gates) return launch_delta_scan_kernel<act_t, kDstate, kRows, true>(p, state_dtype, stream);
    launch_delta_scan_kernel<act_t, kDstate, kRows, false>(p, state_dtype, stream);
}

template <class act_t>
void launch_delta_scan(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    if (state_dtype != REPLAYSSM_FLOAT32 && state_dtype != REPLAYSSM_BFLOAT16 && state_dtype != REPLAYSSM_FLOAT16) {
        fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
            "; gated_delta_scan has float32, bfloat16 and float16");
    }
    if constexpr (sizeof(act_t) == 2) {
        // A head a block where there are heads for most multiprocessors, else a quarter.
        const int64_t heads = static_cast<int64_t>(p.sequences) * p.shape.nheads;
        if (p.shape.dstate == 128 && heads * 4 >= device_limits().multiprocessors * 3)
            return launch_delta_scan_kind<act_t, 128, 4>(p, state_dtype, stream);
        if (p.shape.dstate == 128) return launch_delta_scan_kind<act_t, 128, 1>(p, state_dtype, stream);
    }
    launch_delta_scan_kind<act_t, 0, 1>(p, state_dtype, stream);
}

} // namespace replayssm
