//! Reset of recurrent slots of any kind: zero state with a scale of 1 (and read copy, with scales of 1), empty ring,
//! first window by stagger.
#pragma once

#include "../c_api/replayssm.h"

#include <cuda_runtime.h>

namespace replayssm {

struct ResetParams {
    replayssm_pool pool{};
    replayssm_index slots{};
    int64_t cursor = 0; // byte offsets in the slot
    int64_t state = 0;
    int64_t state_bytes = 0;  // a multiple of 16
    int64_t state_scale = -1; // fp64 [H, 4 copies]; -1: none
    int64_t copy = -1;        // -1: no read copy
    int64_t copy_bytes = 0;
    int64_t scale = -1; // -1: no scales
    int64_t scale_bytes = 0;
    int nheads = 0;
    int window = 1;
    bool stagger = false;
    int count = 0;
};

void launch_reset(const ResetParams& params, cudaStream_t stream);

} // namespace replayssm
