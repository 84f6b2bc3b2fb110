#include "scan_launch.cuh"

void replayssm::launch_delta_scan_bf16(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_delta_scan<__nv_bfloat16>(p, state_dtype, stream);
}
