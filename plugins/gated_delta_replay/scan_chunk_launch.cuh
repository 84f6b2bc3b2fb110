//! Launch of the chunked scans; scan_chunk_gdn.cu and scan_chunk_kda.cu instantiate it.
#pragma once

#include "../common/launch.h"
#include "scan_chunk.h"
#include "scan_chunk_kernel.cuh"

#include <algorithm>

namespace replayssm {

//! How a head's rows are cut into blocks of equal size, a multiple of `sharers` of them: at most `most` warps of rows, a
//! multiple of `step`.
struct ChunkCut {
    int blocks;
    int consumers;
    bool apart = false;

    ChunkCut(int headdim, int sharers, int most, int step) {
        const int strips = headdim / 16;
        blocks = (strips + most * sharers - 1) / (most * sharers) * sharers;
        consumers = ((strips + blocks - 1) / blocks + step - 1) / step * step;
    }
};

//! Half as many rows a block while multiprocessors would have none; GDN: a quarter, where there are enough of them for
//! every block.
template <class Traits>
ChunkCut choose_chunk_cut(const GatedDeltaScanParams& p) {
    const int64_t heads = static_cast<int64_t>(p.sequences) * p.shape.nheads;
    const int multiprocessors = device_limits().multiprocessors;
    ChunkCut narrow(p.shape.headdim, 1, delta_scan::kConsumersApart, 1);
    narrow.apart = true;
    const bool fits = narrow.blocks <= kCursorCopies && heads * narrow.blocks <= multiprocessors;
    if (!Traits::kChannels && fits) return narrow;
    const ChunkCut wide(p.shape.headdim, 1, Traits::kMostConsumers, Traits::kConsumerStep);
    if (heads * wide.blocks * 2 > multiprocessors) return wide;
    return ChunkCut(p.shape.headdim, 1, Traits::kMostConsumers / 2, Traits::kConsumerStep);
}

//! Whether two neighbouring channels can be one load: dense, every token's head begins on the size of two elements.
inline bool has_gate_pairs(const replayssm_tensor& a) {
    const auto even = [](int64_t stride) { return stride % 2 == 0; };
    return a.data != nullptr && a.strides[3] == 1 && even(a.strides[1]) && even(a.strides[2]) &&
        reinterpret_cast<uintptr_t>(a.data) % (2 * dtype_bytes(a.dtype)) == 0;
}

template <class Traits>
void launch_chunk_kernel(const GatedDeltaScanParams& p, const ChunkCut& cut, int state_dtype, cudaStream_t stream) {
    const delta_scan::ChunkParams params{
        p, Traits::shared(cut.consumers), state_dtype, cut.blocks, cut.consumers, has_gate_pairs(p.in.a), cut.apart};
    const int warps = cut.apart ? delta_scan::kWarpsApart : cut.consumers + Traits::kProducers + Traits::kFinishers;
    launch<gated_delta_scan_chunk_kernel<Traits>>("gated_delta_scan", dim3(p.shape.nheads * cut.blocks, p.sequences),
        warps * kWarp, params.shared.bytes, stream, params, false, Traits::kSharers);
}

//! KDA, while multiprocessors would have none, too: two blocks of a head share what takes longest, if there are clusters.
template <int kN, bool kChannels>
void launch_chunks_of(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    if constexpr (kChannels) {
        using Shared = delta_scan::ChunkTraits<kN, true, 2>;
        const ChunkCut cut(p.shape.headdim, Shared::kSharers, Shared::kMostConsumers, Shared::kConsumerStep);
        const DeviceLimits limits = device_limits();
        const bool fits = static_cast<int64_t>(p.sequences) * p.shape.nheads * cut.blocks <= limits.multiprocessors &&
            Shared::shared().bytes <= static_cast<uint32_t>(limits.block_shared_bytes);
        if (limits.clusters && fits) return launch_chunk_kernel<Shared>(p, cut, state_dtype, stream);
    }
    using Traits = delta_scan::ChunkTraits<kN, kChannels>;
    launch_chunk_kernel<Traits>(p, choose_chunk_cut<Traits>(p), state_dtype, stream);
}

template <bool kChannels>
void launch_chunks(const GatedDeltaScanParams& p, int state_dtype, cudaStream_t stream) {
    if (p.shape.dstate <= 64) return launch_chunks_of<64, kChannels>(p, state_dtype, stream);
    launch_chunks_of<128, kChannels>(p, state_dtype, stream);
}

} // namespace replayssm
