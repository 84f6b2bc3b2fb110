//! The TensorRT libraries that the process has loaded, found without linking one.
#pragma once

#include "../abi/slots.h"

#include <string>
#include <vector>

namespace replayssm::plugin {

struct LoadedTensorRT {
    std::string path;
    int32_t version = 0; // getInferLibVersion
    void* registry = nullptr;
    const abi::Layout* layout = nullptr; // NULL: a version whose layout is not known

    //! "TensorRT 10.14.1 (path)".
    std::string text() const;
};

//! One entry for each plugin registry. Finds libraries that were loaded locally, too.
std::vector<LoadedTensorRT> loaded_tensorrts();

//! Paths of loaded objects whose file name looks like a TensorRT library or a module that needs one.
std::vector<std::string> candidate_objects();

//! Path of the object that holds an address, "" if there is none.
std::string object_of(const void* address);

} // namespace replayssm::plugin
