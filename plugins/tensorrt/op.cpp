#include "op.h"

#include "../common/slot_layout.h"

#include <utility>

namespace replayssm::plugin {
namespace {

int bytes_of(int32_t type) { return type == kFloat32 || type == kInt32 ? 4 : type == kInt64 ? 8 : 2; }

//! Prints "[3, 64]"; costs nothing until it is printed.
struct Extents {
    const TensorInfo& tensor;

    friend std::ostream& operator<<(std::ostream& out, const Extents& extents) {
        out << "[";
        for (int axis = 0; axis < extents.tensor.rank; ++axis)
            out << (axis == 0 ? "" : ", ") << extents.tensor.extents[axis];
        return out << "]";
    }
};

} // namespace

int32_t dtype_of(int32_t type_code) {
    switch (type_code) {
        case kFloat32: return REPLAYSSM_FLOAT32;
        case kFloat16: return REPLAYSSM_FLOAT16;
        case kBfloat16: return REPLAYSSM_BFLOAT16;
        default:
            fail(REPLAYSSM_UNSUPPORTED, "type ", type_code,
                " has no kernels; there are 0 (float32), 1 (float16) "
                "and 7 (bfloat16)");
    }
}

const char* type_name(int32_t type_code) {
    switch (type_code) {
        case kFloat32: return "float32";
        case kFloat16: return "float16";
        case 2: return "int8";
        case kInt32: return "int32";
        case 4: return "bool";
        case kBfloat16: return "bfloat16";
        case kInt64: return "int64";
        default: return "another type";
    }
}

void require_ok(int32_t status) {
    if (status != REPLAYSSM_OK) throw Error(static_cast<replayssm_status>(status), replayssm_last_error());
}

void require_float_type(const FieldSet& fields, const char* field) {
    const int32_t value = fields.integer(field);
    require(value == kFloat32 || value == kFloat16 || value == kBfloat16, "field ", field, " is ", value,
        "; it must be 0 (float32), 1 (float16) or 7 (bfloat16)");
}

ReplayOp::ReplayOp(const FieldSet& fields, int64_t spec_len) : spec_len_(spec_len), fields_(fields) {
    require_float_type(fields, "type_id");
    type_ = fields.integer("type_id");
    packed_ = fields.flag("remove_input_padding");
    paged_ = fields.flag("paged_state");
    aliased_ = fields.flag("aliased_state");
    require(!(paged_ && aliased_),
        "fields aliased_state and paged_state are both 1; a paged state is no tensor that an output could alias");
}

int ReplayOp::add(TensorRule rule) {
    rules_.push_back(std::move(rule));
    require(rules_.size() <= kMaxTensors, "too many tensors");
    return static_cast<int>(rules_.size()) - 1;
}

int ReplayOp::add_tokens(const char* tensor, int64_t width, const char* offset_field, bool vectors) {
    TensorRule rule{tensor, TensorRule::kTokens, {type_, kNoType}, {}};
    rule.width = width;
    rule.offset = fields_.integer(offset_field);
    rule.vectors = vectors;
    require(!vectors || rule.offset * bytes_of(type_) % kAlignment == 0, "field ", offset_field, " is ", rule.offset,
        "; in bytes it must be a multiple of ", kAlignment);
    return add(std::move(rule));
}

int ReplayOp::add_exact(const char* tensor, int32_t type, std::vector<int64_t> extents, int32_t other_type) {
    return add({tensor, TensorRule::kExact, {type, other_type}, std::move(extents)});
}

void ReplayOp::add_state(int64_t slot_bytes) {
    const int64_t stride = fields_.integer("slot_stride");
    require(stride == 0 || (stride >= slot_bytes && stride % kAlignment == 0), "field slot_stride is ", stride,
        "; a slot of these fields takes ", slot_bytes, " bytes, so it must be 0 or a multiple of ", kAlignment,
        " and at least that (a smaller window or spec_len makes a slot smaller)");
    slot_bytes_ = slot_bytes;
    slot_stride_ = stride != 0 ? stride : slot_bytes;
    max_slots_ = fields_.integer("max_slots");
    state_ = paged_ ? add({"state", TensorRule::kAddress, {kInt64, kInt32}, {}})
                    : add({"state", TensorRule::kPool, {kInt32, kNoType}, {}});
}

void ReplayOp::add_row_inputs() {
    const auto rows = [&](const char* tensor) { return add({tensor, TensorRule::kRows, {kInt32, kNoType}, {}}); };
    request_types_ = rows("host_request_types");
    last_token_ids_ = rows("last_token_ids");
    if (packed_) context_lengths_ = rows("host_context_lengths");
    slot_mapping_ = rows("slot_mapping");
}

void ReplayOp::add_last_row_inputs() {
    const auto rows = [&](const char* tensor) { return add({tensor, TensorRule::kRows, {kInt32, kNoType}, {}}); };
    if (fields_.flag("has_accepted")) accepted_ = rows("accepted");
    if (fields_.flag("has_initial")) has_initial_ = rows("has_initial");
    inputs_ = static_cast<int>(rules_.size());
}

void ReplayOp::add_output(const char* tensor, int64_t width) {
    TensorRule rule{tensor, TensorRule::kTokens, {type_, kNoType}, {}};
    rule.width = width;
    rule.vectors = true;
    add(std::move(rule));
    if (aliased_) add({"state_out", TensorRule::kPool, {kInt32, kNoType}, {}});
}

void ReplayOp::check_counts(int num_inputs, int num_outputs) const {
    if (num_inputs == inputs_ && num_outputs == this->num_outputs()) return;
    std::string names;
    for (int i = 0; i < inputs_; ++i)
        names += (i == 0 ? "" : ", ") + std::string(rules_[i].name);
    fail(REPLAYSSM_INVALID_ARGUMENT, "there are ", num_inputs, " inputs and ", num_outputs,
        " outputs; with these fields there are ", this->num_outputs(), " outputs and the ", inputs_, " inputs ", names);
}

void ReplayOp::check_rank(int input, int rank) const {
    const TensorRule& rule = rules_[input];
    const int wanted = rule.shape == TensorRule::kTokens ? (packed_ ? 2 : 3)
        : rule.shape == TensorRule::kExact               ? static_cast<int>(rule.exact.size())
        : rule.shape == TensorRule::kPool                ? 2
                                                         : 1;
    require(rank == wanted, rule.name, " has ", rank, " axes; it must have ", wanted,
        rule.shape != TensorRule::kTokens ? ""
            : packed_                     ? " (remove_input_padding is 1: [tokens, features])"
                                          : " (remove_input_padding is 0: [rows, tokens, features])");
}

void ReplayOp::check_extents(int index, const TensorInfo& tensor) const {
    check_rank(index, tensor.rank);
    const TensorRule& rule = rules_[index];
    const int64_t last = tensor.last();
    switch (rule.shape) {
        case TensorRule::kTokens:
            if (last == kUnknownExtent) return;
            require(index < inputs_ ? last >= rule.offset + rule.width : last == rule.width, rule.name, " is ",
                Extents{tensor}, "; its last axis must have ", index < inputs_ ? "at least " : "",
                rule.offset + rule.width, rule.offset == 0 ? "" : " (offset and width)");
            require(!rule.vectors || last * bytes_of(type_) % kAlignment == 0, rule.name, " has rows of ", last,
                " elements; in bytes that must be a multiple of ", kAlignment);
            return;
        case TensorRule::kExact:
            for (int axis = 0; axis < tensor.rank; ++axis) {
                require(tensor.extents[axis] == rule.exact[axis] || tensor.extents[axis] == kUnknownExtent, rule.name,
                    " is ", Extents{tensor}, "; axis ", axis, " must have ", rule.exact[axis]);
            }
            return;
        case TensorRule::kPool: {
            if (last == kUnknownExtent) return;
            const int64_t bytes = last * 4;
            require(bytes >= slot_bytes_ && bytes % kAlignment == 0, rule.name, " is ", Extents{tensor},
                "; a slot takes ", slot_bytes_, " bytes, so its last axis must have at least ", slot_bytes_ / 4,
                " words and a multiple of ", kAlignment / 4);
            return;
        }
        case TensorRule::kAddress: {
            const int64_t wanted = tensor.type == kInt32 ? 2 : 1;
            require(last == wanted || last == kUnknownExtent, rule.name, " is ", Extents{tensor}, " ",
                type_name(tensor.type), "; it must be int64 [1] or int32 [2], the pool's address");
            return;
        }
        case TensorRule::kRows: return;
    }
}

bool ReplayOp::supports(int position, const TensorInfo* tensors, int num_inputs, int num_outputs) const {
    check_counts(num_inputs, num_outputs);
    require_range("position", position, 0, num_inputs + num_outputs - 1);
    const TensorRule& rule = rules_[position];
    const TensorInfo& tensor = tensors[position];
    if (tensor.format != kLinear || (tensor.type != rule.types[0] && tensor.type != rule.types[1])) return false;
    if (rule.shape == TensorRule::kAddress) { // of two types, the one that goes with the extent
        check_rank(position, tensor.rank);
        if (tensor.last() != kUnknownExtent && tensor.last() != (tensor.type == kInt32 ? 2 : 1)) return false;
    }
    check_extents(position, tensor);
    return true;
}

void ReplayOp::check(const TensorInfo* tensors, int num_inputs, int num_outputs) const {
    check_counts(num_inputs, num_outputs);
    for (int i = 0; i < num_inputs + num_outputs; ++i) {
        const TensorRule& rule = rules_[i];
        const int32_t type = tensors[i].type;
        require(type == rule.types[0] || (rule.types[1] != kNoType && type == rule.types[1]), rule.name, " is ",
            type_name(type), "; it must be ", type_name(rule.types[0]), rule.types[1] == kNoType ? "" : " or ",
            rule.types[1] == kNoType ? "" : type_name(rule.types[1]));
        check_extents(i, tensors[i]);
    }
}

OutputShape ReplayOp::output_shape(int index) const {
    require_range("output", index, 0, num_outputs() - 1);
    if (index == 1) return {state_, kUnknownExtent};
    return {0, rules_[output()].width};
}

const void* ReplayOp::data(const Call& call, int tensor) const {
    return tensor < inputs_ ? call.inputs[tensor] : call.outputs[tensor - inputs_];
}

replayssm_pool ReplayOp::pool(const Call& call) const {
    replayssm_pool out{};
    if (paged_) {
        uint64_t address = 0;
        require(call.inputs[state_] != nullptr, "state is NULL; it must be the host address of 8 bytes");
        std::memcpy(&address, call.inputs[state_], sizeof(address));
        out.base = reinterpret_cast<void*>(address);
        out.stride_bytes = slot_stride_;
        out.slots = max_slots_ != 0 ? max_slots_ : INT32_MAX;
        return out;
    }
    const TensorInfo& tensor = call.tensors[state_];
    out.base = const_cast<void*>(call.inputs[state_]);
    require(!aliased_ || call.outputs[1] == out.base,
        "state_out is not where state is; aliased_state needs TensorRT's "
        "preview feature for aliased plugin tensors");
    out.stride_bytes = tensor.last() * 4;
    out.slots = tensor.extents[0];
    if (max_slots_ != 0 && max_slots_ < out.slots) out.slots = max_slots_;
    return out;
}

replayssm_tensor ReplayOp::scan_view(const Call& call, int tensor, int64_t inner) const {
    const TensorRule& rule = rules_[tensor];
    replayssm_tensor out{};
    out.data = static_cast<const char*>(data(call, tensor)) + rule.offset * bytes_of(type_);
    out.dtype = dtype_of(type_);
    out.strides[0] = call.tensors[tensor].last();
    out.strides[1] = inner;
    out.strides[2] = 1;
    return out;
}

replayssm_tensor ReplayOp::step_view(const Call& call, const RowPlan& plan, int tensor, int64_t inner) const {
    replayssm_tensor out = scan_view(call, tensor, inner);
    const int64_t row = out.strides[0];
    out.data = static_cast<const char*>(out.data) + plan.context_tokens * row * bytes_of(type_);
    out.strides[0] = plan.step_tokens * row;
    out.strides[1] = row;
    out.strides[2] = inner;
    out.strides[3] = 1;
    return out;
}

replayssm_tensor ReplayOp::parameter(const Call& call, int input) const {
    const TensorInfo& tensor = call.tensors[input];
    replayssm_tensor out{};
    out.data = call.inputs[input];
    out.dtype = dtype_of(tensor.type);
    out.strides[0] = tensor.rank == 2 ? tensor.extents[1] : 1;
    out.strides[1] = tensor.rank == 2 ? 1 : 0;
    return out;
}

replayssm_index ReplayOp::step_slots(const Call& call, const RowPlan& plan) const {
    return {static_cast<const int32_t*>(call.inputs[slot_mapping_]) + plan.context_rows, 32, 0};
}

replayssm_index ReplayOp::step_accepted(const Call& call, const RowPlan& plan) const {
    if (accepted_ < 0) return {nullptr, 32, 0};
    return {static_cast<const int32_t*>(call.inputs[accepted_]) + plan.context_rows, 32, 0};
}

RowPlan ReplayOp::plan_rows(const Call& call) const {
    RowPlan plan;
    const int64_t rows = call.tensors[request_types_].extents[0];
    require_range("rows", rows, 0, 32767);
    plan.rows = static_cast<int>(rows);
    for (int input : {last_token_ids_, context_lengths_, slot_mapping_, accepted_, has_initial_}) {
        require(input < 0 || call.tensors[input].extents[0] == rows, rules_[input < 0 ? 0 : input].name, " has ",
            input < 0 ? 0 : call.tensors[input].extents[0], " rows; host_request_types has ", rows);
    }
    const TensorInfo& x = call.tensors[0];
    for (int i = 1; i < static_cast<int>(rules_.size()); ++i) {
        if (rules_[i].shape != TensorRule::kTokens) continue;
        for (int axis = 0; axis + 1 < x.rank; ++axis) {
            require(call.tensors[i].extents[axis] == x.extents[axis], rules_[i].name, " is ", Extents{call.tensors[i]},
                " with ", rules_[0].name, " ", Extents{x});
        }
    }
    if (rows == 0) { // no row has them, so nothing would write their outputs
        require(x.extents[0] == 0, rules_[0].name, " is ", Extents{x}, "; host_request_types has no rows");
        return plan;
    }
    const auto* types = static_cast<const int32_t*>(call.inputs[request_types_]);
    require(types != nullptr, "host_request_types is NULL");
    for (int row = 0; row < plan.rows; ++row) {
        require(types[row] == 0 || types[row] == 1, "host_request_types[", row, "] is ", types[row],
            "; it must be 0 (context) or 1 (generation)");
        require(types[row] == 1 || row == plan.context_rows, "host_request_types[", row,
            "] is 0 behind a generation row; context rows come first");
        if (types[row] == 0) ++plan.context_rows;
    }
    if (!packed_) {
        require(x.extents[0] == rows, rules_[0].name, " has ", x.extents[0], " rows; host_request_types has ", rows);
        require(plan.context_rows == 0 || plan.context_rows == plan.rows, "host_request_types has ", plan.context_rows,
            " context rows of ", rows, "; padded input is all context or all generation");
        plan.padded_length = x.extents[1];
        if (plan.context_rows > 0) plan.context_tokens = rows * plan.padded_length;
        plan.step_tokens = static_cast<int>(plan.padded_length);
    } else {
        const auto* lengths = static_cast<const int32_t*>(call.inputs[context_lengths_]);
        require(lengths != nullptr, "host_context_lengths is NULL");
        for (int row = 0; row < plan.context_rows; ++row) {
            require_range("host_context_lengths", lengths[row], 0, x.extents[0]);
            plan.context_tokens += lengths[row];
        }
        const int64_t left = x.extents[0] - plan.context_tokens;
        const int64_t steps = plan.step_rows();
        require(steps == 0 ? left == 0 : left % steps == 0, rules_[0].name, " has ", x.extents[0], " tokens, of which ",
            plan.context_tokens, " are of context rows; the others must share evenly among ", steps,
            " generation rows");
        plan.step_tokens = steps == 0 ? 0 : static_cast<int>(left / steps);
    }
    if (plan.step_rows() > 0) require_range("tokens of a generation row", plan.step_tokens, 1, spec_len_);
    return plan;
}

ScanRows ReplayOp::prepare_scan(const Call& call, const RowPlan& plan) const {
    ScanRowsParams params;
    params.last_token_ids = static_cast<const int32_t*>(call.inputs[last_token_ids_]);
    params.slot_mapping = static_cast<const int32_t*>(call.inputs[slot_mapping_]);
    if (has_initial_ >= 0) params.has_initial = static_cast<const int32_t*>(call.inputs[has_initial_]);
    params.rows = plan.context_rows;
    params.padded_length = plan.padded_length;
    params.tokens = plan.context_tokens;
    return launch_scan_rows(params, call.workspace, call.stream);
}

void ReplayOp::run(const Call& call) const {
    check(call.tensors, inputs_, num_outputs());
    const RowPlan plan = plan_rows(call);
    if (plan.rows == 0) return;
#if defined(REPLAYSSM_DEBUG_CHECKS)
    launch_slot_check(
        static_cast<const int32_t*>(call.inputs[slot_mapping_]), plan.rows, pool(call).slots, call.stream);
#endif
    if (plan.context_rows > 0) scan(call, plan, prepare_scan(call, plan));
    if (plan.step_rows() > 0) step(call, plan);
}

} // namespace replayssm::plugin
