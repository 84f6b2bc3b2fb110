// Copy the keys and values of every row's tokens into the cache of its slot; bytes move, nothing is computed.
//   cache[slot_i, c, h, position_it, :] = new_kv[i, t, c, h, :]      c < parts (0: key, 1: value), t < counts_i
// new_kv       [rows, tokens, parts, kv_heads, head_dim]         in      dense
// cache        [slots, parts, kv_heads, max_positions, head_dim] inout   dense
// slot_mapping [rows]           int32 or int64   in   outside [0, slots): the row is padding, nothing is written
// positions    [rows, tokens]   int32 or int64   in   outside [0, max_positions): the token is passed over
// counts       [rows]           int32 or int64   in   optional: tokens of the row that count
// Grid (rows * tokens) along x; one block copies one token: parts * kv_heads vectors of head_dim, in units of unit_t.
// No barrier, no shared memory. Two tokens with one (slot, position) race; callers do not pass such.
#pragma once

#include "../common/numeric.cuh"
#include "params.h"

namespace replayssm {

constexpr int kKvThreads = 128;

template <class unit_t>
__global__ void __launch_bounds__(kKvThreads) kv_append_kernel(const __grid_constant__ KvAppendParams p) {
    const int64_t token = blockIdx.x;
    const int64_t row = token / p.tokens;
    const int64_t slot = load_index(p.slot_mapping, row);
    if (slot < 0 || slot >= p.slots) return;
    if (p.counts.data != nullptr && token % p.tokens >= load_index(p.counts, row)) return;
    const int64_t position = load_index(p.positions, token);
    if (position < 0 || position >= p.max_positions) return;

    const int units = p.head_bytes / static_cast<int>(sizeof(unit_t)); // of one head
    const auto* source = reinterpret_cast<const unit_t*>(p.new_kv) + token * p.vectors * units;
    auto* target = reinterpret_cast<unit_t*>(p.cache) + (slot * p.vectors * p.max_positions + position) * units;
    for (int i = threadIdx.x; i < p.vectors * units; i += kKvThreads) {
        const int vector = i / units, unit = i - vector * units;
        target[vector * p.max_positions * units + unit] = source[i];
    }
}

} // namespace replayssm
