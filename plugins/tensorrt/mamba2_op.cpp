//! ReplayMamba2: Mamba-2 with replay over mamba2_step and mamba2_scan.
//! Inputs: x, state, dt, dt_bias, A, B, C, D, host_request_types, last_token_ids, [host_context_lengths],
//! slot_mapping, [z], [accepted], [has_initial]. Output: y.
#include "../common/slot_layout.h"
#include "op.h"
#include "recurrence_fields.h"
#include "row_fields.h"

#include <limits>

namespace replayssm::plugin {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr FieldSpec kFields[] = {
    required_int("nheads", 1, kMaxHeads),
    required_int("ngroups", 1, kMaxHeads),
    required_int("headdim", 16, kMaxHeadDim),
    required_int("dstate", 16, kMaxHeadDim),
    required_int("type_id", 0, 9),
    optional_int("state_type_id", kFloat32, 0, 9),
    optional_int("window", 16, 1, kMaxWindow),
    optional_int("spec_len", 1, 1, kMaxSpecLen),
    optional_flag("stagger", 1),
    optional_flag("dt_softplus", 1),
    optional_float("dt_min", 0.0, 0.0, kInfinity),
    optional_float("dt_max", kInfinity, 0.0, kInfinity),
    optional_flag("z_enabled", 0),
    optional_flag("exact_scan", 0),
    REPLAYSSM_ROW_FIELDS,
    offset_field("x_offset"),
    offset_field("dt_offset"),
    offset_field("b_offset"),
    offset_field("c_offset"),
    offset_field("z_offset"),
};

class Mamba2Op final : public ReplayOp {
public:
    explicit Mamba2Op(const FieldSet& fields)
        : ReplayOp(fields, fields.integer("spec_len")), spec_(recurrence_spec(fields, REPLAYSSM_MAMBA2)),
          exact_(fields.integer("exact_scan")) {
        spec_.dt_softplus = fields.integer("dt_softplus");
        spec_.dt_min = fields.real("dt_min");
        spec_.dt_max = fields.real("dt_max");
        const int64_t slot_bytes = slot_layout(spec_).slot_bytes;
        const int64_t heads = spec_.nheads, channels = heads * spec_.headdim, states = spec_.ngroups * spec_.dstate;
        x_ = add_tokens("x", channels, "x_offset", true);
        add_state(slot_bytes);
        dt_ = add_tokens("dt", heads, "dt_offset", false);
        dt_bias_ = add_exact("dt_bias", kFloat32, {heads});
        A_ = add_exact("A", kFloat32, {heads});
        B_ = add_tokens("B", states, "b_offset", true);
        C_ = add_tokens("C", states, "c_offset", true);
        D_ = add_exact("D", kFloat32, {heads});
        add_row_inputs();
        if (fields.flag("z_enabled")) z_ = add_tokens("z", channels, "z_offset", true);
        add_last_row_inputs();
        add_output("y", channels);
    }

    std::unique_ptr<ReplayOp> clone() const override { return std::make_unique<Mamba2Op>(*this); }

protected:
    template <class Params>
    void fill(const Call& call, Params& params) const {
        params.struct_size = sizeof(params);
        params.spec = spec_;
        params.pool = pool(call);
        params.A = parameter(call, A_);
        params.D = parameter(call, D_);
        params.dt_bias = parameter(call, dt_bias_);
    }

    void step(const Call& call, const RowPlan& plan) const override {
        replayssm_mamba2_step_params params{};
        fill(call, params);
        params.rows = plan.step_rows();
        params.tokens = plan.step_tokens;
        params.slots = step_slots(call, plan);
        params.accepted = step_accepted(call, plan);
        params.x = step_view(call, plan, x_, spec_.headdim);
        params.dt = step_view(call, plan, dt_, 1);
        params.B = step_view(call, plan, B_, spec_.dstate);
        params.C = step_view(call, plan, C_, spec_.dstate);
        if (z_ >= 0) params.z = step_view(call, plan, z_, spec_.headdim);
        params.y = step_view(call, plan, output(), spec_.headdim);
        require_ok(replayssm_mamba2_step(&params, call.stream));
    }

    void scan(const Call& call, const RowPlan&, const ScanRows& rows) const override {
        replayssm_mamba2_scan_params params{};
        fill(call, params);
        params.sequences = rows.sequences;
        params.tokens = rows.tokens;
        params.slots = {rows.slots, 32, 0};
        params.cu_seqlens = {rows.cu_seqlens, 32, 0};
        params.has_initial = rows.has_initial;
        params.x = scan_view(call, x_, spec_.headdim);
        params.dt = scan_view(call, dt_, 1);
        params.B = scan_view(call, B_, spec_.dstate);
        params.C = scan_view(call, C_, spec_.dstate);
        if (z_ >= 0) params.z = scan_view(call, z_, spec_.headdim);
        params.y = scan_view(call, output(), spec_.headdim);
        params.exact = exact_;
        require_ok(replayssm_mamba2_scan(&params, call.stream));
    }

private:
    replayssm_recurrence_spec spec_;
    int32_t exact_;
    int x_ = -1, dt_ = -1, dt_bias_ = -1, A_ = -1, B_ = -1, C_ = -1, D_ = -1, z_ = -1;
};

std::unique_ptr<ReplayOp> make(const FieldSet& fields) { return std::make_unique<Mamba2Op>(fields); }

} // namespace

extern const OpInfo kMamba2Op{{"ReplayMamba2", kFields, sizeof(kFields) / sizeof(kFields[0])}, make};

} // namespace replayssm::plugin
