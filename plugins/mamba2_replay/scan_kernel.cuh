//! Scan of packed prompts, token by token: y for every token, the final state in the slot, an empty ring, a reset
//! cursor.
//!
//!   S <- exp(A dt_t) S + (dt_t x_t) B_t;  y_t = S C_t (+ D x_t) (* silu(z_t))                     docs/math.md
//!
//! The fold is the step's own (fold.cuh), so prefill(n) and one step leaves the bits that prefill(n + 1) leaves. S is
//! scale S' throughout; a 16-bit state is multiplied and rounded behind the last token.
//! x, z, y [tokens, H, P] act_t; B, C [tokens, G, N] act_t; dt [tokens, H]; sequence i = tokens cu_seqlens[i] ..
//! [i+1]-1.
//! Grid (4 H, sequences): a block owns P / 4 state rows of one head, 2 P threads, one state row per eight lanes.
//! Barriers: two a batch of 16 tokens (loaded -> used -> may be overwritten).
//! slot outside the pool: zero output for the sequence's tokens, no memory touched.
#pragma once

#include "ring_fold.cuh"

namespace replayssm {

//! By the block: tokens base .. base + count - 1 of one sequence into shared memory; the first warp moves `scale` past
//! them.
template <class Tile, class act_t>
__device__ __forceinline__ void load_batch(const Mamba2ScanParams& p, const BatchShared& s, char* smem, int64_t base,
    int count, int head, int64_t first_row, float A, double& scale) {
    const int64_t group = head / p.shape.heads_per_group;
    load_token_rows<Tile, act_t>(p.in.B, base * p.in.B.strides[1] + group * p.in.B.strides[2], count, p.shape.dstate,
        reinterpret_cast<float*>(smem + s.B), s.n_pad);
    load_token_rows<Tile, act_t>(p.in.C, base * p.in.C.strides[1] + group * p.in.C.strides[2], count, p.shape.dstate,
        reinterpret_cast<float*>(smem + s.C), s.n_pad);
    const act_t* x =
        static_cast<const act_t*>(p.in.x.data) + base * p.in.x.strides[1] + head * p.in.x.strides[2] + first_row;
    float* out = reinterpret_cast<float*>(smem + s.x);
    for (int i = threadIdx.x; i < count * s.block_rows; i += blockDim.x) {
        out[i] = to_float(x[i / s.block_rows * p.in.x.strides[1] + i % s.block_rows]);
    }
    if (threadIdx.x >= kWarp) return;
    float dt = 0.0f, decay = 1.0f;
    if (threadIdx.x < count) {
        RawStep raw;
        raw.load(p.in.dt, (base + threadIdx.x) * p.in.dt.strides[1] + head * p.in.dt.strides[2], p.in.dt_bias,
            head * p.in.dt_bias.strides[0]);
        dt = raw.value(p.in);
        decay = decay_of(A, dt);
    }
    put_batch_rows(reinterpret_cast<BatchRow*>(smem + s.rows), scale, decay, dt, count);
}

template <class act_t, class state_t>
__global__ void __launch_bounds__(kMaxThreads, 1) mamba2_scan_kernel(const __grid_constant__ Mamba2ScanParams p) {
    using Tile = StateTile<state_t, 0, 1>;
    extern __shared__ __align__(128) char smem[];
    const int quarter = blockIdx.x % kQuarter, head = blockIdx.x / kQuarter, sequence = blockIdx.y;
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3, dstate = p.shape.dstate;
    const BatchShared s(Tile::padded_dstate(dstate), p.shape.headdim / kQuarter, true);
    const int64_t slot_index = load_index(p.slots, sequence);
    const int64_t begin = load_index(p.cu_seqlens, sequence), end = load_index(p.cu_seqlens, sequence + 1);
    const int64_t row = quarter * s.block_rows + own; // this thread's state row
    const bool live = slot_index >= 0 && slot_index < p.pool.slots;
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) + head * p.in.y.strides[2] + row;
    if (!live) {
        for (int64_t t = begin; t < end; ++t)
            if (lane == 0) y[t * p.in.y.strides[1]] = from_float<act_t>(0.0f);
        return;
    }
    const float A = __ldg(static_cast<const float*>(p.in.A.data) + head * p.in.A.strides[0]);
    char* slot = p.pool.base + slot_index * p.pool.stride_bytes;
    char* state =
        slot + p.pool.state + ((static_cast<int64_t>(head) * p.shape.headdim + row) * dstate) * sizeof(state_t);
    Cursor* cursors = reinterpret_cast<Cursor*>(slot + p.pool.cursor) + head * kCursorCopies + quarter;
    Tile tile;
    BlockScale scale;
    if (p.has_initial != nullptr && p.has_initial[sequence]) {
        const Cursor cursor = *cursors;
        tile.template load<false>(state, lane, dstate);
        scale = BlockScale(load_scale<state_t>(p.pool, slot, head, quarter));
        fold_ring<Tile, act_t>(tile, p.pool, p.shape, s, smem, slot, head, quarter, A, cursor.origin,
            cursor.history + cursor.pending, scale);
    } else {
        tile.clear();
    }
    const float D = p.in.D.data == nullptr
        ? 0.0f
        : load_scalar(p.in.D.data, p.in.D.dtype, head * p.in.D.strides[0] + row * p.in.D.strides[1]);
    const act_t* z =
        p.in.z.data == nullptr ? nullptr : static_cast<const act_t*>(p.in.z.data) + head * p.in.z.strides[2] + row;
    const float* B = reinterpret_cast<const float*>(smem + s.B);
    const float* C = reinterpret_cast<const float*>(smem + s.C);
    const float* x = reinterpret_cast<const float*>(smem + s.x);
    const BatchRow* batch = reinterpret_cast<const BatchRow*>(smem + s.rows);
    for (int64_t base = begin; base < end; base += kBatch) {
        const int count = static_cast<int>(min(static_cast<int64_t>(kBatch), end - base));
        load_batch<Tile, act_t>(p, s, smem, base, count, head, quarter * s.block_rows, A, scale.exact);
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            const float x_own = x[t * s.block_rows + own];
            const BatchRow row = batch[t];
            const float w[1] = {__fmul_rn(row.input, x_own)};
            tile.multiply(row.renew);
            tile.fold(w, B + t * s.n_pad, lane, dstate);
            scale.rounded = row.scale;
            float part[1];
            tile.template dot<1>(C + t * s.n_pad, s.n_pad, lane, dstate, part);
            Tile::template reduce<1>(part, lane);
            float value = __fmaf_rn(D, x_own, __fmul_rn(scale.rounded, part[0]));
            if (lane != 0) continue;
            if (z != nullptr) value *= silu(to_float(z[(base + t) * p.in.z.strides[1]]));
            y[(base + t) * p.in.y.strides[1]] = from_float<act_t>(value);
        }
        __syncthreads();
    }
    store_checkpoint(tile, p.pool, slot, state, head, quarter, dstate, scale); // every thread has read the cursor
    if (threadIdx.x == 0) *cursors = reset_cursor(slot_index, p.shape.window, p.shape.stagger);
}

} // namespace replayssm
