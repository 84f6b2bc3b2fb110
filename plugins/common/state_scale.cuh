//! The scale of a state. A checkpoint is `scale` times what the region `state` holds, one scale a head, so that a fold
//! multiplies one number by a row's decay instead of every element: S' <- S' + (w / scale) k, scale <- scale * decay.
//! Where the scale leaves [2^-16, 2^16] (or is not a number) the elements are multiplied by it, and it becomes 1. When
//! that happens depends on the decays alone, so the bits of (S', scale) do not depend on how rows are grouped into
//! folds. States of 16 bits have no scale in memory: theirs is 1 before a fold, and a fold ends with the multiplication.
#pragma once

#include "numeric.cuh"

namespace replayssm {

constexpr float kLeastScale = 1.0f / 65536.0f;
constexpr float kMostScale = 65536.0f;

//! One row of a fold, in the order of its use: elements times `renew` (1: nothing to do), then what is added to them is
//! multiplied by `inverse`, and what they are worth by `scale`.
struct ScaleStep {
    float renew;
    float scale;
    float inverse;
};

//! Moves `scale` past one row.
__device__ __forceinline__ ScaleStep advance_scale(float& scale, float decay) {
    const float next = __fmul_rn(scale, decay);
    const bool stays = next >= kLeastScale && next <= kMostScale;
    scale = stays ? next : 1.0f;
    return {stays ? 1.0f : next, scale, __frcp_rn(scale)};
}

} // namespace replayssm
