//! ReplayGatedDelta: Gated DeltaNet and Kimi Delta Attention with replay over gated_delta_step and gated_delta_scan.
//! Inputs: q, state, k, v, a, b, A_log, dt_bias, host_request_types, last_token_ids, [host_context_lengths],
//! slot_mapping, [accepted], [has_initial]. Output: o.
#include "../common/slot_layout.h"
#include "op.h"
#include "recurrence_fields.h"
#include "row_fields.h"

#include <limits>

namespace replayssm::plugin {
namespace {

constexpr FieldSpec kFields[] = {
    required_int("kind", REPLAYSSM_GATED_DELTA, REPLAYSSM_KIMI_DELTA),
    required_int("nheads", 1, kMaxHeads),
    required_int("ngroups", 1, kMaxHeads),
    required_int("headdim", 16, kMaxHeadDim),
    required_int("dstate", 16, kMaxHeadDim),
    required_int("type_id", 0, 9),
    optional_int("state_type_id", kFloat32, 0, 9),
    optional_int("window", 16, 1, kMaxWindow),
    optional_int("spec_len", 1, 1, kMaxSpecLen),
    optional_flag("stagger", 1),
    optional_flag("qk_l2norm", 1),
    optional_flag("gate_bounded", 0),
    optional_float("gate_lower_bound", -5.0, -5.0, -std::numeric_limits<float>::min()),
    optional_float("scale", 0.0, 0.0, std::numeric_limits<float>::max()),
    optional_flag("exact_scan", 0),
    REPLAYSSM_ROW_FIELDS,
    offset_field("q_offset"),
    offset_field("k_offset"),
    offset_field("v_offset"),
    offset_field("a_offset"),
    offset_field("b_offset"),
};

class GatedDeltaOp final : public ReplayOp {
public:
    explicit GatedDeltaOp(const FieldSet& fields)
        : ReplayOp(fields, fields.integer("spec_len")), spec_(recurrence_spec(fields, fields.integer("kind"))),
          scale_(fields.real("scale")), exact_(fields.integer("exact_scan")) {
        const bool by_channel = spec_.kind == REPLAYSSM_KIMI_DELTA;
        require(by_channel || fields.integer("gate_bounded") == 0,
            "field gate_bounded is 1 with kind 2; it is for kind 3 (KDA)");
        spec_.qk_l2norm = fields.integer("qk_l2norm");
        spec_.gate_bounded = fields.integer("gate_bounded");
        spec_.gate_lower_bound = fields.real("gate_lower_bound");
        const int64_t slot_bytes = slot_layout(spec_).slot_bytes;
        const int64_t heads = spec_.nheads, keys = spec_.ngroups * spec_.dstate, values = heads * spec_.headdim;
        gates_ = by_channel ? spec_.dstate : 1;
        q_ = add_tokens("q", keys, "q_offset", true);
        add_state(slot_bytes);
        k_ = add_tokens("k", keys, "k_offset", true);
        v_ = add_tokens("v", values, "v_offset", true);
        a_ = add_tokens("a", heads * gates_, "a_offset", false);
        b_ = add_tokens("b", heads, "b_offset", false);
        A_log_ = add_exact("A_log", kFloat32, {heads});
        dt_bias_ = add_exact("dt_bias", kFloat32, {heads * gates_});
        add_row_inputs();
        add_last_row_inputs();
        add_output("o", values);
    }

    std::unique_ptr<ReplayOp> clone() const override { return std::make_unique<GatedDeltaOp>(*this); }

protected:
    template <class Params>
    void fill(const Call& call, Params& params) const {
        params.struct_size = sizeof(params);
        params.spec = spec_;
        params.pool = pool(call);
        params.A_log = parameter(call, A_log_);
        params.dt_bias = parameter(call, dt_bias_);
        params.dt_bias.strides[0] = gates_;
        params.dt_bias.strides[1] = gates_ > 1 ? 1 : 0;
        params.scale = scale_;
    }

    void step(const Call& call, const RowPlan& plan) const override {
        replayssm_gated_delta_step_params params{};
        fill(call, params);
        params.rows = plan.step_rows();
        params.tokens = plan.step_tokens;
        params.slots = step_slots(call, plan);
        params.accepted = step_accepted(call, plan);
        params.q = step_view(call, plan, q_, spec_.dstate);
        params.k = step_view(call, plan, k_, spec_.dstate);
        params.v = step_view(call, plan, v_, spec_.headdim);
        params.a = step_view(call, plan, a_, gates_);
        params.b = step_view(call, plan, b_, 1);
        params.o = step_view(call, plan, output(), spec_.headdim);
        require_ok(replayssm_gated_delta_step(&params, call.stream));
    }

    void scan(const Call& call, const RowPlan&, const ScanRows& rows) const override {
        replayssm_gated_delta_scan_params params{};
        fill(call, params);
        params.sequences = rows.sequences;
        params.tokens = rows.tokens;
        params.slots = {rows.slots, 32, 0};
        params.cu_seqlens = {rows.cu_seqlens, 32, 0};
        params.has_initial = rows.has_initial;
        params.q = scan_view(call, q_, spec_.dstate);
        params.k = scan_view(call, k_, spec_.dstate);
        params.v = scan_view(call, v_, spec_.headdim);
        params.a = scan_view(call, a_, gates_);
        params.b = scan_view(call, b_, 1);
        params.o = scan_view(call, output(), spec_.headdim);
        params.exact = exact_;
        require_ok(replayssm_gated_delta_scan(&params, call.stream));
    }

private:
    replayssm_recurrence_spec spec_;
    float scale_;
    int32_t exact_;
    int64_t gates_ = 1; // gates of a head: 1, or one for each key channel
    int q_ = -1, k_ = -1, v_ = -1, a_ = -1, b_ = -1, A_log_ = -1, dt_bias_ = -1;
};

std::unique_ptr<ReplayOp> make(const FieldSet& fields) { return std::make_unique<GatedDeltaOp>(fields); }

} // namespace

extern const OpInfo kGatedDeltaOp{{"ReplayGatedDelta", kFields, sizeof(kFields) / sizeof(kFields[0])}, make};

} // namespace replayssm::plugin
