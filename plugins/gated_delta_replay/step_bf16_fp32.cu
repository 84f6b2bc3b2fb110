#include "step_launch.cuh"

void replayssm::launch_delta_bf16_fp32(const GatedDeltaStepParams& p, cudaStream_t stream) {
    launch_delta_tuned<__nv_bfloat16, float>(p, stream);
}
