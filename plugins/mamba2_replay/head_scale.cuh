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

//! What a row of a fold needs: its ScaleStep, and 1 / scale, which multiplies what is added.
struct RowScale {
    float renew;
    float scale;
    float inverse;
};

//! By a warp: moves `scale` past 1 to 32 rows; lane j has the decay of row j, 1 where there is none. Returns what lane j's
//! row needs, as advance_scale would for one row after another (behind the rows: nothing to do, and the last scale).
//! end: the next row that renews, or count. Mostly no row renews: then that is one chain of products.
__device__ __forceinline__ RowScale advance_rows(double& scale, float decay, int count, int& end) {
    const int lane = threadIdx.x & (kWarp - 1);
    double own = scale; // behind the lane's row
    float renew = 1.0f;
    end = count;
#pragma unroll 1
    for (int first = 0; first < count;) {
        double product = scale;
#pragma unroll 4
        for (int j = first; j < count; ++j) {
            product = next_scale(product, __shfl_sync(kFullMask, decay, j));
            if (lane >= j) own = product;
        }
        scale = product;
        const unsigned leaves = __ballot_sync(kFullMask, lane >= first && lane < count && !scale_stays(own));
        if (leaves == 0) break;
        const int row = __ffs(static_cast<int>(leaves)) - 1;
        if (lane == row) renew = static_cast<float>(own);
        if (lane < row) end = min(end, row);
        if (lane >= row) own = 1.0;
        scale = 1.0;
        first = row + 1;
    }
    const float rounded = static_cast<float>(own);
    return {renew, rounded, __frcp_rn(rounded)};
}

} // namespace replayssm
