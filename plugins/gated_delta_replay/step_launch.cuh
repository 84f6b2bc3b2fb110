//! Launch chain of the step: dtypes and sizes -> tuned or generic kernel. One .cu file per (act_dtype, state_dtype)
//! instantiates a part of it.
#pragma once

#include "../common/launch.h"
#include "step_single.cuh"

namespace replayssm {

//! Shared memory of a step; items: that a block takes at most.
template <class act_t, class state_t>
GatedDeltaStepShared step_shared(const GatedDeltaStepParams& p, bool tuned, int items) {
    const int part_rows = p.shape.headdim / (tuned ? 2 : 4);
    const uint32_t state_bytes = tuned ? static_cast<uint32_t>(part_rows * p.shape.dstate * sizeof(state_t)) : 0;
    return GatedDeltaStepShared(p.committed_cap, p.tokens, part_rows, p.shape.dstate, sizeof(act_t), items > 1 ? 2 : 1,
        tuned ? (items + 1) / 2 : 1, state_bytes, p.shape.channel_gates,
        !tuned                      ? DeltaStepForm::kSeveral
            : p.tokens == 1         ? (p.shape.channel_gates ? DeltaStepForm::kOneToken : DeltaStepForm::kSingle)
            : p.shape.channel_gates ? DeltaStepForm::kSeveral
                                    : DeltaStepForm::kTensor);
}

template <class Traits>
void launch_delta_kernel(GatedDeltaStepParams p, cudaStream_t stream) {
    p.shared = step_shared<typename Traits::act_t, typename Traits::state_t>(p, Traits::kTuned, p.segments[0].items);
    int blocks = 0;
    for (const GatedDeltaSegment& segment : p.segments)
        blocks += segment.blocks;
    const int threads = Traits::kThreadsPerRow * p.shape.headdim / Traits::kParts;
    const auto start = [&](auto kernel) {
        launch<kernel()>("gated_delta_step", dim3(blocks), threads, p.shared.bytes, stream, p, p.early_launch);
    };
    if constexpr (Traits::kSingle) {
        start([] { return gated_delta_single_kernel<Traits>; });
    } else {
        start([] { return gated_delta_step_kernel<Traits>; });
    }
}

//! headdim and dstate 128.
template <class act_t, class state_t>
void launch_delta_tuned(const GatedDeltaStepParams& p, cudaStream_t stream) {
    const bool one = p.tokens == 1;
    if (p.shape.channel_gates) {
        if (one) return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kChannel, true, true>>(p, stream);
        return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kChannel, true, false>>(p, stream);
    }
    if (one) return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kHead, true, true>>(p, stream);
    switch (tensor_groups(p.tokens)) {
        case 1: return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kHead, true, false, 1>>(p, stream);
        case 2: return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kHead, true, false, 2>>(p, stream);
        default: return launch_delta_kernel<DeltaTraits<act_t, state_t, Gate::kHead, true, false, 4>>(p, stream);
    }
}

//! Any sizes: four blocks a head.
template <class act_t>
void launch_delta_generic(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32:
            return launch_delta_kernel<DeltaTraits<act_t, float, Gate::kEither, false, false>>(p, stream);
        case REPLAYSSM_BFLOAT16:
            return launch_delta_kernel<DeltaTraits<act_t, __nv_bfloat16, Gate::kEither, false, false>>(p, stream);
        case REPLAYSSM_FLOAT16:
            return launch_delta_kernel<DeltaTraits<act_t, __half, Gate::kEither, false, false>>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; gated_delta_step has float32, bfloat16 and float16");
    }
}

//! Defined in step_<act>_<state>.cu.
void launch_delta_bf16_fp32(const GatedDeltaStepParams& p, cudaStream_t stream);
void launch_delta_bf16_bf16(const GatedDeltaStepParams& p, cudaStream_t stream);

//! Defined in step_generic_<act>.cu.
void launch_delta_generic_bf16(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream);
void launch_delta_generic_fp16(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream);
void launch_delta_generic_fp32(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream);

} // namespace replayssm
