//! From TensorRT-LLM's row inputs to packed sequences, one row at a time; the body of row_kernels.cu's kernel.
#pragma once

#include <cstdint>
#include <cstdio>

#if defined(__CUDACC__)
#define REPLAYSSM_HOST_DEVICE __host__ __device__
#else
#define REPLAYSSM_HOST_DEVICE
#endif

namespace replayssm::plugin {

struct ScanRowsParams {
    const int32_t* last_token_ids = nullptr; // [rows]; packed: inclusive prefix sums, padded: lengths
    const int32_t* slot_mapping = nullptr;   // [rows]
    const int32_t* has_initial = nullptr;    // [rows] or NULL
    int rows = 0;
    int64_t padded_length = 0; // S; 0 where packed
    int64_t tokens = 0;
};

//! Where the sequences go: one for each row where packed, else two.
struct ScanRowsOutput {
    int32_t* cu_seqlens = nullptr;  // [sequences + 1]
    int32_t* slots = nullptr;       // [sequences], written where padded
    uint8_t* has_initial = nullptr; // [sequences]
};

//! row == in.rows closes the last sequence. Lengths outside the tensors are clamped.
REPLAYSSM_HOST_DEVICE inline void map_row(const ScanRowsParams& in, const ScanRowsOutput& out, int row) {
    const bool padded = in.padded_length > 0;
    if (row == in.rows) {
        out.cu_seqlens[padded ? 2 * row : 0] = padded ? static_cast<int32_t>(in.tokens) : 0;
        return;
    }
    const int64_t most = padded ? in.padded_length : in.tokens;
    const int64_t given = in.last_token_ids[row];
    const int32_t last = static_cast<int32_t>(given < 0 ? 0 : given > most ? most : given);
    const uint8_t initial = in.has_initial != nullptr && in.has_initial[row] != 0;
    if (!padded) {
        out.cu_seqlens[row + 1] = last;
        out.has_initial[row] = initial;
        return;
    }
    const int32_t begin = static_cast<int32_t>(row * in.padded_length);
    out.cu_seqlens[2 * row] = begin;
    out.cu_seqlens[2 * row + 1] = begin + last;
    out.slots[2 * row] = in.slot_mapping[row];
    out.slots[2 * row + 1] = -1;
    out.has_initial[2 * row] = initial;
    out.has_initial[2 * row + 1] = 0;
}

//! Prints what is wrong with the slot of `row`: outside the pool, or another row's too. For debug builds.
REPLAYSSM_HOST_DEVICE inline void check_slot(const int32_t* slot_mapping, int row, int64_t slots) {
    const int slot = slot_mapping[row];
    if (slot < -1 || slot >= slots) {
        printf("[trtllm-replayssm] slot_mapping[%d] is %d; it must be -1 or from 0 to %lld\n", row, slot,
            static_cast<long long>(slots - 1));
    }
    for (int other = 0; slot >= 0 && other < row; ++other) {
        if (slot_mapping[other] == slot)
            printf("[trtllm-replayssm] slot_mapping[%d] and slot_mapping[%d] are both %d\n", other, row, slot);
    }
}

} // namespace replayssm::plugin
