//! Where a block of the token-by-token scan keeps what in shared memory. Computed by the launcher, read from the
//! kernel's parameters.
#pragma once

#include "params.h"

namespace replayssm {

constexpr int kScanBatch = 16; // tokens or ring rows that are in shared memory at a time
constexpr int kQuarters = 4;   // most blocks that share a head

struct DeltaScanShared {
    uint32_t raw_k = 0;  // act_t [kScanBatch][K]
    uint32_t raw_q = 0;  // act_t [kScanBatch][K]
    uint32_t raw_v = 0;  // act_t [2 stages][kScanBatch][block rows]
    uint32_t raw_a = 0;  // KDA, where its rows can be copied: [kScanBatch][K] as they come
    uint32_t kn = 0;     // fp32 [kScanBatch][K]
    uint32_t qn = 0;     // fp32 [kScanBatch][K]
    uint32_t decays = 0; // KDA: fp32 [kScanBatch][K]
    uint32_t scalar = 0; // RowWeights [kScanBatch]
    uint32_t v_stage = 0;
    uint32_t bytes = 0;
    int gate_pieces = 0; // 16-byte pieces of a row of a; 0: read element by element

    DeltaScanShared() = default;

    DeltaScanShared(int dstate, int block_rows, int act_bytes, bool channel_gates, int gate_row_bytes) {
        const uint32_t fp32_rows = kScanBatch * dstate * 4;
        uint32_t end = 0;
        raw_k = take_shared(end, kScanBatch * dstate * act_bytes);
        raw_q = take_shared(end, kScanBatch * dstate * act_bytes);
        v_stage = kScanBatch * block_rows * act_bytes;
        raw_v = take_shared(end, 2 * v_stage);
        gate_pieces = gate_row_bytes / 16;
        raw_a = take_shared(end, kScanBatch * gate_row_bytes);
        kn = take_shared(end, fp32_rows);
        qn = take_shared(end, fp32_rows);
        decays = take_shared(end, channel_gates ? fp32_rows : 0);
        scalar = take_shared(end, kScanBatch * 16);
        bytes = end;
    }
};

struct DeltaScanParams {
    GatedDeltaScanParams scan;
    DeltaScanShared shared;
    int state_dtype = 0;
    int state_bytes = 0;
};

} // namespace replayssm
