//! Scan of packed prompts, token by token: o for every token, the final state in the slot, an empty ring, a reset
//! cursor. GDN and KDA.
//!
//!   S <- exp(g_t) S;  d = beta_t (v_t - S kn_t);  S <- S + d kn_t^T;  o_t = S qn_t               docs/math.md 2.2, 2.3
//!
//! The fold is the step's own (DeltaTile::fold), so prefill(n) and one step leaves the bits that prefill(n + 1) leaves. Of
//! GDN it holds S' and its scale (fold.cuh); a 16-bit state has the scale in it after its ring rows, and at the end.
//! q, k [tokens, HK, K]; v, o [tokens, HV, V] act_t; a [tokens, HV] or [tokens, HV, K]; b [tokens, HV]; sequence i =
//! tokens cu_seqlens[i] .. [i+1]-1.
//! Grid (HV blocks per head, sequences): a block owns V kRows / 4 state rows of one head, 2 V threads, kRows state rows
//! per eight lanes; block i of a head has the copies i, i + blocks per head, ... of cursor and scale.
//! In batches of 16 tokens: raw rows arrive by asynchronous copies while the batch before is folded; warps turn them
//! into normalised fp32 rows, a token each.
//! Barriers: two a batch (raw rows are there, the batch before has been used; fp32 rows are there).
//! slot outside the pool: zero output for the sequence's tokens, no memory touched.
#pragma once

#include "../common/async_copy.cuh"
#include "fold.cuh"
#include "scan_shared.h"

namespace replayssm {

//! The block's part of one head and the thread's part of that.
template <int kRows>
struct ScanPart {
    int head, part, rows; // rows: of the block
    __device__ __forceinline__ explicit ScanPart(const GatedDeltaShape& shape)
        : head(blockIdx.x / (kQuarters / kRows)), part(blockIdx.x % (kQuarters / kRows)),
          rows(shape.headdim * kRows / kQuarters) {}
    __device__ __forceinline__ static int lane() { return threadIdx.x & 7; }
    //! The thread's first state row, of the block.
    __device__ __forceinline__ static int own() { return (threadIdx.x >> 3) * kRows; }
};

//! What the fold needs of a batch of rows, in shared memory.
struct BatchRows {
    float* kn;           // [kScanBatch][K]
    float* qn;           // [kScanBatch][K]
    float* decays;       // [kScanBatch][K], KDA
    RowWeights* weights; // [kScanBatch]
};

__device__ __forceinline__ BatchRows batch_rows(char* smem, const DeltaScanShared& s) {
    return {reinterpret_cast<float*>(smem + s.kn), reinterpret_cast<float*>(smem + s.qn),
        reinterpret_cast<float*>(smem + s.decays), reinterpret_cast<RowWeights*>(smem + s.scalar)};
}

//! By the block's first warp: what folds the rows of a batch; lane j has exp(g) (GDN) and beta of row j < count. Moves
//! the state's scale (GDN) past the rows.
template <bool kChannels>
__device__ __forceinline__ void put_weights(RowWeights* weights, double& scale, float decay, float beta, int count) {
    const int j = threadIdx.x;
    const RowWeights own = kChannels ? channel_row(beta) : scale_rows(scale, j < count ? decay : 1.0f, beta, count);
    if (j < count) weights[j] = own;
}

//! By the block: raw rows of tokens base .. base + count - 1 begin their way to shared memory.
template <class act_t, int kRows>
__device__ __forceinline__ void copy_batch(
    const DeltaScanParams& params, char* smem, const ScanPart<kRows>& at, int64_t base, int count, int stage) {
    const GatedDeltaScanParams& p = params.scan;
    const DeltaScanShared& s = params.shared;
    const int pieces = p.shape.dstate * static_cast<int>(sizeof(act_t)) / 16, group = at.head / p.shape.heads_per_group;
    for (int i = threadIdx.x; i < count * pieces; i += blockDim.x) {
        const int t = i / pieces, piece = i - t * pieces;
        const auto row = [&](const replayssm_tensor& tensor) {
            return static_cast<const act_t*>(tensor.data) + (base + t) * tensor.strides[1] + group * tensor.strides[2];
        };
        copy_piece<16>(smem + s.raw_k + i * 16, reinterpret_cast<const char*>(row(p.in.k)) + piece * 16);
        copy_piece<16>(smem + s.raw_q + i * 16, reinterpret_cast<const char*>(row(p.in.q)) + piece * 16);
    }
    const int v_pieces = at.rows * static_cast<int>(sizeof(act_t)) / 8;
    for (int i = threadIdx.x; i < count * v_pieces; i += blockDim.x) {
        const int t = i / v_pieces, piece = i - t * v_pieces;
        const act_t* row = static_cast<const act_t*>(p.in.v.data) + (base + t) * p.in.v.strides[1] +
            at.head * p.in.v.strides[2] + at.part * at.rows;
        copy_piece<8>(smem + s.raw_v + stage * s.v_stage + i * 8, reinterpret_cast<const char*>(row) + piece * 8);
    }
    if (s.gate_pieces == 0) return;
    const int bytes = p.in.a.dtype == REPLAYSSM_FLOAT32 ? 4 : 2;
    for (int i = threadIdx.x; i < count * s.gate_pieces; i += blockDim.x) {
        const int t = i / s.gate_pieces, piece = i - t * s.gate_pieces;
        const char* row = static_cast<const char*>(p.in.a.data) +
            ((base + t) * p.in.a.strides[1] + at.head * p.in.a.strides[2]) * bytes;
        copy_piece<16>(smem + s.raw_a + i * 16, row + piece * 16);
    }
}

//! Gate (GDN) and beta of the thread's token of a batch, before their functions.
struct RawScalars {
    unsigned a = 0;
    unsigned b = 0;
};

template <bool kChannels>
__device__ __forceinline__ RawScalars load_scalars(const GatedDeltaScanParams& p, int head, int64_t base, int count) {
    RawScalars raw;
    const int t = threadIdx.x;
    if (t >= count) return raw;
    const GatedDeltaInputs& in = p.in;
    if (!kChannels) raw.a = load_bits(in.a.data, in.a.dtype, (base + t) * in.a.strides[1] + head * in.a.strides[2]);
    raw.b = load_bits(in.b.data, in.b.dtype, (base + t) * in.b.strides[1] + head * in.b.strides[2]);
    return raw;
}

//! By a warp: exp(g) of every channel of one token, from the raw gates of batch row t.
template <int kPieces>
__device__ __forceinline__ void channel_decays(const DeltaScanParams& params, const char* smem, int head, float rate,
    int64_t token, int t, RowPieces<kPieces>& out) {
    const GatedDeltaScanParams& p = params.scan;
    const replayssm_tensor &a = p.in.a, &bias = p.in.dt_bias;
    const int dstate = p.shape.dstate;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const int channel = out.channel(i) + v;
            if (channel >= dstate) continue;
            unsigned bits;
            if (params.shared.gate_pieces == 0) {
                bits = load_bits(a.data, a.dtype, token * a.strides[1] + head * a.strides[2] + channel * a.strides[3]);
            } else if (a.dtype == REPLAYSSM_FLOAT32) {
                bits = reinterpret_cast<const unsigned*>(smem + params.shared.raw_a)[t * dstate + channel];
            } else {
                bits = reinterpret_cast<const unsigned short*>(smem + params.shared.raw_a)[t * dstate + channel];
            }
            const float offset =
                __ldg(static_cast<const float*>(bias.data) + head * bias.strides[0] + channel * bias.strides[1]);
            out.value[i][v] = expf(gate_of(p.shape, rate, bits_to_float(bits, a.dtype), offset));
        }
}

//! By the block: raw rows into fp32 rows, a token a warp. scale: put_weights.
template <class act_t, int kPieces, bool kChannels>
__device__ __forceinline__ void convert_batch(const DeltaScanParams& params, char* smem, int head, float rate,
    const RawScalars& raw, int64_t base, int count, double& scale) {
    const GatedDeltaScanParams& p = params.scan;
    const DeltaScanShared& s = params.shared;
    const BatchRows rows = batch_rows(smem, s);
    const int dstate = p.shape.dstate;
    for (int t = threadIdx.x / kWarp; t < count; t += blockDim.x / kWarp) {
        RowPieces<kPieces> row;
        row.load(reinterpret_cast<const act_t*>(smem + s.raw_k) + t * dstate, dstate);
        row.scale(inverse_norm(row, p.shape.qk_l2norm));
        row.store(rows.kn + t * dstate, dstate);
        row.load(reinterpret_cast<const act_t*>(smem + s.raw_q) + t * dstate, dstate);
        row.scale(inverse_norm(row, p.shape.qk_l2norm));
        row.scale(p.in.scale);
        row.store(rows.qn + t * dstate, dstate);
        if (!kChannels) continue;
        channel_decays(params, smem, head, rate, base + t, t, row);
        row.store(rows.decays + t * dstate, dstate);
    }
    if (threadIdx.x >= kWarp) return;
    float decay = 1.0f;
    if (!kChannels && threadIdx.x < count) {
        const float bias = __ldg(static_cast<const float*>(p.in.dt_bias.data) + head * p.in.dt_bias.strides[0]);
        decay = expf(gate_of(p.shape, rate, bits_to_float(raw.a, p.in.a.dtype), bias));
    }
    put_weights<kChannels>(rows.weights, scale, decay, sigmoid(bits_to_float(raw.b, p.in.b.dtype)), count);
}

//! By the block: ring rows base .. base + count - 1 behind the origin, as fp32 rows and raw v. scale: put_weights.
template <class act_t, int kPieces, bool kChannels, int kRows>
__device__ __forceinline__ void convert_ring(const DeltaScanParams& params, char* smem, const ScanPart<kRows>& at,
    const char* slot, int origin, int base, int count, double& scale) {
    const GatedDeltaSlots& pool = params.scan.pool;
    const GatedDeltaShape& shape = params.scan.shape;
    const DeltaScanShared& s = params.shared;
    const BatchRows rows = batch_rows(smem, s);
    const int64_t group = at.head / shape.heads_per_group, R = pool.ring_rows, head = at.head;
    const int dstate = shape.dstate;
    const auto floats = [&](int64_t region) { return reinterpret_cast<const float*>(slot + region); };
    const auto ring_at = [&](int j) { return ring_row(origin, base + j, pool.ring_rows); };
    for (int j = threadIdx.x / kWarp; j < count; j += blockDim.x / kWarp) {
        RowPieces<kPieces> row;
        row.load(reinterpret_cast<const act_t*>(slot + pool.ring_k) + (group * R + ring_at(j)) * dstate, dstate);
        row.scale(floats(pool.ring_k_rnorm)[group * pool.scalar_stride + ring_at(j)]);
        row.store(rows.kn + j * dstate, dstate);
        if (!kChannels) continue;
        row.load(floats(pool.ring_g) + (head * R + ring_at(j)) * dstate, dstate);
        row.exponential().store(rows.decays + j * dstate, dstate);
    }
    act_t* v = reinterpret_cast<act_t*>(smem + s.raw_v);
    const act_t* ring_v = reinterpret_cast<const act_t*>(slot + pool.ring_v) + head * R * shape.headdim;
    for (int i = threadIdx.x; i < count * at.rows; i += blockDim.x)
        v[i] = ring_v[ring_at(i / at.rows) * shape.headdim + at.part * at.rows + i % at.rows];
    if (threadIdx.x >= kWarp) return;
    float decay = 1.0f, beta = 0.0f;
    if (threadIdx.x < count) {
        const int64_t scalar = head * pool.scalar_stride + ring_at(threadIdx.x);
        if (!kChannels) decay = expf(floats(pool.ring_g)[scalar]);
        beta = floats(pool.ring_beta)[scalar];
    }
    put_weights<kChannels>(rows.weights, scale, decay, beta, count);
}

//! Row t of the batch into the thread's state rows. Returns the scale behind it, GDN.
template <class act_t, bool kChannels, class Tile>
__device__ __forceinline__ float fold_batch_row(
    Tile& tile, const BatchRows& rows, const act_t* v, int block_rows, int own, int t, int lane, int dstate) {
    const DeltaRow row{rows.weights[t], rows.decays + t * dstate, rows.kn + t * dstate};
    tile.template fold<kChannels>(row, to_float(v[t * block_rows + own + Tile::fold_row(lane)]), lane, dstate);
    return row.weights.scale;
}

//! The tile between registers and a state of any dtype.
template <class state_t, int kDstate, int kRows>
__device__ __forceinline__ void load_as(
    DeltaTile<float, kDstate, kRows>& tile, const char* rows, int lane, int dstate) {
    DeltaTile<state_t, kDstate, kRows> other;
    other.load(rows, lane, dstate);
    memcpy(tile.S, other.S, sizeof(tile.S));
}
template <class state_t, int kDstate, int kRows>
__device__ __forceinline__ void store_as(
    const DeltaTile<float, kDstate, kRows>& tile, char* rows, int lane, int dstate) {
    DeltaTile<state_t, kDstate, kRows> other;
    memcpy(other.S, tile.S, sizeof(tile.S));
    other.store(rows, lane, dstate);
}

//! By the block, padding: zeros for the sequence's tokens.
template <class act_t, int kRows>
__device__ __forceinline__ void zero_sequence(
    const replayssm_tensor& o, const ScanPart<kRows>& at, int64_t begin, int64_t end) {
    act_t* first = static_cast<act_t*>(const_cast<void*>(o.data)) + at.head * o.strides[2] + at.part * at.rows;
    for (int64_t i = threadIdx.x; i < (end - begin) * at.rows; i += blockDim.x)
        first[(begin + i / at.rows) * o.strides[1] + i % at.rows] = from_float<act_t>(0.0f);
}

//! kDstate 0: any.
template <class act_t, int kDstate, int kRows, bool kChannels>
__global__ void __launch_bounds__(2 * kMaxHeadDim, 1)
    gated_delta_scan_kernel(const __grid_constant__ DeltaScanParams params) {
    using Tile = DeltaTile<float, kDstate, kRows>;
    constexpr int kPieces = kDstate != 0 && kDstate <= 128 ? 1 : 2;
    extern __shared__ __align__(128) char smem[];
    const GatedDeltaScanParams& p = params.scan;
    const DeltaScanShared& s = params.shared;
    const ScanPart<kRows> at(p.shape);
    const int lane = at.lane(), own = at.own(), dstate = kDstate != 0 ? kDstate : p.shape.dstate;
    const int64_t number = load_index(p.slots, blockIdx.y);
    const int64_t begin = load_index(p.cu_seqlens, blockIdx.y), end = load_index(p.cu_seqlens, blockIdx.y + 1);
    if (number < 0 || number >= p.pool.slots) return zero_sequence<act_t>(p.in.o, at, begin, end);
    const auto count_at = [&](int64_t base) {
        return static_cast<int>(base < end ? min(static_cast<int64_t>(kScanBatch), end - base) : 0);
    };
    copy_batch<act_t>(params, smem, at, begin, count_at(begin), 1);
    RawScalars raw = load_scalars<kChannels>(p, at.head, begin, count_at(begin));
    char* slot = p.pool.base + number * p.pool.stride_bytes;
    const int64_t first_row = static_cast<int64_t>(at.head) * p.shape.headdim + at.part * at.rows + own;
    char* state = slot + p.pool.state + first_row * dstate * params.state_bytes;
    Cursor* cursors = reinterpret_cast<Cursor*>(slot + p.pool.cursor) + at.head * kCursorCopies;
    const BatchRows rows = batch_rows(smem, s);
    const act_t* v = reinterpret_cast<const act_t*>(smem + s.raw_v);
    double* scales = reinterpret_cast<double*>(slot + p.pool.state_scale) + at.head * kCursorCopies;
    const bool scaled = !kChannels && p.pool.state_scale >= 0;
    double scale = 1.0;   // GDN: the state is this times the tile; the first warp's goes on, row by row
    float rounded = 1.0f; // every thread's
    Tile tile;
    tile.clear();
    if (p.has_initial != nullptr && p.has_initial[blockIdx.y]) {
        if (params.state_dtype == REPLAYSSM_FLOAT32) load_as<float>(tile, state, lane, dstate);
        if (params.state_dtype == REPLAYSSM_BFLOAT16) load_as<__nv_bfloat16>(tile, state, lane, dstate);
        if (params.state_dtype == REPLAYSSM_FLOAT16) load_as<__half>(tile, state, lane, dstate);
        const Cursor cursor = cursors[at.part];
        if (scaled) scale = scales[at.part];
        rounded = static_cast<float>(scale);
        const int live = cursor.history + cursor.pending;
        for (int base = 0; base < live; base += kScanBatch) {
            const int count = min(kScanBatch, live - base);
            convert_ring<act_t, kPieces, kChannels>(params, smem, at, slot, cursor.origin, base, count, scale);
            __syncthreads();
            for (int j = 0; j < count; ++j)
                rounded = fold_batch_row<act_t, kChannels>(tile, rows, v, at.rows, own, j, lane, dstate);
            __syncthreads();
        }
        if (!kChannels && !scaled) {
            tile.multiply(rounded);
            scale = rounded = 1.0f;
        }
    }
    const float rate =
        begin < end ? expf(__ldg(static_cast<const float*>(p.in.A_log.data) + at.head * p.in.A_log.strides[0])) : 0.0f;
    act_t* o = static_cast<act_t*>(const_cast<void*>(p.in.o.data)) + at.head * p.in.o.strides[2] + at.part * at.rows +
        own + Tile::template first_kept<1>(lane);
    int stage = 1;
    for (int64_t base = begin; base < end; base += kScanBatch, stage ^= 1) {
        const int count = count_at(base);
        wait_for_own_copies();
        __syncthreads(); // raw rows are there, the batch before has been used
        convert_batch<act_t, kPieces, kChannels>(params, smem, at.head, rate, raw, base, count, scale);
        __syncthreads(); // fp32 rows are there
        copy_batch<act_t>(params, smem, at, base + kScanBatch, count_at(base + kScanBatch), stage ^ 1);
        raw = load_scalars<kChannels>(p, at.head, base + kScanBatch, count_at(base + kScanBatch));
        const act_t* v_now = reinterpret_cast<const act_t*>(smem + s.raw_v + stage * s.v_stage);
        for (int t = 0; t < count; ++t) {
            rounded = fold_batch_row<act_t, kChannels>(tile, rows, v_now, at.rows, own, t, lane, dstate);
            float part[kRows];
            tile.template dot<1>(rows.qn + t * dstate, lane, dstate, part);
            Tile::template reduce<1>(part, lane);
            if (!kChannels) part[0] *= rounded;
            if (lane % Tile::template sharers<1>() == 0) o[(base + t) * p.in.o.strides[1]] = from_float<act_t>(part[0]);
        }
    }
    if (!kChannels && !scaled) tile.multiply(rounded);
    if (params.state_dtype == REPLAYSSM_FLOAT32) store_as<float>(tile, state, lane, dstate);
    if (params.state_dtype == REPLAYSSM_BFLOAT16) store_as<__nv_bfloat16>(tile, state, lane, dstate);
    if (params.state_dtype == REPLAYSSM_FLOAT16) store_as<__half>(tile, state, lane, dstate);
    __syncthreads(); // every thread has read cursor and scale
    if (threadIdx.x < kCursorCopies && threadIdx.x % (kQuarters / kRows) == at.part) {
        cursors[threadIdx.x] = reset_cursor(number, p.shape.window, p.shape.stagger);
        if (scaled) scales[threadIdx.x] = scale;
    }
}

} // namespace replayssm
