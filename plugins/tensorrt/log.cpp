#include "log.h"

#include "../abi/slots.h"
#include "../c_api/guard.h"

#include <atomic>
#include <cstdio>

namespace replayssm::plugin {
namespace {

struct Sink {
    std::atomic<void*> object{nullptr};
    std::atomic<int32_t> slot{0};
};
Sink logger_, finder_;

void* current_logger() noexcept {
    if (void* given = logger_.object.load()) return given;
    void* finder = finder_.object.load();
    return finder == nullptr ? nullptr : abi::call<void*>(finder, finder_.slot.load());
}

} // namespace

void set_logger(void* logger, int32_t log_slot) noexcept {
    logger_.slot = log_slot;
    logger_.object = logger;
}

void set_logger_finder(void* finder, int32_t find_slot) noexcept {
    finder_.slot = find_slot;
    finder_.object = finder;
}

void log(Severity severity, const char* message) noexcept {
    if (void* logger = current_logger()) {
        const int32_t slot = logger_.object.load() != nullptr ? logger_.slot.load() : finder_.slot.load();
        abi::call<void>(logger, slot, static_cast<int32_t>(severity), message);
    } else if (severity <= Severity::kWarning) {
        std::fprintf(
            stderr, "[trtllm-replayssm] %s: %s\n", severity == Severity::kWarning ? "warning" : "error", message);
    }
}

void report(const char* what, const char* why) noexcept {
    try {
        last_error() = std::string(what) + ": " + why;
        log(Severity::kError, last_error().c_str());
    } catch (...) {
        log(Severity::kError, why);
    }
}

} // namespace replayssm::plugin
