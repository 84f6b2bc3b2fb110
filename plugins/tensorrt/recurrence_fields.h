//! The fields that the recurrent plugins share, as a replayssm_recurrence_spec.
#pragma once

#include "op.h"

#include <limits>

namespace replayssm::plugin {

inline replayssm_recurrence_spec recurrence_spec(const FieldSet& fields, int32_t kind) {
    require_float_type(fields, "state_type_id");
    for (const char* name : {"headdim", "dstate"}) {
        require(fields.integer(name) % 16 == 0, "field ", name, " is ", fields.integer(name),
            "; it must be a multiple of 16");
    }
    require(fields.integer("nheads") % fields.integer("ngroups") == 0, "field ngroups is ", fields.integer("ngroups"),
        "; it must divide nheads, which is ", fields.integer("nheads"));
    replayssm_recurrence_spec spec{};
    spec.struct_size = sizeof(spec);
    spec.kind = kind;
    spec.nheads = fields.integer("nheads");
    spec.ngroups = fields.integer("ngroups");
    spec.headdim = fields.integer("headdim");
    spec.dstate = fields.integer("dstate");
    spec.state_dtype = dtype_of(fields.integer("state_type_id"));
    spec.act_dtype = dtype_of(fields.integer("type_id"));
    spec.window = fields.integer("window");
    spec.spec_len = fields.integer("spec_len");
    spec.read_copy = REPLAYSSM_COPY_NONE;
    spec.stagger = fields.integer("stagger");
    spec.dt_softplus = 1;
    spec.dt_max = std::numeric_limits<float>::infinity();
    spec.gate_lower_bound = -5.0f;
    spec.qk_l2norm = 1;
    return spec;
}

} // namespace replayssm::plugin
