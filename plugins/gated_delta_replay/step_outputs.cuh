//! Outputs of a step's item: reads of the state and of the ring, the triangular solve over the step's tokens, the new
//! rows d and v of the ring.
#pragma once

#include "step_parts.cuh"

namespace replayssm {

//! Where an item's results go: pointers at the item's first row.
template <class act_t>
struct ItemOutputs {
    act_t* o;
    act_t* ring_d;
    act_t* ring_v;

    template <class Traits>
    static __device__ __forceinline__ ItemOutputs of(const GatedDeltaStepParams& p, const DeltaBlock& b, int item) {
        const int head = item / Traits::kParts, offset = item % Traits::kParts * b.part_rows;
        const int V = Traits::kTuned ? 128 : p.shape.headdim, ring = head * p.pool.ring_rows * V + offset;
        act_t* o = static_cast<act_t*>(const_cast<void*>(p.in.o.data)) + b.row * p.in.o.row + head * p.in.o.head;
        return {o + offset, b.region<act_t>(p.pool.ring_d) + ring, b.region<act_t>(p.pool.ring_v) + ring};
    }
};

//! Adds to part[r * kVectors + u] what this lane's live ring rows (lane, lane + 8, ...) hold. weight(j, w): the row's
//! kVectors weights.
template <class Traits, int kVectors, class Weight>
__device__ __forceinline__ void add_ring_rows(const GatedDeltaStepParams& p, const char* rows, const DeltaBlock& b,
    float (&part)[Traits::kRows * kVectors], Weight weight) {
    using act_t = typename Traits::act_t;
    constexpr int kRows = Traits::kRows;
    constexpr int kLanes = Traits::kLanes;
    const int first = Traits::Tile::first_row(b.thread);
#pragma unroll 2
    for (int j = Traits::Tile::lane_of(b.thread); j < b.plan.history; j += kLanes) {
        const auto d = load_pack<act_t, kRows>(rows + (b.tokens + j) * p.shared.row_bytes + first * sizeof(act_t));
        float w[kVectors];
        weight(j, w);
#pragma unroll
        for (int u = 0; u < kVectors; ++u)
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                part[r * kVectors + u] = __fmaf_rn(w[u], to_float(d.value[r]), part[r * kVectors + u]);
    }
}

//! One token: from the lanes' sums of what state and ring hold for key and query of an item's rows to o, d and v. norms:
//! of those sums; token: beta; kq: kn . qn.
template <class Traits>
__device__ __forceinline__ void write_row(float (&part)[Traits::kRows * 2], const GatedDeltaStepParams& p,
    const char* rows, const DeltaBlock& b, int item, float2 norms, float beta, const float& kq) {
    using act_t = typename Traits::act_t;
    using Tile = typename Traits::Tile;
    constexpr int kSharers = Tile::template sharers<2>();
    static_assert(Tile::template kept<2>() == 1, "a lane has one total");
    const int lane = Tile::lane_of(b.thread);
    Tile::template reduce<2>(part, lane);
    const float other = __shfl_xor_sync(kFullMask, part[0], kSharers);
    const bool query = lane & kSharers;
    const float held = (query ? other : part[0]) * norms.x, read = (query ? part[0] : other) * norms.y;
    const int own = Tile::first_row(b.thread) + lane / (2 * kSharers);
    const act_t v = reinterpret_cast<const act_t*>(rows)[own];
    const float d = beta * (to_float(v) - held);
    if (lane % kSharers != 0) return;
    const auto to = ItemOutputs<act_t>::template of<Traits>(p, b, item);
    if (!query) {
        to.o[own] = from_float<act_t>(__fmaf_rn(d, kq, read));
    } else {
        const int at = b.append_row(p.pool, 0) * Traits::kDstate + own;
        to.ring_d[at] = stored_d<act_t>(d);
        to.ring_v[at] = v;
    }
}

//! One token of KDA.
template <class Traits>
__device__ __forceinline__ void write_output(const typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    const char* smem, const DeltaBlock& b, int item, int rows_buffer, int buffer) {
    constexpr int kRows = Traits::kRows;
    const int lane = Traits::Tile::lane_of(b.thread);
    const char* rows = smem + p.shared.rows + rows_buffer * p.shared.rows_cap * p.shared.row_bytes;
    const float2 token = reinterpret_cast<const float2*>(smem + p.shared.token)[buffer];
    const float2* dots = reinterpret_cast<const float2*>(smem + p.shared.dots);
    float part[kRows * 2]; // [row][key, query]
    tile.template dot<2>(reinterpret_cast<const float*>(smem + p.shared.vectors), lane, b.dstate, part);
    add_ring_rows<Traits, 2>(p, rows, b, part, [&](int j, float (&w)[2]) {
        w[0] = dots[1 + j].x;
        w[1] = dots[1 + j].y;
    });
    write_row<Traits>(part, p, rows, b, item, make_float2(1.0f, 1.0f), token.x, dots[0].y);
}

//! What state and ring hold for the keys and queries of kTokens tokens from t0 on, into shared memory.
template <class Traits, int kTokens>
__device__ __forceinline__ void write_totals(const typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    char* smem, const DeltaBlock& b, const char* rows, const float2* token, const float2* weights, int t0) {
    using Tile = typename Traits::Tile;
    constexpr int kRows = Traits::kRows, kVectors = 2 * kTokens;
    const int lane = Tile::lane_of(b.thread), stride = p.shared.dot_stride;
    float part[kRows * kVectors];
    tile.template dot<kVectors>(
        reinterpret_cast<const float*>(smem + p.shared.vectors) + 2 * t0 * b.dstate, lane, b.dstate, part);
    if (!Traits::channels(p)) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u)
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                part[r * kVectors + u] *= token[t0 + u / 2].y;
    }
    add_ring_rows<Traits, kVectors>(p, rows, b, part, [&](int j, float (&w)[kVectors]) {
        const auto pack = load_pack<float, kVectors>(weights + (b.tokens + j) * stride + t0);
#pragma unroll
        for (int u = 0; u < kVectors; ++u)
            w[u] = pack.value[u];
    });
    Tile::template reduce<kVectors>(part, lane);
    if (lane % Tile::template sharers<kVectors>() != 0) return;
    float* totals = reinterpret_cast<float*>(smem + p.shared.totals);
#pragma unroll
    for (int i = 0; i < Tile::template kept<kVectors>(); ++i) {
        const int value = Tile::template first_kept<kVectors>(lane) + i;
        totals[(2 * t0 + value % kVectors) * b.part_rows + Tile::first_row(b.thread) + value / kVectors] = part[i];
    }
}

//! Forward substitution over the step's tokens (at most kMax), for the rows of a warp's own lanes. Two lanes have a
//! row: the even one follows what is held for the keys, the odd one what is read for the queries.
template <class Traits, int kMax>
__device__ __forceinline__ void solve(const GatedDeltaStepParams& p, const char* smem, const DeltaBlock& b, int item,
    const char* rows, const float2* token, const float2* weights) {
    using act_t = typename Traits::act_t;
    constexpr int kWarpRows = kWarp / Traits::kLanes * Traits::kRows;
    const int query = b.lane() & 1, own = b.warp() * kWarpRows + (b.lane() >> 1) % kWarpRows;
    const float* totals = reinterpret_cast<const float*>(smem + p.shared.totals) + query * b.part_rows + own;
    const float* weight = reinterpret_cast<const float*>(weights) + query;
    const int V = Traits::kTuned ? 128 : p.shape.headdim;
    const auto to = ItemOutputs<act_t>::template of<Traits>(p, b, item);
    float sum[kMax];
#pragma unroll
    for (int t = 0; t < kMax; ++t)
        sum[t] = t < b.tokens ? totals[2 * t * b.part_rows] : 0.0f;
#pragma unroll
    for (int m = 0; m < kMax; ++m) {
        if (m >= b.tokens) break;
        const act_t v = reinterpret_cast<const act_t*>(rows + m * p.shared.row_bytes)[own];
        const float d = __shfl_sync(kFullMask, token[m].x * (to_float(v) - sum[m]), b.lane() & ~1);
#pragma unroll
        for (int t = m; t < kMax; ++t)
            if (t < b.tokens && (query || t > m))
                sum[t] = __fmaf_rn(weight[2 * (m * p.shared.dot_stride + t)], d, sum[t]);
        if (b.lane() >= 2 * kWarpRows) continue;
        if (query) {
            to.o[m * p.in.o.token + own] = from_float<act_t>(sum[m]);
        } else {
            const int at = b.append_row(p.pool, m) * V + own;
            to.ring_d[at] = stored_d<act_t>(d);
            to.ring_v[at] = v;
        }
    }
}

//! Any number of tokens.
template <class Traits>
__device__ __forceinline__ void write_outputs(const typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    char* smem, const DeltaBlock& b, int item, int rows_buffer, int buffer) {
    const int stride = p.shared.dot_stride;
    const char* rows = smem + p.shared.rows + rows_buffer * p.shared.rows_cap * p.shared.row_bytes;
    const float2* token = reinterpret_cast<const float2*>(smem + p.shared.token) + buffer * b.tokens;
    const float2* weights = Traits::channels(p)
        ? reinterpret_cast<const float2*>(smem + p.shared.dots)
        : reinterpret_cast<const float2*>(smem + p.shared.weights) + buffer * p.shared.rows_cap * stride;
    int t0 = 0;
    for (; t0 + 2 <= b.tokens; t0 += 2)
        write_totals<Traits, 2>(tile, p, smem, b, rows, token, weights, t0);
    if (t0 < b.tokens) write_totals<Traits, 1>(tile, p, smem, b, rows, token, weights, t0);
    __syncwarp();
    if (b.tokens <= 4) {
        solve<Traits, 4>(p, smem, b, item, rows, token, weights);
    } else {
        solve<Traits, kMaxSpecLen>(p, smem, b, item, rows, token, weights);
    }
    __syncwarp();
}

} // namespace replayssm
