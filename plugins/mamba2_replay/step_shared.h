//! Where a block of the step kernel keeps what in shared memory. Computed by the launcher, read from the kernel's
//! parameters.
#pragma once

#include "../common/step_work.h"

namespace replayssm {

//! How a block works: any dstate and number of tokens; or, for a dstate known at compile time, one token, or several
//! tokens whose products are made on tensor cores.
enum class StepForm { kGeneric, kOneToken, kTensor };

//! Tensor form: bytes between rows of C (bf16), between tokens of the ring's weights, and ring rows of one product.
__host__ __device__ constexpr int tensor_c_bytes(int n_pad) { return n_pad * 2 + 32; }
constexpr int kWeightBytes = 96; // 8 lanes of two terms of two bf16, and 32 bytes that spread tokens over banks
constexpr int kWeightRows = 16;
constexpr int kStepBlockBytes = 80;
constexpr int kFoldRowBytes = 12;

//! Byte offsets of the parts. Rows of x and z lie `row_bytes` apart: 16 bytes more than a row holds, so that eight
//! lanes that read one column of eight rows meet different banks. Row r of BC and coef is row r of x.
struct StepShared {
    uint32_t state = 0; // state_t [P, N], where a block has whole heads
    uint32_t x = 0; // act_t [buffers][rows_cap + T] rows: the step's tokens, committed ring rows oldest first; then z
    uint32_t B = 0; // fp32 [T, generic form only][n_pad]
    uint32_t ring_B = 0;  // fp32 [rows_cap - T][n_pad], right behind
    uint32_t C = 0;       // fp32 [T][n_pad]; bf16 where tensor cores make S C, rows tensor_c_bytes apart
    uint32_t BC = 0;      // fp32 [T][rows_cap]: B_r . C_t
    uint32_t fold = 0;    // FoldRow [heads][rows_cap - T + 1]: what folds ring row j, and what ends a fold
    uint32_t coef = 0;    // fp32 [heads][rows_cap, tensor form T][coef_stride]: weight of x_r in token t
    uint32_t weight = 0;  // tensor form: [heads][weight_bytes], see put_weight
    uint32_t decay = 0;   // fp32 [heads][coef_stride]: weight of S C_t, or of S' C_t
    uint32_t block = 0;   // StepBlock: what all threads know about their work
    uint32_t barrier = 0; // of the state's copies
    uint32_t bytes = 0;
    uint32_t row_bytes = 0;
    uint32_t buffer_bytes = 0; // of x and z
    uint32_t weight_bytes = 0;
    int rows_cap = 0; // T + most committed rows
    int n_pad = 0;
    int coef_rows = 0;
    int coef_stride = 0; // 1 for one token, else T rounded up to 4

    StepShared() = default;

    StepShared(int committed_cap, int tokens, int block_rows, int padded_n, int act_bytes, int heads,
        uint32_t state_bytes, bool gated, StepForm form) {
        const int buffers = heads > 1 ? 2 : 1;
        const bool tensor = form == StepForm::kTensor;
        rows_cap = committed_cap + tokens;
        n_pad = padded_n;
        coef_rows = tensor ? tokens : rows_cap;
        coef_stride = form == StepForm::kOneToken ? 1 : (tokens + 3) / 4 * 4;
        row_bytes = ((block_rows * act_bytes + 15) / 16 + 1) * 16;
        buffer_bytes = (rows_cap + (gated ? tokens : 0)) * row_bytes;
        weight_bytes = tensor ? (committed_cap + kWeightRows - 1) / kWeightRows * coef_stride * kWeightBytes : 0;
        uint32_t end = 0;
        state = take_shared(end, state_bytes);
        x = take_shared(end, buffers * buffer_bytes);
        B = take_shared(end, (form == StepForm::kGeneric ? tokens : 0) * n_pad * 4);
        ring_B = take_shared(end, committed_cap * n_pad * 4);
        C = take_shared(end, tensor ? coef_stride * tensor_c_bytes(n_pad) : tokens * n_pad * 4);
        BC = take_shared(end, tokens * rows_cap * 4);
        fold = take_shared(end, heads * (committed_cap + 1) * kFoldRowBytes);
        coef = take_shared(end, heads * coef_rows * coef_stride * 4);
        weight = take_shared(end, heads * weight_bytes);
        decay = take_shared(end, heads * coef_stride * 4);
        block = take_shared(end, kStepBlockBytes);
        barrier = take_shared(end, 8);
        bytes = end;
    }
};

} // namespace replayssm
