//! What the Mamba-2 kernels are launched with. Knows neither TensorRT nor torch; pointers are device memory, strides
//! are in elements, offsets in bytes. Filled by c_api/mamba2.cpp after every check has passed.
#pragma once

#include "../c_api/replayssm.h"
#include "../common/step_work.h"
#include "step_shared.h"

#include <cuda_runtime.h>

namespace replayssm {

//! Slots of one layer and where the regions of a slot begin.
struct Mamba2Slots {
    char* base = nullptr;
    int64_t stride_bytes = 0;
    int64_t slots = 0;
    int64_t cursor = 0;       // int16 [H, 4 copies, 4 words]
    int64_t state = 0;        // state_t [H, P, N]
    int64_t state_scale = -1; // fp64 [H, 4 copies]: what the state is multiplied by; -1: by 1
    int64_t ring_x = 0;       // act_t [H, ring_rows, P]
    int64_t ring_b = 0;       // act_t [G, ring_rows, N]
    int64_t ring_dt = 0;      // fp32 [H, ring_dt_stride], ring_rows used
    int ring_dt_stride = 0;
    int ring_rows = 0;
};

struct Mamba2Shape {
    int nheads = 0;
    int ngroups = 0;
    int heads_per_group = 0;
    int headdim = 0;
    int dstate = 0;
    int window = 0;
    bool stagger = false;
};

//! The formula's tensors that step and scan share. Token axes: the step has [rows, tokens, ...], the scan [tokens, ...]
//! with a row stride of 0.
struct Mamba2Inputs {
    replayssm_tensor x{}, dt{}, A{}, B{}, C{}, D{}, z{}, dt_bias{}, y{};
    bool dt_softplus = true;
    float dt_min = 0.0f;
    float dt_max = 0.0f;
};

struct StepInputs {
    StepTensor x, dt, B, C, z, y;
    StepTensor A, dt_bias; // stride along heads in `head`
    StepTensor D;          // [H, P]: stride along P in `token`
    bool dt_softplus = true;
    float dt_min = 0.0f;
    float dt_max = 0.0f;
};

//! A run of rows whose heads are cut alike: blocks of `heads` heads, `blocks_per_row` = H / heads * splits of them a
//! row.
struct StepSegment {
    int first_row = 0;
    int blocks = 0;
    int heads = 1;
    Divisor blocks_per_row;
};
constexpr int kStepSegments = 3;

//! What a step does while the kernels in front of it end (step_ahead.cuh).
struct StepAhead {
    int blocks = 0; // of the grid: those that may begin so early, in grid order
    int stride = 1; // block i < stride asks for what blocks i, i + stride, ... read
    int heads = 0;  // states of a block that are asked for
};

struct Mamba2StepParams {
    Mamba2Slots pool;
    Mamba2Shape shape;
    StepInputs in;
    replayssm_index slots{};
    replayssm_index accepted{};
    int rows = 0;
    int tokens = 0;
    StepSegment segments[kStepSegments]; // in grid order; the last one that has blocks ends the grid
    bool state_first = true;             // ask for the state before the ring rows
    bool early_launch = false;
    StepAhead ahead;
    int committed_cap = 0; // most committed rows a slot can hold
    Divisor heads_per_group;
    Divisor row_vectors; // accesses that one row of x takes (row_access_elems)
    StepShared shared;
};

struct Mamba2ScanParams {
    Mamba2Slots pool;
    Mamba2Shape shape;
    Mamba2Inputs in;
    replayssm_index slots{};
    replayssm_index cu_seqlens{};
    const uint8_t* has_initial = nullptr;
    int sequences = 0;
    bool exact = false; // token by token
};

struct Mamba2MaterializeParams {
    Mamba2Slots pool;
    Mamba2Shape shape;
    replayssm_index src{}, count{}, dst{};
    const float* A = nullptr;
    int64_t A_stride = 0;
    int pairs = 0;
};

//! Cut of a step into blocks; zeros are replaced by what the table in launch.cu says.
struct Mamba2StepTuning {
    int heads_per_block = 0;
    int flags = 0; // REPLAYSSM_STEP_...
};

//! Launchers. Dtypes are replayssm_dtype codes; a combination without a kernel throws Error.
void launch_mamba2_step(
    Mamba2StepParams params, int state_dtype, int act_dtype, Mamba2StepTuning tuning, cudaStream_t stream);
void launch_mamba2_scan(const Mamba2ScanParams& params, int state_dtype, int act_dtype, cudaStream_t stream);
void launch_mamba2_materialize(
    const Mamba2MaterializeParams& params, int state_dtype, int act_dtype, cudaStream_t stream);

} // namespace replayssm
