//! Launch chain of the append: unit of copying -> kernel.
#include "append.cuh"

#include "../common/launch.h"

namespace replayssm {
namespace {

template <class unit_t>
void run(const KvAppendParams& p, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(static_cast<int64_t>(p.rows) * p.tokens);
    launch<kv_append_kernel<unit_t>>("kv_append", dim3(blocks), kKvThreads, 0, stream, p);
}

} // namespace

int kv_append_unit(const KvAppendParams& p) {
    const auto bits = reinterpret_cast<uintptr_t>(p.new_kv) | reinterpret_cast<uintptr_t>(p.cache) |
        static_cast<uintptr_t>(p.head_bytes);
    for (int unit : {16, 8, 4}) {
        if (bits % unit == 0) return unit;
    }
    return 2;
}

void launch_kv_append(const KvAppendParams& p, cudaStream_t stream) {
    switch (kv_append_unit(p)) {
        case 16: return run<uint4>(p, stream);
        case 8: return run<uint2>(p, stream);
        case 4: return run<unsigned>(p, stream);
        default: return run<unsigned short>(p, stream);
    }
}

} // namespace replayssm
