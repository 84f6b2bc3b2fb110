#include "step_launch.cuh"

void replayssm::launch_delta_generic_fp16(const GatedDeltaStepParams& p, int state_dtype, cudaStream_t stream) {
    launch_delta_generic<__half>(p, state_dtype, stream);
}
