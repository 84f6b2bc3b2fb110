#include "fields.h"

#include "../common/slot_layout.h"
#include "log.h"

#include <cstring>
#include <limits>

namespace replayssm::plugin {
namespace {

constexpr char kMagic[9] = "RSSMPLUG";
constexpr char kSchemaField[] = "schema_version", kLayoutField[] = "layout_version",
               kLibraryField[] = "library_version";
constexpr int32_t kSchema = kSchemaVersion;
constexpr int32_t kLayout = static_cast<int32_t>(kLayoutVersion);

void check_versions(const char* plugin, int32_t schema, int32_t layout, const std::string& library) {
    require(schema == kSchema, "the engine's ", plugin, " has field schema ", schema, " (library version ", library,
        "); this library, version ", replayssm_version(), ", reads schema ", kSchema, ": build the engine again");
    require(layout == kLayout, "the engine's ", plugin, " has slot layout ", layout, " (library version ", library,
        "); this library, version ", replayssm_version(), ", has layout ", kLayout, ": build the engine again");
    if (library != replayssm_version()) {
        log_parts(Severity::kWarning, "the engine's ", plugin, " was built with library version ", library,
            "; this is version ", replayssm_version(), ", which reads the same fields and slots");
    }
}

const char* raw_type_name(int32_t type) {
    constexpr const char* kNames[] = {
        "FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "CHAR", "DIMS", "UNKNOWN", "BF16", "INT64"};
    return type >= 0 && type < 11 ? kNames[type] : "of an unknown type";
}

//! Reads what FieldSet::bytes writes; never past the end.
class Reader {
public:
    Reader(const char* plugin, const void* data, size_t length)
        : plugin_(plugin), next_(static_cast<const uint8_t*>(data)), left_(length) {}

    void take(void* out, size_t bytes) {
        require(bytes <= left_, "the serialised ", plugin_, " is cut off: ", bytes, " bytes wanted, ", left_, " left");
        std::memcpy(out, next_, bytes);
        next_ += bytes;
        left_ -= bytes;
    }
    int32_t number() {
        int32_t value = 0;
        take(&value, sizeof(value));
        return value;
    }
    std::string text() {
        const int32_t length = number();
        require(length >= 0 && static_cast<size_t>(length) <= left_, "the serialised ", plugin_, " is damaged");
        std::string out(length, '\0');
        take(out.data(), out.size());
        return out;
    }
    size_t left() const { return left_; }

private:
    const char* plugin_;
    const uint8_t* next_;
    size_t left_;
};

class Writer {
public:
    void put(const void* data, size_t bytes) {
        const auto* from = static_cast<const uint8_t*>(data);
        out.insert(out.end(), from, from + bytes);
    }
    void number(int32_t value) { put(&value, sizeof(value)); }
    void text(const std::string& value) {
        number(static_cast<int32_t>(value.size()));
        put(value.data(), value.size());
    }
    std::vector<uint8_t> out;
};

//! Position of a name in the table, or -1.
int find(const FieldTable& table, const char* name) {
    for (int i = 0; i < table.count; ++i)
        if (std::strcmp(table.specs[i].name, name) == 0) return i;
    return -1;
}

std::string names_of(const FieldTable& table) {
    std::string names;
    for (int i = 0; i < table.count; ++i)
        names += (i == 0 ? "" : ", ") + std::string(table.specs[i].name);
    return names;
}

std::string bounds_of(const FieldSpec& spec) {
    std::ostringstream text;
    if (spec.high == std::numeric_limits<double>::infinity()) {
        text << "at least " << spec.low;
    } else {
        text << "from " << static_cast<int64_t>(spec.low) << " to " << static_cast<int64_t>(spec.high);
    }
    return text.str();
}

} // namespace

int FieldSet::index_of(const char* name) const {
    const int index = find(*table_, name);
    require(index >= 0, "plugin ", table_->plugin, " has no field ", name);
    return index;
}

void FieldSet::store(int index, const RawField& field) {
    const FieldSpec& spec = table_->specs[index];
    const bool real = spec.type == FieldType::kFloat;
    const bool typed = real ? field.type == kRawFloat32 : field.type == kRawInt32 || field.type == kRawInt8;
    require(typed, "field ", spec.name, " is ", raw_type_name(field.type), "; it must be ",
        real ? "FLOAT32" : "INT32 or INT8");
    require(field.length == 1 && field.data != nullptr, "field ", spec.name, " has ",
        field.data == nullptr ? 0 : field.length, " elements; it must have 1");
    Value& value = values_[index];
    if (real) {
        std::memcpy(&value.real, field.data, sizeof(float));
        require(value.real >= spec.low && value.real <= spec.high, "field ", spec.name, " is ", value.real,
            "; it must be ", bounds_of(spec));
        return;
    }
    if (field.type == kRawInt8) {
        int8_t small = 0;
        std::memcpy(&small, field.data, 1);
        value.integer = small;
    } else {
        std::memcpy(&value.integer, field.data, sizeof(int32_t));
    }
    require(value.integer >= spec.low && value.integer <= spec.high, "field ", spec.name, " is ", value.integer,
        "; it must be ", bounds_of(spec));
}

void FieldSet::finish(const bool* present, bool from_engine) {
    std::string missing;
    for (int i = 0; i < table_->count; ++i) {
        const FieldSpec& spec = table_->specs[i];
        if (present[i]) continue;
        if (spec.required || from_engine) missing += (missing.empty() ? "" : ", ") + std::string(spec.name);
        if (spec.type == FieldType::kFloat) {
            values_[i].real = static_cast<float>(spec.fallback);
        } else {
            values_[i].integer = static_cast<int32_t>(spec.fallback);
        }
    }
    require(missing.empty(), "field ", missing, " is missing");
}

FieldSet::FieldSet(const FieldTable& table, const RawField* fields, int32_t count, bool from_engine) : table_(&table) {
    require(count >= 0 && (count == 0 || fields != nullptr), "there are ", count, " fields");
    int32_t schema = -1, layout = -1;
    std::string library = "unknown";
    bool present[kMaxFields] = {};
    for (int32_t i = 0; i < count; ++i) {
        const RawField& field = fields[i];
        require(field.name != nullptr, "a field has no name");
        const bool is_schema = std::strcmp(field.name, kSchemaField) == 0;
        if (is_schema || std::strcmp(field.name, kLayoutField) == 0) {
            require(field.type == kRawInt32 && field.length == 1 && field.data != nullptr, "field ", field.name,
                " must be one INT32");
            std::memcpy(is_schema ? &schema : &layout, field.data, sizeof(int32_t));
        } else if (std::strcmp(field.name, kLibraryField) == 0) {
            if (field.type == kRawChar && field.length > 0 && field.data != nullptr)
                library.assign(static_cast<const char*>(field.data), field.length);
        }
    }
    // The version decides first: another schema's fields would be complained about one by one otherwise.
    if (from_engine || schema != -1 || layout != -1) check_versions(table.plugin, schema, layout, library);
    for (int32_t i = 0; i < count; ++i) {
        const char* name = fields[i].name;
        if (std::strcmp(name, kSchemaField) == 0 || std::strcmp(name, kLayoutField) == 0 ||
            std::strcmp(name, kLibraryField) == 0)
            continue;
        const int index = find(table, name);
        require(index >= 0, "there is no field ", name, "; the fields are ", names_of(table));
        require(!present[index], "field ", name, " is there twice");
        present[index] = true;
        store(index, fields[i]);
    }
    finish(present, from_engine);
}

FieldSet::FieldSet(const FieldTable& table, const void* data, size_t length) : table_(&table) {
    require(data != nullptr, "the serialised ", table.plugin, " is NULL");
    Reader in(table.plugin, data, length);
    char magic[8];
    in.take(magic, sizeof(magic));
    require(std::memcmp(magic, kMagic, sizeof(magic)) == 0, "the serialised ", table.plugin,
        " was not written by this library");
    const int32_t schema = in.number(), layout = in.number();
    check_versions(table.plugin, schema, layout, in.text());
    const std::string plugin = in.text();
    require(plugin == table.plugin, "the serialised plugin is a ", plugin, ", not a ", table.plugin);
    const int32_t count = in.number();
    bool present[kMaxFields] = {};
    for (int32_t i = 0; i < count; ++i) {
        const std::string name = in.text();
        const int index = find(table, name.c_str());
        require(index >= 0 && !present[index], "the serialised ", table.plugin, " has an unexpected field ", name);
        RawField field{name.c_str(), nullptr, in.number(), 1};
        uint8_t value[4];
        in.take(value, sizeof(value));
        field.data = value;
        present[index] = true;
        store(index, field);
    }
    require(in.left() == 0, "the serialised ", table.plugin, " has ", in.left(), " bytes too many");
    finish(present, true);
}

std::vector<uint8_t> FieldSet::bytes() const {
    Writer out;
    out.put(kMagic, 8);
    out.number(kSchema);
    out.number(kLayout);
    out.text(replayssm_version());
    out.text(table_->plugin);
    out.number(table_->count);
    for (int i = 0; i < table_->count; ++i) {
        const FieldSpec& spec = table_->specs[i];
        out.text(spec.name);
        out.number(spec.type == FieldType::kFloat ? kRawFloat32 : kRawInt32);
        out.put(&values_[i], sizeof(Value));
    }
    return std::move(out.out);
}

std::vector<RawField> FieldSet::raw() const {
    std::vector<RawField> out;
    for (int i = 0; i < table_->count; ++i) {
        const FieldSpec& spec = table_->specs[i];
        out.push_back({spec.name, &values_[i], spec.type == FieldType::kFloat ? kRawFloat32 : kRawInt32, 1});
    }
    out.push_back({kSchemaField, &kSchema, kRawInt32, 1});
    out.push_back({kLayoutField, &kLayout, kRawInt32, 1});
    const char* version = replayssm_version();
    out.push_back({kLibraryField, version, kRawChar, static_cast<int32_t>(std::strlen(version))});
    return out;
}

} // namespace replayssm::plugin
