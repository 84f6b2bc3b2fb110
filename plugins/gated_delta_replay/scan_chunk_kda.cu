#include "scan_chunk_launch.cuh"

void replayssm::launch_scan_channels(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_chunks<true>(p, state_dtype, stream);
}
