//! Launches of materialize (materialize_kernel.cuh).
#include "../common/launch.h"
#include "materialize_kernel.cuh"

namespace replayssm {
namespace {

template <class act_t, class state_t>
void launch_kernel(const Mamba2MaterializeParams& p, cudaStream_t stream) {
    using Tile = StateTile<state_t, 0, 1>;
    const BatchShared s(Tile::padded_dstate(p.shape.dstate), p.shape.headdim / kQuarter, false);
    launch<mamba2_materialize_kernel<act_t, state_t>>(
        "materialize", dim3(p.shape.nheads * kQuarter, p.pairs), 2 * p.shape.headdim, s.bytes, stream, p);
}

template <class act_t>
void launch_act(const Mamba2MaterializeParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32: return launch_kernel<act_t, float>(p, stream);
        case REPLAYSSM_BFLOAT16: return launch_kernel<act_t, __nv_bfloat16>(p, stream);
        case REPLAYSSM_FLOAT16: return launch_kernel<act_t, __half>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; materialize has float32, bfloat16 and float16");
    }
}

} // namespace

void launch_mamba2_materialize(const Mamba2MaterializeParams& p, int state_dtype, int act_dtype, cudaStream_t stream) {
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_act<__nv_bfloat16>(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_act<__half>(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_act<float>(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; materialize has bfloat16, float16 and float32");
    }
}

} // namespace replayssm
