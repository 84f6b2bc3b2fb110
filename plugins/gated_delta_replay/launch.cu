//! Which kernel takes a step, and how its heads are cut into blocks.
#include "../common/launch.h"
#include "step_launch.cuh"

#include <algorithm>

namespace replayssm {
namespace {

//! Items (half heads of 64 x 128) that one block takes in turn, up to so many items per multiprocessor.
struct Cut {
    int items_per_multiprocessor;
    int items;
};
constexpr Cut kHeadCuts[] = {{4, 1}, {24, 2}, {1 << 30, 4}};                  // GDN
constexpr Cut kConventionalCuts[] = {{4, 1}, {12, 2}, {24, 4}, {1 << 30, 2}}; // window 1
constexpr Cut kShortConventionalCuts[] = {{4, 1}, {12, 2}, {1 << 30, 4}};     // the same, 16-bit state
constexpr Cut kChannelCuts[] = {{8, 1}, {1 << 30, 2}};                        // KDA: a head at most
//! Blocks of a multiprocessor at a time, for the length of the grid's tail.
constexpr int kResidentBlocks = 4;
constexpr int kTunedParts = 2;
//! From so many items per multiprocessor on, GDN's steps of one token have a tail twice as long.
constexpr int kLongTailItems = 60;

bool is_tuned(const GatedDeltaStepParams& p, int state_dtype, int act_dtype) {
    if (act_dtype != REPLAYSSM_BFLOAT16 || p.shape.headdim != 128 || p.shape.dstate != 128) return false;
    if (state_dtype != REPLAYSSM_FLOAT32 && state_dtype != REPLAYSSM_BFLOAT16) return false;
    const auto shared = state_dtype == REPLAYSSM_FLOAT32 ? step_shared<__nv_bfloat16, float>(p, true, 2)
                                                         : step_shared<__nv_bfloat16, __nv_bfloat16>(p, true, 2);
    return shared.bytes <= static_cast<uint32_t>(device_limits().block_shared_bytes);
}

//! Most items of a block: those of a group, KDA those of a head.
int item_limit(const GatedDeltaShape& shape) {
    return shape.channel_gates ? kTunedParts : kTunedParts * shape.heads_per_group;
}

int64_t items_per_multiprocessor(const GatedDeltaStepParams& p) {
    return static_cast<int64_t>(p.rows) * p.shape.nheads * kTunedParts / device_limits().multiprocessors;
}

int choose_items(const GatedDeltaStepParams& p, int state_dtype, GatedDeltaStepTuning tuning) {
    const int limit = item_limit(p.shape);
    if (tuning.flags & REPLAYSSM_STEP_PART_HEADS) return 1;
    if (tuning.heads_per_block > 0) return std::min(tuning.heads_per_block * kTunedParts, limit);
    const int64_t per_multiprocessor = items_per_multiprocessor(p);
    const auto choose = [&](const auto& cuts) {
        for (const Cut& cut : cuts) {
            if (per_multiprocessor > cut.items_per_multiprocessor) continue;
            return cut.items == 1 ? 1 : kTunedParts * largest_divisor(limit / kTunedParts, cut.items / kTunedParts);
        }
        return 1;
    };
    if (p.shape.channel_gates) return choose(kChannelCuts);
    if (p.shape.window > 1 || p.tokens > 1) return choose(kHeadCuts);
    return state_dtype == REPLAYSSM_FLOAT32 ? choose(kConventionalCuts) : choose(kShortConventionalCuts);
}

//! Length of the grid's tail, see fill_segments. Twice as long where blocks have several heads each, in large grids of
//! one token; measured slower with several tokens and with KDA. With window 1 every row folds: blocks are even.
int choose_tail(const GatedDeltaStepParams& p, int items) {
    const bool heads = !p.shape.channel_gates && items > kTunedParts;
    return heads && p.tokens == 1 && p.shape.window > 1 && items_per_multiprocessor(p) >= kLongTailItems ? 2 : 1;
}

//! Rows in grid order: most of them in blocks of `items` items, the last ones in smaller blocks, so that the
//! multiprocessors finish together although some rows fold and others do not. Of every smaller size there are `tail`
//! times the blocks that are resident at a time, but at most tail / 4 of the rows that are left.
void fill_segments(GatedDeltaStepParams& p, int items, int parts, bool even) {
    const int resident = kResidentBlocks * device_limits().multiprocessors, row_items = p.shape.nheads * parts;
    const int tail = choose_tail(p, items);
    const int sizes[kGatedDeltaSegments] = {items, items % 2 == 0 ? 2 : 1, 1};
    int left = p.rows, rows[kGatedDeltaSegments] = {p.rows, 0, 0};
    for (int i = kGatedDeltaSegments - 1; i > 0 && !even; --i) {
        if (sizes[i] >= items) continue;
        const int blocks_per_row = row_items / sizes[i];
        rows[i] = std::min(left * tail / 4, (resident * tail + blocks_per_row - 1) / blocks_per_row);
        left -= rows[i];
        rows[0] = left;
    }
    int first = 0;
    for (int i = 0; i < kGatedDeltaSegments; ++i) {
        GatedDeltaSegment& segment = p.segments[i];
        segment.first_row = first;
        segment.items = sizes[i];
        segment.blocks_per_row = Divisor(row_items / sizes[i]);
        segment.blocks = rows[i] * static_cast<int>(segment.blocks_per_row.value);
        first += rows[i];
    }
}

} // namespace

void launch_gated_delta_step(
    GatedDeltaStepParams p, int state_dtype, int act_dtype, GatedDeltaStepTuning tuning, cudaStream_t stream) {
    require(tuning.heads_per_block == 0 ||
            (tuning.heads_per_block > 0 && p.shape.heads_per_group % tuning.heads_per_block == 0),
        "tuning.heads_per_block is ", tuning.heads_per_block, "; it must be 0 or divide the heads per group, ",
        p.shape.heads_per_group);
    const bool tuned = is_tuned(p, state_dtype, act_dtype);
    const int parts = tuned ? kTunedParts : 4;
    p.items_per_group = Divisor(p.shape.heads_per_group * parts);
    fill_segments(
        p, tuned ? choose_items(p, state_dtype, tuning) : 1, parts, tuning.flags & REPLAYSSM_STEP_EVEN_BLOCKS);
    p.early_launch = !(tuning.flags & REPLAYSSM_STEP_PLAIN_LAUNCH) && device_limits().early_launch;
    p.prefetch_blocks = p.early_launch ? kResidentBlocks * device_limits().multiprocessors : 0;
    if (tuned && state_dtype == REPLAYSSM_FLOAT32) return launch_delta_bf16_fp32(p, stream);
    if (tuned) return launch_delta_bf16_bf16(p, stream);
    switch (act_dtype) {
        case REPLAYSSM_BFLOAT16: return launch_delta_generic_bf16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT16: return launch_delta_generic_fp16(p, state_dtype, stream);
        case REPLAYSSM_FLOAT32: return launch_delta_generic_fp32(p, state_dtype, stream);
        default:
            fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is ", dtype_name(act_dtype),
                "; gated_delta_step has bfloat16, float16 and float32");
    }
}

} // namespace replayssm
