//! Fold ring rows straight from global memory, in batches: what scan (a slot with an initial state) and materialize
//! share.
//! A block owns a quarter of a head: P / 4 state rows, one per eight lanes.
#pragma once

#include "step_shared.cuh"

namespace replayssm {

constexpr int kBatch = 16;  // rows or tokens that are in shared memory at a time
constexpr int kQuarter = 4; // blocks that share a head
constexpr int kMaxThreads = 2 * kMaxHeadDim;

//! Shared memory of one batch.
struct BatchShared {
    uint32_t B = 0;    // fp32 [kBatch][n_pad]
    uint32_t C = 0;    // fp32 [kBatch][n_pad], scan only
    uint32_t x = 0;    // fp32 [kBatch][block_rows]
    uint32_t step = 0; // float2 {decay, dt} [kBatch]
    uint32_t bytes = 0;
    int n_pad = 0;
    int block_rows = 0;

    __host__ __device__ BatchShared(int padded_n, int rows, bool with_c) {
        n_pad = padded_n;
        block_rows = rows;
        uint32_t end = 0;
        B = take_shared(end, kBatch * n_pad * 4);
        C = take_shared(end, with_c ? kBatch * n_pad * 4 : 0);
        x = take_shared(end, kBatch * block_rows * 4);
        step = take_shared(end, kBatch * 8);
        bytes = end;
    }
};

//! By the block: fold logical rows 0..count-1 of the ring into tile. Every thread of the block calls it.
template <class Tile, class act_t>
__device__ __forceinline__ void fold_ring(Tile& tile, const Mamba2Slots& pool, const Mamba2Shape& shape,
    const BatchShared& s, char* smem, const char* slot, int head, int quarter, float A, int origin, int count) {
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3;
    float* B = reinterpret_cast<float*>(smem + s.B);
    float* x = reinterpret_cast<float*>(smem + s.x);
    float2* step = reinterpret_cast<float2*>(smem + s.step);
    const float* ring_dt =
        reinterpret_cast<const float*>(slot + pool.ring_dt) + static_cast<int64_t>(head) * pool.ring_dt_stride;
    const act_t* ring_x = reinterpret_cast<const act_t*>(slot + pool.ring_x) +
        static_cast<int64_t>(head) * pool.ring_rows * shape.headdim + quarter * s.block_rows;
    for (int base = 0; base < count; base += kBatch) {
        const int rows = min(kBatch, count - base), first = ring_row(origin, base, pool.ring_rows);
        load_ring_b<Tile, act_t>(pool, slot, head / shape.heads_per_group, shape.dstate, first, rows, B, s.n_pad);
        for (int i = threadIdx.x; i < rows * s.block_rows; i += blockDim.x) {
            const int j = i / s.block_rows, at = i % s.block_rows;
            x[i] = to_float(ring_x[ring_row(first, j, pool.ring_rows) * shape.headdim + at]);
        }
        if (threadIdx.x < rows) {
            const float dt = ring_dt[ring_row(first, threadIdx.x, pool.ring_rows)];
            step[threadIdx.x] = make_float2(decay_of(A, dt), dt);
        }
        __syncthreads();
        for (int j = 0; j < rows; ++j) {
            const float dtx[1] = {__fmul_rn(step[j].y, x[j * s.block_rows + own])};
            tile.fold(step[j].x, dtx, B + j * s.n_pad, lane, shape.dstate);
        }
        __syncthreads();
    }
}

} // namespace replayssm
