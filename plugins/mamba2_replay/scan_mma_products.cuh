//! Matrix products of the tensor-core scan: what a warp does with its 16 rows of the state, see scan_mma_kernel.cuh.
#pragma once

#include "scan_mma_tile.cuh"

namespace replayssm {

//! Y [16 channels][64 tokens] = e(0,t) S C^T; Y comes in as zero.
template <class Traits>
__device__ __forceinline__ void read_state(
    const ScanWarp<Traits>& w, int stage, const float (&S)[Traits::kTiles][4], float (&Y)[8][4]) {
    const ScanShared s = w.layout();
    const uint32_t C = w.base() + s.C + stage * s.tile;
    const SharedMatrix columns(C);
#pragma unroll
    for (int k = 0; k < Traits::kN / 16; ++k) {
        uint32_t a[kStateTerms][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t terms[kStateTerms];
            split(S[2 * k + i / 2][i % 2 * 2], S[2 * k + i / 2][i % 2 * 2 + 1], terms);
#pragma unroll
            for (int term = 0; term < kStateTerms; ++term)
                a[term][i] = terms[term];
        }
        const uint32_t panel = (k >> 2) * kPanelBytes, along = (k & 3) << 5;
        if constexpr (Traits::kWarpgroup) {
            warpgroup_fence();
            const uint64_t matrix = columns.at(panel + along);
            if (k == 0) warpgroup_mma<0, 0>(Y, a[0], matrix);
            if (k != 0) warpgroup_mma<0, 1>(Y, a[0], matrix);
#pragma unroll
            for (int term = 1; term < kStateTerms; ++term)
                warpgroup_mma<0, 1>(Y, a[term], matrix);
            warpgroup_commit();
            warpgroup_wait<0>();
            if (never(w.params.heads, k)) break;
        } else {
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                uint32_t b[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    ldmatrix(b[i], ((C + w.by_piece()) ^ along) + panel + (pair + i) * (16 * 128));
#pragma unroll
                for (int term = 0; term < kStateTerms; ++term)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        mma(Y[2 * pair + i], a[term], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
            }
        }
    }
    if constexpr (Traits::kWarpgroup) hold(Y);
    const TokenDecays& d = w.decays(stage);
    float before = 1.0f;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        if (tile > 0 && tile % 2 == 0) before *= d.from_start[tile * 8 - 1];
        const float2 decay = *reinterpret_cast<const float2*>(d.from_start + tile * 8 + 2 * w.q());
        const float even = decay.x * before, odd = decay.y * before;
        Y[tile][0] *= even, Y[tile][1] *= odd, Y[tile][2] *= even, Y[tile][3] *= odd;
    }
}

//! Y += x^T (decayed scores)^T for the tokens s of one span; x: fragment of x^T.
template <int kSpanIndex>
__device__ __forceinline__ void add_span(const uint32_t (&x)[4], uint32_t operand, float (&Y)[8][4]) {
#pragma unroll
    for (int pair = kSpanIndex; pair < kSpans; ++pair) {
#pragma unroll
        for (int term = 0; term < kScoreTerms; ++term) {
            uint32_t b[4];
            ldmatrix(
                b, operand + operand_offset(kSpanIndex) + (pair - kSpanIndex) * (kSpan * 32) + term * kOperandBytes);
            mma(Y[2 * pair], x, b[0], b[1]);
            mma(Y[2 * pair + 1], x, b[2], b[3]);
        }
    }
}

//! Outputs of the tokens of one span: + D x, * silu(z); to where z was.
__device__ __forceinline__ void write_outputs(
    const uint32_t (&x)[4], float2 D, bool gated, uint32_t gate, float (*Y)[4]) {
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float weight = i & 1 ? D.y : D.x;
        float& low = Y[i / 2][i % 2 * 2];
        float& high = Y[i / 2][i % 2 * 2 + 1];
        low = fmaf(weight, low_bf16(x[i]), low);
        high = fmaf(weight, high_bf16(x[i]), high);
    }
    if (gated) {
        uint32_t z[4];
        ldmatrix_trans(z, gate);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Y[i / 2][i % 2 * 2] *= silu_fast(low_bf16(z[i]));
            Y[i / 2][i % 2 * 2 + 1] *= silu_fast(high_bf16(z[i]));
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = pack_bf16(Y[i / 2][i % 2 * 2], Y[i / 2][i % 2 * 2 + 1]);
    stmatrix_trans(gate, out);
}

//! Outputs of one chunk from Y = e(0,t) S C^T on, span after span: a span is complete when its own tokens have been
//! added.
template <class Traits, int kSpanIndex = 0>
__device__ __forceinline__ void finish_spans(
    uint32_t x_at, uint32_t operand, uint32_t gate, float2 D, bool gated, float (&Y)[8][4]) {
    if constexpr (kSpanIndex < kSpans) {
        constexpr uint32_t kStep = kSpanIndex * kSpan * Traits::kRowBytes;
        uint32_t x[4];
        ldmatrix_trans(x, x_at + kStep);
        add_span<kSpanIndex>(x, operand, Y);
        write_outputs(x, D, gated, gate + kStep, Y + 2 * kSpanIndex);
        finish_spans<Traits, kSpanIndex + 1>(x_at, operand, gate, D, gated, Y);
    }
}

template <class Traits>
__device__ __forceinline__ void finish_outputs(const ScanWarp<Traits>& w, int stage, float (&Y)[8][4]) {
    const ScanShared s = w.layout();
    const float* weights = reinterpret_cast<const float*>(w.smem + s.weights) + w.warp() * 16 + w.g();
    const uint32_t at = w.base() + w.in_channels();
    finish_spans<Traits>(at + s.x + stage * s.x_stage, w.base() + w.operand() + w.in_strip(), at + s.gate,
        make_float2(weights[0], weights[8]), w.params.scan.in.z.data != nullptr, Y);
}

//! to_end x^T of one span, the fragment as kFoldTerms bf16 terms.
template <class Traits>
__device__ __forceinline__ void weigh_span(
    const ScanWarp<Traits>& w, const TokenDecays& d, int span, const uint32_t (&x)[4], uint32_t (&a)[kFoldTerms][4]) {
    const float behind = d.behind[span];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 weight = *reinterpret_cast<const float2*>(d.to_end + span * kSpan + i / 2 * 8 + 2 * w.q());
        uint32_t terms[kFoldTerms];
        split(low_bf16(x[i]) * (weight.x * behind), high_bf16(x[i]) * (weight.y * behind), terms);
#pragma unroll
        for (int term = 0; term < kFoldTerms; ++term)
            a[term][i] = terms[term];
    }
}

//! S <- decay S + (to_end x)^T B of one chunk, warp by warp.
template <class Traits>
__device__ __forceinline__ void fold_chunk(const ScanWarp<Traits>& w, int stage, float (&S)[Traits::kTiles][4]) {
    constexpr int kAtOnce = 4; // tiles
    const ScanShared s = w.layout();
    const TokenDecays& d = w.decays(stage);
    const uint32_t B = w.base() + stage * s.tile + w.by_row(),
                   x_at = w.base() + s.x + stage * s.x_stage + w.in_channels();
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        uint32_t x[4], a[kFoldTerms][4];
        ldmatrix_trans(x, x_at + span * kSpan * Traits::kRowBytes);
        weigh_span(w, d, span, x, a);
#pragma unroll
        for (int first = 0; first < Traits::kTiles; first += kAtOnce) {
            float sum[kAtOnce][4];
            uint32_t b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ldmatrix_trans(b[i], (B ^ ((first + 2 * i & 7) << 4)) + first / 8 * kPanelBytes + span * (kSpan * 128));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mma_from_zero(sum[i], a[kFoldTerms - 1], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int term = kFoldTerms - 2; term >= 0; --term)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    mma(sum[i], a[term], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int tile = 0; tile < kAtOnce; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& element = S[first + tile][i];
                    element = span == 0 ? __fmaf_rn(d.chunk, element, sum[tile][i]) : __fadd_rn(element, sum[tile][i]);
                }
        }
    }
}

//! The same, warpgroup by warpgroup, in two parts with a barrier of the warpgroup between: to_end x as bf16 terms in
//! three panels, where x, z and the decayed scores were,
template <class Traits>
__device__ __forceinline__ void weigh_inputs(const ScanWarp<Traits>& w, int stage) {
    const ScanShared s = w.layout();
    const TokenDecays& d = w.decays(stage);
    const uint32_t at = w.base() + w.in_channels();
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const uint32_t row = at + span * (kSpan * 128);
        uint32_t x[4], a[kFoldTerms][4];
        ldmatrix_trans(x, row + s.x + stage * s.x_stage);
        weigh_span(w, d, span, x, a);
        stmatrix_trans(row + s.x + stage * s.x_stage, a[0]);
        stmatrix_trans(row + s.gate, a[1]);
        stmatrix_trans(row + s.operand + w.warp() / 4 * (kScoreTerms * kOperandBytes - kPanelBytes), a[2]);
    }
}
//! and the products, smallest terms first.
template <class Traits>
__device__ __forceinline__ void fold_weighed(const ScanWarp<Traits>& w, int stage, float (&S)[Traits::kTiles][4]) {
    static_assert(kScoreTerms * kOperandBytes >= kPanelBytes && kScoreTerms * kOperandBytes % 1024 == 0,
        "a panel fits, swizzled");
    const ScanShared s = w.layout();
    const uint32_t panel =
        __shfl_sync(kFullMask, w.thread / 128, 0) * kPanelBytes; // of the warpgroup; uniform, as the compiler sees
    const SharedMatrix B(w.base() + stage * s.tile),
        weighed[kFoldTerms] = {SharedMatrix(w.base() + s.x + stage * s.x_stage + panel),
            SharedMatrix(w.base() + s.gate + panel),
            SharedMatrix(w.base() + s.operand + panel / kPanelBytes * (kScoreTerms * kOperandBytes))};
    const float decay = w.decays(stage).chunk;
#pragma unroll
    for (int first = 0; first < Traits::kTiles; first += 8) {
        float sum[8][4];
        warpgroup_fence();
#pragma unroll
        for (int term = kFoldTerms - 1; term >= 0; --term)
#pragma unroll
            for (int span = 0; span < kSpans; ++span) {
                const uint64_t a = weighed[term].at(span * (kSpan * 128)),
                               b = B.at(first / 8 * kPanelBytes + span * (kSpan * 128));
                if (term == kFoldTerms - 1 && span == 0)
                    warpgroup_mma<1, 1, 0>(sum, a, b);
                else
                    warpgroup_mma<1, 1, 1>(sum, a, b);
            }
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(sum);
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[first + tile][i] = __fmaf_rn(decay, S[first + tile][i], sum[tile][i]);
    }
}

} // namespace replayssm
