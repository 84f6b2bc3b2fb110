//! IPluginV2DynamicExt over a ReplayOp: TensorRT 8.6, and 10 where an application still adds plugins of this kind.
#pragma once

#include "api.h"
#include "log.h"

#include <algorithm>
#include <cstring>

namespace replayssm::plugin {

//! What a TensorRT of that major cannot do.
template <class Api>
void require_supported(const FieldSet& fields) {
    require(!fields.flag("aliased_state"), "field aliased_state is 1; aliased outputs need IPluginV3");
    if (Api::kMajor == 8) {
        require(fields.integer("type_id") != kBfloat16,
            "field type_id is 7 (bfloat16); TensorRT 8.6 has 0 (float32) and 1 (float16)");
    }
}

template <class Api>
class PluginV2 final : public Api::IPluginV2DynamicExt {
public:
    using DataType = typename Api::DataType;
    using Desc = typename Api::PluginTensorDesc;
    using DynamicDesc = typename Api::DynamicPluginTensorDesc;
    using DimsExprs = typename Api::DimsExprs;
    using Base = typename Api::IPluginV2DynamicExt;

    PluginV2(std::unique_ptr<ReplayOp> op, Phase phase, const std::string& name_space)
        : op_(std::move(op)), phase_(phase), namespace_(name_space) {}

    const char* getPluginType() const noexcept override { return op_->name(); }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    int32_t getNbOutputs() const noexcept override { return op_->num_outputs(); }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}

    size_t getSerializationSize() const noexcept override {
        return guarded(op_->name(), size_t{0}, [&] { return op_->fields().bytes().size(); });
    }
    void serialize(void* buffer) const noexcept override {
        guarded(op_->name(), 1, [&] {
            const std::vector<uint8_t> bytes = op_->fields().bytes();
            std::memcpy(buffer, bytes.data(), bytes.size());
            return 0;
        });
    }
    void destroy() noexcept override { delete this; }
    Base* clone() const noexcept override {
        return guarded<Base*>(op_->name(), nullptr, [&] {
            auto* copy = new PluginV2(op_->clone(), phase_, namespace_);
            copy->configured_rows_ = configured_rows_;
            return copy;
        });
    }
    void setPluginNamespace(const char* name_space) noexcept override {
        guarded(op_->name(), 1, [&] {
            namespace_ = name_space == nullptr ? "" : name_space;
            return 0;
        });
    }
    const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

    DataType getOutputDataType(int32_t index, const DataType*, int32_t num_in) const noexcept override {
        return guarded(op_->name(), static_cast<DataType>(kFloat32), [&] {
            op_->check_counts(num_in, op_->num_outputs());
            require_range("output", index, 0, op_->num_outputs() - 1);
            return static_cast<DataType>(op_->output_type(index));
        });
    }

    //! A refusal is a result of -1 axes, which TensorRT reports as an error of the layer.
    DimsExprs getOutputDimensions(
        int32_t index, const DimsExprs* inputs, int32_t num_in, typename Api::IExprBuilder& builder) noexcept override {
        DimsExprs refused{};
        refused.nbDims = -1;
        return guarded(op_->name(), refused, [&] {
            op_->check_counts(num_in, op_->num_outputs());
            return output_extents(*op_, index, inputs, builder);
        });
    }

    bool supportsFormatCombination(
        int32_t position, const Desc* tensors, int32_t num_in, int32_t num_out) noexcept override {
        return guarded(op_->name(), false, [&] { return supports_format(*op_, position, tensors, num_in, num_out); });
    }

    //! Can only log; enqueue checks again and refuses.
    void configurePlugin(
        const DynamicDesc* in, int32_t num_in, const DynamicDesc* out, int32_t num_out) noexcept override {
        guarded(op_->name(), 1, [&] {
            check_tensors(*op_, in, num_in, out, num_out);
            configured_rows_ = std::max(configured_rows_, most_rows(in[op_->rows_input()]));
            return 0;
        });
    }

    size_t getWorkspaceSize(const Desc* inputs, int32_t num_in, const Desc*, int32_t) const noexcept override {
        if (num_in != op_->num_inputs()) return 0;
        return op_->workspace_bytes(std::max(configured_rows_, most_rows(inputs[op_->rows_input()])));
    }

    int32_t enqueue(const Desc* input_desc, const Desc* output_desc, const void* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override {
        return guarded(op_->name(), 1, [&] {
            if (phase_ == Phase::kBuild) {
                refuse_execution(*op_, inputs[op_->rows_input()]);
            } else {
                run(*op_, input_desc, output_desc, inputs, outputs, workspace, stream);
            }
            return 0;
        });
    }

private:
    std::unique_ptr<ReplayOp> op_;
    Phase phase_;
    std::string namespace_;
    int64_t configured_rows_ = 0; // most rows of any profile
};

template <class Api>
class CreatorV2 final : public Api::IPluginCreator {
public:
    using IPluginV2 = typename Api::IPluginV2;

    CreatorV2(const OpInfo& info, const std::string& name_space)
        : info_(info), namespace_(name_space), fields_(field_names(info.table)) {}

    const char* getPluginName() const noexcept override { return info_.name(); }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    const typename Api::PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }

    IPluginV2* createPlugin(const char*, const typename Api::PluginFieldCollection* fields) noexcept override {
        return guarded<IPluginV2*>(info_.name(), nullptr, [&] {
            const std::vector<RawField> raw = raw_fields(fields);
            return make(FieldSet(info_.table, raw.data(), static_cast<int32_t>(raw.size()), false), Phase::kBuild);
        });
    }
    IPluginV2* deserializePlugin(const char*, const void* data, size_t length) noexcept override {
        return guarded<IPluginV2*>(
            info_.name(), nullptr, [&] { return make(FieldSet(info_.table, data, length), Phase::kRun); });
    }

    void setPluginNamespace(const char* name_space) noexcept override {
        guarded(info_.name(), 1, [&] {
            namespace_ = name_space == nullptr ? "" : name_space;
            return 0;
        });
    }
    const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

private:
    IPluginV2* make(const FieldSet& fields, Phase phase) const {
        require_supported<Api>(fields);
        return new PluginV2<Api>(info_.make(fields), phase, namespace_);
    }

    const OpInfo& info_;
    std::string namespace_;
    FieldList<Api> fields_;
};

} // namespace replayssm::plugin
