#include "step_launch.cuh"

void replayssm::launch_step_generic_fp16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream) {
    launch_step_generic<__half>(p, state_dtype, stream);
}
