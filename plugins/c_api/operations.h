//! What the C++ files of the C interface share: tensors with 32-bit strides, and operations that serve several kinds.
#pragma once

#include "../common/checks.h"
#include "../common/slot_layout.h"
#include "../common/step_work.h"

#include <cuda_runtime.h>
#include <utility>

namespace replayssm {

constexpr int64_t kMaxGridRows = 65535; // grid axis y

//! A tensor of the step whose elements lie within 2^31 of the first: strides of its (at most three) leading axes as
//! 32-bit. `inner`: elements that one head spans.
inline StepTensor step_tensor(const char* name, const replayssm_tensor& tensor, int64_t rows, int64_t tokens,
    int64_t heads, int64_t inner = 4096) {
    StepTensor out;
    if (tensor.data == nullptr) return out;
    const int64_t last =
        (rows - 1) * tensor.strides[0] + (tokens - 1) * tensor.strides[1] + (heads - 1) * tensor.strides[2];
    for (int axis = 0; axis < 3; ++axis) {
        const int64_t stride = tensor.strides[axis];
        require(stride >= 0 && stride <= INT32_MAX, name, " has stride ", stride, " along axis ", axis,
            "; it must be from 0 to ", INT32_MAX);
    }
    require(last <= INT32_MAX - inner, name, " spans ", last, " elements; it must span less than 2^31");
    out.data = tensor.data;
    out.row = static_cast<int>(tensor.strides[0]);
    out.token = static_cast<int>(tensor.strides[1]);
    out.head = static_cast<int>(tensor.strides[2]);
    out.dtype = tensor.dtype;
    return out;
}

//! A packed tensor [tokens, ...] as one row of [rows, tokens, ...].
inline replayssm_tensor one_row(replayssm_tensor tensor) {
    for (int axis = 3; axis > 0; --axis)
        tensor.strides[axis] = tensor.strides[axis - 1];
    tensor.strides[0] = 0;
    return tensor;
}

//! Refuses the activations that no kernel has.
inline void require_kernel_dtype(int32_t act_dtype) {
    if (act_dtype == REPLAYSSM_FLOAT64) {
        fail(REPLAYSSM_UNSUPPORTED, "spec.act_dtype is float64; the kernels have bfloat16, float16 and float32");
    }
}

//! Refuses what no step and scan kernel has. `kernels`: their name in messages.
inline void require_kernel_sizes(const replayssm_recurrence_spec& spec, const char* kernels) {
    for (auto [name, value] : {std::pair{"spec.headdim", spec.headdim}, std::pair{"spec.dstate", spec.dstate}}) {
        if (value % 16 != 0) {
            fail(REPLAYSSM_UNSUPPORTED, name, " is ", value, "; the kernels have multiples of 16 from 16 to ",
                kMaxHeadDim);
        }
    }
    if (spec.read_copy != REPLAYSSM_COPY_NONE) {
        fail(REPLAYSSM_UNSUPPORTED, "spec.read_copy is ", spec.read_copy, "; the ", kernels, " kernels have 0 (none)");
    }
    require_kernel_dtype(spec.act_dtype);
}

//! A pool that is large enough for its layout, and where its cursors are; the other regions are the caller's.
template <typename Slots>
Slots pool_slots(const replayssm_pool& pool, const replayssm_layout& layout) {
    require_pool(pool, layout.slot_bytes);
    Slots slots;
    slots.base = static_cast<char*>(pool.base);
    slots.stride_bytes = pool.stride_bytes;
    slots.slots = pool.slots;
    slots.cursor = layout.regions[kCursor].offset;
    return slots;
}

//! What slots of every recurrent kind have; the rings are the caller's.
template <typename Slots>
Slots common_slots(const replayssm_pool& pool, const replayssm_layout& layout) {
    auto slots = pool_slots<Slots>(pool, layout);
    slots.state = layout.regions[kState].offset;
    slots.state_scale = layout.regions[kStateScale].offset;
    slots.ring_rows = static_cast<int>(layout.ring_rows);
    return slots;
}

//! What shapes of every recurrent kind have.
template <typename Shape>
Shape common_shape(const replayssm_recurrence_spec& spec) {
    Shape shape;
    shape.nheads = spec.nheads;
    shape.ngroups = spec.ngroups;
    shape.heads_per_group = spec.nheads / spec.ngroups;
    shape.headdim = spec.headdim;
    shape.dstate = spec.dstate;
    shape.window = spec.window;
    shape.stagger = spec.stagger != 0;
    return shape;
}

//! Checks what every recurrent step is told about its rows and fills those members of `step`; false: there is no row.
template <typename Step, typename Params>
bool fill_step(Step& step, const Params& p, const replayssm_layout& layout) {
    require_range("rows", p.rows, 0, kMaxGridRows);
    require_range("tokens", p.tokens, 1, p.spec.spec_len);
    if (p.rows == 0) return false;
    require_index("slots", p.slots, false);
    require_index("accepted", p.accepted, true);
    step.slots = p.slots;
    step.accepted = p.accepted;
    step.rows = p.rows;
    step.tokens = p.tokens;
    step.committed_cap = static_cast<int>(layout.ring_rows) - p.spec.spec_len;
    return true;
}

//! The same of a scan about its sequences; false: there is no sequence.
template <typename Scan, typename Params>
bool fill_scan(Scan& scan, const Params& p) {
    require_range("sequences", p.sequences, 0, kMaxGridRows);
    require_range("exact", p.exact, 0, 1);
    require_range("tokens", p.tokens, 0, INT32_MAX);
    if (p.sequences == 0) return false;
    require_index("slots", p.slots, false);
    require_index("cu_seqlens", p.cu_seqlens, false);
    scan.slots = p.slots;
    scan.cu_seqlens = p.cu_seqlens;
    scan.has_initial = p.has_initial;
    scan.sequences = p.sequences;
    scan.exact = p.exact != 0;
    return true;
}

//! The same of a materialize about its pairs, whose number is known to be right; false: there is none.
template <typename Work>
bool fill_materialize(Work& work, const replayssm_materialize_params& p) {
    if (p.pairs == 0) return false;
    require_index("src", p.src, false);
    require_index("count", p.count, false);
    require_index("dst", p.dst, false);
    work.src = p.src;
    work.count = p.count;
    work.dst = p.dst;
    work.pairs = p.pairs;
    return true;
}

//! materialize of a GDN or KDA pool; struct size, spec's layout and number of pairs are checked. In gated_delta.cpp.
void materialize_gated_delta(
    const replayssm_materialize_params& params, const replayssm_layout& layout, cudaStream_t stream);

} // namespace replayssm
