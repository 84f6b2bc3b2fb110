//! TensorRT 8.6's plugin interface, kind IPluginV2DynamicExt, as namespace replayssm::trt8. With REPLAYSSM_TENSORRT_SDK
//! and an 8.x SDK these are the SDK's own declarations.
#pragma once

#if defined(REPLAYSSM_TENSORRT_SDK)
#include <NvInferRuntime.h>
#if NV_TENSORRT_MAJOR == 8
#define REPLAYSSM_TRT8_FROM_SDK 1
namespace replayssm {
namespace trt8 = nvinfer1;
}
#endif
#endif

#if !defined(REPLAYSSM_TRT8_FROM_SDK)
#include "common.h"

namespace replayssm::trt8 {

using trt_common::DataType;
using trt_common::DimensionOperation;
using trt_common::PluginField;
using trt_common::PluginFieldCollection;
using trt_common::PluginFieldType;
using trt_common::TensorFormat;

//! TensorRT 8.6.0 as its headers number it.
constexpr int32_t kHeaderVersion = 8600;

class IGpuAllocator;

struct Dims {
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
    int32_t d[MAX_DIMS];
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
};

class IDimensionExpr;

namespace apiv {

class VDimensionExpr : public trt_common::VRoot {
public:
    virtual bool isConstant() const = 0;
    virtual int32_t getConstantValue() const = 0;
};

class VExprBuilder : public trt_common::VRoot {
public:
    virtual const IDimensionExpr* constant(int32_t value) = 0;
    virtual const IDimensionExpr* operation(
        DimensionOperation op, const IDimensionExpr& first, const IDimensionExpr& second) = 0;
};

} // namespace apiv

class IDimensionExpr : public trt_common::Handle<apiv::VDimensionExpr> {
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int32_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }
};

class IExprBuilder : public trt_common::Handle<apiv::VExprBuilder> {
public:
    const IDimensionExpr* constant(int32_t value) noexcept { return mImpl->constant(value); }
    const IDimensionExpr* operation(
        DimensionOperation op, const IDimensionExpr& first, const IDimensionExpr& second) noexcept {
        return mImpl->operation(op, first, second);
    }
};

struct DimsExprs {
    int32_t nbDims;
    const IDimensionExpr* d[Dims::MAX_DIMS];
};

#include "plugin_v2.inc"

class IPluginCreator {
public:
    virtual int32_t getTensorRTVersion() const noexcept { return kHeaderVersion; }
    virtual const char* getPluginName() const noexcept = 0;
    virtual const char* getPluginVersion() const noexcept = 0;
    virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
    virtual IPluginV2* createPlugin(const char* name, const PluginFieldCollection* fields) noexcept = 0;
    virtual IPluginV2* deserializePlugin(const char* name, const void* data, size_t length) noexcept = 0;
    virtual void setPluginNamespace(const char* pluginNamespace) noexcept = 0;
    virtual const char* getPluginNamespace() const noexcept = 0;
    virtual ~IPluginCreator() noexcept = default;
};

} // namespace replayssm::trt8
#endif
