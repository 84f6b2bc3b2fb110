//! ReplayCausalConv: the causal convolution over conv_step and conv_scan.
//! Inputs: x, state, weight, [bias], host_request_types, last_token_ids, [host_context_lengths], slot_mapping,
//! [accepted], [has_initial]. Output: y.
#include "../common/slot_layout.h"
#include "op.h"
#include "row_fields.h"

namespace replayssm::plugin {
namespace {

constexpr FieldSpec kFields[] = {
    required_int("channels", 8, 65536),
    required_int("kernel", 2, 8),
    required_int("type_id", 0, 9),
    optional_int("spec_len", 1, 1, kMaxSpecLen),
    optional_flag("silu", 1),
    optional_flag("has_bias", 1),
    REPLAYSSM_ROW_FIELDS,
    offset_field("x_offset"),
};

class ConvOp final : public ReplayOp {
public:
    explicit ConvOp(const FieldSet& fields) : ReplayOp(fields, fields.integer("spec_len")) {
        spec_.struct_size = sizeof(spec_);
        spec_.channels = fields.integer("channels");
        spec_.kernel = fields.integer("kernel");
        spec_.act_dtype = dtype_of(type_);
        spec_.spec_len = fields.integer("spec_len");
        spec_.silu = fields.integer("silu");
        const int64_t slot_bytes = conv_layout(spec_).slot_bytes;
        x_ = add_tokens("x", spec_.channels, "x_offset", true);
        add_state(slot_bytes);
        const int32_t other = type_ == kFloat32 ? kNoType : kFloat32;
        weight_ = add_exact("weight", type_, {spec_.channels, spec_.kernel}, other);
        if (fields.flag("has_bias")) bias_ = add_exact("bias", type_, {spec_.channels}, other);
        add_row_inputs();
        add_last_row_inputs();
        add_output("y", spec_.channels);
    }

    std::unique_ptr<ReplayOp> clone() const override { return std::make_unique<ConvOp>(*this); }

protected:
    template <class Params>
    void fill(const Call& call, Params& params) const {
        params.struct_size = sizeof(params);
        params.spec = spec_;
        params.pool = pool(call);
        params.weight = parameter(call, weight_);
        if (bias_ >= 0) params.bias = parameter(call, bias_);
    }

    void step(const Call& call, const RowPlan& plan) const override {
        replayssm_conv_step_params params{};
        fill(call, params);
        params.rows = plan.step_rows();
        params.tokens = plan.step_tokens;
        params.slots = step_slots(call, plan);
        params.accepted = step_accepted(call, plan);
        params.x = step_view(call, plan, x_, 1);
        params.y = step_view(call, plan, output(), 1);
        require_ok(replayssm_conv_step(&params, call.stream));
    }

    void scan(const Call& call, const RowPlan&, const ScanRows& rows) const override {
        replayssm_conv_scan_params params{};
        fill(call, params);
        params.sequences = rows.sequences;
        params.tokens = rows.tokens;
        params.slots = {rows.slots, 32, 0};
        params.cu_seqlens = {rows.cu_seqlens, 32, 0};
        params.has_initial = rows.has_initial;
        params.x = scan_view(call, x_, 1);
        params.y = scan_view(call, output(), 1);
        require_ok(replayssm_conv_scan(&params, call.stream));
    }

private:
    replayssm_conv_spec spec_{};
    int x_ = -1, weight_ = -1, bias_ = -1;
};

std::unique_ptr<ReplayOp> make(const FieldSet& fields) { return std::make_unique<ConvOp>(fields); }

} // namespace

extern const OpInfo kConvOp{{"ReplayCausalConv", kFields, sizeof(kFields) / sizeof(kFields[0])}, make};

} // namespace replayssm::plugin
