//! What a step does while the kernels in front of it end (programmatic dependent launch): it looks up slots and cursors
//! and asks for the states and ring rows of its first blocks to come to L2. Nothing of that is used: the kernels in front
//! may still change all of it, and what a block works on it reads after them.
#pragma once

#include "../common/prefetch.cuh"
#include "step_parts.cuh"

namespace replayssm {

//! Live rows of a ring, `row_bytes` each: one or, around the ring's end, two pieces.
__device__ __forceinline__ void prefetch_ring(const char* ring, const RingPlan& plan, int ring_rows, int row_bytes) {
    const int before_end = min(plan.committed, ring_rows - plan.origin);
    prefetch_block(ring + plan.origin * row_bytes, before_end * row_bytes);
    prefetch_block(ring, (plan.committed - before_end) * row_bytes);
}

//! By one thread: what block `target` of the grid will probably read.
template <class act_t, class state_t, int kDstate>
__device__ __forceinline__ void prefetch_work(const Mamba2StepParams& p, int target) {
    StepBlock b;
    find_work<1>(p, target, b);
    const int64_t slot = peek_index(p.slots, b.row);
    if (slot < 0 || slot >= p.pool.slots) return;
    const int64_t accepted = p.accepted.data != nullptr ? peek_index(p.accepted, b.row) : -1;
    b.slot = p.pool.base + slot * p.pool.stride_bytes;
    const int head_bytes = p.shape.headdim * kDstate * static_cast<int>(sizeof(state_t));
#pragma unroll 1
    for (int k = 0; k < min(b.heads, p.ahead.heads); ++k)
        prefetch_block(b.slot + p.pool.state + (b.first_head + k) * head_bytes, head_bytes);
    const auto cursor =
        peek<Cursor>(reinterpret_cast<const Cursor*>(b.slot + p.pool.cursor) + b.first_head * kCursorCopies);
    RingPlan plan = plan_step(cursor, accepted, p.tokens);
    // Any words may stand there by now.
    if (plan.origin < 0 || plan.origin >= p.pool.ring_rows || plan.committed < 0) return;
    plan.committed = min(plan.committed, p.pool.ring_rows);
    const int row_bytes = p.shape.headdim * static_cast<int>(sizeof(act_t));
#pragma unroll 1
    for (int k = 0; k < b.heads; ++k) {
        prefetch_ring(b.slot + p.pool.ring_x + (b.first_head + k) * p.pool.ring_rows * row_bytes, plan,
            p.pool.ring_rows, row_bytes);
        prefetch_block(
            b.slot + p.pool.ring_dt + (b.first_head + k) * p.pool.ring_dt_stride * 4, p.pool.ring_dt_stride * 4);
    }
    constexpr int kScaleBytes = kCursorCopies * static_cast<int>(sizeof(double));
    if (sizeof(state_t) == sizeof(float))
        prefetch_block(b.slot + p.pool.state_scale + b.first_head * kScaleBytes, b.heads * kScaleBytes);
    constexpr int kBytes = kDstate * static_cast<int>(sizeof(act_t));
    prefetch_ring(b.slot + p.pool.ring_b + b.group * p.pool.ring_rows * kBytes, plan, p.pool.ring_rows, kBytes);
}

//! By the block: its lanes of one warp take a block of the grid each.
template <class act_t, class state_t, int kDstate>
__device__ __forceinline__ void look_ahead(const Mamba2StepParams& p) {
    const int warps = blockDim.x / kWarp;
    if (blockIdx.x >= p.ahead.stride || threadIdx.x / kWarp != warps / 2) return;
    const int target = blockIdx.x + threadIdx.x % kWarp * p.ahead.stride;
    if (target < p.ahead.blocks) prefetch_work<act_t, state_t, kDstate>(p, target);
    __syncwarp();
}

} // namespace replayssm
