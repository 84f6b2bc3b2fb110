//! Cursor words of a slot and the plan that one row's step follows from them (docs/contracts.md, `step`).
#pragma once

#include "numeric.cuh"
#include "slot_layout.h"

namespace replayssm {

//! The four int16 words of one cursor copy; 8 bytes, one access.
struct alignas(8) Cursor {
    int16_t origin;
    int16_t history;
    int16_t pending;
    int16_t limit;
};
static_assert(sizeof(Cursor) == sizeof(int16_t) * kCursorWords, "a cursor copy is one 8-byte access");

struct RingPlan {
    int origin;    // ring row of the oldest committed token
    int committed; // live rows
    int history;   // of them, rows that outputs read from the ring: 0 when this step folds them
    bool flush;
};

//! How many of `available` rows are meant: -1 means all, other values are clamped.
__device__ __forceinline__ int clamp_count(int64_t count, int available) {
    if (count == -1 || count > available) return available;
    return count < 0 ? 0 : static_cast<int>(count);
}

__device__ __forceinline__ RingPlan plan_step(const Cursor& cursor, int64_t accepted, int tokens) {
    RingPlan plan;
    plan.origin = cursor.origin;
    plan.committed = cursor.history + clamp_count(accepted, cursor.pending);
    plan.flush = plan.committed > 0 && plan.committed + tokens > cursor.limit;
    plan.history = plan.flush ? 0 : plan.committed;
    return plan;
}

//! Physical row of logical row j (0 <= j <= ring_rows) behind origin.
__device__ __forceinline__ int ring_row(int origin, int j, int ring_rows) {
    const int row = origin + j;
    return row >= ring_rows ? row - ring_rows : row;
}

//! The cursor after a step; limit: of the window that the next step meets.
__device__ __forceinline__ Cursor next_cursor(const RingPlan& plan, int limit, int tokens, int ring_rows) {
    Cursor cursor;
    cursor.origin = static_cast<int16_t>(plan.flush ? ring_row(plan.origin, plan.committed, ring_rows) : plan.origin);
    cursor.history = static_cast<int16_t>(plan.history);
    cursor.pending = static_cast<int16_t>(tokens);
    cursor.limit = static_cast<int16_t>(limit);
    return cursor;
}

//! Cursor of a slot whose ring is empty: the first window is shortened by a phase that follows from the slot's number.
__device__ __forceinline__ Cursor reset_cursor(int64_t slot, int window, bool stagger) {
    const int limit = stagger ? window - static_cast<int>(slot % window) : window;
    return Cursor{0, 0, 0, static_cast<int16_t>(limit)};
}

} // namespace replayssm
