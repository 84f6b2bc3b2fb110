//! Launch chain of the step: dtypes and dstate -> tuned or generic kernel -> cut of the heads into blocks.
//! One .cu file per (act_dtype, state_dtype) instantiates a part of it.
#pragma once

#include "../common/launch.h"
#include "step_kernel.cuh"

namespace replayssm {

//! Shared memory of a block that takes `heads` heads.
inline StepShared step_shared(const Mamba2StepParams& p, int state_bytes, int act_bytes, int heads, bool tuned) {
    const int chunk = 8 * 16 / state_bytes, padded_dstate = (p.shape.dstate + chunk - 1) / chunk * chunk; // fold.cuh
    const StepForm form = !tuned ? StepForm::kGeneric : p.tokens == 1 ? StepForm::kOneToken : StepForm::kTensor;
    const uint32_t state = tuned ? p.shape.headdim * p.shape.dstate * state_bytes : 0;
    return StepShared(p.committed_cap, p.tokens, tuned ? p.shape.headdim : p.shape.headdim / 4, padded_dstate,
        act_bytes, heads, state, p.in.z.data != nullptr, form);
}

template <class act_t, class state_t, int kDstate>
void launch_step_kernel(Mamba2StepParams p, cudaStream_t stream) {
    using Traits = StepTraits<state_t, kDstate, true>;
    constexpr bool kTuned = kDstate != 0; // the generic kernel is one for any number of tokens
    const int block_rows = p.shape.headdim / Traits::kSplit;
    p.shared = step_shared(p, sizeof(state_t), sizeof(act_t), p.segments[0].heads, kTuned);
    p.row_vectors = Divisor(block_rows / row_access_elems<act_t, Traits::kSplit>());
    p.heads_per_group = Divisor(p.shape.heads_per_group);
    int blocks = 0;
    for (const StepSegment& segment : p.segments)
        blocks += segment.blocks;
    const int threads = Traits::kThreadsPerRow * p.shape.headdim;
    if (p.tokens == 1 && kTuned) {
        launch<mamba2_step_kernel<act_t, state_t, kDstate, kTuned>>(
            "mamba2_step", dim3(blocks), threads, p.shared.bytes, stream, p, p.early_launch);
    } else {
        launch<mamba2_step_kernel<act_t, state_t, kDstate, false>>(
            "mamba2_step", dim3(blocks), threads, p.shared.bytes, stream, p, p.early_launch);
    }
}

constexpr int kTunedHeaddim = 128; // most state rows of a tuned kernel's block
inline bool is_tuned_dstate(int dstate) { return dstate == 64 || dstate == 128 || dstate == 256; }

//! is_tuned_dstate(p.shape.dstate) and headdim up to kTunedHeaddim: a block has whole heads.
template <class act_t, class state_t>
void launch_step_tuned(const Mamba2StepParams& p, cudaStream_t stream) {
    switch (p.shape.dstate) {
        case 64: return launch_step_kernel<act_t, state_t, 64>(p, stream);
        case 128: return launch_step_kernel<act_t, state_t, 128>(p, stream);
        case 256: return launch_step_kernel<act_t, state_t, 256>(p, stream);
        default: fail(REPLAYSSM_UNSUPPORTED, "spec.dstate is ", p.shape.dstate, "; tuned kernels have 64, 128 and 256");
    }
}

//! Defined in step_<act>_<state>.cu.
void launch_step_bf16_fp32(const Mamba2StepParams& p, cudaStream_t stream);
void launch_step_bf16_bf16(const Mamba2StepParams& p, cudaStream_t stream);

//! Defined in step_generic_<act>.cu, for any dstate: four blocks a head.
void launch_step_generic_bf16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);
void launch_step_generic_fp16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);
void launch_step_generic_fp32(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);

template <class act_t>
void launch_step_generic(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32: return launch_step_kernel<act_t, float, 0>(p, stream);
        case REPLAYSSM_BFLOAT16: return launch_step_kernel<act_t, __nv_bfloat16, 0>(p, stream);
        case REPLAYSSM_FLOAT16: return launch_step_kernel<act_t, __half, 0>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; mamba2_step has float32, bfloat16 and float16");
    }
}

} // namespace replayssm
