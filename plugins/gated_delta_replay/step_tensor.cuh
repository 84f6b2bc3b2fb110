//! Several tokens of GDN on tensor cores, V = K = 128, bf16 activations: products of the keys of tokens and ring rows
//! with the step's keys and queries, of the state and of the ring's d with them, and the triangular solve in the
//! registers that those products leave.
//!
//! Keys and queries enter as they come, in bf16; their norms multiply the sums. An fp32 state and the ring rows'
//! weights enter as two bf16 terms, which leaves out 2^-17 of each. Folds never round so.
//! As a product sees it (lane = 4 g + q; rows g and g + 8 of the first operand, columns 2 q and 2 q + 1 of the sums):
//! row g of a warp's 16 state rows is row 2 g of them, row g + 8 is row 2 g + 1, the two that a thread holds. Column n
//! is the key (n even) or query of token n / 2, so a lane has what state and ring hold for one of every four tokens.
//! Which element of K stands at which place is the same for both operands and does not matter otherwise: of every chunk
//! of 32, lane q has 4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3.
#pragma once

#include "../common/tensor_core.cuh"
#include "step_outputs.cuh"
#include "step_prepare.cuh"

namespace replayssm {

//! A vector of the second operand, as this lane needs it: chunk v of 32 elements.
__device__ __forceinline__ Pack<uint32_t, 4> vector_chunk(const char* vectors, int row, int v, int q) {
    return load_pack<uint32_t, 4>(vectors + row * kTensorVectorBytes + v * 64 + q * 16);
}

//! Keys of 16 rows as a first operand: of rows g and g + 8 this lane's four elements of every 16.
struct TensorKeys {
    static constexpr int kPieces = 8;
    Pack<uint32_t, 2> row[2][kPieces];
    float rnorm[2];

    //! Ring rows 16 tile .. of the group; zeros past the live ones.
    template <class Traits>
    __device__ __forceinline__ void load(const GatedDeltaStepParams& p, const DeltaBlock& b, int tile) {
        const __nv_bfloat16* ring =
            b.region<const __nv_bfloat16>(p.pool.ring_k) + b.group * p.pool.ring_rows * Traits::kDstate;
        const float* norms = b.region<const float>(p.pool.ring_k_rnorm) + b.group * p.pool.scalar_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = tile * kTensorRows + b.lane() / 4 + 8 * i;
            const bool live = j < b.plan.committed;
            const int at = live ? b.committed_row(p.pool, j) : 0;
            rnorm[i] = live ? norms[at] : 0.0f;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                row[i][piece] = Pack<uint32_t, 2>{};
                if (live)
                    row[i][piece] = load_pack<uint32_t, 2>(ring + at * Traits::kDstate + piece * 16 + b.lane() % 4 * 4);
            }
        }
    }

    //! Keys of the step's tokens, from the vectors in shared memory; rows past the last token repeat it.
    __device__ __forceinline__ void load_tokens(const char* vectors, const float2* norms, const DeltaBlock& b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = min(b.lane() / 4 + 8 * i, b.tokens - 1);
            rnorm[i] = norms[t].x;
#pragma unroll
            for (int v = 0; v < kPieces / 2; ++v) {
                const auto chunk = vector_chunk(vectors, 2 * t, v, b.lane() % 4);
                row[i][2 * v] = {chunk.value[0], chunk.value[1]};
                row[i][2 * v + 1] = {chunk.value[2], chunk.value[3]};
            }
        }
    }

    //! For a fold: the rows normalised, in fp32.
    __device__ __forceinline__ void store(const DeltaBlock& b, float* keys, int tile) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = tile * kTensorRows + b.lane() / 4 + 8 * i;
            if (j >= b.plan.committed) continue;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const uint32_t low = row[i][piece].value[0], high = row[i][piece].value[1];
                const Pack<float, 4> out{__fmul_rn(low_bf16(low), rnorm[i]), __fmul_rn(high_bf16(low), rnorm[i]),
                    __fmul_rn(low_bf16(high), rnorm[i]), __fmul_rn(high_bf16(high), rnorm[i])};
                store_pack(keys + j * b.dstate + piece * 16 + b.lane() % 4 * 4, out);
            }
        }
    }

    //! Products with every token's key and query into dots; this tile's first row is row `first`, `count` exist.
    template <int kGroups>
    __device__ __forceinline__ void multiply(const char* vectors, const float2* norms, const DeltaBlock& b,
        float2* dots, int stride, int first, int count) const {
        const int g = b.lane() / 4, q = b.lane() % 4;
        float sums[kGroups][4] = {};
#pragma unroll
        for (int v = 0; v < kPieces / 2; ++v)
#pragma unroll
            for (int f = 0; f < kGroups; ++f) {
                const auto chunk = vector_chunk(vectors, 8 * f + g, v, q);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const auto &low = row[0][2 * v + h], &high = row[1][2 * v + h];
                    const uint32_t a[4] = {low.value[0], high.value[0], low.value[1], high.value[1]};
                    mma(sums[f], a, chunk.value[2 * h], chunk.value[2 * h + 1]);
                }
            }
#pragma unroll
        for (int f = 0; f < kGroups; ++f) {
            const int t = 4 * f + q;
            if (t >= b.tokens) continue;
            const float2 norm = norms[t];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (g + 8 * i >= count) continue;
                dots[(first + g + 8 * i) * stride + t] =
                    make_float2(sums[f][2 * i] * (rnorm[i] * norm.x), sums[f][2 * i + 1] * (rnorm[i] * norm.y));
            }
        }
    }
};

//! By the block: products of the step's tokens and the live ring rows, keys for a fold. `keys` holds ring tile
//! warp() - 1. Ends with a barrier.
template <class Traits>
__device__ __forceinline__ void multiply_keys(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, TensorKeys& keys) {
    const char* vectors = smem + p.shared.vectors;
    const float2* norms = reinterpret_cast<const float2*>(smem + p.shared.norms);
    float2* dots = reinterpret_cast<float2*>(smem + p.shared.dots);
    const int warps = blockDim.x / kWarp, tiles = 1 + (b.plan.committed + kTensorRows - 1) / kTensorRows;
    for (int i = b.warp(); i < tiles; i += warps) {
        const int tile = i - 1, first = tile * kTensorRows;
        if (i == 0) {
            keys.load_tokens(vectors, norms, b);
            keys.multiply<Traits::kGroups>(vectors, norms, b, dots, p.shared.dot_stride, 0, b.tokens);
            continue;
        }
        if (i >= warps) keys.load<Traits>(p, b, tile);
        if (b.plan.flush) {
            keys.store(b, reinterpret_cast<float*>(smem + p.shared.keys), tile);
        } else {
            keys.multiply<Traits::kGroups>(
                vectors, norms, b, dots, p.shared.dot_stride, b.tokens + first, b.plan.committed - first);
        }
    }
    __syncthreads(); // products
}

//! By the block: vectors and norms of the step's tokens, ring rows k; then multiply_keys. `token` holds the rows of
//! token warp(), already in the vectors.
template <class Traits>
__device__ __forceinline__ void prepare_tensor(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, TokenRows<Traits>& token, TensorKeys& keys) {
    float2* norms = reinterpret_cast<float2*>(smem + p.shared.norms);
    const int warps = blockDim.x / kWarp;
    for (int t = b.warp(); t < b.tokens; t += warps) {
        if (t >= warps) {
            token.load(p, b, t, true);
            token.put_vectors(smem + p.shared.vectors, t);
            token.normalise(p);
        }
        token.append(p, b, t);
        if (b.lane() == 0) norms[t] = make_float2(token.k_norm, token.q_norm);
    }
    __syncthreads(); // vectors, norms
    multiply_keys<Traits>(p, smem, b, keys);
}

//! What state and ring hold for the step's tokens: sums[f] of token 4 f + q, {key, query} of row 2 g, then of 2 g + 1.
template <class Traits>
struct TensorSums {
    static constexpr int kGroups = Traits::kGroups;
    using Tile = typename Traits::Tile;
    float sums[kGroups][4];

    //! S times keys and queries.
    __device__ __forceinline__ void multiply_state(const Tile& tile, const char* vectors, int g, int q) {
        constexpr int kTerms = sizeof(typename Traits::state_t) == 2 ? 1 : 2;
        static_assert(Tile::kRows == 2 && Tile::kLanes == 4, "a thread's part of a product");
#pragma unroll
        for (int v = 0; v < Tile::kChunks / 2; ++v) {
            uint32_t a[2][kTerms][4];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* S = tile.S[i & 1][2 * v + h] + (i >> 1) * 2;
                    uint32_t terms[kTerms];
                    split<kTerms>(S[0], S[1], terms);
#pragma unroll
                    for (int term = 0; term < kTerms; ++term)
                        a[h][term][i] = terms[term];
                }
#pragma unroll
            for (int f = 0; f < kGroups; ++f) {
                const auto chunk = vector_chunk(vectors, 8 * f + g, v, q);
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int term = 0; term < kTerms; ++term)
                        mma(sums[f], a[h][term], chunk.value[2 * h], chunk.value[2 * h + 1]);
            }
        }
    }

    //! d of the live ring rows times their weights. rows: of ring row 0, this thread's two elements.
    __device__ __forceinline__ void add_ring(
        const char* rows, int row_bytes, int count, const char* weights, int g, int q) {
#pragma unroll 1
        for (int first = 0; first < count; first += kTensorRows) {
            uint32_t d[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = first + 2 * q + (i & 1) + 8 * (i >> 1);
                d[i] = j < count ? *reinterpret_cast<const uint32_t*>(rows + j * row_bytes) : 0;
            }
            const uint32_t a[4] = {__byte_perm(d[0], d[1], 0x5410), __byte_perm(d[0], d[1], 0x7632),
                __byte_perm(d[2], d[3], 0x5410), __byte_perm(d[2], d[3], 0x7632)};
#pragma unroll
            for (int f = 0; f < kGroups; ++f) {
                const auto w = load_pack<uint32_t, 4>(weights + ((first / 2 * kGroups + 8 * f + g) * 4 + q) * 16);
                mma(sums[f], a, w.value[0], w.value[1]);
                mma(sums[f], a, w.value[2], w.value[3]);
            }
        }
    }
};

//! Outputs and new ring rows of an item. b.tokens is at most 4 kGroups.
template <class Traits>
__device__ __forceinline__ void write_tensor_outputs(const typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    const char* smem, const DeltaBlock& b, int item, int rows_buffer, int buffer) {
    using act_t = typename Traits::act_t;
    constexpr int kGroups = Traits::kGroups;
    const int g = b.lane() / 4, q = b.lane() % 4, own = Traits::Tile::first_row(b.thread), stride = p.shared.dot_stride;
    const char* rows = smem + p.shared.rows + rows_buffer * p.shared.rows_cap * p.shared.row_bytes + own * 2;
    const float4* tokens = reinterpret_cast<const float4*>(smem + p.shared.token) + buffer * stride;
    const float2* weights = reinterpret_cast<const float2*>(smem + p.shared.weights) + buffer * b.tokens * stride + q;
    TensorSums<Traits> held{};
    held.multiply_state(tile, smem + p.shared.vectors, g, q);
    float beta[kGroups], v[kGroups][2];
#pragma unroll
    for (int f = 0; f < kGroups; ++f) {
        const int t = min(4 * f + q, b.tokens - 1);
        const float4 token = tokens[t];
        beta[f] = token.x;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            held.sums[f][i] *= i & 1 ? token.z : token.y;
        const auto pack = load_pack<act_t, 2>(rows + t * p.shared.row_bytes);
        v[f][0] = to_float(pack.value[0]);
        v[f][1] = to_float(pack.value[1]);
    }
    held.add_ring(rows + b.tokens * p.shared.row_bytes, p.shared.row_bytes, b.plan.history,
        smem + p.shared.ring_weights + buffer * p.shared.ring_weight_bytes, g, q);
    float d[kGroups][2];
#pragma unroll
    for (int m = 0; m < 4 * kGroups; ++m) {
        if (m >= b.tokens) break;
        const int own_group = m / 4;
        float d_m[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float mine = beta[own_group] * (v[own_group][r] - held.sums[own_group][2 * r]);
            if (q == m % 4) d[own_group][r] = mine;
            d_m[r] = __shfl_sync(kFullMask, mine, m % 4, 4);
        }
#pragma unroll
        for (int f = own_group; f < kGroups; ++f) {
            const float2 weight = weights[m * stride + 4 * f];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (f > own_group || q > m % 4) held.sums[f][2 * r] = __fmaf_rn(weight.x, d_m[r], held.sums[f][2 * r]);
                if (f > own_group || q >= m % 4)
                    held.sums[f][2 * r + 1] = __fmaf_rn(weight.y, d_m[r], held.sums[f][2 * r + 1]);
            }
        }
    }
    const auto to = ItemOutputs<act_t>::template of<Traits>(p, b, item);
#pragma unroll
    for (int f = 0; f < kGroups; ++f) {
        const int t = 4 * f + q;
        if (t >= b.tokens) continue;
        const int at = b.append_row(p.pool, t) * 128 + own;
        store_pack(to.o + t * p.in.o.token + own,
            Pack<act_t, 2>{from_float<act_t>(held.sums[f][1]), from_float<act_t>(held.sums[f][3])});
        store_pack(to.ring_d + at, Pack<act_t, 2>{stored_d<act_t>(d[f][0]), stored_d<act_t>(d[f][1])});
        store_pack(to.ring_v + at, load_pack<act_t, 2>(rows + t * p.shared.row_bytes));
    }
}

} // namespace replayssm
