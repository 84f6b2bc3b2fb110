//! Walks the plugins of libtrtllm_replayssm.so through the lifecycle that TensorRT gives them, without TensorRT and
//! without a GPU.
//!
//!   plugin_driver LIBRARY VERSION [host] < cases
//!
//! host: LIBRARY is plugins/tensorrt with host_rows.cpp, so that scans can be asked for, too.
//! VERSION is what getInferLibVersion is to give: 8601, 101401, 110100, 10701, or one that the library does not know.
//! Cases: stand_in.h. Prints a line for each check; the exit status is 1 if one failed.
#include "walk.h"

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>

using namespace driver;

namespace {

template <class Function>
void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library.handle, name));
    if (function == nullptr) {
        std::printf("FAIL the library does not export %s\n", name);
        std::exit(1);
    }
}

void open_library(const char* path) {
    library.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library.handle == nullptr) {
        std::printf("FAIL dlopen: %s\n", dlerror());
        std::exit(1);
    }
    load(library.last_error, "replayssm_last_error");
    load(library.init, "initTrtllmReplaySsmPlugins");
    load(library.status, "replayssm_plugin_status");
    load(library.get_creators, "getCreators");
    load(library.get_plugin_creators, "getPluginCreators");
}

std::string status() {
    std::string text(library.status(nullptr, 0), '\0');
    library.status(text.data(), static_cast<int32_t>(text.size()) + 1);
    return text;
}

size_t count(const std::string& text, const std::string& part) {
    size_t found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        ++found;
    return found;
}

struct CallsLogger {
    void** table;
    int calls = 0;
};
void log_call(void* self, int32_t, const char*) { ++static_cast<CallsLogger*>(self)->calls; }

//! Registration in the stand-in registry; false if the version is unknown to the library.
bool check_registration(Checks& check) {
    const bool has_v2 = stand_in_version < 10000 || stand_in_version / 10000 == 10, has_v3 = stand_in_version >= 10000;
    const bool done = library.init(nullptr, nullptr);
    if (!done) {
        check(said("this library knows"), "an unknown TensorRT is refused", library.last_error());
        check(registry.v2.empty() && registry.v3.empty(), "nothing was registered");
        check(count(status(), "refused ") == 1, "the status says so", status());
        return false;
    }
    check(registry.v2.size() == (has_v2 ? 3 : 0) && registry.v3.size() == (has_v3 ? 3 : 0), "three creators each kind");
    check(count(status(), "registered ") == registry.v2.size() + registry.v3.size(), "the status lists them", status());
    check(library.init(nullptr, "") && count(status(), "registered ") == registry.v2.size() + registry.v3.size(),
        "registering again changes nothing");
    // A namespace in which one name is taken.
    static char taken;
    (has_v3 ? registry.v3 : registry.v2)["ReplayMamba2 1 other"] = &taken;
    static void* table[8]; // the library keeps the logger
    for (void*& slot : table)
        slot = reinterpret_cast<void*>(&log_call);
    static CallsLogger logger{table};
    const size_t before = registry.v2.size() + registry.v3.size();
    check(library.init(&logger, "other"), "a clash is survived");
    const bool both = has_v2 && has_v3;
    check(registry.v2.size() + registry.v3.size() == before + (both ? 5 : 2), "the other creators are registered");
    check(count(status(), "another creator has that name") == 1 && said("another creator"), "the clash is reported",
        library.last_error());
    check(logger.calls > 0, "the logger was called", std::to_string(logger.calls));
    return true;
}

void check_load_library_entries(Checks& check) {
    int32_t v3 = 0, v2 = 0;
    check(library.get_creators(&v3) != nullptr && v3 == 3, "getCreators");
    check(library.get_plugin_creators(&v2) != nullptr && v2 == 3, "getPluginCreators");
}

void walk(const Case& c) {
    for (const char* name_space : {"replayssm", "replayssm_v2"}) {
        const std::string key = c.plugin + " 1 " + name_space;
        if (registry.v3.count(key) != 0) {
            Checks check(c.plugin + " IPluginV3");
            walk_v3(check, c, registry.v3[key], name_space);
        }
        if (registry.v2.count(key) == 0) continue;
        Checks check(c.plugin + " IPluginV2DynamicExt " + (stand_in_version < 10000 ? "8" : "10"));
        if (c.outputs.size() == 2) continue; // aliased outputs: IPluginV3 alone
        (stand_in_version < 10000 ? walk_v2_trt8 : walk_v2_trt10)(check, c, registry.v2[key], name_space);
    }
}

} // namespace

int main(int argc, char** argv) {
    scans_on_host = argc == 4 && std::string(argv[3]) == "host";
    if (argc != 3 && !scans_on_host) {
        std::fprintf(stderr, "usage: plugin_driver LIBRARY VERSION [host] < cases\n");
        return 2;
    }
    stand_in_version = std::atoi(argv[2]);
    fill_registry();
    open_library(argv[1]);
    Checks check("registration");
    if (check_registration(check)) {
        check_load_library_entries(check);
        for (std::string line; std::getline(std::cin, line);)
            if (!line.empty()) walk(parse_case(line));
    }
    return Checks::failed == 0 ? 0 : 1;
}
