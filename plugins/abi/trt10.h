//! The plugin interfaces of TensorRT 10 and newer, and of TensorRT for RTX: IPluginV3 and, up to 10, the older kind as
//! it is there (trt10_v2.h), as namespace replayssm::trt10. With REPLAYSSM_TENSORRT_SDK and an SDK of 10 or newer these
//! are the SDK's own declarations.
#pragma once

#if defined(REPLAYSSM_TENSORRT_SDK)
#include <NvInferRuntime.h>
#if NV_TENSORRT_MAJOR >= 10
#define REPLAYSSM_TRT10_FROM_SDK 1
namespace replayssm {
namespace trt10 = nvinfer1;
}
#endif
#endif

#if !defined(REPLAYSSM_TRT10_FROM_SDK)
#include "common.h"

namespace replayssm::trt10 {

using trt_common::DataType;
using trt_common::DimensionOperation;
using trt_common::PluginField;
using trt_common::PluginFieldCollection;
using trt_common::PluginFieldType;
using trt_common::TensorFormat;

enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };

struct InterfaceInfo {
    const char* kind;
    int32_t major;
    int32_t minor;
};

struct Dims {
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
    int64_t d[MAX_DIMS];
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
    Dims opt;
};

class IDimensionExpr;

namespace apiv {

class VDimensionExpr : public trt_common::VRoot {
public:
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public trt_common::VRoot {
public:
    virtual const IDimensionExpr* constant(int64_t value) = 0;
    virtual const IDimensionExpr* operation(
        DimensionOperation op, const IDimensionExpr& first, const IDimensionExpr& second) = 0;
    virtual const IDimensionExpr* declareSizeTensor(
        int32_t outputIndex, const IDimensionExpr& opt, const IDimensionExpr& upper) = 0;
};

} // namespace apiv

class IDimensionExpr : public trt_common::Handle<apiv::VDimensionExpr> {
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }
};

class IExprBuilder : public trt_common::Handle<apiv::VExprBuilder> {
public:
    const IDimensionExpr* constant(int64_t value) noexcept { return mImpl->constant(value); }
    const IDimensionExpr* operation(
        DimensionOperation op, const IDimensionExpr& first, const IDimensionExpr& second) noexcept {
        return mImpl->operation(op, first, second);
    }
};

struct DimsExprs {
    int32_t nbDims;
    const IDimensionExpr* d[Dims::MAX_DIMS];
};

class IPluginResourceContext;

class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
    IVersionedInterface() = default;
    IVersionedInterface(const IVersionedInterface&) = default;
    IVersionedInterface& operator=(const IVersionedInterface&) = default;
};

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual const char* getPluginName() const noexcept = 0;
    virtual const char* getPluginVersion() const noexcept = 0;
    virtual const char* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t nbInputs,
        const DynamicPluginTensorDesc* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(
        DataType* outputTypes, int32_t nbOutputs, const DataType* inputTypes, int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(const DimsExprs* inputs, int32_t nbInputs, const DimsExprs* shapeInputs,
        int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(
        int32_t pos, const DynamicPluginTensorDesc* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(
        const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*, int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual const char* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual const char* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneBuildV2 : public IPluginV3OneBuild {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    //! Index of the input that an output shares its memory with; -1: none.
    virtual int32_t getAliasedInput(int32_t outputIndex) noexcept {
        static_cast<void>(outputIndex);
        return -1;
    }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(
        const PluginTensorDesc* in, int32_t nbInputs, const PluginTensorDesc* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(const PluginTensorDesc* inputDesc, const PluginTensorDesc* outputDesc,
        const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(
        const char* name, const PluginFieldCollection* fields, TensorRTPhase phase) noexcept = 0;
    virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
    virtual const char* getPluginName() const noexcept = 0;
    virtual const char* getPluginVersion() const noexcept = 0;
    virtual const char* getPluginNamespace() const noexcept = 0;
};

} // namespace replayssm::trt10
#endif
