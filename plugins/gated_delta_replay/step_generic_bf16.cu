#include "step_launch.cuh"

void replayssm::launch_delta_generic_bf16(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream) {
    launch_delta_generic<__nv_bfloat16>(p, state_dtype, stream);
}
