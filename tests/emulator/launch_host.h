//! In the place of common/launch.h: a launch runs every block on the CPU, one
//! after another. Shared memory holds NaN before each, and what lies behind a
//! block's own must not change. Every second launch runs a block's last warp
//! first, every other pair of launches the last block first.
//! EMULATED_MULTIPROCESSORS in the environment: of the GPU that launchers cut
//! their grids for.
#pragma once

#include "checks.h"

#include <cstdlib>
#include <cstring>

namespace replayssm {

constexpr uint32_t kLaunchSharedBytes = 227 * 1024;
alignas(1024) extern char smem[kLaunchSharedBytes];

struct DeviceLimits {
    int device = 0;
    int multiprocessors = 132;
    int block_shared_bytes = kLaunchSharedBytes;
    bool early_launch = true;
    bool clusters = false;
    bool warpgroups = true;
};

inline DeviceLimits device_limits() {
    DeviceLimits limits;
    if (const char* count = std::getenv("EMULATED_MULTIPROCESSORS")) limits.multiprocessors = std::atoi(count);
    return limits;
}

template <auto kKernel, class Params>
void launch(const char* name, dim3 grid, int threads, size_t shared_bytes, cudaStream_t, const Params& params,
    bool = false, int cluster = 1) {
    if (cluster != 1) emulator::fail("clusters are not launched here");
    static int launches = 0;
    const int number = launches++;
    if (shared_bytes > kLaunchSharedBytes)
        fail(REPLAYSSM_UNSUPPORTED, name, " needs ", shared_bytes, " bytes of shared memory");
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    gridDim = {grid.x, grid.y, 1};
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned i = 0; i < grid.x; ++i) {
            std::memset(smem, 0xff, kLaunchSharedBytes);
            blockIdx = {number & 2 ? grid.x - 1 - i : i, y, 0};
            emulator::run_block(threads, number & 1, [&] { kKernel(params); });
            for (size_t at = shared_bytes; at < kLaunchSharedBytes; ++at)
                if (static_cast<unsigned char>(smem[at]) != 0xff) emulator::fail("a write past shared memory");
        }
}

} // namespace replayssm
