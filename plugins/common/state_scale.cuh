//! The scale of a state. A checkpoint is `scale` times what the region `state` holds, one scale a head, so that a fold
//! multiplies one number by a row's decay instead of every element: S' <- S' + (w / scale) k, scale <- scale * decay.
//! The scale is fp64, in the slot and from row to row: a rounding of it would be alike for all elements of a head, and
//! where decays are near 1, alike from row to row. What meets elements is the scale rounded to fp32.
//! Where the scale leaves [2^-16, 2^16] (or is not a number) the elements are multiplied by it, and it becomes 1. When
//! that happens depends on the decays alone, so the bits of (S', scale) do not depend on how rows are grouped into
//! folds. States of 16 bits have no scale in memory: theirs is 1 before a fold, and a fold ends with the multiplication.
#pragma once

#include "numeric.cuh"

namespace replayssm {

constexpr double kLeastScale = 1.0 / 65536.0;
constexpr double kMostScale = 65536.0;

//! One row of a fold: elements times `renew` (1: nothing to do); with what is added then they are worth `scale` times as
//! much.
struct ScaleStep {
    float renew;
    float scale;
};

//! The scale behind one row, if it stays in range.
__device__ __forceinline__ double next_scale(double scale, float decay) {
    return __dmul_rn(scale, static_cast<double>(decay));
}
__device__ __forceinline__ bool scale_stays(double next) { return next >= kLeastScale && next <= kMostScale; }

//! Moves `scale` past one row.
__device__ __forceinline__ ScaleStep advance_scale(double& scale, float decay) {
    const double next = next_scale(scale, decay);
    const bool stays = scale_stays(next);
    scale = stays ? next : 1.0;
    return {stays ? 1.0f : static_cast<float>(next), static_cast<float>(scale)};
}

} // namespace replayssm
