//! dst's state = src's state with the first `count` rows of its ring (committed, then pending) folded in; dst's ring is
//! empty.
//! Grid (4 H, pairs): a block owns P / 4 state rows of one head of one pair. src = dst is allowed: a block reads all
//! that it needs of src's cursor and state before it writes dst's.
#pragma once

#include "ring_fold.cuh"

namespace replayssm {

template <class act_t, class state_t>
__global__ void __launch_bounds__(kMaxThreads, 1)
    mamba2_materialize_kernel(const __grid_constant__ Mamba2MaterializeParams p) {
    using Tile = StateTile<state_t, 0, 1>;
    extern __shared__ __align__(128) char smem[];
    const int quarter = blockIdx.x % kQuarter, head = blockIdx.x / kQuarter, pair = blockIdx.y;
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3, dstate = p.shape.dstate;
    const BatchShared s(Tile::padded_dstate(dstate), p.shape.headdim / kQuarter, false);
    const int64_t src = load_index(p.src, pair), dst = load_index(p.dst, pair), count = load_index(p.count, pair);
    if (src < 0 || src >= p.pool.slots || dst < 0 || dst >= p.pool.slots) return;
    const char* from = p.pool.base + src * p.pool.stride_bytes;
    char* to = p.pool.base + dst * p.pool.stride_bytes;
    const int64_t state = p.pool.state +
        ((static_cast<int64_t>(head) * p.shape.headdim + quarter * s.block_rows + own) * dstate) * sizeof(state_t);
    const int64_t cursor_at = p.pool.cursor + (head * kCursorCopies + quarter) * sizeof(Cursor);
    const Cursor cursor = *reinterpret_cast<const Cursor*>(from + cursor_at);
    const int rows = clamp_count(count, cursor.history + cursor.pending);
    Tile tile;
    tile.template load<false>(from + state, lane, dstate);
    BlockScale scale(load_scale<state_t>(p.pool, from, head, quarter));
    const float A = __ldg(p.A + head * p.A_stride);
    fold_ring<Tile, act_t>(tile, p.pool, p.shape, s, smem, from, head, quarter, A, cursor.origin, rows, scale);
    store_checkpoint(tile, p.pool, to, to + state, head, quarter, dstate, scale); // every thread has read the cursor
    if (threadIdx.x == 0)
        *reinterpret_cast<Cursor*>(to + cursor_at) = reset_cursor(dst, p.shape.window, p.shape.stagger);
}

} // namespace replayssm
