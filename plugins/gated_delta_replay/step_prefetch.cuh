//! What a block of the first wave has the L2 fetch while the kernels in front of this one still run: its tokens' rows,
//! its first state, its live ring rows (common/prefetch.cuh).
#pragma once

#include "../common/prefetch.cuh"
#include "step_parts.cuh"

namespace replayssm {

//! By the block, for V = K = 128 and 16-bit activations. Of `b` there is all that does not follow from slot and cursor.
template <class Traits>
struct InputPrefetch {
    using state_t = typename Traits::state_t;
    static_assert(Traits::kTuned && sizeof(typename Traits::act_t) == 2, "lines of a row are counted for 256 bytes");
    const GatedDeltaStepParams& p;
    const DeltaBlock& b;
    int head;
    const char* slot;

    __device__ __forceinline__ InputPrefetch(const GatedDeltaStepParams& p, const DeltaBlock& b)
        : p(p), b(b), head(b.first_item / Traits::kParts), slot(nullptr) {}

    //! False: padding.
    __device__ __forceinline__ bool set_slot(int64_t index) {
        slot = p.pool.base + index * p.pool.stride_bytes;
        return index >= 0 && index < p.pool.slots;
    }
    __device__ __forceinline__ const Cursor* cursor() const {
        return reinterpret_cast<const Cursor*>(slot + p.pool.cursor) + b.first_item * Traits::kCopies;
    }

    __device__ __forceinline__ void tokens() const {
        const auto at = [&](const StepTensor& tensor, int t, int index) {
            const int element = b.row * tensor.row + t * tensor.token + index * tensor.head;
            const int bytes = tensor.dtype == REPLAYSSM_FLOAT32 ? 4 : 2;
            return static_cast<const char*>(tensor.data) + static_cast<int64_t>(element) * bytes;
        };
        constexpr int kPieces = 8;
        for (int i = b.thread; i < b.tokens * kPieces; i += blockDim.x) {
            const int t = i / kPieces, piece = i % kPieces, line = piece % 2 * 128;
            prefetch_line(piece < 2 ? at(p.in.q, t, b.group) + line
                    : piece < 4     ? at(p.in.k, t, b.group) + line
                    : piece < 6     ? at(p.in.a, t, head) + (Traits::channels(p) ? line : 0)
                    : piece < 7     ? at(p.in.b, t, head)
                                    : at(p.in.v, t, head) + b.first_item % Traits::kParts * 128);
        }
    }

    __device__ __forceinline__ void state() const {
        const uint32_t item_bytes = b.part_rows * b.dstate * sizeof(state_t);
        if (b.lane() == 0)
            prefetch_block(slot + p.pool.state + static_cast<int64_t>(b.first_item) * item_bytes, item_bytes);
    }

    //! Cursor, the state's scale, and the ring's scalars, whichever rows are live.
    __device__ __forceinline__ void scalars() const {
        constexpr bool kScaled = Traits::kScaledState && Traits::kGate == Gate::kHead;
        for (int i = b.thread; i < (kScaled ? 5 : 4); i += blockDim.x) {
            const int64_t region = i == 0 ? p.pool.ring_k_rnorm : i == 1 ? p.pool.ring_beta : p.pool.ring_g;
            const int row = i == 0 ? b.group : head;
            if (i == 3) {
                prefetch_line(cursor());
            } else if (i == 4) {
                prefetch_line(slot + p.pool.state_scale + b.first_item * Traits::kCopies * 8);
            } else if (i < 2 || !Traits::channels(p)) {
                prefetch_line(slot + region + row * p.pool.scalar_stride * 4);
            }
        }
    }

    //! Live rows; a slot that nobody has reset may have any cursor.
    __device__ __forceinline__ void ring(const Cursor& cursor, int64_t accepted) const {
        const RingPlan plan = plan_step(cursor, accepted, b.tokens);
        const int origin = min(max(plan.origin, 0), p.pool.ring_rows - 1);
        const int rows = min(max(plan.committed, 0), p.committed_cap);
        const int units = Traits::channels(p) ? 7 : 3; // lines of a row: two of k, one of d or v, KDA's four of g
        const char* own = slot + (plan.flush ? p.pool.ring_v : p.pool.ring_d) + b.first_item % Traits::kParts * 128;
        for (int i = b.thread; i < rows * units; i += blockDim.x) {
            const int j = i / units, unit = i - j * units, row = ring_row(origin, j, p.pool.ring_rows);
            prefetch_line(unit < 2 ? slot + p.pool.ring_k + (b.group * p.pool.ring_rows + row) * 256 + unit * 128
                    : unit == 2    ? own + (head * p.pool.ring_rows + row) * 256
                                   : slot + p.pool.ring_g + (head * p.pool.ring_rows + row) * 512 + (unit - 3) * 128);
        }
    }
};

//! By the block, before the wait for the kernels in front.
template <class Traits>
__device__ __forceinline__ void prefetch_inputs(const GatedDeltaStepParams& p, const DeltaBlock& b) {
    if (static_cast<int>(blockIdx.x) >= p.prefetch_blocks) return;
    InputPrefetch<Traits> fetch(p, b);
    const int64_t slot = peek_index(p.slots, b.row);
    const int64_t accepted = p.accepted.data != nullptr ? peek_index(p.accepted, b.row) : -1;
    fetch.tokens();
    if (!fetch.set_slot(slot)) return;
    if (b.warp() == 0) fetch.state();
    const auto cursor = peek<Cursor>(fetch.cursor());
    fetch.scalars();
    fetch.ring(cursor, accepted);
}

} // namespace replayssm
