#include "scan_chunk.h"

#include "../common/launch.h"
#include "scan_chunk_tile.cuh"

using namespace replayssm;
using namespace replayssm::delta_scan;

namespace {

//! Most shared memory that a block may ask for.
uint32_t shared_bytes(const GatedDeltaShape& shape) {
    if (shape.channel_gates && shape.dstate <= 64) return ChunkTraits<64, true>::shared().bytes;
    if (shape.channel_gates) return ChunkTraits<128, true>::shared().bytes;
    if (shape.dstate <= 64) return ChunkTraits<64, false>::shared().bytes;
    return ChunkTraits<128, false>::shared().bytes;
}

} // namespace

bool replayssm::has_scan_chunk(const GatedDeltaScanParams& p, int act_dtype) {
    const GatedDeltaShape& shape = p.shape;
    if (act_dtype != REPLAYSSM_BFLOAT16 || !shape.qk_l2norm) return false;
    if (shape.dstate > 128 || shape.headdim % 16 != 0) return false;
    const auto& in = p.in;
    if (!fits_31_bits(in.q) || !fits_31_bits(in.k) || !fits_31_bits(in.v) || !fits_31_bits(in.o)) return false;
    return shared_bytes(shape) <= static_cast<uint32_t>(device_limits().block_shared_bytes);
}
