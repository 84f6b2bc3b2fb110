//! Fields of the plugins: tables, parsing of what a network definition gives, and serialisation field by field.
#pragma once

#include "../common/checks.h"

#include <array>
#include <string>
#include <vector>

namespace replayssm::plugin {

//! Raised when a field is added, removed or changes its meaning; an engine with another number is refused.
constexpr int32_t kSchemaVersion = 1;
constexpr int kMaxFields = 40;

enum class FieldType { kInt, kFloat };

//! One row of a plugin's table. Values outside [low, high] are refused.
struct FieldSpec {
    const char* name;
    FieldType type;
    bool required;
    double fallback;
    double low;
    double high;
};

constexpr FieldSpec required_int(const char* name, int64_t low, int64_t high) {
    return {name, FieldType::kInt, true, 0.0, static_cast<double>(low), static_cast<double>(high)};
}
constexpr FieldSpec optional_int(const char* name, int64_t fallback, int64_t low, int64_t high) {
    return {name, FieldType::kInt, false, static_cast<double>(fallback), static_cast<double>(low),
        static_cast<double>(high)};
}
constexpr FieldSpec optional_flag(const char* name, int64_t fallback) { return optional_int(name, fallback, 0, 1); }
constexpr FieldSpec optional_float(const char* name, double fallback, double low, double high) {
    return {name, FieldType::kFloat, false, fallback, low, high};
}

struct FieldTable {
    const char* plugin;
    const FieldSpec* specs;
    int count;
};

//! A field as TensorRT hands it over; type is its PluginFieldType.
struct RawField {
    const char* name = nullptr;
    const void* data = nullptr;
    int32_t type = 0;
    int32_t length = 0;
};

constexpr int32_t kRawFloat32 = 1, kRawInt8 = 3, kRawInt32 = 5, kRawChar = 6;

//! Values of every field of a table.
class FieldSet {
public:
    //! Of a network definition: absent fields take their defaults. Of an engine (`from_engine`): every field and the
    //! version fields must be there. Throws Error for fields that are unknown, missing, twice there, of another type or
    //! out of range.
    FieldSet(const FieldTable& table, const RawField* fields, int32_t count, bool from_engine);

    //! From what bytes() gave. Throws Error for anything else, naming the version it was written with.
    FieldSet(const FieldTable& table, const void* data, size_t length);

    int32_t integer(const char* name) const { return values_[index_of(name)].integer; }
    bool flag(const char* name) const { return integer(name) != 0; }
    float real(const char* name) const { return values_[index_of(name)].real; }
    const FieldTable& table() const { return *table_; }

    std::vector<uint8_t> bytes() const;
    //! The same for IPluginV3: one raw field per field, then the version fields. Points into this object.
    std::vector<RawField> raw() const;

private:
    union Value {
        int32_t integer;
        float real;
    };

    int index_of(const char* name) const;
    void store(int index, const RawField& field);
    void finish(const bool* present, bool from_engine);

    const FieldTable* table_;
    std::array<Value, kMaxFields> values_{};
};

} // namespace replayssm::plugin
