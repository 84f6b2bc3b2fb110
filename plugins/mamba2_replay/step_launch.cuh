//! Launch chain of the step: dtypes and dstate -> tuned or generic kernel -> cut of the heads into blocks.
//! One .cu file per (act_dtype, state_dtype) instantiates a part of it.
#pragma once

#include "../common/launch.h"
#include "step_kernel.cuh"

namespace replayssm {

template <class act_t, class state_t, int kDstate, int kSplit>
size_t step_shared_bytes(const Mamba2StepParams& p) {
    using Tile = StateTile<state_t, kDstate, 4 / kSplit>;
    const int block_rows = p.shape.headdim / kSplit;
    const uint32_t state_bytes = kSplit < 4 ? static_cast<uint32_t>(block_rows * p.shape.dstate * sizeof(state_t)) : 0;
    return StepShared(p.committed_cap, p.tokens, block_rows, Tile::padded_dstate(p.shape.dstate), sizeof(act_t),
        p.heads_per_block > 1 ? 2 : 1, state_bytes, p.in.z.data != nullptr)
        .bytes;
}

template <class act_t, class state_t, int kDstate, int kSplit>
void launch_step_split(const Mamba2StepParams& p, cudaStream_t stream) {
    const dim3 grid(p.shape.nheads / p.heads_per_block * kSplit, p.rows);
    const size_t shared = step_shared_bytes<act_t, state_t, kDstate, kSplit>(p);
    const int threads = 2 * p.shape.headdim;
    if (p.tokens == 1 && kDstate != 0) {
        launch<mamba2_step_kernel<act_t, state_t, kDstate, kSplit, kDstate != 0>>("mamba2_step", grid, threads, shared, stream, p);
    } else {
        launch<mamba2_step_kernel<act_t, state_t, kDstate, kSplit, false>>("mamba2_step", grid, threads, shared, stream, p);
    }
}

//! Tuned for one dstate: a head may be one block's work, or that of two or four.
template <class act_t, class state_t, int kDstate>
void launch_step_tuned(const Mamba2StepParams& p, int splits, cudaStream_t stream) {
    if (splits == 1) return launch_step_split<act_t, state_t, kDstate, 1>(p, stream);
    if (splits == 2) return launch_step_split<act_t, state_t, kDstate, 2>(p, stream);
    return launch_step_split<act_t, state_t, kDstate, 4>(p, stream);
}

//! Defined in step_<act>_<state>.cu, for dstate 128.
void launch_step_bf16_fp32(const Mamba2StepParams& p, int splits, cudaStream_t stream);
void launch_step_bf16_bf16(const Mamba2StepParams& p, int splits, cudaStream_t stream);

//! Defined in step_generic_<act>.cu, for any dstate: four blocks a head.
void launch_step_generic_bf16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);
void launch_step_generic_fp16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);
void launch_step_generic_fp32(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream);

template <class act_t>
void launch_step_generic(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32: return launch_step_split<act_t, float, 0, 4>(p, stream);
        case REPLAYSSM_BFLOAT16: return launch_step_split<act_t, __nv_bfloat16, 0, 4>(p, stream);
        case REPLAYSSM_FLOAT16: return launch_step_split<act_t, __half, 0, 4>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; mamba2_step has float32, bfloat16 and float16");
    }
}

} // namespace replayssm
