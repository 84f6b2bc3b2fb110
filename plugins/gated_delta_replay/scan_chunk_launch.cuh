//! Launch of the chunked scans; scan_chunk_gdn.cu and scan_chunk_kda.cu instantiate it.
#pragma once

#include "../common/launch.h"
#include "scan_chunk.h"
#include "scan_chunk_kernel.cuh"

#include <algorithm>

namespace replayssm {

//! How a head's rows are cut into blocks of equal size: at most `most` warps of them, a multiple of `step`.
struct ChunkCut {
    int blocks;
    int consumers;

    ChunkCut(int headdim, int most, int step) {
        const int strips = headdim / 16;
        blocks = (strips + most - 1) / most;
        consumers = ((strips + blocks - 1) / blocks + step - 1) / step * step;
    }
};

//! Half as many rows a block while multiprocessors would have none.
inline ChunkCut choose_chunk_cut(const GatedDeltaScanParams& p, int step) {
    const ChunkCut wide(p.shape.headdim, delta_scan::kMostConsumers, step);
    const int64_t blocks = static_cast<int64_t>(p.sequences) * p.shape.nheads * wide.blocks;
    if (blocks * 2 > device_limits().multiprocessors) return wide;
    return ChunkCut(p.shape.headdim, delta_scan::kMostConsumers / 2, step);
}

//! Whether two neighbouring channels can be one load: dense, every token's head begins on the size of two elements.
inline bool has_gate_pairs(const replayssm_tensor& a) {
    const auto even = [](int64_t stride) { return stride % 2 == 0; };
    return a.data != nullptr && a.strides[3] == 1 && even(a.strides[1]) && even(a.strides[2]) &&
        reinterpret_cast<uintptr_t>(a.data) % (2 * dtype_bytes(a.dtype)) == 0;
}

template <class Traits>
void launch_chunk_kernel(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    const ChunkCut cut = choose_chunk_cut(p, Traits::kConsumerStep);
    const delta_scan::ChunkParams params{
        p, Traits::shared(cut.consumers), state_dtype, cut.blocks, cut.consumers, has_gate_pairs(p.in.a)};
    launch<gated_delta_scan_chunk_kernel<Traits>>("gated_delta_scan", dim3(p.shape.nheads * cut.blocks, p.sequences),
        (cut.consumers + Traits::kProducers) * kWarp, params.shared.bytes, stream, params);
}

template <bool kChannels>
void launch_chunks(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    if (p.shape.dstate <= 64)
        return launch_chunk_kernel<delta_scan::ChunkTraits<64, kChannels>>(p, state_dtype, stream);
    launch_chunk_kernel<delta_scan::ChunkTraits<128, kChannels>>(p, state_dtype, stream);
}

} // namespace replayssm
