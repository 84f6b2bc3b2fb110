#include "step_launch.cuh"

void replayssm::launch_step_generic_bf16(const Mamba2StepParams& p, int state_dtype, cudaStream_t stream) {
    launch_step_generic<__nv_bfloat16>(p, state_dtype, stream);
}
