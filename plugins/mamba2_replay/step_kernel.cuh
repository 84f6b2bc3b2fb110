//! One decoding or verification step: T >= 1 tokens of one sequence, for heads_per_block heads of one group, one after
//! another.
//!
//!   committed rows j < h (h = history_len + accepted), tokens t < T, a = exp(A dt)             docs/math.md
//!   flush:   S <- fold of rows 0..h-1, stored; then h = 0. fp32: as S' and its scale (fold.cuh)
//!   y_t[p] = (prod_{all rows} a) (S C_t)[p]
//!            + sum_{rows r seen by t} dt_r (prod_{i after r, up to t} a_i) (B_r . C_t) x_r[p]
//!   y_t += D x_t;  y_t *= silu(z_t);  rows x, B, dt of the T tokens are appended behind the live rows
//!
//! x, z, y [rows, T, H, P] act_t; B, C [rows, T, G, N] act_t; dt [rows, T, H]; slots: see params.h and
//! docs/contracts.md.
//! Grid: segments of rows cut alike (params.h); a block owns P / kSplit state rows of its heads and their cursor
//! copies.
//! 8 P / (kSplit kRows) threads: thread = (kRows state rows, one of eight lanes along N), see StateTile.
//! kSplit 1: the state of the next head is copied into shared memory while this one is worked on in registers: the copy
//! starts as soon as every thread has its part (one buffer, always in flight). kSplit 4: state straight into registers.
//! The block's warps weigh its heads' rows before the first state is worked on, all heads at once: a head's turn is
//! then state, fold, outputs. Several tokens (tuned kernels): B.C, S C and the ring rows' part of the outputs are
//! products of bf16 on tensor cores (step_tensor.cuh); S and the weights enter as two bf16 terms: 2^-17 is left out.
//! Barriers: one per head: rows, B.C and weights are there, and all threads have left the state buffer.
//! The append lands behind the live rows, on rows that no block of the launch reads: blocks run in any order.
//! slot outside the pool: zero output, no memory touched.
#pragma once

#include "step_ahead.cuh"
#include "step_tensor.cuh"

#include <type_traits>

namespace replayssm {

//! State rows of a thread, registers of a kernel. Tuned kernels (kDstate known) give a block whole heads. Registers are
//! what lets as many blocks of P = 64 stay on a multiprocessor as shared memory allows: 4 of fp32 states of 64 x 128.
template <class state_t, int kDstate, bool kOneToken>
struct StepTraits {
    static constexpr int kSplit = kDstate ? 1 : 4; // blocks that share a head
    static constexpr int kRows = kDstate == 0 ? 1 : kDstate * sizeof(state_t) > 128 * sizeof(float) ? 2 : 4;
    static constexpr int kThreadsPerRow = 8 / (kSplit * kRows); // threads of a block by headdim
    static constexpr int kStateRegisters = sizeof(StepTile<state_t, kDstate, kRows>) / 4;
    static constexpr int kRegisters = kDstate == 0 ? 112
        : !kOneToken || kStateRegisters > 32       ? 128
        : sizeof(state_t) == 2                     ? 80
                                                   : 96;
    static constexpr int kFoldUnroll = kOneToken && sizeof(state_t) == 4 && kDstate <= 128 ? 2 : 1; // more would spill
};

template <int kDstate, bool kOneToken>
__host__ __device__ constexpr StepForm step_form() {
    return kDstate == 0 ? StepForm::kGeneric : kOneToken ? StepForm::kOneToken : StepForm::kTensor;
}

template <StepForm kForm, class Tile, class act_t>
struct FormRows {
    using Type = ManyTokenRows<Tile, act_t>;
};
template <class Tile, class act_t>
struct FormRows<StepForm::kOneToken, Tile, act_t> {
    using Type = OneTokenRows<Tile, act_t>;
};
template <class Tile, class act_t>
struct FormRows<StepForm::kTensor, Tile, act_t> {
    using Type = TensorRows<Tile, act_t>;
};

//! What is the same for all threads waits in shared memory: beside the state it would not fit in the registers.
template <int kSplit, int kDstate, bool kOneToken>
__device__ __forceinline__ StepBlock recall_block(const Mamba2StepParams& p, const StepBlock& shared_block) {
    StepBlock now = shared_block;
    now.thread = threadIdx.x;
    asm volatile("" : "+r"(now.thread)); // nothing that follows from it is kept
    now.tokens = kOneToken ? 1 : p.tokens;
    now.dstate = kDstate ? kDstate : p.shape.dstate;
    now.block_rows = p.shape.headdim / kSplit;
    if (kSplit == 1) now.split = 0;
    return now;
}

template <class act_t, class state_t, int kDstate, bool kOneToken>
__global__ void __maxnreg__((StepTraits<state_t, kDstate, kOneToken>::kRegisters))
    mamba2_step_kernel(const __grid_constant__ Mamba2StepParams p) {
    using Traits = StepTraits<state_t, kDstate, kOneToken>;
    constexpr int kSplit = Traits::kSplit, kRows = Traits::kRows;
    using Tile = StepTile<state_t, kDstate, kRows>;
    constexpr StepForm kForm = step_form<kDstate, kOneToken>();
    using Rows = typename FormRows<kForm, Tile, act_t>::Type;
    constexpr bool kStaged = kSplit == 1;
    constexpr int kOwn = kForm == StepForm::kTensor ? kRows / 2 : 1; // rows of the outputs that a thread writes
    constexpr int kCopies = kCursorCopies / kSplit;
    extern __shared__ __align__(128) char smem[];
    StepBlock b;
    b.thread = threadIdx.x;
    find_work<kSplit>(p, blockIdx.x, b);
    b.tokens = kOneToken ? 1 : p.tokens;
    b.dstate = kDstate ? kDstate : p.shape.dstate;
    b.block_rows = p.shape.headdim / kSplit;
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + p.shared.barrier);
    int64_t probable = -1; // slot
    if constexpr (kStaged) {
        if (threadIdx.x == 0) CopyBarrier::init(barrier);
        if (static_cast<int>(blockIdx.x) < p.ahead.blocks) {
            look_ahead<act_t, state_t, kDstate>(p);
            probable = peek_index(p.slots, b.row);
        }
        __syncthreads(); // nobody waits on the barrier before
    }
    wait_for_previous_kernels();
    let_next_kernel_start();

    // Loads that wait for nothing: slot, the tokens' C and B rows, scalars of the first heads.
    const int64_t slot = load_index(p.slots, b.row);
    const int64_t accepted = p.accepted.data != nullptr ? load_index(p.accepted, b.row) : -1;
    Rows rows;
    rows.load_tokens(p, b);
    HeadWeights<kForm, state_t> weights;
    weights.load_tokens(p, b);
    Appends<act_t, kSplit> appends;
    appends.load(p, b);
    const auto own = [](const StepBlock& b) { // first row of the outputs
        return b.split * b.block_rows + (b.thread >> 3) * kRows +
            (kForm == StepForm::kTensor ? (b.thread >> 2 & 1) * kOwn : Tile::kept_row(b.thread & 7));
    };
    unsigned D_bits[kOwn] = {};
    const auto load_D = [&](const StepBlock& b, int head) {
        if (p.in.D.data == nullptr) return;
#pragma unroll
        for (int r = 0; r < kOwn; ++r)
            D_bits[r] = load_bits(p.in.D.data, p.in.D.dtype, head * p.in.D.head + (own(b) + r) * p.in.D.token);
    };
    load_D(b, b.first_head);
    const auto cursors = [&](const StepBlock& b, int head) { // its cursor copies
        return reinterpret_cast<Cursor*>(b.slot + p.pool.cursor) + head * kCursorCopies + b.split * kCopies;
    };
    Cursor cursor{};
    b.slot = nullptr;
    if (probable >= 0 && probable < p.pool.slots) {
        b.slot = p.pool.base + probable * p.pool.stride_bytes;
        cursor = *cursors(b, b.first_head);
    }
    if (slot < 0 || slot >= p.pool.slots) return write_zero_rows<act_t>(p, b);

    // Loads that wait for the slot: cursor (but for a guess that was right), scales, and the state where nothing is in
    // its way.
    char* const base = p.pool.base + slot * p.pool.stride_bytes;
    if (b.slot != base) {
        b.slot = base;
        cursor = *cursors(b, b.first_head);
    }
    weights.load_scales(p, b);
    const auto state = [&](const StepBlock& b, int head) { // this block's part of a head
        return reinterpret_cast<state_t*>(b.slot + p.pool.state) +
            (head * kSplit + b.split) * (b.block_rows * b.dstate);
    };
    const auto thread_part = [](const StepBlock& b) { // bytes into it
        return (b.thread >> 3) * kRows * b.dstate * static_cast<int>(sizeof(state_t));
    };
    Tile tile;
    const auto start_state = [&](const StepBlock& b, int head, bool read_once) {
        if constexpr (kStaged) {
            copy_block(smem + p.shared.state, state(b, head), b.block_rows * b.dstate * sizeof(state_t), barrier,
                copy_policy(!read_once ? CopyUse::kWrittenBack
                        : kOneToken    ? CopyUse::kReadOnce
                                       : CopyUse::kPlain));
        } else {
            tile.template load<false>(
                reinterpret_cast<const char*>(state(b, head)) + thread_part(b), b.thread & 7, b.dstate);
        }
    };
    if (p.state_first) start_state(b, b.first_head, p.shape.window > 1);
    if constexpr (kForm == StepForm::kOneToken) rows.put_c(p, smem);

    // Loads that wait for the cursor: live ring rows, then the state.
    b.plan = plan_step(cursor, accepted, b.tokens);
    b.limit = b.plan.flush ? p.shape.window : cursor.limit;
    rows.load_ring(p, b);
    weights.load_ring(p, b);
    RowCopies<act_t, kSplit> row_copies(p, b);
    row_copies.start(p, smem, b, 0);
    if constexpr (kForm == StepForm::kTensor) rows.copy_c(p, smem, b);
    if (!p.state_first) start_state(b, b.first_head, !b.plan.flush);
    if constexpr (kForm == StepForm::kOneToken) {
        weights.weigh(p, smem, b);
        rows.finish(p, smem, b);
    } else {
        rows.finish(p, smem, b);
        __syncthreads();
        weights.weigh(p, smem, b);
    }
    appends.store(p, b);
    StepBlock* const shared_block = reinterpret_cast<StepBlock*>(smem + p.shared.block);
    if (b.thread == 0) *shared_block = b;
    const auto recall = [&] { return recall_block<kSplit, kDstate, kOneToken>(p, *shared_block); };

#pragma unroll 1
    for (int k = 0;; ++k) {
        if constexpr (kStaged) {
            StepBlock now;
            now.thread = threadIdx.x;
            asm volatile("" : "+r"(now.thread));
            now.dstate = kDstate;
            CopyBarrier::wait(barrier, k);
            tile.template load<true>(smem + p.shared.state + thread_part(now), now.thread & 7, kDstate);
        } else if (k > 0) {
            const StepBlock now = recall();
            start_state(now, now.first_head + k, !now.plan.flush);
        }
        wait_for_own_copies();
        __syncthreads();
        {
            const StepBlock now = recall();
            const int head = now.first_head + k;
            if (k + 1 < now.heads) {
                row_copies.start(p, smem, now, k + 1);
                if constexpr (kStaged) start_state(now, head + 1, !now.plan.flush);
            }
            if (k == 0 && now.thread < now.heads * kCopies) {
                cursors(now, now.first_head + now.thread / kCopies)[now.thread % kCopies] =
                    next_cursor(now.plan, now.limit, now.tokens, p.pool.ring_rows);
            }
            if (now.plan.flush) {
                tile.template fold_rows<Traits::kFoldUnroll>(
                    now.plan.committed, now.thread & 7, now.dstate, CommittedRows<act_t, kRows>(p, smem, now, k));
                tile.store(reinterpret_cast<char*>(state(now, head)) + thread_part(now), now.thread & 7, now.dstate);
            }
        }
        asm volatile("" ::: "memory"); // recall again
        const StepBlock now = recall();
        const int head = now.first_head + k;
        float D[kOwn];
#pragma unroll
        for (int r = 0; r < kOwn; ++r)
            D[r] = p.in.D.data != nullptr ? bits_to_float(D_bits[r], p.in.D.dtype) : 0.0f;
        act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) +
            (now.row * p.in.y.row + head * p.in.y.head + own(now));
        if constexpr (kForm == StepForm::kTensor) {
            write_all_tensor_outputs<Tile, act_t>(tile, p, smem, now, k, D, y);
        } else if constexpr (kForm == StepForm::kOneToken) {
            float part[kRows];
            multiply_state<Tile, 1, true>(tile, p, smem, now, 0, part);
            write_outputs<Tile, act_t, 1, true>(part, p, smem, now, k, D[0], y, 0);
        } else {
            write_all_outputs<Tile, act_t>(tile, p, smem, now, k, D[0], y);
        }
        if (k + 1 == now.heads) break;
        load_D(now, head + 1);
    }
}

} // namespace replayssm
