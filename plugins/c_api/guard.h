//! The border between C++ exceptions and C status codes.
#pragma once

#include "../common/checks.h"

#include <new>

namespace replayssm {

//! Message of the calling thread's last failure.
std::string& last_error() noexcept;

//! Run body; a thrown Error becomes its status and message. Nothing leaves as an exception.
template <class Body>
int32_t guarded(const char* op, Body body) noexcept {
    try {
        body();
        return REPLAYSSM_OK;
    } catch (const Error& error) {
        try {
            last_error() = std::string(op) + ": " + error.what();
        } catch (...) {
        }
        return error.status();
    } catch (const std::exception& error) {
        try {
            last_error() = std::string(op) + ": " + error.what();
        } catch (...) {
        }
        return REPLAYSSM_INVALID_ARGUMENT;
    }
}

template <class Params>
const Params& checked(const Params* params, const char* name = "params") {
    require(params != nullptr, name, " is NULL");
    require_size(name, params->struct_size, sizeof(Params));
    return *params;
}

} // namespace replayssm
