//! What both kinds make of a span's keys and queries: (I + A)^-1 and scores, as bf16 terms for the products that
//! follow; and their gates.
#pragma once

#include "scan_chunk_tile.cuh"

namespace replayssm::delta_scan {

//! log2(exp(g)) of a gate; every decay here is a power of two of sums of these. Error: some 2 ulp, as gate_of's.
struct LogGate {
    float rate;  // softplus: -log2(e) exp(A_log); bounded: -log2(e) exp(A_log), of the sigmoid's argument
    float bound; // bounded: log2(e) times it
    static constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

    __device__ __forceinline__ LogGate(const GatedDeltaShape& shape, float A_log)
        : rate(-kLog2E * expf(A_log)), bound(kLog2E * shape.gate_lower_bound) {}

    //! 2^power times exp(error), where power is rounded and error what that left out.
    static __device__ __forceinline__ float corrected(float power, float left_out) {
        const float value = exp2_fast(power);
        return fmaf(value, left_out * kLn2, value);
    }
    //! log(1 + e^x)
    static __device__ __forceinline__ float softplus_fast(float x) {
        const float size = fminf(fabsf(x), 120.0f), power = -kLog2E * size;
        const float u = corrected(power, fmaf(-kLog2E, size, -power)), v = 2.0f + u;
        const float inverse = reciprocal_fast(v), guess = u * inverse;
        const float z = fmaf(fmaf(-guess, v, u), inverse, guess), w = z * z; // log(1 + u) = 2 artanh(u / (2 + u))
        float sum = 1.0f / 13.0f;
#pragma unroll
        for (int odd = 11; odd >= 3; odd -= 2)
            sum = fmaf(sum, w, 1.0f / static_cast<float>(odd));
        const float twice = z + z;
        return fmaf(sum * w, twice, twice) + (x <= 0.0f ? 0.0f : x);
    }
    __device__ __forceinline__ float softplus_of(float x) const { return rate * softplus_fast(x); }
    //! 1 / (1 + 2^(factor x)); the power is limited, so that no infinity meets Newton's step.
    static __device__ __forceinline__ float logistic(float factor, float x) {
        const float power = factor * x, left_out = fabsf(power) < 120.0f ? fmaf(factor, x, -power) : 0.0f;
        const float v = 1.0f + corrected(power > 120.0f ? 120.0f : power, left_out);
        const float guess = reciprocal_fast(v);
        return fmaf(fmaf(-v, guess, 1.0f), guess, guess);
    }
    __device__ __forceinline__ float bounded_of(float x) const { return bound * logistic(rate, x); }
    static __device__ __forceinline__ float beta_of(float x) { return logistic(-kLog2E, x); }
};

//! 1 / sqrt(square + 1e-6)
__device__ __forceinline__ float norm_of(float square) {
    square += 1e-6f;
    const float guess = rsqrtf(square);
    return fmaf(0.5f * guess, fmaf(-square * guess, guess, 1.0f), guess); // Newton's step
}

//! A 16 x 8 half of a 16 x 16 block as bf16 terms; value: (t, s) (t, s+1) (t+8, s) (t+8, s+1).
template <int kCount, class Traits>
__device__ __forceinline__ void store_half_block(
    const ChunkWarp<Traits>& w, char* block, int half, const float (&value)[4]) {
    uint32_t upper[kCount], lower[kCount];
    split(value[0], value[1], upper);
    split(value[2], value[3], lower);
    char* target = block + strip_offset(w.g(), half) + w.q() * 4;
#pragma unroll
    for (int term = 0; term < kCount; ++term) {
        *reinterpret_cast<uint32_t*>(target + term * kBlockBytes) = upper[term];
        *reinterpret_cast<uint32_t*>(target + term * kBlockBytes + 256) = lower[term];
    }
}

//! By a warp: (I + A)^-1 of a 16 x 16 block by forward substitution, as bf16 terms. Two lanes work out the same column
//! and take turns at storing two rows of it. A: rows of kDiagonalPitch floats, read below the diagonal alone.
__device__ __forceinline__ void invert_block(const float* A, char* inverse, int lane) {
    __syncwarp();
    const int own = lane % kSpan;
    const bool second = lane >= kSpan;
    float column[kSpan];
#pragma unroll
    for (int t = 0; t < kSpan; ++t) {
        float sum[4] = {t == own ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int first = 0; first < t; first += 4) {
            const auto row = load_pack<float, 4>(A + t * kDiagonalPitch + first);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i < t) sum[i] = fmaf(-row.value[i], column[first + i], sum[i]);
        }
        column[t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    char* target = inverse + (own & 7) * 2 + (second ? 2 : 0) * 32;
#pragma unroll
    for (int t = 0; t < kSpan; t += 4) {
        uint32_t terms[kTerms];
        split(second ? column[t + 2] : column[t], second ? column[t + 3] : column[t + 1], terms);
        char* at = target + strip_offset(t, own >> 3); // rows t .. t + 3 have their halves alike
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            *reinterpret_cast<uint16_t*>(at + term * kBlockBytes) = static_cast<uint16_t>(terms[term]);
            *reinterpret_cast<uint16_t*>(at + term * kBlockBytes + 32) = static_cast<uint16_t>(terms[term] >> 16);
        }
    }
    __syncwarp();
}

} // namespace replayssm::delta_scan
