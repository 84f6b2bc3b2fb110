//! One decoding or verification step: T >= 1 tokens of one sequence, for heads_per_block heads of one group, one after another.
//!
//!   committed rows j < h (h = history_len + accepted), tokens t < T, a = exp(A dt)                          docs/math.md
//!   flush:   S <- fold of rows 0..h-1, stored; then h = 0
//!   y_t[p] = (prod_{all rows} a) (S C_t)[p] + sum_{rows r seen by t} dt_r (prod_{i after r, up to t} a_i) (B_r . C_t) x_r[p]
//!   y_t += D x_t;  y_t *= silu(z_t);  rows x, B, dt of the T tokens are appended behind the live rows
//!
//! x, z, y [rows, T, H, P] act_t; B, C [rows, T, G, N] act_t; dt [rows, T, H]; slots: see params.h and docs/contracts.md.
//! Grid (H / heads_per_block * kSplit, rows): a block owns P / kSplit state rows of its heads and their cursor copies.
//! 2 P threads: thread = (state row group, one of eight lanes along N), see StateTile.
//! kSplit 1, 2: the state of the next head is copied into shared memory while this one is worked on in registers: the copy
//! starts as soon as every thread has its part (one buffer, always in flight). kSplit 4: state straight into registers.
//! Barriers: B, C rows -> B.C; B.C -> weights; per head: weights, and all threads have left the state buffer.
//! The append lands behind the live rows, on rows that no block of the launch reads: blocks run in any order.
//! slot outside the pool: zero output, no memory touched.
#pragma once

#include "step_shared.cuh"

namespace replayssm {

//! What a block knows about its work once the cursor is there.
struct StepBlock {
    char* slot;
    RingPlan plan;
    int row, split, first_head, group, tokens, dstate, block_rows;
};

template <class act_t>
__device__ __forceinline__ void write_zero_rows(const Mamba2StepParams& p, int row, int first_head, int split, int block_rows) {
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) + row * p.in.y.strides[0];
    const int per_token = p.heads_per_block * block_rows;
    for (int i = threadIdx.x; i < p.tokens * per_token; i += blockDim.x) {
        const int t = i / per_token, head = first_head + i % per_token / block_rows, at = split * block_rows + i % block_rows;
        y[t * p.in.y.strides[1] + head * p.in.y.strides[2] + at] = from_float<act_t>(0.0f);
    }
}

//! By the first warp: start the copies of one head's x rows (tokens, then live ring rows) and z rows into buffer `buffer`.
template <class act_t>
__device__ __forceinline__ void start_row_copies(const Mamba2StepParams& p, const StepShared& s, char* smem, const StepBlock& b,
    int head, int buffer) {
    const int lane = threadIdx.x;
    if (lane >= kWarp) return;
    const uint32_t bytes = b.block_rows * sizeof(act_t);
    const bool gated = p.in.z.data != nullptr;
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + s.barrier);
    const int rows = b.tokens + b.plan.committed;
    if (lane == 0) CopyBarrier::announce(barrier, (rows + (gated ? b.tokens : 0)) * bytes);
    __syncwarp();
    const int64_t first = b.split * b.block_rows;
    const act_t* ring = reinterpret_cast<const act_t*>(b.slot + p.pool.ring_x) +
        static_cast<int64_t>(head) * p.pool.ring_rows * p.shape.headdim + first;
    const act_t* x = static_cast<const act_t*>(p.in.x.data) + b.row * p.in.x.strides[0] + head * p.in.x.strides[2] + first;
    char* target = smem + s.x + buffer * s.rows_cap * s.row_bytes;
    for (int r = lane; r < rows; r += kWarp) {
        const act_t* source = r < b.tokens
            ? x + r * p.in.x.strides[1]
            : ring + ring_row(b.plan.origin, r - b.tokens, p.pool.ring_rows) * p.shape.headdim;
        copy_row(target + r * s.row_bytes, source, bytes, barrier);
    }
    if (gated && lane < b.tokens) {
        const act_t* z = static_cast<const act_t*>(p.in.z.data) + b.row * p.in.z.strides[0] + lane * p.in.z.strides[1] +
            head * p.in.z.strides[2] + first;
        copy_row(smem + s.z + (buffer * b.tokens + lane) * s.row_bytes, z, bytes, barrier);
    }
}

//! By the block, without asynchronous copies: the same rows, four elements an access (a quarter of a head may be no more).
template <class act_t>
__device__ __forceinline__ void load_rows(const Mamba2StepParams& p, const StepShared& s, char* smem, const StepBlock& b, int head,
    int buffer) {
    const int vectors = b.block_rows / 4, rows = b.tokens + b.plan.committed, gates = p.in.z.data != nullptr ? b.tokens : 0;
    const int64_t first = b.split * b.block_rows;
    const act_t* ring = reinterpret_cast<const act_t*>(b.slot + p.pool.ring_x) +
        static_cast<int64_t>(head) * p.pool.ring_rows * p.shape.headdim + first;
    const act_t* x = static_cast<const act_t*>(p.in.x.data) + b.row * p.in.x.strides[0] + head * p.in.x.strides[2] + first;
    const act_t* z = static_cast<const act_t*>(p.in.z.data) + b.row * p.in.z.strides[0] + head * p.in.z.strides[2] + first;
    for (int i = threadIdx.x; i < (rows + gates) * vectors; i += blockDim.x) {
        const int r = i / vectors, at = i % vectors * 4;
        const act_t* source;
        char* target = smem + s.x + (buffer * s.rows_cap + r) * s.row_bytes;
        if (r < b.tokens) {
            source = x + r * p.in.x.strides[1];
        } else if (r < rows) {
            source = ring + ring_row(b.plan.origin, r - b.tokens, p.pool.ring_rows) * p.shape.headdim;
        } else {
            source = z + (r - rows) * p.in.z.strides[1];
            target = smem + s.z + (buffer * b.tokens + r - rows) * s.row_bytes;
        }
        store_pack(target + at * sizeof(act_t), load_pack<act_t, 4>(source + at));
    }
}

//! By one warp: decays and dt of the committed rows (for the fold), the weight of every row in every token's output, the
//! weight of S C_t; appends the tokens' dt. Products of decays, never exp of a difference: nothing can overflow or cancel.
template <bool kOneToken>
__device__ __forceinline__ void weigh_rows(const Mamba2StepParams& p, const StepShared& s, char* smem, const StepBlock& b, int head,
    int buffer) {
    const int lane = threadIdx.x & (kWarp - 1), tokens = kOneToken ? 1 : b.tokens;
    const float A = __ldg(static_cast<const float*>(p.in.A.data) + head * p.in.A.strides[0]);
    float* ring_dt = reinterpret_cast<float*>(b.slot + p.pool.ring_dt) + static_cast<int64_t>(head) * p.pool.ring_dt_stride;
    float2* fold = reinterpret_cast<float2*>(smem + s.fold) + buffer * (s.rows_cap - b.tokens);
    float* coef = reinterpret_cast<float*>(smem + s.coef) + buffer * tokens * s.rows_cap;
    const float* BC = reinterpret_cast<const float*>(smem + s.BC);

    float token_step = 0.0f, token_decay = 1.0f; // lane t: token t
    if (lane < tokens) token_step = token_dt(p.in, b.row, lane, head);
    if (lane < tokens) {
        token_decay = decay_of(A, token_step);
        if (b.split == 0) {
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
    for (int base = (b.plan.committed - 1) & ~(kWarp - 1); base >= 0; base -= kWarp) {
        const int j = base + lane;
        float dt = 0.0f, decay = 1.0f;
        if (j < b.plan.committed) {
            dt = ring_dt[ring_row(b.plan.origin, j, p.pool.ring_rows)];
            decay = decay_of(A, dt);
            fold[j] = make_float2(decay, dt);
        }
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
            const int at = t * s.rows_cap + tokens + j;
            const float scale = __shfl_sync(kFullMask, up_to, t);
            if (j < b.plan.committed) coef[at] = weight * scale * BC[at];
        }
        behind *= __shfl_sync(kFullMask, from, 0);
    }
    float weight = token_step; // lane i: dt_i times the decays of tokens i+1..t
    for (int t = 0; t < tokens; ++t) {
        const float decay = __shfl_sync(kFullMask, token_decay, t);
        if (t > lane) weight *= decay;
        if (lane <= t) coef[t * s.rows_cap + lane] = weight * BC[t * s.rows_cap + lane];
    }
    if (lane < tokens) reinterpret_cast<float*>(smem + s.decay)[buffer * tokens + lane] = behind * up_to;
}

//! By the block: x rows of the tokens to the ring.
template <class act_t>
__device__ __forceinline__ void append_x(const Mamba2StepParams& p, const StepShared& s, const char* smem, const StepBlock& b,
    int head, int buffer) {
    act_t* ring = reinterpret_cast<act_t*>(b.slot + p.pool.ring_x) +
        static_cast<int64_t>(head) * p.pool.ring_rows * p.shape.headdim + b.split * b.block_rows;
    const int vectors = b.block_rows / 4;
    const int append = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
    for (int i = threadIdx.x; i < b.tokens * vectors; i += blockDim.x) {
        const int t = i / vectors, at = i % vectors * 4;
        const auto pack = load_pack<act_t, 4>(smem + s.x + (buffer * s.rows_cap + t) * s.row_bytes + at * sizeof(act_t));
        store_pack(ring + ring_row(append, t, p.pool.ring_rows) * p.shape.headdim + at, pack);
    }
}

//! Fold the committed rows into this thread's part of the state, oldest first.
template <class Tile, class act_t>
__device__ __forceinline__ void fold_rows(Tile& tile, const StepShared& s, const char* smem, const StepBlock& b, int buffer) {
    const int lane = threadIdx.x & 7, first = (threadIdx.x >> 3) * Tile::kRows;
    const float2* fold = reinterpret_cast<const float2*>(smem + s.fold) + buffer * (s.rows_cap - b.tokens);
    const char* x = smem + s.x + (buffer * s.rows_cap + b.tokens) * s.row_bytes + first * sizeof(act_t);
    const float* B = reinterpret_cast<const float*>(smem + s.B) + b.tokens * s.n_pad;
#pragma unroll 1
    for (int j = 0; j < b.plan.committed; ++j) {
        const float2 step = fold[j];
        const auto pack = load_pack<act_t, Tile::kRows>(x + j * s.row_bytes);
        float dtx[Tile::kRows];
#pragma unroll
        for (int r = 0; r < Tile::kRows; ++r) dtx[r] = __fmul_rn(step.y, to_float(pack.value[r]));
        tile.fold(step.x, dtx, B + j * s.n_pad, lane, b.dstate);
    }
}

template <class Tile, class act_t, bool kOneToken>
__device__ __forceinline__ void write_outputs(const Tile& tile, const Mamba2StepParams& p, const StepShared& s, const char* smem,
    const StepBlock& b, int head, int buffer, float D) {
    const int lane = threadIdx.x & 7, first = (threadIdx.x >> 3) * Tile::kRows, tokens = kOneToken ? 1 : b.tokens;
    const int own = first + Tile::reduced_row(lane); // the state row that this lane's sum is for
    const float* coef = reinterpret_cast<const float*>(smem + s.coef) + buffer * tokens * s.rows_cap;
    const float* decay = reinterpret_cast<const float*>(smem + s.decay) + buffer * tokens;
    const char* x = smem + s.x + buffer * s.rows_cap * s.row_bytes;
    const char* z = smem + s.z + buffer * tokens * s.row_bytes;
    act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) + b.row * p.in.y.strides[0] + head * p.in.y.strides[2] +
        b.split * b.block_rows + own;
    for (int t = 0; t < tokens; ++t) {
        float part[Tile::kRows];
        tile.dot(reinterpret_cast<const float*>(smem + s.C) + t * s.n_pad, lane, b.dstate, part);
        const float scale = decay[t];
#pragma unroll
        for (int r = 0; r < Tile::kRows; ++r) part[r] = __fmul_rn(part[r], scale);
        for (int j = lane; j < tokens + b.plan.history; j += 8) {
            if (!kOneToken && j > t && j < tokens) continue;
            const float weight = coef[t * s.rows_cap + j];
            const auto pack = load_pack<act_t, Tile::kRows>(x + j * s.row_bytes + first * sizeof(act_t));
#pragma unroll
            for (int r = 0; r < Tile::kRows; ++r) part[r] = __fmaf_rn(weight, to_float(pack.value[r]), part[r]);
        }
        float value = Tile::reduce(part, lane);
        if (!Tile::writes(lane)) continue;
        value = __fmaf_rn(D, to_float(reinterpret_cast<const act_t*>(x + t * s.row_bytes)[own]), value);
        if (p.in.z.data != nullptr) value *= silu(to_float(reinterpret_cast<const act_t*>(z + t * s.row_bytes)[own]));
        y[t * p.in.y.strides[1]] = from_float<act_t>(value);
    }
}

template <class act_t, class state_t, int kDstate, int kSplit, bool kOneToken>
__global__ void __launch_bounds__(512, kSplit == 1 ? 1 : 2) mamba2_step_kernel(const __grid_constant__ Mamba2StepParams p) {
    using Tile = StateTile<state_t, kDstate, 4 / kSplit>;
    constexpr bool kStaged = kSplit < 4;
    constexpr int kCopies = kCursorCopies / kSplit;
    extern __shared__ __align__(128) char smem[];
    StepBlock b;
    b.row = blockIdx.y;
    b.split = blockIdx.x % kSplit;
    b.first_head = blockIdx.x / kSplit * p.heads_per_block;
    b.group = b.first_head / p.shape.heads_per_group;
    b.tokens = kOneToken ? 1 : p.tokens;
    b.dstate = kDstate ? kDstate : p.shape.dstate;
    b.block_rows = p.shape.headdim / kSplit;
    const int64_t slot = load_index(p.slots, b.row);
    const int accepted = p.accepted.data != nullptr ? static_cast<int>(load_index(p.accepted, b.row)) : -1;
    if (slot < 0 || slot >= p.pool.slots) {
        write_zero_rows<act_t>(p, b.row, b.first_head, b.split, b.block_rows);
        return;
    }
    b.slot = p.pool.base + slot * p.pool.stride_bytes;
    const int64_t head_elems = static_cast<int64_t>(p.shape.headdim) * b.dstate, part_elems = head_elems / kSplit;
    state_t* state = reinterpret_cast<state_t*>(b.slot + p.pool.state) + b.first_head * head_elems + b.split * part_elems;
    const uint32_t part_bytes = static_cast<uint32_t>(part_elems * sizeof(state_t));
    const StepShared s(p.committed_cap, b.tokens, b.block_rows, Tile::padded_dstate(b.dstate), sizeof(act_t),
        p.heads_per_block > 1 ? 2 : 1, kStaged ? part_bytes : 0, p.in.z.data != nullptr);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + s.barrier);
    const int lane = threadIdx.x & 7;
    const int64_t thread_elems = static_cast<int64_t>(threadIdx.x >> 3) * Tile::kRows * b.dstate;
    const uint64_t policy = evict_first_policy();
    Tile tile;

    if constexpr (kStaged) {
        if (threadIdx.x == 0) {
            CopyBarrier::init(barrier, 2);
            CopyBarrier::announce(barrier, part_bytes);
        }
        copy_block(smem + s.state, state, part_bytes, barrier, policy);
    } else {
        tile.template load<false>(reinterpret_cast<const char*>(state + thread_elems), lane, b.dstate);
    }
    const int64_t cursor_at = p.pool.cursor + (static_cast<int64_t>(b.first_head) * kCursorCopies + b.split * kCopies) * sizeof(Cursor);
    const Cursor cursor = *reinterpret_cast<const Cursor*>(b.slot + cursor_at);
    float* B = reinterpret_cast<float*>(smem + s.B);
    float* C = reinterpret_cast<float*>(smem + s.C);
    const int64_t b_offset = b.row * p.in.B.strides[0] + b.group * p.in.B.strides[2];
    load_token_rows<Tile, act_t>(p.in.C, b.row * p.in.C.strides[0] + b.group * p.in.C.strides[2], b.tokens, b.dstate, C, s.n_pad);
    load_token_rows<Tile, act_t>(p.in.B, b_offset, b.tokens, b.dstate, B, s.n_pad);

    b.plan = plan_step(cursor, accepted, b.tokens);
    if constexpr (kStaged) start_row_copies<act_t>(p, s, smem, b, b.first_head, 0);
    load_ring_b<Tile, act_t>(p.pool, b.slot, b.group, b.dstate, b.plan.origin, b.plan.committed, B + b.tokens * s.n_pad, s.n_pad);
    if (b.split == 0 && b.first_head % p.shape.heads_per_group == 0) {
        act_t* ring = reinterpret_cast<act_t*>(b.slot + p.pool.ring_b) +
            static_cast<int64_t>(b.group) * p.pool.ring_rows * b.dstate;
        const int append_row = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
        append_token_rows<act_t>(p.in.B, b_offset, b.tokens, b.dstate, ring, append_row, p.pool.ring_rows);
    }
    __syncthreads();
    if (threadIdx.x < p.heads_per_block * kCopies) {
        const int64_t at = cursor_at + (threadIdx.x / kCopies * kCursorCopies + threadIdx.x % kCopies) * sizeof(Cursor);
        *reinterpret_cast<Cursor*>(b.slot + at) = next_cursor(cursor, b.plan, b.tokens, p.shape.window, p.pool.ring_rows);
    }
    multiply_b_c(B, C, reinterpret_cast<float*>(smem + s.BC), s.n_pad, b.plan.history, b.tokens, s.rows_cap);
    __syncthreads();

    for (int k = 0; k < p.heads_per_block; ++k, state += head_elems) {
        const int head = b.first_head + k, buffer = k & 1;
        float D = 0.0f;
        if (p.in.D.data != nullptr && Tile::writes(lane)) {
            const int own = b.split * b.block_rows + (threadIdx.x >> 3) * Tile::kRows + Tile::reduced_row(lane);
            D = load_scalar(p.in.D.data, p.in.D.dtype, head * p.in.D.strides[0] + own * p.in.D.strides[1]);
        }
        if (threadIdx.x / kWarp == k % (blockDim.x / kWarp)) weigh_rows<kOneToken>(p, s, smem, b, head, buffer);
        if constexpr (kStaged) {
            CopyBarrier::wait(barrier, k);
            tile.template load<true>(smem + s.state + thread_elems * sizeof(state_t), lane, b.dstate);
        } else {
            if (k > 0) tile.template load<false>(reinterpret_cast<const char*>(state + thread_elems), lane, b.dstate);
            load_rows<act_t>(p, s, smem, b, head, buffer);
        }
        __syncthreads();
        if (kStaged && k + 1 < p.heads_per_block) {
            if (threadIdx.x == 0) CopyBarrier::announce(barrier, part_bytes);
            copy_block(smem + s.state, state + head_elems, part_bytes, barrier, policy);
            start_row_copies<act_t>(p, s, smem, b, head + 1, buffer ^ 1);
        }
        append_x<act_t>(p, s, smem, b, head, buffer);
        if (b.plan.flush) {
            fold_rows<Tile, act_t>(tile, s, smem, b, buffer);
            tile.store(reinterpret_cast<char*>(state + thread_elems), lane, b.dstate);
        }
        write_outputs<Tile, act_t, kOneToken>(tile, p, s, smem, b, head, buffer, D);
    }
}

} // namespace replayssm
