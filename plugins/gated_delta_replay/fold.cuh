//! The delta rule one row at a time, and the per-thread tile of the state that every kernel here folds into.
//!
//!   S[p] <- exp(g) S[p];   d[p] = beta (v[p] - S[p] . kn);   S[p] <- S[p] + d[p] kn         p: row of the state, [K]
//!
//! KDA, whose channels decay on their own, does just that. GDN has S = scale S' (common/state_scale.cuh), and a row
//! moves the scale in place of the elements:
//!
//!   scale <- exp(g) scale;   w[p] = (beta / scale) (v[p] - scale (S'[p] . kn));   S'[p] <- S'[p] + w[p] kn
//!
//! The order of a fold is fixed: rows oldest first; KDA: per element one rounded product with the decay, GDN: one with
//! the scale where it is renewed; the dot product by fused multiply-adds over a lane's elements in ascending order, then
//! the sums of eight lanes 4, 2 and 1 apart; GDN: a rounded product of it with the scale; one rounded difference, one
//! rounded product, with beta or the rounded beta / scale; one fused multiply-add per element. A fold of a 16-bit GDN
//! state ends with a rounded product of every element with the scale. All kernels call DeltaTile::fold, with intrinsics
//! that the compiler may not contract or reassociate, so a checkpoint has the same bits whatever the window, the number
//! of tokens, the grid or the kernel (docs/contracts.md). Norms and gates are fixed likewise.
#pragma once

#include "../common/cursor.cuh"
#include "params.h"
#include "row_weights.cuh"

#include <type_traits>

namespace replayssm {

//! A row of K elements in the registers of one warp: lane l has elements 4 l .. 4 l + 3, and those 128 further on.
template <int kPieces_>
struct RowPieces {
    static constexpr int kPieces = kPieces_; // 1: K <= 128, 2: K <= 256
    float value[kPieces][4];

    static __device__ __forceinline__ int channel(int piece) {
        return piece * 128 + static_cast<int>(threadIdx.x & (kWarp - 1)) * 4;
    }

    __device__ __forceinline__ void fill(float number) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                value[i][v] = number;
    }

    //! Elements of a dense row of T; zeros past `dstate`, and everywhere where not wanted.
    template <class T>
    __device__ __forceinline__ void load(const T* row, int dstate, bool wanted = true) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            Pack<T, 4> pack{};
            if (wanted && channel(i) < dstate) pack = load_pack<T, 4>(row + channel(i));
#pragma unroll
            for (int v = 0; v < 4; ++v)
                value[i][v] = to_float(pack.value[v]);
        }
    }

    //! T float: as it is; 16-bit types: rounded (rows that came as T keep their bits).
    template <class T>
    __device__ __forceinline__ void store(T* row, int dstate) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            if (channel(i) >= dstate) continue;
            Pack<T, 4> pack;
#pragma unroll
            for (int v = 0; v < 4; ++v)
                pack.value[v] = from_float<T>(value[i][v]);
            store_pack(row + channel(i), pack);
        }
    }

    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                value[i][v] = __fmul_rn(value[i][v], by);
    }

    __device__ __forceinline__ void multiply(const RowPieces& by) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                value[i][v] = __fmul_rn(value[i][v], by.value[i][v]);
    }

    __device__ __forceinline__ void add(const RowPieces& other) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                value[i][v] = __fadd_rn(value[i][v], other.value[i][v]);
    }

    __device__ __forceinline__ RowPieces exponential() const {
        RowPieces out;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                out.value[i][v] = expf(value[i][v]);
        return out;
    }

    //! This lane's part of the dot product.
    __device__ __forceinline__ float dot_part(const RowPieces& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                sum = __fmaf_rn(value[i][v], other.value[i][v], sum);
        return sum;
    }
};

//! Sums over a warp of kCount values, in all lanes.
template <int kCount>
__device__ __forceinline__ void warp_sums(float (&value)[kCount]) {
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2)
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            value[i] = __fadd_rn(value[i], __shfl_xor_sync(kFullMask, value[i], d));
}

//! 1 / sqrt(|row|^2 + 1e-6); 1 without normalisation.
__device__ __forceinline__ float inverse_norm(float sum_of_squares, bool l2norm) {
    return l2norm ? __frcp_rn(__fsqrt_rn(__fadd_rn(sum_of_squares, 1e-6f))) : 1.0f;
}

//! The same of a row in a warp's registers, in all lanes.
template <int kPieces>
__device__ __forceinline__ float inverse_norm(const RowPieces<kPieces>& row, bool l2norm) {
    float sum[1] = {row.dot_part(row)};
    warp_sums(sum);
    return inverse_norm(sum[0], l2norm);
}

__device__ __forceinline__ float sigmoid(float x) { return __frcp_rn(__fadd_rn(1.0f, expf(-x))); }

//! Log-decay g <= 0 of one head (and channel). rate = exp(A_log).
__device__ __forceinline__ float gate_of(const GatedDeltaShape& shape, float rate, float a, float bias) {
    const float x = __fadd_rn(a, bias);
    if (shape.bounded) return __fmul_rn(shape.gate_lower_bound, sigmoid(__fmul_rn(rate, x)));
    return __fmul_rn(-rate, softplus(x));
}

//! d as the ring keeps it: a value past act_t's range becomes its largest number, since outputs read it. NaN stays.
template <class act_t>
__device__ __forceinline__ act_t stored_d(float d) {
    constexpr float kLargest = std::is_same_v<act_t, __half> ? 65504.0f
        : std::is_same_v<act_t, __nv_bfloat16>               ? 3.3895314e38f
                                                             : 3.4028235e38f;
    return from_float<act_t>(d > kLargest ? kLargest : d < -kLargest ? -kLargest : d);
}

//! What a fold needs of one ring row besides v.
struct DeltaRow {
    RowWeights weights;
    const float* decays; // KDA: exp(g) of every channel, in shared memory
    const float* kn;     // in shared memory
};

//! Sums over kLanes (8 or 4) neighbouring lanes of kCount values (a power of two). A lane ends with
//! max(1, kCount / kLanes) neighbouring totals, in part[0].., from value lane * kCount / kLanes on. The tree of every
//! sum is the same for all kCount: lanes 4 apart (of eight), then 2, then 1.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_lanes(float (&part)[kCount], int lane) {
    int count = kCount;
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) {
        if (count == 1) {
            part[0] = __fadd_rn(part[0], __shfl_xor_sync(kFullMask, part[0], d));
            continue;
        }
        const bool high = lane & d;
        count /= 2;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            if (i >= count) break;
            const float other = __shfl_xor_sync(kFullMask, high ? part[i] : part[count + i], d);
            part[i] = __fadd_rn(high ? part[count + i] : part[i], other);
        }
    }
}

//! How a block's part of one head's state lies over its threads: kRows rows per thread, K spread over kLanes
//! neighbouring lanes: lane l holds, of every chunk of 4 kLanes elements, the four that begin at 4 l. Registers are
//! fp32. Where four lanes share a row, each does the part of two of the eight lanes that a fold's order names: l and
//! l + 4, which have even and odd chunks.
template <class state_t_, int kDstate_, int kRows_, int kLanes_ = 8>
struct DeltaTile {
    using state_t = state_t_;
    static constexpr int kDstate = kDstate_; // 0: known at run time, at most 256
    static constexpr int kRows = kRows_;     // a power of two up to kLanes
    static constexpr int kLanes = kLanes_;   // 8 or 4
    static constexpr int kVec = 4;
    static constexpr int kParts = 8 / kLanes; // sums of a row in a thread
    static constexpr int kChunk = kLanes * kVec;
    static constexpr int kChunks = ((kDstate ? kDstate : 256) + kChunk - 1) / kChunk;
    static_assert(kLanes == 8 || kLanes == 4, "a fold's order has eight lanes");

    float S[kRows][kChunks][kVec];

    //! Lane of a thread among those that share its rows, and its first row.
    static __device__ __forceinline__ int lane_of(int thread) { return thread % kLanes; }
    static __device__ __forceinline__ int first_row(int thread) { return thread / kLanes * kRows; }

    static __device__ __forceinline__ bool valid(int chunk, int lane, int dstate) {
        return kDstate != 0 ? kDstate % kChunk == 0 || chunk * kChunk + lane * kVec < kDstate
                            : chunk * kChunk + lane * kVec < dstate;
    }

    //! This lane's elements of a chunk of an fp32 row in shared memory; zeros past dstate.
    static __device__ __forceinline__ void load_vector(
        const float* row, int chunk, int lane, int dstate, float (&out)[kVec]) {
        Pack<float, kVec> pack{};
        if (valid(chunk, lane, dstate)) pack = load_pack<float, kVec>(row + chunk * kChunk + lane * kVec);
#pragma unroll
        for (int v = 0; v < kVec; ++v)
            out[v] = pack.value[v];
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = 0.0f;
    }

    //! From state_t rows of `dstate` elements; row 0 of this thread begins at `rows`.
    __device__ __forceinline__ void load(const char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                Pack<state_t, kVec> pack{};
                if (valid(i, lane, dstate))
                    pack = load_pack<state_t, kVec>(
                        rows + (r * dstate + i * kChunk + lane * kVec) * static_cast<int>(sizeof(state_t)));
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = to_float(pack.value[v]);
            }
    }

    //! Rounds to state_t, in this thread's registers too: what is read now is what a later step reads.
    __device__ __forceinline__ void store(char* rows, int lane, int dstate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                if (!valid(i, lane, dstate)) continue;
                Pack<state_t, kVec> pack;
#pragma unroll
                for (int v = 0; v < kVec; ++v) {
                    pack.value[v] = from_float<state_t>(S[r][i][v]);
                    if (sizeof(state_t) < sizeof(float)) S[r][i][v] = to_float(pack.value[v]);
                }
                store_pack(rows + (r * dstate + i * kChunk + lane * kVec) * static_cast<int>(sizeof(state_t)), pack);
            }
    }

    //! sum_lanes of kRows * kVectors values, value r * kVectors + u being row r of vector u.
    template <int kVectors>
    static __device__ __forceinline__ void reduce(float (&part)[kRows * kVectors], int lane) {
        sum_lanes<kLanes>(part, lane);
    }

    template <int kVectors>
    static __host__ __device__ constexpr int kept() {
        return kRows * kVectors > kLanes ? kRows * kVectors / kLanes : 1;
    }

    //! Lanes that keep the same total.
    template <int kVectors>
    static __host__ __device__ constexpr int sharers() {
        return kRows * kVectors >= kLanes ? 1 : kLanes / (kRows * kVectors);
    }

    template <int kVectors>
    static __device__ __forceinline__ int first_kept(int lane) {
        return lane / sharers<kVectors>() * kept<kVectors>();
    }

    //! Row whose v a lane needs in fold().
    static __device__ __forceinline__ int fold_row(int lane) { return first_kept<1>(lane); }

    __device__ __forceinline__ void multiply(float by) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = __fmul_rn(by, S[r][i][v]);
    }

    //! This lane's elements of a row's key.
    struct Key {
        float value[kChunks][kVec];

        __device__ __forceinline__ void load(const float* kn, int lane, int dstate) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
                load_vector(kn, i, lane, dstate, value[i]);
        }
    };

    //! Fold one ring row; v of row fold_row(lane). kChannels: a decay for every channel; otherwise the tile is S'.
    template <bool kChannels>
    __device__ __forceinline__ void fold(const DeltaRow& row, float v_own, int lane, int dstate) {
        if (!kChannels && row.weights.renew != 1.0f) multiply(row.weights.renew);
        Key key;
        key.load(row.kn, lane, dstate);
        fold_key<kChannels, false>(key, row, v_own, lane, dstate);
    }

    //! The same of a row whose key is in registers already, and which renews nothing. kNext: then the key of the row
    //! behind it takes its place, from dstate elements after row.kn.
    template <bool kChannels, bool kNext>
    __device__ __forceinline__ void fold_key(Key& key, const DeltaRow& row, float v_own, int lane, int dstate) {
        static_assert(kept<1>() == 1, "a lane has one row's d");
        float (&k)[kChunks][kVec] = key.value;
        float parts[kParts][kRows], part[kRows];
#pragma unroll
        for (int h = 0; h < kParts; ++h)
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                parts[h][r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            float decay[kVec];
            if (kChannels) load_vector(row.decays, i, lane, dstate, decay);
#pragma unroll
            for (int v = 0; v < kVec; ++v)
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (kChannels) S[r][i][v] = __fmul_rn(decay[v], S[r][i][v]);
                    parts[i % kParts][r] = __fmaf_rn(S[r][i][v], k[i][v], parts[i % kParts][r]);
                }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            part[r] = kParts == 1 ? parts[0][r] : __fadd_rn(parts[0][r], parts[kParts - 1][r]);
        reduce<1>(part, lane);
        const float held = kChannels ? part[0] : __fmul_rn(row.weights.scale, part[0]);
        const float d_own = __fmul_rn(row.weights.weight, __fsub_rn(v_own, held));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float d = kRows == 1 ? d_own : __shfl_sync(kFullMask, d_own, r * sharers<1>(), kLanes);
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    S[r][i][v] = __fmaf_rn(d, k[i][v], S[r][i][v]);
                if (kNext && r == kRows - 1) load_vector(row.kn + dstate, i, lane, dstate, k[i]);
            }
        }
    }

    //! This lane's part of S u for kVectors fp32 rows u in shared memory, dstate elements apart:
    //! out[r * kVectors + u], to be summed by reduce().
    template <int kVectors>
    __device__ __forceinline__ void dot(
        const float* vectors, int lane, int dstate, float (&out)[kRows * kVectors]) const {
#pragma unroll
        for (int i = 0; i < kRows * kVectors; ++i)
            out[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int u = 0; u < kVectors; ++u) {
                float c[kVec];
                load_vector(vectors + u * dstate, i, lane, dstate, c);
#pragma unroll
                for (int v = 0; v < kVec; ++v)
#pragma unroll
                    for (int r = 0; r < kRows; ++r)
                        out[r * kVectors + u] = __fmaf_rn(S[r][i][v], c[v], out[r * kVectors + u]);
            }
    }
};

} // namespace replayssm
