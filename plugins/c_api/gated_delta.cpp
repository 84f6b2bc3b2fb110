//! Step, scan and materialize of Gated DeltaNet (GDN) and Kimi Delta Attention (KDA): checks, then params.h structs,
//! then launch.
#include "../gated_delta_replay/params.h"
#include "guard.h"
#include "operations.h"

using namespace replayssm;

namespace {

void require_kernel_spec(const replayssm_recurrence_spec& spec) {
    if (spec.kind != REPLAYSSM_GATED_DELTA && spec.kind != REPLAYSSM_KIMI_DELTA) {
        fail(REPLAYSSM_UNSUPPORTED, "spec.kind is ", spec.kind, "; this operation has gated_delta (",
            REPLAYSSM_GATED_DELTA, ") and kimi_delta (", REPLAYSSM_KIMI_DELTA, ")");
    }
    require_kernel_sizes(spec, "gated delta");
    require_range("spec.gate_bounded", spec.gate_bounded, 0, 1);
    require_range("spec.qk_l2norm", spec.qk_l2norm, 0, 1);
    require(spec.gate_bounded == 0 || spec.kind == REPLAYSSM_KIMI_DELTA,
        "spec.gate_bounded is 1 for gated_delta; it applies to kimi_delta only");
    require(spec.gate_bounded == 0 || (spec.gate_lower_bound >= -5.0f && spec.gate_lower_bound < 0.0f),
        "spec.gate_lower_bound is ", spec.gate_lower_bound, "; it must be from -5 up to, not including, 0");
}

GatedDeltaSlots make_slots(const replayssm_pool& pool, const replayssm_layout& layout) {
    auto slots = common_slots<GatedDeltaSlots>(pool, layout);
    slots.ring_k = layout.regions[kRingK].offset;
    slots.ring_k_rnorm = layout.regions[kRingKRnorm].offset;
    slots.ring_v = layout.regions[kRingV].offset;
    slots.ring_d = layout.regions[kRingD].offset;
    slots.ring_g = layout.regions[kRingG].offset;
    slots.ring_beta = layout.regions[kRingBeta].offset;
    slots.scalar_stride = static_cast<int>(layout.regions[kRingBeta].strides[0]);
    return slots;
}

GatedDeltaShape make_shape(const replayssm_recurrence_spec& spec) {
    auto shape = common_shape<GatedDeltaShape>(spec);
    shape.channel_gates = spec.kind == REPLAYSSM_KIMI_DELTA;
    shape.bounded = spec.gate_bounded != 0;
    shape.qk_l2norm = spec.qk_l2norm != 0;
    shape.gate_lower_bound = spec.gate_lower_bound;
    return shape;
}

void require_parameter(const char* name, const replayssm_tensor& tensor) {
    require(tensor.data != nullptr, name, " is NULL; it must be a device pointer");
    require(tensor.dtype == REPLAYSSM_FLOAT32, name, " has dtype ", dtype_name(tensor.dtype), "; it must be float32");
}

float scale_of(float scale, const replayssm_recurrence_spec& spec) {
    require(std::isfinite(scale), "scale is ", scale, "; it must be finite (0: dstate^-0.5)");
    return scale != 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(spec.dstate));
}

//! Checks of what step and scan share. `token_axes` leading axes of the activations carry strides to check, heads
//! included.
template <class Params>
void check_inputs(const Params& p, int token_axes) {
    const int32_t act = p.spec.act_dtype;
    require_vectors("q", p.q, act, token_axes);
    require_vectors("k", p.k, act, token_axes);
    require_vectors("v", p.v, act, token_axes);
    require_vectors("o", p.o, act, token_axes);
    require_scalars("a", p.a, false);
    require_scalars("b", p.b, false);
    require_parameter("A_log", p.A_log);
    require_parameter("dt_bias", p.dt_bias);
}

//! [rows, tokens, HV, K'] with the channel's stride apart; a gate per head has channel stride 0.
GateTensor gate_tensor(const char* name, const replayssm_tensor& tensor, int64_t rows, int64_t tokens,
    const replayssm_recurrence_spec& spec) {
    GateTensor out;
    const int64_t channels = spec.kind == REPLAYSSM_KIMI_DELTA ? spec.dstate : 1;
    const int64_t stride = channels > 1 ? tensor.strides[3] : 0;
    require(stride >= 0 && stride <= INT32_MAX / kMaxHeadDim, name, " has stride ", stride,
        " along K; it must be from 0 to ", INT32_MAX / kMaxHeadDim);
    static_cast<StepTensor&>(out) = step_tensor(name, tensor, rows, tokens, spec.nheads, channels * stride + 1);
    out.channel = static_cast<int>(stride);
    return out;
}

//! A parameter [HV] or [HV, K]: strides[0] along heads, strides[1] along K.
replayssm_tensor parameter_axes(replayssm_tensor tensor) {
    const int64_t strides[4] = {0, 0, tensor.strides[0], tensor.strides[1]};
    for (int axis = 0; axis < 4; ++axis)
        tensor.strides[axis] = strides[axis];
    return tensor;
}

GatedDeltaStepInputs step_inputs(const replayssm_gated_delta_step_params& p) {
    check_inputs(p, 3);
    const int64_t heads = p.spec.nheads, groups = p.spec.ngroups;
    GatedDeltaStepInputs in;
    in.q = step_tensor("q", p.q, p.rows, p.tokens, groups);
    in.k = step_tensor("k", p.k, p.rows, p.tokens, groups);
    in.v = step_tensor("v", p.v, p.rows, p.tokens, heads);
    in.o = step_tensor("o", p.o, p.rows, p.tokens, heads);
    in.a = gate_tensor("a", p.a, p.rows, p.tokens, p.spec);
    in.b = step_tensor("b", p.b, p.rows, p.tokens, heads);
    in.A_log = step_tensor("A_log", parameter_axes(p.A_log), 1, 1, heads);
    in.dt_bias = gate_tensor("dt_bias", parameter_axes(p.dt_bias), 1, 1, p.spec);
    in.scale = scale_of(p.scale, p.spec);
    return in;
}

GatedDeltaInputs scan_inputs(const replayssm_gated_delta_scan_params& p) {
    GatedDeltaInputs in;
    in.scale = scale_of(p.scale, p.spec);
    if (p.tokens == 0) return in;
    check_inputs(p, 2);
    in.q = one_row(p.q);
    in.k = one_row(p.k);
    in.v = one_row(p.v);
    in.a = one_row(p.a);
    in.b = one_row(p.b);
    in.o = one_row(p.o);
    in.A_log = p.A_log;
    in.dt_bias = p.dt_bias;
    return in;
}

} // namespace

void replayssm::materialize_gated_delta(
    const replayssm_materialize_params& p, const replayssm_layout& layout, cudaStream_t stream) {
    require_kernel_spec(p.spec);
    require(p.A.data == nullptr, "A is given for spec.kind ", p.spec.kind, "; its ring holds the decay, only mamba2 (",
        REPLAYSSM_MAMBA2, ") takes A");
    GatedDeltaMaterializeParams work;
    if (!fill_materialize(work, p)) return;
    work.pool = make_slots(p.pool, layout);
    work.shape = make_shape(p.spec);
    launch_gated_delta_materialize(work, p.spec.state_dtype, p.spec.act_dtype, stream);
}

extern "C" {

int32_t replayssm_gated_delta_step(const replayssm_gated_delta_step_params* params, void* stream) {
    return guarded("gated_delta_step", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        require_kernel_spec(p.spec);
        GatedDeltaStepParams step;
        if (!fill_step(step, p, layout)) return;
        step.pool = make_slots(p.pool, layout);
        step.shape = make_shape(p.spec);
        step.in = step_inputs(p);
        const GatedDeltaStepTuning tuning{p.tuning.heads_per_block, p.tuning.flags};
        launch_gated_delta_step(step, p.spec.state_dtype, p.spec.act_dtype, tuning, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_gated_delta_scan(const replayssm_gated_delta_scan_params* params, void* stream) {
    return guarded("gated_delta_scan", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        require_kernel_spec(p.spec);
        GatedDeltaScanParams scan;
        if (!fill_scan(scan, p)) return;
        scan.pool = make_slots(p.pool, layout);
        scan.tokens = p.tokens;
        scan.shape = make_shape(p.spec);
        scan.in = scan_inputs(p);
        launch_gated_delta_scan(scan, p.spec.state_dtype, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

} // extern "C"
