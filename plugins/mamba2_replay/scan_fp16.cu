#include "scan_launch.cuh"

void replayssm::launch_scan_fp16(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_scan<__half>(p, state_dtype, stream);
}
