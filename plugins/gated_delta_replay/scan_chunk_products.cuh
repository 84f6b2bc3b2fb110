//! Matrix products of the chunked scan: what a warp does with its 16 rows of the state, see scan_chunk_kernel.cuh.
//! Sums are fragments of [16 state rows][tokens or key channels].
#pragma once

#include "scan_chunk_tile.cuh"

namespace replayssm::delta_scan {

//! One tile pair of a sum, as the first operand of a product, in bf16 terms.
template <int kCount>
__device__ __forceinline__ void split_pair(const float (*sum)[4], uint32_t (&out)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t terms[kCount];
        split(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1], terms);
#pragma unroll
        for (int term = 0; term < kCount; ++term)
            out[term][i] = terms[term];
    }
}

//! S K^T in two sums (leading terms; the others) and S Q^T, [16 rows][64 tokens] each.
template <class Traits>
__device__ __forceinline__ void read_state(const ChunkWarp<Traits>& w, int stage, const float (&S)[Traits::kTiles][4],
    float (&high)[8][4], float (&low)[8][4], float (&Y)[8][4]) {
    const ChunkShared& s = w.params.shared;
    const uint32_t k = w.base + s.k + stage * s.tile, q = w.base + s.q + stage * s.tile;
    const SharedMatrix keys(k), queries(q);
    uint32_t split_steps[2][kTerms][4]; // products of one step run while the next one's operands are made
#pragma unroll
    for (int step = 0; step < Traits::kN / 16; ++step) {
        auto& a = split_steps[step & 1];
        split_pair(S + 2 * step, a);
        const uint32_t panel = (step >> 2) * kPanelBytes, along = (step & 3) << 5;
        if constexpr (Traits::kWarpgroup) {
            warpgroup_fence();
            const uint64_t of_keys = keys.at(panel + along), of_queries = queries.at(panel + along);
            if (step == 0) {
                warpgroup_mma<0, 0>(high, a[0], of_keys);
                warpgroup_mma<0, 0>(low, a[2], of_keys);
                warpgroup_mma<0, 0>(Y, a[1], of_queries);
            } else {
                warpgroup_mma<0, 1>(high, a[0], of_keys);
                warpgroup_mma<0, 1>(low, a[2], of_keys);
                warpgroup_mma<0, 1>(Y, a[1], of_queries);
            }
            warpgroup_mma<0, 1>(low, a[1], of_keys);
            warpgroup_mma<0, 1>(Y, a[0], of_queries);
            warpgroup_commit();
            if (step + 1 < Traits::kN / 16) warpgroup_wait<1>();
        } else {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                uint32_t b[4], c[4];
                ldmatrix(b, ((k + w.by_piece()) ^ along) + panel + pair * (16 * 128));
                ldmatrix(c, ((q + w.by_piece()) ^ along) + panel + pair * (16 * 128));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(low[2 * pair + i], a[2], b[2 * i], b[2 * i + 1]);
                    mma(Y[2 * pair + i], a[1], c[2 * i], c[2 * i + 1]);
                    mma(high[2 * pair + i], a[0], b[2 * i], b[2 * i + 1]);
                    mma(low[2 * pair + i], a[1], b[2 * i], b[2 * i + 1]);
                    mma(Y[2 * pair + i], a[0], c[2 * i], c[2 * i + 1]);
                }
            }
        }
    }
    if constexpr (Traits::kWarpgroup) {
        warpgroup_wait<0>();
        hold(high), hold(low), hold(Y);
    }
}

//! Pair number `pair` of the six pairs of terms of a product of two fp32 operands, smallest first: 2 0, 1 1, 0 2, 1 0,
//! 0 1, 0 0.
constexpr int kPairs = 6;
__device__ __forceinline__ constexpr int first_term(int pair) { return pair < 3 ? 2 - pair : pair == 3 ? 1 : 0; }
__device__ __forceinline__ constexpr int second_term(int pair) { return pair < 3 ? pair : pair == 4 ? 1 : 0; }

//! Two tiles of a b^T; b: a block whose kTerms terms lie `stride` bytes apart. A sum for each power of 2^-8, so that
//! fewer products wait for one another.
__device__ __forceinline__ void multiply_block(
    float (*out)[4], const uint32_t (&a)[kTerms][4], uint32_t b_at, uint32_t stride) {
    uint32_t b[kTerms][4];
    float sum[kTerms][2][4];
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
        ldmatrix(b[term], b_at + term * stride);
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
#pragma unroll
        for (int level = 0; level < kTerms - term; ++level)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float (&to)[4] = sum[term + level][i];
                if (term == 0)
                    mma_from_zero(to, a[level], b[term][2 * i], b[term][2 * i + 1]);
                else
                    mma(to, a[level], b[term][2 * i], b[term][2 * i + 1]);
            }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            out[i][e] = (sum[2][i][e] + sum[1][i][e]) + sum[0][i][e];
}

//! R of the spans behind `span` and Y of it and those, from D of `span` in bf16 terms. All blocks advance together, a
//! pair of terms at a time.
template <int kSpanIndex>
__device__ __forceinline__ void spread_span(
    const ChunkShared& s, uint32_t at, const uint32_t (&a)[kTerms][4], float (&R)[8][4], float (&Y)[8][4]) {
    constexpr int kBelow = kSpans - 1 - kSpanIndex;
    float sum[kBelow > 0 ? kBelow : 1][2][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
        const int first = first_term(pair), second = second_term(pair);
#pragma unroll
        for (int below = 0; below < kBelow; ++below) {
            uint32_t b[4];
            ldmatrix(b,
                at + s.below +
                    (second * (kBlocks - kSpans) + below_index(kSpanIndex + 1 + below, kSpanIndex)) * kBlockBytes);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (pair == 0)
                    mma_from_zero(sum[below][i], a[first], b[2 * i], b[2 * i + 1]);
                else
                    mma(sum[below][i], a[first], b[2 * i], b[2 * i + 1]);
            }
        }
        if (pair < kPairs - 3) continue; // outputs take the three largest
#pragma unroll
        for (int row = kSpanIndex; row < kSpans; ++row) {
            uint32_t b[4];
            ldmatrix(b, at + s.read + (second * kBlocks + block_index(row, kSpanIndex)) * kBlockBytes);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                mma(Y[2 * row + i], a[first], b[2 * i], b[2 * i + 1]);
        }
    }
#pragma unroll
    for (int below = 0; below < kBelow; ++below)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& element = R[2 * (kSpanIndex + 1 + below) + i][e];
                element = __fadd_rn(element, sum[below][i][e]);
            }
}

//! What the tokens write, from what S holds for their keys: D = (I + A)^-1 beta (v - held), span by span; R comes in as
//! beta (v - held of S), leaves as D. Y += D (q k^T with decays)^T on the way.
template <class Traits, int kSpanIndex = 0>
__device__ __forceinline__ void solve_chunk(const ChunkWarp<Traits>& w, float (&R)[8][4], float (&Y)[8][4]) {
    if constexpr (kSpanIndex < kSpans) {
        const ChunkShared& s = w.params.shared;
        const uint32_t at = w.base + w.in_strip();
        uint32_t a[kTerms][4];
        split_pair(R + 2 * kSpanIndex, a);
        multiply_block(R + 2 * kSpanIndex, a, at + s.inverse + kSpanIndex * kBlockBytes, kSpans * kBlockBytes);
        split_pair(R + 2 * kSpanIndex, a);
        spread_span<kSpanIndex>(s, at, a, R, Y);
        solve_chunk<Traits, kSpanIndex + 1>(w, R, Y);
    }
}

//! R = beta (v - held of S), Y = what q reads of S; decays and norms of the tokens applied.
template <class Traits>
__device__ __forceinline__ void weigh_reads(
    const ChunkWarp<Traits>& w, bool has_state, float (&R)[8][4], const float (&low)[8][4], float (&Y)[8][4]) {
    const TokenFactors& f = w.factors();
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const float before = f.before[span];
        uint32_t v[4];
        ldmatrix_trans(v, w.base + w.strip() + span * kSpan * 32);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int token = span * kSpan + tile * 8 + 2 * w.q();
            const float2 start = *reinterpret_cast<const float2*>(f.from_start + token);
            const float2 k_norm = *reinterpret_cast<const float2*>(f.k_norm + token);
            const float2 q_norm = *reinterpret_cast<const float2*>(f.q_norm + token);
            const float2 beta = *reinterpret_cast<const float2*>(f.beta + token);
            const float decay[2] = {start.x * before, start.y * before};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int odd = i & 1, at = 2 * span + tile;
                const uint32_t pair = v[tile * 2 + (i >> 1)];
                const float value = odd ? high_bf16(pair) : low_bf16(pair);
                const float held = has_state ? R[at][i] + low[at][i] : 0.0f;
                R[at][i] = (odd ? beta.y : beta.x) * fmaf(-decay[odd] * (odd ? k_norm.y : k_norm.x), held, value);
                Y[at][i] = has_state ? Y[at][i] * (decay[odd] * (odd ? q_norm.y : q_norm.x)) : 0.0f;
            }
        }
    }
}

//! Outputs, to where v was.
template <class Traits>
__device__ __forceinline__ void write_outputs(const ChunkWarp<Traits>& w, const float (&Y)[8][4]) {
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            out[i] = pack_bf16(Y[2 * span + i / 2][i % 2 * 2], Y[2 * span + i / 2][i % 2 * 2 + 1]);
        stmatrix_trans(w.base + w.strip() + span * kSpan * 32, out);
    }
}

//! S <- e(0,64) S + sum_s e(s,64) d_s kn_s^T.
template <class Traits>
__device__ __forceinline__ void fold_chunk(
    const ChunkWarp<Traits>& w, int stage, float (&D)[8][4], float (&S)[Traits::kTiles][4]) {
    const ChunkShared& s = w.params.shared;
    const TokenFactors& f = w.factors();
    const uint32_t k = w.base + s.k + stage * s.tile;
    uint32_t a[kSpans][kTerms][4];
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const float behind = f.behind[span];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int token = span * kSpan + tile * 8 + 2 * w.q();
            const float2 end = *reinterpret_cast<const float2*>(f.to_end + token);
            const float2 norm = *reinterpret_cast<const float2*>(f.k_norm + token);
            const float weight[2] = {end.x * behind * norm.x, end.y * behind * norm.y};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                D[2 * span + tile][i] *= weight[i & 1];
        }
        split_pair(D + 2 * span, a[span]);
    }
    const float decay = f.chunk;
    const SharedMatrix keys(k);
#pragma unroll
    for (int first = 0; first < Traits::kTiles; first += 8) {
        float sum[8][4];
        if constexpr (Traits::kWarpgroup) {
            warpgroup_fence();
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
                for (int span = 0; span < kSpans; ++span) {
                    const uint64_t b = keys.at(first / 8 * kPanelBytes + span * (kSpan * 128));
                    if (term == kTerms - 1 && span == 0)
                        warpgroup_mma<1, 0>(sum, a[span][term], b);
                    else
                        warpgroup_mma<1, 1>(sum, a[span][term], b);
                }
            warpgroup_commit();
            warpgroup_wait<0>();
            hold(sum);
        } else {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                uint32_t b[kSpans][4];
#pragma unroll
                for (int span = 0; span < kSpans; ++span)
                    ldmatrix_trans(
                        b[span], ((k + w.by_row()) ^ (pair << 5)) + first / 8 * kPanelBytes + span * (kSpan * 128));
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    mma_from_zero(sum[2 * pair + i], a[0][kTerms - 1], b[0][2 * i], b[0][2 * i + 1]);
#pragma unroll
                for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
                    for (int span = term == kTerms - 1 ? 1 : 0; span < kSpans; ++span)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            mma(sum[2 * pair + i], a[span][term], b[span][2 * i], b[span][2 * i + 1]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[first + tile][i] = __fmaf_rn(decay, S[first + tile][i], sum[tile][i]);
    }
}

} // namespace replayssm::delta_scan
