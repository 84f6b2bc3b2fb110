//! Fold ring rows straight from global memory, in batches: what scan (a slot with an initial state) and materialize
//! share. A block owns a quarter of a head: V / 4 state rows, one per eight lanes; 2 V threads.
#pragma once

#include "fold.cuh"

namespace replayssm {

constexpr int kDeltaBatch = 16;  // rows that are in shared memory at a time
constexpr int kDeltaQuarter = 4; // blocks that share a head
constexpr int kDeltaMaxThreads = 2 * kMaxHeadDim;

//! Shared memory of one batch.
struct DeltaBatchShared {
    uint32_t keys = 0;   // fp32 [kDeltaBatch][K]: normalised
    uint32_t decays = 0; // fp32 [kDeltaBatch][K]: exp(g), KDA
    uint32_t v = 0;      // fp32 [kDeltaBatch][block_rows]
    uint32_t fold = 0;   // RowWeights [kDeltaBatch]
    uint32_t bytes = 0;
    int block_rows = 0;

    __host__ __device__ DeltaBatchShared(const GatedDeltaShape& shape) {
        block_rows = shape.headdim / kDeltaQuarter;
        uint32_t end = 0;
        const uint32_t row = shape.dstate * 4;
        keys = take_shared(end, kDeltaBatch * row);
        decays = take_shared(end, shape.channel_gates ? kDeltaBatch * row : 0);
        v = take_shared(end, kDeltaBatch * block_rows * 4);
        fold = take_shared(end, kDeltaBatch * sizeof(RowWeights));
        bytes = end;
    }
};

//! By the block: fold logical rows 0..count-1 of the ring into tile, which is to be multiplied by `scale`, in front of
//! the rows and, in the first warp, behind them. Returns the scale behind them in fp32. Every thread of the block calls
//! it.
template <class Tile, class act_t>
__device__ __forceinline__ float fold_delta_ring(Tile& tile, const GatedDeltaSlots& pool, const GatedDeltaShape& shape,
    const DeltaBatchShared& s, char* smem, const char* slot, int head, int quarter, int origin, int count,
    double& scale) {
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3, K = shape.dstate, R = pool.ring_rows;
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, group = head / shape.heads_per_group;
    float* keys = reinterpret_cast<float*>(smem + s.keys);
    float* decays = reinterpret_cast<float*>(smem + s.decays);
    float* v = reinterpret_cast<float*>(smem + s.v);
    RowWeights* fold = reinterpret_cast<RowWeights*>(smem + s.fold);
    const act_t* ring_k = reinterpret_cast<const act_t*>(slot + pool.ring_k) + group * R * K;
    const act_t* ring_v =
        reinterpret_cast<const act_t*>(slot + pool.ring_v) + head * R * shape.headdim + quarter * s.block_rows;
    const float* rnorm = reinterpret_cast<const float*>(slot + pool.ring_k_rnorm) + group * pool.scalar_stride;
    const float* beta = reinterpret_cast<const float*>(slot + pool.ring_beta) + head * pool.scalar_stride;
    const float* g =
        reinterpret_cast<const float*>(slot + pool.ring_g) + head * (shape.channel_gates ? R * K : pool.scalar_stride);
    float rounded = static_cast<float>(scale);
    for (int base = 0; base < count; base += kDeltaBatch) {
        const int rows = min(kDeltaBatch, count - base), first = ring_row(origin, base, R);
        for (int j = warp; j < rows; j += warps) {
            const int row = ring_row(first, j, R);
            RowPieces<2> piece;
            piece.load(ring_k + row * K, K);
            piece.scale(rnorm[row]);
            piece.store(keys + j * K, K);
            if (!shape.channel_gates) continue;
            piece.load(g + row * K, K);
            piece.exponential().store(decays + j * K, K);
        }
        for (int i = threadIdx.x; i < rows * s.block_rows; i += blockDim.x) {
            const int j = i / s.block_rows, at = i % s.block_rows;
            v[i] = to_float(ring_v[ring_row(first, j, R) * shape.headdim + at]);
        }
        if (threadIdx.x < kWarp) {
            const int j = threadIdx.x, row = ring_row(first, min(j, rows - 1), R);
            const float own = shape.channel_gates || j >= rows ? 1.0f : expf(g[row]);
            const RowWeights weights =
                shape.channel_gates ? channel_row(beta[row]) : scale_rows(scale, own, beta[row], rows);
            if (j < rows) fold[j] = weights;
        }
        __syncthreads();
        for (int j = 0; j < rows; ++j) {
            const float v_own = v[j * s.block_rows + own];
            if (shape.channel_gates) {
                tile.template fold<true>({fold[j], decays + j * K, keys + j * K}, v_own, lane, K);
            } else {
                tile.template fold<false>({fold[j], nullptr, keys + j * K}, v_own, lane, K);
            }
            rounded = fold[j].scale;
        }
        __syncthreads();
    }
    return rounded;
}

} // namespace replayssm
