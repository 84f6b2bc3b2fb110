//! What the emulated library of the GDN and KDA kernels has beside the sources of
//! plugins/: shared memory, and an end for launches of kernels that are not in
//! it; emulated_blocks(): of the last launch's grid; emulated_previous_writes():
//! what kernels in front of the next launch write at their end.
#include "common/async_copy.cuh"
#include "gated_delta_replay/params.h"
#include "mamba2_replay/params.h"

namespace replayssm {

alignas(1024) char smem[227 * 1024];

void launch_mamba2_step(Mamba2StepParams, int, int, Mamba2StepTuning, cudaStream_t) { emulator::fail("no Mamba-2"); }
void launch_mamba2_scan(const Mamba2ScanParams&, int, int, cudaStream_t) { emulator::fail("no Mamba-2"); }
void launch_mamba2_materialize(const Mamba2MaterializeParams&, int, int, cudaStream_t) { emulator::fail("no Mamba-2"); }

} // namespace replayssm

extern "C" int emulated_blocks() { return static_cast<int>(gridDim.x); }
extern "C" void emulated_previous_writes(void* target, const void* source, long bytes) {
    replayssm::end_previous_kernels = [=] { std::memcpy(target, source, bytes); };
}
