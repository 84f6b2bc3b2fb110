//! Where a block of the step kernel keeps what in shared memory. Computed by the launcher, read from the kernel's
//! parameters.
#pragma once

#include "../common/step_work.h"

namespace replayssm {

//! How a step kernel works on tokens: on one (GDN, where it is tuned: kSingle), on several by fp32 sums, on several by
//! products on tensor cores (GDN).
enum class DeltaStepForm { kOneToken, kSingle, kSeveral, kTensor };

constexpr int kTensorRows = 16;         // ring rows of a product
constexpr int kTensorVectorBytes = 320; // of a vector of K = 128: 256, and as many as keep eight lanes' accesses apart

//! Products of four tokens each that a step of `tokens` tokens is made of: 1, 2 or 4.
inline __host__ __device__ int tensor_groups(int tokens) { return tokens <= 4 ? 1 : tokens <= 8 ? 2 : 4; }

//! Byte offsets of the parts. Row r of `rows` and of the weights: the step's tokens 0..T-1, then the committed ring
//! rows, oldest first.
struct GatedDeltaStepShared {
    uint32_t state = 0;   // state_t [part_rows, K], where the state is staged
    uint32_t rows = 0;    // act_t [2][rows_cap] rows: v of the tokens; then d, in a folding step v, of ring rows
    uint32_t keys = 0;    // fp32 [committed_cap][K]: normalised keys of ring rows, for a fold
    uint32_t vectors = 0; // fp32 [T][2][K]: kn_t, qn_t; KDA: times the decay that the checkpoint has met
                          // single: k_t, q_t as they come
                          // tensor: bf16 [T][2] rows of kTensorVectorBytes: k_t, q_t
    uint32_t gates = 0; // KDA: fp32 [committed_cap + T][K]: g of ring rows (in a folding step its exp), g of the tokens
    uint32_t dots = 0;  // float2 [rows_cap][dot_stride]: (kn_r . kn_t, kn_r . qn_t); KDA: with the decay between them
                        // single: of ring rows (kn_r . k_t, kn_r . q_t), in [0].y kn_t . qn_t
    uint32_t weights = 0;      // GDN: T = 1 fp32 [heads][rows_cap], decay from row r to the token; else float2 as dots
    uint32_t fold = 0;         // of ring row j, [heads][committed_cap]: GDN RowWeights, KDA fp32 beta
    uint32_t ring_weights = 0; // tensor: of ring rows, for products (step_tensor.cuh); `weights` has the tokens' alone
    uint32_t norms = 0;        // tensor, single: float2 [T]: 1 / |k_t|, scale / |q_t|
    uint32_t token = 0; // float2 [heads][T]: {beta, decay that the checkpoint has met times its scale} of token t
                        // tensor: float4 [heads][dot_stride]: {beta, that product times either norm}
    uint32_t totals =
        0; // several tokens, not tensor: fp32 [2 T][part_rows]: what state and ring hold for kn_t and qn_t, then d_t
    uint32_t barrier = 0; // of the state's copies, one a warp
    uint32_t bytes = 0;
    uint32_t row_bytes = 0; // of `rows`: 16 more than a row holds
    int rows_cap = 0;       // T + most committed rows
    int committed_cap = 0;
    int dot_stride = 0;             // 1 for one token, else T rounded up to 2, tensor: to 4
    uint32_t ring_weight_bytes = 0; // of one head

    GatedDeltaStepShared() = default;

    GatedDeltaStepShared(int committed, int tokens, int part_rows, int dstate, int act_bytes, int row_buffers,
        int heads, uint32_t state_bytes, bool channel_gates, DeltaStepForm form) {
        const bool single = form == DeltaStepForm::kSingle, one_token = single || form == DeltaStepForm::kOneToken;
        const bool tensor = form == DeltaStepForm::kTensor;
        committed_cap = committed;
        rows_cap = committed + tokens;
        dot_stride = one_token ? 1 : tensor ? tensor_groups(tokens) * 4 : (tokens + 1) / 2 * 2;
        row_bytes = ((part_rows * act_bytes + 15) / 16 + 1) * 16;
        uint32_t end = 0;
        state = take_shared(end, state_bytes);
        rows = take_shared(end, row_buffers * rows_cap * row_bytes);
        keys = take_shared(end, committed_cap * dstate * 4);
        vectors = take_shared(end, tensor ? dot_stride * 2 * kTensorVectorBytes : tokens * 2 * dstate * 4);
        gates = take_shared(end, channel_gates ? rows_cap * dstate * 4 : 0);
        dots = take_shared(end, rows_cap * dot_stride * 8);
        weights = take_shared(
            end, channel_gates ? 0 : heads * (tensor ? tokens : rows_cap) * (one_token ? 4 : dot_stride * 8));
        ring_weight_bytes = tensor ? (committed + kTensorRows - 1) / kTensorRows * dot_stride * 2 * 64 : 0;
        ring_weights = take_shared(end, heads * ring_weight_bytes);
        norms = take_shared(end, tensor || single ? tokens * 8 : 0);
        fold = take_shared(end, heads * committed_cap * (channel_gates ? 4 : 16));
        token = take_shared(end, heads * (tensor ? dot_stride * 16 : tokens * 8));
        totals = take_shared(end, one_token || tensor ? 0 : 2 * tokens * part_rows * 4);
        barrier = take_shared(end, state_bytes ? 32 : 8);
        bytes = end;
    }
};

} // namespace replayssm
