//! Sizes, offsets and virtual-table slots of plugins/abi against the numbers that TensorRT's interfaces have, and, with
//! -DTENSORRT_SDK -I<its include folder>, against the SDK's own declarations of the same major version.
//!
//! A slot is read from the pointer to a virtual member function, which in the Itanium C++ ABI is 1 + 8 * slot.
#include "../../plugins/abi/trt10.h"
#include "../../plugins/abi/trt10_v2.h"
#include "../../plugins/abi/trt8.h"

#if defined(TENSORRT_SDK)
#include <NvInferRuntime.h>
#endif

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

namespace trt8 = replayssm::trt8;
namespace trt10 = replayssm::trt10;

int failed = 0;

void check(const std::string& what, long got, long expected) {
    std::printf("%s %s: %ld", got == expected ? "ok" : "FAIL", what.c_str(), got);
    if (got != expected) std::printf(", expected %ld", expected);
    std::printf("\n");
    failed += got != expected;
}

template <class Method>
long slot_of(Method method) {
    long bits = 0;
    std::memcpy(&bits, &method, sizeof(bits));
    return bits % 8 == 1 ? bits / 8 : -1;
}

struct Number {
    const char* what;
    long value;
};
using Numbers = std::vector<Number>;

// clang-format off
#define SIZE(NS, Type) {"sizeof " #Type, static_cast<long>(sizeof(NS::Type))}
#define OFFSET(NS, Type, member) {"offsetof " #Type "." #member, static_cast<long>(offsetof(NS::Type, member))}
#define SLOT(NS, Type, method) {"slot " #Type "." #method, slot_of(&NS::Type::method)}
#define CODE(NS, Enum, name) {#Enum "." #name, static_cast<long>(NS::Enum::name)}

#define STRUCT_NUMBERS(NS)                                                                                            \
    SIZE(NS, Dims), OFFSET(NS, Dims, d), SIZE(NS, PluginTensorDesc), OFFSET(NS, PluginTensorDesc, type),              \
    OFFSET(NS, PluginTensorDesc, format), OFFSET(NS, PluginTensorDesc, scale), SIZE(NS, DynamicPluginTensorDesc),     \
    OFFSET(NS, DynamicPluginTensorDesc, min), OFFSET(NS, DynamicPluginTensorDesc, max), SIZE(NS, DimsExprs),          \
    OFFSET(NS, DimsExprs, d), SIZE(NS, PluginField), OFFSET(NS, PluginField, data), OFFSET(NS, PluginField, type),    \
    OFFSET(NS, PluginField, length), SIZE(NS, PluginFieldCollection), OFFSET(NS, PluginFieldCollection, fields),      \
    SIZE(NS, IExprBuilder), SIZE(NS, IDimensionExpr), CODE(NS, DataType, kHALF), CODE(NS, DataType, kINT32),          \
    CODE(NS, TensorFormat, kLINEAR), CODE(NS, PluginFieldType, kFLOAT32), CODE(NS, PluginFieldType, kINT8),           \
    CODE(NS, PluginFieldType, kINT32), CODE(NS, PluginFieldType, kCHAR)

#define V2_NUMBERS(NS)                                                                                                \
    SLOT(NS, IPluginV2, getPluginType), SLOT(NS, IPluginV2, getPluginVersion), SLOT(NS, IPluginV2, getNbOutputs),     \
    SLOT(NS, IPluginV2, initialize), SLOT(NS, IPluginV2, terminate), SLOT(NS, IPluginV2, getSerializationSize),       \
    SLOT(NS, IPluginV2, serialize), SLOT(NS, IPluginV2, destroy), SLOT(NS, IPluginV2, clone),                         \
    SLOT(NS, IPluginV2, setPluginNamespace), SLOT(NS, IPluginV2, getPluginNamespace),                                 \
    SLOT(NS, IPluginV2Ext, getOutputDataType), SLOT(NS, IPluginV2Ext, attachToContext),                               \
    SLOT(NS, IPluginV2Ext, detachFromContext),                                                                        \
    {"slot IPluginV2DynamicExt.getOutputDimensions", slot_of(static_cast<NS::DimsExprs (NS::IPluginV2DynamicExt::*)(  \
        int32_t, const NS::DimsExprs*, int32_t, NS::IExprBuilder&) noexcept>(                                         \
        &NS::IPluginV2DynamicExt::getOutputDimensions))},                                                             \
    SLOT(NS, IPluginV2DynamicExt, supportsFormatCombination),                                                         \
    {"slot IPluginV2DynamicExt.configurePlugin", slot_of(static_cast<void (NS::IPluginV2DynamicExt::*)(               \
        const NS::DynamicPluginTensorDesc*, int32_t, const NS::DynamicPluginTensorDesc*, int32_t) noexcept>(          \
        &NS::IPluginV2DynamicExt::configurePlugin))},                                                                 \
    {"slot IPluginV2DynamicExt.getWorkspaceSize", slot_of(static_cast<size_t (NS::IPluginV2DynamicExt::*)(            \
        const NS::PluginTensorDesc*, int32_t, const NS::PluginTensorDesc*, int32_t) const noexcept>(                  \
        &NS::IPluginV2DynamicExt::getWorkspaceSize))},                                                                \
    {"slot IPluginV2DynamicExt.enqueue", slot_of(static_cast<int32_t (NS::IPluginV2DynamicExt::*)(                    \
        const NS::PluginTensorDesc*, const NS::PluginTensorDesc*, const void* const*, void* const*, void*,            \
        cudaStream_t) noexcept>(&NS::IPluginV2DynamicExt::enqueue))},                                                 \
    SLOT(NS, IPluginCreator, getPluginName), SLOT(NS, IPluginCreator, getPluginVersion),                              \
    SLOT(NS, IPluginCreator, getFieldNames), SLOT(NS, IPluginCreator, createPlugin),                                  \
    SLOT(NS, IPluginCreator, deserializePlugin), SLOT(NS, IPluginCreator, setPluginNamespace),                        \
    SLOT(NS, IPluginCreator, getPluginNamespace)

#define V3_NUMBERS(NS)                                                                                                \
    SIZE(NS, InterfaceInfo), OFFSET(NS, InterfaceInfo, major), OFFSET(NS, InterfaceInfo, minor),                      \
    OFFSET(NS, DynamicPluginTensorDesc, opt), CODE(NS, DataType, kBF16), CODE(NS, DataType, kINT64),                  \
    CODE(NS, PluginCapabilityType, kBUILD), CODE(NS, PluginCapabilityType, kRUNTIME),                                 \
    CODE(NS, TensorRTPhase, kRUNTIME), SLOT(NS, IPluginV3, getInterfaceInfo),                                         \
    SLOT(NS, IPluginV3, getCapabilityInterface), SLOT(NS, IPluginV3, clone),                                          \
    SLOT(NS, IPluginV3OneCore, getPluginName), SLOT(NS, IPluginV3OneCore, getPluginVersion),                          \
    SLOT(NS, IPluginV3OneCore, getPluginNamespace), SLOT(NS, IPluginV3OneBuild, configurePlugin),                     \
    SLOT(NS, IPluginV3OneBuild, getOutputDataTypes), SLOT(NS, IPluginV3OneBuild, getOutputShapes),                    \
    SLOT(NS, IPluginV3OneBuild, supportsFormatCombination), SLOT(NS, IPluginV3OneBuild, getNbOutputs),                \
    SLOT(NS, IPluginV3OneBuild, getWorkspaceSize), SLOT(NS, IPluginV3OneBuild, getValidTactics),                      \
    SLOT(NS, IPluginV3OneBuild, getNbTactics), SLOT(NS, IPluginV3OneBuild, getTimingCacheID),                         \
    SLOT(NS, IPluginV3OneBuild, getFormatCombinationLimit), SLOT(NS, IPluginV3OneBuild, getMetadataString),           \
    SLOT(NS, IPluginV3OneBuildV2, getAliasedInput), SLOT(NS, IPluginV3OneRuntime, setTactic),                         \
    SLOT(NS, IPluginV3OneRuntime, onShapeChange), SLOT(NS, IPluginV3OneRuntime, enqueue),                             \
    SLOT(NS, IPluginV3OneRuntime, attachToContext), SLOT(NS, IPluginV3OneRuntime, getFieldsToSerialize),              \
    SLOT(NS, IPluginCreatorV3One, createPlugin), SLOT(NS, IPluginCreatorV3One, getFieldNames),                        \
    SLOT(NS, IPluginCreatorV3One, getPluginName), SLOT(NS, IPluginCreatorV3One, getPluginVersion),                    \
    SLOT(NS, IPluginCreatorV3One, getPluginNamespace)

const long kStructs8[] = {36, 4, 48, 36, 40, 44, 120, 48, 84, 72, 8, 24, 8, 16, 20, 16, 8, 16, 16, 1, 3, 0, 1, 3, 5, 6};
const long kStructs10[] = {72, 8, 88, 72, 76, 80, 304, 88, 160, 72, 8, 24, 8, 16, 20, 16, 8, 16, 16, 1, 3, 0, 1, 3, 5, 6};
const long kPluginV2[] = {1, 2, 3, 7, 8, 11, 12, 13, 14, 15, 16, 19, 23, 24, 25, 26, 27, 28, 29};
const long kCreator8[] = {1, 2, 3, 4, 5, 6, 7};
const long kCreator10[] = {4, 5, 6, 7, 8, 9, 10};
const long kPluginV3[] = {16, 8, 12, 232, 7, 8, 1, 2, 1, 1, 4, 5, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
    4, 5, 6, 7, 8, 4, 5, 6, 7, 8};
// clang-format on

template <size_t kCount>
void append(std::vector<long>& to, const long (&from)[kCount]) {
    to.insert(to.end(), from, from + kCount);
}

void compare(const char* about, const Numbers& got, const std::vector<long>& expected) {
    check(std::string(about) + " count", static_cast<long>(got.size()), static_cast<long>(expected.size()));
    for (size_t i = 0; i < got.size() && i < expected.size(); ++i)
        check(std::string(about) + " " + got[i].what, got[i].value, expected[i]);
}

#if defined(TENSORRT_SDK)
std::vector<long> values(const Numbers& numbers) {
    std::vector<long> out;
    for (const Number& number : numbers)
        out.push_back(number.value);
    return out;
}
#endif

} // namespace

int main() {
    std::vector<long> expected8, expected10;
    append(expected8, kStructs8);
    append(expected8, kPluginV2);
    append(expected8, kCreator8);
    const Numbers own8{STRUCT_NUMBERS(trt8), V2_NUMBERS(trt8)};
    compare("TensorRT 8", own8, expected8);
    append(expected10, kStructs10);
    append(expected10, kPluginV2);
    append(expected10, kCreator10);
    append(expected10, kPluginV3);
    const Numbers own10{STRUCT_NUMBERS(trt10), V2_NUMBERS(trt10), V3_NUMBERS(trt10)};
    compare("TensorRT 10", own10, expected10);
#if defined(TENSORRT_SDK)
#if NV_TENSORRT_MAJOR == 8
    const Numbers sdk{STRUCT_NUMBERS(nvinfer1), V2_NUMBERS(nvinfer1)};
    const Numbers& own = own8;
#elif NV_TENSORRT_MAJOR == 10
    const Numbers sdk{STRUCT_NUMBERS(nvinfer1), V2_NUMBERS(nvinfer1), V3_NUMBERS(nvinfer1)};
    const Numbers& own = own10;
#else
    const Numbers sdk{STRUCT_NUMBERS(nvinfer1), V3_NUMBERS(nvinfer1)};
    const Numbers own{STRUCT_NUMBERS(trt10), V3_NUMBERS(trt10)};
#endif
    compare("SDK", sdk, values(own));
#endif
    return failed == 0 ? 0 : 1;
}
