//! How rows of B and C come into a block's shared memory, and their products.
#pragma once

#include "../common/async_copy.cuh"
#include "fold.cuh"

namespace replayssm {

//! Write 16 / sizeof(act_t) consecutive elements, from element n on, to an fp32 row of B or C in shared memory.
template <class Tile, class act_t>
__device__ __forceinline__ void put_row_vector(float* row, int n, uint4 bits) {
    float value[16 / sizeof(act_t)];
    unpack16<act_t>(bits, value);
#pragma unroll
    for (int part = 0; part < static_cast<int>(16 / sizeof(act_t)); part += 4) {
        Pack<float, 4> pack;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            pack.value[v] = value[part + v];
        store_pack(row + Tile::shared_position(n + part), pack);
    }
}

//! By the block, in two halves so that other loads can be asked for in between: 16-byte vectors of act_t rows, kLoads a
//! thread and round, on their way to fp32 rows in shared memory. source(i) is the address of vector i, or NULL for
//! padding.
template <class Tile, class act_t, int kLoads_>
struct RowVectors {
    static constexpr int kLoads = kLoads_;
    static constexpr int kVec = 16 / sizeof(act_t);
    uint4 bits[kLoads];

    template <class Source>
    __device__ __forceinline__ void load(int first, int count, Source source) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int vector = first + i * blockDim.x + threadIdx.x;
            const act_t* address = vector < count ? source(vector) : nullptr;
            bits[i] = make_uint4(0, 0, 0, 0);
            if (address != nullptr) bits[i] = *reinterpret_cast<const uint4*>(address);
        }
    }

    //! Vector i becomes elements i % vectors * kVec .. of row i / vectors; those outside 0 .. count-1 are left out.
    __device__ __forceinline__ void put(int first, int count, int vectors, float* rows, int n_pad) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int vector = first + i * blockDim.x + threadIdx.x;
            if (vector >= 0 && vector < count)
                put_row_vector<Tile, act_t>(rows + vector / vectors * n_pad, vector % vectors * kVec, bits[i]);
        }
    }
};

//! By the block: `count` ring rows of B, from logical row 0 on, converted to fp32. Only live rows are read.
template <class Tile, class act_t>
__device__ __forceinline__ void load_ring_b(
    const Mamba2Slots& pool, const char* slot, int group, int dstate, int origin, int count, float* B, int n_pad) {
    using Vectors = RowVectors<Tile, act_t, 4>;
    const int vectors = n_pad / Vectors::kVec;
    const act_t* ring =
        reinterpret_cast<const act_t*>(slot + pool.ring_b) + static_cast<int64_t>(group) * pool.ring_rows * dstate;
    const auto source = [&](int i) {
        const int n = i % vectors * Vectors::kVec;
        return n < dstate ? ring + ring_row(origin, i / vectors, pool.ring_rows) * dstate + n : nullptr;
    };
    for (int first = 0; first < count * vectors; first += 4 * blockDim.x) {
        Vectors rows;
        rows.load(first, count * vectors, source);
        rows.put(first, count * vectors, vectors, B, n_pad);
    }
}

//! By the block: `tokens` input rows of B or C, from element `offset` on with stride in.strides[1], converted to fp32.
template <class Tile, class act_t>
__device__ __forceinline__ void load_token_rows(
    const replayssm_tensor& in, int64_t offset, int tokens, int dstate, float* rows, int n_pad) {
    using Vectors = RowVectors<Tile, act_t, 4>;
    const int vectors = n_pad / Vectors::kVec;
    const act_t* data = static_cast<const act_t*>(in.data) + offset;
    const auto source = [&](int i) {
        const int n = i % vectors * Vectors::kVec;
        return n < dstate ? data + i / vectors * in.strides[1] + n : nullptr;
    };
    for (int first = 0; first < tokens * vectors; first += 4 * blockDim.x) {
        Vectors out;
        out.load(first, tokens * vectors, source);
        out.put(first, tokens * vectors, vectors, rows, n_pad);
    }
}

//! By the block: B_r . C_t for every row r that token t sees: the step's tokens 0..t are rows 0..t, history follows
//! from row `tokens` on.
__device__ __forceinline__ void multiply_b_c(
    const float* B, const float* C, float* BC, int n_pad, int history, int tokens, int rows_cap) {
    const int lane = threadIdx.x & 7, unit = threadIdx.x >> 3, units = blockDim.x >> 3;
    const int pairs = (tokens + history) * tokens;
    for (int base = 0; base < pairs; base += units) {
        const int pair = base + unit, r = pair / tokens, t = pair - r * tokens;
        const bool wanted = pair < pairs && (r <= t || r >= tokens);
        float sum = 0.0f;
        if (wanted) {
            for (int n = lane * 4; n < n_pad; n += 32) {
                const auto b = load_pack<float, 4>(B + r * n_pad + n), c = load_pack<float, 4>(C + t * n_pad + n);
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    sum = __fmaf_rn(b.value[v], c.value[v], sum);
            }
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 4));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
        if (wanted && lane == 0) BC[t * rows_cap + r] = sum;
    }
}

} // namespace replayssm
