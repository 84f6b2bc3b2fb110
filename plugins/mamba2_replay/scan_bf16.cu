#include "scan_launch.cuh"

void replayssm::launch_scan_bf16(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_scan<__nv_bfloat16>(p, state_dtype, stream);
}
