//! What the plugin interfaces of TensorRT 8.6 and of TensorRT 10 and newer have in common: codes and the two structs
//! whose layout is the same. Declared here so that the library builds without the SDK; layouts are tested by
//! tests/driver/layout_check.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
typedef struct CUstream_st* cudaStream_t;
struct cudnnContext;
struct cublasContext;

namespace replayssm::trt_common {

enum class DataType : int32_t {
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8,
    kINT4 = 9,
};

enum class TensorFormat : int32_t { kLINEAR = 0 };

enum class PluginFieldType : int32_t {
    kFLOAT16 = 0,
    kFLOAT32 = 1,
    kFLOAT64 = 2,
    kINT8 = 3,
    kINT16 = 4,
    kINT32 = 5,
    kCHAR = 6,
    kDIMS = 7,
    kUNKNOWN = 8,
    kBF16 = 9,
    kINT64 = 10,
};

enum class DimensionOperation : int32_t {
    kSUM = 0,
    kPROD = 1,
    kMAX = 2,
    kMIN = 3,
    kSUB = 4,
    kEQUAL = 5,
    kLESS = 6,
    kFLOOR_DIV = 7,
    kCEIL_DIV = 8,
};

struct PluginField {
    const char* name = nullptr;
    const void* data = nullptr;
    PluginFieldType type = PluginFieldType::kUNKNOWN;
    int32_t length = 0; // elements
};

struct PluginFieldCollection {
    int32_t nbFields = 0;
    const PluginField* fields = nullptr;
};

class VRoot {
public:
    virtual ~VRoot() noexcept = default;
};

//! What an expression or a builder of expressions is: a table and a pointer to its implementation.
template <class Implementation>
class Handle {
public:
    virtual ~Handle() noexcept = default;
    Handle() = default;
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

protected:
    Implementation* mImpl = nullptr;
};

} // namespace replayssm::trt_common
