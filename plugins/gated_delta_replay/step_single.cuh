//! One token of GDN, V = K = 128, bf16 activations: what step_kernel.cuh does, with a shorter way from the launch to
//! the last byte of the state.
//!
//! Blocks of the first wave read slot, accepted count and cursor before the kernels in front are done. From these
//! follows where everything lies that the block needs, so that behind the wait all loads are asked for at once, ring
//! rows first, then the state; the same three are read again, and where one has changed, the loads are made again. What
//! was read early leads to addresses inside the slot and to nothing else.
//! Warp 0 works out the token's norms and appends k. Warps 1 and 2 multiply the ring's keys, 16 rows at a time, with the
//! token's key and query on tensor cores, all as they come: products of two bf16 numbers are exact, and the norms
//! multiply the sums. Where the step folds they normalise the ring's keys instead. The last warp weighs the rows of the
//! block's first head, the one before it those of a second head. Then every warp goes through the items on its own, with
//! 16 state rows of each, the next item's on their way to its part of the state buffer.
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
    using Bits = Pack<uint32_t, 2>;   // four elements
    static constexpr int kPieces = 4; // of 32 elements of a key
    static constexpr int kRowBytes = 256;
    static_assert(std::is_same_v<act_t, __nv_bfloat16> && Traits::kDstate == 128, "keys as first operands");

    const GatedDeltaStepParams& p;
    char* const smem;
    DeltaBlock& b;
    const act_t *q_at, *k_at; // warp 0: this lane's four elements
    Bits q, k;
    // Warps 1 and 2, as operands of products: lane 4 g + q has ring rows g and g + 8 of 16, and in column g the key (but
    // for g = 1: the query); of each, eight elements of every 32.
    const char *row_at[2], *vector_at;
    const float* norm_at[2];
    Pack<uint32_t, 4> row[2][kPieces], vector[kPieces];
    float rnorm[2];

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

    //! Before the wait for the kernels in front: prefetches, a part by each warp, and says what is there at the moment.
    //! False: not to be used.
    __device__ __forceinline__ bool look_ahead(SlotView& view) const {
        InputPrefetch<Traits> fetch(p, b);
        read_indices<true>(view);
        fetch.tokens();
        if (!fetch.set_slot(slot_of(view))) return false;
        read_cursor<true>(view, slot_of(view));
        if (b.warp() == 3) fetch.state();
        fetch.scalars();
        const RingPlan plan = plan_of(view);
        if (plan.origin < 0 || plan.origin >= p.pool.ring_rows || plan.committed < 0 ||
            plan.committed > p.committed_cap)
            return false;
        if (!multiplies()) return true;
        const char* const rows = fetch.slot +
            (b.warp() == 1       ? p.pool.ring_k + b.group * p.pool.ring_rows * kRowBytes
                    : plan.flush ? p.pool.ring_v + fetch.head * p.pool.ring_rows * kRowBytes
                                 : p.pool.ring_d + fetch.head * p.pool.ring_rows * kRowBytes);
        const int before_end = min(plan.committed, p.pool.ring_rows - plan.origin);
        if (b.lane() == 0) prefetch_block(rows + plan.origin * kRowBytes, before_end * kRowBytes);
        if (b.lane() == 1) prefetch_block(rows, (plan.committed - before_end) * kRowBytes);
        return true;
    }

    //! For certain; the cursor waits for the slot.
    __device__ __forceinline__ void read(SlotView& view) const {
        read_indices<false>(view);
        if (in_pool(slot_of(view))) read_cursor<false>(view, slot_of(view));
    }

    //! By warp 0 or 1: addresses of the token's rows.
    __device__ __forceinline__ void aim_token() {
        q_at = static_cast<const act_t*>(p.in.q.data) + (b.row * p.in.q.row + b.group * p.in.q.head);
        k_at = static_cast<const act_t*>(p.in.k.data) + (b.row * p.in.k.row + b.group * p.in.k.head);
        vector_at = reinterpret_cast<const char*>(b.lane() / 4 == 1 ? q_at : k_at) + b.lane() % 4 * 16;
        q_at += b.lane() * 4;
        k_at += b.lane() * 4;
        settle(q_at);
        settle(k_at);
        settle(vector_at);
    }

    __device__ __forceinline__ int tiles() const { return (b.plan.committed + kTensorRows - 1) / kTensorRows; }
    __device__ __forceinline__ bool multiplies() const { return b.warp() == 1 || b.warp() == 2; }
    //! Of a tile of 16 ring rows, does this warp have rows g (half 0), or g + 8? Both, or in a folding step one each.
    __device__ __forceinline__ bool has(int half) const { return !b.plan.flush || half == b.warp() - 1; }
    //! First tile of this warp; in a folding step two warps share every tile.
    __device__ __forceinline__ int first_tile() const { return b.plan.flush ? 0 : b.warp() - 1; }
    __device__ __forceinline__ int tile_step() const { return b.plan.flush ? 1 : 2; }
    __device__ __forceinline__ int number(int tile, int half) const {
        return tile * kTensorRows + b.lane() / 4 + 8 * half;
    }

    //! Addresses of this lane's rows of a tile; in place of rows that do not exist the newest, whose sums nobody reads.
    __device__ __forceinline__ void aim_ring(int tile) {
        const char* rows = b.slot + p.pool.ring_k + (b.group * p.pool.ring_rows * kRowBytes + b.lane() % 4 * 16);
        const float* norms = b.region<const float>(p.pool.ring_k_rnorm) + b.group * p.pool.scalar_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = b.committed_row(p.pool, max(min(number(tile, i), b.plan.committed - 1), 0));
            row_at[i] = rows + at * kRowBytes;
            norm_at[i] = norms + at;
            settle(row_at[i]);
            settle(norm_at[i]);
        }
    }
    __device__ __forceinline__ void load_ring() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has(i)) continue;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece)
                row[i][piece] = load_pack<uint32_t, 4>(row_at[i] + piece * 64);
            rnorm[i] = *norm_at[i];
        }
    }
    __device__ __forceinline__ void load_token() {
        if (b.warp() == 0) {
            q = load_pack<uint32_t, 2>(q_at);
            k = load_pack<uint32_t, 2>(k_at);
        }
        if (!multiplies() || b.plan.flush || first_tile() >= tiles()) return;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
            vector[piece] = load_pack<uint32_t, 4>(vector_at + piece * 64);
    }

    //! By warps 1 and 2, whose first tile is there: products of the ring's keys, or, in a folding step, the keys.
    __device__ __forceinline__ void multiply_keys() {
#pragma unroll 1
        for (int tile = first_tile(); tile < tiles(); tile += tile_step()) {
            if (tile != first_tile()) aim_ring(tile), load_ring();
            if (b.plan.flush) {
                store_keys(tile);
            } else {
                multiply_tile(tile);
            }
        }
    }
    __device__ __forceinline__ void store_keys(int tile) const {
        float* keys = reinterpret_cast<float*>(smem + p.shared.keys) + b.lane() % 4 * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = number(tile, i);
            if (!has(i) || j >= b.plan.committed) continue;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t low = row[i][piece].value[2 * h], high = row[i][piece].value[2 * h + 1];
                    const Pack<float, 4> out{__fmul_rn(low_bf16(low), rnorm[i]), __fmul_rn(high_bf16(low), rnorm[i]),
                        __fmul_rn(low_bf16(high), rnorm[i]), __fmul_rn(high_bf16(high), rnorm[i])};
                    store_pack(keys + j * Traits::kDstate + piece * 32 + h * 4, out);
                }
        }
    }
    __device__ __forceinline__ void multiply_tile(int tile) const {
        float2* dots = reinterpret_cast<float2*>(smem + p.shared.dots) + 1;
        float sums[2][4] = {}; // two chains of products; columns 0 and 1 are with the lanes of q = 0
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto &low = row[0][piece], &high = row[1][piece];
                const uint32_t a[4] = {
                    low.value[2 * h], high.value[2 * h], low.value[2 * h + 1], high.value[2 * h + 1]};
                mma(sums[h], a, vector[piece].value[2 * h], vector[piece].value[2 * h + 1]);
            }
        if (b.lane() % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = number(tile, i);
            if (j < b.plan.committed)
                dots[j] = make_float2(
                    (sums[0][2 * i] + sums[1][2 * i]) * rnorm[i], (sums[0][2 * i + 1] + sums[1][2 * i + 1]) * rnorm[i]);
        }
    }

    static __device__ __forceinline__ RowPieces<1> pieces(const Bits& bits) {
        return {
            {{low_bf16(bits.value[0]), high_bf16(bits.value[0]), low_bf16(bits.value[1]), high_bf16(bits.value[1])}}};
    }

    //! By warp 0: the token's key and query for products with the state, their norms, k to the ring.
    __device__ __forceinline__ void prepare_token() const {
        const RowPieces<1> key = pieces(k), query = pieces(q);
        float* vectors = reinterpret_cast<float*>(smem + p.shared.vectors);
        key.store(vectors, Traits::kDstate);
        query.store(vectors + Traits::kDstate, Traits::kDstate);
        const int at = b.append_row(p.pool, 0);
        if (b.first_of_group)
            store_pack(
                b.region<char>(p.pool.ring_k) + ((b.group * p.pool.ring_rows + at) * kRowBytes + b.lane() * 8), k);
        float sum[3] = {key.dot_part(key), query.dot_part(query), key.dot_part(query)};
        warp_sums(sum);
        const float k_norm = inverse_norm(sum[0], p.shape.qk_l2norm);
        const float q_norm = inverse_norm(sum[1], p.shape.qk_l2norm) * p.in.scale;
        if (b.lane() != 0) return;
        *reinterpret_cast<float2*>(smem + p.shared.norms) = make_float2(k_norm, q_norm);
        reinterpret_cast<float2*>(smem + p.shared.dots)[0].y = sum[2] * k_norm * q_norm;
        if (b.first_of_group) b.region<float>(p.pool.ring_k_rnorm)[b.group * p.pool.scalar_stride + at] = k_norm;
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
        constexpr int kRows = Traits::kRows;
        const int lane = Traits::Tile::lane_of(b.thread);
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
        write_row<Traits>(part, p, rows, b, item, norms, token.x, dots[0].y);
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
    HeadWeigher<Traits> weigher(b);
    HeadGateAddresses gates;
    SlotView view;
    bool certain = static_cast<int>(blockIdx.x) >= p.prefetch_blocks || !step.look_ahead(view);
    step.aim_token();
    if (weigher.has_head()) gates.aim_token(p, b, weigher.head(b));
    int fills = 0; // of the warp's part of the state buffer
#pragma unroll 1
    while (true) {
        if (certain) {
            wait_for_previous_kernels();
            step.read(view);
        }
        const int64_t slot = step.slot_of(view);
        if (!step.in_pool(slot)) {
            let_next_kernel_start();
            return write_zero_outputs<Traits>(p, b);
        }
        b.slot = p.pool.base + slot * p.pool.stride_bytes;
        b.plan = step.plan_of(view);
        if (step.multiplies()) step.aim_ring(step.first_tile());
        if (weigher.has_head()) gates.aim_slot(p, b, weigher.head(b), weigher.item(b) * kCopies);
        if (!certain) wait_for_previous_kernels();
        let_next_kernel_start();
        SlotView now = view;
        if (!certain) {
            step.template read_indices<false>(now);
            step.template read_cursor<false>(now, slot);
        }
        step.load_token();
        if (weigher.has_head()) gates.load(weigher.gates, p, b, weigher.head(b), Traits::kScaledState);
        if (step.multiplies() && step.first_tile() < step.tiles()) step.load_ring();
        start_rows<Traits>(p, smem, b, b.first_item, 0);
        ItemState<Traits>(p, b).copy(smem + p.shared.state, barrier, b.first_item, p.shape.window > 1 && !b.plan.flush);
        if (certain || now == view) break;
        wait_for_own_copies();
        WarpCopyBarrier::wait(barrier, fills++);
        __syncwarp();
        certain = true;
    }
    weigher.activate(p, b);
    if (b.warp() == 0) step.prepare_token();
    if (step.multiplies()) step.multiply_keys();
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
