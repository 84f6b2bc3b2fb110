//! Products of a chunk's keys with each other and with its queries, and what a chunk's state update makes of them.
#pragma once

#include "scan_chunk_tile.cuh"

namespace replayssm::delta_scan {

//! A 16 x 8 half of a 16 x 16 block as bf16 terms, `stride` bytes apart; value: (t, s) (t, s+1) (t+8, s) (t+8, s+1).
template <int kCount, class Traits>
__device__ __forceinline__ void store_half_block(
    const ChunkWarp<Traits>& w, char* block, uint32_t stride, int half, const float (&value)[4]) {
    uint32_t upper[kCount], lower[kCount];
    split(value[0], value[1], upper);
    split(value[2], value[3], lower);
    char* target = block + strip_offset(w.g(), half) + w.q() * 4;
#pragma unroll
    for (int term = 0; term < kCount; ++term) {
        *reinterpret_cast<uint32_t*>(target + term * stride) = upper[term];
        *reinterpret_cast<uint32_t*>(target + term * stride + 256) = lower[term];
    }
}

//! By a warp: (I + A)^-1 of a block on the diagonal by forward substitution, one column a lane, as bf16 terms.
template <class Traits>
__device__ __forceinline__ void invert_diagonal(const ChunkWarp<Traits>& w, int span) {
    const ChunkShared& s = w.params.shared;
    __syncwarp();
    if (w.lane() < kSpan) {
        const float* A = reinterpret_cast<const float*>(w.smem + s.diagonal) + span * kSpan * kDiagonalPitch;
        float column[kSpan];
#pragma unroll
        for (int t = 0; t < kSpan; ++t) {
            float sum[4] = {t == w.lane() ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int first = 0; first < t; first += 4) {
                const auto row = load_pack<float, 4>(A + t * kDiagonalPitch + first);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (first + i < t) sum[i] = fmaf(-row.value[i], column[first + i], sum[i]);
            }
            column[t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        }
        char* target = w.smem + s.inverse + span * kBlockBytes + (w.lane() & 7) * 2;
#pragma unroll
        for (int t = 0; t < kSpan; t += 2) {
            uint32_t terms[kTerms];
            split(column[t], column[t + 1], terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
                char* at = target + term * (kSpans * kBlockBytes);
                *reinterpret_cast<uint16_t*>(at + strip_offset(t, w.lane() >> 3)) = static_cast<uint16_t>(terms[term]);
                *reinterpret_cast<uint16_t*>(at + strip_offset(t + 1, w.lane() >> 3)) =
                    static_cast<uint16_t>(terms[term] >> 16);
            }
        }
    }
    __syncwarp();
}

//! By a warp: products of block (row, column), two halves of eight columns.
template <class Traits>
__device__ __forceinline__ void multiply_rows(
    const ChunkWarp<Traits>& w, int stage, int row, int column, float (&keys)[2][4], float (&queries)[2][4]) {
    const ChunkShared& s = w.params.shared;
    const uint32_t k = w.base + s.k + stage * s.tile, q = w.base + s.q + stage * s.tile;
    const uint32_t rows = w.by_row() + row * (kSpan * 128), columns = k + w.by_piece() + column * (kSpan * 128);
#pragma unroll
    for (int step = 0; step < Traits::kN / 16; ++step) {
        const uint32_t panel = (step >> 2) * kPanelBytes, along = (step & 3) << 5;
        uint32_t a[4], c[4], b[4];
        ldmatrix(a, ((k + rows) ^ along) + panel);
        ldmatrix(c, ((q + rows) ^ along) + panel);
        ldmatrix(b, (columns ^ along) + panel);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mma(keys[half], a, b[2 * half], b[2 * half + 1]);
            mma(queries[half], c, b[2 * half], b[2 * half + 1]);
        }
    }
}

//! By a warp: block (row, column) of k k^T and q k^T with their factors, for the products that follow.
template <bool kDiagonal, class Traits>
__device__ __forceinline__ void score_block(const ChunkWarp<Traits>& w, int stage, int row, int column) {
    const ChunkShared& s = w.params.shared;
    const TokenFactors& f = w.factors();
    float keys[2][4] = {}, queries[2][4] = {};
    multiply_rows(w, stage, row, column, keys, queries);
    float between = 1.0f;
    for (int span = column + 1; !kDiagonal && span < row; ++span)
        between *= f.total[span];
    // Of the lane's two rows: what belongs to the later token, decay from its span's start included below the diagonal.
    float to_keys[2], to_queries[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int later = row * kSpan + w.g() + r * 8;
        const float start = kDiagonal ? 1.0f : f.from_start[later];
        to_keys[r] = f.k_norm[later] * f.beta[later] * start;
        to_queries[r] = f.q_norm[later] * start;
    }
    float* A = reinterpret_cast<float*>(w.smem + s.diagonal) + row * kSpan * kDiagonalPitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int first = half * 8 + 2 * w.q();
        float2 earlier = *reinterpret_cast<const float2*>(f.k_norm + column * kSpan + first);
        if (!kDiagonal) {
            const float2 end = *reinterpret_cast<const float2*>(f.to_end + column * kSpan + first);
            earlier.x *= end.x * between, earlier.y *= end.y * between;
        }
        float key[4], query[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = w.g() + (i >> 1) * 8, odd = i & 1, s_ = first + odd;
            const float weight = (odd ? earlier.y : earlier.x) * (kDiagonal ? f.within[row][t][s_] : 1.0f);
            key[i] = keys[half][i] * (weight * to_keys[i >> 1]);
            query[i] = queries[half][i] * (weight * to_queries[i >> 1]);
            if (kDiagonal && s_ > t) query[i] = 0.0f; // whatever the products of later tokens are
            if (kDiagonal) A[t * kDiagonalPitch + s_] = s_ < t ? key[i] : 0.0f;
            key[i] = -key[i];
        }
        store_half_block<kReadTerms>(
            w, w.smem + s.read + block_index(row, column) * kBlockBytes, kBlocks * kBlockBytes, half, query);
        if (!kDiagonal) {
            store_half_block<kTerms>(w, w.smem + s.below + below_index(row, column) * kBlockBytes,
                (kBlocks - kSpans) * kBlockBytes, half, key);
        }
    }
    if (kDiagonal) invert_diagonal(w, row);
}

//! By the block: all blocks. Of eight warps the first four take the diagonal, which is the longer way.
template <class Traits>
__device__ __forceinline__ void score_chunk(const ChunkWarp<Traits>& w, int stage) {
    const int warps = blockDim.x / kWarp, first = warps >= 8 ? kSpans : 0;
    for (int span = w.warp(); span < kSpans; span += warps)
        score_block<true>(w, stage, span, span);
    if (w.warp() < first) return;
    for (int block = w.warp() - first; block < kBlocks - kSpans; block += warps - first) {
        const int row = 1 + (block >= 1) + (block >= 3);
        score_block<false>(w, stage, row, block - below_index(row, 0));
    }
}

} // namespace replayssm::delta_scan
