//! The older plugin kind as TensorRT 10 has it: trt8.h's slots in the same order, with 64-bit extents and a creator of
//! the versioned kind. TensorRT 11 takes none of these; with its SDK REPLAYSSM_HAS_TRT10_V2 is 0.
#pragma once

#include "trt10.h"

#if !defined(REPLAYSSM_TRT10_FROM_SDK)
#define REPLAYSSM_HAS_TRT10_V2 1

namespace replayssm::trt10 {

//! TensorRT 10.0 as its headers number it.
constexpr int32_t kHeaderVersion = 100000;

class IGpuAllocator;

#include "plugin_v2.inc"

class IPluginCreator : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V1", 1, 0}; }
    virtual const char* getPluginName() const noexcept = 0;
    virtual const char* getPluginVersion() const noexcept = 0;
    virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
    virtual IPluginV2* createPlugin(const char* name, const PluginFieldCollection* fields) noexcept = 0;
    virtual IPluginV2* deserializePlugin(const char* name, const void* data, size_t length) noexcept = 0;
    virtual void setPluginNamespace(const char* pluginNamespace) noexcept = 0;
    virtual const char* getPluginNamespace() const noexcept = 0;
};

} // namespace replayssm::trt10
#elif NV_TENSORRT_MAJOR == 10
#define REPLAYSSM_HAS_TRT10_V2 1
#else
#define REPLAYSSM_HAS_TRT10_V2 0
#endif
