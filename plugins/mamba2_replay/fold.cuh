//! The Mamba-2 recurrence, one element at a time, and the per-thread tile of the state that every kernel here folds into.
//!
//!   S[p][n] <- exp(A dt) S[p][n] + (dt x[p]) B[n]
//!
//! The order of a fold is fixed: rows oldest first; per element one rounded product exp(A dt) S, then one fused
//! multiply-add. All kernels call fold_element, with intrinsics that the compiler may not contract or reassociate, so a
//! checkpoint has the same bits whatever the window, the number of tokens, the grid or the kernel (docs/contracts.md).
#pragma once

#include "../common/cursor.cuh"
#include "params.h"

namespace replayssm {

__device__ __forceinline__ float decay_of(float A, float dt) { return expf(__fmul_rn(A, dt)); }

__device__ __forceinline__ float fold_element(float S, float decay, float dtx, float B) {
    return __fmaf_rn(dtx, B, __fmul_rn(decay, S));
}

//! dt of a token: clamp(softplus(raw + bias), dt_min, dt_max).
__device__ __forceinline__ float token_dt(const Mamba2Inputs& in, int64_t row, int64_t token, int head) {
    const int64_t index = row * in.dt.strides[0] + token * in.dt.strides[1] + head * in.dt.strides[2];
    float dt = load_scalar(in.dt.data, in.dt.dtype, index);
    if (in.dt_bias.data != nullptr) dt += load_scalar(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.strides[0]);
    if (in.dt_softplus) dt = softplus(dt);
    return fminf(fmaxf(dt, in.dt_min), in.dt_max);
}

//! A block's part of one head's state: kRows rows per thread, dstate spread over eight neighbouring lanes.
//! Lane l of the eight holds, of every chunk of 8 * kVec elements, the kVec that begin at l * kVec: one 16-byte access.
//! The split of dstate over lanes, hence the order of every sum over it, is the same for every kRows.
template <class state_t_, int kDstate_, int kRows_>
struct StateTile {
    using state_t = state_t_;
    static constexpr int kDstate = kDstate_; // 0: known at run time, at most 256
    static constexpr int kRows = kRows_;
    static constexpr int kVec = 16 / sizeof(state_t);
    static constexpr int kLanes = 8;
    static constexpr int kChunk = kLanes * kVec;
    static constexpr int kChunks = ((kDstate ? kDstate : 256) + kChunk - 1) / kChunk;

    float S[kRows][kChunks][kVec];

    //! dstate rounded up to whole chunks: the row length of B and C in shared memory.
    static __host__ __device__ constexpr int padded_dstate(int dstate) { return (dstate + kChunk - 1) / kChunk * kChunk; }

    //! Where element n of a B or C row lies in shared memory: within a chunk, the first four elements of all lanes come
    //! first, so that eight lanes read 128 neighbouring bytes.
    static __device__ __forceinline__ int shared_position(int n) {
        if (kVec == 4) return n;
        const int in_chunk = n % kChunk, lane = in_chunk / kVec, v = in_chunk % kVec;
        return n - in_chunk + (v / 4) * 32 + lane * 4 + v % 4;
    }

    static __device__ __forceinline__ bool valid(int chunk, int lane, int dstate) {
        return kDstate != 0 ? kDstate % kChunk == 0 || chunk * kChunk + lane * kVec < kDstate : chunk * kChunk + lane * kVec < dstate;
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v) S[r][i][v] = 0.0f;
    }

    //! From state_t rows of `dstate` elements; row 0 of this thread begins at `rows`. kShared: from shared memory.
    template <bool kShared>
    __device__ __forceinline__ void load(const char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                uint4 bits = make_uint4(0, 0, 0, 0);
                if (valid(i, lane, dstate)) {
                    const char* address = rows + (static_cast<int64_t>(r) * dstate + i * kChunk + lane * kVec) * sizeof(state_t);
                    bits = kShared ? *reinterpret_cast<const uint4*>(address) : load_streaming(address);
                }
                unpack16<state_t>(bits, S[r][i]);
            }
    }

    __device__ __forceinline__ void store(char* rows, int lane, int dstate) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                if (!valid(i, lane, dstate)) continue;
                char* address = rows + (static_cast<int64_t>(r) * dstate + i * kChunk + lane * kVec) * sizeof(state_t);
                store_streaming(address, pack16<state_t>(S[r][i]));
            }
    }

    //! kVec elements of a B or C row in shared memory.
    static __device__ __forceinline__ void load_shared_vector(const float* row, int chunk, int lane, float (&out)[kVec]) {
#pragma unroll
        for (int part = 0; part < kVec / 4; ++part) {
            const auto pack = load_pack<float, 4>(row + chunk * kChunk + part * 32 + lane * 4);
#pragma unroll
            for (int v = 0; v < 4; ++v) out[part * 4 + v] = pack.value[v];
        }
    }

    //! Fold one ring row: dtx of this thread's rows, B in shared memory.
    __device__ __forceinline__ void fold(float decay, const float (&dtx)[kRows], const float* B, int lane, int dstate) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
            float b[kVec];
            load_shared_vector(B, i, lane, b);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int v = 0; v < kVec; ++v) S[r][i][v] = fold_element(S[r][i][v], decay, dtx[r], b[v]);
        }
    }

    //! This lane's part of S C, to be summed over the eight lanes by reduce().
    __device__ __forceinline__ void dot(const float* C, int lane, int dstate, float (&out)[kRows]) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) out[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
            float c[kVec];
            load_shared_vector(C, i, lane, c);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int v = 0; v < kVec; ++v) out[r] = __fmaf_rn(S[r][i][v], c[v], out[r]);
        }
    }

    //! Sum over the eight lanes; every lane ends with the total of row reduced_row(lane). The tree is the same for all kRows.
    static __device__ __forceinline__ float reduce(const float (&part)[kRows], int lane) {
        float value;
        if constexpr (kRows == 4) {
            const bool high = lane & 4, odd = lane & 2;
            const float a = __fadd_rn(high ? part[2] : part[0], __shfl_xor_sync(kFullMask, high ? part[0] : part[2], 4));
            const float b = __fadd_rn(high ? part[3] : part[1], __shfl_xor_sync(kFullMask, high ? part[1] : part[3], 4));
            value = __fadd_rn(odd ? b : a, __shfl_xor_sync(kFullMask, odd ? a : b, 2));
        } else if constexpr (kRows == 2) {
            const bool high = lane & 4;
            value = __fadd_rn(high ? part[1] : part[0], __shfl_xor_sync(kFullMask, high ? part[0] : part[1], 4));
            value = __fadd_rn(value, __shfl_xor_sync(kFullMask, value, 2));
        } else {
            value = __fadd_rn(part[0], __shfl_xor_sync(kFullMask, part[0], 4));
            value = __fadd_rn(value, __shfl_xor_sync(kFullMask, value, 2));
        }
        return __fadd_rn(value, __shfl_xor_sync(kFullMask, value, 1));
    }

    static __device__ __forceinline__ int reduced_row(int lane) {
        if (kRows == 4) return ((lane >> 2) & 1) * 2 + ((lane >> 1) & 1);
        return kRows == 2 ? (lane >> 2) & 1 : 0;
    }

    //! One lane of those that hold the same row.
    static __device__ __forceinline__ bool writes(int lane) { return (lane & (kRows == 4 ? 1 : kRows == 2 ? 3 : 7)) == 0; }
};

} // namespace replayssm
