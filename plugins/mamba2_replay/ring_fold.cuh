//! Fold ring rows straight from global memory, in batches: what scan (a slot with an initial state) and materialize
//! share.
//! A block owns a quarter of a head: P / 4 state rows, one per eight lanes.
#pragma once

#include "step_shared.cuh"

namespace replayssm {

constexpr int kBatch = 16;  // rows or tokens that are in shared memory at a time
constexpr int kQuarter = 4; // blocks that share a head
constexpr int kMaxThreads = 2 * kMaxHeadDim;

//! What a row or token of a batch needs besides x, B and C: the elements times `renew`, then input = dt / scale folds
//! it; what is read behind it is worth `scale`.
struct alignas(16) BatchRow {
    float renew, input, scale;
};

//! By the block's first warp: lane j has decay and dt of row j < count, behind them 1 and 0. Moves `scale` past the rows.
__device__ __forceinline__ void put_batch_rows(BatchRow* rows, double& scale, float decay, float dt, int count) {
    int end;
    const RowScale step = advance_rows(scale, decay, count, end);
    if (static_cast<int>(threadIdx.x) < count)
        rows[threadIdx.x] = {step.renew, __fmul_rn(dt, step.inverse), step.scale};
}

//! Shared memory of one batch.
struct BatchShared {
    uint32_t B = 0;    // fp32 [kBatch][n_pad]
    uint32_t C = 0;    // fp32 [kBatch][n_pad], scan only
    uint32_t x = 0;    // fp32 [kBatch][block_rows]
    uint32_t rows = 0; // BatchRow [kBatch]
    uint32_t bytes = 0;
    int n_pad = 0;
    int block_rows = 0;

    __host__ __device__ BatchShared(int padded_n, int state_rows, bool with_c) {
        n_pad = padded_n;
        block_rows = state_rows;
        uint32_t end = 0;
        B = take_shared(end, kBatch * n_pad * 4);
        C = take_shared(end, with_c ? kBatch * n_pad * 4 : 0);
        x = take_shared(end, kBatch * block_rows * 4);
        rows = take_shared(end, kBatch * sizeof(BatchRow));
        bytes = end;
    }
};

//! The scale of a head's checkpoint as a block with `quarter` of it reads it: of fp32 states; 16-bit ones have none.
template <class state_t>
__device__ __forceinline__ double load_scale(const Mamba2Slots& pool, const char* slot, int head, int quarter) {
    return sizeof(state_t) == sizeof(float) ? state_scales(slot, pool, head)[quarter] : 1.0;
}

//! A scale over the batches of a block: exact in the first warp, which moves it (put_batch_rows), and rounded as the
//! elements meet it in every thread, which has it from the rows (BatchRow).
struct BlockScale {
    double exact = 1.0;
    float rounded = 1.0f;

    BlockScale() = default;
    __device__ __forceinline__ explicit BlockScale(double scale) : exact(scale), rounded(static_cast<float>(scale)) {}
};

//! By the block: the checkpoint's part in `tile`, which is `scale` times it, to `state`; the scale by one thread, when
//! all have read what was there.
template <class Tile>
__device__ __forceinline__ void store_checkpoint(Tile& tile, const Mamba2Slots& pool, char* slot, char* state, int head,
    int quarter, int dstate, const BlockScale& scale) {
    constexpr bool kScaled = sizeof(typename Tile::state_t) == sizeof(float);
    if (!kScaled) tile.multiply(scale.rounded);
    tile.store(state, threadIdx.x & 7, dstate);
    __syncthreads();
    if (kScaled && threadIdx.x == 0) state_scales(slot, pool, head)[quarter] = scale.exact;
}

//! By the block: fold logical rows 0..count-1 of the ring into tile, which is worth `scale` times it. Every thread of
//! the block calls it.
template <class Tile, class act_t>
__device__ __forceinline__ void fold_ring(Tile& tile, const Mamba2Slots& pool, const Mamba2Shape& shape,
    const BatchShared& s, char* smem, const char* slot, int head, int quarter, float A, int origin, int count,
    BlockScale& scale) {
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3;
    float* B = reinterpret_cast<float*>(smem + s.B);
    float* x = reinterpret_cast<float*>(smem + s.x);
    BatchRow* batch = reinterpret_cast<BatchRow*>(smem + s.rows);
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
        if (threadIdx.x < kWarp) {
            const int j = threadIdx.x;
            const float dt = j < rows ? ring_dt[ring_row(first, j, pool.ring_rows)] : 0.0f;
            put_batch_rows(batch, scale.exact, decay_of(A, dt), dt, rows);
        }
        __syncthreads();
        for (int j = 0; j < rows; ++j) {
            const BatchRow row = batch[j];
            const float w[1] = {__fmul_rn(row.input, x[j * s.block_rows + own])};
            tile.multiply(row.renew);
            tile.fold(w, B + j * s.n_pad, lane, shape.dstate);
            scale.rounded = row.scale;
        }
        __syncthreads();
    }
    if (sizeof(typename Tile::state_t) == sizeof(float)) return;
    tile.multiply(scale.rounded);
    scale = BlockScale();
}

} // namespace replayssm
