//! What a warp that holds 16 rows of the state does with a span, see scan_chunk_kernel.cuh. Sums are fragments of
//! [16 state rows][tokens or key channels].
#pragma once

#include "scan_chunk_state.cuh"

namespace replayssm::delta_scan {

//! One tile pair of a sum, as the first operand of a product, in bf16 terms.
template <int kCount>
__device__ __forceinline__ void split_pair(const float (*sum)[4], uint32_t (&out)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t terms[kCount];
        split(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1], terms);
#pragma unroll
        for (int term = 0; term < kCount; ++term)
            out[term][i] = terms[term];
    }
}

//! Two tiles of a b^T; b: a block of kTerms terms. A sum for each power of 2^-8, so that
//! fewer products wait for one another.
__device__ __forceinline__ void multiply_block(float (*out)[4], const uint32_t (&a)[kTerms][4], uint32_t b_at) {
    uint32_t b[kTerms][4];
    float sum[kTerms][2][4];
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
        ldmatrix(b[term], b_at + term * kBlockBytes);
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
#pragma unroll
        for (int level = 0; level < kTerms - term; ++level)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float (&to)[4] = sum[term + level][i];
                if (term == 0)
                    mma_from_zero(to, a[level], b[term][2 * i], b[term][2 * i + 1]);
                else
                    mma(to, a[level], b[term][2 * i], b[term][2 * i + 1]);
            }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            out[i][e] = (sum[2][i][e] + sum[1][i][e]) + sum[0][i][e];
}

//! By a warp: its channels of v of span number `span`, to where their outputs will be; rows behind the last token, of
//! which there may be any number, become zero.
template <class Traits>
__device__ __forceinline__ void load_values(const ChunkWarp<Traits>& w, int span, int begin, int tokens) {
    const int token = span * kSpan + w.token();
    const __nv_bfloat16* from = element(w.params.scan.in.v, begin + token, w.head) + w.row() + w.half() * 8;
    copy16(w.base + w.strip(span), from, w.works() && token < tokens);
}

//! By a warp: its channels of o.
template <class Traits>
__device__ __forceinline__ void store_outputs(const ChunkWarp<Traits>& w, int span, int begin, int tokens) {
    const int token = span * kSpan + w.token();
    const __nv_bfloat16* to = element(w.params.scan.in.o, begin + token, w.head) + w.row() + w.half() * 8;
    const uint4 bits = *reinterpret_cast<const uint4*>(w.smem + w.strip(span));
    if (w.works() && token < tokens) __stcs(reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)), bits);
}

//! Two tiles of tokens, += a b.
__device__ __forceinline__ void mma_pair(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    mma(d[0], a, b[0], b[1]);
    mma(d[1], a, b[2], b[3]);
}

//! What S holds for the span's keys, and what its queries read of S; GDN: of raw keys and queries, without decays.
//! Products of a sum keep apart from each other, since each waits for the one before; so there is a sum for each power of
//! 2^-8, smallest first.
template <class Traits>
__device__ __forceinline__ void read_state(const ChunkWarp<Traits>& w, uint32_t stage,
    const float (&S)[Traits::kTiles][4], float (&held)[2][4], float (&Y)[2][4]) {
    constexpr ChunkStage kStage = Traits::kStage;
    static_assert(kTerms == 3 && kReadTerms == 2, "pairs of terms");
    float low[2][4] = {}, middle[2][4] = {}; // GDN: middle alone, of both
#pragma unroll
    for (int step = 0; step < Traits::kN / 16; ++step) {
        const uint32_t at = ((stage + w.by_piece()) ^ (step & 3) << 5) + (step >> 2) * (kSpan * 128);
        uint32_t a[kTerms][4], b[4], c[4];
        split_pair(S + 2 * step, a);
        ldmatrix(b, at + kStage.reads);
        ldmatrix(c, at + kStage.queries);
        mma_pair(middle, a[1], b);
        mma_pair(Y, a[1], c);
        mma_pair(Traits::kChannels ? low : middle, a[2], b);
        mma_pair(held, a[0], b);
        mma_pair(Y, a[0], c);
        if constexpr (Traits::kChannels) {
            ldmatrix(b, at + kStage.reads + kStage.tile);
            ldmatrix(c, at + kStage.queries + kStage.tile);
            mma_pair(low, a[1], b);
            mma_pair(middle, a[0], b);
            mma_pair(Y, a[0], c);
            ldmatrix(b, at + kStage.reads + 2 * kStage.tile);
            mma_pair(low, a[0], b);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            held[i][e] += Traits::kChannels ? low[i][e] + middle[i][e] : middle[i][e];
}

//! Two tokens' numbers, of an array in the stage.
template <class Traits>
__device__ __forceinline__ float2 of_tokens(const ChunkWarp<Traits>& w, const char* array, int tile) {
    return *reinterpret_cast<const float2*>(array + (tile * 8 + 2 * w.q()) * 4);
}

//! What a span's values and reads are multiplied by, by two tokens a tile; and its values.
template <class Traits>
struct SpanWeights {
    float2 beta[2], held[2], asked[2], written[2]; // the last three: GDN
    uint32_t v[4];

    __device__ __forceinline__ SpanWeights(const ChunkWarp<Traits>& w, const char* stage, uint32_t values) {
        constexpr ChunkStage kStage = Traits::kStage;
        ldmatrix_trans(v, values);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            beta[tile] = of_tokens(w, stage + kStage.beta, tile);
            if (Traits::kChannels) continue;
            held[tile] = of_tokens(w, stage + kStage.held, tile);
            asked[tile] = of_tokens(w, stage + kStage.asked, tile);
            written[tile] = of_tokens(w, stage + kStage.written, tile);
        }
    }
};

//! R = beta (v - held) from `held`; GDN: reads get their tokens' decays and norms first.
template <class Traits>
__device__ __forceinline__ void weigh_values(const SpanWeights<Traits>& weights, float (&R)[2][4], float (&Y)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const float2 beta = weights.beta[tile], one = make_float2(1.0f, 1.0f);
        const float2 held = Traits::kChannels ? one : weights.held[tile];
        const float2 asked = Traits::kChannels ? one : weights.asked[tile];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = weights.v[tile * 2 + (i >> 1)];
            const float value = i & 1 ? high_bf16(pair) : low_bf16(pair);
            R[tile][i] = (i & 1 ? beta.y : beta.x) * fmaf(-(i & 1 ? held.y : held.x), R[tile][i], value);
            if (!Traits::kChannels) Y[tile][i] *= i & 1 ? asked.y : asked.x;
        }
    }
}

//! D kn^T of kCount tiles of channels from `first` on, smallest terms first; a: D, `writes`: kn, both in bf16 terms.
template <class Traits, int kCount>
__device__ __forceinline__ void multiply_writes(
    const ChunkWarp<Traits>& w, uint32_t writes, int first, const uint32_t (&a)[kTerms][4], float (&sum)[kCount][4]) {
    constexpr uint32_t kTile = Traits::kStage.tile;
    constexpr int kLast = Traits::kKeyTerms - 1;
#pragma unroll
    for (int term = kLast; term >= 0; --term) {
        uint32_t b[kCount / 2][4];
#pragma unroll
        for (int two = 0; two < kCount / 2; ++two) {
            const int step = first / 2 + two;
            const uint32_t row = ((writes + w.by_row()) ^ (step & 3) << 5) + (step >> 2) * (kSpan * 128);
            ldmatrix_trans(b[two], row + term * kTile);
        }
#pragma unroll
        for (int level = kTerms - 1 - term; level >= 0; --level)
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const uint32_t (&part)[4] = b[i / 2];
                if (term == kLast && level == kTerms - 1 - kLast)
                    mma_from_zero(sum[i], a[level], part[i % 2 * 2], part[i % 2 * 2 + 1]);
                else
                    mma(sum[i], a[level], part[i % 2 * 2], part[i % 2 * 2 + 1]);
            }
    }
}

//! S <- S decay + D kn^T; a: D in bf16 terms, GDN: times what k lacks to kn behind the span.
template <class Traits>
__device__ __forceinline__ void fold_span(const ChunkWarp<Traits>& w, const char* stage, uint32_t at,
    const uint32_t (&a)[kTerms][4], float (&S)[Traits::kTiles][4]) {
    constexpr ChunkStage kStage = Traits::kStage;
    constexpr int kPart = 4; // tiles
    const float one_decay = Traits::kChannels ? 1.0f : *reinterpret_cast<const float*>(stage + kStage.decay);
#pragma unroll
    for (int first = 0; first < Traits::kTiles; first += kPart) {
        float sum[kPart][4];
        multiply_writes(w, at + kStage.writes, first, a, sum);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            float2 decay = make_float2(one_decay, one_decay);
            if (Traits::kChannels) decay = of_tokens(w, stage + kStage.decay, first + i);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                S[first + i][e] = __fmaf_rn(e & 1 ? decay.y : decay.x, S[first + i][e], sum[i][e]);
        }
    }
}

//! By a warp: one span read, outputs to where v was; a: D as what S is folded with has it, in bf16 terms.
template <class Traits>
__device__ __forceinline__ void read_span(const ChunkWarp<Traits>& w, int span, bool has_state,
    const float (&S)[Traits::kTiles][4], uint32_t (&a)[kTerms][4]) {
    constexpr ChunkStage kStage = Traits::kStage;
    const char* stage = w.smem + w.stage_of(span);
    const uint32_t at = w.base + w.stage_of(span), values = w.base + w.strip(span);
    float R[2][4] = {}, Y[2][4] = {};
    const SpanWeights<Traits> weights(w, stage, values); // first, since what follows waits for products alone
    if (has_state) read_state(w, at, S, R, Y);
    weigh_values(weights, R, Y);
    split_pair(R, a);
    multiply_block(R, a, at + kStage.inverse + w.in_strip());
    split_pair(R, a);
#pragma unroll
    for (int term = 0; term < kReadTerms; ++term) {
        uint32_t b[4];
        ldmatrix(b, at + kStage.scores + term * kBlockBytes + w.in_strip());
#pragma unroll
        for (int level = 0; level < kReadTerms - term; ++level)
            mma_pair(Y, a[level], b);
    }
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = pack_bf16(Y[i / 2][i % 2 * 2], Y[i / 2][i % 2 * 2 + 1]);
    stmatrix_trans(values, out);
    if (!Traits::kChannels) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                R[tile][i] *= i & 1 ? weights.written[tile].y : weights.written[tile].x;
        split_pair(R, a);
    }
}

//! By the warps that hold the state, padding: zeros for the sequence's tokens.
template <class Traits>
__device__ __forceinline__ void zero_outputs(const ChunkWarp<Traits>& w, int begin, int end) {
    const replayssm_tensor& o = w.params.scan.in.o;
    if (!w.works()) return;
    for (int t = begin + w.token(); t < end; t += kSpan) {
        const __nv_bfloat16* to = element(o, t, w.head) + w.row() + w.half() * 8;
        *reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)) = make_uint4(0, 0, 0, 0);
    }
}

//! By the warps that hold the state: the whole sequence.
template <class Traits>
__device__ __forceinline__ void fold_spans(const ChunkWarp<Traits>& w, const ScanBlock& block, int part) {
    const GatedDeltaScanParams& p = w.params.scan;
    const int begin = block.begin, tokens = block.end - begin, spans = (tokens + kSpan - 1) / kSpan;
    bool has_state = block.initial;
    for (int span = 0; span < kValuesAhead; ++span) {
        if (span < spans) load_values(w, span, begin, tokens);
        copy_commit();
    }
    float S[Traits::kTiles][4] = {};
    if (has_state && w.works()) load_state(w, block.slot, part, S);
    for (int span = 0; span < spans; ++span) {
        copy_wait<kValuesAhead - 1>();
        __syncwarp(); // all lanes' pieces of v are there
        w.wait_until_prepared(span);
        uint32_t a[kTerms][4];
        read_span(w, span, has_state, S, a);
        has_state = true;
        store_outputs(w, span, begin, tokens); // here, since products of the fold leave time for it
        load_values(w, span + kValuesAhead, begin, tokens);
        copy_commit();
        fold_span(w, w.smem + w.stage_of(span), w.base + w.stage_of(span), a, S);
        w.release_stage(span);
    }
    copy_wait<0>();
    named_barrier(2, w.params.consumers * kWarp); // every warp has read cursor and scale
    if (w.works()) store_state(w, block.slot, S);
    if (w.thread < kCursorCopies && w.thread % w.params.blocks_per_head == part) {
        char* slot = p.pool.base + block.slot * p.pool.stride_bytes;
        const int copy = w.head * kCursorCopies + w.thread;
        reinterpret_cast<Cursor*>(slot + p.pool.cursor)[copy] =
            reset_cursor(block.slot, p.shape.window, p.shape.stagger);
        if (!Traits::kChannels && p.pool.state_scale >= 0)
            reinterpret_cast<double*>(slot + p.pool.state_scale)[copy] = 1.0;
    }
}

} // namespace replayssm::delta_scan
