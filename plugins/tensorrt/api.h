//! The two plugin interfaces as template arguments, and conversion of their structs to op.h's.
#pragma once

#include "../abi/trt10.h"
#include "../abi/trt10_v2.h"
#include "../abi/trt8.h"
#include "op.h"

namespace replayssm::plugin {

constexpr char kPluginVersion[] = "1";

struct Api8 {
    static constexpr int kMajor = 8;
    using DataType = trt8::DataType;
    using DimsExprs = trt8::DimsExprs;
    using DynamicPluginTensorDesc = trt8::DynamicPluginTensorDesc;
    using IExprBuilder = trt8::IExprBuilder;
    using IPluginCreator = trt8::IPluginCreator;
    using IPluginV2 = trt8::IPluginV2;
    using IPluginV2DynamicExt = trt8::IPluginV2DynamicExt;
    using PluginField = trt8::PluginField;
    using PluginFieldCollection = trt8::PluginFieldCollection;
    using PluginFieldType = trt8::PluginFieldType;
    using PluginTensorDesc = trt8::PluginTensorDesc;
};

struct Api10 {
    static constexpr int kMajor = 10;
    using DataType = trt10::DataType;
    using DimsExprs = trt10::DimsExprs;
    using DynamicPluginTensorDesc = trt10::DynamicPluginTensorDesc;
    using IExprBuilder = trt10::IExprBuilder;
#if REPLAYSSM_HAS_TRT10_V2
    using IPluginCreator = trt10::IPluginCreator;
    using IPluginV2 = trt10::IPluginV2;
    using IPluginV2DynamicExt = trt10::IPluginV2DynamicExt;
#endif
    using PluginField = trt10::PluginField;
    using PluginFieldCollection = trt10::PluginFieldCollection;
    using PluginFieldType = trt10::PluginFieldType;
    using PluginTensorDesc = trt10::PluginTensorDesc;
};

//! Of a PluginTensorDesc of either interface.
template <class Desc>
TensorInfo tensor_info(const Desc& desc) {
    TensorInfo out;
    out.rank = desc.dims.nbDims < 0 || desc.dims.nbDims > 8 ? 0 : desc.dims.nbDims;
    for (int axis = 0; axis < out.rank; ++axis)
        out.extents[axis] = desc.dims.d[axis];
    out.type = static_cast<int32_t>(desc.type);
    out.format = static_cast<int32_t>(desc.format);
    return out;
}

inline TensorInfo tensor_info(const trt8::DynamicPluginTensorDesc& desc) { return tensor_info(desc.desc); }
inline TensorInfo tensor_info(const trt10::DynamicPluginTensorDesc& desc) { return tensor_info(desc.desc); }

//! The most extents along axis 0 that the descriptor allows.
template <class Desc>
int64_t most_rows(const Desc& desc) {
    return desc.dims.nbDims > 0 ? desc.dims.d[0] : 0;
}
template <class Dynamic>
int64_t most_rows_dynamic(const Dynamic& desc) {
    const int64_t now = most_rows(desc.desc), most = desc.max.nbDims > 0 ? desc.max.d[0] : 0;
    return now > most ? now : most;
}
inline int64_t most_rows(const trt8::DynamicPluginTensorDesc& desc) { return most_rows_dynamic(desc); }
inline int64_t most_rows(const trt10::DynamicPluginTensorDesc& desc) { return most_rows_dynamic(desc); }

//! Inputs, then outputs. Throws Error for other counts than the operation has.
template <class Desc>
void fill_tensors(
    const ReplayOp& op, const Desc* inputs, int num_inputs, const Desc* outputs, int num_outputs, TensorInfo* to) {
    op.check_counts(num_inputs, num_outputs);
    for (int i = 0; i < num_inputs; ++i)
        to[i] = tensor_info(inputs[i]);
    for (int i = 0; i < num_outputs; ++i)
        to[num_inputs + i] = tensor_info(outputs[i]);
}

template <class Desc>
bool supports_format(const ReplayOp& op, int position, const Desc* tensors, int num_inputs, int num_outputs) {
    TensorInfo infos[kMaxTensors];
    fill_tensors(op, tensors, num_inputs, tensors + num_inputs, num_outputs, infos);
    return op.supports(position, infos, num_inputs, num_outputs);
}

template <class Desc>
void check_tensors(const ReplayOp& op, const Desc* inputs, int num_inputs, const Desc* outputs, int num_outputs) {
    TensorInfo infos[kMaxTensors];
    fill_tensors(op, inputs, num_inputs, outputs, num_outputs, infos);
    op.check(infos, num_inputs, num_outputs);
}

template <class DimsExprs, class ExprBuilder>
DimsExprs output_extents(const ReplayOp& op, int index, const DimsExprs* inputs, ExprBuilder& builder) {
    const OutputShape shape = op.output_shape(index);
    op.check_rank(shape.like, inputs[shape.like].nbDims);
    DimsExprs out = inputs[shape.like];
    if (shape.last != kUnknownExtent) out.d[out.nbDims - 1] = builder.constant(static_cast<int32_t>(shape.last));
    return out;
}

//! enqueue of both kinds.
template <class Desc>
void run(const ReplayOp& op, const Desc* input_desc, const Desc* output_desc, const void* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) {
    Call call;
    fill_tensors(op, input_desc, op.num_inputs(), output_desc, op.num_outputs(), call.tensors);
    call.inputs = inputs;
    call.outputs = outputs;
    call.workspace = workspace;
    call.stream = stream;
    op.run(call);
}

template <class Collection>
std::vector<RawField> raw_fields(const Collection* collection) {
    std::vector<RawField> out;
    for (int32_t i = 0; collection != nullptr && i < collection->nbFields; ++i) {
        const auto& field = collection->fields[i];
        out.push_back({field.name, field.data, static_cast<int32_t>(field.type), field.length});
    }
    return out;
}

//! Fields in the form that TensorRT reads; what they point to must outlive this.
template <class Api>
class FieldList {
public:
    explicit FieldList(const std::vector<RawField>& fields) {
        for (const RawField& field : fields) {
            typename Api::PluginField out;
            out.name = field.name;
            out.data = field.data;
            out.type = static_cast<typename Api::PluginFieldType>(field.type);
            out.length = field.length;
            fields_.push_back(out);
        }
        collection_.nbFields = static_cast<int32_t>(fields_.size());
        collection_.fields = fields_.data();
    }
    FieldList(const FieldList&) = delete;
    FieldList& operator=(const FieldList&) = delete;

    const typename Api::PluginFieldCollection* get() const { return &collection_; }

private:
    std::vector<typename Api::PluginField> fields_;
    typename Api::PluginFieldCollection collection_{};
};

//! The table of fields for getFieldNames: names and types without values.
std::vector<RawField> field_names(const FieldTable& table);

//! Whether an instance may touch memory. TensorRT times a layer while it builds an engine: real launches with memory of
//! its own behind every pointer, host tensors included, and nothing sensible in it. Hence an instance made from a
//! network definition, and every clone of it, launches nothing; one made from an engine's serialised fields, and every
//! clone of that, works.
enum class Phase { kBuild, kRun };

//! A build instance's enqueue: nothing, unless host_request_types lies in host memory, which TensorRT's timing never
//! passes. Then somebody executes an engine that was never serialised: throws Error rather than leaving the output
//! unwritten. host_request_types itself is not read.
void refuse_execution(const ReplayOp& op, const void* host_request_types);

} // namespace replayssm::plugin
