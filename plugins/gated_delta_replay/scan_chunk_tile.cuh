//! Shared memory of the chunked scan: who is where, how tokens are loaded and stored, decays of a chunk.
#pragma once

#include "../common/chunk_tile.cuh"
#include "fold.cuh"

namespace replayssm::delta_scan {

constexpr int kBlocks = kSpans * (kSpans + 1) / 2; // 16 x 16 blocks on and below the diagonal
constexpr int kTerms = 3;                          // bf16 terms of what enters the state: a float's 24 bits
constexpr int kReadTerms = 2;                      // of what enters an output alone
constexpr uint32_t kBlockBytes = kSpan * 32;       // a 16 x 16 block, bf16
constexpr int kDiagonalPitch = 20;                 // floats; rows begin on 16 bytes

template <int kN_, bool kWarpgroup_>
struct ChunkTraits {
    static constexpr int kN = kN_;                                     // dstate rounded up
    static constexpr bool kWarpgroup = kWarpgroup_ && REPLAYSSM_WGMMA; // code for plain sm_90 goes warp by warp
    static constexpr int kTiles = kN / 8;
    static_assert(kN == 64 || kN == 128, "a thread holds kN / 2 state elements and the sums of two products");
};

//! What a chunk's tokens of one head are multiplied by. Every exponent is a plain sum of g <= 0.
struct alignas(16) TokenFactors {
    float g[kChunk];
    float beta[kChunk];
    float k_norm[kChunk];                   // 1 / |k|
    float q_norm[kChunk];                   // scale / |q|
    float from_start[kChunk];               // exp of the sum from the span's first token to t
    float to_end[kChunk];                   // exp of the sum behind t to the end of its span
    float within[kSpans][kSpan][kSpan + 1]; // [span][t][s] exp of the sum over s+1 .. t; 0 for s > t
    float sum[kSpans];                      // over the span
    float total[kSpans];                    // exp of it
    float before[kSpans];                   // exp of the sum over the spans in front
    float behind[kSpans];                   // exp of the sum over the spans behind
    float chunk;                            // exp of the sum over the chunk
    float reserved[3];
};

struct ScanBlock {
    int begin, end; // tokens
    int initial;    // the sequence starts from the slot's state
    int reserved;
    int64_t slot;
};

//! Byte offsets. Panels of k and q: [64 tokens][128 bytes], 16-byte pieces swizzled over the row's low three bits.
//! Strips of v and o (a warp's 16 channels) and 16 x 16 blocks: rows of 32 bytes, the halves swapped in rows 4..7 of
//! every eight. No matrix access has a bank conflict in either.
struct ChunkShared {
    uint32_t tile = 0;     // bytes of a chunk of k or q
    uint32_t k = 0;        // [stage]
    uint32_t q = 0;        // [stage]
    uint32_t v = 0;        // [warp], then o
    uint32_t below = 0;    // -beta k k^T with decays, blocks below the diagonal, kTerms times
    uint32_t inverse = 0;  // (I + A)^-1 of the blocks on the diagonal, kTerms times
    uint32_t read = 0;     // q k^T with decays, kReadTerms times
    uint32_t diagonal = 0; // fp32 A of the blocks on the diagonal
    uint32_t factors = 0;  // TokenFactors
    uint32_t block = 0;    // ScanBlock
    uint32_t bytes = 0;

    constexpr __host__ __device__ ChunkShared(int padded_n, int warps) {
        tile = kChunk * padded_n * 2;
        q = 2 * tile;
        v = 4 * tile;
        below = v + warps * kStripBytes;
        inverse = below + kTerms * (kBlocks - kSpans) * kBlockBytes;
        read = inverse + kTerms * kSpans * kBlockBytes;
        diagonal = read + kReadTerms * kBlocks * kBlockBytes;
        factors = diagonal + kSpans * kSpan * kDiagonalPitch * 4;
        block = factors + (static_cast<uint32_t>(sizeof(TokenFactors)) + 15) / 16 * 16;
        bytes = block + (static_cast<uint32_t>(sizeof(ScanBlock)) + 15) / 16 * 16;
    }
};

constexpr int kMaxChunkWarps = 8; // of 255 registers a thread

struct ChunkParams {
    GatedDeltaScanParams scan;
    ChunkShared shared;
    int state_dtype;
    int blocks_per_head;
};

//! Index of block (row, column), column < row, among those below the diagonal; column <= row, among all.
__device__ __forceinline__ constexpr int below_index(int row, int column) { return row * (row - 1) / 2 + column; }
__device__ __forceinline__ constexpr int block_index(int row, int column) { return row * (row + 1) / 2 + column; }

//! A thread in its warp, a warp in its block.
template <class Traits>
struct ChunkWarp {
    const ChunkParams& params;
    char* smem;
    uint32_t base; // of shared memory
    int thread;
    int head;
    int first_row; // of the block, in the head

    __device__ __forceinline__ int warp() const { return thread / kWarp; }
    __device__ __forceinline__ int lane() const { return thread % kWarp; }
    __device__ __forceinline__ int g() const { return lane() >> 2; }
    __device__ __forceinline__ int q() const { return lane() & 3; }
    //! The warp's first state row; false: the head has no such row.
    __device__ __forceinline__ int row() const { return first_row + warp() * 16; }
    __device__ __forceinline__ bool works() const { return row() < params.scan.shape.headdim; }
    __device__ __forceinline__ TokenFactors& factors() const {
        return *reinterpret_cast<TokenFactors*>(smem + params.shared.factors);
    }

    //! The lane's part of ldmatrix addresses in a tile: matrices (rows 0-7, 8-15) x (pieces 0, 1), row first or piece
    //! first; in a block or strip, half first: also the lane's share of a load or store.
    __device__ __forceinline__ uint32_t by_row() const { return tile_offset(lane() & 15, lane() >> 4); }
    __device__ __forceinline__ uint32_t by_piece() const { return tile_offset(token(), half()); }
    __device__ __forceinline__ uint32_t in_strip() const { return strip_offset(token(), half()); }
    __device__ __forceinline__ int token() const { return (lane() >> 4) * 8 + (lane() & 7); }
    __device__ __forceinline__ int half() const { return lane() >> 3 & 1; }
    __device__ __forceinline__ uint32_t strip() const { return params.shared.v + warp() * kStripBytes + in_strip(); }
};

//! By the block: k and q of `count` tokens from `first` on; rows behind them and columns behind dstate become zero.
template <class Traits>
__device__ __forceinline__ void load_tiles(const ChunkWarp<Traits>& w, int stage, int first, int count) {
    constexpr int kPieces = Traits::kN / 8;
    const ChunkShared& s = w.params.shared;
    const int piece = w.thread % kPieces, start = w.thread / kPieces, step = blockDim.x / kPieces,
              group = w.head / w.params.scan.shape.heads_per_group;
    const bool column_exists = piece * 8 < w.params.scan.shape.dstate;
#pragma unroll
    for (int is_q = 0; is_q < 2; ++is_q) {
        const replayssm_tensor& source = is_q ? w.params.scan.in.q : w.params.scan.in.k;
        const __nv_bfloat16* from = element(source, first + start, group) + piece * 8;
        const uint32_t to = w.base + (is_q ? s.q : s.k) + stage * s.tile;
#pragma unroll 4
        for (int row = start; row < kChunk; row += step) { // where nothing exists nothing is read
            copy16(to + tile_offset(row, piece), from, row < count && column_exists);
            from = advance(from, step, token_bytes(source));
        }
    }
}

//! By a warp: its channels of v, to where o will be; rows behind the last token become zero.
template <class Traits>
__device__ __forceinline__ void load_channels(const ChunkWarp<Traits>& w, int first, int count) {
    const replayssm_tensor& v = w.params.scan.in.v;
    const __nv_bfloat16* from = element(v, first + w.token(), w.head) + w.row() + w.half() * 8;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        copy16(w.base + w.strip() + span * kSpan * 32, from, w.works() && w.token() + span * kSpan < count);
        from = advance(from, kSpan, token_bytes(v));
    }
}

//! By a warp: its channels of o.
template <class Traits>
__device__ __forceinline__ void store_channels(const ChunkWarp<Traits>& w, int first, int count) {
    const replayssm_tensor& o = w.params.scan.in.o;
    const __nv_bfloat16* to = element(o, first + w.token(), w.head) + w.row() + w.half() * 8;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const uint4 bits = *reinterpret_cast<const uint4*>(w.smem + w.strip() + span * kSpan * 32);
        if (w.token() + span * kSpan < count) __stcs(reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(to)), bits);
        to = advance(to, kSpan, token_bytes(o));
    }
}

//! Gate and beta of one token before their functions; loaded a chunk ahead.
struct RawGate {
    unsigned a = 0;
    unsigned b = 0;
};

template <class Traits>
__device__ __forceinline__ RawGate load_gate(const ChunkWarp<Traits>& w, int first, int count) {
    const auto& in = w.params.scan.in;
    RawGate raw;
    if (w.thread >= count || w.thread >= kChunk) return raw;
    const int64_t token = first + w.thread;
    raw.a = load_bits(in.a.data, in.a.dtype, token * in.a.strides[1] + w.head * in.a.strides[2]);
    raw.b = load_bits(in.b.data, in.b.dtype, token * in.b.strides[1] + w.head * in.b.strides[2]);
    return raw;
}

//! 1 / sqrt(sum of squares + 1e-6) of every token's k and q: two neighbouring lanes a row.
template <class Traits>
__device__ __forceinline__ void compute_norms(const ChunkWarp<Traits>& w, int stage) {
    constexpr int kHalf = Traits::kN / 16; // pieces
    const ChunkShared& s = w.params.shared;
    for (int i = w.thread; i < 4 * kChunk; i += blockDim.x) {
        const int row = i >> 1 & 63, first = (i & 1) * kHalf;
        const bool is_q = i >= 2 * kChunk;
        const char* tile = w.smem + (is_q ? s.q : s.k) + stage * s.tile;
        float part[4] = {};
#pragma unroll
        for (int piece = 0; piece < kHalf; ++piece) {
            float value[8];
            unpack16<__nv_bfloat16>(*reinterpret_cast<const uint4*>(tile + tile_offset(row, first + piece)), value);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                part[e & 3] = fmaf(value[e], value[e], part[e & 3]);
        }
        float sum = (part[0] + part[1]) + (part[2] + part[3]);
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        const float norm = 1.0f / sqrtf(sum + 1e-6f);
        if (i & 1) continue;
        (is_q ? w.factors().q_norm : w.factors().k_norm)[row] = is_q ? norm * w.params.scan.in.scale : norm;
    }
}

//! By the first 64 threads, one a token: decays between it and the others of its span.
template <class Traits>
__device__ __forceinline__ void compute_decays(const ChunkWarp<Traits>& w) {
    TokenFactors& f = w.factors();
    const int span = w.thread / kSpan, s = w.thread % kSpan;
    float g[kSpan];
#pragma unroll
    for (int t = 0; t < kSpan; t += 4) {
        const auto pack = load_pack<float, 4>(f.g + span * kSpan + t);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            g[t + i] = pack.value[i];
    }
    float behind = 0.0f, start = 0.0f;
#pragma unroll
    for (int t = 0; t < kSpan; ++t) {
        behind += t > s ? g[t] : 0.0f;
        start += t <= s ? g[t] : 0.0f;
        f.within[span][t][s] = t >= s ? expf(behind) : 0.0f;
    }
    f.to_end[w.thread] = expf(behind);
    f.from_start[w.thread] = expf(start);
    if (s == kSpan - 1) f.sum[span] = start, f.total[span] = expf(start);
}

//! By one warp: what follows from the spans' sums.
__device__ __forceinline__ void combine_spans(TokenFactors& f, int lane) {
    if (lane > 2 * kSpans) return;
    const int own = lane % kSpans;
    float sum = 0.0f;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
        const bool counts = lane == 2 * kSpans || (lane < kSpans ? span < own : span > own);
        if (counts) sum += f.sum[span];
    }
    float& out = lane == 2 * kSpans ? f.chunk : lane < kSpans ? f.before[own] : f.behind[own];
    out = expf(sum);
}

} // namespace replayssm::delta_scan
