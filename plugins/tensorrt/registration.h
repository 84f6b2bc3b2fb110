//! Registration of the creators with every TensorRT that is loaded.
#pragma once

#include <string>

namespace replayssm::plugin {

//! Registers what is not registered yet. True if every loaded TensorRT that this library knows has at least one of its
//! creators and there is such a TensorRT. The reasons of a refusal are logged, kept for replayssm_last_error and listed
//! in status().
bool register_everywhere(const std::string& name_space) noexcept;

//! Lines of what has been registered and refused.
std::string status();

} // namespace replayssm::plugin
