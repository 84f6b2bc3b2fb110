//! Scan of packed prompts in chunks on tensor cores, GDN: o of every token, final state in the slot, an empty ring, a
//! reset cursor. bf16 activations, normalised keys. t, s count a chunk's 64 tokens from 1, S is the state in front of
//! them, kn and qn as in docs/math.md 2.2, e(s,t) = exp(sum of g over s+1 .. t):
//!
//!   A[t,s] = beta_t e(s,t) (kn_s . kn_t), s < t
//!   D = (I + A)^-1 R,   R_t = beta_t (v_t - e(0,t) S kn_t)                                       docs/math.md 5.2
//!   o_t = e(0,t) S qn_t + sum_{s<=t} e(s,t) (kn_s . qn_t) d_s
//!   S  <- e(0,64) S + sum_s e(s,64) d_s kn_s^T
//!
//! q, k [tokens, HK, K]; v, o [tokens, HV, V] bf16; a, b [tokens, HV]; sequence i = tokens cu_seqlens[i] .. [i+1]-1.
//! The system is solved span by span of 16 tokens: blocks on the diagonal are inverted by forward substitution in fp32
//! (with |kn| <= 1, beta <= 1 and decays <= 1 no entry of the inverse exceeds 1 by more than rounding, since it is the
//! answer of a recurrence whose factors have norm <= 1), the others are matrix products.
//! Precision: k and q enter products as they are, norms are applied to the sums. The fp32 operands of everything that
//! reaches the state (S, -A, the inverses, R, D) are cut into three bf16 terms, which is all of their 24 bits; products
//! of two such take the six term pairs above 2^-24. What reaches an output alone has two. Tensor cores add with
//! truncation: sums start at zero, smallest terms first, and are added to what they change by a rounded operation.
//! Exponents are sums of g <= 0 over few tokens, never differences of long sums; between spans exponentials multiply.
//! Work per token and head, V = K = 128: 2 V K (3 + 2 + 3) for S K^T, S Q^T and the update with their terms, 2 V 40
//! (6 + 3) for the solve and the outputs: 350 kFLOP, and 2 K 80 for scores.
//! Grid (HV blocks per head, sequences). A warp holds 16 rows of the head's state, kN / 2 registers a thread; tiles of
//! k and q of the next chunk load while one is computed.
//! Barriers a chunk, of the block: tiles have arrived and the last chunk's have been used; norms and gates are there;
//! decays are there; blocks of A, its inverses and q k^T are there.
//! slot outside the pool: zero output for the sequence's tokens, no memory touched.
#pragma once

#include "scan_chunk_products.cuh"
#include "scan_chunk_scores.cuh"
#include "scan_chunk_state.cuh"

namespace replayssm::delta_scan {

//! By the block, padding: zeros for the sequence's tokens.
template <class Traits>
__device__ __forceinline__ void zero_outputs(const ChunkWarp<Traits>& w, int begin, int end) {
    const replayssm_tensor& o = w.params.scan.in.o;
    if (!w.works()) return;
    for (int t = begin + w.token(); t < end; t += kSpan) {
        const __nv_bfloat16* to = element(o, t, w.head) + w.row() + w.half() * 8;
        *reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)) = make_uint4(0, 0, 0, 0);
    }
}

//! By one thread a token: g and beta.
template <class Traits>
__device__ __forceinline__ void compute_gates(const ChunkWarp<Traits>& w, const RawGate& raw, int count) {
    if (w.thread >= kChunk) return;
    const GatedDeltaScanParams& p = w.params.scan;
    const auto parameter = [&](const replayssm_tensor& tensor) {
        return __ldg(static_cast<const float*>(tensor.data) + w.head * tensor.strides[0]);
    };
    const float rate = expf(parameter(p.in.A_log)), bias = parameter(p.in.dt_bias);
    const bool exists = w.thread < count; // behind the last token nothing decays and nothing is written
    w.factors().g[w.thread] = exists ? gate_of(p.shape, rate, bits_to_float(raw.a, p.in.a.dtype), bias) : 0.0f;
    w.factors().beta[w.thread] = exists ? sigmoid(bits_to_float(raw.b, p.in.b.dtype)) : 0.0f;
}

} // namespace replayssm::delta_scan

namespace replayssm {

template <class Traits>
__global__ void __launch_bounds__(delta_scan::kMaxChunkWarps* kWarp, 1)
    gated_delta_scan_chunk_kernel(const __grid_constant__ delta_scan::ChunkParams params) {
    using namespace delta_scan;
    extern __shared__ __align__(1024) char smem[];
    const GatedDeltaScanParams& p = params.scan;
    const int head = blockIdx.x / params.blocks_per_head, part = blockIdx.x - head * params.blocks_per_head;
    const ChunkWarp<Traits> w{params, smem, shared_address(smem), static_cast<int>(threadIdx.x), head,
        part * static_cast<int>(blockDim.x / kWarp) * 16};
    if (w.thread == 0) {
        ScanBlock& block = *reinterpret_cast<ScanBlock*>(smem + params.shared.block);
        block.begin = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y));
        block.end = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y + 1));
        block.initial = p.has_initial != nullptr && p.has_initial[blockIdx.y];
        block.slot = load_index(p.slots, blockIdx.y);
    }
    __syncthreads();
    const ScanBlock& block = *reinterpret_cast<const ScanBlock*>(smem + params.shared.block);
    const int begin = block.begin, tokens = block.end - block.begin;
    if (block.slot < 0 || block.slot >= p.pool.slots) return zero_outputs(w, begin, block.end);
    RawGate raw = load_gate(w, begin, tokens);
    if (tokens > 0) {
        load_tiles(w, 0, begin, tokens);
        load_channels(w, begin, tokens);
    }
    copy_commit();
    float S[Traits::kTiles][4] = {};
    if (block.initial && w.works()) load_state(w, block.slot, part, S);
    for (int first = 0, stage = 0; first < tokens; first += kChunk, stage ^= 1) {
        const int left = tokens - first;
        copy_wait<0>();
        if (Traits::kWarpgroup) publish_to_products();
        __syncthreads(); // tiles have arrived; nobody reads the last chunk's any more
        compute_norms(w, stage);
        compute_gates(w, raw, left);
        if (left > kChunk) {
            load_tiles(w, stage ^ 1, begin + first + kChunk, left - kChunk);
            raw = load_gate(w, begin + first + kChunk, left - kChunk);
        }
        copy_commit();
        __syncthreads(); // norms and gates are there
        if (w.thread < kChunk) compute_decays(w);
        const bool has_state = first > 0 || block.initial; // otherwise S is zero
        float R[8][4] = {}, low[8][4] = {}, Y[8][4] = {};
        if (has_state) read_state(w, stage, S, R, low, Y);
        __syncthreads(); // decays are there
        if (w.warp() == 0) combine_spans(w.factors(), w.lane());
        score_chunk(w, stage);
        __syncthreads(); // A, its inverses and q k^T are there
        weigh_reads(w, has_state, R, low, Y);
        solve_chunk(w, R, Y);
        write_outputs(w, Y);
        __syncwarp();
        if (w.works()) store_channels(w, begin + first, left);
        __syncwarp(); // outputs have been read
        if (left > kChunk) load_channels(w, begin + first + kChunk, left - kChunk);
        copy_commit();
        fold_chunk(w, stage, R, S);
    }
    __syncthreads(); // every warp has read the cursor
    if (w.works()) store_state(w, block.slot, S);
    if (w.thread < kCursorCopies && w.thread % params.blocks_per_head == part) {
        Cursor* cursors = reinterpret_cast<Cursor*>(p.pool.base + block.slot * p.pool.stride_bytes + p.pool.cursor);
        cursors[head * kCursorCopies + w.thread] = reset_cursor(block.slot, p.shape.window, p.shape.stagger);
    }
}

} // namespace replayssm
