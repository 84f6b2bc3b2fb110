//! Parts of the step kernel: what a block works on, its rows of x and z, the weights of rows, the fold and the outputs.
#pragma once

#include "tensor_tile.cuh"

namespace replayssm {

//! What a block knows about its work once the cursor is there.
struct StepBlock {
    char* slot; // pool base + slot_bytes
    RingPlan plan;
    int thread, row, split, first_head, heads, group, tokens, dstate, block_rows;
    int limit; // of the window that the next step meets
};
static_assert(sizeof(StepBlock) <= kStepBlockBytes, "room for it in shared memory");

//! Which row, heads and part of a head block `index` of the grid has.
template <int kSplit>
__device__ __forceinline__ void find_work(const Mamba2StepParams& p, int index, StepBlock& b) {
    int segment = 0;
#pragma unroll
    for (int i = 0; i < kStepSegments - 1; ++i) {
        if (segment == i && index >= p.segments[i].blocks) {
            index -= p.segments[i].blocks;
            ++segment;
        }
    }
    const StepSegment& cut = p.segments[segment];
    const int row = divide(index, cut.blocks_per_row), rest = index - row * cut.blocks_per_row.value;
    b.row = cut.first_row + row;
    b.split = rest % kSplit;
    b.heads = cut.heads;
    b.first_head = rest / kSplit * cut.heads;
    b.group = divide(b.first_head, p.heads_per_group);
}

template <class act_t>
__device__ __forceinline__ void write_zero_rows(const Mamba2StepParams& p, const StepBlock& b) {
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) + b.row * p.in.y.row;
    const int per_token = b.heads * b.block_rows;
    for (int i = threadIdx.x; i < p.tokens * per_token; i += blockDim.x) {
        const int t = i / per_token, head = b.first_head + i % per_token / b.block_rows;
        const int at = b.split * b.block_rows + i % b.block_rows;
        y[t * p.in.y.token + head * p.in.y.head + at] = from_float<act_t>(0.0f);
    }
}

//! Elements of one access to an x row: 16 bytes, or four elements where a block has a quarter of a head.
template <class act_t, int kSplit>
__host__ __device__ constexpr int row_access_elems() {
    return kSplit == 4 ? 4 : static_cast<int>(16 / sizeof(act_t));
}

//! The copies of a head's x rows (tokens, then live ring rows) and z rows to shared memory. Which pieces a thread
//! copies is the same for every head: it keeps the address of its first one and moves it from head to head.
template <class act_t, int kSplit>
struct RowCopies {
    static constexpr int kElems = row_access_elems<act_t, kSplit>();
    const act_t* source;
    int step;   // elements to the next head
    int target; // byte offset in buffer 0; negative: no piece

    struct Piece {
        const act_t* source;
        int step, target;
    };

    static __device__ __forceinline__ int pieces(const Mamba2StepParams& p, const StepBlock& b) {
        const int gates = p.in.z.data != nullptr ? b.tokens : 0;
        return (b.tokens + b.plan.committed + gates) * static_cast<int>(p.row_vectors.value);
    }

    //! Piece i of the block's first head.
    static __device__ __forceinline__ Piece piece(const Mamba2StepParams& p, const StepBlock& b, int i) {
        const int r = divide(i, p.row_vectors), at = (i - r * static_cast<int>(p.row_vectors.value)) * kElems;
        const int in_row = b.split * b.block_rows + at, rows = b.tokens + b.plan.committed;
        Piece piece;
        piece.target = r * p.shared.row_bytes + at * static_cast<int>(sizeof(act_t));
        if (r < b.tokens) {
            piece.step = p.in.x.head;
            piece.source = static_cast<const act_t*>(p.in.x.data) + (b.row * p.in.x.row + r * p.in.x.token + in_row);
        } else if (r < rows) {
            piece.step = p.pool.ring_rows * p.shape.headdim;
            piece.source = reinterpret_cast<const act_t*>(b.slot + p.pool.ring_x) +
                (ring_row(b.plan.origin, r - b.tokens, p.pool.ring_rows) * p.shape.headdim + in_row);
        } else {
            piece.step = p.in.z.head;
            piece.source =
                static_cast<const act_t*>(p.in.z.data) + (b.row * p.in.z.row + (r - rows) * p.in.z.token + in_row);
            piece.target += (p.shared.rows_cap - rows) * p.shared.row_bytes;
        }
        piece.source += static_cast<int64_t>(b.first_head) * piece.step;
        return piece;
    }

    __device__ __forceinline__ RowCopies(const Mamba2StepParams& p, const StepBlock& b) : target(-1) {
        if (b.thread >= pieces(p, b)) return;
        const Piece first = piece(p, b, b.thread);
        source = first.source;
        step = first.step;
        target = first.target;
    }

    //! By the block, once for every head k in turn.
    __device__ __forceinline__ void start(const Mamba2StepParams& p, char* smem, const StepBlock& b, int k) {
        char* buffer = smem + p.shared.x + (k & 1) * p.shared.buffer_bytes;
        if (target < 0) return;
        copy_piece<kElems * sizeof(act_t)>(buffer + target, source);
        source += step;
        for (int i = blockDim.x + b.thread; i < pieces(p, b); i += blockDim.x) {
            const Piece other = piece(p, b, i);
            copy_piece<kElems * sizeof(act_t)>(
                buffer + other.target, other.source + static_cast<int64_t>(k) * other.step);
        }
    }
};

//! By the block: x rows of the tokens to the rings of all its heads. A thread's first piece is asked for early.
template <class act_t, int kSplit>
struct Appends {
    static constexpr int kElems = row_access_elems<act_t, kSplit>();
    using Piece = Pack<act_t, kElems>;
    Piece first;

    static __device__ __forceinline__ int pieces(const Mamba2StepParams& p, const StepBlock& b) {
        return b.heads * b.tokens * static_cast<int>(p.row_vectors.value);
    }

    struct Place {
        int head, token, at;
        __device__ __forceinline__ Place(const Mamba2StepParams& p, const StepBlock& b, int i) {
            const int row = divide(i, p.row_vectors), k = b.tokens == 1 ? row : row / b.tokens;
            at = b.split * b.block_rows + (i - row * static_cast<int>(p.row_vectors.value)) * kElems;
            head = b.first_head + k;
            token = row - k * b.tokens;
        }
    };

    static __device__ __forceinline__ Piece load_piece(const Mamba2StepParams& p, const StepBlock& b, int i) {
        const Place place(p, b, i);
        return load_pack<act_t, kElems>(static_cast<const act_t*>(p.in.x.data) +
            (b.row * p.in.x.row + place.token * p.in.x.token + place.head * p.in.x.head + place.at));
    }

    __device__ __forceinline__ void load(const Mamba2StepParams& p, const StepBlock& b) {
        if (b.thread < pieces(p, b)) first = load_piece(p, b, b.thread);
    }

    __device__ __forceinline__ void store(const Mamba2StepParams& p, const StepBlock& b) {
        const int append = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
        for (int i = b.thread; i < pieces(p, b); i += blockDim.x) {
            const Piece piece = i == b.thread ? first : load_piece(p, b, i);
            const Place place(p, b, i);
            act_t* ring = reinterpret_cast<act_t*>(b.slot + p.pool.ring_x);
            const int row = place.head * p.pool.ring_rows + ring_row(append, place.token, p.pool.ring_rows);
            store_pack(ring + row * p.shape.headdim + place.at, piece);
        }
    }
};

//! The committed rows of a head, one after another, as a thread folds them.
template <class act_t, int kRows>
struct CommittedRows {
    const FoldRow* row;
    const char* x; // this thread's first row
    const float* B;
    int row_bytes, n_pad;

    __device__ __forceinline__ CommittedRows(const Mamba2StepParams& p, const char* smem, const StepBlock& b, int k)
        : row(reinterpret_cast<const FoldRow*>(smem + p.shared.fold) + k * (p.shared.rows_cap - b.tokens + 1)),
          x(smem + p.shared.x + (k & 1) * p.shared.buffer_bytes + b.tokens * p.shared.row_bytes +
              (b.thread >> 3) * kRows * static_cast<int>(sizeof(act_t))),
          B(reinterpret_cast<const float*>(smem + p.shared.ring_B)), row_bytes(p.shared.row_bytes),
          n_pad(p.shared.n_pad) {}

    //! What `row` adds to this thread's rows, as (dt / scale) x, and its B; `row` becomes the next one.
    __device__ __forceinline__ const float* next(float (&w)[kRows]) {
        const float input = (row++)->input;
        const auto pack = load_pack<act_t, kRows>(x);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            w[r] = __fmul_rn(input, to_float(pack.value[r]));
        const float* own = B;
        x += row_bytes;
        B += n_pad;
        return own;
    }
};

//! This lane's part of S C_u of the tokens t0 .. t0 + kTokens - 1, [row][token].
template <class Tile, int kTokens, bool kOneToken>
__device__ __forceinline__ void multiply_state(const Tile& tile, const Mamba2StepParams& p, const char* smem,
    const StepBlock& b, int t0, float (&part)[Tile::kRows * kTokens]) {
    if constexpr (kOneToken && sizeof(typename Tile::state_t) == 2) {
        tensor_dot(tile, smem + p.shared.C, b.thread & (kWarp - 1), part);
    } else {
        tile.template dot<kTokens>(reinterpret_cast<const float*>(smem + p.shared.C) + t0 * p.shared.n_pad,
            p.shared.n_pad, b.thread & 7, b.dstate, part);
    }
}

//! Outputs of the tokens t0 .. t0 + kTokens - 1; part: of multiply_state. y points at this lane's row of token 0.
template <class Tile, class act_t, int kTokens, bool kOneToken>
__device__ __forceinline__ void write_outputs(float (&part)[Tile::kRows * kTokens], const Mamba2StepParams& p,
    const char* smem, const StepBlock& b, int k, float D, act_t* y, int t0) {
    constexpr int kRows = Tile::kRows;
    const int lane = b.thread & 7, first = (b.thread >> 3) * kRows, tokens = kOneToken ? 1 : b.tokens;
    const int stride = kOneToken ? 1 : p.shared.coef_stride;
    const float* coef = reinterpret_cast<const float*>(smem + p.shared.coef) + k * p.shared.coef_rows * stride + t0;
    const float* BC = reinterpret_cast<const float*>(smem + p.shared.BC);
    const float* decay = reinterpret_cast<const float*>(smem + p.shared.decay) + k * stride + t0;
    const char* x = smem + p.shared.x + (k & 1) * p.shared.buffer_bytes;
#pragma unroll
    for (int u = 0; u < kTokens; ++u)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            part[r * kTokens + u] = __fmul_rn(part[r * kTokens + u], decay[u]);
#pragma unroll 2
    for (int j = lane; j < tokens + b.plan.history; j += 8) {
        const auto pack = load_pack<act_t, kRows>(x + j * p.shared.row_bytes + first * sizeof(act_t));
        Pack<float, kTokens> weight = load_pack<float, kTokens>(coef + j * stride);
        if (kOneToken) weight.value[0] = __fmul_rn(weight.value[0], BC[j]);
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
            if (!kOneToken && j > t0 + u && j < tokens) continue; // a later token of this step
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                part[r * kTokens + u] = __fmaf_rn(weight.value[u], to_float(pack.value[r]), part[r * kTokens + u]);
            }
        }
    }
    Tile::template reduce<kTokens>(part, lane);
    if (!Tile::template writes<kTokens>(lane)) return;
    const int kept = Tile::template first_kept<kTokens>(lane), own = first + kept / kTokens;
#pragma unroll
    for (int i = 0; i < Tile::template kept<kTokens>(); ++i) {
        const int t = t0 + (kept + i) % kTokens;
        const act_t* x_t = reinterpret_cast<const act_t*>(x + t * p.shared.row_bytes) + own;
        float value = __fmaf_rn(D, to_float(*x_t), part[i]);
        if (p.in.z.data != nullptr) {
            const char* z = reinterpret_cast<const char*>(x_t) + p.shared.rows_cap * p.shared.row_bytes;
            value *= silu(to_float(*reinterpret_cast<const act_t*>(z)));
        }
        y[t * p.in.y.token] = from_float<act_t>(value);
    }
}

//! All tokens' outputs of the generic form, four at a time while there are as many.
template <class Tile, class act_t>
__device__ __forceinline__ void write_all_outputs(
    const Tile& tile, const Mamba2StepParams& p, const char* smem, const StepBlock& b, int k, float D, act_t* y) {
    const auto write = [&](auto count, int t) {
        constexpr int kTokens = decltype(count)::value;
        float part[Tile::kRows * kTokens];
        multiply_state<Tile, kTokens, false>(tile, p, smem, b, t, part);
        write_outputs<Tile, act_t, kTokens, false>(part, p, smem, b, k, D, y, t);
    };
    int t = 0;
    for (; t + 4 <= b.tokens; t += 4)
        write(std::integral_constant<int, 4>(), t);
    if (b.tokens & 2) {
        write(std::integral_constant<int, 2>(), t);
        t += 2;
    }
    if (b.tokens & 1) write(std::integral_constant<int, 1>(), t);
}

} // namespace replayssm
