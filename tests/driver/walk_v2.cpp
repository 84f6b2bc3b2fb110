//! An IPluginV2DynamicExt plugin through the calls that TensorRT makes, in its order.
#include "walk.h"

namespace driver {
namespace {

template <class T>
typename T::Plugin* as_plugin(typename T::PluginV2* plugin) {
    return static_cast<typename T::Plugin*>(plugin);
}

template <class T>
void walk_shapes(Checks& check, const Case& c, typename T::Plugin* plugin) {
    typename T::Builder builder;
    std::list<typename T::Expr> made;
    std::vector<typename T::DimsExprs> inputs;
    std::vector<typename T::DataType> types;
    for (const Tensor& tensor : c.inputs) {
        typename T::DimsExprs dims{};
        dims.nbDims = static_cast<int32_t>(tensor.extents.size());
        for (size_t axis = 0; axis < tensor.extents.size(); ++axis)
            dims.d[axis] = &made.emplace_back(tensor.extents[axis]);
        inputs.push_back(dims);
        types.push_back(static_cast<typename T::DataType>(tensor.types[0]));
    }
    const int32_t count = static_cast<int32_t>(inputs.size());
    for (int32_t i = 0; i < static_cast<int32_t>(c.outputs.size()); ++i) {
        const auto dims = plugin->getOutputDimensions(i, inputs.data(), count, builder);
        const Tensor& wanted = c.outputs[i];
        bool same = dims.nbDims == static_cast<int32_t>(wanted.extents.size());
        for (int32_t axis = 0; same && axis < dims.nbDims; ++axis) {
            same = wanted.extents[axis] < 0 ? dims.d[axis] == inputs[0].d[axis]
                                            : dims.d[axis]->getConstantValue() == wanted.extents[axis];
        }
        check(same, "shape of " + wanted.name);
        check(static_cast<int32_t>(plugin->getOutputDataType(i, types.data(), count)) == wanted.types[0],
            "type of " + wanted.name);
    }
    check(plugin->getOutputDimensions(0, inputs.data(), count - 1, builder).nbDims < 0 && said("inputs"),
        "a missing input is refused", library.last_error());
    inputs[0].nbDims += 1;
    check(plugin->getOutputDimensions(0, inputs.data(), count, builder).nbDims < 0 && said("axes; it must have"),
        "a wrong rank is refused", library.last_error());
}

template <class T>
std::vector<uint8_t> serialised(typename T::Plugin* plugin) {
    std::vector<uint8_t> out(plugin->getSerializationSize() + 8, 0xee);
    plugin->serialize(out.data());
    return out;
}

template <class T>
typename T::Plugin* walk_engine(
    Checks& check, const Case& c, typename T::Creator* creator, typename T::Plugin* plugin) {
    std::vector<uint8_t> bytes = serialised<T>(plugin);
    const size_t size = bytes.size() - 8;
    check(size > 0 && std::string(bytes.end() - 8, bytes.end()) == std::string(8, '\xee'),
        "serialisation stays within its size");
    const auto read = [&](const std::vector<uint8_t>& from, size_t length) {
        return as_plugin<T>(creator->deserializePlugin("layer", from.data(), length));
    };
    check(read(bytes, size - 1) == nullptr && said("cut off"), "cut off data is refused", library.last_error());
    check(read(bytes, size + 1) == nullptr && said("too many"), "longer data is refused", library.last_error());
    std::vector<uint8_t> other = bytes;
    other[8] += 1;
    check(read(other, size) == nullptr && said("field schema 2") && said("build the engine again"),
        "another schema is refused", library.last_error());
    other = bytes;
    other[12] += 1;
    check(read(other, size) == nullptr && said("slot layout"), "another slot layout is refused", library.last_error());
    other = bytes;
    other[0] = 'X';
    check(read(other, size) == nullptr && said("not written by this library"), "foreign data is refused");
    size_t survived = 0;
    for (size_t at = 0; at < size; ++at) {
        for (const uint8_t flip : {0x01, 0x80, 0xff}) {
            other = bytes;
            other[at] ^= flip;
            typename T::Plugin* damaged = read(other, size); // refused, or another value of a field
            if (damaged != nullptr) damaged->destroy();
            ++survived;
        }
    }
    check(survived == 3 * size, "damaged data is survived", std::to_string(survived));
    typename T::Plugin* back = read(bytes, size);
    if (!check(back != nullptr, "deserialisation", library.last_error())) return nullptr;
    check(serialised<T>(back) == bytes, "a second serialisation is the same");
    back->setPluginNamespace("elsewhere");
    check(std::string(back->getPluginNamespace()) == "elsewhere" && back->getPluginType() == c.plugin,
        "namespace and type of the deserialised plugin");
    return back;
}

template <class T>
void walk_v2(Checks& check, const Case& c, void* object, const char* name_space) {
    auto* creator = static_cast<typename T::Creator*>(object);
    check(creator->getPluginName() == c.plugin && std::string(creator->getPluginVersion()) == "1" &&
            std::string(creator->getPluginNamespace()) == name_space && creator->getFieldNames()->nbFields > 5,
        "the creator says what it is");
    Fields<T> fields(c.fields);
    auto* first = as_plugin<T>(creator->createPlugin("layer", &fields.collection));
    if (!check(first != nullptr, "creation", library.last_error())) return;
    check((first->getTensorRTVersion() >> 24) == 3, "the plugin says its kind");
    auto* plugin = first->clone();
    if (!check(plugin != nullptr && plugin != first, "clone")) return;
    first->destroy();
    check(plugin->getPluginType() == c.plugin && std::string(plugin->getPluginVersion()) == "1" &&
            std::string(plugin->getPluginNamespace()) == name_space,
        "the clone says what it is");
    check(plugin->getNbOutputs() == static_cast<int32_t>(c.outputs.size()), "number of outputs");
    walk_shapes<T>(check, c, plugin);
    const auto num_in = static_cast<int32_t>(c.inputs.size()), num_out = static_cast<int32_t>(c.outputs.size());
    auto asked = descs_of<T>(c.all(), false);
    walk_formats(check, c, [&](int position, int type, int format) {
        const auto kept = asked[position];
        asked[position].type = static_cast<typename T::DataType>(type);
        asked[position].format = static_cast<typename T::TensorFormat>(format);
        const bool taken = plugin->supportsFormatCombination(position, asked.data(), num_in, num_out);
        asked[position] = kept;
        return taken;
    });
    const auto bad = descs_of<T>(narrow(c).all(), false);
    check(!plugin->supportsFormatCombination(0, bad.data(), num_in, num_out) && said("must have at least"),
        "too few columns are refused", library.last_error());
    const auto in = dynamic_descs_of<T>(c.inputs), out = dynamic_descs_of<T>(c.outputs);
    plugin->configurePlugin(in.data(), num_in, out.data(), num_out);
    const auto in_run = descs_of<T>(c.inputs, true), out_run = descs_of<T>(c.outputs, true);
    const size_t workspace = plugin->getWorkspaceSize(in_run.data(), num_in, out_run.data(), num_out);
    check(workspace >= 512 && workspace < 1 << 20, "workspace", std::to_string(workspace));
    check(plugin->initialize() == 0, "initialize");
    std::vector<const void*> nothing(num_in, nowhere(0));
    std::vector<void*> no_output(num_out, nowhere(0));
    check(plugin->enqueue(in_run.data(), out_run.data(), nothing.data(), no_output.data(), nullptr, nullptr) == 0,
        "timing during a build touches nothing and succeeds");
    typename T::Plugin* runs = walk_engine<T>(check, c, creator, plugin);
    plugin->terminate();
    plugin->destroy();
    if (runs == nullptr) return;
    auto* attached = runs->clone();
    attached->attachToContext(nullptr, nullptr, nullptr);
    check(attached->initialize() == 0, "attach");
    walk_rows(check, c, [&](Rows& rows) {
        return attached->enqueue(
            in_run.data(), out_run.data(), rows.inputs.data(), rows.outputs.data(), rows.workspace.data(), nullptr);
    });
    walk_rowless(check, c, [&](const Case& shapes, Rows& rows) {
        const auto in_shapes = descs_of<T>(shapes.inputs, true), out_shapes = descs_of<T>(shapes.outputs, true);
        return attached->enqueue(in_shapes.data(), out_shapes.data(), rows.inputs.data(), rows.outputs.data(),
            rows.workspace.data(), nullptr);
    });
    const auto narrow_run = descs_of<T>(narrow(c).inputs, true);
    Rows rows(c);
    check(attached->enqueue(
              narrow_run.data(), out_run.data(), rows.inputs.data(), rows.outputs.data(), nullptr, nullptr) != 0 &&
            said("must have at least"),
        "enqueue refuses too few columns", library.last_error());
    attached->detachFromContext();
    attached->terminate();
    attached->destroy();
    runs->destroy();
}

} // namespace

void walk_v2_trt8(Checks& check, const Case& c, void* creator, const char* name_space) {
    walk_v2<Trt8>(check, c, creator, name_space);
}
void walk_v2_trt10(Checks& check, const Case& c, void* creator, const char* name_space) {
    walk_v2<Trt10>(check, c, creator, name_space);
}

} // namespace driver
