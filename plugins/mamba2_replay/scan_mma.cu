#include "scan_mma.h"

#include "../common/launch.h"
#include "scan_mma_kernel.cuh"

#include <algorithm>

namespace replayssm {
namespace {

constexpr int kMaxHeadsPerBlock = 8; // a barrier each

//! dstate rounded up to what there is a kernel for.
int padded_dstate(int dstate) { return dstate <= 64 ? 64 : dstate <= 128 ? 128 : 256; }

ScanShared shared_layout(const Mamba2Shape& shape, int heads) {
    return ScanShared(padded_dstate(shape.dstate), heads * (shape.headdim / 16), heads);
}

//! Most heads that a block of this device takes; 0 if not even one fits.
int most_heads(const Mamba2Shape& shape) {
    const int warps = padded_dstate(shape.dstate) > 128 ? 8 : 16; // of 255 or 128 registers a thread
    const auto limit = static_cast<uint32_t>(device_limits().block_shared_bytes);
    int heads = std::min({warps / (shape.headdim / 16), kMaxHeadsPerBlock, shape.heads_per_group});
    while (heads > 0 && shared_layout(shape, heads).bytes > limit)
        --heads;
    return heads;
}

int blocks_per_group(const Mamba2Shape& shape, int heads) { return (shape.heads_per_group + heads - 1) / heads; }

//! Fewer heads a block while multiprocessors would have none, and where as many blocks do with fewer.
int choose_heads(const Mamba2ScanParams& p) {
    const int64_t groups = static_cast<int64_t>(p.sequences) * p.shape.ngroups;
    int heads = most_heads(p.shape);
    while (heads > 1 && groups * blocks_per_group(p.shape, heads) < device_limits().multiprocessors)
        --heads;
    while (heads > 1 && blocks_per_group(p.shape, heads - 1) == blocks_per_group(p.shape, heads))
        --heads;
    return heads;
}

template <int kN, bool kWarpgroup, int kWarpsPerHead = 0>
void launch_variant(const ScanMmaParams& params, cudaStream_t stream) {
    const Mamba2Shape& shape = params.scan.shape;
    const dim3 grid(shape.ngroups * params.blocks_per_group, params.scan.sequences);
    const uint32_t bytes = kWarpgroup ? ScanShared(kN, 16, 4).bytes : params.shared.bytes;
    launch<mamba2_scan_mma_kernel<ScanTraits<kN, kWarpgroup, kWarpsPerHead>>>(
        "mamba2_scan", grid, params.heads * shape.headdim * 2, bytes, stream, params);
}

} // namespace

bool has_scan_mma(const Mamba2ScanParams& p, int act_dtype) {
    const Mamba2Inputs& in = p.in;
    const bool strides_fit = fits_31_bits(in.x) && fits_31_bits(in.B) && fits_31_bits(in.C) && fits_31_bits(in.z) &&
        fits_31_bits(in.y) && fits_31_bits(in.dt);
    return act_dtype == REPLAYSSM_BFLOAT16 && strides_fit && most_heads(p.shape) > 0;
}

void launch_scan_mma(const Mamba2ScanParams& p, int state_dtype, cudaStream_t stream) {
    const Mamba2Shape& shape = p.shape;
    const int heads = choose_heads(p), warps_per_head = shape.headdim / 16;
    const ScanMmaParams params{
        p, shared_layout(shape, heads), state_dtype, heads, warps_per_head, blocks_per_group(shape, heads)};
    switch (padded_dstate(shape.dstate)) {
        case 64: return launch_variant<64, false>(params, stream);
        case 128:
            if (warps_per_head == 4 && device_limits().warpgroups) return launch_variant<128, true, 4>(params, stream);
            if (warps_per_head == 8 && device_limits().warpgroups) return launch_variant<128, true, 8>(params, stream);
            return launch_variant<128, false>(params, stream);
        default: return launch_variant<256, false>(params, stream);
    }
}

} // namespace replayssm
