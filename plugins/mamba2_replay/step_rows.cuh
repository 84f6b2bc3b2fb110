//! B and C rows of a step: from global memory to B.C in shared memory, C in fp32 for S C, B in fp32 for a fold.
#pragma once

#include "step_weigh.cuh"

namespace replayssm {

//! By the block: append the step's B rows to a group's ring, from ring row append_row on.
template <class act_t>
__device__ __forceinline__ void append_token_rows(
    const StepTensor& in, int offset, int tokens, int dstate, act_t* ring, int append_row, int ring_rows) {
    constexpr int kVec = 16 / sizeof(act_t);
    const int vectors = dstate / kVec;
    const act_t* data = static_cast<const act_t*>(in.data) + offset;
    for (int i = threadIdx.x; i < tokens * vectors; i += blockDim.x) {
        const int t = i / vectors, n = i % vectors * kVec;
        *reinterpret_cast<uint4*>(ring + ring_row(append_row, t, ring_rows) * dstate + n) =
            *reinterpret_cast<const uint4*>(data + t * in.token + n);
    }
}

//! Any number of tokens: all rows go to shared memory first.
template <class Tile, class act_t>
struct ManyTokenRows {
    using Vectors = RowVectors<Tile, act_t, 2>;
    Vectors tokens;
    Vectors ring;

    static __device__ __forceinline__ int vectors(const Mamba2StepParams& p) { return p.shared.n_pad / Vectors::kVec; }

    //! C rows, then B rows.
    __device__ __forceinline__ void load_tokens(const Mamba2StepParams& p, const StepBlock& b, int first = 0) {
        const act_t* C = static_cast<const act_t*>(p.in.C.data) + b.row * p.in.C.row + b.group * p.in.C.head;
        const act_t* B = static_cast<const act_t*>(p.in.B.data) + b.row * p.in.B.row + b.group * p.in.B.head;
        const int per_row = vectors(p), half = b.tokens * per_row;
        tokens.load(first, 2 * half, [&](int i) -> const act_t* {
            const int rest = i < half ? i : i - half, t = rest / per_row, n = (rest - t * per_row) * Vectors::kVec;
            if (n >= b.dstate) return nullptr;
            return i < half ? C + t * p.in.C.token + n : B + t * p.in.B.token + n;
        });
    }

    __device__ __forceinline__ void load_ring(const Mamba2StepParams& p, const StepBlock& b, int first = 0) {
        const act_t* rows =
            reinterpret_cast<const act_t*>(b.slot + p.pool.ring_b) + b.group * p.pool.ring_rows * b.dstate;
        const int per_row = vectors(p);
        ring.load(first, b.plan.committed * per_row, [&](int i) -> const act_t* {
            const int j = i / per_row, n = (i - j * per_row) * Vectors::kVec;
            return n < b.dstate ? rows + ring_row(b.plan.origin, j, p.pool.ring_rows) * b.dstate + n : nullptr;
        });
    }

    //! Shared rows of B: the tokens, then the ring. Appends the tokens' B where this block is the first of its group.
    __device__ __forceinline__ void finish(const Mamba2StepParams& p, char* smem, const StepBlock& b) {
        const int n_pad = p.shared.n_pad, per_row = vectors(p), half = b.tokens * per_row,
                  live = b.plan.committed * per_row;
        const int step = Vectors::kLoads * blockDim.x;
        float* B = reinterpret_cast<float*>(smem + p.shared.B);
        float* C = reinterpret_cast<float*>(smem + p.shared.C);
        for (int first = 0;;) {
            tokens.put(first, half, per_row, C, n_pad);
            tokens.put(first - half, half, per_row, B, n_pad);
            first += step;
            if (first >= 2 * half) break;
            load_tokens(p, b, first);
        }
        for (int first = 0;;) {
            ring.put(first, live, per_row, B + b.tokens * n_pad, n_pad);
            first += step;
            if (first >= live) break;
            load_ring(p, b, first);
        }
        if (b.split == 0 && b.first_head == b.group * p.shape.heads_per_group) {
            append_token_rows<act_t>(p.in.B, b.row * p.in.B.row + b.group * p.in.B.head, b.tokens, b.dstate,
                reinterpret_cast<act_t*>(b.slot + p.pool.ring_b) + b.group * p.pool.ring_rows * b.dstate,
                ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows), p.pool.ring_rows);
        }
        __syncthreads();
        multiply_b_c(
            B, C, reinterpret_cast<float*>(smem + p.shared.BC), n_pad, b.plan.history, b.tokens, p.shared.rows_cap);
    }
};

//! One token, dstate known: thread i has vector i % kVectors of every row that it loads, and of C, so B.C comes from
//! registers.
template <class Tile, class act_t>
struct OneTokenRows {
    static constexpr int kVec = 16 / sizeof(act_t);
    static constexpr int kVectors = Tile::kDstate / kVec;
    static constexpr int kLoads =
        Tile::kRows == 2 ? 1 : 2; // ring rows a thread has on their way at a time; 16 a block of P = 64
    static_assert(
        Tile::kDstate == 0 || (kVectors <= kWarp && kWarp % kVectors == 0), "a row's vectors lie in one warp");

    uint4 C, B;
    uint4 ring[kLoads];

    static __device__ __forceinline__ int column() { return threadIdx.x % kVectors * kVec; }

    __device__ __forceinline__ void load_tokens(const Mamba2StepParams& p, const StepBlock& b) {
        C = *reinterpret_cast<const uint4*>(
            static_cast<const act_t*>(p.in.C.data) + b.row * p.in.C.row + b.group * p.in.C.head + column());
        B = *reinterpret_cast<const uint4*>(
            static_cast<const act_t*>(p.in.B.data) + b.row * p.in.B.row + b.group * p.in.B.head + column());
    }

    static __device__ __forceinline__ act_t* ring_rows(const Mamba2StepParams& p, const StepBlock& b) {
        return reinterpret_cast<act_t*>(b.slot + p.pool.ring_b) + b.group * p.pool.ring_rows * Tile::kDstate + column();
    }

    __device__ __forceinline__ void load_ring(const Mamba2StepParams& p, const StepBlock& b, int first = 0) {
        const act_t* rows = ring_rows(p, b);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int j = first + (i * blockDim.x + threadIdx.x) / kVectors;
            ring[i] = make_uint4(0, 0, 0, 0);
            if (j < b.plan.committed) {
                ring[i] = *reinterpret_cast<const uint4*>(
                    rows + ring_row(b.plan.origin, j, p.pool.ring_rows) * Tile::kDstate);
            }
        }
    }

    //! Sums over dstate of B C for kCount rows, in all lanes that share a row.
    template <int kCount>
    static __device__ __forceinline__ void products(
        const uint4 (&row)[kCount], const float (&c)[kVec], float (&sum)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float value[kVec];
            unpack16<act_t>(row[i], value);
            sum[i] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVec; ++v)
                sum[i] = __fmaf_rn(value[v], c[v], sum[i]);
        }
#pragma unroll
        for (int d = kVectors / 2; d > 0; d /= 2)
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kFullMask, sum[i], d));
    }

    //! C to shared memory, as the product S C reads it.
    __device__ __forceinline__ void put_c(const Mamba2StepParams& p, char* smem) const {
        if (threadIdx.x >= kVectors) return;
        if constexpr (sizeof(typename Tile::state_t) == 2) {
            reinterpret_cast<uint4*>(smem + p.shared.C)[threadIdx.x] = C;
        } else {
            put_row_vector<Tile, act_t>(reinterpret_cast<float*>(smem + p.shared.C), column(), C);
        }
    }

    __device__ __forceinline__ void finish(const Mamba2StepParams& p, char* smem, const StepBlock& b) {
        const int n_pad = Tile::padded_dstate(Tile::kDstate), unit = threadIdx.x / kVectors,
                  units = blockDim.x / kVectors;
        float* rows = reinterpret_cast<float*>(smem + p.shared.ring_B);
        float* BC = reinterpret_cast<float*>(smem + p.shared.BC);
        float c[kVec];
        unpack16<act_t>(C, c);
        const uint4 token[1] = {B};
        float own[1];
        products(token, c, own);
        if (threadIdx.x == 0) BC[0] = own[0];
        for (int first = 0; first < b.plan.committed; first += kLoads * units) {
            if (first > 0) load_ring(p, b, first);
            float sum[kLoads];
            products(ring, c, sum);
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int j = first + i * units + unit;
                if (j >= b.plan.committed) continue;
                if (threadIdx.x % kVectors == 0) BC[1 + j] = sum[i];
                if (b.plan.flush) put_row_vector<Tile, act_t>(rows + j * n_pad, column(), ring[i]);
            }
        }
        if (b.split == 0 && b.first_head == b.group * p.shape.heads_per_group && threadIdx.x < kVectors) {
            const int append = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
            *reinterpret_cast<uint4*>(ring_rows(p, b) + append * Tile::kDstate) = B;
        }
    }
};

} // namespace replayssm
