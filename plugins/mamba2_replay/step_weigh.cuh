//! Weights of the rows of a head: what folds them, and how they enter the outputs.
#pragma once

#include "step_parts.cuh"

namespace replayssm {

//! What one warp needs to weigh the rows of a head, loaded long before: lane t has token t, lane j ring rows j, j + 32.
struct HeadScalars {
    float A = 0.0f;
    double scale = 1.0; // of the state in front of a fold; fp32 states
    RawStep raw;
    float ring_dt[kMaxWindow / kWarp];

    __device__ __forceinline__ void load_token(const Mamba2StepParams& p, const StepBlock& b, int head) {
        const int lane = b.thread & (kWarp - 1);
        A = __ldg(static_cast<const float*>(p.in.A.data) + head * p.in.A.head);
        if (lane >= b.tokens) return;
        raw.load(p.in.dt, b.row * p.in.dt.row + lane * p.in.dt.token + head * p.in.dt.head, p.in.dt_bias,
            head * p.in.dt_bias.head);
    }

    __device__ __forceinline__ void load_scale(const Mamba2StepParams& p, const StepBlock& b, int head) {
        scale = state_scales(b.slot, p.pool, head)[b.split];
    }

    __device__ __forceinline__ void load_ring(const Mamba2StepParams& p, const StepBlock& b, int head) {
        const int lane = b.thread & (kWarp - 1);
        const float* ring = reinterpret_cast<const float*>(b.slot + p.pool.ring_dt) + head * p.pool.ring_dt_stride;
#pragma unroll
        for (int i = 0; i < kMaxWindow / kWarp; ++i) {
            const int j = i * kWarp + lane;
            ring_dt[i] = j < b.plan.committed ? ring[ring_row(b.plan.origin, j, p.pool.ring_rows)] : 0.0f;
        }
    }
};

//! Lane t: dt and decay of token t, 0 and 1 in the other lanes.
struct TokenStep {
    float step = 0.0f;
    float decay = 1.0f;

    __device__ __forceinline__ TokenStep(const Mamba2StepParams& p, const StepBlock& b, const HeadScalars& scalars) {
        if ((b.thread & (kWarp - 1)) >= b.tokens) return;
        step = scalars.raw.value(p.in);
        decay = decay_of(scalars.A, step);
    }
};

//! Tensor form: the weight of ring row 32 batch + lane in token t as two bf16 terms, where the products of 16 ring rows
//! read it: [row / 16][token][row % 8][term][row / 8 % 2], coef_stride tokens.
__device__ __forceinline__ void put_weight(
    const StepShared& s, char* weights, int batch, int t, int lane, float value) {
    const int group = batch * (kWarp / kWeightRows) + lane / kWeightRows;
    const uint32_t offset = (group * s.coef_stride + t) * kWeightBytes;
    if (offset >= s.weight_bytes) return; // a group of 16 that no slot fills
    __nv_bfloat16* at = reinterpret_cast<__nv_bfloat16*>(weights + offset + (lane & 7) * 8 + (lane >> 3 & 1) * 2);
    const __nv_bfloat16 first = __float2bfloat16_rn(value);
    at[0] = first;
    at[2] = __float2bfloat16_rn(value - __bfloat162float(first));
}

//! By one warp: what folds the committed rows of a head. The scale behind them goes to the slot; returns it in fp32.
template <StepForm kForm, bool kScaled>
__device__ __forceinline__ float weigh_fold(
    const Mamba2StepParams& p, char* smem, const StepBlock& b, int k, const HeadScalars& scalars) {
    const int lane = b.thread & (kWarp - 1);
    FoldRow* rows = reinterpret_cast<FoldRow*>(smem + p.shared.fold) + k * (p.shared.rows_cap - b.tokens + 1);
    double scale = kScaled ? scalars.scale : 1.0;
#pragma unroll
    for (int i = 0; i < kMaxWindow / kWarp; ++i) {
        const int first = i * kWarp, count = min(b.plan.committed - first, kWarp);
        if (count <= 0) continue;
        int end;
        const float dt = scalars.ring_dt[i]; // 0 in dead lanes: decay 1
        const RowScale step = advance_rows(scale, decay_of(scalars.A, dt), count, end);
        if (lane < count) rows[first + lane] = {step.renew, __fmul_rn(dt, step.inverse), first + end};
    }
    if constexpr (kScaled) {
        constexpr int kCopies = kForm == StepForm::kGeneric ? 1 : kCursorCopies; // of this block
        if (lane < kCopies) state_scales(b.slot, p.pool, b.first_head + k)[b.split * kCopies + lane] = scale;
    } else if (lane == 0) {
        rows[b.plan.committed].renew = static_cast<float>(scale);
    }
    return static_cast<float>(scale);
}

//! By one warp: what folds the committed rows, or else the weight of every row in every token's output (one token: but
//! for B_r . C_t); the weight of S C_t, kScaled: of S' C_t; appends the tokens' dt. Products of decays, never exp of a
//! difference: nothing can overflow or cancel.
template <StepForm kForm, bool kScaled>
__device__ __forceinline__ void weigh_rows(const Mamba2StepParams& p, char* smem, const StepBlock& b, int k,
    const HeadScalars& scalars, const TokenStep& token) {
    constexpr bool kOneToken = kForm == StepForm::kOneToken;
    const int lane = b.thread & (kWarp - 1), tokens = kOneToken ? 1 : b.tokens;
    const int stride = kOneToken ? 1 : p.shared.coef_stride;
    float* coef = reinterpret_cast<float*>(smem + p.shared.coef) + k * p.shared.coef_rows * stride;
    const float* BC = reinterpret_cast<const float*>(smem + p.shared.BC);

    const float token_step = token.step, token_decay = token.decay;
    if (lane < tokens) {
        if (b.split == 0) {
            float* ring_dt =
                reinterpret_cast<float*>(b.slot + p.pool.ring_dt) + (b.first_head + k) * p.pool.ring_dt_stride;
            const int append = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
            ring_dt[ring_row(append, lane, p.pool.ring_rows)] = token_step;
        }
    }
    float up_to = token_decay; // lane t: product of the decays of tokens 0..t
    if (!kOneToken) {
#pragma unroll
        for (int d = 1; d < kMaxSpecLen; d *= 2) {
            const float other = __shfl_up_sync(kFullMask, up_to, d);
            if (lane >= d) up_to *= other;
        }
    }
    float scale = 1.0f;
    if (b.plan.flush) {
        scale = weigh_fold<kForm, kScaled>(p, smem, b, k, scalars);
    } else if (kScaled) {
        scale = static_cast<float>(scalars.scale);
    }
    float behind = 1.0f; // product of the decays of all rows behind this batch of 32
#pragma unroll
    for (int i = kMaxWindow / kWarp - 1; i >= 0; --i) {
        const int j = i * kWarp + lane;
        if (i * kWarp >= b.plan.history) continue;
        const float dt = scalars.ring_dt[i], decay = decay_of(scalars.A, dt); // dt 0, decay 1 in dead lanes
        float from = decay; // product of the decays of rows j.. of this batch
#pragma unroll
        for (int d = 1; d < kWarp; d *= 2) {
            if (d >= b.plan.committed - i * kWarp) break; // the others' decays are 1
            const float other = __shfl_down_sync(kFullMask, from, d);
            if (lane + d < kWarp) from *= other;
        }
        float after = __shfl_down_sync(kFullMask, from, 1);
        if (lane == kWarp - 1) after = 1.0f;
        const float weight = dt * (after * behind);
        for (int t = 0; t < tokens; ++t) {
            const float decays = __shfl_sync(kFullMask, up_to, t);
            const bool live = j < b.plan.committed;
            if (kForm != StepForm::kTensor && !live) continue;
            const float product = kOneToken ? 1.0f : live ? BC[t * p.shared.rows_cap + tokens + j] : 0.0f;
            if constexpr (kForm == StepForm::kTensor) {
                put_weight(p.shared, smem + p.shared.weight + k * p.shared.weight_bytes, i, t, lane,
                    live ? weight * decays * product : 0.0f);
            } else {
                coef[(tokens + j) * stride + t] = weight * decays * product;
            }
        }
        behind *= __shfl_sync(kFullMask, from, 0);
    }
    float weight = token_step; // lane i: dt_i times the decays of tokens i+1..t
    for (int t = 0; t < tokens; ++t) {
        const float decay = __shfl_sync(kFullMask, token_decay, t);
        if (t > lane) weight *= decay;
        if (lane <= t) coef[lane * stride + t] = weight * (kOneToken ? 1.0f : BC[t * p.shared.rows_cap + lane]);
    }
    const float of_state = kScaled ? behind * up_to * scale : behind * up_to;
    if (lane < tokens) reinterpret_cast<float*>(smem + p.shared.decay)[k * stride + lane] = of_state;
}

//! The block's heads are weighed by its warps, one after another by each, the first ones by the last warps (warp 0 has
//! other things to begin). What the first kHeld heads of a warp need is asked for early.
template <StepForm kForm, class state_t>
struct HeadWeights {
    static constexpr int kHeld = 2;
    static constexpr bool kScaled = sizeof(state_t) == sizeof(float);
    HeadScalars held[kHeld];

    static __device__ __forceinline__ int warps() { return blockDim.x / kWarp; }
    static __device__ __forceinline__ int first_head() { return warps() - 1 - threadIdx.x / kWarp; }

    __device__ __forceinline__ void load_tokens(const Mamba2StepParams& p, const StepBlock& b) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int k = first_head() + i * warps();
            if (k < b.heads) held[i].load_token(p, b, b.first_head + k);
        }
    }

    __device__ __forceinline__ void load_scales(const Mamba2StepParams& p, const StepBlock& b) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int k = first_head() + i * warps();
            if (kScaled && k < b.heads) held[i].load_scale(p, b, b.first_head + k);
        }
    }

    __device__ __forceinline__ void load_ring(const Mamba2StepParams& p, const StepBlock& b) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int k = first_head() + i * warps();
            if (k < b.heads) held[i].load_ring(p, b, b.first_head + k);
        }
    }

    //! More than one token: B.C must be in shared memory.
    __device__ __forceinline__ void weigh(const Mamba2StepParams& p, char* smem, const StepBlock& b) {
#pragma unroll 1
        for (int k = first_head(); k < b.heads; k += warps()) {
            weigh_rows<kForm, kScaled>(p, smem, b, k, held[0], TokenStep(p, b, held[0]));
            held[0] = held[1];
            const int next = k + kHeld * warps();
            if (next >= b.heads) continue;
            held[1].load_token(p, b, b.first_head + next);
            if (kScaled) held[1].load_scale(p, b, b.first_head + next);
            held[1].load_ring(p, b, b.first_head + next);
        }
    }
};

} // namespace replayssm
