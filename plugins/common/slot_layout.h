//! Where every byte of a slot lies: the C++ side of trtllm_replayssm/layout.py, which explains the regions.
//! Host code; tests/cpu/test_kernels_binding.py compares the packed structs byte for byte.
#pragma once

#include "checks.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

namespace replayssm {

constexpr int kCursorWords = 4;  // origin, history_len, pending_len, limit
constexpr int kCursorCopies = 4; // equal copies per head, one for each block that may share the head
constexpr int kConvCursorChannels = 64;
constexpr uint32_t kLayoutVersion = 3;
constexpr int kMaxWindow = 64;
constexpr int kMaxSpecLen = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeads = 1024;

enum RegionIndex : int {
    kCursor,
    kState,
    kStateScale,
    kReadCopy,
    kReadScale,
    kRingX,
    kRingB,
    kRingDt,
    kRingK,
    kRingKRnorm,
    kRingV,
    kRingD,
    kRingG,
    kRingBeta,
    kColumns,
};

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

class LayoutBuilder {
public:
    explicit LayoutBuilder(int64_t rows) {
        std::memset(&out_, 0, sizeof(out_));
        std::memcpy(out_.magic, "RSSMSLOT", 8);
        out_.version = kLayoutVersion;
        out_.region_count = REPLAYSSM_LAYOUT_REGIONS;
        out_.ring_rows = rows;
        for (auto& region : out_.regions)
            region.offset = -1;
    }

    //! Append a region: rows (the last axis) padded to row_alignment bytes, the region starting on a 128-byte line.
    void add(RegionIndex index, int32_t dtype, std::initializer_list<int64_t> shape, int64_t row_alignment = 16) {
        const int64_t size = dtype_bytes(dtype);
        const int rank = static_cast<int>(shape.size());
        const int64_t* extent = shape.begin();
        replayssm_region& region = out_.regions[index];
        int64_t stride = 1;
        region.strides[rank - 1] = 1;
        for (int axis = rank - 2; axis >= 0; --axis) {
            stride =
                axis == rank - 2 ? round_up(extent[rank - 1] * size, row_alignment) / size : stride * extent[axis + 1];
            region.strides[axis] = stride;
        }
        region.nbytes = round_up(extent[0] * stride * size, 16);
        region.offset = round_up(end_, 128);
        region.dtype = dtype;
        region.rank = rank;
        end_ = region.offset + region.nbytes;
        out_.slot_bytes = round_up(end_, 128);
    }

    const replayssm_layout& result() const { return out_; }

private:
    replayssm_layout out_;
    int64_t end_ = 0;
};

inline void require_act_dtype(int32_t dtype) {
    require(dtype == REPLAYSSM_BFLOAT16 || dtype == REPLAYSSM_FLOAT16 || dtype == REPLAYSSM_FLOAT32 ||
            dtype == REPLAYSSM_FLOAT64,
        "spec.act_dtype is ", dtype_name(dtype), "; it must be bfloat16, float16, float32 or float64");
}

inline void check_spec(const replayssm_recurrence_spec& s) {
    require_size("spec", s.struct_size, sizeof(s));
    require_range("spec.kind", s.kind, REPLAYSSM_MAMBA2, REPLAYSSM_KIMI_DELTA);
    require_range("spec.nheads", s.nheads, 1, kMaxHeads);
    require_range("spec.ngroups", s.ngroups, 1, kMaxHeads);
    require(
        s.nheads % s.ngroups == 0, "spec.ngroups is ", s.ngroups, "; it must divide spec.nheads, which is ", s.nheads);
    for (auto [name, value] : {std::pair{"spec.headdim", s.headdim}, std::pair{"spec.dstate", s.dstate}}) {
        require(value >= 8 && value <= kMaxHeadDim && value % 8 == 0, name, " is ", value,
            "; it must be a multiple of 8 from 8 to ", kMaxHeadDim);
    }
    require_act_dtype(s.act_dtype);
    require(s.state_dtype >= REPLAYSSM_FLOAT64 && s.state_dtype <= REPLAYSSM_FLOAT16, "spec.state_dtype is ",
        dtype_name(s.state_dtype), "; it must be float32, bfloat16, float16 or float64");
    require((s.state_dtype == REPLAYSSM_FLOAT64) == (s.act_dtype == REPLAYSSM_FLOAT64), "spec.state_dtype is ",
        dtype_name(s.state_dtype), " with spec.act_dtype ", dtype_name(s.act_dtype),
        "; float64 must be chosen for both or neither");
    require_range("spec.window", s.window, 1, kMaxWindow);
    require_range("spec.spec_len", s.spec_len, 1, kMaxSpecLen);
    require_range("spec.read_copy", s.read_copy, REPLAYSSM_COPY_NONE, REPLAYSSM_COPY_INT8);
    require(s.read_copy != REPLAYSSM_COPY_BF16 || s.state_dtype <= REPLAYSSM_FLOAT32,
        "spec.read_copy is bf16 with spec.state_dtype ", dtype_name(s.state_dtype),
        "; it must be none, fp8_e4m3 or int8");
    require(s.dt_min >= 0.0f && std::isfinite(s.dt_min) && s.dt_max >= s.dt_min, "spec.dt_min is ", s.dt_min,
        " with spec.dt_max ", s.dt_max, "; they must satisfy 0 <= dt_min <= dt_max, dt_min finite");
}

inline int64_t ring_rows(const replayssm_recurrence_spec& s) {
    return (s.window > s.spec_len ? s.window : s.spec_len) + s.spec_len;
}

//! Whether the checkpoint is state_scale times the region `state` (trtllm_replayssm/layout.py).
inline bool has_state_scale(const replayssm_recurrence_spec& s) {
    return s.state_dtype == REPLAYSSM_FLOAT32 && s.kind != REPLAYSSM_KIMI_DELTA;
}

//! Layout of a recurrent layer's slot. Throws Error for a spec that is not allowed.
inline replayssm_layout slot_layout(const replayssm_recurrence_spec& s) {
    check_spec(s);
    const int64_t rows = ring_rows(s), heads = s.nheads, groups = s.ngroups, headdim = s.headdim, dstate = s.dstate;
    const int32_t act = s.act_dtype, decay = act == REPLAYSSM_FLOAT64 ? REPLAYSSM_FLOAT64 : REPLAYSSM_FLOAT32;
    constexpr int32_t kCopyDtype[] = {0, REPLAYSSM_BFLOAT16, REPLAYSSM_FLOAT8_E4M3, REPLAYSSM_INT8};
    LayoutBuilder add(rows);
    add.add(kCursor, REPLAYSSM_INT16, {heads, kCursorCopies, kCursorWords}, 8);
    add.add(kState, s.state_dtype, {heads, headdim, dstate});
    if (has_state_scale(s)) add.add(kStateScale, REPLAYSSM_FLOAT64, {heads, kCursorCopies});
    if (s.read_copy != REPLAYSSM_COPY_NONE) add.add(kReadCopy, kCopyDtype[s.read_copy], {heads, headdim, dstate});
    if (s.read_copy >= REPLAYSSM_COPY_FP8_E4M3) add.add(kReadScale, decay, {heads, headdim});
    if (s.kind == REPLAYSSM_MAMBA2) {
        add.add(kRingX, act, {heads, rows, headdim});
        add.add(kRingB, act, {groups, rows, dstate});
        add.add(kRingDt, decay, {heads, rows});
        return add.result();
    }
    add.add(kRingK, act, {groups, rows, dstate});
    add.add(kRingKRnorm, decay, {groups, rows});
    add.add(kRingV, act, {heads, rows, headdim});
    add.add(kRingD, act, {heads, rows, headdim});
    if (s.kind == REPLAYSSM_KIMI_DELTA) {
        add.add(kRingG, decay, {heads, rows, dstate});
    } else {
        add.add(kRingG, decay, {heads, rows});
    }
    add.add(kRingBeta, decay, {heads, rows});
    return add.result();
}

inline void check_conv_spec(const replayssm_conv_spec& s) {
    require_size("spec", s.struct_size, sizeof(s));
    require(s.channels >= 8 && s.channels <= 65536 && s.channels % 8 == 0, "spec.channels is ", s.channels,
        "; it must be a multiple of 8 from 8 to 65536");
    require_range("spec.kernel", s.kernel, 2, 8);
    require_act_dtype(s.act_dtype);
    require_range("spec.spec_len", s.spec_len, 1, kMaxSpecLen);
}

//! Layout of a convolution's slot.
inline replayssm_layout conv_layout(const replayssm_conv_spec& s) {
    check_conv_spec(s);
    const int64_t columns = s.kernel - 1 + s.spec_len;
    LayoutBuilder add(columns);
    add.add(
        kCursor, REPLAYSSM_INT16, {round_up(s.channels, kConvCursorChannels) / kConvCursorChannels, kCursorWords}, 8);
    add.add(kColumns, s.act_dtype, {columns, s.channels});
    return add.result();
}

} // namespace replayssm
