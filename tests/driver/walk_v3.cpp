//! An IPluginV3 plugin through the calls that TensorRT makes, in its order.
#include "walk.h"

#include <cstdlib>
#include <sstream>

namespace driver {
namespace {

using trt10::PluginCapabilityType;

struct Capabilities {
    trt10::IPluginV3OneCore* core;
    trt10::IPluginV3OneBuild* build;
    trt10::IPluginV3OneRuntime* runtime;

    explicit Capabilities(trt10::IPluginV3* plugin)
        : core(static_cast<trt10::IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE))),
          build(static_cast<trt10::IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD))),
          runtime(static_cast<trt10::IPluginV3OneRuntime*>(
              plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME))) {}
};

bool is_kind(const trt10::IVersionedInterface* object, const char* kind, int32_t major) {
    const auto info = object->getInterfaceInfo();
    return std::string(info.kind) == kind && info.major == major && info.minor == 0 &&
        object->getAPILanguage() == trt10::APILanguage::kCPP;
}

void walk_shapes(Checks& check, const Case& c, trt10::IPluginV3OneBuild* build) {
    Builder10 builder;
    std::list<Expr10> made;
    std::vector<trt10::DimsExprs> inputs, outputs(c.outputs.size());
    std::vector<trt10::DataType> types, output_types(c.outputs.size());
    for (const Tensor& tensor : c.inputs) {
        trt10::DimsExprs dims{};
        dims.nbDims = static_cast<int32_t>(tensor.extents.size());
        for (size_t axis = 0; axis < tensor.extents.size(); ++axis)
            dims.d[axis] = &made.emplace_back(tensor.extents[axis]);
        inputs.push_back(dims);
        types.push_back(static_cast<trt10::DataType>(tensor.types[0]));
    }
    const auto num_in = static_cast<int32_t>(inputs.size()), num_out = static_cast<int32_t>(outputs.size());
    const auto shapes = [&](int32_t count) {
        return build->getOutputShapes(inputs.data(), count, nullptr, 0, outputs.data(), num_out, builder);
    };
    check(shapes(num_in) == 0, "shapes are given", library.last_error());
    check(build->getOutputDataTypes(output_types.data(), num_out, types.data(), num_in) == 0, "types are given");
    for (int32_t i = 0; i < num_out; ++i) {
        const Tensor& wanted = c.outputs[i];
        const auto& like = inputs[i == 0 ? 0 : c.input("state")];
        bool same = outputs[i].nbDims == static_cast<int32_t>(wanted.extents.size());
        for (int32_t axis = 0; same && axis < outputs[i].nbDims; ++axis) {
            same = wanted.extents[axis] < 0 ? outputs[i].d[axis] == like.d[axis]
                                            : outputs[i].d[axis]->getConstantValue() == wanted.extents[axis];
        }
        check(same, "shape of " + wanted.name);
        check(static_cast<int32_t>(output_types[i]) == wanted.types[0], "type of " + wanted.name);
    }
    check(shapes(num_in - 1) != 0 && said("inputs"), "a missing input is refused", library.last_error());
    inputs[0].nbDims += 1;
    check(shapes(num_in) != 0 && said("axes; it must have"), "a wrong rank is refused", library.last_error());
}

//! What TensorRT does with serialised fields: copies them, hands them to createPlugin of another process.
struct Copies {
    std::list<std::string> names;
    std::list<std::vector<uint8_t>> data;
    std::vector<trt10::PluginField> list;

    explicit Copies(const trt10::PluginFieldCollection* from) {
        for (int32_t i = 0; i < from->nbFields; ++i) {
            trt10::PluginField field = from->fields[i];
            const size_t size = field.type == trt10::PluginFieldType::kCHAR ? 1 : 4;
            const auto* bytes = static_cast<const uint8_t*>(field.data);
            field.name = names.emplace_back(field.name).c_str();
            field.data = data.emplace_back(bytes, bytes + size * field.length).data();
            list.push_back(field);
        }
    }
    trt10::PluginField& at(const std::string& name) {
        for (auto& field : list)
            if (name == field.name) return field;
        std::printf("FAIL no serialised field %s\n", name.c_str());
        std::exit(1);
    }
    trt10::PluginFieldCollection collection() const { return {static_cast<int32_t>(list.size()), list.data()}; }
};

//! "name=value name=value ...", numbers alone.
std::string show(const trt10::PluginFieldCollection* fields) {
    std::ostringstream out;
    for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
        const trt10::PluginField& field = fields->fields[i];
        if (field.type == trt10::PluginFieldType::kINT32)
            out << field.name << "=" << *static_cast<const int32_t*>(field.data) << " ";
        if (field.type == trt10::PluginFieldType::kFLOAT32)
            out << field.name << "=" << *static_cast<const float*>(field.data) << " ";
    }
    return out.str();
}

trt10::IPluginV3* walk_engine(Checks& check, trt10::IPluginCreatorV3One* creator, trt10::IPluginV3OneRuntime* runtime) {
    const auto* fields = runtime->getFieldsToSerialize();
    if (!check(fields != nullptr && fields->nbFields > 10, "serialisation", show(fields))) return nullptr;
    const Copies kept(fields);
    const auto read = [&](const trt10::PluginFieldCollection& from) {
        return creator->createPlugin("layer", &from, trt10::TensorRTPhase::kRUNTIME);
    };
    Copies other(fields);
    int32_t two = 2;
    other.at("schema_version").data = &two;
    check(read(other.collection()) == nullptr && said("field schema 2") && said("build the engine again"),
        "another schema is refused", library.last_error());
    other = Copies(fields);
    int32_t unknown = 77;
    other.at("layout_version").data = &unknown;
    check(read(other.collection()) == nullptr && said("slot layout 77"), "another slot layout is refused",
        library.last_error());
    other = Copies(fields);
    other.list.erase(other.list.begin());
    check(
        read(other.collection()) == nullptr && said("is missing"), "a missing field is refused", library.last_error());
    other = Copies(fields);
    other.at("schema_version").name = "other";
    check(read(other.collection()) == nullptr && said("schema -1"), "fields without a schema are refused",
        library.last_error());
    other = Copies(fields);
    other.at("library_version").data = "0.0.1-other";
    trt10::IPluginV3* old = read(other.collection());
    check(old != nullptr, "another library version of the same schema is read");
    delete old;
    trt10::IPluginV3* back = read(kept.collection());
    if (!check(back != nullptr, "deserialisation", library.last_error())) return nullptr;
    const Copies again(Capabilities(back).runtime->getFieldsToSerialize());
    check(again.data == kept.data && again.names == kept.names, "a second serialisation is the same");
    return back;
}

} // namespace

void walk_v3(Checks& check, const Case& c, void* object, const char* name_space) {
    auto* creator = static_cast<trt10::IPluginCreatorV3One*>(object);
    check(is_kind(creator, "PLUGIN CREATOR_V3ONE", 1) && creator->getPluginName() == c.plugin &&
            std::string(creator->getPluginVersion()) == "1" &&
            std::string(creator->getPluginNamespace()) == name_space && creator->getFieldNames()->nbFields > 5,
        "the creator says what it is");
    Fields<Trt10> fields(c.fields);
    trt10::IPluginV3* first = creator->createPlugin("layer", &fields.collection, trt10::TensorRTPhase::kBUILD);
    if (!check(first != nullptr, "creation", library.last_error())) return;
    trt10::IPluginV3* plugin = first->clone();
    if (!check(plugin != nullptr && plugin != first, "clone")) return;
    delete first;
    const Capabilities as(plugin);
    const bool aliased = c.outputs.size() == 2;
    check(is_kind(plugin, "PLUGIN", 1) && is_kind(as.core, "PLUGIN_V3ONE_CORE", 1) &&
            is_kind(as.build, "PLUGIN_V3ONE_BUILD", aliased ? 2 : 1) && is_kind(as.runtime, "PLUGIN_V3ONE_RUNTIME", 1),
        "the clone's capabilities");
    check(as.core->getPluginName() == c.plugin && std::string(as.core->getPluginNamespace()) == name_space,
        "the clone says what it is");
    const auto num_in = static_cast<int32_t>(c.inputs.size()), num_out = static_cast<int32_t>(c.outputs.size());
    check(as.build->getNbOutputs() == num_out, "number of outputs");
    if (aliased) {
        auto* build = static_cast<trt10::IPluginV3OneBuildV2*>(as.build);
        check(build->getAliasedInput(0) == -1 && build->getAliasedInput(1) == c.input("state"), "aliased outputs");
    }
    walk_shapes(check, c, as.build);
    auto asked = dynamic_descs_of<Trt10>(c.all());
    walk_formats(check, c, [&](int position, int type, int format) {
        const auto kept = asked[position];
        asked[position].desc.type = static_cast<trt10::DataType>(type);
        asked[position].desc.format = static_cast<trt10::TensorFormat>(format);
        const bool taken = as.build->supportsFormatCombination(position, asked.data(), num_in, num_out);
        asked[position] = kept;
        return taken;
    });
    const auto bad = dynamic_descs_of<Trt10>(narrow(c).all());
    check(!as.build->supportsFormatCombination(0, bad.data(), num_in, num_out) && said("must have at least"),
        "too few columns are refused", library.last_error());
    const auto in = dynamic_descs_of<Trt10>(c.inputs), out = dynamic_descs_of<Trt10>(c.outputs);
    check(as.build->configurePlugin(in.data(), num_in, out.data(), num_out) == 0, "configure", library.last_error());
    check(as.build->configurePlugin(bad.data(), num_in, out.data(), num_out) != 0, "configure refuses too few columns");
    const size_t workspace = as.build->getWorkspaceSize(in.data(), num_in, out.data(), num_out);
    check(workspace >= 512 && workspace < 1 << 20, "workspace", std::to_string(workspace));
    check(as.build->getNbTactics() == 0 && as.build->getFormatCombinationLimit() > 0, "no tactics");
    const auto in_run = descs_of<Trt10>(c.inputs, true), out_run = descs_of<Trt10>(c.outputs, true);
    trt10::IPluginV3* timed = as.runtime->attachToContext(nullptr);
    if (!check(timed != nullptr, "attach during a build")) return;
    std::vector<const void*> nothing(num_in, nowhere(0));
    std::vector<void*> no_output(num_out, nowhere(0));
    check(Capabilities(timed).runtime->enqueue(
              in_run.data(), out_run.data(), nothing.data(), no_output.data(), nullptr, nullptr) == 0,
        "timing during a build touches nothing and succeeds");
    delete timed;
    trt10::IPluginV3* runs = walk_engine(check, creator, as.runtime);
    delete plugin;
    if (runs == nullptr) return;
    trt10::IPluginV3* attached = Capabilities(runs).runtime->attachToContext(nullptr);
    if (!check(attached != nullptr && attached != runs, "attach")) return;
    delete runs;
    auto* runtime = Capabilities(attached).runtime;
    check(runtime->setTactic(0) == 0, "set tactic");
    check(runtime->onShapeChange(in_run.data(), num_in, out_run.data(), num_out) == 0, "shape change",
        library.last_error());
    const auto narrow_run = descs_of<Trt10>(narrow(c).inputs, true);
    check(runtime->onShapeChange(narrow_run.data(), num_in, out_run.data(), num_out) != 0,
        "a shape change to too few columns is refused");
    walk_rows(check, c, [&](Rows& rows) {
        return runtime->enqueue(
            in_run.data(), out_run.data(), rows.inputs.data(), rows.outputs.data(), rows.workspace.data(), nullptr);
    });
    walk_rowless(check, c, [&](const Case& shapes, Rows& rows) {
        const auto in_shapes = descs_of<Trt10>(shapes.inputs, true), out_shapes = descs_of<Trt10>(shapes.outputs, true);
        return runtime->enqueue(in_shapes.data(), out_shapes.data(), rows.inputs.data(), rows.outputs.data(),
            rows.workspace.data(), nullptr);
    });
    delete attached;
}

} // namespace driver
