#include "registration.h"

#include "../c_api/replayssm.h"
#include "creators.h"
#include "loaded.h"
#include "log.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace replayssm::plugin {
namespace {

//! Outlives every other static: TensorRT may ask for creators while the process ends.
struct Records {
    std::recursive_mutex mutex;
    std::set<std::pair<void*, void*>> done; // registry, creator
    std::vector<std::string> lines;
};

Records& records() {
    static auto& all = *new Records;
    return all;
}

void note(const std::string& line) {
    auto& lines = records().lines;
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
}

//! Registries keep pointers into this library, so it stays loaded.
void stay_loaded() {
    static const bool once = [] {
        const std::string own = object_of(reinterpret_cast<const void*>(&stay_loaded));
        if (!own.empty()) dlopen(own.c_str(), RTLD_NOLOAD | RTLD_LAZY | RTLD_NODELETE);
        return true;
    }();
    static_cast<void>(once);
}

struct Kind {
    const char* interface_name;
    int32_t register_slot;
    int32_t get_slot;
};

//! True if the registry has this creator now.
template <class Interface>
bool register_one(
    const LoadedTensorRT& tensorrt, const Kind& kind, Interface* creator, const char* name, const std::string& space) {
    const auto key = std::make_pair(tensorrt.registry, static_cast<void*>(creator));
    if (records().done.count(key) != 0) return true;
    const std::string what =
        std::string(name) + " " + kPluginVersion + " " + space + " " + kind.interface_name + " in " + tensorrt.text();
    if (abi::call<bool>(tensorrt.registry, kind.register_slot, static_cast<void*>(creator), space.c_str())) {
        records().done.insert(key);
        stay_loaded();
        note("registered " + what);
        log_parts(Severity::kVerbose, "registered ", what);
        return true;
    }
    // Asked for afterwards only: a registry may log a creator that it does not find as an error.
    const void* there = abi::call<void*>(
        tensorrt.registry, kind.get_slot, name, static_cast<const char*>(kPluginVersion), space.c_str());
    const char* why = there != nullptr ? "another creator has that name, version and namespace already, and stays"
                                       : "the registry did not take it";
    note("refused " + what + ": " + why);
    report(what.c_str(), why);
    return false;
}

//! Number of creators that this registry has now.
int register_with(const LoadedTensorRT& tensorrt, const std::string& name_space) {
    const abi::Layout& layout = *tensorrt.layout;
    const Creators& creators = creators_of(name_space);
    int count = 0;
    for (size_t i = 0; i < all_ops().size(); ++i) {
        const char* name = all_ops()[i]->name();
        if (layout.register_v3 >= 0) {
            const Kind kind{"IPluginV3", layout.register_v3, layout.get_v3};
            count += register_one(tensorrt, kind, creators.v3[i], name, name_space);
        }
        const Kind kind{"IPluginV2DynamicExt", layout.register_v2, layout.get_v2};
        if (layout.v2_major == 8) count += register_one(tensorrt, kind, creators.v2_trt8[i], name, name_space);
#if REPLAYSSM_HAS_TRT10_V2
        if (layout.v2_major == 10)
            count += register_one(tensorrt, kind, creators.v2_trt10[i], name, name_space + kV2Suffix);
#endif
    }
    return count;
}

std::string known_versions() {
    std::ostringstream text;
    for (const abi::Layout& layout : abi::kLayouts) {
        const auto version = [&](int32_t v) {
            return std::to_string(v / layout.major_unit) + "." + std::to_string(v % layout.major_unit / 100);
        };
        text << (&layout == abi::kLayouts ? "" : ", ") << layout.product << " " << version(layout.first_version);
        if (version(layout.last_version) != version(layout.first_version))
            text << " to " << version(layout.last_version);
    }
    return text.str();
}

//! The layout by which a logger or a finder is called: that of the loaded TensorRTs, if they agree.
const abi::Layout* common_layout() {
    const abi::Layout* layout = nullptr;
    for (const LoadedTensorRT& tensorrt : loaded_tensorrts()) {
        if (tensorrt.layout == nullptr) continue;
        if (layout != nullptr && layout->log != tensorrt.layout->log) return nullptr;
        layout = tensorrt.layout;
    }
    return layout;
}

bool environment_asks() {
    const char* value = std::getenv("TRTLLM_REPLAYSSM_AUTOREGISTER");
    return value != nullptr && std::strcmp(value, "1") == 0;
}

//! On loading: a TensorRT that is there already. One that is loaded later is met in interpose.cpp.
__attribute__((constructor)) void register_on_load() {
    if (environment_asks() && !loaded_tensorrts().empty()) register_everywhere(kDefaultNamespace);
}

} // namespace

bool register_everywhere(const std::string& name_space) noexcept {
    return guarded("registration", false, [&] {
        const std::lock_guard<std::recursive_mutex> lock(records().mutex);
        const std::vector<LoadedTensorRT> found = loaded_tensorrts();
        require(!found.empty(), "no TensorRT is loaded; load it first (in Python: import tensorrt)");
        int known = 0, served = 0;
        for (const LoadedTensorRT& tensorrt : found) {
            if (tensorrt.layout == nullptr) {
                const std::string why = "this library knows " + known_versions();
                note("refused " + tensorrt.text() + ": " + why);
                report(tensorrt.text().c_str(), why.c_str());
                continue;
            }
            ++known;
            served += register_with(tensorrt, name_space) > 0;
        }
        return known > 0 && served == known;
    });
}

std::string status() {
    const std::lock_guard<std::recursive_mutex> lock(records().mutex);
    std::string text;
    for (const std::string& line : records().lines)
        text += line + "\n";
    return text;
}

} // namespace replayssm::plugin

using namespace replayssm::plugin;

extern "C" {

//! Looked up by IPluginRegistry::loadLibrary of TensorRT 10 and newer.
REPLAYSSM_API replayssm::trt10::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    const auto& creators = creators_of(kDefaultNamespace).v3;
    count = static_cast<int32_t>(creators.size());
    return creators.data();
}

//! For IPluginV2DynamicExt: of the interface that the loaded TensorRT has.
REPLAYSSM_API void* const* getPluginCreators(int32_t& count) {
    const Creators& creators = creators_of(kDefaultNamespace);
    count = static_cast<int32_t>(creators.v2_trt8.size());
#if REPLAYSSM_HAS_TRT10_V2
    const replayssm::abi::Layout* layout = common_layout();
    if (layout != nullptr && layout->v2_major == 10) return reinterpret_cast<void* const*>(creators.v2_trt10.data());
#endif
    return reinterpret_cast<void* const*>(creators.v2_trt8.data());
}

//! finder is an ILoggerFinder*.
REPLAYSSM_API void setLoggerFinder(void* finder) {
    const replayssm::abi::Layout* layout = common_layout();
    if (layout != nullptr) set_logger_finder(finder, layout->log);
}

//! logger is an ILogger* that outlives the plugins, or NULL. libNamespace NULL or "": "replayssm".
REPLAYSSM_API bool initTrtllmReplaySsmPlugins(void* logger, const char* libNamespace) {
    const replayssm::abi::Layout* layout = common_layout();
    if (logger != nullptr && layout != nullptr) set_logger(logger, layout->log);
    return guarded("registration", false, [&] {
        const bool given = libNamespace != nullptr && *libNamespace != '\0';
        return register_everywhere(given ? libNamespace : kDefaultNamespace);
    });
}

//! Text of status() into buffer, cut to size - 1 characters; the length of the whole text.
REPLAYSSM_API int32_t replayssm_plugin_status(char* buffer, int32_t size) {
    return guarded("plugin_status", 0, [&] {
        const std::string text = status();
        if (buffer != nullptr && size > 0) {
            const size_t length = std::min(text.size(), static_cast<size_t>(size) - 1);
            std::memcpy(buffer, text.data(), length);
            buffer[length] = '\0';
        }
        return static_cast<int32_t>(text.size());
    });
}

} // extern "C"
