//! Scores C_t . B_s of a chunk, which the heads of a block share, and what each head makes of them.
#pragma once

#include "scan_mma_tile.cuh"

namespace replayssm {

//! By one head's warps: C_t . B_s of the blocks on and below the diagonal; half blocks row by row, a float4 a lane.
template <class Traits>
__device__ __forceinline__ void compute_scores(const ScanWarp<Traits>& w, int stage) {
    const ScanShared s = w.layout();
    const uint32_t B = w.base() + stage * s.tile, C = B + s.C;
    float4* scores = reinterpret_cast<float4*>(w.smem + s.scores) + w.lane();
    if constexpr (Traits::kWarpgroup) {
        if (w.sub() >= 4) return;
        const SharedMatrix rows(C), columns(B);
        float sum[8][4];
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < Traits::kN / 16; ++k) {
            const uint32_t at = (k >> 2) * kPanelBytes + ((k & 3) << 5);
            if (k == 0) warpgroup_mma<0, 0, 0>(sum, rows.at(at), columns.at(at));
            if (k != 0) warpgroup_mma<0, 0, 1>(sum, rows.at(at), columns.at(at));
        }
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(sum);
        const int row = w.sub();
#pragma unroll
        for (int half = 0; half < 8; ++half) {
            if (half > 2 * row + 1) continue;
            scores[(row * (row + 1) + half) * kWarp] =
                make_float4(sum[half][0], sum[half][1], sum[half][2], sum[half][3]);
        }
    } else {
        for (int block = w.sub(); block < kHalfBlocks / 2; block += w.per_head()) {
            const int row = (block >= 1) + (block >= 3) + (block >= 6), column = block - row * (row + 1) / 2;
            const uint32_t c = C + w.by_row() + row * (kSpan * 128), b = B + w.by_piece() + column * (kSpan * 128);
            float sum[2][4] = {};
#pragma unroll
            for (int k = 0; k < Traits::kN / 16; k += 2) {
                uint32_t rows[2][4], columns[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t panel = (k >> 2) * kPanelBytes, along = (k + i & 3) << 5;
                    ldmatrix(rows[i], (c ^ along) + panel);
                    ldmatrix(columns[i], (b ^ along) + panel);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(sum[0], rows[i], columns[i][0], columns[i][1]);
                    mma(sum[1], rows[i], columns[i][2], columns[i][3]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scores[(block * 2 + half) * kWarp] =
                    make_float4(sum[half][0], sum[half][1], sum[half][2], sum[half][3]);
            }
        }
    }
}

//! A half block of decayed scores into its strip, as bf16 terms. value: (t, s) (t, s+1) (t+8, s) (t+8, s+1).
template <class Traits>
__device__ __forceinline__ void store_half_block(
    const ScanWarp<Traits>& w, char* strip, int row, int half, const float (&value)[4]) {
    uint32_t upper[kScoreTerms], lower[kScoreTerms];
    split(value[0], value[1], upper);
    split(value[2], value[3], lower);
    char* target = strip + strip_offset(row + w.g(), half) + w.q() * 4;
#pragma unroll
    for (int term = 0; term < kScoreTerms; ++term) {
        *reinterpret_cast<uint32_t*>(target + term * kOperandBytes) = upper[term];
        *reinterpret_cast<uint32_t*>(target + term * kOperandBytes + 256) = lower[term];
    }
}

//! Half `half` of the block on the diagonal of a span.
template <class Traits>
__device__ __forceinline__ void decay_diagonal(
    const ScanWarp<Traits>& w, const float4& score, const TokenDecays& d, int span, int half) {
    const int t = w.g(), s = half * 8 + 2 * w.q();
    const float2 of = *reinterpret_cast<const float2*>(d.exponent + span * kSpan + s);
    const float2 dt = *reinterpret_cast<const float2*>(d.dt + span * kSpan + s);
    const float at[2] = {d.exponent[span * kSpan + t], d.exponent[span * kSpan + t + 8]};
    const float value[4] = {s <= t ? score.x * (dt.x * exp2_fast(fminf(at[0] - of.x, 0.0f))) : 0.0f,
        s + 1 <= t ? score.y * (dt.y * exp2_fast(fminf(at[0] - of.y, 0.0f))) : 0.0f,
        s <= t + 8 ? score.z * (dt.x * exp2_fast(fminf(at[1] - of.x, 0.0f))) : 0.0f,
        s + 1 <= t + 8 ? score.w * (dt.y * exp2_fast(fminf(at[1] - of.y, 0.0f))) : 0.0f};
    store_half_block(w, w.smem + w.operand() + operand_offset(span), 0, half, value);
}

//! Half `half` of the block of spans (row, column), row > column.
template <class Traits>
__device__ __forceinline__ void decay_below(
    const ScanWarp<Traits>& w, const float4& score, const TokenDecays& d, int row, int column, int half) {
    float2 of = *reinterpret_cast<const float2*>(d.to_end + column * kSpan + half * 8 + 2 * w.q());
    const float next = column + 1 < row ? d.from_start[(column + 2) * kSpan - 1] : 1.0f; // spans between the two
    const float last = column + 2 < row ? d.from_start[(column + 3) * kSpan - 1] : 1.0f;
    of.x *= next * last, of.y *= next * last;
    const float at[2] = {d.from_start[row * kSpan + w.g()], d.from_start[row * kSpan + w.g() + 8]};
    const float value[4] = {
        score.x * (at[0] * of.x), score.y * (at[0] * of.y), score.z * (at[1] * of.x), score.w * (at[1] * of.y)};
    store_half_block(w, w.smem + w.operand() + operand_offset(column), (row - column) * kSpan, half, value);
}

//! By the warps of a head: dt_s exp(sum of s+1..t) (C_t . B_s) for s <= t, 0 above, as bf16 strips [t][s].
template <class Traits>
__device__ __forceinline__ void decay_scores(const ScanWarp<Traits>& w, int stage) {
    const float4* scores = reinterpret_cast<const float4*>(w.smem + w.layout().scores) + w.lane();
    const TokenDecays& d = w.decays(stage);
    if constexpr (Traits::kWarpsPerHead == 4) {
        // Each warp: its span's diagonal, and three halves. Rows 1, 2, 3 of column 0, or (2, 1), (3, 1), (3, 2).
        const int sub = w.sub(), half = sub & 1, diagonal = sub * (sub + 3);
        const bool left = sub < 2;
        const float4 one = scores[diagonal * kWarp], two = scores[(diagonal + 1) * kWarp];
        const float4 below[3] = {scores[((left ? 2 : 8) + half) * kWarp], scores[((left ? 6 : 14) + half) * kWarp],
            scores[((left ? 12 : 16) + half) * kWarp]};
        decay_diagonal(w, one, d, sub, 0);
        decay_diagonal(w, two, d, sub, 1);
        decay_below(w, below[0], d, left ? 1 : 2, left ? 0 : 1, half);
        decay_below(w, below[1], d, left ? 2 : 3, left ? 0 : 1, half);
        decay_below(w, below[2], d, 3, left ? 0 : 2, half);
    } else {
        for (int h = w.sub(); h < kHalfBlocks; h += w.per_head()) {
            const int block = h >> 1, row = (block >= 1) + (block >= 3) + (block >= 6),
                      column = block - row * (row + 1) / 2;
            const float4 score = scores[h * kWarp];
            if (row == column) decay_diagonal(w, score, d, row, h & 1);
            if (row != column) decay_below(w, score, d, row, column, h & 1);
        }
    }
}

} // namespace replayssm
