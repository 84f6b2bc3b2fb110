//! In the place of common/async_copy.cuh: shared memory of the one block that runs, and addresses in it.
#pragma once

#include "numeric.cuh"

namespace replayssm {

constexpr uint32_t kSharedStart = 1024;       // address of the first byte: 0 would hide a missing base
constexpr uint32_t kSharedBytes = 227 * 1024; // of a block, on an H200

alignas(1024) extern char smem[kSharedBytes];

inline uint32_t shared_address(const void* pointer) {
    return kSharedStart + static_cast<uint32_t>(static_cast<const char*>(pointer) - smem);
}

inline char* at_shared(uint32_t address, uint32_t bytes) {
    if (address < kSharedStart || address + bytes > kSharedStart + kSharedBytes || address % bytes != 0) {
        emulator::fail("address outside shared memory, or not aligned");
    }
    return smem + (address - kSharedStart);
}

} // namespace replayssm
