//! Rows of the field tables that every plugin has.
#pragma once

#include "fields.h"

#include <cstdint>

// clang-format off
#define REPLAYSSM_ROW_FIELDS                                                                                           \
    optional_flag("remove_input_padding", 1), optional_flag("paged_state", 1), optional_flag("aliased_state", 0),      \
    optional_flag("has_accepted", 0), optional_flag("has_initial", 0), optional_int("slot_stride", 0, 0, INT32_MAX),   \
    optional_int("max_slots", 0, 0, INT32_MAX)
// clang-format on

namespace replayssm::plugin {

constexpr int64_t kMaxOffset = 1 << 24;
constexpr FieldSpec offset_field(const char* name) { return optional_int(name, 0, 0, kMaxOffset); }

} // namespace replayssm::plugin
