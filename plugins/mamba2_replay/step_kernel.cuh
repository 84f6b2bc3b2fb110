//! One decoding or verification step: T >= 1 tokens of one sequence, for heads_per_block heads of one group, one after
//! another.
//!
//!   committed rows j < h (h = history_len + accepted), tokens t < T, a = exp(A dt)             docs/math.md
//!   flush:   S <- fold of rows 0..h-1, stored; then h = 0
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
//! Barriers: one per head: rows, B.C and weights are there, and all threads have left the state buffer.
//! The append lands behind the live rows, on rows that no block of the launch reads: blocks run in any order.
//! slot outside the pool: zero output, no memory touched.
#pragma once

#include "step_rows.cuh"

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
    static constexpr int kRegisters = kDstate == 0 ? 112 : kStateRegisters > 32 || !kOneToken ? 128 : 96;
};

template <class act_t, class state_t, int kDstate, bool kOneToken>
__global__ void __maxnreg__((StepTraits<state_t, kDstate, kOneToken>::kRegisters))
    mamba2_step_kernel(const __grid_constant__ Mamba2StepParams p) {
    using Traits = StepTraits<state_t, kDstate, kOneToken>;
    constexpr int kSplit = Traits::kSplit, kRows = Traits::kRows;
    using Tile = StepTile<state_t, kDstate, kRows>;
    using Rows = std::conditional_t<kOneToken, OneTokenRows<Tile, act_t>, ManyTokenRows<Tile, act_t>>;
    constexpr bool kStaged = kSplit == 1;
    constexpr int kCopies = kCursorCopies / kSplit;
    extern __shared__ __align__(128) char smem[];
    StepBlock b;
    b.thread = threadIdx.x;
    find_work<kSplit>(p, b);
    b.tokens = kOneToken ? 1 : p.tokens;
    b.dstate = kDstate ? kDstate : p.shape.dstate;
    b.block_rows = p.shape.headdim / kSplit;
    const int own =
        b.split * b.block_rows + (b.thread >> 3) * kRows + Tile::kept_row(b.thread & 7); // row of the output
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + p.shared.barrier);
    if (kStaged) {
        if (threadIdx.x == 0) CopyBarrier::init(barrier);
        __syncthreads(); // nobody waits on it before
    }
    wait_for_previous_kernels();
    let_next_kernel_start();

    // Loads that wait for nothing: slot, the tokens' C and B rows, the first head's scalars.
    const int64_t slot = load_index(p.slots, b.row);
    const int64_t accepted = p.accepted.data != nullptr ? load_index(p.accepted, b.row) : -1;
    Rows rows;
    rows.load_tokens(p, b);
    HeadScalars scalars;
    const auto weighs = [&](int k) {
        return b.thread / kWarp == (blockDim.x >= 4 * kWarp ? (k + 3) & 3 : 0);
    }; // warps take turns
    if (weighs(0)) scalars.load_token(p, b, b.first_head);
    unsigned D_bits = 0;
    const bool skip = p.in.D.data != nullptr;
    int D_index = b.first_head * p.in.D.head + own * p.in.D.token;
    if (skip) D_bits = load_bits(p.in.D.data, p.in.D.dtype, D_index);
    if (slot < 0 || slot >= p.pool.slots) return write_zero_rows<act_t>(p, b);

    // Loads that wait for the slot: cursor, and the state where nothing is in its way.
    b.slot_bytes = slot * p.pool.stride_bytes;
    b.slot = p.pool.base + b.slot_bytes;
    const int part_elems = b.block_rows * b.dstate;
    const auto state = [&](int head) { // this block's part of a head
        return reinterpret_cast<state_t*>(b.slot + p.pool.state) + (head * kSplit + b.split) * part_elems;
    };
    const auto thread_part = [&] {
        return (b.thread >> 3) * kRows * b.dstate * static_cast<int>(sizeof(state_t));
    };                                   // bytes into it
    const auto cursors = [&](int head) { // its cursor copies
        return reinterpret_cast<Cursor*>(b.slot + p.pool.cursor) + head * kCursorCopies + b.split * kCopies;
    };
    const Cursor cursor = *cursors(b.first_head);
    Tile tile;
    const auto start_state = [&](int head, bool read_once) {
        if constexpr (kStaged) {
            copy_block(
                smem + p.shared.state, state(head), part_elems * sizeof(state_t), barrier, copy_policy(read_once));
        } else {
            tile.template load<false>(
                reinterpret_cast<const char*>(state(head)) + thread_part(), b.thread & 7, b.dstate);
        }
    };
    if (p.state_first) start_state(b.first_head, p.shape.window > 1);

    // Loads that wait for the cursor: live ring rows, then the state.
    b.plan = plan_step(cursor, accepted, b.tokens);
    rows.load_ring(p, b);
    if (weighs(0)) scalars.load_ring(p, b, b.first_head);
    RowCopies<act_t, kSplit, kRows == 4 ? 2 : 1> row_copies(p, b);
    row_copies.start(p, smem, b, 0);
    if (!p.state_first) start_state(b.first_head, !b.plan.flush);
    if constexpr (kOneToken) {
        if (weighs(0)) weigh_rows<kOneToken>(p, smem, b, b.first_head, 0, scalars, TokenStep(p, b, scalars));
        rows.finish(p, smem, b);
    } else {
        rows.finish(p, smem, b);
        __syncthreads();
        if (weighs(0)) weigh_rows<kOneToken>(p, smem, b, b.first_head, 0, scalars, TokenStep(p, b, scalars));
    }

    const int limit = b.plan.flush ? p.shape.window : cursor.limit;
    int y_index = b.row * p.in.y.row + b.first_head * p.in.y.head + own;
    for (int k = 0; k < b.heads; ++k, y_index += p.in.y.head) {
        // Addresses are computed again for every head: kept across heads they would not fit in the registers.
        asm volatile("" : "+r"(b.thread), "+l"(b.slot_bytes));
        b.slot = p.pool.base + b.slot_bytes;
        const int head = b.first_head + k, buffer = k & 1;
        if (k > 0) {
            if (weighs(k)) weigh_rows<kOneToken>(p, smem, b, head, buffer, scalars, TokenStep(p, b, scalars));
            if (!kStaged) start_state(head, !b.plan.flush);
        }
        if constexpr (kStaged) {
            CopyBarrier::wait(barrier, k);
            tile.template load<true>(smem + p.shared.state + thread_part(), b.thread & 7, b.dstate);
        }
        const float D = skip ? bits_to_float(D_bits, p.in.D.dtype) : 0.0f;
        wait_for_own_copies();
        __syncthreads();
        if (k + 1 < b.heads) {
            row_copies.start(p, smem, b, k + 1);
            if constexpr (kStaged) start_state(head + 1, !b.plan.flush);
            if (weighs(k + 1)) {
                scalars.load_token(p, b, head + 1);
                scalars.load_ring(p, b, head + 1);
            }
            D_index += p.in.D.head;
            if (skip) D_bits = load_bits(p.in.D.data, p.in.D.dtype, D_index);
        }
        if (k == 0 && b.thread < b.heads * kCopies) {
            cursors(b.first_head + b.thread / kCopies)[b.thread % kCopies] =
                next_cursor(b.plan, limit, b.tokens, p.pool.ring_rows);
        }
        append_x<act_t, kSplit>(p, smem, b, head, buffer);
        if (b.plan.flush) {
            tile.fold_rows(b.plan.committed, b.thread & 7, b.dstate, CommittedRows<act_t, kRows>(p, smem, b, buffer));
            tile.store(reinterpret_cast<char*>(state(head)) + thread_part(), b.thread & 7, b.dstate);
        }
        act_t* y = static_cast<act_t*>(const_cast<void*>(p.in.y.data)) + y_index;
        write_all_outputs<Tile, act_t, kOneToken>(tile, p, smem, b, buffer, D, y);
    }
}

} // namespace replayssm
