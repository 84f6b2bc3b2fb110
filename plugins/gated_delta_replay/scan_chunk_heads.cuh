//! What a span's tokens bring along, GDN: gates, norms, scores. By warps that hold no state and run ahead of those that
//! do, a span each, see scan_chunk_kernel.cuh. Loops are unrolled little: both kinds of warps run at once, and what they
//! run has to fit in the instruction cache together.
#pragma once

#include "scan_chunk_scores.cuh"

namespace replayssm::delta_scan {

//! By a warp: k and q of `count` tokens from `first` on into the span's stage; rows behind them and columns behind
//! dstate become zero.
template <class Traits>
__device__ __forceinline__ void load_tiles(const ChunkWarp<Traits>& w, uint32_t stage, int first, int count) {
    constexpr int kPieces = Traits::kN / 8, kStep = kWarp / kPieces;
    const int piece = w.lane() % kPieces, start = w.lane() / kPieces;
    const bool column_exists = piece * 8 < w.params.scan.shape.dstate;
#pragma unroll
    for (int is_q = 0; is_q < 2; ++is_q) {
        const replayssm_tensor& source = is_q ? w.params.scan.in.q : w.params.scan.in.k;
        const __nv_bfloat16* from = element(source, first + start, w.key_head) + piece * 8;
        const uint32_t to = stage + (is_q ? Traits::kStage.queries : Traits::kStage.reads);
#pragma unroll 1
        for (int row = start; row < kSpan; row += kStep) { // where nothing exists nothing is read
            copy16(to + span_offset(row, piece), from, row < count && column_exists);
            from = advance(from, kStep, token_bytes(source));
        }
    }
    copy_commit();
}

//! Sums of squares of the elements that a lane has of two rows.
__device__ __forceinline__ void add_squares(const uint32_t (&a)[4], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = low_bf16(a[i]), high = high_bf16(a[i]);
        sum[i & 1] = fmaf(low, low, fmaf(high, high, sum[i & 1]));
    }
}

//! By a warp: products of the span's keys and queries with its keys, two halves of eight keys, and all norms.
template <class Traits>
__device__ __forceinline__ void multiply_rows(
    const ChunkWarp<Traits>& w, uint32_t stage, HeadSpan& own, float (&keys)[2][4], float (&queries)[2][4]) {
    float k_square[2] = {}, q_square[2] = {};
#pragma unroll 2
    for (int step = 0; step < Traits::kN / 16; ++step) {
        const uint32_t panel = (step >> 2) * (kSpan * 128), along = (step & 3) << 5;
        const uint32_t rows = ((stage + w.by_row()) ^ along) + panel,
                       columns = ((stage + w.by_piece()) ^ along) + panel;
        uint32_t a[4], c[4], b[4];
        ldmatrix(a, rows + Traits::kStage.reads);
        ldmatrix(c, rows + Traits::kStage.queries);
        ldmatrix(b, columns + Traits::kStage.reads);
        add_squares(a, k_square);
        add_squares(c, q_square);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mma(keys[half], a, b[2 * half], b[2 * half + 1]);
            mma(queries[half], c, b[2 * half], b[2 * half + 1]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int distance = 1; distance <= 2; distance *= 2) {
            k_square[r] += __shfl_xor_sync(kFullMask, k_square[r], distance);
            q_square[r] += __shfl_xor_sync(kFullMask, q_square[r], distance);
        }
        if (w.q() != 0) continue;
        own.k_norm[w.g() + 8 * r] = norm_of(k_square[r]);
        own.q_norm[w.g() + 8 * r] = norm_of(q_square[r]) * w.params.scan.in.scale;
    }
}

//! By the first 16 lanes, one a token: its decays, and what its reads and its write are multiplied by.
template <class Traits>
__device__ __forceinline__ void compute_decays(const ChunkWarp<Traits>& w, char* stage, HeadSpan& own) {
    constexpr ChunkStage kStage = Traits::kStage;
    const int s = w.lane();
    if (s >= kSpan) return;
    float behind = 0.0f, start = 0.0f;
#pragma unroll 2
    for (int t = 0; t < kSpan; ++t) {
        const float g = own.g[t];
        behind += t > s ? g : 0.0f;
        start += t <= s ? g : 0.0f;
        own.within[t][s] = t >= s ? exp2_fast(behind) : 0.0f;
    }
    const float from_start = exp2_fast(start);
    const auto store = [&](uint32_t array, float value) { reinterpret_cast<float*>(stage + array)[s] = value; };
    store(kStage.held, from_start * own.k_norm[s]);
    store(kStage.asked, from_start * own.q_norm[s]);
    store(kStage.written, exp2_fast(behind) * own.k_norm[s]);
    if (s == kSpan - 1) *reinterpret_cast<float*>(stage + kStage.decay) = from_start;
}

//! By a warp: A, its inverse and the scores, from products of raw keys and queries.
template <class Traits>
__device__ __forceinline__ void score_span(
    const ChunkWarp<Traits>& w, char* stage, HeadSpan& own, const float (&keys)[2][4], const float (&queries)[2][4]) {
    constexpr ChunkStage kStage = Traits::kStage;
    const float* beta = reinterpret_cast<const float*>(stage + kStage.beta);
    float to_keys[2], to_queries[2]; // of the lane's two later tokens
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int t = w.g() + r * 8;
        to_keys[r] = own.k_norm[t] * beta[t];
        to_queries[r] = own.q_norm[t];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float query[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = w.g() + (i >> 1) * 8, s = half * 8 + 2 * w.q() + (i & 1);
            const float weight = own.k_norm[s] * own.within[t][s];
            own.A[t][s] = keys[half][i] * (weight * to_keys[i >> 1]);
            // Whatever the products of later tokens are.
            query[i] = s <= t ? queries[half][i] * (weight * to_queries[i >> 1]) : 0.0f;
        }
        store_half_block<kReadTerms>(w, stage + kStage.scores, half, query);
    }
    invert_block(own.A[0], stage + kStage.inverse, w.lane());
}

//! By a producer warp: every kProducers-th span of the sequence's tokens, each when the stage it takes is free.
template <class Traits>
__device__ __forceinline__ void prepare_head_spans(const ChunkWarp<Traits>& w, int begin, int tokens) {
    const GatedDeltaInputs& in = w.params.scan.in;
    const int warp = w.producer();
    HeadSpan& own = reinterpret_cast<HeadSpan*>(w.smem + w.params.shared.head)[warp];
    const auto parameter = [&](const replayssm_tensor& tensor) {
        return __ldg(static_cast<const float*>(tensor.data) + w.head * tensor.strides[0]);
    };
    const LogGate gate(w.params.scan.shape, parameter(in.A_log));
    const float bias = parameter(in.dt_bias);
    for (int span = warp; span * kSpan < tokens; span += Traits::kProducers) {
        const int count = tokens - span * kSpan, first = begin + span * kSpan;
        const bool is_token = w.lane() < kSpan, exists = is_token && w.lane() < count;
        float a = 0.0f, b = 0.0f;
        if (exists) {
            const int64_t token = first + w.lane();
            a = load_scalar(in.a.data, in.a.dtype, token * in.a.strides[1] + w.head * in.a.strides[2]);
            b = load_scalar(in.b.data, in.b.dtype, token * in.b.strides[1] + w.head * in.b.strides[2]);
        }
        w.wait_for_stage(span);
        const uint32_t at = w.base + w.stage_of(span);
        char* stage = w.smem + w.stage_of(span);
        load_tiles(w, at, first, count);
        if (is_token) { // behind the last token nothing decays and nothing is written
            own.g[w.lane()] = exists ? gate.softplus_of(a + bias) : 0.0f;
            reinterpret_cast<float*>(stage + Traits::kStage.beta)[w.lane()] = exists ? LogGate::beta_of(b) : 0.0f;
        }
        copy_wait<0>();
        __syncwarp(); // tiles and gates are there
        float keys[2][4] = {}, queries[2][4] = {};
        multiply_rows(w, at, own, keys, queries);
        __syncwarp(); // norms are there
        compute_decays(w, stage, own);
        __syncwarp(); // decays are there
        score_span(w, stage, own, keys, queries);
        SplitBarrier::arrive_alone(w.prepared(span));
    }
}

} // namespace replayssm::delta_scan
