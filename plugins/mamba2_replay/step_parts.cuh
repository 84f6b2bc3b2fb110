//! Parts of the step kernel: what a block works on, its rows of x and z, the weights of rows, the fold and the outputs.
#pragma once

#include "step_shared.cuh"

namespace replayssm {

//! What a block knows about its work once the cursor is there.
struct StepBlock {
    char* slot; // pool base + slot_bytes
    int64_t slot_bytes;
    RingPlan plan;
    int thread, row, split, first_head, heads, group, tokens, dstate, block_rows;
};

//! Which row, heads and part of a head this block has.
template <int kSplit>
__device__ __forceinline__ void find_work(const Mamba2StepParams& p, StepBlock& b) {
    int index = blockIdx.x, segment = 0;
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
//! copies is the same for every head: it keeps the addresses of the first kHeld and moves them from head to head.
template <class act_t, int kSplit, int kHeld>
struct RowCopies {
    static constexpr int kElems = row_access_elems<act_t, kSplit>();
    const act_t* source[kHeld];
    int step[kHeld];   // elements to the next head
    int target[kHeld]; // byte offset in buffer 0; negative: no piece

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

    __device__ __forceinline__ RowCopies(const Mamba2StepParams& p, const StepBlock& b) {
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const int i = h * blockDim.x + b.thread;
            target[h] = -1;
            if (i >= pieces(p, b)) continue;
            const Piece first = piece(p, b, i);
            source[h] = first.source;
            step[h] = first.step;
            target[h] = first.target;
        }
    }

    //! By the block, once for every head k in turn.
    __device__ __forceinline__ void start(const Mamba2StepParams& p, char* smem, const StepBlock& b, int k) {
        char* buffer = smem + p.shared.x + (k & 1) * p.shared.buffer_bytes;
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            if (target[h] < 0) continue;
            copy_piece<kElems * sizeof(act_t)>(buffer + target[h], source[h]);
            source[h] += step[h];
        }
        for (int i = kHeld * blockDim.x + b.thread; i < pieces(p, b); i += blockDim.x) {
            const Piece other = piece(p, b, i);
            copy_piece<kElems * sizeof(act_t)>(
                buffer + other.target, other.source + static_cast<int64_t>(k) * other.step);
        }
    }
};

//! What one warp needs to weigh the rows of a head, loaded long before: lane t has token t, lane j ring rows j and j +
//! 32.
struct HeadScalars {
    float A = 0.0f;
    RawStep raw;
    float ring_dt[kMaxWindow / kWarp];

    __device__ __forceinline__ void load_token(const Mamba2StepParams& p, const StepBlock& b, int head) {
        const int lane = b.thread & (kWarp - 1);
        A = __ldg(static_cast<const float*>(p.in.A.data) + head * p.in.A.head);
        if (lane >= b.tokens) return;
        raw.load(p.in.dt, b.row * p.in.dt.row + lane * p.in.dt.token + head * p.in.dt.head, p.in.dt_bias,
            head * p.in.dt_bias.head);
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

//! By one warp: decays and dt of the committed rows (for the fold), the weight of every row in every token's output
//! (one token: but for B_r . C_t), the weight of S C_t; appends the tokens' dt. Products of decays, never exp of a
//! difference: nothing can overflow or cancel.
template <bool kOneToken>
__device__ __forceinline__ void weigh_rows(const Mamba2StepParams& p, char* smem, const StepBlock& b, int head,
    int buffer, const HeadScalars& scalars, const TokenStep& token) {
    const int lane = b.thread & (kWarp - 1), tokens = kOneToken ? 1 : b.tokens;
    float2* fold = reinterpret_cast<float2*>(smem + p.shared.fold) + buffer * (p.shared.rows_cap - b.tokens);
    const int stride = kOneToken ? 1 : p.shared.coef_stride;
    float* coef = reinterpret_cast<float*>(smem + p.shared.coef) + buffer * p.shared.rows_cap * stride;
    const float* BC = reinterpret_cast<const float*>(smem + p.shared.BC);

    const float token_step = token.step, token_decay = token.decay;
    if (lane < tokens) {
        if (b.split == 0) {
            float* ring_dt = reinterpret_cast<float*>(b.slot + p.pool.ring_dt) + head * p.pool.ring_dt_stride;
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
    float behind = 1.0f; // product of the decays of all rows behind this batch of 32
#pragma unroll
    for (int i = kMaxWindow / kWarp - 1; i >= 0; --i) {
        const int j = i * kWarp + lane;
        if (i * kWarp >= b.plan.committed) continue;
        const float dt = scalars.ring_dt[i], decay = decay_of(scalars.A, dt); // dt 0, decay 1 in dead lanes
        if (j < b.plan.committed) fold[j] = make_float2(decay, dt);
        if (b.plan.flush) continue;
        float from = decay; // product of the decays of rows j.. of this batch
#pragma unroll
        for (int d = 1; d < kWarp; d *= 2) {
            const float other = __shfl_down_sync(kFullMask, from, d);
            if (lane + d < kWarp) from *= other;
        }
        float after = __shfl_down_sync(kFullMask, from, 1);
        if (lane == kWarp - 1) after = 1.0f;
        const float weight = dt * (after * behind);
        for (int t = 0; t < tokens; ++t) {
            const float scale = __shfl_sync(kFullMask, up_to, t);
            if (j >= b.plan.committed) continue;
            const float product = kOneToken ? 1.0f : BC[t * p.shared.rows_cap + tokens + j];
            coef[(tokens + j) * stride + t] = weight * scale * product;
        }
        behind *= __shfl_sync(kFullMask, from, 0);
    }
    float weight = token_step; // lane i: dt_i times the decays of tokens i+1..t
    for (int t = 0; t < tokens; ++t) {
        const float decay = __shfl_sync(kFullMask, token_decay, t);
        if (t > lane) weight *= decay;
        if (lane <= t) coef[lane * stride + t] = weight * (kOneToken ? 1.0f : BC[t * p.shared.rows_cap + lane]);
    }
    if (lane < tokens) reinterpret_cast<float*>(smem + p.shared.decay)[buffer * tokens + lane] = behind * up_to;
}

//! By the block: x rows of the tokens to the ring.
template <class act_t, int kSplit>
__device__ __forceinline__ void append_x(
    const Mamba2StepParams& p, const char* smem, const StepBlock& b, int head, int buffer) {
    constexpr int kElems = row_access_elems<act_t, kSplit>();
    const int vectors = p.row_vectors.value;
    if (b.thread >= b.tokens * vectors) return;
    act_t* ring = reinterpret_cast<act_t*>(b.slot + p.pool.ring_x) + head * p.pool.ring_rows * p.shape.headdim +
        b.split * b.block_rows;
    const int append = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
    for (int i = b.thread; i < b.tokens * vectors; i += blockDim.x) {
        const int t = divide(i, p.row_vectors), at = (i - t * vectors) * kElems;
        const char* source =
            smem + p.shared.x + buffer * p.shared.buffer_bytes + t * p.shared.row_bytes + at * sizeof(act_t);
        store_pack(
            ring + ring_row(append, t, p.pool.ring_rows) * p.shape.headdim + at, load_pack<act_t, kElems>(source));
    }
}

//! The committed rows of a head, one after another, as a thread folds them.
template <class act_t, int kRows>
struct CommittedRows {
    const float2* fold;
    const char* x; // this thread's first row
    const float* B;
    int row_bytes, n_pad;

    __device__ __forceinline__ CommittedRows(
        const Mamba2StepParams& p, const char* smem, const StepBlock& b, int buffer)
        : fold(reinterpret_cast<const float2*>(smem + p.shared.fold) + buffer * (p.shared.rows_cap - b.tokens)),
          x(smem + p.shared.x + buffer * p.shared.buffer_bytes + b.tokens * p.shared.row_bytes +
              (b.thread >> 3) * kRows * static_cast<int>(sizeof(act_t))),
          B(reinterpret_cast<const float*>(smem + p.shared.B) + b.tokens * p.shared.n_pad),
          row_bytes(p.shared.row_bytes), n_pad(p.shared.n_pad) {}

    __device__ __forceinline__ FoldRow next(float (&dtx)[kRows]) {
        const float2 step = *fold++;
        const auto pack = load_pack<act_t, kRows>(x);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            dtx[r] = __fmul_rn(step.y, to_float(pack.value[r]));
        const FoldRow row{step.x, B};
        x += row_bytes;
        B += n_pad;
        return row;
    }
};

//! Outputs of the tokens t0 .. t0 + kTokens - 1. y points at this lane's row of token 0.
template <class Tile, class act_t, int kTokens, bool kOneToken>
__device__ __forceinline__ void write_outputs(const Tile& tile, const Mamba2StepParams& p, const char* smem,
    const StepBlock& b, int buffer, float D, act_t* y, int t0) {
    constexpr int kRows = Tile::kRows;
    const int lane = b.thread & 7, first = (b.thread >> 3) * kRows, tokens = kOneToken ? 1 : b.tokens;
    const int stride = kOneToken ? 1 : p.shared.coef_stride;
    const float* coef = reinterpret_cast<const float*>(smem + p.shared.coef) + buffer * p.shared.rows_cap * stride + t0;
    const float* BC = reinterpret_cast<const float*>(smem + p.shared.BC);
    const float* decay = reinterpret_cast<const float*>(smem + p.shared.decay) + buffer * tokens + t0;
    const char* x = smem + p.shared.x + buffer * p.shared.buffer_bytes;
    float part[kRows * kTokens]; // [row][token]
    tile.template dot<kTokens>(
        reinterpret_cast<const float*>(smem + p.shared.C) + t0 * p.shared.n_pad, p.shared.n_pad, lane, b.dstate, part);
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

//! All tokens' outputs, four at a time while there are as many.
template <class Tile, class act_t, bool kOneToken>
__device__ __forceinline__ void write_all_outputs(
    const Tile& tile, const Mamba2StepParams& p, const char* smem, const StepBlock& b, int buffer, float D, act_t* y) {
    if constexpr (kOneToken) {
        write_outputs<Tile, act_t, 1, true>(tile, p, smem, b, buffer, D, y, 0);
    } else {
        int t = 0;
        for (; t + 4 <= b.tokens; t += 4)
            write_outputs<Tile, act_t, 4, false>(tile, p, smem, b, buffer, D, y, t);
        if (b.tokens & 2) {
            write_outputs<Tile, act_t, 2, false>(tile, p, smem, b, buffer, D, y, t);
            t += 2;
        }
        if (b.tokens & 1) write_outputs<Tile, act_t, 1, false>(tile, p, smem, b, buffer, D, y, t);
    }
}

} // namespace replayssm
