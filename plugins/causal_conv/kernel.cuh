//! Depthwise causal convolution with rollback: y_t[c] = act(bias[c] + sum_i weight[c][i] x_{t - taps + 1 + i}[c]).
//!
//! x, y [rows, T, C] act_t; weight [C, taps]; columns act_t [taps - 1 + spec_len, C] in the slot: rows 0..taps-2 are
//! the history before the last step, then that step's pending_len raw inputs. With `a` of them accepted the history of
//! this step is rows a..a+taps-2 (docs/contracts.md).
//! A thread owns one 16-byte vector of neighbouring channels from the first read of its columns to the last write, so
//! no block touches another's columns. The 64 channels that share a cursor lie in one warp. Sums are fp32, oldest input
//! first.
#pragma once

#include "../common/cursor.cuh"
#include "params.h"

#include <type_traits>

namespace replayssm {

constexpr int kMaxTaps = 8;
constexpr int kConvThreads = 128;
constexpr int kScanTile = 32; // tokens that one block of the scan takes

template <class act_t_, int kTaps_>
struct ConvThread {
    using act_t = act_t_;
    static constexpr int kTaps = kTaps_ ? kTaps_ : kMaxTaps; // 0: known at run time, at most kMaxTaps
    static constexpr int kVec = 16 / sizeof(act_t);

    int taps;
    int channel;             // first of this thread's
    uint4 window[kTaps - 1]; // raw inputs, oldest first; taps - 1 of them used
    float weight[kTaps][kVec];
    float bias[kVec];

    __device__ __forceinline__ ConvThread(const ConvPool& pool, int first_channel)
        : taps(kTaps_ ? kTaps_ : pool.taps), channel(first_channel) {}

    __device__ __forceinline__ void load_weights(const ConvParams& p) {
        const replayssm_tensor& w = p.weight;
        const bool dense = kTaps_ != 0 && w.dtype == (sizeof(act_t) == 4 ? REPLAYSSM_FLOAT32 : own_code()) &&
            w.strides[1] == 1 && w.strides[0] == kTaps && (reinterpret_cast<uintptr_t>(w.data) & 15) == 0;
        if (dense) {
#pragma unroll
            for (int i = 0; i < kTaps; ++i) {
                float value[kVec];
                unpack16<act_t>(
                    __ldg(reinterpret_cast<const uint4*>(static_cast<const act_t*>(w.data) + channel * kTaps) + i),
                    value);
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    weight[(i * kVec + v) % kTaps][(i * kVec + v) / kTaps] = value[v];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kTaps; ++i)
#pragma unroll
                for (int v = 0; v < kVec; ++v)
                    weight[i][v] =
                        i < taps ? load_scalar(w.data, w.dtype, (channel + v) * w.strides[0] + i * w.strides[1]) : 0.0f;
        }
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
            bias[v] = p.bias.data != nullptr ? load_scalar(p.bias.data, p.bias.dtype, (channel + v) * p.bias.strides[0])
                                             : 0.0f;
        }
    }

    static __device__ constexpr int own_code();

    __device__ __forceinline__ void clear_window() {
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i)
            window[i] = make_uint4(0, 0, 0, 0);
    }

    //! Rows first .. first + taps - 2 of the columns.
    __device__ __forceinline__ void load_window(const ConvPool& pool, const char* slot, int first) {
        const act_t* columns = reinterpret_cast<const act_t*>(slot + pool.columns) + channel;
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i) {
            if (i < taps - 1) {
                window[i] = *reinterpret_cast<const uint4*>(columns + static_cast<int64_t>(first + i) * pool.channels);
            }
        }
    }

    __device__ __forceinline__ void store_window(const ConvPool& pool, char* slot) const {
        act_t* columns = reinterpret_cast<act_t*>(slot + pool.columns) + channel;
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i) {
            if (i < taps - 1) *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(i) * pool.channels) = window[i];
        }
    }

    //! Drop the oldest input, take a new one.
    __device__ __forceinline__ void push(uint4 input) {
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i) {
            if (i < taps - 2) {
                window[i] = window[i + 1 < kTaps - 1 ? i + 1 : i];
            } else if (i == taps - 2) {
                window[i] = input;
            }
        }
    }

    //! Output for the input that follows the window.
    __device__ __forceinline__ uint4 output(uint4 input, bool activate) const {
        float sum[kVec], value[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v)
            sum[v] = 0.0f;
#pragma unroll
        for (int i = 0; i < kTaps; ++i) {
            if (i >= taps) break;
            unpack16<act_t>(i < taps - 1 ? window[i < kTaps - 1 ? i : 0] : input, value);
#pragma unroll
            for (int v = 0; v < kVec; ++v)
                sum[v] = __fmaf_rn(weight[i][v], value[v], sum[v]);
        }
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
            sum[v] = __fadd_rn(sum[v], bias[v]);
            if (activate) sum[v] = silu(sum[v]);
        }
        return pack16<act_t>(sum);
    }
};

template <class act_t, int kTaps>
__device__ constexpr int ConvThread<act_t, kTaps>::own_code() {
    if (sizeof(act_t) == 4) return REPLAYSSM_FLOAT32;
    return std::is_same<act_t, __half>::value ? REPLAYSSM_FLOAT16 : REPLAYSSM_BFLOAT16;
}

__device__ __forceinline__ Cursor& cursor_of(const ConvPool& pool, char* slot, int channel) {
    return reinterpret_cast<Cursor*>(slot + pool.cursor)[channel / kConvCursorChannels];
}

//! By every thread, once all lanes of a cursor's channels have read it.
__device__ __forceinline__ void set_pending(const ConvPool& pool, char* slot, int channel, int pending) {
    if (channel % kConvCursorChannels == 0)
        cursor_of(pool, slot, channel) = Cursor{0, 0, static_cast<int16_t>(pending), 0};
}

template <class act_t, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_step_kernel(const __grid_constant__ ConvParams p) {
    using Thread = ConvThread<act_t, kTaps>;
    const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * Thread::kVec, row = blockIdx.y;
    const unsigned warp = __ballot_sync(kFullMask, channel < p.pool.channels);
    if (channel >= p.pool.channels) return;
    const act_t* x = static_cast<const act_t*>(p.x.data) + row * p.x.strides[0] + channel;
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.y.data)) + row * p.y.strides[0] + channel;
    const int64_t index = load_index(p.slots, row);
    if (index < 0 || index >= p.pool.slots) {
        for (int t = 0; t < p.tokens; ++t)
            *reinterpret_cast<uint4*>(y + t * p.y.strides[1]) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int64_t accepted = p.accepted.data != nullptr ? load_index(p.accepted, row) : -1;
    char* slot = p.pool.base + index * p.pool.stride_bytes;
    const int shift = clamp_count(accepted, cursor_of(p.pool, slot, channel).pending);
    Thread thread(p.pool, channel);
    thread.load_weights(p);
    thread.load_window(p.pool, slot, shift);
    __syncwarp(warp); // every lane has read the cursor
    thread.store_window(p.pool, slot);
    set_pending(p.pool, slot, channel, p.tokens);
    act_t* columns = reinterpret_cast<act_t*>(slot + p.pool.columns) +
        static_cast<int64_t>(thread.taps - 1) * p.pool.channels + channel;
    for (int t = 0; t < p.tokens; ++t) {
        const uint4 input = __ldg(reinterpret_cast<const uint4*>(x + t * p.x.strides[1]));
        *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(t) * p.pool.channels) = input;
        *reinterpret_cast<uint4*>(y + t * p.y.strides[1]) = thread.output(input, p.silu);
        thread.push(input);
    }
}

//! The window in front of token 0 of a sequence: zeros, or what the slot holds with all pending inputs accepted.
template <class Thread>
__device__ __forceinline__ void initial_window(Thread& thread, const ConvParams& p, int sequence, char* slot) {
    thread.clear_window();
    if (slot == nullptr || p.has_initial == nullptr || !p.has_initial[sequence]) return;
    thread.load_window(p.pool, slot, cursor_of(p.pool, slot, thread.channel).pending);
}

__device__ __forceinline__ char* slot_of(const ConvPool& pool, int64_t index) {
    return index < 0 || index >= pool.slots ? nullptr : pool.base + index * pool.stride_bytes;
}

//! Outputs of a tile of packed tokens. Reads the slots, writes none: another block may still need their history.
template <class act_t, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_scan_kernel(const __grid_constant__ ConvParams p) {
    using Thread = ConvThread<act_t, kTaps>;
    const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * Thread::kVec;
    if (channel >= p.pool.channels) return;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kScanTile,
                  last = min(first + kScanTile, static_cast<int64_t>(p.tokens));
    const act_t* x = static_cast<const act_t*>(p.x.data) + channel;
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.y.data)) + channel;
    int low = 0, high = p.rows - 1; // the last sequence that begins at or before `first`
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (load_index(p.cu_seqlens, middle) <= first)
            low = middle;
        else
            high = middle - 1;
    }
    int sequence = low;
    int64_t end = load_index(p.cu_seqlens, sequence + 1);
    char* slot = slot_of(p.pool, load_index(p.slots, sequence));
    Thread thread(p.pool, channel);
    thread.load_weights(p);
    initial_window(thread, p, sequence, slot);
    const int64_t begin = load_index(p.cu_seqlens, sequence);
    for (int64_t t = max(begin, first - (thread.taps - 1)); t < first; ++t) {
        thread.push(__ldg(reinterpret_cast<const uint4*>(x + t * p.x.strides[1])));
    }
    for (int64_t t = first; t < last; ++t) {
        while (t >= end && sequence + 1 < p.rows) {
            ++sequence;
            end = load_index(p.cu_seqlens, sequence + 1);
            slot = slot_of(p.pool, load_index(p.slots, sequence));
            if (t < end) initial_window(thread, p, sequence, slot);
        }
        const uint4 input = __ldg(reinterpret_cast<const uint4*>(x + t * p.x.strides[1]));
        uint4 output = thread.output(input, p.silu);
        if (slot == nullptr) output = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(y + t * p.y.strides[1]) = output;
        thread.push(input);
    }
}

//! Launched behind conv_scan_kernel: the last taps - 1 inputs of every sequence become its history.
template <class act_t, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_finish_kernel(const __grid_constant__ ConvParams p) {
    using Thread = ConvThread<act_t, kTaps>;
    const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * Thread::kVec, sequence = blockIdx.y;
    const unsigned warp = __ballot_sync(kFullMask, channel < p.pool.channels);
    if (channel >= p.pool.channels) return;
    char* slot = slot_of(p.pool, load_index(p.slots, sequence));
    if (slot == nullptr) return;
    const act_t* x = static_cast<const act_t*>(p.x.data) + channel;
    const int64_t begin = load_index(p.cu_seqlens, sequence), end = load_index(p.cu_seqlens, sequence + 1);
    Thread thread(p.pool, channel);
    initial_window(thread, p, sequence, slot);
    __syncwarp(warp); // every lane has read the cursor
    for (int64_t t = max(begin, end - (thread.taps - 1)); t < end; ++t) {
        thread.push(__ldg(reinterpret_cast<const uint4*>(x + t * p.x.strides[1])));
    }
    thread.store_window(p.pool, slot);
    set_pending(p.pool, slot, channel, 0);
}

//! dst's history = src's after `count` accepted pending inputs.
template <class act_t>
__global__ void __launch_bounds__(kConvThreads) conv_materialize_kernel(const __grid_constant__ ConvParams p) {
    using Thread = ConvThread<act_t, 0>;
    const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * Thread::kVec, pair = blockIdx.y;
    const unsigned warp = __ballot_sync(kFullMask, channel < p.pool.channels);
    if (channel >= p.pool.channels) return;
    char* from = slot_of(p.pool, load_index(p.cu_seqlens, pair));
    char* to = slot_of(p.pool, load_index(p.slots, pair));
    if (from == nullptr || to == nullptr) return;
    const int shift = clamp_count(load_index(p.accepted, pair), cursor_of(p.pool, from, channel).pending);
    Thread thread(p.pool, channel);
    thread.load_window(p.pool, from, shift);
    __syncwarp(warp); // every lane has read the cursor
    thread.store_window(p.pool, to);
    set_pending(p.pool, to, channel, 0);
}

template <class act_t>
__global__ void __launch_bounds__(kConvThreads) conv_reset_kernel(const __grid_constant__ ConvParams p) {
    using Thread = ConvThread<act_t, 0>;
    const int channel = (blockIdx.x * kConvThreads + threadIdx.x) * Thread::kVec;
    char* slot = slot_of(p.pool, load_index(p.slots, blockIdx.y));
    if (channel >= p.pool.channels || slot == nullptr) return;
    Thread thread(p.pool, channel);
    thread.clear_window();
    thread.store_window(p.pool, slot);
    set_pending(p.pool, slot, channel, 0);
}

} // namespace replayssm
