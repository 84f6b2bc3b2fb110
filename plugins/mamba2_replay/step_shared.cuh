//! Shared memory of one block of the step kernel, and the row copies that fill it.
#pragma once

#include "../common/async_copy.cuh"
#include "fold.cuh"

namespace replayssm {

//! Byte offsets of the parts. Rows of x and z lie `row_bytes` apart: 16 bytes more than a row holds, so that eight lanes
//! that read one column of eight rows meet different banks.
struct StepShared {
    uint32_t state = 0; // state_t [block_rows, N], staged kernels only
    uint32_t x = 0;     // act_t [buffers][T + committed_cap] rows: the step's tokens, then committed ring rows, oldest first
    uint32_t z = 0;     // act_t [buffers][T] rows
    uint32_t B = 0;     // fp32 [T + committed_cap][n_pad], same rows as x
    uint32_t C = 0;     // fp32 [T][n_pad]
    uint32_t BC = 0;    // fp32 [T][T + committed_cap]: B_r . C_t
    uint32_t fold = 0;  // float2 {decay, dt} [buffers][committed_cap]: what folds ring row j
    uint32_t coef = 0;  // fp32 [buffers][T][T + committed_cap]: weight of x_r in token t
    uint32_t decay = 0; // fp32 [buffers][T]: weight of S C_t
    uint32_t barrier = 0;
    uint32_t bytes = 0;
    uint32_t row_bytes = 0;
    int rows_cap = 0;
    int n_pad = 0;

    __host__ __device__ StepShared(int committed_cap, int tokens, int block_rows, int padded_n, int act_bytes, int buffers,
        uint32_t state_bytes, bool gated) {
        rows_cap = committed_cap + tokens;
        n_pad = padded_n;
        row_bytes = ((block_rows * act_bytes + 15) / 16 + 1) * 16;
        uint32_t end = 0;
        state = take(end, state_bytes);
        x = take(end, buffers * rows_cap * row_bytes);
        z = take(end, gated ? buffers * tokens * row_bytes : 0);
        B = take(end, rows_cap * n_pad * 4);
        C = take(end, tokens * n_pad * 4);
        BC = take(end, tokens * rows_cap * 4);
        fold = take(end, buffers * rows_cap * 8);
        coef = take(end, buffers * tokens * rows_cap * 4);
        decay = take(end, buffers * tokens * 4);
        barrier = take(end, 8);
        bytes = end;
    }

    static __host__ __device__ uint32_t take(uint32_t& end, uint32_t size) {
        const uint32_t offset = end;
        end = (end + size + 15) / 16 * 16;
        return offset;
    }
};

//! Write 16 / sizeof(act_t) consecutive elements, from element n on, to an fp32 row of B or C in shared memory.
template <class Tile, class act_t>
__device__ __forceinline__ void put_row_vector(float* row, int n, uint4 bits) {
    float value[16 / sizeof(act_t)];
    unpack16<act_t>(bits, value);
#pragma unroll
    for (int part = 0; part < static_cast<int>(16 / sizeof(act_t)); part += 4) {
        Pack<float, 4> pack;
#pragma unroll
        for (int v = 0; v < 4; ++v) pack.value[v] = value[part + v];
        store_pack(row + Tile::shared_position(n + part), pack);
    }
}

//! By the block: `count` ring rows of B, from logical row 0 on, converted to fp32. Only live rows are read.
template <class Tile, class act_t>
__device__ __forceinline__ void load_ring_b(const Mamba2Slots& pool, const char* slot, int group, int dstate, int origin,
    int count, float* B, int n_pad) {
    constexpr int kVec = 16 / sizeof(act_t);
    const int vectors = n_pad / kVec;
    const act_t* ring = reinterpret_cast<const act_t*>(slot + pool.ring_b) + static_cast<int64_t>(group) * pool.ring_rows * dstate;
    for (int i = threadIdx.x; i < count * vectors; i += blockDim.x) {
        const int j = i / vectors, n = i % vectors * kVec;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (n < dstate) bits = *reinterpret_cast<const uint4*>(ring + ring_row(origin, j, pool.ring_rows) * dstate + n);
        put_row_vector<Tile, act_t>(B + j * n_pad, n, bits);
    }
}

//! By the block: `tokens` input rows of B or C, from element `offset` on with `token_stride`, converted to fp32.
template <class Tile, class act_t>
__device__ __forceinline__ void load_token_rows(const replayssm_tensor& in, int64_t offset, int tokens, int dstate, float* rows,
    int n_pad) {
    constexpr int kVec = 16 / sizeof(act_t);
    const int vectors = n_pad / kVec;
    const act_t* data = static_cast<const act_t*>(in.data) + offset;
    for (int i = threadIdx.x; i < tokens * vectors; i += blockDim.x) {
        const int t = i / vectors, n = i % vectors * kVec;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (n < dstate) bits = __ldg(reinterpret_cast<const uint4*>(data + t * in.strides[1] + n));
        put_row_vector<Tile, act_t>(rows + t * n_pad, n, bits);
    }
}

//! By the block: append the step's B rows to a group's ring, from ring row append_row on.
template <class act_t>
__device__ __forceinline__ void append_token_rows(const replayssm_tensor& in, int64_t offset, int tokens, int dstate, act_t* ring,
    int append_row, int ring_rows) {
    constexpr int kVec = 16 / sizeof(act_t);
    const int vectors = dstate / kVec;
    const act_t* data = static_cast<const act_t*>(in.data) + offset;
    for (int i = threadIdx.x; i < tokens * vectors; i += blockDim.x) {
        const int t = i / vectors, n = i % vectors * kVec;
        *reinterpret_cast<uint4*>(ring + ring_row(append_row, t, ring_rows) * dstate + n) =
            __ldg(reinterpret_cast<const uint4*>(data + t * in.strides[1] + n));
    }
}

//! By the block: B_r . C_t for every row r that token t sees: the step's tokens 0..t are rows 0..t, history follows from row
//! `tokens` on.
__device__ __forceinline__ void multiply_b_c(const float* B, const float* C, float* BC, int n_pad, int history, int tokens,
    int rows_cap) {
    const int lane = threadIdx.x & 7, unit = threadIdx.x >> 3, units = blockDim.x >> 3;
    const int pairs = (tokens + history) * tokens, rounds = (pairs + units - 1) / units;
    for (int round = 0; round < rounds; ++round) {
        const int pair = round * units + unit, r = pair / tokens, t = pair - r * tokens;
        const bool wanted = pair < pairs && (r <= t || r >= tokens);
        float sum = 0.0f;
        if (wanted) {
            for (int n = lane * 4; n < n_pad; n += 32) {
                const auto b = load_pack<float, 4>(B + r * n_pad + n), c = load_pack<float, 4>(C + t * n_pad + n);
#pragma unroll
                for (int v = 0; v < 4; ++v) sum = __fmaf_rn(b.value[v], c.value[v], sum);
            }
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 4));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
        if (wanted && lane == 0) BC[t * rows_cap + r] = sum;
    }
}

} // namespace replayssm
