//! Errors, versions and layouts: the part of the C interface that needs no CUDA. Builds alone with any C++17 compiler.
#include "../common/slot_layout.h"
#include "guard.h"

#ifndef REPLAYSSM_VERSION_STRING
#error "define REPLAYSSM_VERSION_STRING, the version of the package"
#endif
#ifndef REPLAYSSM_ARCH_STRING
#error "define REPLAYSSM_ARCH_STRING, the GPU architectures the library is built for"
#endif

namespace replayssm {

std::string& last_error() noexcept {
    static thread_local std::string message;
    return message;
}

} // namespace replayssm

using namespace replayssm;

extern "C" {

int32_t replayssm_abi_version(void) { return REPLAYSSM_ABI_VERSION; }
const char* replayssm_version(void) { return REPLAYSSM_VERSION_STRING; }
const char* replayssm_architectures(void) { return REPLAYSSM_ARCH_STRING; }
const char* replayssm_last_error(void) { return last_error().c_str(); }

int32_t replayssm_slot_layout(const replayssm_recurrence_spec* spec, replayssm_layout* out) {
    return guarded("slot_layout", [&] {
        require(out != nullptr, "out is NULL");
        *out = slot_layout(checked(spec, "spec"));
    });
}

int32_t replayssm_conv_layout(const replayssm_conv_spec* spec, replayssm_layout* out) {
    return guarded("conv_layout", [&] {
        require(out != nullptr, "out is NULL");
        *out = conv_layout(checked(spec, "spec"));
    });
}

} // extern "C"
