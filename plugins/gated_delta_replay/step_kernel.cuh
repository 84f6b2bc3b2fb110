//! One decoding or verification step of the delta rule: T >= 1 tokens of one sequence, for some items (parts of heads)
//! of one group, one after another.
//!
//!   committed rows j < h (h = history_len + accepted), tokens t < T                       docs/math.md 3.3, 5.2
//!   flush:   S <- fold of rows 0..h-1, stored; then h = 0
//!   held_t = S (e^E(0,t) kn_t) + sum_{rows r before t} ((e^E(r,t) kn_r) . kn_t) d_r;   d_t = beta_t (v_t - held_t)
//!   o_t    = S (e^E(0,t) qn_t) + sum_{rows r up to t} ((e^E(r,t) kn_r) . qn_t) d_r
//!   rows k, 1/|k|, v, d, g, beta of the T tokens are appended behind the live rows
//!
//! q, k [rows, T, HK, K]; v, o [rows, T, HV, V] act_t; a [rows, T, HV(, K)], b [rows, T, HV]; slots: params.h,
//! docs/contracts.md.
//! Grid: segments of rows cut alike (params.h). A block owns its items' state rows and cursor copies; the first item of
//! a group appends k, a head's first item its gates. KDA: the items of a block belong to one head.
//! Thread = (kRows state rows, one of eight lanes along K), see DeltaTile. Tuned: the state of the next item is copied
//! into shared memory while this one is worked on in registers (one buffer, always in flight). Otherwise: one item a
//! block, state straight into registers.
//! Barriers: those of prepare_*; one per item: rows and weights are there, all threads have left the state buffer.
//! The append lands behind the live rows, on rows that no block of the launch reads: blocks run in any order.
//! slot outside the pool: zero output, no memory touched.
#pragma once

#include "step_outputs.cuh"
#include "step_prepare.cuh"

namespace replayssm {

//! By the block: fold the committed rows, whose v and keys are in shared memory.
template <class Traits>
__device__ __forceinline__ void fold_committed(typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    const char* smem, const DeltaBlock& b, int rows_buffer, int buffer) {
    using act_t = typename Traits::act_t;
    const float2* fold = reinterpret_cast<const float2*>(smem + p.shared.fold) + buffer * p.shared.committed_cap;
    const float* keys = reinterpret_cast<const float*>(smem + p.shared.keys);
    const float* decays = reinterpret_cast<const float*>(smem + p.shared.gates);
    const char* v = smem + p.shared.rows + (rows_buffer * p.shared.rows_cap + b.tokens) * p.shared.row_bytes +
        ((b.thread >> 3) * Traits::kRows + Traits::Tile::fold_row(b.thread & 7)) * sizeof(act_t);
#pragma unroll 1
    for (int j = 0; j < b.plan.committed; ++j) {
        const float v_own = to_float(*reinterpret_cast<const act_t*>(v));
        const DeltaRow row{fold[j].y, fold[j].x, decays, keys};
        if (Traits::channels(p)) {
            tile.template fold<true>(row, v_own, b.thread & 7, b.dstate);
        } else {
            tile.template fold<false>(row, v_own, b.thread & 7, b.dstate);
        }
        v += p.shared.row_bytes;
        keys += b.dstate;
        decays += b.dstate;
    }
}

template <class Traits>
__global__ void __maxnreg__((Traits::kRegisters))
    gated_delta_step_kernel(const __grid_constant__ GatedDeltaStepParams p) {
    using act_t = typename Traits::act_t;
    using state_t = typename Traits::state_t;
    constexpr int kRows = Traits::kRows, kParts = Traits::kParts, kCopies = Traits::kCopies;
    constexpr bool kStaged = Traits::kTuned;
    extern __shared__ __align__(128) char smem[];
    DeltaBlock b;
    b.thread = threadIdx.x;
    b.tokens = Traits::kOneToken ? 1 : p.tokens;
    b.dstate = Traits::kDstate ? Traits::kDstate : p.shape.dstate;
    b.part_rows = Traits::kTuned ? 64 : p.shape.headdim / kParts;
    find_items(p, b);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + p.shared.barrier);
    if (kStaged) {
        if (threadIdx.x == 0) CopyBarrier::init(barrier);
        __syncthreads(); // nobody waits on it before
    }
    wait_for_previous_kernels();
    let_next_kernel_start();

    // Loads that wait for nothing: slot, the tokens' rows, the first head's scalars.
    const bool channels = Traits::channels(p);
    const int64_t slot = load_index(p.slots, b.row);
    const int64_t accepted = p.accepted.data != nullptr ? load_index(p.accepted, b.row) : -1;
    const int own_token = Traits::kOneToken ? 0 : b.warp();
    TokenRows<Traits> token;
    token.load(p, b, own_token, own_token < b.tokens);
    HeadGates gates;
    const auto weighs = [&](int k) {
        return b.warp() == (blockDim.x >= 4 * kWarp ? (k + 3) & 3 : 0);
    }; // warps take turns
    if (weighs(0)) gates.load_tokens(p, b, b.first_item / kParts, channels);

    if (slot < 0 || slot >= p.pool.slots) return write_zero_outputs<Traits>(p, b);

    // Loads that wait for the slot: cursor, state.
    b.slot_bytes = slot * p.pool.stride_bytes;
    b.slot = p.pool.base + b.slot_bytes;
    const auto state = [&](int item) { return b.region<state_t>(p.pool.state) + item * b.part_rows * b.dstate; };
    const int thread_part = (b.thread >> 3) * kRows * b.dstate * static_cast<int>(sizeof(state_t));
    Cursor* cursors = b.region<Cursor>(p.pool.cursor) + b.first_item * kCopies;
    const Cursor cursor = *cursors;
    typename Traits::Tile tile;
    const auto start_state = [&](int item, bool read_once) {
        if constexpr (kStaged) {
            copy_block(smem + p.shared.state, state(item), b.part_rows * b.dstate * sizeof(state_t), barrier,
                copy_policy(read_once));
        } else {
            tile.load(reinterpret_cast<const char*>(state(item)) + thread_part, b.thread & 7, b.dstate);
        }
    };
    start_state(b.first_item, p.shape.window > 1);
    token.normalise(p);
    if (weighs(0)) gates.activate(p, b, channels);

    // Loads that wait for the cursor: live ring rows.
    b.plan = plan_step(cursor, accepted, b.tokens);
    const int limit = b.plan.flush ? p.shape.window : cursor.limit;
    RingKeys<Traits> ring;
    ring.load(p, b, 0);
    if (weighs(0)) gates.load_ring(p, b, b.first_item / kParts, channels);
    if (channels) start_gates<Traits>(p, smem, b);
    start_rows<Traits>(p, smem, b, b.first_item, 0);
    if constexpr (Traits::kOneToken) {
        if (b.warp() == 0) token.append(p, b, 0);
        if (weighs(0)) weigh_rows<Traits>(p, smem, b, b.first_item, 0, gates);
        prepare_one_token<Traits>(p, smem, b, token, ring);
    } else {
        prepare_tokens<Traits>(p, smem, b, token, ring);
        if (weighs(0)) weigh_rows<Traits>(p, smem, b, b.first_item, 0, gates);
    }

    for (int k = 0, heads = 0; k < b.items; ++k) {
        const int item = b.first_item + k, rows_buffer = k & 1;
        if (k > 0 && item % kParts == 0) {
            ++heads;
            if (weighs(k)) {
                gates.activate(p, b, channels);
                weigh_rows<Traits>(p, smem, b, item, heads & 1, gates);
            }
        }
        const int buffer = heads & 1;
        if constexpr (kStaged) {
            CopyBarrier::wait(barrier, k);
            tile.load(smem + p.shared.state + thread_part, b.thread & 7, b.dstate);
        }
        wait_for_own_copies();
        __syncthreads();
        if (k + 1 < b.items) {
            start_rows<Traits>(p, smem, b, item + 1, rows_buffer ^ 1);
            if constexpr (kStaged) start_state(item + 1, !b.plan.flush);
            if ((item + 1) % kParts == 0 && weighs(k + 1)) {
                gates.load_tokens(p, b, (item + 1) / kParts, channels);
                gates.load_ring(p, b, (item + 1) / kParts, channels);
            }
        }
        if (k == 0) {
            for (int i = b.thread; i < b.items * kCopies; i += blockDim.x)
                cursors[i] = next_cursor(b.plan, limit, b.tokens, p.pool.ring_rows);
        }
        if (b.plan.flush) {
            fold_committed<Traits>(tile, p, smem, b, rows_buffer, buffer);
            tile.store(reinterpret_cast<char*>(state(item)) + thread_part, b.thread & 7, b.dstate);
        }
        if constexpr (Traits::kOneToken) {
            write_output<Traits>(tile, p, smem, b, item, rows_buffer, buffer);
        } else {
            write_outputs<Traits>(tile, p, smem, b, item, rows_buffer, buffer);
        }
    }
}

} // namespace replayssm
