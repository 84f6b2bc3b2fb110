//! What the plugin driver stands in for: a plugin registry whose methods lie in the slots of a given TensorRT version,
//! expressions and their builder, and the library's own step operations, which are recorded instead of launched.
#pragma once

#include "../../plugins/abi/trt10.h"
#include "../../plugins/abi/trt10_v2.h"
#include "../../plugins/abi/trt8.h"
#include "../../plugins/c_api/replayssm.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

namespace driver {

namespace trt8 = replayssm::trt8;
namespace trt10 = replayssm::trt10;

//! One line for each check: "ok ..." or "FAIL ...".
class Checks {
public:
    explicit Checks(std::string about) : about_(std::move(about)) {}
    bool operator()(bool passed, const std::string& what, std::string detail = "") {
        for (char& letter : detail)
            if (letter == '\n') letter = ';';
        std::printf("%s %s: %s%s%s\n", passed ? "ok" : "FAIL", about_.c_str(), what.c_str(),
            detail.empty() ? "" : " | ", detail.c_str());
        failed += !passed;
        return passed;
    }
    static inline int failed = 0;

private:
    std::string about_;
};

//! The library as dlopen gave it.
struct Library {
    void* handle = nullptr;
    const char* (*last_error)() = nullptr;
    bool (*init)(void* logger, const char* name_space) = nullptr;
    int32_t (*status)(char* buffer, int32_t size) = nullptr;
    void* (*get_creators)(int32_t* count) = nullptr;
    void* (*get_plugin_creators)(int32_t* count) = nullptr;
};
extern Library library;

//! True if the call left a message that contains `part`.
inline bool said(const char* part) { return std::strstr(library.last_error(), part) != nullptr; }

struct Field {
    std::string name;
    bool real;
    int32_t integer;
    float value;
};

//! A tensor of a case: the type codes that it may have, its extents as a network has them (-1 dynamic) and as a call.
struct Tensor {
    std::string name;
    std::vector<int32_t> types;
    std::vector<int64_t> extents, run;
};

//! A line of input: plugin|field=1;real=0.5f|name:7,0:?4x512;...|name:7:?4x512
struct Case {
    std::string text, plugin;
    std::vector<Field> fields;
    std::vector<Tensor> inputs, outputs;
    std::vector<Tensor> all() const;
    int input(const std::string& name) const; // -1 where there is none
};
Case parse_case(const std::string& line);

struct Registry {
    void** table;
    std::map<std::string, void*> v2, v3; // "name version namespace"
};
//! The process's registry, with the slots of the version that getInferLibVersion gives.
extern int32_t stand_in_version;
extern Registry registry;
void fill_registry();

//! The operations that the plugin called, as text; cleared before a call.
extern std::string recorded;
//! Whether the library is the one with host_rows.cpp, which can be asked for scans.
extern bool scans_on_host;
//! Slot ids of the call, where they lie in host memory.
extern const int32_t* host_ids;
//! Allocations by operator new so far.
extern long allocations;

//! Addresses that no memory lies behind: input i at (i + 1) << 32, output i at (i + 101) << 32.
inline void* nowhere(int tensor) { return reinterpret_cast<void*>(static_cast<uintptr_t>(tensor + 1) << 32); }
constexpr int kFirstOutput = 100;

// Expressions. One class each for the two interfaces, whose numbers differ in width.
struct Expr8 final : trt8::IDimensionExpr, trt8::apiv::VDimensionExpr {
    explicit Expr8(int32_t value) : value(value) { mImpl = this; }
    bool isConstant() const override { return value >= 0; }
    int32_t getConstantValue() const override { return value; }
    int32_t value;
};
struct Expr10 final : trt10::IDimensionExpr, trt10::apiv::VDimensionExpr {
    explicit Expr10(int64_t value) : value(value) { mImpl = this; }
    bool isConstant() const override { return value >= 0; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }
    int64_t value;
};
struct Builder8 final : trt8::IExprBuilder, trt8::apiv::VExprBuilder {
    Builder8() { mImpl = this; }
    const trt8::IDimensionExpr* constant(int32_t value) override { return &made.emplace_back(value); }
    const trt8::IDimensionExpr* operation(
        trt8::DimensionOperation, const trt8::IDimensionExpr& first, const trt8::IDimensionExpr&) override {
        return &first;
    }
    std::list<Expr8> made;
};
struct Builder10 final : trt10::IExprBuilder, trt10::apiv::VExprBuilder {
    Builder10() { mImpl = this; }
    const trt10::IDimensionExpr* constant(int64_t value) override { return &made.emplace_back(value); }
    const trt10::IDimensionExpr* operation(
        trt10::DimensionOperation, const trt10::IDimensionExpr& first, const trt10::IDimensionExpr&) override {
        return &first;
    }
    const trt10::IDimensionExpr* declareSizeTensor(
        int32_t, const trt10::IDimensionExpr& opt, const trt10::IDimensionExpr&) override {
        return &opt;
    }
    std::list<Expr10> made;
};

struct Trt8 {
    using Expr = Expr8;
    using Builder = Builder8;
    using IDimensionExpr = trt8::IDimensionExpr;
    using Creator = trt8::IPluginCreator;
    using PluginV2 = trt8::IPluginV2;
    using Plugin = trt8::IPluginV2DynamicExt;
    using PluginField = trt8::PluginField;
    using PluginFieldCollection = trt8::PluginFieldCollection;
    using PluginFieldType = trt8::PluginFieldType;
    using DataType = trt8::DataType;
    using TensorFormat = trt8::TensorFormat;
    using Desc = trt8::PluginTensorDesc;
    using DynamicDesc = trt8::DynamicPluginTensorDesc;
    using DimsExprs = trt8::DimsExprs;
};
struct Trt10 {
    using Expr = Expr10;
    using Builder = Builder10;
    using IDimensionExpr = trt10::IDimensionExpr;
    using Creator = trt10::IPluginCreator;
    using PluginV2 = trt10::IPluginV2;
    using Plugin = trt10::IPluginV2DynamicExt;
    using PluginField = trt10::PluginField;
    using PluginFieldCollection = trt10::PluginFieldCollection;
    using PluginFieldType = trt10::PluginFieldType;
    using DataType = trt10::DataType;
    using TensorFormat = trt10::TensorFormat;
    using Desc = trt10::PluginTensorDesc;
    using DynamicDesc = trt10::DynamicPluginTensorDesc;
    using DimsExprs = trt10::DimsExprs;
};

//! The fields of a case, or any others, in TensorRT's form.
template <class T>
struct Fields {
    std::vector<Field> kept;
    std::vector<typename T::PluginField> list;
    typename T::PluginFieldCollection collection;

    explicit Fields(std::vector<Field> fields) : kept(std::move(fields)) {
        for (const Field& field : kept) {
            typename T::PluginField out;
            out.name = field.name.c_str();
            out.data = field.real ? static_cast<const void*>(&field.value) : &field.integer;
            out.type = field.real ? T::PluginFieldType::kFLOAT32 : T::PluginFieldType::kINT32;
            out.length = 1;
            list.push_back(out);
        }
        collection = {static_cast<int32_t>(list.size()), list.data()};
    }
};

template <class T>
typename T::Desc desc_of(const Tensor& tensor, const std::vector<int64_t>& extents, size_t type = 0) {
    typename T::Desc desc{};
    desc.dims.nbDims = static_cast<int32_t>(extents.size());
    for (size_t axis = 0; axis < extents.size(); ++axis)
        desc.dims.d[axis] = extents[axis];
    desc.type = static_cast<typename T::DataType>(tensor.types[type]);
    desc.format = T::TensorFormat::kLINEAR;
    return desc;
}

template <class T>
std::vector<typename T::Desc> descs_of(const std::vector<Tensor>& tensors, bool run) {
    std::vector<typename T::Desc> out;
    for (const Tensor& tensor : tensors)
        out.push_back(desc_of<T>(tensor, run ? tensor.run : tensor.extents));
    return out;
}

template <class T>
std::vector<typename T::DynamicDesc> dynamic_descs_of(const std::vector<Tensor>& tensors) {
    std::vector<typename T::DynamicDesc> out;
    for (const Tensor& tensor : tensors) {
        typename T::DynamicDesc desc{};
        desc.desc = desc_of<T>(tensor, tensor.extents);
        desc.min = desc.max = desc_of<T>(tensor, tensor.run).dims;
        out.push_back(desc);
    }
    return out;
}

} // namespace driver
