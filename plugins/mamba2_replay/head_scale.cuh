//! A head's scale: in the slot, and over the rows of a fold (common/state_scale.cuh).
#pragma once

#include "../common/cursor.cuh"
#include "../common/state_scale.cuh"
#include "params.h"

#include <type_traits>

namespace replayssm {

//! A head's scales in a slot with an fp32 state.
template <class Char>
__device__ __forceinline__ auto* state_scales(Char* slot, const Mamba2Slots& pool, int head) {
    using Double = std::conditional_t<std::is_const_v<Char>, const double, double>;
    return reinterpret_cast<Double*>(slot + pool.state_scale) + head * kCursorCopies;
}

//! By one warp: moves `scale` past 1 to 32 rows; lane j has the decay of row j, 1 where there is none. Returns what lane
//! j's row needs, as advance_scale would for one row after another (behind the rows: nothing to do, and the last scale).
//! end: the next row that renews, or count. Mostly no row renews: then that is a chain of products.
__device__ __forceinline__ ScaleStep advance_rows(double& scale, float decay, int count, int& end) {
    const int lane = threadIdx.x & (kWarp - 1);
    double product = scale, own = scale;
    end = count;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
        product = next_scale(product, __shfl_sync(kFullMask, decay, j));
        if (lane >= j) own = product;
    }
    if (__all_sync(kFullMask, scale_stays(own))) {
        scale = product;
        const float rounded = static_cast<float>(own);
        return {1.0f, rounded, __frcp_rn(rounded)};
    }
    double before = scale;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
        const bool renews = advance_scale(scale, __shfl_sync(kFullMask, decay, j)).renew != 1.0f;
        if (lane > j) before = scale;
        if (lane < j && renews) end = min(end, j);
    }
    return advance_scale(before, decay);
}

} // namespace replayssm
