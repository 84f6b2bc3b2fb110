//! Shared memory of the tensor-core scan: who is where, how tokens are loaded and stored, decays and scores of a chunk.
#pragma once

#include "../common/chunk_tile.cuh"
#include "fold.cuh"

namespace replayssm {

constexpr int kHalfBlocks = kSpans * (kSpans + 1); // 16 x 8 halves of the score blocks on and below the diagonal
constexpr int kStateTerms = 2;                     // bf16 terms of the state where it enters an output
constexpr int kScoreTerms = 2;                     // of decayed scores
constexpr int kFoldTerms = 3;                      // of dt decay x where it enters the state: a float's 24 bits
constexpr uint32_t kScoreBytes = kHalfBlocks * kWarp * 16;
constexpr uint32_t kOperandBytes = kHalfBlocks * 256; // decayed scores of one head, one term

//! kWarpsPerHead_: headdim / 16, or 0 where that is not known when compiled (kWarpgroup_ needs it: 4 or 8).
template <int kN_, bool kWarpgroup_, int kWarpsPerHead_>
struct ScanTraits {
    static constexpr int kN = kN_;                                     // dstate rounded up
    static constexpr bool kWarpgroup = kWarpgroup_ && REPLAYSSM_WGMMA; // code for plain sm_90 goes warp by warp
    static constexpr int kWarpsPerHead = kWarpsPerHead_;
    static constexpr int kTiles = kN / 8;
    static constexpr int kThreads = kN > 128 ? 256 : 512; // 255 or 128 registers a thread
    //! Of x, z, y in shared memory: a warpgroup's or a warp's channels.
    static constexpr uint32_t kRowBytes = kWarpgroup ? 128 : 32;
    static_assert(!kWarpgroup || kWarpsPerHead == 4 || kWarpsPerHead == 8, "a head is whole warpgroups");
};

//! Decays of a chunk of one head. Every exponent is a plain sum of A dt <= 0.
struct TokenDecays {
    float from_start[kChunk]; // exp of the sum from the span's first token to t
    float to_end[kChunk];     // dt_t exp of the sum behind t to the end of its span
    float exponent[kChunk];   // base-2 exponent of from_start
    float dt[kChunk];
    float total[kSpans];  // sum over the span
    float behind[kSpans]; // exp of the sum over the spans behind it
    float chunk;          // exp of the sum over the chunk
    float reserved[3];
};

struct ScanBlock {
    int begin, end; // tokens
    int group;
    int initial; // the sequence starts from the slot's state
    int64_t slot;
};

//! Byte offsets. Panels (B, C; x, z, y of a warpgroup's 64 channels): [64 tokens][128 bytes], 16-byte pieces swizzled
//! over the row's low three bits. Strips (x, z, y of a warp's 16 channels; decayed scores of 16 tokens): rows of 32
//! bytes, the halves swapped in rows 4..7 of every eight. No access of a warp has a bank conflict in either.
struct ScanShared {
    uint32_t tile = 0; // bytes of B or C of a chunk; B of stage s at s tile
    uint32_t C = 0;
    uint32_t x_stage = 0; // bytes of a stage of x
    uint32_t x = 0;
    uint32_t gate = 0;    // z, then y
    uint32_t operand = 0; // decayed scores of the heads
    uint32_t scores = 0;
    uint32_t decays = 0;  // TokenDecays [stage][head]
    uint32_t weights = 0; // fp32 D [warp][16]
    uint32_t rates = 0;   // {fp32 A, raw dt_bias} [head]
    uint32_t block = 0;   // ScanBlock
    uint32_t arrived = 0; // barriers: the tiles of a stage have arrived
    uint32_t done = 0;    // the tiles of a stage have been used
    uint32_t scored = 0;  // scores are there
    uint32_t taken = 0;   // scores have been used
    uint32_t bytes = 0;

    constexpr __host__ __device__ ScanShared(int padded_n, int warps, int heads) {
        tile = kChunk * padded_n * 2;
        C = 2 * tile;
        x = 4 * tile;
        x_stage = warps * kStripBytes;
        gate = x + 2 * x_stage;
        operand = gate + x_stage;
        scores = operand + heads * kScoreTerms * kOperandBytes;
        decays = scores + kScoreBytes;
        weights = decays + 2 * heads * static_cast<uint32_t>(sizeof(TokenDecays));
        rates = weights + warps * 64;
        block = rates + (heads * 8 + 15) / 16 * 16;
        arrived = block + static_cast<uint32_t>(sizeof(ScanBlock) + 15) / 16 * 16;
        done = arrived + 16;
        scored = done + 16;
        taken = scored + 8;
        bytes = taken + 8;
    }
};

struct ScanMmaParams {
    Mamba2ScanParams scan;
    ScanShared shared;
    int state_dtype;
    int heads; // of a block
    int warps_per_head;
    int blocks_per_group;
};

//! A block with warpgroup products is laid out for 16 warps, however many it has. A warpgroup's place for decayed
//! scores holds a panel, too, so that a head of two warpgroups has two.
template <class Traits>
__device__ __forceinline__ ScanShared layout_of(const ScanMmaParams& params) {
    if constexpr (Traits::kWarpgroup) {
        constexpr ScanShared kFixed(Traits::kN, 16, 4);
        return kFixed;
    } else {
        return params.shared;
    }
}

//! Where the strip of decayed scores of tokens 16 span .. begins: rows are the tokens from 16 span on.
__device__ __forceinline__ uint32_t operand_offset(int span) { return span * kStripBytes - 256 * span * (span - 1); }

//! A thread in its warp, a warp in its block. Made anew wherever it is needed, from two registers: what it holds is
//! cheaper to compute than to keep across the products.
template <class Traits>
struct ScanWarp {
    const ScanMmaParams& params;
    char* smem;
    int thread;
    //! Of the warp: head (16 bits), 16 channels of the head (8), head of the block (7), whether it writes (1).
    uint32_t place;

    __device__ __forceinline__ int warp() const { return thread / kWarp; }
    __device__ __forceinline__ int lane() const { return thread % kWarp; }
    __device__ __forceinline__ int g() const { return lane() >> 2; }
    __device__ __forceinline__ int q() const { return lane() & 3; }
    __device__ __forceinline__ int head() const { return place & 0xffff; }
    __device__ __forceinline__ int sub() const {
        return Traits::kWarpsPerHead ? warp() % Traits::kWarpsPerHead : place >> 16 & 0xff;
    }
    __device__ __forceinline__ int local() const {
        return Traits::kWarpsPerHead ? warp() / Traits::kWarpsPerHead : place >> 24 & 0x7f;
    }
    //! false: a spare place of the group's last block, which repeats the group's last head
    __device__ __forceinline__ bool writes() const { return place >> 31; }
    __device__ __forceinline__ int per_head() const {
        return Traits::kWarpsPerHead ? Traits::kWarpsPerHead : params.warps_per_head;
    }

    __device__ __forceinline__ ScanShared layout() const { return layout_of<Traits>(params); }
    __device__ __forceinline__ uint32_t base() const { return shared_address(smem); }
    __device__ __forceinline__ TokenDecays& decays(int stage) const {
        return reinterpret_cast<TokenDecays*>(
            smem + layout().decays)[stage * (Traits::kWarpgroup ? 4 : params.heads) + local()];
    }
    __device__ __forceinline__ uint32_t operand() const {
        constexpr int kGroups = Traits::kWarpgroup ? Traits::kWarpsPerHead / 4 : 1;
        return layout().operand + local() * (kGroups * kScoreTerms * kOperandBytes);
    }
    //! Barrier of the head's warps.
    __device__ __forceinline__ void meet() const { named_barrier(1 + local(), per_head() * kWarp); }

    //! The lane's part of ldmatrix addresses in a tile: matrices (rows 0-7, 8-15) x (pieces 0, 1), row first or piece
    //! first.
    __device__ __forceinline__ uint32_t by_row() const { return tile_offset(lane() & 15, lane() >> 4); }
    __device__ __forceinline__ uint32_t by_piece() const {
        return tile_offset((lane() >> 4) * 8 + (lane() & 7), lane() >> 3 & 1);
    }
    //! In a strip of decayed scores, half first.
    __device__ __forceinline__ uint32_t in_strip() const { return strip_offset(row(), half()); }
    //! In x, z or y: 16 bytes of the warp's channels, token row() of a span. Also the lane's share of a load or store.
    __device__ __forceinline__ uint32_t in_channels() const {
        if (Traits::kWarpgroup) return warp() / 4 * kPanelBytes + tile_offset(row(), warp() % 4 * 2 + half());
        return warp() * kStripBytes + strip_offset(row(), half());
    }
    __device__ __forceinline__ int row() const { return (lane() >> 4) * 8 + (lane() & 7); }
    __device__ __forceinline__ int half() const { return lane() >> 3 & 1; }
    //! The lane's first channel in a load or store, of the head.
    __device__ __forceinline__ int channel() const { return sub() * 16 + half() * 8; }
};

//! By the block: B and C of `count` tokens from `first` on, into a stage; rows behind them and columns behind dstate
//! become zero.
template <class Traits>
__device__ __forceinline__ void load_tiles(const ScanWarp<Traits>& w, int stage, int first, int count) {
    constexpr int kPieces = Traits::kN / 8;
    const ScanShared s = w.layout();
    const int piece = w.thread % kPieces, group = reinterpret_cast<const ScanBlock*>(w.smem + s.block)->group;
    const bool column_exists = piece * 8 < w.params.scan.shape.dstate;
#pragma unroll
    for (int is_c = 0; is_c < 2; ++is_c) {
        const replayssm_tensor& source = is_c ? w.params.scan.in.C : w.params.scan.in.B;
        const int start = w.thread / kPieces, step = blockDim.x / kPieces;
        const __nv_bfloat16* from = element(source, first + start, group) + piece * 8;
        const uint32_t to = w.base() + is_c * s.C + stage * s.tile;
#pragma unroll 1
        for (int row = start; row < kChunk; row += step) { // where nothing exists nothing is read
            copy16(to + tile_offset(row, piece), from, row < count && column_exists);
            from = advance(from, step, token_bytes(source));
        }
    }
}

//! By a warp: its channels of x or z, to the place that begins at `to`; rows behind the last token become zero.
template <class Traits>
__device__ __forceinline__ void load_channels(
    const ScanWarp<Traits>& w, const replayssm_tensor& source, uint32_t to, int first, int count) {
    const __nv_bfloat16* from = element(source, first + w.row(), w.head()) + w.channel();
    const uint32_t target = w.base() + to + w.in_channels();
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        copy16(target + span * kSpan * Traits::kRowBytes, from, w.row() + span * kSpan < count);
        from = advance(from, kSpan, token_bytes(source));
    }
}

//! By a warp: its channels of y, from where write_outputs left them.
template <class Traits>
__device__ __forceinline__ void store_channels(const ScanWarp<Traits>& w, int first, int count) {
    const replayssm_tensor& y = w.params.scan.in.y;
    const __nv_bfloat16* to = element(y, first + w.row(), w.head()) + w.channel();
    const char* from = w.smem + w.layout().gate + w.in_channels();
    const int rows = w.writes() ? count - w.row() : 0;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from + span * kSpan * Traits::kRowBytes);
        if (span * kSpan < rows) __stcs(reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)), bits);
        to = advance(to, kSpan, token_bytes(y));
    }
}

//! dt of the lane's token of a span: lower lanes take the tokens in order, upper lanes the same ones in reverse.
template <class Traits>
__device__ __forceinline__ int span_token(const ScanWarp<Traits>& w, int span) {
    return span * kSpan + (w.lane() < 16 ? w.lane() : 31 - w.lane());
}
template <class Traits>
__device__ __forceinline__ unsigned load_step(const ScanWarp<Traits>& w, int span, int first, int count) {
    const replayssm_tensor& dt = w.params.scan.in.dt;
    const int t = span_token(w, span);
    if (span >= kSpans || t >= count) return 0;
    const int64_t at = static_cast<int64_t>(first + t) * static_cast<int>(dt.strides[1]) +
        static_cast<int64_t>(w.head()) * static_cast<int>(dt.strides[2]);
    return load_bits(dt.data, dt.dtype, at);
}

//! By the warps of a head: TokenDecays of a chunk, but for `behind` and `chunk`. A warp takes a span; its lower lanes
//! sum forwards, its upper ones backwards. early: load_step of span sub().
template <class Traits>
__device__ __forceinline__ void compute_decays(
    const ScanWarp<Traits>& w, unsigned early, int stage, int first, int count) {
    const Mamba2Inputs& in = w.params.scan.in;
    const float2 rate = reinterpret_cast<const float2*>(w.smem + w.layout().rates)[w.local()];
    const int place = w.lane() & 15;
    TokenDecays& out = w.decays(stage);
    for (int span = w.sub(); span < kSpans; span += w.per_head()) {
        const int t = span_token(w, span);
        RawStep raw;
        raw.dt = span == w.sub() ? early : load_step(w, span, first, count);
        raw.bias = __float_as_uint(rate.y);
        const float dt = t < count ? raw.value(in) : 0.0f;
        float sum = __fmul_rn(rate.x, dt);
#pragma unroll
        for (int step = 1; step < kSpan; step *= 2) {
            const float before = __shfl_up_sync(kFullMask, sum, step, kSpan);
            if (place >= step) sum += before;
        }
        const float before = __shfl_up_sync(kFullMask, sum, 1, kSpan);
        if (w.lane() >= 16) {
            out.to_end[t] = dt * expf(place == 0 ? 0.0f : before);
        } else {
            out.from_start[t] = expf(sum);
            out.exponent[t] = sum * 1.4426950408889634f;
            out.dt[t] = dt;
            if (place == kSpan - 1) out.total[span] = sum;
        }
    }
}

//! By one warp: what follows from the spans' totals.
__device__ __forceinline__ void combine_spans(TokenDecays& d, int lane) {
    if (lane > kSpans) return;
    float sum = 0.0f;
#pragma unroll
    for (int span = 0; span < kSpans; ++span)
        sum += lane == kSpans || span > lane ? d.total[span] : 0.0f;
    (lane == kSpans ? d.chunk : d.behind[lane]) = expf(sum);
}

} // namespace replayssm
