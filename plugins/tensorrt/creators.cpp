#include "creators.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

namespace replayssm::plugin {

extern const OpInfo kConvOp, kMamba2Op, kGatedDeltaOp;

const std::vector<const OpInfo*>& all_ops() {
    static const auto& ops = *new std::vector<const OpInfo*>{&kConvOp, &kMamba2Op, &kGatedDeltaOp};
    return ops;
}

std::vector<RawField> field_names(const FieldTable& table) {
    std::vector<RawField> out;
    for (int i = 0; i < table.count; ++i) {
        const FieldSpec& spec = table.specs[i];
        out.push_back({spec.name, nullptr, spec.type == FieldType::kFloat ? kRawFloat32 : kRawInt32, 1});
    }
    return out;
}

const Creators& creators_of(const std::string& name_space) {
    static std::mutex mutex;
    static auto& made = *new std::map<std::string, Creators>;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = made.find(name_space);
    if (found != made.end()) return found->second;
    Creators& creators = made[name_space];
    for (const OpInfo* op : all_ops()) {
        creators.v3.push_back(new CreatorV3(*op, name_space));
        creators.v2_trt8.push_back(new CreatorV2<Api8>(*op, name_space));
#if REPLAYSSM_HAS_TRT10_V2
        creators.v2_trt10.push_back(new CreatorV2<Api10>(*op, name_space + kV2Suffix));
#endif
    }
    return creators;
}

void refuse_execution(const ReplayOp& op, const void* host_request_types) {
    cudaPointerAttributes attributes{};
    if (host_request_types == nullptr || cudaPointerGetAttributes(&attributes, host_request_types) != cudaSuccess) {
        cudaGetLastError(); // the question leaves no error behind
        return;
    }
    const bool host = attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost;
    require(!host,
        "this instance was made to build an engine and is executed now; serialise the engine and "
        "deserialise it, then ",
        op.name(), " runs");
}

} // namespace replayssm::plugin
