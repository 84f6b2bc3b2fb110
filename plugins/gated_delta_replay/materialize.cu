//! dst's state = src's state with the first `count` rows of its ring (committed, then pending) folded in; dst's ring is
//! empty.
//! Grid (4 HV, pairs): a block owns V / 4 state rows of one head of one pair. src = dst is allowed: a block reads all
//! that it needs of src's cursor and state before it writes dst's.
#include "../common/launch.h"
#include "ring_fold.cuh"

namespace replayssm {
namespace {

template <class act_t, class state_t>
__global__ void __launch_bounds__(kDeltaMaxThreads, 1)
    gated_delta_materialize_kernel(const __grid_constant__ GatedDeltaMaterializeParams p) {
    using Tile = DeltaTile<state_t, 0, 1>;
    extern __shared__ __align__(128) char smem[];
    const int quarter = blockIdx.x % kDeltaQuarter, head = blockIdx.x / kDeltaQuarter, pair = blockIdx.y;
    const int lane = threadIdx.x & 7, own = threadIdx.x >> 3, dstate = p.shape.dstate;
    const DeltaBatchShared s(p.shape);
    const int64_t src = load_index(p.src, pair), dst = load_index(p.dst, pair), count = load_index(p.count, pair);
    if (src < 0 || src >= p.pool.slots || dst < 0 || dst >= p.pool.slots) return;
    const char* from = p.pool.base + src * p.pool.stride_bytes;
    char* to = p.pool.base + dst * p.pool.stride_bytes;
    const int64_t state = p.pool.state +
        ((static_cast<int64_t>(head) * p.shape.headdim + quarter * s.block_rows + own) * dstate) * sizeof(state_t);
    const int64_t cursor_at = p.pool.cursor + (head * kCursorCopies + quarter) * sizeof(Cursor);
    const Cursor cursor = *reinterpret_cast<const Cursor*>(from + cursor_at);
    const int rows = clamp_count(count, cursor.history + cursor.pending);
    const bool scaled = p.pool.state_scale >= 0;
    const int64_t scale_at = p.pool.state_scale + (head * kCursorCopies + quarter) * sizeof(double);
    double scale = scaled ? *reinterpret_cast<const double*>(from + scale_at) : 1.0;
    Tile tile;
    tile.load(from + state, lane, dstate);
    const float rounded =
        fold_delta_ring<Tile, act_t>(tile, p.pool, p.shape, s, smem, from, head, quarter, cursor.origin, rows, scale);
    if (sizeof(state_t) < sizeof(float) && rounded != 1.0f) tile.multiply(rounded);
    tile.store(to + state, lane, dstate);
    __syncthreads(); // every thread has read cursor and scale
    if (threadIdx.x == 0) {
        *reinterpret_cast<Cursor*>(to + cursor_at) = reset_cursor(dst, p.shape.window, p.shape.stagger);
        if (scaled) *reinterpret_cast<double*>(to + scale_at) = scale;
    }
}

template <class act_t, class state_t>
void launch_kernel(const GatedDeltaMaterializeParams& p, cudaStream_t stream) {
    launch<gated_delta_materialize_kernel<act_t, state_t>>("materialize", dim3(p.shape.nheads * kDeltaQuarter, p.pairs),
        2 * p.shape.headdim, DeltaBatchShared(p.shape).bytes, stream, p);
}

template <class act_t>
void launch_act(const GatedDeltaMaterializeParams& p, int state_dtype, cudaStream_t stream) {
    switch (state_dtype) {
        case REPLAYSSM_FLOAT32: return launch_kernel<act_t, float>(p, stream);
        case REPLAYSSM_BFLOAT16: return launch_kernel<act_t, __nv_bfloat16>(p, stream);
        case REPLAYSSM_FLOAT16: return launch_kernel<act_t, __half>(p, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.state_dtype is ", dtype_name(state_dtype),
                "; materialize has float32, bfloat16 and float16");
    }
}

} // namespace

void launch_gated_delta_materialize(
    const GatedDeltaMaterializeParams& p, int state_dtype, int act_dtype, cudaStream_t stream) {
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_act<__nv_bfloat16>(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_act<__half>(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_act<float>(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; materialize has bfloat16, float16 and float32");
    }
}

} // namespace replayssm
