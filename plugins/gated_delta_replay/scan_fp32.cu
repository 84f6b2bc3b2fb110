#include "scan_launch.cuh"

void replayssm::launch_delta_scan_fp32(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_delta_scan<float>(p, state_dtype, stream);
}
