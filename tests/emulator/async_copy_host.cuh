//! In the place of common/async_copy.cuh: shared memory of the block that runs,
//! and addresses in it.
#pragma once

#include "numeric.cuh"

namespace replayssm {

constexpr uint32_t kSharedStart = 1024;       // address of the first byte: 0 would hide a missing base
constexpr uint32_t kSharedBytes = 227 * 1024; // of a block, on an H200
constexpr int kMostBlocks = 2;                // of a cluster

alignas(1024) extern char smem[kSharedBytes]; // of a cluster's first block
alignas(1024) inline char further_smem[(kMostBlocks - 1) * kSharedBytes];

inline char* shared_of(int rank) { return rank == 0 ? smem : further_smem + (rank - 1) * kSharedBytes; }

inline uint32_t shared_address(const void* pointer) {
    return kSharedStart + static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_of(emulator::rank));
}

inline char* at_shared(uint32_t address, uint32_t bytes, int rank = emulator::rank) {
    if (address < kSharedStart || address + bytes > kSharedStart + kSharedBytes || address % bytes != 0) {
        emulator::fail("address outside shared memory, or not aligned");
    }
    return shared_of(rank) + (address - kSharedStart);
}

inline emulator::Copies& own_copies() { return emulator::block->copies[threadIdx.x]; }

inline void complete(const std::vector<emulator::Copy>& copies) {
    for (const emulator::Copy& copy : copies) {
        char* target = at_shared(copy.target, copy.bytes);
        if (copy.exists) std::memcpy(target, copy.source, copy.bytes);
        if (!copy.exists) std::memset(target, 0, copy.bytes);
    }
}

template <int kBytes>
void copy_piece(void* target, const void* source) {
    if (reinterpret_cast<uintptr_t>(source) % kBytes != 0) emulator::fail("source of a copy is not aligned");
    own_copies().open.push_back({shared_address(target), source, true, kBytes});
}

inline void wait_for_own_copies() {
    complete(own_copies().open);
    own_copies().open.clear();
}

} // namespace replayssm
