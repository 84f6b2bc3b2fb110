//! Where a block of the step kernel keeps what in shared memory. Computed by the launcher, read from the kernel's
//! parameters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace replayssm {

//! Byte offsets of the parts. Rows of x and z lie `row_bytes` apart: 16 bytes more than a row holds, so that eight
//! lanes that read one column of eight rows meet different banks. Row r of B, BC and coef is row r of x.
struct StepShared {
    uint32_t state = 0; // state_t [P, N], where a block has whole heads
    uint32_t x =
        0; // act_t [buffers][rows_cap + T] rows: the step's tokens, committed ring rows oldest first; then z rows
    uint32_t B = 0;       // fp32 [rows_cap][n_pad]
    uint32_t C = 0;       // fp32 [T][n_pad]
    uint32_t BC = 0;      // fp32 [T][rows_cap]: B_r . C_t
    uint32_t fold = 0;    // float2 {decay, dt} [buffers][rows_cap - T]: what folds ring row j
    uint32_t coef = 0;    // fp32 [buffers][rows_cap][coef_stride]: weight of x_r in token t
    uint32_t decay = 0;   // fp32 [buffers][T]: weight of S C_t
    uint32_t barrier = 0; // of the state's copies
    uint32_t bytes = 0;
    uint32_t row_bytes = 0;
    uint32_t buffer_bytes = 0; // of x and z
    int rows_cap = 0;          // T + most committed rows
    int n_pad = 0;
    int coef_stride = 0; // 1 for one token, else T rounded up to 4

    StepShared() = default;

    StepShared(int committed_cap, int tokens, int block_rows, int padded_n, int act_bytes, int buffers,
        uint32_t state_bytes, bool gated, bool one_token) {
        rows_cap = committed_cap + tokens;
        n_pad = padded_n;
        coef_stride = one_token ? 1 : (tokens + 3) / 4 * 4;
        row_bytes = ((block_rows * act_bytes + 15) / 16 + 1) * 16;
        buffer_bytes = (rows_cap + (gated ? tokens : 0)) * row_bytes;
        uint32_t end = 0;
        state = take(end, state_bytes);
        x = take(end, buffers * buffer_bytes);
        B = take(end, rows_cap * n_pad * 4);
        C = take(end, tokens * n_pad * 4);
        BC = take(end, tokens * rows_cap * 4);
        fold = take(end, buffers * committed_cap * 8);
        coef = take(end, buffers * rows_cap * coef_stride * 4);
        decay = take(end, buffers * tokens * 4);
        barrier = take(end, 8);
        bytes = end;
    }

    static __host__ __device__ uint32_t take(uint32_t& end, uint32_t size) {
        const uint32_t offset = end;
        end = (end + size + 15) / 16 * 16;
        return offset;
    }
};

} // namespace replayssm
