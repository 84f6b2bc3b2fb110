//! One token of GDN, V = K = 128, bf16 activations: what step_kernel.cuh does, with a shorter way from the launch to
//! the last byte of the state.
//!
//! Blocks of the first wave read slot, accepted count and cursor before the kernels in front are done. From these
//! follows where everything lies that the block needs, so that behind the wait all loads are asked for at once, ring
//! rows first, then the state; the same three are read again, and where one has changed, the loads are made again. What
//! was read early leads to addresses inside the slot and to nothing else.
//! Warps 0 to 2 multiply the ring's keys with the token's key and query, as those come; norms multiply the outputs'
//! sums. The last warp weighs the rows of the block's first head, the one before it those of a second head. Warp 0 works
//! out the norms and appends k. Then every warp goes through the items on its own, with 16 state rows of each, the next
//! item's on their way to its part of the state buffer.
//! Barriers: one, behind all that warps have from each other.
#pragma once

#include "step_kernel.cuh"

namespace replayssm {

//! What decides where a row's data lies, as it stands in memory.
struct SlotView {
    uint2 slot, accepted, cursor;

    __device__ __forceinline__ bool operator==(const SlotView& other) const {
        return ((slot.x ^ other.slot.x) | (slot.y ^ other.slot.y) | (accepted.x ^ other.accepted.x) |
                   (accepted.y ^ other.accepted.y) | (cursor.x ^ other.cursor.x) | (cursor.y ^ other.cursor.y)) == 0;
    }
};

template <class Traits>
struct SingleStep {
    using act_t = typename Traits::act_t;
    using Bits = Pack<uint32_t, 2>; // four elements
    static constexpr int kRingWarps = 3;
    static constexpr int kHeld = 6; // ring rows that a warp has at a time
    static constexpr int kValues = 16;
    static constexpr int kRowBytes = 256;
    static_assert(2 * kHeld + 3 <= kValues && Traits::kDstate == 128, "sums of a warp");
    static_assert(std::is_same_v<act_t, __nv_bfloat16>, "elements are taken out of words");

    const GatedDeltaStepParams& p;
    char* const smem;
    DeltaBlock& b;
    Bits q, k, ring[kHeld] = {};
    float rnorm = 0.0f; // of the ring row whose sums this lane gets, number(first, lane / 4)

    __device__ __forceinline__ SingleStep(const GatedDeltaStepParams& p, char* smem, DeltaBlock& b)
        : p(p), smem(smem), b(b) {}

    __device__ __forceinline__ bool in_pool(int64_t slot) const { return slot >= 0 && slot < p.pool.slots; }
    __device__ __forceinline__ int64_t slot_of(const SlotView& view) const {
        return index_of_bits(view.slot, p.slots.bits);
    }
    __device__ __forceinline__ RingPlan plan_of(const SlotView& view) const {
        return plan_step(cursor_of(view), index_of_bits(view.accepted, p.accepted.bits), 1);
    }
    static __device__ __forceinline__ Cursor cursor_of(const SlotView& view) {
        Cursor cursor;
        memcpy(&cursor, &view.cursor, sizeof(cursor));
        return cursor;
    }
    //! What stands there; the cursor is that of `slot`. None of it is waited for here.
    template <bool kEarly>
    __device__ __forceinline__ void read_indices(SlotView& view) const {
        view.slot = index_bits<kEarly>(p.slots, b.row);
        view.accepted = make_uint2(~0u, ~0u);
        if (p.accepted.data != nullptr) view.accepted = index_bits<kEarly>(p.accepted, b.row);
    }
    template <bool kEarly>
    __device__ __forceinline__ void read_cursor(SlotView& view, int64_t slot) const {
        view.cursor = word_bits<kEarly>(
            p.pool.base + slot * p.pool.stride_bytes + p.pool.cursor + b.first_item * Traits::kCopies * 8);
    }

    //! Before the wait for the kernels in front: prefetches, and says what is there at the moment. False: not to be used.
    __device__ __forceinline__ bool look_ahead(SlotView& view) const {
        InputPrefetch<Traits> fetch(p, b);
        read_indices<true>(view);
        fetch.tokens();
        if (!fetch.set_slot(slot_of(view))) return false;
        read_cursor<true>(view, slot_of(view));
        fetch.scalars();
        const RingPlan plan = plan_of(view);
        const bool usable = plan.origin >= 0 && plan.origin < p.pool.ring_rows && plan.committed >= 0 &&
            plan.committed <= p.committed_cap;
        if (usable) fetch.ring(plan);
        fetch.state();
        return usable;
    }

    //! For certain; the cursor waits for the slot.
    __device__ __forceinline__ void read(SlotView& view) const {
        read_indices<false>(view);
        if (in_pool(slot_of(view))) read_cursor<false>(view, slot_of(view));
    }

    __device__ __forceinline__ void load_token() {
        const int lane = b.lane() * 4;
        if (b.warp() >= kRingWarps) return;
        q = load_pack<uint32_t, 2>(
            static_cast<const act_t*>(p.in.q.data) + (b.row * p.in.q.row + b.group * p.in.q.head + lane));
        k = load_pack<uint32_t, 2>(
            static_cast<const act_t*>(p.in.k.data) + (b.row * p.in.k.row + b.group * p.in.k.head + lane));
    }

    //! Ring row i of this warp, counted from the oldest; negative: no such row. Newest rows first.
    __device__ __forceinline__ int number(int first, int i) const {
        return b.plan.committed - 1 - (first + i * kRingWarps + b.warp());
    }
    //! In place of rows that do not exist: the oldest one, whose sums nobody reads.
    __device__ __forceinline__ uint32_t row_of(int j) const {
        const uint32_t row = b.plan.origin + max(j, 0);
        return min(row, row - p.pool.ring_rows);
    }
    __device__ __forceinline__ void load_ring(int first) {
        if (b.warp() >= kRingWarps || b.plan.committed == 0) return;
        const char* rows = b.slot + p.pool.ring_k + (b.group * p.pool.ring_rows * kRowBytes + b.lane() * 8);
        const char* norms = b.slot + p.pool.ring_k_rnorm + b.group * p.pool.scalar_stride * 4;
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            ring[i] = load_pack<uint32_t, 2>(rows + row_of(number(first, i)) * kRowBytes);
        rnorm = *reinterpret_cast<const float*>(norms + row_of(number(first, b.lane() / 4)) * 4);
    }

    static __device__ __forceinline__ RowPieces<1> pieces(const Bits& bits) {
        return {{{low_bf16(bits.value[0]), high_bf16(bits.value[0]), low_bf16(bits.value[1]), high_bf16(bits.value[1])}}};
    }

    //! By warps 0 to kRingWarps - 1: products of the ring's keys, or, in a folding step, the keys; by warp 0 the token's.
    __device__ __forceinline__ void multiply_keys() {
        const RowPieces<1> key = pieces(k), query = pieces(q);
        float* vectors = reinterpret_cast<float*>(smem + p.shared.vectors);
        float* keys = reinterpret_cast<float*>(smem + p.shared.keys);
        float* dots = reinterpret_cast<float*>(smem + p.shared.dots);
        if (b.warp() == 0) key.store(vectors, Traits::kDstate);
        if (b.warp() == 1) query.store(vectors + Traits::kDstate, Traits::kDstate);
#pragma unroll 1
        for (int first = 0; first == 0 || first < b.plan.committed; first += kHeld * kRingWarps) {
            if (first > 0) load_ring(first);
            float value[kValues] = {};
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                RowPieces<1> row = pieces(ring[i]);
                if (b.plan.flush) {
                    row.scale(__shfl_sync(kFullMask, rnorm, 4 * i));
                    if (number(first, i) >= 0) row.store(keys + number(first, i) * Traits::kDstate, Traits::kDstate);
                } else {
                    value[2 * i] = row.dot_part(key);
                    value[2 * i + 1] = row.dot_part(query);
                }
            }
            value[2 * kHeld] = key.dot_part(key);
            value[2 * kHeld + 1] = query.dot_part(query);
            value[2 * kHeld + 2] = key.dot_part(query);
            const int lane = b.lane(), i = lane / 4, j = number(first, i);
            const float sum = warp_totals(value, lane);
            if (lane % 2 == 0 && i < kHeld && j >= 0 && !b.plan.flush) dots[2 * (1 + j) + lane / 2 % 2] = sum * rnorm;
            if (first == 0 && b.warp() == 0) finish_token(sum, dots);
        }
    }

    //! By warp 0: norms; k to the ring. sum: lanes 4 kHeld .. have k . k, q . q, k . q.
    __device__ __forceinline__ void finish_token(float sum, float* dots) const {
        const float k_norm = inverse_norm(__shfl_sync(kFullMask, sum, 4 * kHeld), p.shape.qk_l2norm);
        const float q_norm =
            inverse_norm(__shfl_sync(kFullMask, sum, 4 * kHeld + 2), p.shape.qk_l2norm) * p.in.scale;
        const float kq = __shfl_sync(kFullMask, sum, 4 * kHeld + 4) * k_norm * q_norm;
        const int row = b.append_row(p.pool, 0);
        if (b.first_of_group)
            store_pack(b.region<act_t>(p.pool.ring_k) +
                    ((b.group * p.pool.ring_rows + row) * Traits::kDstate + b.lane() * 4), k);
        if (b.lane() != 0) return;
        *reinterpret_cast<float2*>(smem + p.shared.norms) = make_float2(k_norm, q_norm);
        dots[1] = kq;
        if (b.first_of_group) b.region<float>(p.pool.ring_k_rnorm)[b.group * p.pool.scalar_stride + row] = k_norm;
    }

    //! Fold the committed rows, whose v and keys are in shared memory: into S', or, of a 16-bit state, into S.
    __device__ __forceinline__ void fold(typename Traits::Tile& tile, int rows_buffer, int head) const {
        using Tile = typename Traits::Tile;
        const RowWeights* rows =
            reinterpret_cast<const RowWeights*>(smem + p.shared.fold) + head * p.shared.committed_cap;
        const float* keys = reinterpret_cast<const float*>(smem + p.shared.keys);
        const int lane = Tile::lane_of(b.thread), row_bytes = p.shared.row_bytes;
        const char* v = smem + p.shared.rows + (rows_buffer * p.shared.rows_cap + 1) * row_bytes +
            (Tile::first_row(b.thread) + Tile::fold_row(lane)) * sizeof(act_t);
        typename Tile::Key key; // of the row that is next; behind the last one what lies there is not used
        key.load(keys, lane, Traits::kDstate);
#pragma unroll 1
        for (int j = 0; j < b.plan.committed;) {
            if (rows[j].renew != 1.0f) tile.multiply(rows[j].renew);
            const int end = rows[j].end;
#pragma unroll 1
            for (; j < end; ++j) {
                const auto weights = load_pack<float, 2>(&rows[j].scale);
                const DeltaRow row{{weights.value[0], weights.value[1], 1.0f, 0}, nullptr, keys};
                const float v_own = to_float(*reinterpret_cast<const act_t*>(v));
                tile.template fold_key<false, true>(key, row, v_own, lane, Traits::kDstate);
                v += row_bytes;
                keys += Traits::kDstate;
            }
        }
        if (!Traits::kScaledState) tile.multiply(rows[b.plan.committed - 1].scale);
    }

    //! o, d and v of an item.
    __device__ __forceinline__ void write_output(
        const typename Traits::Tile& tile, int item, int rows_buffer, int head) const {
        using Tile = typename Traits::Tile;
        constexpr int kRows = Traits::kRows, kSharers = Tile::template sharers<2>();
        static_assert(Tile::template kept<2>() == 1, "a lane has one total");
        const int lane = Tile::lane_of(b.thread);
        const char* rows = smem + p.shared.rows + rows_buffer * p.shared.rows_cap * p.shared.row_bytes;
        const float2 token = reinterpret_cast<const float2*>(smem + p.shared.token)[head];
        const float2 norms = *reinterpret_cast<const float2*>(smem + p.shared.norms);
        const float2* dots = reinterpret_cast<const float2*>(smem + p.shared.dots);
        const float* decays = reinterpret_cast<const float*>(smem + p.shared.weights) + head * p.shared.rows_cap;
        float part[kRows * 2]; // [row][key, query]
        tile.template dot<2>(reinterpret_cast<const float*>(smem + p.shared.vectors), lane, Traits::kDstate, part);
#pragma unroll
        for (int i = 0; i < kRows * 2; ++i)
            part[i] *= token.y;
        add_ring_rows<Traits, 2>(p, rows, b, part, [&](int j, float (&w)[2]) {
            const float2 dot = dots[1 + j];
            w[0] = decays[1 + j] * dot.x;
            w[1] = decays[1 + j] * dot.y;
        });
        Tile::template reduce<2>(part, lane);
        const float other = __shfl_xor_sync(kFullMask, part[0], kSharers);
        const bool is_query = lane & kSharers;
        const float held = (is_query ? other : part[0]) * norms.x, read = (is_query ? part[0] : other) * norms.y;
        const int own = Tile::first_row(b.thread) + lane / (2 * kSharers);
        const act_t v = reinterpret_cast<const act_t*>(rows)[own];
        const float d = token.x * (to_float(v) - held);
        if (lane % kSharers != 0) return;
        const auto to = ItemOutputs<act_t>::template of<Traits>(p, b, item);
        if (!is_query) {
            to.o[own] = from_float<act_t>(__fmaf_rn(d, dots[0].y, read));
        } else {
            const int at = b.append_row(p.pool, 0) * 128 + own;
            to.ring_d[at] = stored_d<act_t>(d);
            to.ring_v[at] = v;
        }
    }
};

template <class Traits>
__global__ void __maxnreg__((Traits::kRegisters))
    gated_delta_single_kernel(const __grid_constant__ GatedDeltaStepParams p) {
    constexpr int kCopies = Traits::kCopies;
    extern __shared__ __align__(128) char smem[];
    DeltaBlock b;
    b.thread = threadIdx.x;
    b.warp_index = __shfl_sync(kFullMask, b.thread / kWarp, 0); // the compiler sees that all lanes have the same
    b.tokens = 1;
    b.dstate = Traits::kDstate;
    b.part_rows = 64;
    find_items(p, b);
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(smem + p.shared.barrier) + b.warp();
    if (b.lane() == 0) CopyBarrier::init(barrier);
    __syncwarp(); // nobody else waits on it
    SingleStep<Traits> step(p, smem, b);
    SlotView view;
    bool certain = static_cast<int>(blockIdx.x) >= p.prefetch_blocks || !step.look_ahead(view);
    wait_for_previous_kernels();
    let_next_kernel_start();

    step.load_token();
    HeadWeigher<Traits> weigher(b);
    weigher.load_tokens(p, b);
    int fills = 0; // of the warp's part of the state buffer
    if (certain) step.read(view);
#pragma unroll 1
    while (true) {
        const int64_t slot = step.slot_of(view);
        if (certain && !step.in_pool(slot)) return write_zero_outputs<Traits>(p, b);
        SlotView now = view;
        if (!certain) {
            step.template read_indices<false>(now);
            step.template read_cursor<false>(now, slot);
        }
        b.slot = p.pool.base + slot * p.pool.stride_bytes;
        b.plan = step.plan_of(view);
        step.load_ring(0);
        weigher.load_scale(p, b);
        weigher.load_ring(p, b);
        start_rows<Traits>(p, smem, b, b.first_item, 0);
        ItemState<Traits>(p, b).copy(
            smem + p.shared.state, barrier, b.first_item, p.shape.window > 1 && !b.plan.flush);
        if (certain || now == view) break;
        wait_for_own_copies();
        WarpCopyBarrier::wait(barrier, fills++);
        __syncwarp();
        step.read(view);
        certain = true;
    }
    weigher.activate(p, b);
    if (b.warp() < SingleStep<Traits>::kRingWarps) step.multiply_keys();
    weigher.weigh(p, smem, b);

    const ItemState<Traits> state(p, b);
    typename Traits::Tile tile;
    state.receive(tile, smem + p.shared.state, barrier, fills);
    __syncthreads();
    const int limit = b.plan.flush ? p.shape.window : step.cursor_of(view).limit;
    for (int i = b.thread; i < b.items * kCopies; i += blockDim.x)
        (b.region<Cursor>(p.pool.cursor) + b.first_item * kCopies)[i] = next_cursor(b.plan, limit, 1, p.pool.ring_rows);
#pragma unroll 1
    for (int i = 0;; ++i) {
        const int item = b.first_item + i, head = i / Traits::kParts;
        if (i + 1 < b.items) {
            start_rows<Traits>(p, smem, b, item + 1, (i + 1) & 1);
            state.copy(smem + p.shared.state, barrier, item + 1, !b.plan.flush);
        }
        if (b.plan.flush) {
            step.fold(tile, i & 1, head);
            tile.store(state.base + item * state.item_bytes + state.thread_part, state.lane, Traits::kDstate);
        }
        step.write_output(tile, item, i & 1, head);
        if (i + 1 == b.items) break;
        state.receive(tile, smem + p.shared.state, barrier, fills + i + 1);
        __syncwarp();
    }
}

} // namespace replayssm
