//! The creators of one namespace. They live as long as the process: registries keep pointers to them.
#pragma once

#include "plugin_v2.h"
#include "plugin_v3.h"

namespace replayssm::plugin {

constexpr char kDefaultNamespace[] = "replayssm";
//! Appended to the namespace of IPluginV2DynamicExt creators under TensorRT 10, whose registry takes one creator for a
//! name, version and namespace, of either kind.
constexpr char kV2Suffix[] = "_v2";

struct Creators {
    std::vector<trt10::IPluginCreatorInterface*> v3;
    std::vector<trt8::IPluginCreator*> v2_trt8;
#if REPLAYSSM_HAS_TRT10_V2
    std::vector<trt10::IPluginCreator*> v2_trt10;
#endif
};

//! Made on first use.
const Creators& creators_of(const std::string& name_space);

} // namespace replayssm::plugin
