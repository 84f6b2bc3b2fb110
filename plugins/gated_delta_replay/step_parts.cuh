//! Parts of the step kernel: traits, what a block works on, rows of v and d, scalars and weights of ring rows.
#pragma once

#include "../common/async_copy.cuh"
#include "fold.cuh"

namespace replayssm {

//! Which gate a kernel is for: one per head (GDN), one per key channel (KDA), or what its parameters say.
enum class Gate { kHead, kChannel, kEither };

//! kTuned: V = K = 128, an item is half a head, staged in shared memory. Otherwise any size, an item is a quarter.
template <class act_t_, class state_t_, Gate kGate_, bool kTuned_, bool kOneToken_, int kGroups_ = 0>
struct DeltaTraits {
    using act_t = act_t_;
    using state_t = state_t_;
    static constexpr Gate kGate = kGate_;
    static constexpr bool kTuned = kTuned_;
    static constexpr bool kOneToken = kOneToken_;
    static constexpr int kDstate = kTuned ? 128 : 0;
    static constexpr int kParts = kTuned ? 2 : 4; // items of a head
    static constexpr int kGroups = kGroups_;      // of four tokens, where products are on tensor cores; else 0
    static constexpr bool kTensor = kGroups > 0;
    static constexpr bool kOwnWarps = kTuned && kGate == Gate::kHead; // each warp goes through the items on its own
    static constexpr bool kSingle = kOwnWarps && kOneToken;           // step_single.cuh
    static constexpr int kLanes = kTensor ? 4 : 8;                    // that share a state row
    static constexpr int kRows = kTensor ? 2 : kTuned ? 4 : 1;        // state rows of a thread
    static constexpr int kThreadsPerRow = kLanes / kRows;
    static constexpr int kBatchUnroll = kSingle ? 1 : kMaxWindow / kWarp; // of 32 ring rows; small code starts sooner
    static constexpr int kPieces = kTuned ? 1 : 2;
    static constexpr int kHeldRows = kTuned ? 4 : 1; // ring rows of k that a warp has on their way
    static constexpr int kCopies = kCursorCopies / kParts;
    static constexpr int kAccess = kTuned ? 16 / sizeof(act_t) : 4; // elements of one access to a row of v or d
    static constexpr int kRegisters = 128;
    static constexpr bool kScaledState = std::is_same_v<state_t, float>; // GDN's: the slot has a scale
    using Tile = DeltaTile<state_t, kDstate, kRows, kLanes>;
    using Pieces = RowPieces<kPieces>;

    static __device__ __forceinline__ bool channels(const GatedDeltaStepParams& p) {
        return kGate == Gate::kEither ? p.shape.channel_gates : kGate == Gate::kChannel;
    }
};

constexpr int kWarpStateRows = 16; // of a warp in a tuned kernel

//! What a block knows about its work once the cursor is there.
struct DeltaBlock {
    char* slot; // its first byte
    RingPlan plan;
    int thread, warp_index, row, first_item, items, group, tokens, dstate, part_rows;
    bool first_of_group; // appends k and its norm

    __device__ __forceinline__ int lane() const { return thread & (kWarp - 1); }
    __device__ __forceinline__ int warp() const { return warp_index; }
    //! Ring row that token t is appended to.
    __device__ __forceinline__ int append_row(const GatedDeltaSlots& pool, int t) const {
        return ring_row(ring_row(plan.origin, plan.committed, pool.ring_rows), t, pool.ring_rows);
    }
    __device__ __forceinline__ int committed_row(const GatedDeltaSlots& pool, int j) const {
        return ring_row(plan.origin, j, pool.ring_rows);
    }
    //! A region of the slot as T.
    template <class T>
    __device__ __forceinline__ T* region(int64_t offset) const {
        return reinterpret_cast<T*>(slot + offset);
    }
};

__device__ __forceinline__ int divided(int n, const Divisor& by) {
    if (by.multiplier == 0) return n;
    const int quotient = static_cast<int>(__umulhi(static_cast<uint32_t>(n), by.multiplier));
    return quotient * static_cast<int>(by.value) > n ? quotient - 1 : quotient;
}

//! Which row and items this block has.
__device__ __forceinline__ void find_items(const GatedDeltaStepParams& p, DeltaBlock& b) {
    int index = blockIdx.x, segment = 0;
#pragma unroll
    for (int i = 0; i < kGatedDeltaSegments - 1; ++i) {
        if (segment == i && index >= p.segments[i].blocks) {
            index -= p.segments[i].blocks;
            ++segment;
        }
    }
    const GatedDeltaSegment& cut = p.segments[segment];
    const int row = divided(index, cut.blocks_per_row);
    b.row = cut.first_row + row;
    b.items = cut.items;
    b.first_item = (index - row * static_cast<int>(cut.blocks_per_row.value)) * cut.items;
    b.group = divided(b.first_item, p.items_per_group);
    b.first_of_group = b.first_item == b.group * static_cast<int>(p.items_per_group.value);
}

template <class Traits>
__device__ __forceinline__ void write_zero_outputs(const GatedDeltaStepParams& p, const DeltaBlock& b) {
    using act_t = typename Traits::act_t;
    act_t* o = static_cast<act_t*>(const_cast<void*>(p.in.o.data)) + b.row * p.in.o.row;
    const int per_token = b.items * b.part_rows;
    for (int i = b.thread; i < p.tokens * per_token; i += blockDim.x) {
        const int t = i / per_token, item = b.first_item + i % per_token / b.part_rows;
        const int head = item / Traits::kParts, at = item % Traits::kParts * b.part_rows + i % b.part_rows;
        o[t * p.in.o.token + head * p.in.o.head + at] = from_float<act_t>(0.0f);
    }
}

//! Start the copies of an item's rows: v of the tokens, then of the ring d, or v where this step folds. By the block,
//! or by every warp for its own state rows.
template <class Traits>
__device__ __forceinline__ void start_rows(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, int item, int buffer) {
    using act_t = typename Traits::act_t;
    constexpr int kAccess = Traits::kAccess;
    constexpr int kTunedRows = Traits::kOwnWarps ? kWarpStateRows : 64;
    const int per_row = Traits::kTuned ? kTunedRows / kAccess : b.part_rows / kAccess;
    const int first = Traits::kOwnWarps ? b.warp() * kWarpStateRows : 0;
    const int start = Traits::kOwnWarps ? b.lane() : b.thread, threads = Traits::kOwnWarps ? kWarp : blockDim.x;
    const int V = Traits::kTuned ? 128 : p.shape.headdim;
    const int head = item / Traits::kParts, offset = item % Traits::kParts * b.part_rows + first;
    const act_t* v = static_cast<const act_t*>(p.in.v.data) + (b.row * p.in.v.row + head * p.in.v.head + offset);
    const act_t* ring =
        b.region<const act_t>(b.plan.flush ? p.pool.ring_v : p.pool.ring_d) + (head * p.pool.ring_rows * V + offset);
    char* target = smem + p.shared.rows + buffer * p.shared.rows_cap * p.shared.row_bytes + first * sizeof(act_t);
    for (int i = start; i < (b.tokens + b.plan.committed) * per_row; i += threads) {
        const int r = i / per_row, at = (i - r * per_row) * kAccess;
        const act_t* source = r < b.tokens ? v + r * p.in.v.token : ring + b.committed_row(p.pool, r - b.tokens) * V;
        copy_piece<kAccess * sizeof(act_t)>(target + r * p.shared.row_bytes + at * sizeof(act_t), source + at);
    }
}

//! What one warp needs to weigh the rows of a head, loaded long before: lane t has token t, lane j ring rows j and j +
//! 32; all have the scale of the state in the slot. KDA's g is elsewhere.
struct HeadGates {
    unsigned a_bits, b_bits;
    float A_log, bias;
    float g, beta; // of token t; 0 in the other lanes
    float ring_g[kMaxWindow / kWarp], ring_beta[kMaxWindow / kWarp];
    double scale = 1.0;

    __device__ __forceinline__ void load_tokens(
        const GatedDeltaStepParams& p, const DeltaBlock& block, int head, bool channels) {
        const int t = block.lane();
        if (t >= block.tokens) return;
        b_bits = load_bits(p.in.b.data, p.in.b.dtype, block.row * p.in.b.row + t * p.in.b.token + head * p.in.b.head);
        if (channels) return;
        a_bits = load_bits(p.in.a.data, p.in.a.dtype, block.row * p.in.a.row + t * p.in.a.token + head * p.in.a.head);
        A_log = __ldg(static_cast<const float*>(p.in.A_log.data) + head * p.in.A_log.head);
        bias = __ldg(static_cast<const float*>(p.in.dt_bias.data) + head * p.in.dt_bias.head);
    }

    //! From the raw values of the tokens to g and beta.
    __device__ __forceinline__ void activate(const GatedDeltaStepParams& p, const DeltaBlock& block, bool channels) {
        g = beta = 0.0f;
        if (block.lane() >= block.tokens) return;
        beta = sigmoid(bits_to_float(b_bits, p.in.b.dtype));
        if (!channels) g = gate_of(p.shape, expf(A_log), bits_to_float(a_bits, p.in.a.dtype), bias);
    }

    //! The item's copy; waits for the slot alone.
    __device__ __forceinline__ void load_scale(const GatedDeltaStepParams& p, const DeltaBlock& block, int copy) {
        scale = block.region<const double>(p.pool.state_scale)[copy];
    }

    __device__ __forceinline__ void load_ring(
        const GatedDeltaStepParams& p, const DeltaBlock& block, int head, bool channels) {
        const float* ring = block.region<const float>(p.pool.ring_g) + head * p.pool.scalar_stride;
        const float* betas = block.region<const float>(p.pool.ring_beta) + head * p.pool.scalar_stride;
#pragma unroll
        for (int i = 0; i < kMaxWindow / kWarp; ++i)
            load_ring_batch(p, block, i, ring, betas, channels);
    }
    __device__ __forceinline__ void load_ring_batch(const GatedDeltaStepParams& p, const DeltaBlock& block, int i,
        const float* ring, const float* betas, bool channels) {
        const int j = i * kWarp + block.lane();
        ring_g[i] = ring_beta[i] = 0.0f;
        if (j >= block.plan.committed) return;
        const int row = block.committed_row(p.pool, j);
        if (!channels) ring_g[i] = ring[row];
        if (block.plan.flush) ring_beta[i] = betas[row];
    }
};

//! GDN, one token: where those numbers are, worked out before they may be read.
struct HeadGateAddresses {
    const void *a_at, *b_at;
    const float *A_log_at, *bias_at, *g_at, *beta_at;
    const double* scale_at;

    __device__ __forceinline__ void aim_token(const GatedDeltaStepParams& p, const DeltaBlock& block, int head) {
        a_at = element_at(p.in.a.data, p.in.a.dtype, block.row * p.in.a.row + head * p.in.a.head);
        b_at = element_at(p.in.b.data, p.in.b.dtype, block.row * p.in.b.row + head * p.in.b.head);
        A_log_at = static_cast<const float*>(p.in.A_log.data) + head * p.in.A_log.head;
        bias_at = static_cast<const float*>(p.in.dt_bias.data) + head * p.in.dt_bias.head;
        settle(a_at);
        settle(b_at);
        settle(A_log_at);
        settle(bias_at);
    }
    //! copy: of the scale. Of the lane's first ring row; row 0's where there is none.
    __device__ __forceinline__ void aim_slot(
        const GatedDeltaStepParams& p, const DeltaBlock& block, int head, int copy) {
        scale_at = block.region<const double>(p.pool.state_scale) + copy;
        const int row = block.lane() < block.plan.committed ? block.committed_row(p.pool, block.lane()) : 0;
        const int at = head * p.pool.scalar_stride + row;
        g_at = block.region<const float>(p.pool.ring_g) + at;
        beta_at = block.region<const float>(p.pool.ring_beta) + at;
        settle(scale_at);
        settle(g_at);
        settle(beta_at);
    }

    __device__ __forceinline__ void load(
        HeadGates& gates, const GatedDeltaStepParams& p, const DeltaBlock& block, int head, bool scaled) const {
        if (block.lane() == 0) {
            gates.b_bits = load_bits(b_at, p.in.b.dtype);
            gates.a_bits = load_bits(a_at, p.in.a.dtype);
            gates.A_log = __ldg(A_log_at);
            gates.bias = __ldg(bias_at);
        }
        if (scaled) gates.scale = *scale_at;
        static_assert(kMaxWindow == 2 * kWarp, "two batches of ring rows");
        gates.ring_g[0] = gates.ring_beta[0] = gates.ring_g[1] = gates.ring_beta[1] = 0.0f;
        if (block.lane() >= block.plan.committed) return;
        gates.ring_g[0] = *g_at;
        if (block.plan.flush) gates.ring_beta[0] = *beta_at;
        if (block.plan.committed > kWarp)
            gates.load_ring_batch(p, block, 1, block.region<const float>(p.pool.ring_g) + head * p.pool.scalar_stride,
                block.region<const float>(p.pool.ring_beta) + head * p.pool.scalar_stride, false);
    }
};

//! Where a weight of ring row j for vector n lies: lane 4 g + q of a product reads the 16 bytes of vector g's rows 2 q,
//! 2 q + 1, 2 q + 8 and 2 q + 9, first terms, then second ones.
__device__ __forceinline__ char* tensor_weight(char* weights, int groups, int j, int n) {
    const int tile = j / kTensorRows, q = j % 8 / 2;
    return weights + ((tile * groups * 8 + n) * 4 + q) * 16 + j % kTensorRows / 8 * 4 + j % 2 * 2;
}
__device__ __forceinline__ void put_tensor_weight(char* weights, int groups, int j, int n, float value) {
    char* const at = tensor_weight(weights, groups, j, n);
    const __nv_bfloat16 first = __float2bfloat16_rn(value);
    *reinterpret_cast<__nv_bfloat16*>(at) = first;
    *reinterpret_cast<__nv_bfloat16*>(at + 8) = __float2bfloat16_rn(value - __bfloat162float(first));
}

//! By one warp, in a folding step: what folds the committed rows. The scale of the state that comes of it goes into the
//! slot, to the copies of the block's items of the head, from `item` on; returns it in fp32.
template <class Traits>
__device__ __forceinline__ float weigh_fold(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, int item, int buffer, const HeadGates& gates) {
    const int at = buffer * p.shared.committed_cap;
    double scale = gates.scale;
#pragma unroll Traits::kBatchUnroll
    for (int i = 0; i < kMaxWindow / kWarp; ++i) {
        const int j = i * kWarp + b.lane();
        if (i * kWarp >= b.plan.committed) continue;
        const float g = i == 0 ? gates.ring_g[0] : gates.ring_g[1];
        const float beta = i == 0 ? gates.ring_beta[0] : gates.ring_beta[1];
        if (Traits::channels(p)) {
            if (j < b.plan.committed) reinterpret_cast<float*>(smem + p.shared.fold)[at + j] = beta;
            continue;
        }
        const int count = min(b.plan.committed - i * kWarp, kWarp);
        RowWeights own = scale_rows(scale, expf(g), beta, count);
        if constexpr (Traits::kSingle) own.end = i * kWarp + next_renewal(own, count);
        if (j < b.plan.committed) reinterpret_cast<RowWeights*>(smem + p.shared.fold)[at + j] = own;
    }
    if (Traits::channels(p) || !Traits::kScaledState) return 1.0f;
    if (b.lane() < min(b.items, Traits::kParts) * Traits::kCopies)
        b.region<double>(p.pool.state_scale)[item * Traits::kCopies + b.lane()] = scale;
    return static_cast<float>(scale);
}

//! By one warp, for one head: beta of the tokens; what folds the committed rows; GDN: the decays from every row to
//! every token (times the dot products where there are several tokens). Appends beta and GDN's g where the block has
//! the head's first part. Exponents are plain sums of g <= 0; the decay up to the step and the one within it are
//! multiplied.
template <class Traits>
__device__ __forceinline__ void weigh_rows(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, int item, int buffer, const HeadGates& gates) {
    const bool channels = Traits::channels(p);
    const int lane = b.lane(), tokens = Traits::kOneToken ? 1 : b.tokens, stride = p.shared.dot_stride;
    float2* token = reinterpret_cast<float2*>(smem + p.shared.token) + buffer * tokens;
    const float2* dots = reinterpret_cast<const float2*>(smem + p.shared.dots);
    float* decays = reinterpret_cast<float*>(smem + p.shared.weights) + buffer * p.shared.rows_cap;
    const int kept_rows = Traits::kTensor ? tokens : p.shared.rows_cap;
    float2* weights = reinterpret_cast<float2*>(smem + p.shared.weights) + buffer * kept_rows * stride;

    if (lane < tokens && item % Traits::kParts == 0) {
        const int at = item / Traits::kParts * p.pool.scalar_stride + b.append_row(p.pool, lane);
        b.region<float>(p.pool.ring_beta)[at] = gates.beta;
        if (!channels) b.region<float>(p.pool.ring_g)[at] = gates.g;
    }
    float up_to = gates.g; // lane t: g of tokens 0..t, then its exp
    if (!Traits::kOneToken && !channels) {
#pragma unroll
        for (int d = 1; d < kMaxSpecLen; d *= 2) {
            const float other = __shfl_up_sync(kFullMask, up_to, d);
            if (lane >= d) up_to += other;
        }
    }
    if (!channels) up_to = expf(up_to);
    const float scale =
        b.plan.flush ? weigh_fold<Traits>(p, smem, b, item, buffer, gates) : static_cast<float>(gates.scale);
    float behind = 0.0f; // g of all rows behind this batch of 32
#pragma unroll Traits::kBatchUnroll
    for (int i = kMaxWindow / kWarp - 1; i >= 0; --i) {
        const int j = i * kWarp + lane;
        if (channels || i * kWarp >= b.plan.history) continue;
        float from = i == 0 ? gates.ring_g[0] : gates.ring_g[1]; // rows j.. of this batch; 0 in dead lanes
#pragma unroll
        for (int d = 1; d < kWarp; d *= 2) {
            if (d >= b.plan.committed - i * kWarp) break; // the others' g are 0
            const float other = __shfl_down_sync(kFullMask, from, d);
            if (lane + d < kWarp) from += other;
        }
        float after = __shfl_down_sync(kFullMask, from, 1);
        if (lane == kWarp - 1) after = 0.0f;
        const float since = expf(after + behind);
        for (int t = 0; t < tokens; ++t) {
            const float decay = since * __shfl_sync(kFullMask, up_to, t);
            if constexpr (Traits::kTensor) {
                char* ring = smem + p.shared.ring_weights + buffer * p.shared.ring_weight_bytes;
                const bool live = j < b.plan.committed;
                if (!live && j >= (b.plan.committed + kTensorRows - 1) / kTensorRows * kTensorRows) continue;
                const float2 dot = live ? dots[(tokens + j) * stride + t] : make_float2(0.0f, 0.0f);
                put_tensor_weight(ring, stride / 4, j, 2 * t, live ? decay * dot.x : 0.0f);
                put_tensor_weight(ring, stride / 4, j, 2 * t + 1, live ? decay * dot.y : 0.0f);
                continue;
            }
            if (j >= b.plan.committed) continue;
            if (Traits::kOneToken) {
                decays[1 + j] = decay;
            } else {
                const int at = (tokens + j) * stride + t;
                weights[at] = make_float2(decay * dots[at].x, decay * dots[at].y);
            }
        }
        behind += __shfl_sync(kFullMask, from, 0);
    }
    if (!Traits::kOneToken && !channels) {
        float since = 0.0f; // lane m: g of tokens m+1..t
        for (int t = 0; t < tokens; ++t) {
            const float at_t = __shfl_sync(kFullMask, gates.g, t);
            if (t > lane) since += at_t;
            if (lane > t) continue;
            const int at = lane * stride + t;
            const float decay = expf(since);
            weights[at] = make_float2(decay * dots[at].x, decay * dots[at].y);
        }
    }
    if constexpr (Traits::kTensor) {
        if (lane >= tokens) return;
        const float2 norm = reinterpret_cast<const float2*>(smem + p.shared.norms)[lane];
        const float decay = expf(behind) * up_to * scale;
        reinterpret_cast<float4*>(smem + p.shared.token)[buffer * stride + lane] =
            make_float4(gates.beta, decay * norm.x, decay * norm.y, 0.0f);
        return;
    }
    if (lane < tokens) token[lane] = make_float2(gates.beta, channels ? 1.0f : expf(behind) * up_to * scale);
}

} // namespace replayssm
