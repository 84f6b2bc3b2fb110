//! Messages of the plugins: to the ILogger or ILoggerFinder that registration was given, else warnings and errors to
//! stderr. Nothing here throws.
#pragma once

#include <cstdint>
#include <exception>
#include <sstream>
#include <string>

namespace replayssm::plugin {

enum class Severity : int32_t { kInternalError, kError, kWarning, kInfo, kVerbose }; // TensorRT's numbers

//! log_slot, find_slot: abi::Layout::log of the TensorRT that the object belongs to. NULL takes it back.
void set_logger(void* logger, int32_t log_slot) noexcept;
void set_logger_finder(void* finder, int32_t find_slot) noexcept;

void log(Severity severity, const char* message) noexcept;

template <class... Parts>
void log_parts(Severity severity, const Parts&... parts) noexcept {
    try {
        std::ostringstream text;
        (text << ... << parts);
        log(severity, text.str().c_str());
    } catch (...) {
        log(severity, "out of memory while a message was put together");
    }
}

//! Log "<what>: <why>" as an error and keep it for replayssm_last_error.
void report(const char* what, const char* why) noexcept;

//! Run body; what it throws is reported and `failed` returned instead.
template <class Result, class Body>
Result guarded(const char* what, Result failed, Body body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        report(what, error.what());
    } catch (...) {
        report(what, "unknown exception");
    }
    return failed;
}

} // namespace replayssm::plugin
