//! Mamba-2 step and scan, materialize and reset of every recurrent kind: checks, then params.h structs, then launch.
#include "../common/reset.h"
#include "../mamba2_replay/params.h"
#include "guard.h"
#include "operations.h"

using namespace replayssm;

namespace {

void require_kernel_spec(const replayssm_recurrence_spec& spec) {
    if (spec.kind != REPLAYSSM_MAMBA2) {
        fail(REPLAYSSM_UNSUPPORTED, "spec.kind is ", spec.kind, "; this operation of the library has mamba2 (",
            REPLAYSSM_MAMBA2, ")");
    }
    require_kernel_sizes(spec, "mamba2");
}

Mamba2Slots make_slots(const replayssm_pool& pool, const replayssm_layout& layout) {
    auto slots = common_slots<Mamba2Slots>(pool, layout);
    slots.ring_x = layout.regions[kRingX].offset;
    slots.ring_b = layout.regions[kRingB].offset;
    slots.ring_dt = layout.regions[kRingDt].offset;
    slots.ring_dt_stride = static_cast<int>(layout.regions[kRingDt].strides[0]);
    return slots;
}

Mamba2Shape make_shape(const replayssm_recurrence_spec& spec) { return common_shape<Mamba2Shape>(spec); }

void require_decay_rate(const replayssm_tensor& A) {
    require(A.data != nullptr, "A is NULL; it must be a device pointer");
    require(A.dtype == REPLAYSSM_FLOAT32, "A has dtype ", dtype_name(A.dtype), "; it must be float32");
}

//! Checks of what step and scan share. `token_axes` leading axes of the activations carry strides to check, heads
//! included.
template <class Params>
Mamba2Inputs make_inputs(const Params& p, int token_axes) {
    const int32_t act = p.spec.act_dtype;
    require_vectors("x", p.x, act, token_axes);
    require_vectors("B", p.B, act, token_axes);
    require_vectors("C", p.C, act, token_axes);
    require_vectors("y", p.y, act, token_axes);
    if (p.z.data != nullptr) require_vectors("z", p.z, act, token_axes);
    require_scalars("dt", p.dt, false);
    require_scalars("dt_bias", p.dt_bias, true);
    require_scalars("D", p.D, true);
    require_decay_rate(p.A);
    Mamba2Inputs in;
    in.x = p.x;
    in.dt = p.dt;
    in.A = p.A;
    in.B = p.B;
    in.C = p.C;
    in.D = p.D;
    in.z = p.z;
    in.dt_bias = p.dt_bias;
    in.y = p.y;
    in.dt_softplus = p.spec.dt_softplus != 0;
    in.dt_min = p.spec.dt_min;
    in.dt_max = p.spec.dt_max;
    return in;
}

//! A parameter [H] or [H, P]: strides[0] along heads, strides[1] along P.
StepTensor step_parameter(const char* name, replayssm_tensor tensor, int64_t heads, int64_t headdim) {
    if (tensor.data == nullptr) return StepTensor{};
    if (headdim == 1) tensor.strides[1] = 0;
    const int64_t strides[3] = {0, tensor.strides[1], tensor.strides[0]};
    for (int axis = 0; axis < 3; ++axis)
        tensor.strides[axis] = strides[axis];
    return step_tensor(name, tensor, 1, headdim, heads);
}

StepInputs step_inputs(const replayssm_mamba2_step_params& p) {
    const Mamba2Inputs checked_inputs = make_inputs(p, 3);
    const int64_t heads = p.spec.nheads, groups = p.spec.ngroups;
    StepInputs in;
    in.x = step_tensor("x", p.x, p.rows, p.tokens, heads);
    in.dt = step_tensor("dt", p.dt, p.rows, p.tokens, heads);
    in.B = step_tensor("B", p.B, p.rows, p.tokens, groups);
    in.C = step_tensor("C", p.C, p.rows, p.tokens, groups);
    in.z = step_tensor("z", p.z, p.rows, p.tokens, heads);
    in.y = step_tensor("y", p.y, p.rows, p.tokens, heads);
    in.A = step_parameter("A", p.A, heads, 1);
    in.dt_bias = step_parameter("dt_bias", p.dt_bias, heads, 1);
    in.D = step_parameter("D", p.D, heads, p.spec.headdim);
    in.dt_softplus = checked_inputs.dt_softplus;
    in.dt_min = checked_inputs.dt_min;
    in.dt_max = checked_inputs.dt_max;
    return in;
}

} // namespace

extern "C" {

int32_t replayssm_mamba2_step(const replayssm_mamba2_step_params* params, void* stream) {
    return guarded("mamba2_step", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        require_kernel_spec(p.spec);
        Mamba2StepParams step;
        if (!fill_step(step, p, layout)) return;
        step.pool = make_slots(p.pool, layout);
        step.shape = make_shape(p.spec);
        step.in = step_inputs(p);
        const Mamba2StepTuning tuning{p.tuning.heads_per_block, p.tuning.flags};
        launch_mamba2_step(step, p.spec.state_dtype, p.spec.act_dtype, tuning, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_mamba2_scan(const replayssm_mamba2_scan_params* params, void* stream) {
    return guarded("mamba2_scan", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        require_kernel_spec(p.spec);
        Mamba2ScanParams scan;
        if (!fill_scan(scan, p)) return;
        scan.pool = make_slots(p.pool, layout);
        scan.shape = make_shape(p.spec);
        if (p.tokens > 0) {
            scan.in = make_inputs(p, 2);
        } else {
            require_decay_rate(p.A);
            scan.in.A = p.A;
        }
        for (replayssm_tensor* tensor : {&scan.in.x, &scan.in.dt, &scan.in.B, &scan.in.C, &scan.in.z, &scan.in.y}) {
            *tensor = one_row(*tensor);
        }
        launch_mamba2_scan(scan, p.spec.state_dtype, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_materialize(const replayssm_materialize_params* params, void* stream) {
    return guarded("materialize", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        require_range("pairs", p.pairs, 0, kMaxGridRows);
        if (p.spec.kind != REPLAYSSM_MAMBA2)
            return materialize_gated_delta(p, layout, static_cast<cudaStream_t>(stream));
        require_kernel_spec(p.spec);
        Mamba2MaterializeParams work;
        if (!fill_materialize(work, p)) return;
        require_decay_rate(p.A);
        work.pool = make_slots(p.pool, layout);
        work.shape = make_shape(p.spec);
        work.A = static_cast<const float*>(p.A.data);
        work.A_stride = p.A.strides[0];
        launch_mamba2_materialize(work, p.spec.state_dtype, p.spec.act_dtype, static_cast<cudaStream_t>(stream));
    });
}

int32_t replayssm_reset(const replayssm_reset_params* params, void* stream) {
    return guarded("reset", [&] {
        const auto& p = checked(params);
        const replayssm_layout layout = slot_layout(p.spec);
        if (p.spec.act_dtype == REPLAYSSM_FLOAT64)
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is float64; it is for the CPU reference");
        require_range("count", p.count, 0, kMaxGridRows);
        if (p.count == 0) return;
        require_pool(p.pool, layout.slot_bytes);
        require_index("slots", p.slots, false);
        ResetParams work;
        work.pool = p.pool;
        work.slots = p.slots;
        work.cursor = layout.regions[kCursor].offset;
        work.state = layout.regions[kState].offset;
        work.state_bytes = layout.regions[kState].nbytes;
        work.state_scale = layout.regions[kStateScale].offset;
        work.copy = layout.regions[kReadCopy].offset;
        work.copy_bytes = layout.regions[kReadCopy].nbytes;
        work.scale = layout.regions[kReadScale].offset;
        work.scale_bytes = layout.regions[kReadScale].nbytes;
        work.nheads = p.spec.nheads;
        work.window = p.spec.window;
        work.stagger = p.spec.stagger != 0;
        work.count = p.count;
        launch_reset(work, static_cast<cudaStream_t>(stream));
    });
}

} // extern "C"
