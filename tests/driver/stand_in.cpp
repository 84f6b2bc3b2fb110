#include "stand_in.h"

#include <cstdlib>
#include <sstream>

namespace driver {

Library library;
int32_t stand_in_version = 0;
Registry registry;
std::string recorded;
bool scans_on_host = false;
const int32_t* host_ids = nullptr;

namespace {

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    std::stringstream in(text);
    for (std::string part; std::getline(in, part, at);)
        parts.push_back(part);
    return parts;
}

std::vector<Tensor> parse_tensors(const std::string& text) {
    std::vector<Tensor> out;
    for (const std::string& item : split(text, ';')) {
        const auto parts = split(item, ':');
        Tensor tensor;
        tensor.name = parts.at(0);
        for (const std::string& type : split(parts.at(1), ','))
            tensor.types.push_back(std::stoi(type));
        for (const std::string& extent : split(parts.at(2), 'x')) {
            const bool dynamic = extent[0] == '?';
            tensor.run.push_back(std::stoll(dynamic ? extent.substr(1) : extent));
            tensor.extents.push_back(dynamic ? -1 : tensor.run.back());
        }
        out.push_back(tensor);
    }
    return out;
}

std::string key(const char* name, const char* version, const char* name_space) {
    return std::string(name) + " " + version + " " + name_space;
}

void wrong_slot() {
    std::printf("FAIL registry: a slot was called that has another meaning in this version\n");
    std::exit(1);
}

template <class Creator>
bool register_creator(std::map<std::string, void*>& where, void* object, const char* name_space) {
    auto* creator = static_cast<Creator*>(object);
    const std::string id = key(creator->getPluginName(), creator->getPluginVersion(), name_space);
    if (registry.v2.count(id) + registry.v3.count(id) > 0) return false;
    where[id] = object;
    return true;
}

bool register_v2_trt8(void*, void* creator, const char* name_space) {
    static_cast<trt8::IPluginCreator*>(creator)->setPluginNamespace(name_space);
    return register_creator<trt8::IPluginCreator>(registry.v2, creator, name_space);
}
bool register_v2_trt10(void*, void* creator, const char* name_space) {
    static_cast<trt10::IPluginCreator*>(creator)->setPluginNamespace(name_space);
    return register_creator<trt10::IPluginCreator>(registry.v2, creator, name_space);
}
bool register_v3(void*, void* creator, const char* name_space) {
    return register_creator<trt10::IPluginCreatorV3One>(registry.v3, creator, name_space);
}
void* get_v2(void*, const char* name, const char* version, const char* name_space) {
    const auto found = registry.v2.find(key(name, version, name_space));
    return found == registry.v2.end() ? nullptr : found->second;
}
void* get_v3(void*, const char* name, const char* version, const char* name_space) {
    const auto found = registry.v3.find(key(name, version, name_space));
    return found == registry.v3.end() ? get_v2(nullptr, name, version, name_space) : found->second;
}

std::string show(const char* name, const replayssm_tensor& tensor, int axes) {
    if (tensor.data == nullptr) return "";
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    std::ostringstream out;
    const long index = static_cast<long>(address >> 32) - 1;
    out << " " << name << "=" << (index >= kFirstOutput ? "out" : "in")
        << (index >= kFirstOutput ? index - kFirstOutput : index) << "+" << (address & 0xffffffff) << "[";
    for (int axis = 0; axis < axes; ++axis)
        out << (axis == 0 ? "" : ",") << tensor.strides[axis];
    out << "]d" << tensor.dtype;
    return out.str();
}

std::string show(const char* name, const replayssm_index& index) {
    if (index.data == nullptr) return "";
    replayssm_tensor tensor{};
    tensor.data = index.data;
    tensor.dtype = index.bits;
    return show(name, tensor, 0);
}

std::string show_pool(const replayssm_pool& pool) {
    std::ostringstream out;
    out << " base=" << pool.base << " stride=" << pool.stride_bytes << " slots=" << pool.slots;
    return out.str();
}

template <class Params>
std::string show_step(const char* op, const Params& p) {
    std::ostringstream out;
    out << op << " rows=" << p.rows << " tokens=" << p.tokens << show_pool(p.pool);
    if (host_ids != nullptr) {
        out << " id " << *static_cast<const int32_t*>(p.slots.data);
    } else {
        out << show("slots", p.slots);
    }
    out << show("accepted", p.accepted);
    return out.str();
}

//! Of the library with host_rows.cpp, whose rows lie in host memory.
template <class Params>
std::string show_scan(const char* op, const Params& p) {
    std::ostringstream out;
    out << op << " sequences=" << p.sequences << " tokens=" << p.tokens << show_pool(p.pool) << " cu";
    for (int i = 0; i <= p.sequences; ++i)
        out << " " << static_cast<const int32_t*>(p.cu_seqlens.data)[i];
    out << " ids";
    for (int i = 0; i < p.sequences; ++i)
        out << " " << static_cast<const int32_t*>(p.slots.data)[i];
    for (int i = 0; p.has_initial != nullptr && i < p.sequences; ++i)
        out << (i == 0 ? " initial " : " ") << static_cast<int>(p.has_initial[i]);
    return out.str();
}

void record(const std::string& text, long allocations_before) {
    recorded += (recorded.empty() ? "" : "; ") + text;
    allocations = allocations_before;
}

//! rows: 1 for a step, whose tensors have an axis of rows in front.
template <class Params>
std::string conv_tensors(const Params& p, int rows) {
    return show("x", p.x, 2 + rows) + show("weight", p.weight, 2) + show("bias", p.bias, 1) + show("y", p.y, 2 + rows);
}
template <class Params>
std::string mamba2_tensors(const Params& p, int rows) {
    return show("x", p.x, 3 + rows) + show("dt", p.dt, 2 + rows) + show("A", p.A, 1) + show("B", p.B, 3 + rows) +
        show("C", p.C, 3 + rows) + show("D", p.D, 2) + show("z", p.z, 3 + rows) + show("dt_bias", p.dt_bias, 1) +
        show("y", p.y, 3 + rows);
}
template <class Params>
std::string delta_tensors(const Params& p, int rows) {
    return show("q", p.q, 3 + rows) + show("k", p.k, 3 + rows) + show("v", p.v, 3 + rows) + show("a", p.a, 3 + rows) +
        show("b", p.b, 2 + rows) + show("A_log", p.A_log, 1) + show("dt_bias", p.dt_bias, 2) + show("o", p.o, 3 + rows);
}

} // namespace

std::vector<Tensor> Case::all() const {
    std::vector<Tensor> out = inputs;
    out.insert(out.end(), outputs.begin(), outputs.end());
    return out;
}

int Case::input(const std::string& name) const {
    for (size_t i = 0; i < inputs.size(); ++i)
        if (inputs[i].name == name) return static_cast<int>(i);
    return -1;
}

Case parse_case(const std::string& line) {
    const auto parts = split(line, '|');
    Case out;
    out.text = line;
    out.plugin = parts.at(0);
    for (const std::string& field : split(parts.at(1), ';')) {
        const auto pair = split(field, '=');
        const bool real = pair.at(1).back() == 'f' && pair.at(1) != "inf";
        out.fields.push_back({pair[0], real, real ? 0 : std::stoi(pair[1]), real ? std::stof(pair[1]) : 0.0f});
    }
    out.inputs = parse_tensors(parts.at(2));
    out.outputs = parse_tensors(parts.at(3));
    return out;
}

void fill_registry() {
    static void* table[32];
    for (void*& slot : table)
        slot = reinterpret_cast<void*>(&wrong_slot);
    if (stand_in_version < 10000) { // 8.6
        table[0] = reinterpret_cast<void*>(&register_v2_trt8);
        table[2] = reinterpret_cast<void*>(&get_v2);
    } else if (stand_in_version >= 100000 && stand_in_version < 110000) { // 10.14
        table[0] = reinterpret_cast<void*>(&register_v2_trt10);
        table[2] = reinterpret_cast<void*>(&get_v2);
        table[12] = reinterpret_cast<void*>(&register_v3);
        table[14] = reinterpret_cast<void*>(&get_v3);
    } else { // 11.1, RTX 1.7
        table[8] = reinterpret_cast<void*>(&register_v3);
        table[10] = reinterpret_cast<void*>(&get_v3);
    }
    registry.table = table;
}

} // namespace driver

using namespace driver;

// What TensorRT exports, and the library's operations: found here first, since the executable leads the search order.
extern "C" {

__attribute__((visibility("default"))) void* getPluginRegistry() { return &registry; }
__attribute__((visibility("default"))) int32_t getInferLibVersion() { return stand_in_version; }

REPLAYSSM_API int32_t replayssm_conv_step(const replayssm_conv_step_params* p, void*) {
    const long before = allocations;
    record(show_step("conv_step", *p) + conv_tensors(*p, 1), before);
    return REPLAYSSM_OK;
}
REPLAYSSM_API int32_t replayssm_conv_scan(const replayssm_conv_scan_params* p, void*) {
    const long before = allocations;
    record(show_scan("conv_scan", *p) + conv_tensors(*p, 0), before);
    return REPLAYSSM_OK;
}
REPLAYSSM_API int32_t replayssm_mamba2_step(const replayssm_mamba2_step_params* p, void*) {
    const long before = allocations;
    record(show_step("mamba2_step", *p) + mamba2_tensors(*p, 1), before);
    return REPLAYSSM_OK;
}
REPLAYSSM_API int32_t replayssm_mamba2_scan(const replayssm_mamba2_scan_params* p, void*) {
    const long before = allocations;
    record(show_scan("mamba2_scan", *p) + mamba2_tensors(*p, 0), before);
    return REPLAYSSM_OK;
}
REPLAYSSM_API int32_t replayssm_gated_delta_step(const replayssm_gated_delta_step_params* p, void*) {
    const long before = allocations;
    record(show_step("gated_delta_step", *p) + delta_tensors(*p, 1), before);
    return REPLAYSSM_OK;
}
REPLAYSSM_API int32_t replayssm_gated_delta_scan(const replayssm_gated_delta_scan_params* p, void*) {
    const long before = allocations;
    record(show_scan("gated_delta_scan", *p) + delta_tensors(*p, 0), before);
    return REPLAYSSM_OK;
}

} // extern "C"
