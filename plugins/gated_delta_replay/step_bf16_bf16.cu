#include "step_launch.cuh"

void replayssm::launch_delta_bf16_bf16(const GatedDeltaStepParams& p, cudaStream_t stream) {
    launch_delta_tuned<__nv_bfloat16, __nv_bfloat16>(p, stream);
}
