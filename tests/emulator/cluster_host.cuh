//! In the place of common/cluster.cuh: blocks of a cluster run at once, each
//! with shared memory of its own. What one sends to another is there at once, so
//! a buffer that somebody still reads is seen to change. Fences are not seen.
#pragma once

#include "tensor_core.cuh"

#define REPLAYSSM_CLUSTERS 1

namespace replayssm {

inline void meet_cluster() { emulator::meet_cluster(); }
inline void publish_to_copies() {}

inline void arrive_in_block(uint32_t barrier, int rank) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) SplitBarrier::arrive_in(barrier, rank);
}

inline void send_to_block(uint32_t address, uint32_t bytes, uint32_t barrier, int rank) {
    if (rank == emulator::rank || address % 16 != 0 || bytes % 16 != 0)
        emulator::fail("a copy that blocks do not make");
    for (uint32_t at = address; at < address + bytes; at += 16)
        std::memcpy(at_shared(at, 16, rank), at_shared(at, 16), 16);
    SplitBarrier::arrive_in(barrier, rank);
}

} // namespace replayssm
