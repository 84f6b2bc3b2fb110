//! Checks of one plugin that both interfaces share, over a pair of functions: ask for a format, run enqueue.
#pragma once

#include "stand_in.h"

namespace driver {

//! Every position, type and format: exactly the listed combinations are taken. `supports(position, type, format)`.
inline void walk_formats(Checks& check, const Case& c, const std::function<bool(int, int, int)>& supports) {
    const auto tensors = c.all();
    for (size_t i = 0; i < tensors.size(); ++i) {
        std::string wrong;
        for (int type = 0; type <= 9; ++type) {
            for (int format = 0; format <= 12; ++format) {
                bool listed = false;
                for (int32_t allowed : tensors[i].types)
                    listed |= allowed == type && format == 0;
                if (supports(static_cast<int>(i), type, format) != listed)
                    wrong += " type " + std::to_string(type) + " format " + std::to_string(format);
            }
        }
        check(wrong.empty(), "formats of " + tensors[i].name, wrong);
    }
}

//! What enqueue is called with.
struct Rows {
    std::vector<int32_t> types, lengths;
    std::vector<int32_t> last, ids, initial; // device inputs; in host memory where scans are mapped there
    std::vector<uint64_t> workspace = std::vector<uint64_t>(512);
    uint64_t pool = 0x7000;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;

    explicit Rows(const Case& c, bool generation = true) {
        for (size_t i = 0; i < c.inputs.size(); ++i)
            inputs.push_back(nowhere(static_cast<int>(i)));
        for (size_t i = 0; i < c.outputs.size(); ++i)
            outputs.push_back(nowhere(static_cast<int>(i) + kFirstOutput));
        const int rows = static_cast<int>(c.inputs[c.input("host_request_types")].run[0]);
        types.assign(rows, generation ? 1 : 0);
        lengths.assign(rows, 1);
        inputs[c.input("host_request_types")] = types.data();
        if (c.input("host_context_lengths") >= 0) inputs[c.input("host_context_lengths")] = lengths.data();
        const Tensor& state = c.inputs[c.input("state")];
        if (state.run.size() == 1) inputs[c.input("state")] = &pool; // an address in host memory
        if (c.outputs.size() == 2) outputs[1] = const_cast<void*>(inputs[c.input("state")]);
    }
};

//! Rows whose prompts have this many tokens: what a scan is asked for.
inline void walk_scan(Checks& check, const Case& c, const std::function<int32_t(Rows&)>& enqueue) {
    const bool packed = c.input("host_context_lengths") >= 0;
    Rows rows(c, false);
    if (packed) rows.types.back() = 1; // the other row is a generation row
    rows.lengths.assign(rows.types.size(), 1);
    rows.last = packed ? std::vector<int32_t>{1, 2} : std::vector<int32_t>{1, 0};
    rows.ids = {5, 6};
    rows.initial = {1, 0};
    const auto place = [&](const char* name, const std::vector<int32_t>& values) {
        if (c.input(name) >= 0) rows.inputs[c.input(name)] = values.data();
    };
    place("last_token_ids", rows.last);
    place("slot_mapping", rows.ids);
    place("has_initial", rows.initial);
    recorded.clear();
    host_ids = rows.ids.data();
    const long before = allocations;
    const int32_t status = enqueue(rows);
    const long made = allocations - before;
    host_ids = nullptr;
    check(status == 0 && !recorded.empty(), "a context call runs", recorded);
    check(made == 0, "a context call allocates nothing", std::to_string(made));
}

//! Enqueue of a working instance. No GPU is touched: steps are recorded, and every refusal comes before a launch.
inline void walk_rows(Checks& check, const Case& c, const std::function<int32_t(Rows&)>& enqueue) {
    {
        Rows rows(c);
        recorded.clear();
        const long before = allocations;
        const int32_t status = enqueue(rows);
        const long made = allocations - before;
        check(status == 0 && !recorded.empty(), "a generation call runs", recorded);
        check(made == 0, "enqueue allocates nothing", std::to_string(made));
    }
    if (scans_on_host) walk_scan(check, c, enqueue);
    const auto refused = [&](Rows& rows, const char* what, const char* message) {
        recorded.clear();
        const int32_t status = enqueue(rows);
        check(status != 0 && said(message) && recorded.empty(), what, library.last_error());
    };
    {
        Rows rows(c);
        rows.types[0] = 2;
        refused(rows, "an unknown request type is refused", "host_request_types[0] is 2; it must be 0");
    }
    {
        Rows rows(c);
        rows.types.back() = 0;
        refused(rows, "context behind generation is refused", "context rows come first");
    }
    {
        Rows rows(c);
        rows.inputs[c.input("host_request_types")] = nullptr;
        refused(rows, "a missing host tensor is refused", "host_request_types is NULL");
    }
    if (c.input("host_context_lengths") >= 0) {
        Rows rows(c);
        rows.types[0] = 0;
        rows.lengths[0] = 9999;
        refused(
            rows, "a context length beyond the tokens is refused", "host_context_lengths is 9999; it must be from 0");
        rows.lengths[0] = -1;
        refused(rows, "a negative context length is refused", "host_context_lengths is -1");
        rows.lengths[0] = static_cast<int32_t>(c.inputs[0].run[0]);
        refused(rows, "generation rows without tokens are refused", "tokens of a generation row is 0");
    } else {
        Rows rows(c);
        rows.types[0] = 0;
        refused(rows, "padded rows of two phases are refused", "all context or all generation");
    }
    if (c.inputs[c.input("state")].run.size() == 1) {
        Rows rows(c);
        rows.inputs[c.input("state")] = nullptr;
        refused(rows, "a missing pool address is refused", "state is NULL");
    } else if (c.outputs.size() == 2) {
        Rows rows(c);
        rows.outputs[1] = nowhere(kFirstOutput + 1);
        refused(rows, "an alias that is none is refused", "state_out is not where state is");
    }
}

//! A case whose data tensor has columns that cannot be: one too few.
inline Case narrow(const Case& c) {
    Case out = c;
    out.inputs[0].extents.back() = out.inputs[0].run.back() = 8;
    return out;
}

//! A case of no rows: with tokens that nobody has, or without any.
inline Case rowless(const Case& c, bool tokens) {
    Case out = c;
    for (auto* group : {&out.inputs, &out.outputs}) {
        for (Tensor& tensor : *group) {
            const bool rows = tensor.run.size() == 1 && tensor.extents[0] < 0;
            const bool data = tensor.run.size() > 1 && tensor.extents[0] < 0 && tensor.name.rfind("state", 0) != 0;
            if (rows || (data && !tokens)) tensor.run[0] = 0;
        }
    }
    return out;
}

//! Enqueue of an instance with such a case's shapes.
inline void walk_rowless(Checks& check, const Case& c, const std::function<int32_t(const Case&, Rows&)>& enqueue) {
    Rows rows(c);
    recorded.clear();
    check(enqueue(rowless(c, true), rows) != 0 && said("host_request_types has no rows") && recorded.empty(),
        "tokens without rows are refused", library.last_error());
    check(enqueue(rowless(c, false), rows) == 0 && recorded.empty(), "a call of nothing does nothing");
}

void walk_v2_trt8(Checks& check, const Case& c, void* creator, const char* name_space);
void walk_v2_trt10(Checks& check, const Case& c, void* creator, const char* name_space);
void walk_v3(Checks& check, const Case& c, void* creator, const char* name_space);

} // namespace driver
