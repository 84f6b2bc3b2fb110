//! Where a block of the step kernel keeps what in shared memory. Computed by the launcher, read from the kernel's
//! parameters.
#pragma once

#include "../common/step_work.h"

namespace replayssm {

//! Byte offsets of the parts. Row r of `rows` and of the weights: the step's tokens 0..T-1, then the committed ring
//! rows, oldest first.
struct GatedDeltaStepShared {
    uint32_t state = 0;   // state_t [part_rows, K], where the state is staged
    uint32_t rows = 0;    // act_t [buffers][rows_cap] rows: v of the tokens; then d, in a folding step v, of ring rows
    uint32_t keys = 0;    // fp32 [committed_cap][K]: normalised keys of ring rows, for a fold
    uint32_t vectors = 0; // fp32 [T][2][K]: kn_t, qn_t; KDA: times the decay that the checkpoint has met
    uint32_t gates = 0; // KDA: fp32 [committed_cap + T][K]: g of ring rows (in a folding step its exp), g of the tokens
    uint32_t dots = 0;  // float2 [rows_cap][dot_stride]: (kn_r . kn_t, kn_r . qn_t); KDA: with the decay between them
    uint32_t weights = 0; // GDN: T = 1 fp32 [buffers][rows_cap], decay from row r to the token; else float2 as dots
    uint32_t fold = 0;    // float2 [buffers][committed_cap]: {exp(g), beta} of ring row j
    uint32_t token = 0;   // float2 [buffers][T]: {beta, decay that the checkpoint has met} of token t
    uint32_t totals = 0;  // T > 1: fp32 [2 T][part_rows]: what state and ring hold for kn_t and qn_t, then d_t
    uint32_t barrier = 0; // of the state's copies
    uint32_t bytes = 0;
    uint32_t row_bytes = 0; // of `rows`: 16 more than a row holds
    int rows_cap = 0;       // T + most committed rows
    int committed_cap = 0;
    int dot_stride = 0; // 1 for one token, else T rounded up to 2
    int buffers = 0;

    GatedDeltaStepShared() = default;

    GatedDeltaStepShared(int committed, int tokens, int part_rows, int dstate, int act_bytes, int buffer_count,
        uint32_t state_bytes, bool channel_gates, bool one_token) {
        committed_cap = committed;
        rows_cap = committed + tokens;
        buffers = buffer_count;
        dot_stride = one_token ? 1 : (tokens + 1) / 2 * 2;
        row_bytes = ((part_rows * act_bytes + 15) / 16 + 1) * 16;
        uint32_t end = 0;
        state = take_shared(end, state_bytes);
        rows = take_shared(end, buffers * rows_cap * row_bytes);
        keys = take_shared(end, committed_cap * dstate * 4);
        vectors = take_shared(end, tokens * 2 * dstate * 4);
        gates = take_shared(end, channel_gates ? rows_cap * dstate * 4 : 0);
        dots = take_shared(end, rows_cap * dot_stride * 8);
        weights = take_shared(end, channel_gates ? 0 : buffers * rows_cap * (one_token ? 4 : dot_stride * 8));
        fold = take_shared(end, buffers * committed_cap * 8);
        token = take_shared(end, buffers * tokens * 8);
        totals = take_shared(end, one_token ? 0 : 2 * tokens * part_rows * 4);
        barrier = take_shared(end, 8);
        bytes = end;
    }
};

} // namespace replayssm
