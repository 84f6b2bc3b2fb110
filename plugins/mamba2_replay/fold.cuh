//! The Mamba-2 recurrence, one element at a time, and the per-thread tile of the state that every kernel here folds
//! into.
//!
//!   S[p][n] <- exp(A dt) S[p][n] + (dt x[p]) B[n],  S = scale S'                      common/state_scale.cuh
//!   scale <- exp(A dt) scale;  S'[p][n] <- S'[p][n] + w[p] B[n],  w[p] = (dt (1 / scale)) x[p]
//!
//! The order of a fold is fixed: rows oldest first; of a row, the elements times `renew` where that is not 1, then one
//! fused multiply-add an element. All kernels call advance_scale and fold_element, with intrinsics that the compiler may
//! not contract or reassociate, so (S', scale) has the same bits whatever the window, the number of tokens, the grid or
//! the kernel (docs/contracts.md). A 16-bit state is S itself: its scale is 1 in front of a fold, which ends with scale S'.
#pragma once

#include "head_scale.cuh"

#include <type_traits>

namespace replayssm {

__device__ __forceinline__ int divide(int n, const Divisor& by) {
    if (by.multiplier == 0) return n;
    const int quotient = static_cast<int>(__umulhi(static_cast<uint32_t>(n), by.multiplier));
    return quotient * static_cast<int>(by.value) > n ? quotient - 1 : quotient;
}

__device__ __forceinline__ float decay_of(float A, float dt) { return expf(__fmul_rn(A, dt)); }

__device__ __forceinline__ float fold_element(float S, float w, float B) { return __fmaf_rn(w, B, S); }

//! A token's dt before bias and softplus, and its bias: loaded first, combined later.
struct RawStep {
    unsigned dt = 0;
    unsigned bias = 0;

    //! dt at element dt_index, bias at element bias_index of their tensors.
    template <class Tensor>
    __device__ __forceinline__ void load(
        const Tensor& dt_tensor, int64_t dt_index, const Tensor& bias_tensor, int64_t bias_index) {
        dt = load_bits(dt_tensor.data, dt_tensor.dtype, dt_index);
        if (bias_tensor.data != nullptr) bias = load_bits(bias_tensor.data, bias_tensor.dtype, bias_index);
    }

    //! clamp(softplus(raw + bias), dt_min, dt_max)
    template <class Inputs>
    __device__ __forceinline__ float value(const Inputs& in) const {
        float step = bits_to_float(dt, in.dt.dtype);
        if (in.dt_bias.data != nullptr) step += bits_to_float(bias, in.dt_bias.dtype);
        if (in.dt_softplus) step = softplus(step);
        return fminf(fmaxf(step, in.dt_min), in.dt_max);
    }
};

//! What folds one row besides x and B, in shared memory. Rows up to `end` follow without another renewal. Behind a
//! head's last row stands a row whose `renew` ends the fold of a 16-bit state.
struct FoldRow {
    float renew;
    float input; // dt / scale
    int end;
};
static_assert(sizeof(FoldRow) == kFoldRowBytes, "room for it in shared memory");

//! How a block's part of one head's state lies over its threads: kRows rows per thread, dstate spread over eight
//! neighbouring lanes. Lane l of the eight holds, of every chunk of 8 * kVec elements, the kVec that begin at l * kVec:
//! one 16-byte access.
//! The split of dstate over lanes, hence the order of every sum over it, is the same for every kRows.
template <class state_t_, int kDstate_, int kRows_>
struct TileLanes {
    using state_t = state_t_;
    static constexpr int kDstate = kDstate_; // 0: known at run time, at most 256
    static constexpr int kRows = kRows_;
    static constexpr int kVec = 16 / sizeof(state_t);
    static constexpr int kLanes = 8;
    static constexpr int kChunk = kLanes * kVec;
    static constexpr int kChunks = ((kDstate ? kDstate : 256) + kChunk - 1) / kChunk;

    //! dstate rounded up to whole chunks: the row length of B and C in shared memory.
    static __host__ __device__ constexpr int padded_dstate(int dstate) {
        return (dstate + kChunk - 1) / kChunk * kChunk;
    }

    //! Where element n of a B or C row lies in shared memory: within a chunk, the first four elements of all lanes come
    //! first, so that eight lanes read 128 neighbouring bytes.
    static __device__ __forceinline__ int shared_position(int n) {
        if (kVec == 4) return n;
        const int in_chunk = n % kChunk, lane = in_chunk / kVec, v = in_chunk % kVec;
        return n - in_chunk + (v / 4) * 32 + lane * 4 + v % 4;
    }

    static __device__ __forceinline__ bool valid(int chunk, int lane, int dstate) {
        return kDstate != 0 ? kDstate % kChunk == 0 || chunk * kChunk + lane * kVec < kDstate
                            : chunk * kChunk + lane * kVec < dstate;
    }

    //! kVec elements of a B or C row in shared memory.
    static __device__ __forceinline__ void load_shared_vector(
        const float* row, int chunk, int lane, float (&out)[kVec]) {
#pragma unroll
        for (int part = 0; part < kVec / 4; ++part) {
            const auto pack = load_pack<float, 4>(row + chunk * kChunk + part * 32 + lane * 4);
#pragma unroll
            for (int v = 0; v < 4; ++v)
                out[part * 4 + v] = pack.value[v];
        }
    }

    //! Sums over the eight lanes of kRows * kTokens values, value r * kTokens + u being row r of token u. A lane ends
    //! with kept<kTokens>() neighbouring totals, in part[0].., from value first_kept<kTokens>(lane) on. The tree of
    //! every sum is the same for all kRows and kTokens: lanes 4 apart, then 2, then 1.
    template <int kTokens>
    static __device__ __forceinline__ void reduce(float (&part)[kRows * kTokens], int lane) {
        int count = kRows * kTokens;
#pragma unroll
        for (int d = kLanes / 2; d > 0; d /= 2) {
            if (count == 1) {
                part[0] = __fadd_rn(part[0], __shfl_xor_sync(kFullMask, part[0], d));
                continue;
            }
            const bool high = lane & d;
            count /= 2;
#pragma unroll
            for (int i = 0; i < kRows * kTokens / 2; ++i) {
                if (i >= count) break;
                const float other = __shfl_xor_sync(kFullMask, high ? part[i] : part[count + i], d);
                part[i] = __fadd_rn(high ? part[count + i] : part[i], other);
            }
        }
    }

    template <int kTokens>
    static __host__ __device__ constexpr int kept() {
        return kRows * kTokens > kLanes ? kRows * kTokens / kLanes : 1;
    }

    template <int kTokens>
    static __device__ __forceinline__ int first_kept(int lane) {
        int first = 0, count = kRows * kTokens;
#pragma unroll
        for (int d = kLanes / 2; d > 0; d /= 2) {
            if (count == 1) break;
            count /= 2;
            if (lane & d) first += count;
        }
        return first;
    }

    //! Row of the totals that a lane keeps.
    static __device__ __forceinline__ int kept_row(int lane) { return first_kept<1>(lane); }

    //! One lane of those that keep the same totals.
    template <int kTokens>
    static __device__ __forceinline__ bool writes(int lane) {
        return kRows * kTokens >= kLanes || (lane & (kLanes / (kRows * kTokens) - 1)) == 0;
    }
};

//! The state in fp32 registers.
template <class state_t_, int kDstate_, int kRows_>
struct StateTile : TileLanes<state_t_, kDstate_, kRows_> {
    using Lanes = TileLanes<state_t_, kDstate_, kRows_>;
    using state_t = state_t_;
    using Lanes::kRows, Lanes::kVec, Lanes::kChunk, Lanes::kChunks, Lanes::valid, Lanes::load_shared_vector;

    float S[kRows][kChunks][kVec];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = 0.0f;
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
                    const char* address =
                        rows + (static_cast<int64_t>(r) * dstate + i * kChunk + lane * kVec) * sizeof(state_t);
                    bits = kShared ? *reinterpret_cast<const uint4*>(address) : load_streaming(address);
                }
                unpack16<state_t>(bits, S[r][i]);
            }
    }

    //! Rounds to state_t, in this thread's registers too: what is read now is what a later step reads.
    __device__ __forceinline__ void store(char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                if (!valid(i, lane, dstate)) continue;
                char* address = rows + (static_cast<int64_t>(r) * dstate + i * kChunk + lane * kVec) * sizeof(state_t);
                const uint4 bits = pack16<state_t>(S[r][i]);
                *reinterpret_cast<uint4*>(address) = bits;
                if (sizeof(state_t) < sizeof(float)) unpack16<state_t>(bits, S[r][i]);
            }
    }

    //! By one of the scales of a fold: 1 in most cases, the same for all threads.
    __device__ __forceinline__ void multiply(float by) {
        if (by == 1.0f) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = __fmul_rn(S[r][i][v], by);
    }

    //! Fold one row that does not renew: w of this thread's rows, B in shared memory.
    __device__ __forceinline__ void fold(const float (&w)[kRows], const float* B, int lane, int dstate) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
            float b[kVec];
            load_shared_vector(B, i, lane, b);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = fold_element(S[r][i][v], w[r], b[v]);
        }
    }

    //! Fold `count` rows that source.next(w) gives one after another, kUnroll a turn.
    template <int kUnroll, class Source>
    __device__ __forceinline__ void fold_rows(int count, int lane, int dstate, Source source) {
        static_assert(sizeof(state_t) == sizeof(float), "S' stays S'");
#pragma unroll 1
        for (int j = 0; j < count;) {
            multiply(source.row->renew);
            const int end = source.row->end;
#pragma unroll kUnroll
            for (; j < end; ++j) {
                float w[kRows];
                const float* B = source.next(w);
                fold(w, B, lane, dstate);
            }
        }
    }

    //! This lane's part of S C_u for kTokens rows of C, n_pad elements apart: out[r * kTokens + u], to be summed by
    //! reduce().
    template <int kTokens>
    __device__ __forceinline__ void dot(
        const float* C, int n_pad, int lane, int dstate, float (&out)[kRows * kTokens]) const {
#pragma unroll
        for (int i = 0; i < kRows * kTokens; ++i)
            out[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
#pragma unroll
            for (int u = 0; u < kTokens; ++u) {
                float c[kVec];
                load_shared_vector(C + u * n_pad, i, lane, c);
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int v = 0; v < kVec; ++v)
                        out[r * kTokens + u] = __fmaf_rn(S[r][i][v], c[v], out[r * kTokens + u]);
            }
        }
    }
};

//! The same tile of a 16-bit state, kept as it is stored: half the registers. A fold widens one chunk of dstate at a
//! time.
template <class state_t_, int kDstate_, int kRows_>
struct PackedTile : TileLanes<state_t_, kDstate_, kRows_> {
    using Lanes = TileLanes<state_t_, kDstate_, kRows_>;
    using state_t = state_t_;
    using Lanes::kRows, Lanes::kVec, Lanes::kChunk, Lanes::kChunks, Lanes::valid, Lanes::load_shared_vector;
    static_assert(sizeof(state_t) == 2, "for 16-bit states");

    uint4 bits[kRows][kChunks];

    template <bool kShared>
    __device__ __forceinline__ void load(const char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                bits[r][i] = make_uint4(0, 0, 0, 0);
                if (!valid(i, lane, dstate)) continue;
                const char* address =
                    rows + (r * dstate + i * kChunk + lane * kVec) * static_cast<int>(sizeof(state_t));
                bits[r][i] = kShared ? *reinterpret_cast<const uint4*>(address) : load_streaming(address);
            }
    }

    __device__ __forceinline__ void store(char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                if (!valid(i, lane, dstate)) continue;
                char* address = rows + (r * dstate + i * kChunk + lane * kVec) * static_cast<int>(sizeof(state_t));
                *reinterpret_cast<uint4*>(address) = bits[r][i];
            }
    }

    template <int kUnroll, class Source>
    __device__ __forceinline__ void fold_rows(int count, int lane, int dstate, Source source) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
            float S[kRows][kVec];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                unpack16<state_t>(bits[r][i], S[r]);
            Source rows = source;
#pragma unroll 1
            for (int j = 0;;) {
                const float renew = rows.row->renew;
                if (renew != 1.0f) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
#pragma unroll
                        for (int v = 0; v < kVec; ++v)
                            S[r][v] = __fmul_rn(S[r][v], renew);
                }
                if (j == count) break;
                const int end = rows.row->end;
#pragma unroll kUnroll
                for (; j < end; ++j) {
                    float w[kRows], b[kVec];
                    const float* B = rows.next(w);
                    load_shared_vector(B, i, lane, b);
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
#pragma unroll
                        for (int v = 0; v < kVec; ++v)
                            S[r][v] = fold_element(S[r][v], w[r], b[v]);
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                bits[r][i] = pack16<state_t>(S[r]);
        }
    }

    template <int kTokens>
    __device__ __forceinline__ void dot(
        const float* C, int n_pad, int lane, int dstate, float (&out)[kRows * kTokens]) const {
#pragma unroll
        for (int i = 0; i < kRows * kTokens; ++i)
            out[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (!valid(i, lane, dstate)) continue;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float S[kVec];
                unpack16<state_t>(bits[r][i], S);
#pragma unroll
                for (int u = 0; u < kTokens; ++u) {
                    float c[kVec];
                    load_shared_vector(C + u * n_pad, i, lane, c);
#pragma unroll
                    for (int v = 0; v < kVec; ++v)
                        out[r * kTokens + u] = __fmaf_rn(S[v], c[v], out[r * kTokens + u]);
                }
            }
        }
    }
};

//! The tile that the step kernel works on.
template <class state_t, int kDstate, int kRows>
using StepTile =
    std::conditional_t<sizeof(state_t) == 2, PackedTile<state_t, kDstate, kRows>, StateTile<state_t, kDstate, kRows>>;

} // namespace replayssm
