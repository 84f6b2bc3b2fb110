//! Which kernel takes a step or a scan, and how a step's heads are cut into blocks.
#include "scan_launch.cuh"
#include "scan_mma.h"
#include "step_launch.cuh"

#include <algorithm>

namespace replayssm {
namespace {

//! Heads that one block takes in turn, up to so many heads per multiprocessor; for one token, for several, and for one
//! with window 1, where neighbouring blocks best write neighbouring memory. Measured with benchmarks/bench_mamba2.py on
//! an H200, 128 heads of 64 x 128.
struct Cut {
    int heads_per_multiprocessor;
    int one_token;
    int more_tokens;
    int conventional;
};
constexpr Cut kCuts[] = {{2, 1, 1, 1}, {24, 2, 2, 2}, {48, 2, 4, 2}, {1 << 30, 4, 4, 1}};
//! So few heads per multiprocessor that the state is there as soon as the ring rows, which then go first.
constexpr int kFewHeads = 2;
//! Blocks of a multiprocessor at a time, for the length of the grid's tail.
constexpr int kResidentBlocks = 4;
//! Bytes of states that the first blocks ask for while the kernels in front end.
constexpr int64_t kAheadBytes = 17 << 20;

bool fits(const Mamba2StepParams& p, int state_dtype, int act_dtype, int heads, bool tuned) {
    const StepShared shared = step_shared(p, dtype_bytes(state_dtype), dtype_bytes(act_dtype), heads, tuned);
    return shared.bytes <= static_cast<uint32_t>(device_limits().block_shared_bytes);
}

//! Whether a tuned kernel takes the step: its types and sizes, and a head's state beside its ring in shared memory.
//! Never a question of the batch: the kernels round outputs differently.
bool is_tuned(const Mamba2StepParams& p, int state_dtype, int act_dtype) {
    if (act_dtype != REPLAYSSM_BFLOAT16 || (state_dtype != REPLAYSSM_FLOAT32 && state_dtype != REPLAYSSM_BFLOAT16))
        return false;
    if (!is_tuned_dstate(p.shape.dstate) || p.shape.headdim > kTunedHeaddim) return false;
    return fits(p, state_dtype, act_dtype, 1, true);
}

int heads_per_multiprocessor(const Mamba2StepParams& p) {
    return p.rows * p.shape.nheads / device_limits().multiprocessors;
}

int choose_heads(const Mamba2StepParams& p, int state_dtype) {
    const bool conventional = p.tokens == 1 && p.shape.window == 1;
    const int per_multiprocessor = heads_per_multiprocessor(p);
    for (const Cut& cut : kCuts) {
        if (per_multiprocessor > cut.heads_per_multiprocessor) continue;
        int heads = p.tokens == 1 ? cut.one_token : cut.more_tokens;
        // 16 bits: half as much to write, as much to prepare.
        if (conventional) heads = state_dtype == REPLAYSSM_FLOAT32 ? cut.conventional : std::min(heads, 2);
        return largest_divisor(p.shape.heads_per_group, heads);
    }
    return 1;
}

//! Rows in grid order: most of them in blocks of `heads` heads, the last ones in blocks of two and of one, so that the
//! multiprocessors finish together although some rows fold and others do not. splits: blocks that share a head.
void fill_segments(Mamba2StepParams& p, int heads, int splits, bool even) {
    const int resident = kResidentBlocks * device_limits().multiprocessors;
    const int sizes[kStepSegments] = {heads, largest_divisor(p.shape.heads_per_group, 2), 1};
    int left = p.rows, rows[kStepSegments] = {p.rows, 0, 0};
    for (int i = kStepSegments - 1; i > 0 && !even; --i) {
        if (sizes[i] >= heads) continue;
        const int blocks_per_row = p.shape.nheads / sizes[i] * splits;
        rows[i] = std::min(left / 4, (resident + blocks_per_row - 1) / blocks_per_row);
        left -= rows[i];
        rows[0] = left;
    }
    int first = 0;
    for (int i = 0; i < kStepSegments; ++i) {
        StepSegment& segment = p.segments[i];
        segment.first_row = first;
        segment.heads = sizes[i];
        segment.blocks_per_row = Divisor(p.shape.nheads / sizes[i] * splits);
        segment.blocks = rows[i] * static_cast<int>(segment.blocks_per_row.value);
        first += rows[i];
    }
}

//! What the first blocks ask for: all that may begin early, and of their states as much as the L2 holds beside the
//! kernels in front.
StepAhead look_ahead_of(const Mamba2StepParams& p, int state_bytes) {
    int blocks = 0;
    for (const StepSegment& segment : p.segments)
        blocks += segment.blocks;
    const int multiprocessors = device_limits().multiprocessors;
    StepAhead ahead;
    ahead.blocks = std::min(blocks, kResidentBlocks * multiprocessors);
    ahead.stride = std::min(ahead.blocks, multiprocessors);
    const int64_t head_bytes = static_cast<int64_t>(p.shape.headdim) * p.shape.dstate * state_bytes;
    if (ahead.blocks > 0)
        ahead.heads = static_cast<int>(std::max<int64_t>(1, kAheadBytes / (head_bytes * ahead.blocks)));
    return ahead;
}

} // namespace

void launch_mamba2_step(
    Mamba2StepParams p, int state_dtype, int act_dtype, Mamba2StepTuning tuning, cudaStream_t stream) {
    int heads = tuning.heads_per_block == 0 ? choose_heads(p, state_dtype) : tuning.heads_per_block;
    require(heads >= 1 && p.shape.heads_per_group % heads == 0, "tuning.heads_per_block is ", heads,
        "; it must be 0 or divide the heads per group, ", p.shape.heads_per_group);
    const bool tuned = is_tuned(p, state_dtype, act_dtype);
    while (heads > 1 && !fits(p, state_dtype, act_dtype, heads, tuned))
        heads = largest_divisor(p.shape.heads_per_group, heads - 1);
    fill_segments(p, heads, tuned ? 1 : 4, tuning.flags & REPLAYSSM_STEP_EVEN_BLOCKS);
    p.state_first = !(tuning.flags & REPLAYSSM_STEP_STATE_LAST) && heads_per_multiprocessor(p) >= kFewHeads;
    p.early_launch = !(tuning.flags & REPLAYSSM_STEP_PLAIN_LAUNCH) && device_limits().early_launch;
    if (tuned && p.early_launch) p.ahead = look_ahead_of(p, dtype_bytes(state_dtype));
    if (tuned && state_dtype == REPLAYSSM_FLOAT32) return launch_step_bf16_fp32(p, stream);
    if (tuned) return launch_step_bf16_bf16(p, stream);
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_step_generic_bf16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_step_generic_fp16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_step_generic_fp32(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; mamba2_step has bfloat16, float16 and float32");
    }
}

void launch_mamba2_scan(const Mamba2ScanParams& p, int state_dtype, int act_dtype, cudaStream_t stream) {
    if (!p.exact && has_scan_mma(p, act_dtype)) return launch_scan_mma(p, state_dtype, stream);
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_scan_bf16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_scan_fp16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_scan_fp32(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; mamba2_scan has bfloat16, float16 and float32");
    }
}

} // namespace replayssm
