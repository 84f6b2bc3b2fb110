#include "scan_chunk_launch.cuh"

void replayssm::launch_scan_heads(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    launch_chunks<false>(p, state_dtype, stream);
}
