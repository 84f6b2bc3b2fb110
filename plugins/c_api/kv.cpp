//! The append to a KV cache: checks, then kv_cache/params.h, then launch.
#include "../kv_cache/params.h"
#include "guard.h"

using namespace replayssm;

namespace {

constexpr int64_t kMaxKvHeads = 4096;
constexpr int64_t kMaxKvHeadDim = 4096;

void require_elements(const char* name, const void* data, int64_t size) {
    require(data != nullptr, name, " is NULL; it must be a device pointer");
    const auto address = reinterpret_cast<uintptr_t>(data);
    require(address % size == 0, name, " starts at address ", address, "; it must be a multiple of ", size,
        ", the bytes of an element");
}

} // namespace

extern "C" int32_t replayssm_kv_append(const replayssm_kv_append_params* params, void* stream) {
    return guarded("kv_append", [&] {
        const auto& p = checked(params);
        const bool known =
            p.dtype == REPLAYSSM_FLOAT32 || p.dtype == REPLAYSSM_BFLOAT16 || p.dtype == REPLAYSSM_FLOAT16;
        require(known, "dtype is ", dtype_name(p.dtype), "; it must be float32, bfloat16 or float16");
        require_range("rows", p.rows, 0, INT32_MAX);
        require_range("tokens", p.tokens, 0, INT32_MAX);
        const int64_t tokens = static_cast<int64_t>(p.rows) * p.tokens;
        require(tokens <= INT32_MAX, "rows is ", p.rows, " with tokens ", p.tokens, "; their product must be at most ",
            INT32_MAX);
        require_range("parts", p.parts, 1, 2);
        require_range("kv_heads", p.kv_heads, 1, kMaxKvHeads);
        require_range("head_dim", p.head_dim, 1, kMaxKvHeadDim);
        require_range("slots", p.slots, 1, INT32_MAX);
        require_range("max_positions", p.max_positions, 1, INT32_MAX);
        if (tokens == 0) return;
        const int size = dtype_bytes(p.dtype);
        require_elements("new_kv", p.new_kv, size);
        require_elements("cache", p.cache, size);
        require_index("slot_mapping", p.slot_mapping, false);
        require_index("positions", p.positions, false);
        require_index("counts", p.counts, true);
        KvAppendParams append;
        append.new_kv = static_cast<const char*>(p.new_kv);
        append.cache = static_cast<char*>(p.cache);
        append.slot_mapping = p.slot_mapping;
        append.positions = p.positions;
        append.counts = p.counts;
        append.rows = p.rows;
        append.tokens = p.tokens;
        append.vectors = p.parts * p.kv_heads;
        append.head_bytes = p.head_dim * size;
        append.slots = p.slots;
        append.max_positions = p.max_positions;
        launch_kv_append(append, static_cast<cudaStream_t>(stream));
    });
}
