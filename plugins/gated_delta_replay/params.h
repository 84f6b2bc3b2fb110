//! What the kernels of Gated DeltaNet (GDN) and Kimi Delta Attention (KDA) are launched with. Knows neither TensorRT
//! nor torch; pointers are device memory, strides are in elements, offsets in bytes. Filled by c_api/gated_delta.cpp
//! after every check has passed.
#pragma once

#include "../c_api/replayssm.h"
#include "../common/step_work.h"
#include "step_shared.h"

#include <cuda_runtime.h>

namespace replayssm {

//! Slots of one layer and where the regions of a slot begin. K' is 1 for GDN, K for KDA.
struct GatedDeltaSlots {
    char* base = nullptr;
    int64_t stride_bytes = 0;
    int64_t slots = 0;
    int64_t cursor = 0;       // int16 [HV, 4 copies, 4 words]
    int64_t state = 0;        // state_t [HV, V, K]
    int64_t state_scale = -1; // fp64 [HV, 4 copies]: what the state is multiplied by; -1: by 1
    int64_t ring_k = 0;       // act_t [HK, ring_rows, K], before normalisation
    int64_t ring_k_rnorm = 0; // fp32 [HK, scalar_stride], 1/|k|
    int64_t ring_v = 0;       // act_t [HV, ring_rows, V], for folds
    int64_t ring_d = 0;       // act_t [HV, ring_rows, V], for outputs
    int64_t ring_g = 0;       // fp32 GDN [HV, scalar_stride], KDA [HV, ring_rows, K]
    int64_t ring_beta = 0;    // fp32 [HV, scalar_stride]
    int scalar_stride = 0;    // ring_rows padded to 16 bytes
    int ring_rows = 0;
};

struct GatedDeltaShape {
    int nheads = 0;  // HV
    int ngroups = 0; // HK
    int heads_per_group = 0;
    int headdim = 0; // V
    int dstate = 0;  // K
    int window = 0;
    bool stagger = false;
    bool channel_gates = false; // KDA: one gate per key channel
    bool bounded = false;       // g = gate_lower_bound sigmoid(exp(A_log) (a + dt_bias))
    bool qk_l2norm = true;
    float gate_lower_bound = 0.0f;
};

//! The formula's tensors of a scan, packed: [tokens, ...] with a row stride of 0 in front, as [rows, tokens, ...].
struct GatedDeltaInputs {
    replayssm_tensor q{}, k{}, v{}, a{}, b{}, A_log{}, dt_bias{}, o{};
    float scale = 0.0f; // of the normalised q, never 0
};

//! A tensor of a step that is read element by element.
struct GateTensor : StepTensor {
    int channel = 0; // stride along K
};

struct GatedDeltaStepInputs {
    StepTensor q, k, v, o; // [rows, tokens, HK or HV, K or V]
    GateTensor a;          // [rows, tokens, HV, K']
    StepTensor b;          // [rows, tokens, HV]
    StepTensor A_log;      // fp32 [HV]
    GateTensor dt_bias;    // fp32 [HV, K']
    float scale = 0.0f;    // of the normalised q, never 0
};

//! A run of rows that are cut alike. An item is a part of a head's state rows; a block takes `items` of them that
//! follow each other within a group, `blocks_per_row` = HV * parts / items of them a row.
struct GatedDeltaSegment {
    int first_row = 0;
    int blocks = 0;
    int items = 1;
    Divisor blocks_per_row;
};
constexpr int kGatedDeltaSegments = 3;

struct GatedDeltaStepParams {
    GatedDeltaSlots pool;
    GatedDeltaShape shape;
    GatedDeltaStepInputs in;
    replayssm_index slots{};
    replayssm_index accepted{};
    int rows = 0;
    int tokens = 0;
    int committed_cap = 0; // most committed rows a slot can hold
    // From here on filled by the launcher.
    GatedDeltaSegment segments[kGatedDeltaSegments]; // in grid order; the last one that has blocks ends the grid
    Divisor items_per_group;
    bool early_launch = false;
    int prefetch_blocks = 0; // first blocks of the grid: they fetch before they wait for the kernels in front
    GatedDeltaStepShared shared;
};

struct GatedDeltaScanParams {
    GatedDeltaSlots pool;
    GatedDeltaShape shape;
    GatedDeltaInputs in;
    replayssm_index slots{};
    replayssm_index cu_seqlens{};
    const uint8_t* has_initial = nullptr;
    int sequences = 0;
    int64_t tokens = 0;
    bool exact = false; // token by token
};

struct GatedDeltaMaterializeParams {
    GatedDeltaSlots pool;
    GatedDeltaShape shape;
    replayssm_index src{}, count{}, dst{};
    int pairs = 0;
};

//! Cut of a step into blocks; zeros are replaced by what the table in launch.cu says.
struct GatedDeltaStepTuning {
    int heads_per_block = 0;
    int flags = 0; // REPLAYSSM_STEP_...
};

//! Launchers. Dtypes are replayssm_dtype codes; a combination without a kernel throws Error.
void launch_gated_delta_step(
    GatedDeltaStepParams params, int state_dtype, int act_dtype, GatedDeltaStepTuning tuning, cudaStream_t stream);
void launch_gated_delta_scan(const GatedDeltaScanParams& params, int state_dtype, int act_dtype, cudaStream_t stream);
void launch_gated_delta_materialize(
    const GatedDeltaMaterializeParams& params, int state_dtype, int act_dtype, cudaStream_t stream);

} // namespace replayssm
