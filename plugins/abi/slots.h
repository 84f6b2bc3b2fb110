//! Objects that TensorRT makes, called through their virtual tables by slot number, since which slot a method has
//! depends on the TensorRT that is loaded and not on the one whose headers a build saw.
#pragma once

#include <cstdint>

namespace replayssm::abi {

//! Slots of IPluginRegistry and of ILogger for a range of TensorRT versions, as getInferLibVersion counts them. -1: not
//! there.
struct Layout {
    int32_t first_version, last_version;
    const char* product;
    int32_t major_unit;          // version / major_unit is the major version
    int32_t v2_major;            // whose IPluginV2DynamicExt it takes: 8, 10, or 0 for none
    int32_t register_v2, get_v2; // (IPluginCreator&, namespace); (name, version, namespace)
    int32_t register_v3, get_v3; // (IPluginCreatorInterface&, namespace); (name, version, namespace)
    int32_t log;                 // ILogger::log and ILoggerFinder::findLogger
};

constexpr Layout kLayouts[] = {
    {8600, 8699, "TensorRT", 1000, 8, 0, 2, -1, -1, 0},
    {10700, 19999, "TensorRT for RTX", 10000, 0, -1, -1, 8, 10, 4},
    {100000, 109999, "TensorRT", 10000, 10, 0, 2, 12, 14, 0},
    {110000, 119999, "TensorRT", 10000, 0, -1, -1, 8, 10, 4},
};

inline const Layout* find_layout(int32_t version) {
    for (const Layout& layout : kLayouts)
        if (version >= layout.first_version && version <= layout.last_version) return &layout;
    return nullptr;
}

//! object->slot(arguments). Types must be those of the declaration, references as pointers.
template <class Result, class... Arguments>
Result call(void* object, int32_t slot, Arguments... arguments) {
    using Method = Result (*)(void*, Arguments...);
    return reinterpret_cast<Method>((*static_cast<void***>(object))[slot])(object, arguments...);
}

} // namespace replayssm::abi
