#include "step_launch.cuh"

void replayssm::launch_step_bf16_bf16(const Mamba2StepParams& p, cudaStream_t stream) {
    launch_step_tuned<__nv_bfloat16, __nv_bfloat16>(p, stream);
}
