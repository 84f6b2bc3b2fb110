//! One replay operation as a plugin: what IPluginV3 and IPluginV2DynamicExt adapters share. Knows tensors by rank,
//! extents and type code only, no TensorRT header.
#pragma once

#include "../c_api/replayssm.h"
#include "fields.h"
#include "row_kernels.h"

#include <memory>
#include <string>
#include <vector>

namespace replayssm::plugin {

//! TensorRT's DataType codes that occur here.
enum TypeCode : int32_t { kFloat32 = 0, kFloat16 = 1, kInt32 = 3, kBfloat16 = 7, kInt64 = 8 };
constexpr int32_t kLinear = 0; // TensorFormat
constexpr int kMaxTensors = 24;
constexpr int64_t kUnknownExtent = -1;

struct TensorInfo {
    int32_t rank = 0;
    int64_t extents[8] = {};
    int32_t type = -1;
    int32_t format = kLinear;

    int64_t last() const { return rank > 0 ? extents[rank - 1] : 1; }
};

//! What a tensor may be; a row of the table that supportsFormatCombination reads.
struct TensorRule {
    enum Shape {
        kTokens, // [tokens, F] packed, [B, S, F] padded; F >= offset + width, an output's F == width
        kExact,  // extents
        kRows,   // [B]
        kPool,   // [slots, words of 4 bytes]
        kAddress // 8 bytes in host memory that hold the pool's device address: int64 [1] or int32 [2]
    };
    const char* name;
    Shape shape;
    int32_t types[2];           // allowed types; kNoType where there is one
    std::vector<int64_t> exact; // kExact
    int64_t width = 0;          // kTokens: columns used
    int64_t offset = 0;         // kTokens: the first of them
    bool vectors = false;       // kTokens: offset and row stride must be whole 16-byte vectors
};
constexpr int32_t kNoType = -1;

//! An output's shape: input `like`'s, with the last extent replaced unless last is kUnknownExtent.
struct OutputShape {
    int like;
    int64_t last;
};

//! What enqueue was called with. tensors: inputs, then outputs.
struct Call {
    TensorInfo tensors[kMaxTensors];
    const void* const* inputs = nullptr;
    void* const* outputs = nullptr;
    void* workspace = nullptr;
    cudaStream_t stream = nullptr;
};

//! Rows of one call: context rows first, then generation rows of step_tokens tokens each.
struct RowPlan {
    int rows = 0;
    int context_rows = 0;
    int64_t context_tokens = 0; // rows of the data tensors that belong to context rows
    int step_tokens = 0;
    int64_t padded_length = 0; // S; 0 where packed

    int step_rows() const { return rows - context_rows; }
};

class ReplayOp;

//! A plugin's name and fields, and how an operation is made from values.
struct OpInfo {
    FieldTable table;
    std::unique_ptr<ReplayOp> (*make)(const FieldSet& fields);

    const char* name() const { return table.plugin; }
};

//! All operations of the library.
const std::vector<const OpInfo*>& all_ops();

class ReplayOp {
public:
    virtual ~ReplayOp() = default;
    virtual std::unique_ptr<ReplayOp> clone() const = 0;

    const char* name() const { return fields_.table().plugin; }
    const FieldSet& fields() const { return fields_; }
    int num_inputs() const { return inputs_; }
    int num_outputs() const { return static_cast<int>(rules_.size()) - inputs_; }
    bool aliases_state() const { return aliased_; }
    int state_input() const { return state_; }
    int rows_input() const { return request_types_; }

    //! Whether tensor `position` (inputs, then outputs) may have its type and format. Throws Error where its extents
    //! can never do.
    bool supports(int position, const TensorInfo* tensors, int num_inputs, int num_outputs) const;
    //! Throws Error unless counts, types, ranks and known extents are what this operation takes.
    void check(const TensorInfo* tensors, int num_inputs, int num_outputs) const;
    void check_counts(int num_inputs, int num_outputs) const;
    int32_t output_type(int index) const { return rules_[inputs_ + index].types[0]; }
    OutputShape output_shape(int index) const;
    //! Throws Error unless an input has this rank.
    void check_rank(int input, int rank) const;
    size_t workspace_bytes(int64_t rows) const { return scan_rows_bytes(rows); }
    //! Launch the work on call.stream. Throws Error; allocates nothing unless it fails.
    void run(const Call& call) const;

protected:
    ReplayOp(const FieldSet& fields, int64_t spec_len);
    ReplayOp(const ReplayOp&) = default;

    //! Declaration of the tensors, in input order; each returns the tensor's index.
    int add_tokens(const char* name, int64_t width, const char* offset_field, bool vectors);
    int add_exact(const char* name, int32_t type, std::vector<int64_t> extents, int32_t other_type = kNoType);
    void add_state(int64_t slot_bytes);
    void add_row_inputs();
    void add_last_row_inputs();
    void add_output(const char* name, int64_t width);

    //! Generation rows: one step of plan.step_tokens tokens each.
    virtual void step(const Call& call, const RowPlan& plan) const = 0;
    //! Context rows. `rows` are the packed sequences that they come to.
    virtual void scan(const Call& call, const RowPlan& plan, const ScanRows& rows) const = 0;

    replayssm_pool pool(const Call& call) const;
    //! A tensor of tokens for a step [rows, tokens, heads, inner] or a scan [tokens, heads, inner].
    replayssm_tensor step_view(const Call& call, const RowPlan& plan, int tensor, int64_t inner) const;
    replayssm_tensor scan_view(const Call& call, int tensor, int64_t inner) const;
    //! A parameter [n] or [n, m], dense.
    replayssm_tensor parameter(const Call& call, int input) const;
    replayssm_index step_slots(const Call& call, const RowPlan& plan) const;
    replayssm_index step_accepted(const Call& call, const RowPlan& plan) const;
    int output() const { return inputs_; }

    int32_t type_ = kFloat32; // of the activations
    int64_t spec_len_ = 1;

private:
    int add(TensorRule rule);
    void check_extents(int index, const TensorInfo& tensor) const;
    RowPlan plan_rows(const Call& call) const;
    ScanRows prepare_scan(const Call& call, const RowPlan& plan) const;
    const void* data(const Call& call, int tensor) const;

    FieldSet fields_;
    std::vector<TensorRule> rules_;
    int inputs_ = 0;
    bool packed_ = true, paged_ = true, aliased_ = false;
    int64_t slot_bytes_ = 0, slot_stride_ = 0, max_slots_ = 0;
    int state_ = -1, request_types_ = -1, last_token_ids_ = -1, context_lengths_ = -1, slot_mapping_ = -1;
    int accepted_ = -1, has_initial_ = -1;
};

//! A replayssm_dtype for a TensorRT type code. Throws Error for one that no plugin has.
int32_t dtype_of(int32_t type_code);
const char* type_name(int32_t type_code);
//! Throws Error with the C interface's message unless status is REPLAYSSM_OK.
void require_ok(int32_t status);

//! Allowed values of a type field: 0, 1 or 7.
void require_float_type(const FieldSet& fields, const char* field);

} // namespace replayssm::plugin
