#include "step_launch.cuh"

void replayssm::launch_delta_generic_fp32(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream) {
    launch_delta_generic<float>(p, state_dtype, stream);
}
