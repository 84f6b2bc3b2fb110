//! What a span's tokens bring along, KDA: gates, norms, decayed keys and queries, scores. By warps that hold no state
//! and run ahead of those that do, see scan_chunk_kernel.cuh.
#pragma once

#include "scan_chunk_scores.cuh"

namespace replayssm::delta_scan {

//! A producer thread: two neighbouring channels of a group's four tokens.
template <class Traits>
struct Producer {
    static constexpr int kN = Traits::kN, kWarpsOfGroup = kN / 64;
    static_assert(kWarpsOfGroup <= kHalves, "parts of sums");
    const ChunkWarp<Traits>& w;
    int thread; // of the producers
    LogGate gate;
    float bias[2];
    const __nv_bfloat16 *next_k, *next_q; // of the first of the thread's tokens in the span that is loaded next
    int64_t next_a;                       // index

    //! first: of the sequence's tokens.
    __device__ __forceinline__ Producer(const ChunkWarp<Traits>& warp, int first)
        : w(warp), thread(warp.thread - warp.params.consumers * kWarp),
          gate(warp.params.scan.shape, parameter(warp.params.scan.in.A_log, warp.head, 0)) {
        const auto& in = w.params.scan.in;
        const int token = first + w.rank() * kSpan + group() * kGroup;
        next_k = element(in.k, token, w.key_head) + channel();
        next_q = element(in.q, token, w.key_head) + channel();
        next_a = token * in.a.strides[1] + w.head * in.a.strides[2] + channel() * in.a.strides[3];
#pragma unroll
        for (int e = 0; e < 2; ++e)
            bias[e] = exists() ? parameter(w.params.scan.in.dt_bias, w.head, channel() + e) : 0.0f;
    }
    static __device__ __forceinline__ float parameter(const replayssm_tensor& tensor, int head, int channel) {
        return __ldg(static_cast<const float*>(tensor.data) + head * tensor.strides[0] + channel * tensor.strides[1]);
    }
    __device__ __forceinline__ int warp() const { return thread / kWarp; }
    __device__ __forceinline__ int channel() const { return thread % (kN / 2) * 2; }
    __device__ __forceinline__ bool exists() const { return channel() < w.params.scan.shape.dstate; }
    __device__ __forceinline__ int group() const { return thread / (kN / 2); }
    __device__ __forceinline__ int half() const { return warp() % kWarpsOfGroup; }
    //! Of the group's tokens, how many there are (less than 1: none) if the span has `count`.
    __device__ __forceinline__ int existing(int count) const { return exists() ? count - group() * kGroup : 0; }
    __device__ __forceinline__ static void meet() { named_barrier(1, Traits::kProducers * kWarp); }
};

//! A thread's part of a span as it comes from memory; loaded a span ahead.
struct RawSpan {
    uint32_t k[kGroup], q[kGroup];
    uint2 a[kGroup]; // two elements, or packed both in x
    unsigned b;
};

//! Gates of the thread's tokens that exist: as pairs where they lie so.
template <class Traits>
__device__ __forceinline__ void load_gates(const Producer<Traits>& p, int exist, RawSpan& raw) {
    const replayssm_tensor& a = p.w.params.scan.in.a;
    if (p.w.params.gate_pairs && a.dtype != REPLAYSSM_FLOAT32) {
        const auto* at = static_cast<const __half*>(a.data) + p.next_a;
#pragma unroll
        for (int j = 0; j < kGroup; ++j, at += a.strides[1])
            raw.a[j].x = j < exist ? __ldg(reinterpret_cast<const unsigned*>(at)) : 0;
    } else if (p.w.params.gate_pairs) {
        const auto* at = static_cast<const float*>(a.data) + p.next_a;
#pragma unroll
        for (int j = 0; j < kGroup; ++j, at += a.strides[1])
            raw.a[j] = j < exist ? __ldg(reinterpret_cast<const uint2*>(at)) : make_uint2(0, 0);
    } else {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            if (j >= exist) continue;
            raw.a[j].x = load_bits(a.data, a.dtype, p.next_a + j * a.strides[1]);
            raw.a[j].y = load_bits(a.data, a.dtype, p.next_a + j * a.strides[1] + a.strides[3]);
        }
    }
}

//! The next span, count: of the sequence's tokens from its first on; those that it lacks are zero.
template <class Traits>
__device__ __forceinline__ void load_span(Producer<Traits>& p, int first, int count, RawSpan& raw) {
    const GatedDeltaInputs& in = p.w.params.scan.in;
    const int exist = p.existing(count);
    const auto load = [&](const __nv_bfloat16*& next, int stride, uint32_t (&out)[kGroup]) {
        const __nv_bfloat16* at = next;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            out[j] = j < exist ? __ldg(reinterpret_cast<const unsigned*>(at)) : 0;
            at = advance(at, 1, stride);
        }
        next = advance(next, Traits::kSharers * kSpan, stride);
    };
    load(p.next_k, token_bytes(in.k), raw.k);
    load(p.next_q, token_bytes(in.q), raw.q);
    load_gates(p, exist, raw);
    p.next_a += Traits::kSharers * kSpan * in.a.strides[1];
    raw.b = 0;
    if (p.thread < count && p.thread < kSpan)
        raw.b = load_bits(in.b.data, in.b.dtype, (first + p.thread) * in.b.strides[1] + p.w.head * in.b.strides[2]);
}

//! A thread's part of a span in fp32: its tokens' keys and queries, and the logarithms of their decays to base 2.
struct Span {
    float k[kGroup][2], q[kGroup][2];
    float g[kGroup][2];
};

//! Log-decays of the thread's tokens, those that exist.
template <class Traits>
__device__ __forceinline__ void compute_gates(const Producer<Traits>& p, const RawSpan& raw, int count, Span& span) {
    const GatedDeltaScanParams& scan = p.w.params.scan;
    const bool packed = p.w.params.gate_pairs && scan.in.a.dtype != REPLAYSSM_FLOAT32;
    if (packed && scan.in.a.dtype == REPLAYSSM_BFLOAT16) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
            span.g[j][0] = low_bf16(raw.a[j].x), span.g[j][1] = high_bf16(raw.a[j].x);
    } else {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            span.g[j][0] = bits_to_float(packed ? raw.a[j].x & 0xffff : raw.a[j].x, scan.in.a.dtype);
            span.g[j][1] = bits_to_float(packed ? raw.a[j].x >> 16 : raw.a[j].y, scan.in.a.dtype);
        }
    }
    const auto apply = [&](auto function) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                span.g[j][e] = function(span.g[j][e] + p.bias[e]);
    };
    if (scan.shape.bounded)
        apply([&](float x) { return p.gate.bounded_of(x); });
    else
        apply([&](float x) { return p.gate.softplus_of(x); });
    const int exist = p.existing(count);
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (j >= exist) span.g[j][e] = 0.0f; // behind the last token nothing decays
}

//! By the producers, first: what others need to know of a group, its gates' sums and its squares.
template <class Traits>
__device__ __forceinline__ void open_span(const Producer<Traits>& p, const RawSpan& raw, int count, Span& span) {
    const ChunkShared& s = p.w.params.shared;
    compute_gates(p, raw, count, span);
    float sum[2] = {0.0f, 0.0f}, square[2 * kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            span.k[j][e] = e ? high_bf16(raw.k[j]) : low_bf16(raw.k[j]);
            span.q[j][e] = e ? high_bf16(raw.q[j]) : low_bf16(raw.q[j]);
            sum[e] += span.g[j][e];
        }
        square[2 * j] = fmaf(span.k[j][0], span.k[j][0], span.k[j][1] * span.k[j][1]);
        square[2 * j + 1] = fmaf(span.q[j][0], span.q[j][0], span.q[j][1] * span.q[j][1]);
    }
    *reinterpret_cast<float2*>(p.w.floats(s.sums) + p.group() * Traits::kN + p.channel()) = make_float2(sum[0], sum[1]);
    const int lane = p.w.lane();
    sum_lanes<8>(square, lane & 7);
    square[0] += __shfl_xor_sync(kFullMask, square[0], 8);
    square[0] += __shfl_xor_sync(kFullMask, square[0], 16);
    if (lane < 2 * kGroup) p.w.floats(s.squares)[(p.half() * kGroups + p.group()) * 2 * kGroup + lane] = square[0];
    if (p.thread < kSpan) {
        const bool counts = p.thread < count; // and nothing is written
        p.w.floats(s.beta)[p.thread] =
            counts ? LogGate::beta_of(bits_to_float(raw.b, p.w.params.scan.in.b.dtype)) : 0.0f;
    }
}

//! Keys and queries become those of norm 1 (queries: scale).
template <class Traits>
__device__ __forceinline__ void normalise(const Producer<Traits>& p, Span& span) {
    const float* squares = p.w.floats(p.w.params.shared.squares) + p.group() * 2 * kGroup;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        float sum[2] = {squares[2 * j], squares[2 * j + 1]}, norm[2];
        if (Producer<Traits>::kWarpsOfGroup == 2) {
            sum[0] += squares[kGroups * 2 * kGroup + 2 * j];
            sum[1] += squares[kGroups * 2 * kGroup + 2 * j + 1];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            norm[i] = norm_of(sum[i]);
        norm[1] *= p.w.params.scan.in.scale;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            span.k[j][e] *= norm[0], span.q[j][e] *= norm[1];
    }
}

//! Decays within a thread's group.
struct GroupDecays {
    float start[kGroup][2];   // from the group's start to behind token j
    float end[kGroup - 1][2]; // from behind token j to the group's end
    float middle[3][2];       // from behind token 0 to 1, behind 1 to 2, behind 0 to 2

    __device__ __forceinline__ explicit GroupDecays(const Span& span) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kGroup; ++j)
                sum += span.g[j][e], start[j][e] = exp2_fast(sum);
            sum = 0.0f;
#pragma unroll
            for (int j = kGroup - 2; j >= 0; --j)
                sum += span.g[j + 1][e], end[j][e] = exp2_fast(sum);
            middle[0][e] = exp2_fast(span.g[1][e]);
            middle[1][e] = exp2_fast(span.g[2][e]);
            middle[2][e] = exp2_fast(span.g[1][e] + span.g[2][e]);
        }
    }
    //! From behind token s to behind t > s.
    __device__ __forceinline__ float between(int s, int t, int e) const {
        return t == kGroup - 1 ? end[s][e] : middle[t == s + 1 ? s : 2][e];
    }
};
static_assert(kGroup == 4, "GroupDecays::middle");

//! By the producers: products of the keys and queries of one group, the thread's channels alone, summed over its warp.
//! Pairs (t, s), t before s in order: keys with s < t, then a query t with keys s <= t.
template <class Traits>
__device__ __forceinline__ void multiply_near(const Producer<Traits>& p, const Span& span, const GroupDecays& decays) {
    float value[kNear] = {};
#pragma unroll
    for (int s = 0; s < kGroup; ++s) {
#pragma unroll
        for (int t = s; t < kGroup; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float key = t > s ? span.k[s][e] * decays.between(s, t, e) : span.k[s][e];
                float& query = value[kNearKeys + t * (t + 1) / 2 + s];
                query = fmaf(key, span.q[t][e], query);
                if (t == s) continue;
                float& other = value[t * (t - 1) / 2 + s];
                other = fmaf(key, span.k[t][e], other);
            }
        }
    }
    const int lane = p.w.lane();
    sum_lanes<8>(value, lane & 7);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        value[i] += __shfl_xor_sync(kFullMask, value[i], 8);
        value[i] += __shfl_xor_sync(kFullMask, value[i], 16);
    }
    if (lane >= 8) return;
    float* near = p.w.floats(p.w.params.shared.near) + (p.half() * kGroups + p.group()) * kNear;
    *reinterpret_cast<float2*>(near + 2 * lane) = make_float2(value[0], value[1]);
}

//! Two neighbouring channels of a token, in kCount bf16 terms.
template <int kCount>
__device__ __forceinline__ void store_terms(char* at, uint32_t stride, float a, float b) {
    uint32_t terms[kCount];
    split(a, b, terms);
#pragma unroll
    for (int term = 0; term < kCount; ++term)
        *reinterpret_cast<uint32_t*>(at + term * stride) = terms[term];
}

//! By the producers: decayed keys and queries, in fp32 for scores between groups and in bf16 terms for the state.
template <class Traits>
__device__ __forceinline__ void spread_tokens(
    const Producer<Traits>& p, const Span& span, const GroupDecays& decays, char* stage) {
    constexpr ChunkStage kStage = Traits::kStage;
    constexpr int kN = Traits::kN;
    const ChunkShared& s = p.w.params.shared;
    const int channel = p.channel();
    float before[2] = {0.0f, 0.0f}, behind[2] = {0.0f, 0.0f}, all[2] = {0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        const float2 sum = *reinterpret_cast<const float2*>(p.w.floats(s.sums) + group * kN + channel);
        all[0] += sum.x, all[1] += sum.y;
        if (group < p.group()) before[0] += sum.x, before[1] += sum.y;
        if (group > p.group()) behind[0] += sum.x, behind[1] += sum.y;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
        before[e] = exp2_fast(before[e]), behind[e] = exp2_fast(behind[e]);
    const auto store = [](void* at, float a, float b) { *static_cast<float2*>(at) = make_float2(a, b); };
    store(p.w.floats(s.totals) + p.group() * kN + channel, decays.start[kGroup - 1][0], decays.start[kGroup - 1][1]);
    if (p.group() == 0) store(stage + kStage.decay + channel * 4, exp2_fast(all[0]), exp2_fast(all[1]));
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        const int token = p.group() * kGroup + j;
        const uint32_t row = (token * kN + channel) * 4, piece = span_offset(token, channel / 8) + channel % 8 * 2;
        float early[2], late[2], asked[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            late[e] = span.k[j][e] * decays.start[j][e];
            asked[e] = span.q[j][e] * decays.start[j][e];
            early[e] = j == kGroup - 1 ? span.k[j][e] : span.k[j][e] * decays.end[j][e];
        }
        store(p.w.smem + s.late + row, late[0], late[1]);
        store(p.w.smem + s.asked + row, asked[0], asked[1]);
        store(p.w.smem + s.early + row, early[0], early[1]);
        store_terms<kTerms>(stage + piece, kStage.tile, late[0] * before[0], late[1] * before[1]);
        store_terms<kReadTerms>(
            stage + kStage.queries + piece, kStage.tile, asked[0] * before[0], asked[1] * before[1]);
        store_terms<kTerms>(stage + kStage.writes + piece, kStage.tile, early[0] * behind[0], early[1] * behind[1]);
    }
    if (p.thread < kSpan) reinterpret_cast<float*>(stage + kStage.beta)[p.thread] = p.w.floats(s.beta)[p.thread];
}

} // namespace replayssm::delta_scan
