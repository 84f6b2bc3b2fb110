//! In the place of common/async_copy.cuh, bulk copies included: they take place
//! at once, so a buffer that somebody still reads is seen to change.
#pragma once

#include "async_copy_host.cuh"

namespace replayssm {

class CopyBarrier {
public:
    static void init(uint64_t* barrier) { *barrier = 0; }

    //! Until fill number `fill` has been made. A GPU has its parity alone: behind the next fill it would wait for ever.
    static void wait(uint64_t* barrier, int fill) {
        while (*static_cast<volatile uint64_t*>(barrier) <= static_cast<uint64_t>(fill))
            emulator::let_others_run();
        if (*barrier > static_cast<uint64_t>(fill) + 1) emulator::fail("a fill was made before all had seen the last");
    }
};

using WarpCopyBarrier = CopyBarrier;

enum class CopyUse { kReadOnce, kPlain, kWrittenBack };
inline uint64_t copy_policy(CopyUse) { return 0; }

//! By the calling thread.
inline void copy_now(void* target, const void* source, uint32_t bytes, uint64_t* barrier) {
    const bool aligned = reinterpret_cast<uintptr_t>(source) % 16 == 0 && shared_address(target) % 16 == 0;
    if (!aligned || bytes % 16 != 0) emulator::fail("a bulk copy is not aligned");
    if (static_cast<char*>(target) < smem || static_cast<char*>(target) + bytes > smem + kSharedBytes)
        emulator::fail("a bulk copy leaves shared memory");
    std::memcpy(target, source, bytes);
    ++*barrier;
    ++emulator::block->progress;
}

inline void copy_block(void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t) {
    if (threadIdx.x == 0) copy_now(target, source, bytes, barrier);
}

inline void copy_warp_block(void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t) {
    if (threadIdx.x % kWarp == 0) copy_now(target, source, bytes, barrier);
}

//! What the kernels in front do last, by the first thread that waits for them.
inline std::function<void()> end_previous_kernels;
inline void wait_for_previous_kernels() {
    if (!end_previous_kernels) return;
    end_previous_kernels();
    end_previous_kernels = nullptr;
}
inline void let_next_kernel_start() {}

} // namespace replayssm
