#include "step_launch.cuh"

void replayssm::launch_step_bf16_fp32(const Mamba2StepParams& p, cudaStream_t stream) {
    launch_step_tuned<__nv_bfloat16, float>(p, stream);
}
