//! Launch helpers: every launch gets its stream and a check, large shared memory is asked for once per kernel and
//! device.
#pragma once

#include "checks.h"

#include <cuda_runtime.h>

#include <atomic>

namespace replayssm {

constexpr int kMaxDevices = 64;

inline void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) fail(REPLAYSSM_CUDA_ERROR, what, ": ", cudaGetErrorString(error));
}

struct DeviceLimits {
    int device = 0;
    int multiprocessors = 0;
    int block_shared_bytes = 0; // most shared memory that one block may ask for
    bool early_launch = false;  // programmatic dependent launch
    bool clusters = false;      // blocks that reach each other's shared memory
    bool warpgroups = false;    // products of warpgroups (wgmma), which only capability 9 has
};

//! Of the current device; asked for once per device.
inline DeviceLimits device_limits() {
    static std::atomic<int> multiprocessors[kMaxDevices], shared_bytes[kMaxDevices], major[kMaxDevices];
    DeviceLimits limits;
    check_cuda(cudaGetDevice(&limits.device), "cudaGetDevice");
    require_range("device index", limits.device, 0, kMaxDevices - 1);
    int count = multiprocessors[limits.device].load(), bytes = shared_bytes[limits.device].load();
    if (count == 0 || bytes == 0) {
        check_cuda(
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, limits.device), "multiprocessor count");
        check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, limits.device),
            "shared memory limit");
        int capability = 0;
        check_cuda(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, limits.device),
            "compute capability");
        major[limits.device] = capability;
        multiprocessors[limits.device] = count;
        shared_bytes[limits.device] = bytes;
    }
    limits.multiprocessors = count;
    limits.block_shared_bytes = bytes;
    limits.clusters = limits.early_launch = major[limits.device] >= 9;
    limits.warpgroups = major[limits.device] == 9;
    return limits;
}

//! Launch kernel<<<grid, threads, shared_bytes, stream>>>(params). One static per kernel remembers what was asked for.
//! early: by programmatic dependent launch; the kernel must wait for its predecessors itself. cluster: neighbouring
//! blocks (at most 8) that form one; the grid's width is a multiple of it.
template <auto kKernel, class Params>
void launch(const char* name, dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream, const Params& params,
    bool early = false, int cluster = 1) {
    static std::atomic<size_t> granted[kMaxDevices];
    const DeviceLimits limits = device_limits();
    if (shared_bytes > static_cast<size_t>(limits.block_shared_bytes)) {
        fail(REPLAYSSM_UNSUPPORTED, name, " needs ", shared_bytes,
            " bytes of shared memory for this spec; the device gives ", limits.block_shared_bytes);
    }
    if (granted[limits.device].load() < shared_bytes + 1) {
        check_cuda(
            cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
            name);
        check_cuda(cudaFuncSetAttribute(
                       kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
            name);
        granted[limits.device] = shared_bytes + 1;
    }
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    check_cuda(cudaLaunchKernelEx(&config, kKernel, params), name);
}

} // namespace replayssm
