#include "row_kernels.h"

#include "../common/launch.h"
#include "../common/slot_layout.h"

namespace replayssm::plugin {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kWorkspaceStep = 256;

struct ScanRowsWork {
    ScanRowsParams in;
    ScanRowsOutput out;
};

//! One thread for each row and one for the end.
__global__ void __launch_bounds__(kThreads) scan_rows_kernel(const __grid_constant__ ScanRowsWork work) {
    const int row = blockIdx.x * kThreads + threadIdx.x;
    if (row <= work.in.rows) map_row(work.in, work.out, row);
}

#if defined(REPLAYSSM_DEBUG_CHECKS)
struct SlotCheck {
    const int32_t* slot_mapping;
    int rows;
    int64_t slots;
};

__global__ void __launch_bounds__(kThreads) slot_check_kernel(const __grid_constant__ SlotCheck p) {
    const int row = blockIdx.x * kThreads + threadIdx.x;
    if (row < p.rows) check_slot(p.slot_mapping, row, p.slots);
}
#endif

dim3 grid_of(int threads) { return dim3((threads + kThreads - 1) / kThreads); }

int64_t sequences_of(int64_t rows) { return 2 * rows; }
int64_t index_bytes(int64_t count) { return round_up(count * static_cast<int64_t>(sizeof(int32_t)), kWorkspaceStep); }

} // namespace

size_t scan_rows_bytes(int64_t rows) {
    if (rows < 0) rows = 0;
    const int64_t sequences = sequences_of(rows);
    return index_bytes(sequences + 1) + index_bytes(sequences) + round_up(sequences, kWorkspaceStep);
}

ScanRows launch_scan_rows(const ScanRowsParams& params, void* workspace, cudaStream_t stream) {
    require(workspace != nullptr, "workspace is NULL");
    const int64_t sequences = sequences_of(params.rows);
    char* next = static_cast<char*>(workspace);
    ScanRowsWork work{params, {}};
    work.out.cu_seqlens = reinterpret_cast<int32_t*>(next);
    next += index_bytes(sequences + 1);
    work.out.slots = reinterpret_cast<int32_t*>(next);
    next += index_bytes(sequences);
    work.out.has_initial = reinterpret_cast<uint8_t*>(next);
    launch<scan_rows_kernel>("scan_rows", grid_of(params.rows + 1), kThreads, 0, stream, work);
    ScanRows out;
    out.sequences = params.padded_length > 0 ? 2 * params.rows : params.rows;
    out.tokens = params.tokens;
    out.cu_seqlens = work.out.cu_seqlens;
    out.slots = params.padded_length > 0 ? work.out.slots : params.slot_mapping;
    out.has_initial = params.has_initial != nullptr ? work.out.has_initial : nullptr;
    return out;
}

#if defined(REPLAYSSM_DEBUG_CHECKS)
void launch_slot_check(const int32_t* slot_mapping, int rows, int64_t slots, cudaStream_t stream) {
    launch<slot_check_kernel>("slot_check", grid_of(rows), kThreads, 0, stream, SlotCheck{slot_mapping, rows, slots});
}
#endif

} // namespace replayssm::plugin
