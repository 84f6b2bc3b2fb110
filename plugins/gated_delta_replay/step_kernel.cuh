//! One decoding or verification step of the delta rule: T >= 1 tokens of one sequence, for some items (parts of heads)
//! of one group, one after another. One token of GDN in a tuned size: step_single.cuh.
//!
//!   committed rows j < h (h = history_len + accepted), tokens t < T                       docs/math.md 3.3, 5.2
//!   flush:   S <- fold of rows 0..h-1, stored; then h = 0. GDN, fp32: as S' and its scale (fold.cuh)
//!   held_t = S (e^E(0,t) kn_t) + sum_{rows r before t} ((e^E(r,t) kn_r) . kn_t) d_r;   d_t = beta_t (v_t - held_t)
//!   o_t    = S (e^E(0,t) qn_t) + sum_{rows r up to t} ((e^E(r,t) kn_r) . qn_t) d_r
//!   rows k, 1/|k|, v, d, g, beta of the T tokens are appended behind the live rows
//!
//! q, k [rows, T, HK, K]; v, o [rows, T, HV, V] act_t; a [rows, T, HV(, K)], b [rows, T, HV]; slots: params.h,
//! docs/contracts.md.
//! Grid: segments of rows cut alike (params.h). A block owns its items' state rows and copies of cursor and scale; the
//! first item of a group appends k, a head's first item its gates. KDA: the items of a block belong to one head.
//! Thread = (kRows state rows, one of kLanes lanes along K), see DeltaTile. Tuned: the state of the next item is copied
//! into shared memory while this one is worked on in registers (one buffer, always in flight). GDN: once the block has
//! prepared what its heads share, every warp goes through the items on its own, with 16 state rows of each. Otherwise:
//! one item a block, state straight into registers.
//! Barriers: those of prepare_*; one behind them: weights, keys and vectors are there, every thread has the cursor.
//! KDA: one more per item: rows are there, all threads have left the state buffer.
//! The append lands behind the live rows, on rows that no block of the launch reads: blocks run in any order.
//! Blocks of the first wave have the L2 fetch what they will read before they wait for the kernels in front
//! (step_prefetch.cuh).
//! slot outside the pool: zero output, no memory touched.
#pragma once

#include "step_prefetch.cuh"
#include "step_tensor.cuh"

namespace replayssm {

//! Fold the committed rows, whose v and keys are in shared memory: into S', or, of GDN's 16-bit states, into S.
template <class Traits>
__device__ __forceinline__ void fold_committed(typename Traits::Tile& tile, const GatedDeltaStepParams& p,
    const char* smem, const DeltaBlock& b, int rows_buffer, int head) {
    using act_t = typename Traits::act_t;
    using Tile = typename Traits::Tile;
    const char* fold = smem + p.shared.fold;
    const int first = head * p.shared.committed_cap;
    const float* keys = reinterpret_cast<const float*>(smem + p.shared.keys);
    const float* decays = reinterpret_cast<const float*>(smem + p.shared.gates);
    const int lane = Tile::lane_of(b.thread);
    const char* v = smem + p.shared.rows + (rows_buffer * p.shared.rows_cap + b.tokens) * p.shared.row_bytes +
        (Tile::first_row(b.thread) + Tile::fold_row(lane)) * sizeof(act_t);
    const int row_bytes = p.shared.row_bytes;
#pragma unroll 1
    for (int j = 0; j < b.plan.committed; ++j) {
        const float v_own = to_float(*reinterpret_cast<const act_t*>(v));
        if (Traits::channels(p)) {
            const RowWeights weights = channel_row(reinterpret_cast<const float*>(fold)[first + j]);
            tile.template fold<true>(DeltaRow{weights, decays, keys}, v_own, lane, b.dstate);
        } else {
            const RowWeights weights = reinterpret_cast<const RowWeights*>(fold)[first + j];
            tile.template fold<false>(DeltaRow{weights, decays, keys}, v_own, lane, b.dstate);
        }
        v += row_bytes;
        keys += b.dstate;
        decays += b.dstate;
    }
    if (!Traits::kScaledState && !Traits::channels(p))
        tile.multiply(reinterpret_cast<const RowWeights*>(fold)[first + b.plan.committed - 1].scale);
}

//! Where the state of an item lies, and the parts of it that a thread works on and that a warp (GDN) or the block
//! copies.
template <class Traits>
struct ItemState {
    using state_t = typename Traits::state_t;
    using Tile = typename Traits::Tile;
    char* base;
    int item_bytes, row_bytes, copied_part, copied_bytes, thread_part, lane;

    __device__ __forceinline__ ItemState(const GatedDeltaStepParams& p, const DeltaBlock& b)
        : base(b.slot + p.pool.state), row_bytes(b.dstate * static_cast<int>(sizeof(state_t))),
          lane(Tile::lane_of(b.thread)) {
        item_bytes = b.part_rows * row_bytes;
        copied_bytes = Traits::kOwnWarps ? kWarpStateRows * row_bytes : item_bytes;
        copied_part = Traits::kOwnWarps ? b.warp() * copied_bytes : 0;
        thread_part = Tile::first_row(b.thread) * row_bytes;
    }

    //! Tuned, by a warp or the block: its rows of the item on their way to shared memory.
    __device__ __forceinline__ void copy(char* buffer, uint64_t* barrier, int item, bool read_once) const {
        char *const target = buffer + copied_part, *const source = base + item * item_bytes + copied_part;
        // Measured: states that are only read, next to many tokens, are better left where they are in the L2.
        const CopyUse use = !read_once ? CopyUse::kWrittenBack : Traits::kTensor ? CopyUse::kPlain : CopyUse::kReadOnce;
        if constexpr (Traits::kOwnWarps) {
            copy_warp_block(target, source, copied_bytes, barrier, copy_policy(use));
        } else {
            copy_block(target, source, copied_bytes, barrier, copy_policy(use));
        }
    }

    //! Tuned: item number k of the block from shared memory into registers; its rows are there, too, in this thread's
    //! eyes.
    __device__ __forceinline__ void receive(Tile& tile, const char* buffer, uint64_t* barrier, int k) const {
        if constexpr (Traits::kOwnWarps) {
            WarpCopyBarrier::wait(barrier, k);
        } else {
            CopyBarrier::wait(barrier, k);
        }
        tile.load(buffer + thread_part, lane, Traits::kDstate);
        wait_for_own_copies();
    }
};

//! By a warp, in the block's preparation: weights of its heads. Every second head of the block is one warp's.
template <class Traits>
struct HeadWeigher {
    HeadGates gates;
    int offset; // of its next head among the block's; none left: >= heads
    int heads;

    __device__ __forceinline__ explicit HeadWeigher(const DeltaBlock& b) {
        const int warps = blockDim.x / kWarp, from_last = warps - 1 - b.warp();
        heads = Traits::kTuned ? (b.items + Traits::kParts - 1) / Traits::kParts : 1;
        offset = from_last < 2 ? from_last : heads;
    }
    __device__ __forceinline__ int head(const DeltaBlock& b) const { return b.first_item / Traits::kParts + offset; }

    __device__ __forceinline__ bool has_head() const { return offset < heads; }
    __device__ __forceinline__ void load_tokens(const GatedDeltaStepParams& p, const DeltaBlock& b) {
        if (offset < heads) gates.load_tokens(p, b, head(b), Traits::channels(p));
    }
    __device__ __forceinline__ void activate(const GatedDeltaStepParams& p, const DeltaBlock& b) {
        if (offset < heads) gates.activate(p, b, Traits::channels(p));
    }
    //! First of the block's items of its next head.
    __device__ __forceinline__ int item(const DeltaBlock& b) const {
        return offset == 0 ? b.first_item : head(b) * Traits::kParts;
    }
    __device__ __forceinline__ void load_scale(const GatedDeltaStepParams& p, const DeltaBlock& b) {
        if (Traits::kScaledState && !Traits::channels(p) && offset < heads)
            gates.load_scale(p, b, item(b) * Traits::kCopies);
    }
    __device__ __forceinline__ void load_ring(const GatedDeltaStepParams& p, const DeltaBlock& b) {
        if (offset < heads) gates.load_ring(p, b, head(b), Traits::channels(p));
    }
    //! The loads of its first head have been made.
    __device__ __forceinline__ void weigh(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b) {
        while (offset < heads) {
            weigh_rows<Traits>(p, smem, b, item(b), offset, gates);
            offset += 2;
            load_tokens(p, b);
            load_scale(p, b);
            load_ring(p, b);
            activate(p, b);
        }
    }
};

//! By the block, once slot and cursor are there: everything that the items share, the first item's rows on their way.
template <class Traits>
__device__ __forceinline__ void prepare(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b,
    TokenRows<Traits>& token, HeadWeigher<Traits>& weigher) {
    if constexpr (Traits::kTensor) {
        TensorKeys keys;
        if (b.warp() > 0) keys.load<Traits>(p, b, b.warp() - 1);
        weigher.load_ring(p, b);
        start_rows<Traits>(p, smem, b, b.first_item, 0);
        prepare_tensor<Traits>(p, smem, b, token, keys);
        weigher.weigh(p, smem, b);
    } else {
        RingKeys<Traits> ring;
        ring.load(p, b, 0);
        weigher.load_ring(p, b);
        if (Traits::channels(p)) start_gates<Traits>(p, smem, b);
        start_rows<Traits>(p, smem, b, b.first_item, 0);
        if constexpr (Traits::kOneToken) {
            if (b.warp() == 0) token.append(p, b, 0);
            weigher.weigh(p, smem, b);
            prepare_one_token<Traits>(p, smem, b, token, ring);
        } else {
            prepare_tokens<Traits>(p, smem, b, token, ring);
            weigher.weigh(p, smem, b);
        }
    }
}

//! Fold where the step folds, outputs, new ring rows of one item, whose state is in `tile`.
template <class Traits>
__device__ __forceinline__ void work_on_item(typename Traits::Tile& tile, const GatedDeltaStepParams& p, char* smem,
    const DeltaBlock& b, const ItemState<Traits>& state, int k) {
    const int item = b.first_item + k, rows_buffer = k & 1, head = Traits::kTuned ? k / Traits::kParts : 0;
    if (b.plan.flush) {
        fold_committed<Traits>(tile, p, smem, b, rows_buffer, head);
        tile.store(state.base + item * state.item_bytes + state.thread_part, state.lane, b.dstate);
    }
    if constexpr (Traits::kOneToken) {
        write_output<Traits>(tile, p, smem, b, item, rows_buffer, head);
    } else if constexpr (Traits::kTensor) {
        write_tensor_outputs<Traits>(tile, p, smem, b, item, rows_buffer, head);
    } else {
        write_outputs<Traits>(tile, p, smem, b, item, rows_buffer, head);
    }
}

template <class Traits>
__global__ void __maxnreg__((Traits::kRegisters))
    gated_delta_step_kernel(const __grid_constant__ GatedDeltaStepParams p) {
    constexpr int kParts = Traits::kParts, kCopies = Traits::kCopies;
    constexpr bool kStaged = Traits::kTuned;
    extern __shared__ __align__(128) char smem[];
    DeltaBlock b;
    b.thread = threadIdx.x;
    b.warp_index = __shfl_sync(kFullMask, b.thread / kWarp, 0); // the compiler sees that all lanes have the same
    b.tokens = Traits::kOneToken ? 1 : p.tokens;
    b.dstate = Traits::kDstate ? Traits::kDstate : p.shape.dstate;
    b.part_rows = Traits::kTuned ? 64 : p.shape.headdim / kParts;
    find_items(p, b);
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(smem + p.shared.barrier) + (Traits::kOwnWarps ? b.warp() : 0);
    if constexpr (kStaged) {
        if ((Traits::kOwnWarps ? b.lane() : b.thread) == 0) CopyBarrier::init(barrier);
        if constexpr (Traits::kOwnWarps) {
            __syncwarp(); // nobody else waits on it
        } else {
            __syncthreads();
        }
        prefetch_inputs<Traits>(p, b);
    }
    wait_for_previous_kernels();
    let_next_kernel_start();

    // Loads that wait for nothing: slot, the tokens' rows, the first heads' scalars.
    const int64_t slot = load_index(p.slots, b.row);
    const int64_t accepted = p.accepted.data != nullptr ? load_index(p.accepted, b.row) : -1;
    const int own_token = Traits::kOneToken ? 0 : b.warp();
    TokenRows<Traits> token;
    token.load(p, b, own_token, own_token < b.tokens);
    HeadWeigher<Traits> weigher(b);
    weigher.load_tokens(p, b);
    if (slot < 0 || slot >= p.pool.slots) return write_zero_outputs<Traits>(p, b);

    // Loads that wait for the slot: cursor, scale, state; then those that wait for the cursor.
    b.slot = p.pool.base + slot * p.pool.stride_bytes;
    Cursor* cursors = b.region<Cursor>(p.pool.cursor) + b.first_item * kCopies;
    const Cursor cursor = *cursors;
    weigher.load_scale(p, b);
    typename Traits::Tile tile;
    const ItemState<Traits> state(p, b);
    if constexpr (kStaged) {
        state.copy(smem + p.shared.state, barrier, b.first_item, p.shape.window > 1);
    } else {
        tile.load(state.base + b.first_item * state.item_bytes + state.thread_part, state.lane, b.dstate);
    }
    if (Traits::kTensor && own_token < b.tokens) token.put_vectors(smem + p.shared.vectors, own_token);
    token.normalise(p);
    weigher.activate(p, b);
    b.plan = plan_step(cursor, accepted, b.tokens);
    const int limit = b.plan.flush ? p.shape.window : cursor.limit;
    prepare<Traits>(p, smem, b, token, weigher);

    if constexpr (kStaged) {
        state.receive(tile, smem + p.shared.state, barrier, 0);
    } else {
        wait_for_own_copies();
    }
    __syncthreads();
    for (int i = b.thread; i < b.items * kCopies; i += blockDim.x)
        cursors[i] = next_cursor(b.plan, limit, b.tokens, p.pool.ring_rows);
#pragma unroll 1
    for (int k = 0;; ++k) {
        const int next = kStaged ? k + 1 : b.items; // not staged: there is one item
        if constexpr (kStaged) {
            if (next < b.items) {
                start_rows<Traits>(p, smem, b, b.first_item + next, next & 1);
                state.copy(smem + p.shared.state, barrier, b.first_item + next, !b.plan.flush);
            }
        }
        work_on_item<Traits>(tile, p, smem, b, state, k);
        if (next == b.items) break;
        if constexpr (kStaged) state.receive(tile, smem + p.shared.state, barrier, next);
        if constexpr (Traits::kOwnWarps) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }
}

} // namespace replayssm
