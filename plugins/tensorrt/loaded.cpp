#include "loaded.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace replayssm::plugin {
namespace {

int collect(dl_phdr_info* info, size_t, void* out) {
    const char* path = info->dlpi_name;
    if (path == nullptr || *path == '\0') return 0;
    const char* slash = std::strrchr(path, '/');
    const std::string file = slash == nullptr ? path : slash + 1;
    if (file.find("nvinfer") != std::string::npos || file.find("tensorrt") != std::string::npos)
        static_cast<std::vector<std::string>*>(out)->push_back(path);
    return 0;
}

//! Of an object or, through it, of the libraries that it needs.
void add(void* handle, std::vector<LoadedTensorRT>& found) {
    const auto get_registry = reinterpret_cast<void* (*)()>(dlsym(handle, "getPluginRegistry"));
    const auto get_version = reinterpret_cast<int32_t (*)()>(dlsym(handle, "getInferLibVersion"));
    if (get_registry == nullptr || get_version == nullptr) return;
    LoadedTensorRT tensorrt;
    tensorrt.path = object_of(reinterpret_cast<const void*>(get_registry));
    for (const LoadedTensorRT& other : found)
        if (other.path == tensorrt.path) return;
    tensorrt.version = get_version();
    tensorrt.layout = abi::find_layout(tensorrt.version);
    tensorrt.registry = get_registry();
    if (tensorrt.registry != nullptr) found.push_back(tensorrt);
}

} // namespace

std::string object_of(const void* address) {
    Dl_info info{};
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::vector<std::string> candidate_objects() {
    std::vector<std::string> paths;
    dl_iterate_phdr(collect, &paths);
    return paths;
}

std::vector<LoadedTensorRT> loaded_tensorrts() {
    std::vector<LoadedTensorRT> found;
    add(RTLD_DEFAULT, found);
    for (const std::string& path : candidate_objects()) {
        if (void* handle = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
            add(handle, found);
            dlclose(handle);
        }
    }
    return found;
}

std::string LoadedTensorRT::text() const {
    std::ostringstream out;
    const int32_t unit = layout != nullptr ? layout->major_unit : version >= 10000 ? 10000 : 1000;
    out << (layout != nullptr ? layout->product : "TensorRT") << " " << version / unit << "." << version % unit / 100
        << "." << version % 100 << " (" << path << ")";
    return out.str();
}

} // namespace replayssm::plugin
