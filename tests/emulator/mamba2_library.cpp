//! What the emulated library of Mamba-2 has beside the sources of plugins/:
//! shared memory, and an end for launches of kernels that are not in it.
#include "gated_delta_replay/params.h"
#include "mamba2_replay/params.h"

namespace replayssm {

alignas(1024) char smem[227 * 1024];

void launch_step_generic_fp16(const Mamba2StepParams&, int, cudaStream_t) { emulator::fail("no fp16 activations"); }
void launch_scan_fp16(const Mamba2ScanParams&, int, cudaStream_t) { emulator::fail("no fp16 activations"); }
void launch_gated_delta_step(GatedDeltaStepParams, int, int, GatedDeltaStepTuning, cudaStream_t) {
    emulator::fail("no GDN");
}
void launch_gated_delta_scan(const GatedDeltaScanParams&, int, int, cudaStream_t) { emulator::fail("no GDN"); }
void launch_gated_delta_materialize(const GatedDeltaMaterializeParams&, int, int, cudaStream_t) {
    emulator::fail("no GDN");
}

} // namespace replayssm
