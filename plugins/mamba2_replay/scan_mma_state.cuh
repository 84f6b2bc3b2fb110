//! State rows of a warp, from and to the slot.
#pragma once

#include "scan_mma_tile.cuh"

namespace replayssm {

//! Element of the head's state at the first of the thread's rows.
template <class Traits>
__device__ __forceinline__ int64_t first_element(const ScanWarp<Traits>& w) {
    const Mamba2Shape& shape = w.params.scan.shape;
    return (static_cast<int64_t>(w.head()) * shape.headdim + w.sub() * 16 + w.g()) * shape.dstate;
}

//! The warp's state rows from the slot, committed and pending rows folded as a step folds them, then times their scale.
template <class Traits>
__device__ __forceinline__ void load_state(
    const ScanWarp<Traits>& w, int64_t number, int group, float (&S)[Traits::kTiles][4]) {
    const Mamba2ScanParams& p = w.params.scan;
    const int N = p.shape.dstate, P = p.shape.headdim, row = w.sub() * 16 + w.g();
    const char* slot = p.pool.base + number * p.pool.stride_bytes;
    const int64_t first = first_element(w);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const int n = tile * 8 + 2 * w.q();
        if (n >= N) continue;
        const float2 a = load_state_pair(slot + p.pool.state, w.params.state_dtype, first + n);
        const float2 b = load_state_pair(slot + p.pool.state, w.params.state_dtype, first + 8 * N + n);
        S[tile][0] = a.x, S[tile][1] = a.y, S[tile][2] = b.x, S[tile][3] = b.y;
    }
    const auto multiply = [&](float by) {
        if (by == 1.0f) return;
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[tile][i] = __fmul_rn(S[tile][i], by);
    };
    double scale = p.pool.state_scale >= 0 ? *state_scales(slot, p.pool, w.head()) : 1.0;
    const float A = reinterpret_cast<const float2*>(w.smem + w.layout().rates)[w.local()].x;
    const Cursor cursor = reinterpret_cast<const Cursor*>(slot + p.pool.cursor)[w.head() * kCursorCopies];
    const int64_t R = p.pool.ring_rows;
    const __nv_bfloat16* ring_x = reinterpret_cast<const __nv_bfloat16*>(slot + p.pool.ring_x) + w.head() * R * P + row;
    const __nv_bfloat16* ring_b =
        reinterpret_cast<const __nv_bfloat16*>(slot + p.pool.ring_b) + group * R * N + 2 * w.q();
    const float* ring_dt =
        reinterpret_cast<const float*>(slot + p.pool.ring_dt) + static_cast<int64_t>(w.head()) * p.pool.ring_dt_stride;
    for (int j = 0; j < cursor.history + cursor.pending; ++j) {
        const int at = ring_row(cursor.origin, j, p.pool.ring_rows);
        const float dt = ring_dt[at];
        const ScaleStep step = advance_scale(scale, decay_of(A, dt));
        const float input = __fmul_rn(dt, __frcp_rn(step.scale));
        const float upper = __fmul_rn(input, to_float(ring_x[at * P])),
                    lower = __fmul_rn(input, to_float(ring_x[at * P + 8]));
        multiply(step.renew);
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile) {
            if (tile * 8 >= N) continue;
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(ring_b + at * N + tile * 8);
            const float b[2] = {low_bf16(pair), high_bf16(pair)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[tile][i] = fold_element(S[tile][i], i < 2 ? upper : lower, b[i & 1]);
        }
    }
    multiply(static_cast<float>(scale));
}

//! The warp's state rows, with a scale of 1, and the cursors of its head, into the slot.
template <class Traits>
__device__ __forceinline__ void store_state(
    const ScanWarp<Traits>& w, int64_t number, const float (&S)[Traits::kTiles][4]) {
    const Mamba2ScanParams& p = w.params.scan;
    const int N = p.shape.dstate;
    const int64_t first = first_element(w);
    char* slot = p.pool.base + number * p.pool.stride_bytes;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const int n = tile * 8 + 2 * w.q();
        if (n >= N) continue;
        store_state_pair(slot + p.pool.state, w.params.state_dtype, first + n, S[tile][0], S[tile][1]);
        store_state_pair(slot + p.pool.state, w.params.state_dtype, first + 8 * N + n, S[tile][2], S[tile][3]);
    }
    if (w.sub() == 0 && w.lane() < kCursorCopies) {
        Cursor* cursors = reinterpret_cast<Cursor*>(slot + p.pool.cursor) + w.head() * kCursorCopies;
        cursors[w.lane()] = reset_cursor(number, p.shape.window, p.shape.stagger);
        if (p.pool.state_scale >= 0) state_scales(slot, p.pool, w.head())[w.lane()] = 1.0;
    }
}

} // namespace replayssm
