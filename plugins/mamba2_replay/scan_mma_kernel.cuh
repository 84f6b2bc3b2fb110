//! Scan of packed prompts on tensor cores: y of every token, final state in the slot, an empty ring, a reset cursor.
//! bf16 activations. In chunks of 64 tokens; t, s count the chunk's tokens from 1, S is the state in front of them,
//! e(s,t) = exp(sum of A dt over s+1 .. t):
//!
//!   y_t = e(0,t) S C_t + sum_{s<=t} dt_s e(s,t) (B_s . C_t) x_s (+ D x_t) (* silu(z_t))          docs/math.md 3.2
//!   S  <- e(0,64) S + sum_s (dt_s e(s,64) x_s) B_s^T
//!
//! x, z, y [tokens, H, P] bf16; B, C [tokens, G, N] bf16; dt [tokens, H]; sequence i = tokens cu_seqlens[i] .. [i+1]-1.
//! Precision: x, B, C enter products as they are. The fp32 operand is cut into bf16 terms: three where it enters the
//! state, which is all of its 24 bits, two (16 bits) where it enters an output. Tensor cores add with truncation, so a
//! chunk's sum starts at zero, smallest terms first, and is added to the state by a rounded fp32 operation.
//! Exponents: sums of A dt <= 0 over few tokens, or products of their exponentials; no difference of long sums.
//! Work per token and head: 2 P N (2 + 3) for S C and the update with their terms, 2 P 40 * 2 for the chunk's own
//! tokens, 2 N 64 / heads of a block for scores: 96 kFLOP at P = 64, N = 128, four heads a block.
//! Bytes per token: 4 P H (6 P H with z) + 4 N G + dt, each once from DRAM; B and C again from L2 for a group's blocks.
//! 64 prompts of 2,048 tokens, H = 128, P = 64, N = 128, G = 8: 1.6 PFLOP, 5.1 GB (7.3 GB with z).
//! Grid (G ceil(H / G / heads of a block), sequences). A warp holds 16 state rows of a head, kN / 2 registers a thread.
//! The heads of a block share tiles of B and C and the scores B_s . C_t, which they compute in turn. Tiles of the next
//! chunk load while one is computed; heads may be half a chunk apart.
//! Barriers a chunk: of a head's warps, three (decays are there; decayed scores are there; they have been used) and one
//! of a warpgroup (weighed inputs are there); of the block, arrive and wait apart: tiles have arrived, tiles have been
//! used, scores are there, scores have been used.
//! slot outside the pool: zero output for the sequence's tokens, no memory touched.
//! kWarpgroup: with sm_90a's products, whose second operand is in shared memory. Otherwise warp by warp.
#pragma once

#include "scan_mma_products.cuh"
#include "scan_mma_scores.cuh"
#include "scan_mma_state.cuh"

namespace replayssm {

//! By the block, padding: zeros for the sequence's tokens.
template <class Traits>
__device__ __forceinline__ void zero_outputs(const ScanWarp<Traits>& w, int begin, int end) {
    const replayssm_tensor& y = w.params.scan.in.y;
    if (!w.writes()) return;
    for (int t = begin + w.row(); t < end; t += kSpan) {
        const __nv_bfloat16* to = element(y, t, w.head()) + w.channel();
        *reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)) = make_uint4(0, 0, 0, 0);
    }
}

//! The warp's place in the block and in the model.
template <class Traits>
__device__ __forceinline__ uint32_t find_place(const ScanMmaParams& params, int group) {
    const int warp = threadIdx.x / kWarp, local = warp / params.warps_per_head,
              sub = warp - local * params.warps_per_head;
    const int in_group = (blockIdx.x - group * params.blocks_per_group) * params.heads + local,
              most = params.scan.shape.heads_per_group;
    const bool writes = in_group < most;
    const int head = group * most + (writes ? in_group : most - 1);
    return static_cast<uint32_t>(head | sub << 16 | local << 24) | static_cast<uint32_t>(writes) << 31;
}

//! By the block: what all need later, and the barriers, into shared memory.
template <class Traits>
__device__ __forceinline__ void set_up(const ScanWarp<Traits>& w, int group, int scorers) {
    const Mamba2ScanParams& p = w.params.scan;
    const ScanShared s = w.layout();
    if (w.thread == 0) {
        ScanBlock& block = *reinterpret_cast<ScanBlock*>(w.smem + s.block);
        block.begin = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y));
        block.end = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y + 1));
        block.group = group;
        block.initial = p.has_initial != nullptr && p.has_initial[blockIdx.y];
        block.slot = load_index(p.slots, blockIdx.y);
        const int warps = blockDim.x / kWarp;
        for (int stage = 0; stage < 2; ++stage) {
            SplitBarrier::init(w.base() + s.arrived + stage * 8, blockDim.x);
            SplitBarrier::init(w.base() + s.done + stage * 8, warps);
        }
        SplitBarrier::init(w.base() + s.scored, scorers);
        SplitBarrier::init(w.base() + s.taken, warps);
    }
    if (w.lane() < 16) {
        const replayssm_tensor& D = p.in.D;
        const int64_t at = w.head() * D.strides[0] + (w.sub() * 16 + w.lane()) * D.strides[1];
        reinterpret_cast<float*>(w.smem + s.weights)[w.warp() * 16 + w.lane()] =
            D.data == nullptr ? 0.0f : load_scalar(D.data, D.dtype, at);
    }
    if (w.sub() == 0 && w.lane() == 0) {
        const replayssm_tensor& bias = p.in.dt_bias;
        uint2& rate = reinterpret_cast<uint2*>(w.smem + s.rates)[w.local()];
        rate.x = load_bits(p.in.A.data, REPLAYSSM_FLOAT32, w.head() * p.in.A.strides[0]);
        rate.y = bias.data == nullptr ? 0 : load_bits(bias.data, bias.dtype, w.head() * bias.strides[0]);
    }
    __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    mamba2_scan_mma_kernel(const __grid_constant__ ScanMmaParams params) {
    extern __shared__ __align__(1024) char smem[];
    const Mamba2ScanParams& p = params.scan;
    const ScanShared s = layout_of<Traits>(params);
    const uint32_t base = shared_address(smem);
    const int group = blockIdx.x / params.blocks_per_group, thread = threadIdx.x;
    const uint32_t place = find_place<Traits>(params, group);
    const auto self = [&] {
        return ScanWarp<Traits>{params, smem, fresh(thread), static_cast<uint32_t>(fresh(place))};
    };
    const int scorers = Traits::kWarpgroup ? 4 : params.warps_per_head; // warps of a head that compute scores
    set_up(self(), group, scorers);
    const ScanBlock& block = *reinterpret_cast<const ScanBlock*>(smem + s.block);
    if (block.slot < 0 || block.slot >= p.pool.slots) return zero_outputs(self(), block.begin, block.end);
    float S[Traits::kTiles][4] = {};
    if (block.initial) load_state(self(), block.slot, group, S);
    const auto load = [&](int stage, int first, int count) {
        load_tiles(self(), stage, first, count);
        SplitBarrier::arrive_after_copies(base + s.arrived + stage * 8);
    };
    const auto wait_tiles = [&](int chunk) {
        SplitBarrier::wait(base + s.arrived + (chunk & 1) * 8, chunk >> 1 & 1);
        if (Traits::kWarpgroup) publish_to_products();
    };
    const auto score = [&](int chunk) { // by the head whose turn it is
        const auto w = self();
        if (w.local() != chunk % params.heads) return;
        wait_tiles(chunk);
        if (chunk > 0) SplitBarrier::wait(base + s.taken, chunk - 1 & 1);
        compute_scores(w, chunk & 1);
        if (w.sub() < scorers) SplitBarrier::arrive(base + s.scored);
    };
    const auto first_of = [&](int chunk) { return block.begin + chunk * kChunk; };
    //! Tokens of this chunk and those behind it.
    const auto left_of = [&](int chunk) { return block.end - block.begin - chunk * kChunk; };
    if (left_of(0) > 0) {
        load(0, first_of(0), left_of(0));
        load_channels(self(), p.in.x, s.x, first_of(0), left_of(0));
        copy_commit();
        compute_decays(self(), load_step(self(), self().sub(), first_of(0), left_of(0)), 0, first_of(0), left_of(0));
        score(0);
    }
    for (int chunk = 0; left_of(chunk) > 0; ++chunk) {
        const int stage = chunk & 1, other = stage ^ 1;
        self().meet(); // decays are there, the last chunk's products done
        if (p.in.z.data != nullptr) load_channels(self(), p.in.z, s.gate, first_of(chunk), left_of(chunk));
        copy_commit();
        if (left_of(chunk + 1) > 0)
            load_channels(self(), p.in.x, s.x + other * s.x_stage, first_of(chunk + 1), left_of(chunk + 1));
        copy_commit();
        SplitBarrier::wait(base + s.scored, stage);
        decay_scores(self(), stage);
        if (self().sub() == 0) combine_spans(self().decays(stage), self().lane());
        SplitBarrier::arrive(base + s.taken);
        if (left_of(chunk + 1) > 0) {
            if (chunk > 0) SplitBarrier::wait(base + s.done + other * 8, chunk - 1 >> 1 & 1);
            load(other, first_of(chunk + 1), left_of(chunk + 1));
        }
        copy_wait<1>(); // z and this chunk's x
        self().meet();  // decayed scores are there
        wait_tiles(chunk);
        float Y[8][4] = {};
        if (chunk > 0 || block.initial) read_state(self(), stage, S, Y); // otherwise S is zero
        const unsigned step = load_step(self(), self().sub(), first_of(chunk + 1), left_of(chunk + 1));
        finish_outputs(self(), stage, Y);
        __syncwarp();
        store_channels(self(), first_of(chunk), left_of(chunk));
        if (left_of(chunk + 1) > 0) {
            compute_decays(self(), step, other, first_of(chunk + 1), left_of(chunk + 1));
            score(chunk + 1);
        }
        if constexpr (Traits::kWarpgroup) {
            self().meet(); // decayed scores have been used
            weigh_inputs(self(), stage);
            publish_to_products();
            named_barrier(8 + self().warp() / 4, 4 * kWarp);
            fold_weighed(self(), stage, S);
        } else {
            fold_chunk(self(), stage, S);
        }
        SplitBarrier::arrive(base + s.done + stage * 8);
    }
    __syncthreads(); // every warp has read the cursor
    if (self().writes()) store_state(self(), block.slot, S);
}

} // namespace replayssm
