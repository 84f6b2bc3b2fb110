//! Shared memory of the chunked scans: who is where, and where a block keeps what.
#pragma once

#include "../common/chunk_tile.cuh"
#include "../common/cluster.cuh"
#include "fold.cuh"

namespace replayssm::delta_scan {

constexpr int kTerms = 3;                    // bf16 terms of what enters the state: a float's 24 bits
constexpr int kReadTerms = 2;                // of what enters an output alone
constexpr uint32_t kBlockBytes = kSpan * 32; // a 16 x 16 block, bf16
constexpr int kDiagonalPitch = 20;           // floats; rows begin on 16 bytes
constexpr int kValuesAhead = 3;              // spans whose v is on its way
constexpr int kWarpsApart = 8;               // of a block whose two kinds of warps keep apart
constexpr int kConsumersApart = 2;           // of them, at most

// KDA
constexpr int kGroup = 4; // tokens of a group: each of a span's groups is prepared by threads of its own
constexpr int kGroups = kSpan / kGroup;
constexpr int kHalves = 2;                            // warps that share a group's tokens, at most
constexpr int kNearKeys = kGroup * (kGroup - 1) / 2;  // pairs of different tokens in a group
constexpr int kNear = kNearKeys + kNearKeys + kGroup; // and pairs of a query with a key
static_assert(kNear == 16, "sums over a warp come in sixteens");

//! Byte offsets in a span's stage. Tiles: [16 tokens][128 bytes], a panel for each 64 channels, 16-byte pieces swizzled
//! over the row's low three bits; 16 x 16 blocks and strips of v and o (a warp's 16 channels): rows of 32 bytes, the
//! halves swapped in rows 4..7 of every eight. No matrix access has a bank conflict in either. A tile or block has its
//! bf16 terms one behind the other.
struct ChunkStage {
    uint32_t tile = 0;    // bytes of a term of a tile
    uint32_t reads = 0;   // KDA: kn times decay from the span's start, kTerms; GDN: k
    uint32_t queries = 0; // KDA: scale qn likewise, kReadTerms; GDN: q
    uint32_t writes = 0;  // KDA: kn times decay to the span's end, kTerms; GDN: k
    uint32_t inverse = 0; // (I + A)^-1, kTerms
    uint32_t scores = 0;  // q k^T with decays, kReadTerms
    uint32_t beta = 0;    // fp32 [16]
    uint32_t held = 0;    // GDN: fp32 [16], decay from the span's start times 1/|k|
    uint32_t asked = 0;   // decay from the span's start times scale/|q|
    uint32_t written = 0; // decay to the span's end times 1/|k|
    uint32_t decay = 0;   // fp32 of the whole span: KDA [channels], GDN one
    uint32_t filled = 0;  // bytes in front of the stage's end that are not used
    uint32_t bytes = 0;

    constexpr __host__ __device__ ChunkStage(int padded_n, bool channels) {
        tile = kSpan * padded_n * 2;
        queries = (channels ? kTerms : 1) * tile;
        inverse = queries + (channels ? kReadTerms : 1) * tile;
        if (channels) writes = inverse, inverse += kTerms * tile;
        scores = inverse + kTerms * kBlockBytes;
        beta = scores + kReadTerms * kBlockBytes;
        held = beta + kSpan * 4;
        asked = held + kSpan * 4;
        written = asked + kSpan * 4;
        decay = written + kSpan * 4;
        filled = decay + (channels ? padded_n : 4) * 4;
        bytes = (filled + 1023) / 1024 * 1024; // the swizzle's period
    }
};

//! What a GDN producer warp keeps of the span that it prepares.
struct alignas(16) HeadSpan {
    float A[kSpan][kDiagonalPitch]; // below the diagonal
    float within[kSpan][kSpan + 1]; // [t][s] decay over s+1 .. t; 0 for s > t
    float g[kSpan];                 // log2 of the decays
    float k_norm[kSpan];            // 1 / |k|
    float q_norm[kSpan];            // scale / |q|
};

struct ScanBlock {
    int begin, end; // tokens
    int initial;    // the sequence starts from the slot's state
    int reserved;
    int64_t slot;
};

//! Byte offsets of all else.
struct ChunkShared {
    uint32_t v = 0;        // [consumer warp][4 spans], then o
    uint32_t head = 0;     // GDN: HeadSpan [producer warp]
    uint32_t early = 0;    // KDA: fp32 [16][channels], kn times decay to the group's end
    uint32_t late = 0;     // kn times decay from the group's start
    uint32_t asked = 0;    // scale qn likewise
    uint32_t totals = 0;   // fp32 [group][channels], a group's decay
    uint32_t sums = 0;     // fp32 [group][channels], its logarithm
    uint32_t squares = 0;  // fp32 [half][16][k, q], parts of the sums of squares
    uint32_t near = 0;     // fp32 [half][group][kNear], parts of the products within a group
    uint32_t diagonal = 0; // fp32 A of two spans
    uint32_t beta = 0;     // fp32 [16] of the span whose gates are being computed
    uint32_t barriers = 0; // [stage] prepared, [stage] used; where blocks share: [2] spread, [2] scored
    uint32_t block = 0;    // ScanBlock
    uint32_t bytes = 0;

    constexpr __host__ __device__ ChunkShared(
        int padded_n, bool channels, int stages, int producers, int consumers, bool shares) {
        v = stages * ChunkStage(padded_n, channels).bytes;
        head = early = v + consumers * kStripBytes;
        barriers = head + producers * static_cast<uint32_t>(sizeof(HeadSpan));
        if (channels) {
            const uint32_t rows = kSpan * padded_n * 4;
            late = early + rows;
            asked = late + rows;
            totals = asked + rows;
            sums = totals + kGroups * padded_n * 4;
            squares = sums + kGroups * padded_n * 4;
            near = squares + kHalves * kSpan * 2 * 4;
            diagonal = near + kHalves * kGroups * kNear * 4;
            beta = diagonal + 2 * kSpan * kDiagonalPitch * 4;
            barriers = beta + kSpan * 4;
        }
        block = barriers + (2 * stages + (shares ? 4 : 0)) * 8;
        block = (block + 15) / 16 * 16;
        bytes = block + (static_cast<uint32_t>(sizeof(ScanBlock)) + 15) / 16 * 16;
    }
};

//! kSharers: blocks of a cluster that take turns at preparing spans, for one another; 1: every block prepares its own.
template <int kN_, bool kChannels_, int kSharers_ = 1>
struct ChunkTraits {
    static constexpr int kN = kN_;                // dstate rounded up
    static constexpr bool kChannels = kChannels_; // KDA
    static constexpr int kSharers = kSharers_;
    static constexpr bool kShares = kSharers > 1;
    static constexpr int kTiles = kN / 8;
    static constexpr int kKeyTerms = kChannels ? kTerms : 1; // of keys and queries: GDN's are bf16 as they come
    static constexpr int kQueryTerms = kChannels ? kReadTerms : 1;
    static constexpr int kProducers = kChannels ? kN / 16 : 4; // warps that prepare spans
    static constexpr int kFinishers = kShares ? 4 : 0;         // the first inverts what those have scored, and sends it
    static constexpr int kPreparing = (kChannels ? kProducers : 1) + (kShares ? 1 : 0); // warps that fill one stage
    static constexpr int kMostConsumers = kShares ? 4 : 8;                              // warps that hold state rows
    static constexpr int kMostThreads = (kMostConsumers + kProducers + kFinishers) * kWarp;
    static constexpr int kStages = kShares ? 2 * kSharers : kChannels ? 3 : 6; // a stage is always the same block's
    //! Where 512 threads leave 128 registers each, some warps take some of the others'. Warpgroups do that.
    static constexpr bool kMovesRegisters = kChannels && kN == 128;
    static constexpr int kConsumerRegisters = kShares ? 160 : 144, kProducerRegisters = kShares ? 144 : 112;
    static constexpr int kFinisherRegisters = 64;
    static constexpr int kConsumerStep = 4;
    static constexpr ChunkStage kStage{kN, kChannels};
    static_assert(kChannels || !kShares, "GDN's producers finish spans themselves");
    static_assert(kN == 64 || kN == 128, "a thread holds kN / 2 state elements; one warp or two prepare a group");
    static constexpr __host__ __device__ ChunkShared shared(int consumers = kMostConsumers) {
        return ChunkShared(kN, kChannels, kStages, kProducers, consumers, kShares);
    }
};

struct ChunkParams {
    GatedDeltaScanParams scan;
    ChunkShared shared;
    int state_dtype;
    int blocks_per_head;
    int consumers;   // warps that hold state rows; the others of a block prepare spans
    bool gate_pairs; // KDA: a's channels can be loaded two at a time
    bool apart;      // GDN: warps with a state and those that prepare spans have schedulers of their own
};

//! Offset of 16-byte piece `piece` of row `row` in a span's tile.
__device__ __forceinline__ uint32_t span_offset(int row, int piece) {
    return (piece >> 3) * (kSpan * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

//! A thread in its warp, a warp in its block.
template <class Traits>
struct ChunkWarp {
    static constexpr ChunkStage kStage = Traits::kStage;
    const ChunkParams& params;
    char* smem;
    uint32_t base; // of shared memory
    int thread;
    int head;
    int key_head;
    int first_row; // of the block, in the head

    __device__ __forceinline__ int warp() const { return thread / kWarp; }
    __device__ __forceinline__ int lane() const { return thread % kWarp; }
    __device__ __forceinline__ int g() const { return lane() >> 2; }
    __device__ __forceinline__ int q() const { return lane() & 3; }
    //! Its number among the warps that do not hold a state; negative: it does, or does nothing. A multiprocessor's four
    //! schedulers, each with an instruction cache of its own, take warps in turn: apart, the second two prepare spans.
    __device__ __forceinline__ int producer() const {
        if (Traits::kChannels || !params.apart) return warp() - params.consumers;
        return warp() & 2 ? (warp() >> 2) * 2 + (warp() & 1) : -1;
    }
    //! The warp's first state row; false: the head has no such row.
    __device__ __forceinline__ int row() const { return first_row + warp() * 16; }
    __device__ __forceinline__ bool works() const { return row() < params.scan.shape.headdim; }

    //! The lane's part of ldmatrix addresses in a tile: matrices (rows 0-7, 8-15) x (pieces 0, 1), row first or piece
    //! first; in a block or strip, half first: also the lane's share of a load or store.
    __device__ __forceinline__ uint32_t by_row() const { return span_offset(lane() & 15, lane() >> 4); }
    __device__ __forceinline__ uint32_t by_piece() const { return span_offset(token(), half()); }
    __device__ __forceinline__ uint32_t in_strip() const { return strip_offset(token(), half()); }
    __device__ __forceinline__ int token() const { return (lane() >> 4) * 8 + (lane() & 7); }
    __device__ __forceinline__ int half() const { return lane() >> 3 & 1; }
    //! Of a span's v and o.
    __device__ __forceinline__ uint32_t strip(int span) const {
        return params.shared.v + warp() * kStripBytes + span % kSpans * (kSpan * 32) + in_strip();
    }

    __device__ __forceinline__ static uint32_t stage_of(int span) { return span % Traits::kStages * kStage.bytes; }
    //! Barriers of a span's stage: by those who prepare it, by those who use it.
    __device__ __forceinline__ uint32_t prepared(int span) const {
        return base + params.shared.barriers + span % Traits::kStages * 8;
    }
    __device__ __forceinline__ uint32_t used(int span) const { return prepared(span) + Traits::kStages * 8; }
    __device__ __forceinline__ void wait_until_prepared(int span) const {
        SplitBarrier::wait(prepared(span), span / Traits::kStages & 1);
    }
    //! Until the stage is no longer in use for an earlier span.
    __device__ __forceinline__ void wait_for_stage(int span) const {
        if (span >= Traits::kStages) SplitBarrier::wait(used(span), (span / Traits::kStages - 1) & 1);
    }
    //! The block's number in its cluster, and whether it is the one that prepares a span.
    __device__ __forceinline__ int rank() const { return Traits::kShares ? blockIdx.x % Traits::kSharers : 0; }
    __device__ __forceinline__ bool prepares(int span) const {
        return !Traits::kShares || span % Traits::kSharers == rank();
    }
    //! By the warps that hold the state: the block that prepares spans in a span's stage may do so again.
    __device__ __forceinline__ void release_stage(int span) const {
        if (prepares(span)) {
            SplitBarrier::arrive_alone(used(span));
        } else {
            arrive_in_block(used(span), span % Traits::kSharers);
        }
    }
    //! Barriers of the block's own spans, each in its turn: rows are there; all but the inverse is there.
    __device__ __forceinline__ uint32_t spread(int span) const {
        return base + params.shared.barriers + (2 * Traits::kStages + (span / Traits::kSharers & 1)) * 8;
    }
    __device__ __forceinline__ uint32_t scored(int span) const { return spread(span) + 16; }
    __device__ __forceinline__ void wait_until_spread(int span) const {
        SplitBarrier::wait(spread(span), span / Traits::kSharers >> 1 & 1);
    }
    __device__ __forceinline__ void wait_until_scored(int span) const {
        SplitBarrier::wait(scored(span), span / Traits::kSharers >> 1 & 1);
    }
    __device__ __forceinline__ float* floats(uint32_t offset) const { return reinterpret_cast<float*>(smem + offset); }
};

} // namespace replayssm::delta_scan
