//! What a fold multiplies by: of one row at a time by every thread, or of a batch by one warp for all that fold.
#pragma once

#include "../common/state_scale.cuh"

namespace replayssm {

//! A row's numbers in a fold; 16 bytes, one access.
struct alignas(16) RowWeights {
    float scale;  // GDN: of the state behind the row
    float weight; // beta; GDN: beta / scale
    float renew;  // GDN: what the state's elements are multiplied by; 1: nothing to do
    int end;      // GDN, where asked for (next_renewal): the next row that renews, or the number of rows
};

//! KDA's.
__device__ __forceinline__ RowWeights channel_row(float beta) { return {1.0f, beta, 1.0f, 0}; }

//! GDN's, by a warp: those of 1 to 32 rows, past which the state's scale is moved. Lane j has exp(g) and beta of row j, a
//! decay of 1 from row `count` on, and gets what advance_scale gives, called for one row after another. Mostly no row
//! renews the scale: then that is a chain of products.
__device__ __forceinline__ RowWeights scale_rows(double& scale, float decay, float beta, int count) {
    constexpr int kTurn = 8; // rows; those that are not there change nothing
    const int lane = threadIdx.x & (kWarp - 1);
    RowWeights own{1.0f, 0.0f, 1.0f, 0};
    double product = scale, behind = scale; // behind: the lane's own row
#pragma unroll 1
    for (int first = 0; first < count; first += kTurn)
#pragma unroll
        for (int i = 0; i < kTurn; ++i) {
            product = next_scale(product, __shfl_sync(kFullMask, decay, first + i));
            if (lane == first + i) behind = product;
        }
    if (__all_sync(kFullMask, scale_stays(behind) || lane >= count)) {
        scale = product;
        own.scale = static_cast<float>(behind);
    } else {
#pragma unroll 1
        for (int first = 0; first < count; first += kTurn)
#pragma unroll
            for (int i = 0; i < kTurn; ++i) {
                const ScaleStep step = advance_scale(scale, __shfl_sync(kFullMask, decay, first + i));
                if (lane == first + i) own.renew = step.renew, own.scale = step.scale;
            }
    }
    own.weight = __fmul_rn(beta, __frcp_rn(own.scale));
    return own;
}

//! By a warp, lane j has row j of `count`: the next row behind it that renews, or count.
__device__ __forceinline__ int next_renewal(const RowWeights& own, int count) {
    const int lane = threadIdx.x & (kWarp - 1);
    const unsigned renewing = __ballot_sync(kFullMask, own.renew != 1.0f && lane < count);
    const unsigned behind = lane == kWarp - 1 ? 0 : renewing >> (lane + 1);
    return behind != 0 ? lane + __ffs(static_cast<int>(behind)) : count;
}

} // namespace replayssm
