//! Launch chain of the convolution: act_dtype -> 4 taps or any number of them -> kernel.
#include "../common/launch.h"
#include "kernel.cuh"

namespace replayssm {
namespace {

template <class act_t>
dim3 conv_grid(const ConvParams& p, int64_t second) {
    const int per_block = kConvThreads * 16 / static_cast<int>(sizeof(act_t));
    return dim3((p.pool.channels + per_block - 1) / per_block, static_cast<unsigned>(second));
}

template <class act_t, int kTaps>
void run_step(const ConvParams& p, cudaStream_t stream) {
    launch<conv_step_kernel<act_t, kTaps>>("conv_step", conv_grid<act_t>(p, p.rows), kConvThreads, 0, stream, p);
}

template <class act_t, int kTaps>
void run_scan(const ConvParams& p, cudaStream_t stream) {
    const int64_t tiles = (static_cast<int64_t>(p.tokens) + kScanTile - 1) / kScanTile;
    if (tiles > 0)
        launch<conv_scan_kernel<act_t, kTaps>>("conv_scan", conv_grid<act_t>(p, tiles), kConvThreads, 0, stream, p);
    launch<conv_finish_kernel<act_t, kTaps>>("conv_scan", conv_grid<act_t>(p, p.rows), kConvThreads, 0, stream, p);
}

//! Calls work(act_t()) for the type that act_dtype names.
template <class Work>
void with_act(const char* op, int act_dtype, Work work) {
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return work(__nv_bfloat16());
        case REPLAYSSM_FLOAT16: return work(__half());
        case REPLAYSSM_FLOAT32: return work(float());
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype), "; ", op,
                " has bfloat16, float16 and float32");
    }
}

} // namespace

void launch_conv_step(const ConvParams& p, int act_dtype, cudaStream_t stream) {
    with_act("conv_step", act_dtype, [&](auto type) {
        using act_t = decltype(type);
        p.pool.taps == 4 ? run_step<act_t, 4>(p, stream) : run_step<act_t, 0>(p, stream);
    });
}

void launch_conv_scan(const ConvParams& p, int act_dtype, cudaStream_t stream) {
    with_act("conv_scan", act_dtype, [&](auto type) {
        using act_t = decltype(type);
        p.pool.taps == 4 ? run_scan<act_t, 4>(p, stream) : run_scan<act_t, 0>(p, stream);
    });
}

void launch_conv_materialize(const ConvParams& p, int act_dtype, cudaStream_t stream) {
    with_act("conv_materialize", act_dtype, [&](auto type) {
        using act_t = decltype(type);
        launch<conv_materialize_kernel<act_t>>(
            "conv_materialize", conv_grid<act_t>(p, p.rows), kConvThreads, 0, stream, p);
    });
}

void launch_conv_reset(const ConvParams& p, int act_dtype, cudaStream_t stream) {
    with_act("conv_reset", act_dtype, [&](auto type) {
        using act_t = decltype(type);
        launch<conv_reset_kernel<act_t>>("conv_reset", conv_grid<act_t>(p, p.rows), kConvThreads, 0, stream, p);
    });
}

} // namespace replayssm
