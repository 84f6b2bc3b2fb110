#include "scan_chunk.h"

#include "../common/launch.h"
#include "scan_chunk_kernel.cuh"

#include <algorithm>

namespace replayssm {
namespace {

using namespace delta_scan;

//! dstate rounded up to what there is a kernel for.
int padded_dstate(int dstate) { return dstate <= 64 ? 64 : 128; }

//! How a head's rows are cut into blocks of equal size. Two warps are the least, which compute the gates of 64 tokens.
struct Cut {
    int blocks = 1;
    int warps = 2;
};

Cut cut_head(const GatedDeltaScanParams& p, int most_warps, bool warpgroups) {
    const int strips = p.shape.headdim / 16;
    Cut cut;
    cut.blocks = (strips + most_warps - 1) / most_warps;
    cut.warps = std::max((strips + cut.blocks - 1) / cut.blocks, 2);
    if (warpgroups) cut.warps = (cut.warps + 3) / 4 * 4;
    return cut;
}

//! Half as many rows a block while multiprocessors would have none.
Cut choose_cut(const GatedDeltaScanParams& p, bool warpgroups) {
    const Cut wide = cut_head(p, kMaxChunkWarps, warpgroups);
    const int64_t blocks = static_cast<int64_t>(p.sequences) * p.shape.nheads * wide.blocks;
    return blocks * 2 > device_limits().multiprocessors ? wide : cut_head(p, kMaxChunkWarps / 2, warpgroups);
}

template <int kN, bool kWarpgroup>
void launch_variant(const ChunkParams& params, int warps, cudaStream_t stream) {
    const dim3 grid(params.scan.shape.nheads * params.blocks_per_head, params.scan.sequences);
    launch<gated_delta_scan_chunk_kernel<ChunkTraits<kN, kWarpgroup>>>(
        "gated_delta_scan", grid, warps * kWarp, params.shared.bytes, stream, params);
}

} // namespace

bool has_scan_chunk(const GatedDeltaScanParams& p, int act_dtype) {
    const GatedDeltaShape& shape = p.shape;
    if (shape.channel_gates || act_dtype != REPLAYSSM_BFLOAT16 || !shape.qk_l2norm) return false;
    if (shape.dstate > 128 || shape.headdim % 16 != 0) return false;
    const auto& in = p.in;
    if (!fits_31_bits(in.q) || !fits_31_bits(in.k) || !fits_31_bits(in.v) || !fits_31_bits(in.o)) return false;
    const ChunkShared shared(padded_dstate(shape.dstate), kMaxChunkWarps);
    return shared.bytes <= static_cast<uint32_t>(device_limits().block_shared_bytes);
}

void launch_scan_chunk(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    const bool warpgroups = device_limits().warpgroups;
    const Cut cut = choose_cut(p, warpgroups);
    const int padded = padded_dstate(p.shape.dstate);
    const ChunkParams params{p, ChunkShared(padded, cut.warps), state_dtype, cut.blocks};
    if (padded == 64) {
        return warpgroups ? launch_variant<64, true>(params, cut.warps, stream)
                          : launch_variant<64, false>(params, cut.warps, stream);
    }
    return warpgroups ? launch_variant<128, true>(params, cut.warps, stream)
                      : launch_variant<128, false>(params, cut.warps, stream);
}

} // namespace replayssm
