//! The causal convolution's operations: checks, then causal_conv/params.h, then launch.
#include "../causal_conv/params.h"
#include "guard.h"
#include "operations.h"

using namespace replayssm;

namespace {

ConvPool make_pool(const replayssm_conv_spec& spec, const replayssm_pool& pool) {
    const replayssm_layout layout = conv_layout(spec);
    require_kernel_dtype(spec.act_dtype);
    auto out = pool_slots<ConvPool>(pool, layout);
    out.columns = layout.regions[kColumns].offset;
    out.channels = spec.channels;
    out.taps = spec.kernel;
    return out;
}

template <class Params>
void take_tensors(const Params& p, int token_axes, ConvParams& out) {
    require_vectors("x", p.x, p.spec.act_dtype, token_axes);
    require_vectors("y", p.y, p.spec.act_dtype, token_axes);
    require_scalars("weight", p.weight, false);
    require_scalars("bias", p.bias, true);
    out.x = p.x;
    out.y = p.y;
    out.weight = p.weight;
    out.bias = p.bias;
    out.silu = p.spec.silu != 0;
}

} // namespace

extern "C" {

int32_t replayssm_conv_step(const replayssm_conv_step_params* params, void* stream) {
    return guarded("conv_step", [&] {
        const auto& p = checked(params);
        ConvParams step;
        step.pool = make_pool(p.spec, p.pool);
        require_range("rows", p.rows, 0, kMaxGridRows);
        require_range("tokens", p.tokens, 1, p.spec.spec_len);
        if (p.rows == 0) return;
        require_index("slots", p.slots, false);
        require_index("accepted", p.accepted, true);
        take_tensors(p, 2, step);
        step.slots = p.slots;
        step.accepted = p.accepted;
        step.rows = p.rows;
        step.tokens = p.tokens;
        launch_conv_step(step, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_conv_scan(const replayssm_conv_scan_params* params, void* stream) {
    return guarded("conv_scan", [&] {
        const auto& p = checked(params);
        ConvParams scan;
        scan.pool = make_pool(p.spec, p.pool);
        require_range("sequences", p.sequences, 0, kMaxGridRows);
        require_range("tokens", p.tokens, 0, kMaxGridRows * 32);
        if (p.sequences == 0) return;
        require_index("slots", p.slots, false);
        require_index("cu_seqlens", p.cu_seqlens, false);
        if (p.tokens > 0) take_tensors(p, 1, scan);
        for (replayssm_tensor* tensor : {&scan.x, &scan.y}) {
            tensor->strides[1] = tensor->strides[0];
            tensor->strides[0] = 0;
        }
        scan.slots = p.slots;
        scan.cu_seqlens = p.cu_seqlens;
        scan.has_initial = p.has_initial;
        scan.rows = p.sequences;
        scan.tokens = static_cast<int>(p.tokens);
        launch_conv_scan(scan, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_conv_materialize(const replayssm_conv_materialize_params* params, void* stream) {
    return guarded("conv_materialize", [&] {
        const auto& p = checked(params);
        ConvParams work;
        work.pool = make_pool(p.spec, p.pool);
        require_range("pairs", p.pairs, 0, kMaxGridRows);
        if (p.pairs == 0) return;
        require_index("src", p.src, false);
        require_index("count", p.count, false);
        require_index("dst", p.dst, false);
        work.cu_seqlens = p.src;
        work.accepted = p.count;
        work.slots = p.dst;
        work.rows = p.pairs;
        launch_conv_materialize(work, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_conv_reset(const replayssm_conv_reset_params* params, void* stream) {
    return guarded("conv_reset", [&] {
        const auto& p = checked(params);
        ConvParams work;
        work.pool = make_pool(p.spec, p.pool);
        require_range("count", p.count, 0, kMaxGridRows);
        if (p.count == 0) return;
        require_index("slots", p.slots, false);
        work.slots = p.slots;
        work.rows = p.count;
        launch_conv_reset(work, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

} // extern "C"
