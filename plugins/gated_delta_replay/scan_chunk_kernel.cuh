//! Scan of packed prompts in chunks on tensor cores, GDN and KDA: o of every token, final state in the slot, an empty
//! ring, a reset cursor. bf16 activations, normalised keys. A chunk is one span of 16 tokens, t, s count them from 1, S
//! is the state in front of them, kn and qn as in docs/math.md 2.2 and 2.3, e(s,t) = exp(sum of g over s+1 .. t), KDA:
//! one for each channel:
//!
//!   A[t,s] = beta_t (e(s,t) o kn_s) . kn_t, s < t
//!   D = (I + A)^-1 R,   R_t = beta_t (v_t - S (e(0,t) o kn_t))                                   docs/math.md 5.2
//!   o_t = S (e(0,t) o qn_t) + sum_{s<=t} ((e(s,t) o kn_s) . qn_t) d_s
//!   S  <- S Diag(e(0,16)) + sum_s d_s (e(s,16) o kn_s)^T
//!
//! q, k [tokens, HK, K]; v, o [tokens, HV, V] bf16; a [tokens, HV], KDA [tokens, HV, K]; b [tokens, HV]; sequence i =
//! tokens cu_seqlens[i] .. [i+1]-1.
//! No exponent is positive: decays are powers of two of sums of log2(exp(g)) <= 0 over up to 16 tokens that follow each
//! other, or products of such, never of differences; a sum of -inf gives 0. (I + A)^-1 comes by forward substitution in
//! fp32 (with |kn| <= 1, beta <= 1 and decays <= 1 none of its entries exceeds 1 by more than rounding, since it is the
//! answer of a recurrence whose factors have norm <= 1).
//! GDN: k and q enter products as they are, norms and decays are applied to the sums. KDA: decayed keys and queries of
//! norm 1 in bf16 terms; scores in fp32, within groups of four tokens with e(s,t) itself, between groups as e(s, end of
//! its group) times the groups between times e(start of its group, t).
//! Precision: the fp32 operands of everything that reaches the state (S, KDA's keys, the inverse, R, D) are cut into
//! three bf16 terms, which is all of their 24 bits; products of two such take the six term pairs above 2^-24. What
//! reaches an output alone has two. Tensor cores add with truncation: sums start at zero, and are added to what they
//! change by a rounded operation.
//! Work per token and head, V = K = 128, on tensor cores: 2 V K (3 + 2 + 3) GDN, (6 + 3 + 6) KDA for both reads of S
//! and the update with their terms, 2 V 16 (6 + 3) for the solve and the outputs: 300 and 530 kFLOP.
//! Grid (HV blocks per head, sequences). `consumers` warps hold 16 rows of the state each, kN / 2 registers a thread,
//! and wait for no one but the block's other warps, which prepare spans. GDN: a span a warp. KDA: all of them together,
//! two channels of four tokens a thread; the inverse of a span is made while scores of the next one are.
//! Barriers a span: a stage is prepared, it has been used (every thread arrives for what it has done itself, so that
//! compute-sanitizer's racecheck sees the order); KDA's producers among themselves two (sums and squares are there;
//! rows are there).
//! KDA, few heads: neighbouring blocks of a head form a cluster and prepare spans in turn, each for all. A warp of its
//! own makes the inverses and sends rows, then scores and inverse, to the same stage of the other blocks, whose barrier
//! counts two arrivals and the bytes; warps with a state arrive, where they have used a stage, at the block that
//! prepares its spans. What is computed for a span is the same whichever block does it: no bit differs.
//! slot outside the pool: zero output for the sequence's tokens, no memory touched.
#pragma once

#include "scan_chunk_channel_scores.cuh"
#include "scan_chunk_fold.cuh"
#include "scan_chunk_heads.cuh"

namespace replayssm::delta_scan {

//! By the block, before anything else: what the sequence is, barriers, and zeros where KDA's scores of later keys are.
template <class Traits>
__device__ __forceinline__ const ScanBlock& open_block(const ChunkWarp<Traits>& w) {
    const GatedDeltaScanParams& p = w.params.scan;
    ScanBlock& block = *reinterpret_cast<ScanBlock*>(w.smem + w.params.shared.block);
    if (w.thread == 0) {
        block.begin = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y));
        block.end = static_cast<int>(load_index(p.cu_seqlens, blockIdx.y + 1));
        block.initial = p.has_initial != nullptr && p.has_initial[blockIdx.y];
        block.slot = load_index(p.slots, blockIdx.y);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            SplitBarrier::init(w.prepared(stage), w.prepares(stage) ? Traits::kPreparing * kWarp : 2); // 2: parts sent
            const int own = w.params.consumers + (Traits::kShares ? 1 : 0);                            // warps
            SplitBarrier::init(w.used(stage), own * kWarp + (Traits::kSharers - 1) * w.params.consumers);
        }
        for (int turn = 0; Traits::kShares && turn < 2; ++turn) {
            SplitBarrier::init(w.spread(turn * Traits::kSharers), Traits::kProducers * kWarp);
            SplitBarrier::init(w.scored(turn * Traits::kSharers), Traits::kProducers * kWarp);
        }
    }
    constexpr int kWords = kReadTerms * kBlockBytes / 4;
    for (int i = w.thread; Traits::kChannels && i < Traits::kStages * kWords; i += blockDim.x) {
        char* stage = w.smem + w.stage_of(i / kWords);
        if (w.prepares(i / kWords)) reinterpret_cast<uint32_t*>(stage + Traits::kStage.scores)[i % kWords] = 0;
    }
    if constexpr (Traits::kShares) {
        publish_to_copies();
        meet_cluster();
    } else {
        __syncthreads();
    }
    return block;
}

//! By the warps that hold no state: all spans of the sequence's tokens.
template <class Traits>
__device__ __forceinline__ void prepare_spans(const ChunkWarp<Traits>& w, int begin, int tokens) {
    if (tokens <= 0) return;
    if constexpr (Traits::kChannels) {
        prepare_channel_spans(w, begin, tokens);
    } else {
        prepare_head_spans(w, begin, tokens);
    }
}

//! By a block.
template <class Traits>
__device__ __forceinline__ void scan_chunks(const ChunkParams& params, char* smem) {
    const int head = blockIdx.x / params.blocks_per_head, part = blockIdx.x - head * params.blocks_per_head;
    const ChunkWarp<Traits> w{params, smem, shared_address(smem), static_cast<int>(threadIdx.x), head,
        head / params.scan.shape.heads_per_group, part * params.consumers * 16};
    const ScanBlock& block = open_block(w);
    const bool is_consumer = w.warp() < params.consumers;
    if (block.slot < 0 || block.slot >= params.scan.pool.slots) {
        if (is_consumer) zero_outputs(w, block.begin, block.end);
        return;
    }
    if (is_consumer) {
        if constexpr (Traits::kMovesRegisters) take_registers<Traits::kConsumerRegisters>();
        fold_spans(w, block, part);
    } else if (w.producer() >= 0 && (!Traits::kShares || w.producer() < Traits::kProducers)) {
        if constexpr (Traits::kMovesRegisters && Traits::kShares) take_registers<Traits::kProducerRegisters>();
        if constexpr (Traits::kMovesRegisters && !Traits::kShares) give_registers<Traits::kProducerRegisters>();
        prepare_spans(w, block.begin, block.end - block.begin);
    } else if constexpr (Traits::kShares) {
        if constexpr (Traits::kMovesRegisters) give_registers<Traits::kFinisherRegisters>();
        if (w.producer() == Traits::kProducers) finish_channel_spans(w, block.end - block.begin);
    }
    if constexpr (Traits::kShares) meet_cluster(); // shared memory is there until nobody sends to it or arrives in it
}

} // namespace replayssm::delta_scan

namespace replayssm {

template <class Traits>
__global__ void __launch_bounds__(Traits::kMostThreads, 1)
    gated_delta_scan_chunk_kernel(const __grid_constant__ delta_scan::ChunkParams params) {
    extern __shared__ __align__(1024) char smem[];
    if constexpr (!Traits::kShares || REPLAYSSM_CLUSTERS) delta_scan::scan_chunks<Traits>(params, smem);
}

} // namespace replayssm
