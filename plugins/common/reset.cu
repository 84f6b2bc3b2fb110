//! Grid (pieces, count): the blocks of one slot share its bytes; the first one writes the cursors.
#include "cursor.cuh"
#include "launch.h"
#include "reset.h"

namespace replayssm {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 16;

__device__ void fill(char* bytes, int64_t count, float value) {
    const float4 vector = make_float4(value, value, value, value);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count / 16; i += step) {
        reinterpret_cast<float4*>(bytes)[i] = vector;
    }
}

__global__ void __launch_bounds__(kThreads) reset_kernel(const __grid_constant__ ResetParams p) {
    const int64_t index = load_index(p.slots, blockIdx.y);
    if (index < 0 || index >= p.pool.slots) return;
    char* slot = static_cast<char*>(p.pool.base) + index * p.pool.stride_bytes;
    fill(slot + p.state, p.state_bytes, 0.0f);
    if (p.copy >= 0) fill(slot + p.copy, p.copy_bytes, 0.0f);
    if (p.scale >= 0) fill(slot + p.scale, p.scale_bytes, 1.0f);
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < p.nheads * kCursorCopies; i += blockDim.x) {
        reinterpret_cast<Cursor*>(slot + p.cursor)[i] = reset_cursor(index, p.window, p.stagger);
        if (p.state_scale >= 0) reinterpret_cast<double*>(slot + p.state_scale)[i] = 1.0;
    }
}

} // namespace

void launch_reset(const ResetParams& params, cudaStream_t stream) {
    launch<reset_kernel>("reset", dim3(kPieces, params.count), kThreads, 0, stream, params);
}

} // namespace replayssm
