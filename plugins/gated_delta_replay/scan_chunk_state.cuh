//! State rows of a warp, from and to the slot; GDN's scale is in them (S, not S'), and 1 in the slot afterwards. Lane
//! (g, q) holds of rows g and g + 8 the columns 8 tile + 2 q, + 1.
#pragma once

#include "scan_chunk_tile.cuh"

namespace replayssm::delta_scan {

//! Element of the head's state at the first of the thread's rows.
template <class Traits>
__device__ __forceinline__ int64_t first_element(const ChunkWarp<Traits>& w) {
    const auto& shape = w.params.scan.shape;
    return (static_cast<int64_t>(w.head) * shape.headdim + w.row() + w.g()) * shape.dstate;
}

//! Fold one ring row: kn in pairs at `k` (times norm), log-decays at `g`, likewise in pairs where every channel has its
//! own, v of the thread's two rows.
template <bool kChannels, int kTiles>
__device__ __forceinline__ void fold_ring_row(float (&S)[kTiles][4], const __nv_bfloat16* k, const float* g, int dstate,
    float norm, float beta, const float (&v)[2]) {
    float held[2] = {0.0f, 0.0f}, decay[2];
    decay[0] = decay[1] = kChannels ? 1.0f : expf(*g);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * 8 >= dstate) continue;
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(k + tile * 8);
        const float key[2] = {low_bf16(pair) * norm, high_bf16(pair) * norm};
        if (kChannels) {
            const float2 log_decay = *reinterpret_cast<const float2*>(g + tile * 8);
            decay[0] = expf(log_decay.x), decay[1] = expf(log_decay.y);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            S[tile][i] *= decay[i & 1];
            held[i >> 1] = fmaf(S[tile][i], key[i & 1], held[i >> 1]);
        }
    }
    float d[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        held[r] += __shfl_xor_sync(kFullMask, held[r], 1);
        held[r] += __shfl_xor_sync(kFullMask, held[r], 2);
        d[r] = beta * (v[r] - held[r]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * 8 >= dstate) continue;
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(k + tile * 8);
        const float key[2] = {low_bf16(pair) * norm, high_bf16(pair) * norm};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            S[tile][i] = fmaf(d[i >> 1], key[i & 1], S[tile][i]);
    }
}

//! The warp's state rows from the slot, committed and pending rows folded. part: of the head, this block; it has a
//! cursor and a scale of its own.
template <class Traits>
__device__ __forceinline__ void load_state(
    const ChunkWarp<Traits>& w, int64_t number, int part, float (&S)[Traits::kTiles][4]) {
    constexpr bool kChannels = Traits::kChannels;
    const GatedDeltaScanParams& p = w.params.scan;
    const int K = p.shape.dstate;
    const char* slot = p.pool.base + number * p.pool.stride_bytes;
    const int64_t first = first_element(w);
    const bool scaled = !kChannels && p.pool.state_scale >= 0;
    const auto* scales = reinterpret_cast<const double*>(slot + p.pool.state_scale) + w.head * kCursorCopies;
    const float scale = scaled ? static_cast<float>(scales[part]) : 1.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const int n = tile * 8 + 2 * w.q();
        if (n >= K) continue;
        const float2 a = load_state_pair(slot + p.pool.state, w.params.state_dtype, first + n);
        const float2 b = load_state_pair(slot + p.pool.state, w.params.state_dtype, first + 8 * K + n);
        S[tile][0] = a.x, S[tile][1] = a.y, S[tile][2] = b.x, S[tile][3] = b.y;
        if constexpr (!kChannels) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[tile][i] *= scale;
        }
    }
    const Cursor cursor = reinterpret_cast<const Cursor*>(slot + p.pool.cursor)[w.head * kCursorCopies + part];
    const int64_t R = p.pool.ring_rows, group = w.key_head;
    const auto* ring_k = reinterpret_cast<const __nv_bfloat16*>(slot + p.pool.ring_k) + group * R * K + 2 * w.q();
    const auto* ring_v = reinterpret_cast<const __nv_bfloat16*>(slot + p.pool.ring_v) +
        static_cast<int64_t>(w.head) * R * p.shape.headdim + w.row() + w.g();
    const auto floats = [&](int64_t region, int64_t row) {
        return reinterpret_cast<const float*>(slot + region) + row * p.pool.scalar_stride;
    };
    const float *ring_norm = floats(p.pool.ring_k_rnorm, group), *ring_beta = floats(p.pool.ring_beta, w.head),
                *ring_g = kChannels ? reinterpret_cast<const float*>(slot + p.pool.ring_g) + w.head * R * K + 2 * w.q()
                                    : floats(p.pool.ring_g, w.head);
#pragma unroll 1
    for (int j = 0; j < cursor.history + cursor.pending; ++j) {
        const int64_t at = ring_row(cursor.origin, j, p.pool.ring_rows);
        const float v[2] = {to_float(ring_v[at * p.shape.headdim]), to_float(ring_v[at * p.shape.headdim + 8])};
        const float* g = ring_g + (kChannels ? at * K : at);
        fold_ring_row<kChannels>(S, ring_k + at * K, g, K, ring_norm[at], ring_beta[at], v);
    }
}

//! The warp's state rows into the slot.
template <class Traits>
__device__ __forceinline__ void store_state(
    const ChunkWarp<Traits>& w, int64_t number, const float (&S)[Traits::kTiles][4]) {
    const GatedDeltaScanParams& p = w.params.scan;
    const int K = p.shape.dstate;
    const int64_t first = first_element(w);
    char* slot = p.pool.base + number * p.pool.stride_bytes;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const int n = tile * 8 + 2 * w.q();
        if (n >= K) continue;
        store_state_pair(slot + p.pool.state, w.params.state_dtype, first + n, S[tile][0], S[tile][1]);
        store_state_pair(slot + p.pool.state, w.params.state_dtype, first + 8 * K + n, S[tile][2], S[tile][3]);
    }
}

} // namespace replayssm::delta_scan
