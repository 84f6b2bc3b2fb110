//! Scores of a span, KDA, from the rows of scan_chunk_channels.cuh, and the loop of the warps that prepare spans.
#pragma once

#include "scan_chunk_channels.cuh"

namespace replayssm::delta_scan {

constexpr int kScoreRoles = 7; // warps' parts of the scores: six pairs of groups, pairs within groups

//! A of a span: [16] rows of kDiagonalPitch floats.
template <class Traits>
__device__ __forceinline__ float* diagonal_of(const ChunkWarp<Traits>& w, int span) {
    return w.floats(w.params.shared.diagonal) + (span / Traits::kSharers & 1) * kSpan * kDiagonalPitch;
}

//! One element of A or of the scores.
template <class Traits>
__device__ __forceinline__ void store_score(
    const ChunkWarp<Traits>& w, int span, bool is_query, int t, int s, float value) {
    char* stage = w.smem + w.stage_of(span);
    if (!is_query) {
        const float beta = reinterpret_cast<const float*>(stage + w.kStage.beta)[t];
        diagonal_of(w, span)[t * kDiagonalPitch + s] = beta * value;
        return;
    }
    uint32_t terms[kReadTerms];
    split(value, 0.0f, terms);
    char* at = stage + w.kStage.scores + strip_offset(t, s >> 3) + (s & 7) * 2;
#pragma unroll
    for (int term = 0; term < kReadTerms; ++term)
        *reinterpret_cast<uint16_t*>(at + term * kBlockBytes) = static_cast<uint16_t>(terms[term]);
}

//! By a warp: scores of group `later` with keys of group `earlier` < later. Eight lanes share a key.
template <class Traits>
__device__ __forceinline__ void score_groups(const ChunkWarp<Traits>& w, int span, int earlier, int later) {
    constexpr int kN = Traits::kN, kParts = kN / 32;
    const ChunkShared& s = w.params.shared;
    const int own = (w.lane() & 7) * 4, key = earlier * kGroup + (w.lane() >> 3);
    float k[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const auto row = load_pack<float, 4>(w.floats(s.early) + key * kN + part * 32 + own);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            k[part][i] = row.value[i];
    }
#pragma unroll 1
    for (int group = earlier + 1; group < later; ++group) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const auto total = load_pack<float, 4>(w.floats(s.totals) + group * kN + part * 32 + own);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                k[part][i] *= total.value[i];
        }
    }
    float value[2 * kGroup] = {};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int at = (later * kGroup + j) * kN + part * 32 + own;
            const auto late = load_pack<float, 4>(w.floats(s.late) + at);
            const auto asked = load_pack<float, 4>(w.floats(s.asked) + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[2 * j] = fmaf(k[part][i], late.value[i], value[2 * j]);
                value[2 * j + 1] = fmaf(k[part][i], asked.value[i], value[2 * j + 1]);
            }
        }
    }
    sum_lanes<8>(value, w.lane() & 7);
    store_score(w, span, w.lane() & 1, later * kGroup + ((w.lane() & 7) >> 1), key, value[0]);
}

//! By a warp: scores within the groups, from their parts.
template <class Traits>
__device__ __forceinline__ void score_near(const ChunkWarp<Traits>& w, int span) {
    const float* near = w.floats(w.params.shared.near);
#pragma unroll
    for (int i = w.lane(); i < kGroups * kNear; i += kWarp) {
        const float value = Producer<Traits>::kWarpsOfGroup == 2 ? near[i] + near[kGroups * kNear + i] : near[i];
        const int pair = i % kNear, first = i / kNear * kGroup;
        const bool is_query = pair >= kNearKeys;
        const int index = is_query ? pair - kNearKeys : pair; // t (t + 1) / 2 + s with s <= t; keys: t one less
        const int row = (index >= 1) + (index >= 3) + (index >= 6);
        const int s = index - row * (row + 1) / 2;
        store_score(w, span, is_query, first + row + (is_query ? 0 : 1), first + s, value);
    }
}

//! By a warp: its parts of a span's scores and, where no other warp does that, the inverse of the span before. Either may
//! not exist. A warp arrives for a span once it has done all its parts of it, rows included; the one with the inverse is
//! a span behind.
template <class Traits>
__device__ __forceinline__ void score_span(const Producer<Traits>& p, int span, int spans) {
    constexpr int kRoles = kScoreRoles + (Traits::kShares ? 0 : 1);
    const ChunkWarp<Traits>& w = p.w;
    for (int role = p.warp(); role < kRoles; role += Traits::kProducers) {
        if (role == kScoreRoles) {
            if (span == 0) continue;
            char* inverse = w.smem + w.stage_of(span - 1) + w.kStage.inverse;
            invert_block(diagonal_of(w, span - 1), inverse, w.lane());
        } else if (span == spans) {
            continue;
        } else if (role == kScoreRoles - 1) {
            score_near(w, span);
        } else {
            const int later = 1 + (role >= 1) + (role >= 3);
            score_groups(w, span, role - later * (later - 1) / 2, later);
        }
    }
    if constexpr (Traits::kShares) {
        publish_to_copies();
        SplitBarrier::arrive_alone(w.scored(span));
        SplitBarrier::arrive_alone(w.prepared(span));
        return;
    }
    const int done = p.warp() == (kRoles - 1) % Traits::kProducers ? span - 1 : span;
    if (done >= 0 && done < spans) SplitBarrier::arrive_alone(w.prepared(done));
}

//! By a warp: a part of a span to all other blocks of the cluster.
template <class Traits>
__device__ __forceinline__ void send_to_others(const ChunkWarp<Traits>& w, int span, uint32_t from, uint32_t bytes) {
    if (w.lane() != 0) return;
#pragma unroll
    for (int i = 1; i < Traits::kSharers; ++i)
        send_to_block(from, bytes, w.prepared(span), (w.rank() + i) % Traits::kSharers);
}

//! By the warp that does so where blocks share: the rest of the spans that its block prepares, which go to the others:
//! rows as soon as they are there, scores and the inverse when it has made that.
template <class Traits>
__device__ __forceinline__ void finish_channel_spans(const ChunkWarp<Traits>& w, int tokens) {
    for (int span = w.rank(); span * kSpan < tokens; span += Traits::kSharers) {
        const uint32_t stage = w.base + w.stage_of(span), rows = w.kStage.inverse;
        w.wait_until_spread(span);
        send_to_others(w, span, stage, rows);
        w.wait_until_scored(span);
        invert_block(diagonal_of(w, span), w.smem + w.stage_of(span) + w.kStage.inverse, w.lane());
        publish_to_copies();
        SplitBarrier::arrive_alone(w.prepared(span));
        w.wait_until_prepared(span);
        send_to_others(w, span, stage + rows, w.kStage.filled - rows);
        SplitBarrier::arrive_alone(w.used(span));
    }
}

//! By the producers: the spans of the sequence's tokens that their block prepares, each when the stage it takes is free.
template <class Traits>
__device__ __forceinline__ void prepare_channel_spans(const ChunkWarp<Traits>& w, int begin, int tokens) {
    Producer<Traits> p(w, begin);
    const int spans = (tokens + kSpan - 1) / kSpan;
    constexpr int kStep = Traits::kSharers;
    RawSpan raw;
    load_span(p, begin + w.rank() * kSpan, tokens - w.rank() * kSpan, raw);
    for (int i = w.rank(); i < spans + (Traits::kShares ? 0 : 1); i += kStep) {
        Span span;
        if (i < spans) {
            open_span(p, raw, tokens - i * kSpan, span);
            load_span(p, begin + (i + kStep) * kSpan, tokens - (i + kStep) * kSpan, raw);
        }
        p.meet(); // sums and squares are there; the last span's rows have been used
        if (i < spans) {
            normalise(p, span);
            const GroupDecays decays(span);
            multiply_near(p, span, decays);
            w.wait_for_stage(i);
            p.thread = fresh(p.thread); // what follows from it is worked out again, not kept in registers
            spread_tokens(p, span, decays, w.smem + w.stage_of(i));
            if constexpr (Traits::kShares) {
                publish_to_copies();
                SplitBarrier::arrive_alone(w.spread(i));
            }
        }
        p.meet(); // rows and products within groups are there
        score_span(p, i, spans);
    }
}

} // namespace replayssm::delta_scan
