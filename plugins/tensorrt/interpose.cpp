//! A preloaded library is mapped before TensorRT is. Its createInferRuntime_INTERNAL and createInferBuilder_INTERNAL
//! come first in the process's search order: they find TensorRT's own, register the creators and call it. Loaded in any
//! other way these functions are never called.
#include "../c_api/replayssm.h"
#include "creators.h"
#include "loaded.h"
#include "registration.h"

#include <dlfcn.h>

namespace replayssm::plugin {
namespace {

using Factory = void* (*)(void* logger, int32_t version);

Factory find_in(void* handle, const char* name, Factory own) {
    const auto found = reinterpret_cast<Factory>(dlsym(handle, name));
    return found == own ? nullptr : found;
}

Factory find_in_object(const std::string& path, const char* name, Factory own) {
    if (path.empty()) return nullptr;
    void* handle = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr) return nullptr;
    const Factory found = find_in(handle, name, own);
    dlclose(handle);
    return found;
}

//! TensorRT's function: of the libraries that the caller needs, else the next in the search order, else of any loaded
//! object (TensorRT may have been loaded locally).
Factory find_factory(const char* name, Factory own, const void* caller) {
    if (const Factory found = find_in_object(object_of(caller), name, own)) return found;
    if (const Factory found = find_in(RTLD_NEXT, name, own)) return found;
    for (const std::string& path : candidate_objects())
        if (const Factory found = find_in_object(path, name, own)) return found;
    return nullptr;
}

void* forward(const char* name, Factory own, const void* caller, void* logger, int32_t version) noexcept {
    const Factory factory = guarded<Factory>(name, nullptr, [&] { return find_factory(name, own, caller); });
    if (factory == nullptr) {
        report(name, "no TensorRT is loaded that has this function");
        return nullptr;
    }
    register_everywhere(kDefaultNamespace);
    return factory(logger, version);
}

} // namespace
} // namespace replayssm::plugin

extern "C" {

REPLAYSSM_API void* createInferRuntime_INTERNAL(void* logger, int32_t version) {
    return replayssm::plugin::forward(
        "createInferRuntime_INTERNAL", &createInferRuntime_INTERNAL, __builtin_return_address(0), logger, version);
}

REPLAYSSM_API void* createInferBuilder_INTERNAL(void* logger, int32_t version) {
    return replayssm::plugin::forward(
        "createInferBuilder_INTERNAL", &createInferBuilder_INTERNAL, __builtin_return_address(0), logger, version);
}

} // extern "C"
