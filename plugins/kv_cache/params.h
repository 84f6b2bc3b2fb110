//! What the append kernel is launched with. Pointers are device memory; all arrays are dense.
#pragma once

#include "../c_api/replayssm.h"

#include <cuda_runtime.h>

namespace replayssm {

struct KvAppendParams {
    const char* new_kv = nullptr;   // [rows, tokens, parts, kv_heads, head_bytes]
    char* cache = nullptr;          // [slots, parts, kv_heads, max_positions, head_bytes]
    replayssm_index slot_mapping{}; // [rows]
    replayssm_index positions{};    // [rows, tokens]
    replayssm_index counts{};       // [rows], or absent
    int rows = 0;
    int tokens = 0;
    int vectors = 0;    // parts * kv_heads
    int head_bytes = 0; // head_dim times the size of an element
    int64_t slots = 0;
    int64_t max_positions = 0;
};

//! Widest unit, 16, 8, 4 or 2 bytes, that divides one head's vector and both base addresses.
int kv_append_unit(const KvAppendParams& params);

void launch_kv_append(const KvAppendParams& params, cudaStream_t stream);

} // namespace replayssm
