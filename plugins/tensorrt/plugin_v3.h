//! IPluginV3 over a ReplayOp: core, build and runtime capability in one object. TensorRT 10 and newer.
#pragma once

#include "api.h"
#include "log.h"

namespace replayssm::plugin {

//! BuildInterface: trt10::IPluginV3OneBuild, or IPluginV3OneBuildV2 where an output aliases the state.
template <class BuildInterface>
class PluginV3 final : public trt10::IPluginV3,
                       public trt10::IPluginV3OneCore,
                       public BuildInterface,
                       public trt10::IPluginV3OneRuntime {
public:
    using DataType = trt10::DataType;
    using Desc = trt10::PluginTensorDesc;
    using DynamicDesc = trt10::DynamicPluginTensorDesc;
    using DimsExprs = trt10::DimsExprs;

    PluginV3(std::unique_ptr<ReplayOp> op, Phase phase, const char* name_space)
        : op_(std::move(op)), phase_(phase), namespace_(name_space), serialised_(op_->fields().raw()) {}

    trt10::IPluginCapability* getCapabilityInterface(trt10::PluginCapabilityType type) noexcept override {
        switch (type) {
            case trt10::PluginCapabilityType::kCORE: return static_cast<trt10::IPluginV3OneCore*>(this);
            case trt10::PluginCapabilityType::kBUILD:
                return static_cast<trt10::IPluginV3OneBuild*>(static_cast<BuildInterface*>(this));
            case trt10::PluginCapabilityType::kRUNTIME: return static_cast<trt10::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    trt10::IPluginV3* clone() noexcept override {
        return guarded<trt10::IPluginV3*>(
            op_->name(), nullptr, [&] { return new PluginV3(op_->clone(), phase_, namespace_.c_str()); });
    }

    const char* getPluginName() const noexcept override { return op_->name(); }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

    int32_t getNbOutputs() const noexcept override { return op_->num_outputs(); }

    int32_t configurePlugin(
        const DynamicDesc* in, int32_t num_in, const DynamicDesc* out, int32_t num_out) noexcept override {
        return status([&] { check_tensors(*op_, in, num_in, out, num_out); });
    }

    int32_t getOutputDataTypes(
        DataType* types, int32_t num_out, const DataType*, int32_t num_in) const noexcept override {
        return status([&] {
            op_->check_counts(num_in, num_out);
            for (int32_t i = 0; i < num_out; ++i)
                types[i] = static_cast<DataType>(op_->output_type(i));
        });
    }

    int32_t getOutputShapes(const DimsExprs* inputs, int32_t num_in, const DimsExprs*, int32_t, DimsExprs* outputs,
        int32_t num_out, trt10::IExprBuilder& builder) noexcept override {
        return status([&] {
            op_->check_counts(num_in, num_out);
            for (int32_t i = 0; i < num_out; ++i)
                outputs[i] = output_extents(*op_, i, inputs, builder);
        });
    }

    bool supportsFormatCombination(
        int32_t position, const DynamicDesc* tensors, int32_t num_in, int32_t num_out) noexcept override {
        return guarded(op_->name(), false, [&] { return supports_format(*op_, position, tensors, num_in, num_out); });
    }

    size_t getWorkspaceSize(
        const DynamicDesc* inputs, int32_t num_in, const DynamicDesc*, int32_t) const noexcept override {
        return num_in == op_->num_inputs() ? op_->workspace_bytes(most_rows(inputs[op_->rows_input()])) : 0;
    }

    //! Of IPluginV3OneBuildV2.
    int32_t getAliasedInput(int32_t output) noexcept {
        return op_->aliases_state() && output == 1 ? op_->state_input() : -1;
    }

    int32_t onShapeChange(const Desc* in, int32_t num_in, const Desc* out, int32_t num_out) noexcept override {
        return status([&] { check_tensors(*op_, in, num_in, out, num_out); });
    }

    int32_t enqueue(const Desc* input_desc, const Desc* output_desc, const void* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override {
        return status([&] {
            if (phase_ == Phase::kBuild) return refuse_execution(*op_, inputs[op_->rows_input()]);
            run(*op_, input_desc, output_desc, inputs, outputs, workspace, stream);
        });
    }

    trt10::IPluginV3* attachToContext(trt10::IPluginResourceContext*) noexcept override { return clone(); }

    const trt10::PluginFieldCollection* getFieldsToSerialize() noexcept override { return serialised_.get(); }

private:
    template <class Body>
    int32_t status(Body body) const noexcept {
        return guarded(op_->name(), 1, [&] {
            body();
            return 0;
        });
    }

    std::unique_ptr<ReplayOp> op_;
    Phase phase_;
    std::string namespace_;
    FieldList<Api10> serialised_; // points into op_
};

class CreatorV3 final : public trt10::IPluginCreatorV3One {
public:
    CreatorV3(const OpInfo& info, const std::string& name_space)
        : info_(info), namespace_(name_space), fields_(field_names(info.table)) {}

    trt10::IPluginV3* createPlugin(
        const char*, const trt10::PluginFieldCollection* fields, trt10::TensorRTPhase phase) noexcept override {
        return guarded<trt10::IPluginV3*>(info_.name(), nullptr, [&]() -> trt10::IPluginV3* {
            const bool running = phase == trt10::TensorRTPhase::kRUNTIME;
            const std::vector<RawField> raw = raw_fields(fields);
            auto op = info_.make(FieldSet(info_.table, raw.data(), static_cast<int32_t>(raw.size()), running));
            const Phase own = running ? Phase::kRun : Phase::kBuild;
            if (op->aliases_state())
                return new PluginV3<trt10::IPluginV3OneBuildV2>(std::move(op), own, namespace_.c_str());
            return new PluginV3<trt10::IPluginV3OneBuild>(std::move(op), own, namespace_.c_str());
        });
    }

    const trt10::PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }
    const char* getPluginName() const noexcept override { return info_.name(); }
    const char* getPluginVersion() const noexcept override { return kPluginVersion; }
    const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

private:
    const OpInfo& info_;
    std::string namespace_;
    FieldList<Api10> fields_;
};

} // namespace replayssm::plugin
