#include "step_launch.cuh"

void replayssm::launch_step_generic_fp32(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream) {
    launch_step_generic<float>(p, state_dtype, stream);
}
