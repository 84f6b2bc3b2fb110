//! Runs the tensor-core Mamba-2 scan on a CPU on one made-up case and compares
//! it with the recurrence in double precision. Prints a line `name value` for
//! each measure; tests/cpu/test_scan_emulator.py knows the bounds.
//!
//!   scan_emulator --heads 4 --groups 2 --headdim 64 --dstate 128
//!   --heads-per-block 2 --product warpgroup
//!                 --regime usual --gate 1 --first-warp first --lengths 0,1,63
//!
//! Memory that the kernel must not read (rows behind the last token, tokens of
//! padding, gaps between tokens, unused slots and ring rows, shared memory
//! before its first write) holds NaN. Every second sequence starts from its
//! slot: a state, its scale, and ring rows that are folded into it. Of four or more
//! sequences the third is padding (slot -1).
#include "cuda_on_host.h"

#include "mamba2_replay/scan_mma_kernel.cuh"

#include <map>
#include <random>
#include <string>

namespace replayssm {
alignas(1024) char smem[kSharedBytes];
}

namespace {

using namespace replayssm;
using Bf16 = __nv_bfloat16;

constexpr int kGap = 8; // elements between tokens
constexpr int kRingRows = 8, kOrigin = 6, kHistory = 3, kPending = 1, kWindow = 16;
constexpr unsigned char kPoison = 0xff; // NaN in every float type

struct Options {
    int heads = 0, groups = 0, headdim = 0, dstate = 0, heads_per_block = 0;
    bool warpgroup = false, gate = true, last_warp_first = false;
    std::string regime;
    std::vector<int> lengths;
};

[[noreturn]] void refuse(const std::string& what) {
    std::fprintf(stderr, "scan_emulator: %s\n", what.c_str());
    std::exit(2);
}

std::vector<int> parse_lengths(const std::string& text) {
    std::vector<int> out;
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        out.push_back(std::stoi(text.substr(at, end - at)));
        at = end + 1;
    }
    return out;
}

Options parse(int argc, char** argv) {
    std::map<std::string, std::string> given;
    for (int i = 1; i + 1 < argc; i += 2)
        given[argv[i]] = argv[i + 1];
    const auto take = [&](const char* name) {
        const auto found = given.find(name);
        if (found == given.end()) refuse(std::string("missing option ") + name);
        const std::string value = found->second;
        given.erase(found);
        return value;
    };
    Options o;
    o.heads = std::stoi(take("--heads"));
    o.groups = std::stoi(take("--groups"));
    o.headdim = std::stoi(take("--headdim"));
    o.dstate = std::stoi(take("--dstate"));
    o.heads_per_block = std::stoi(take("--heads-per-block"));
    o.warpgroup = take("--product") == "warpgroup";
    o.regime = take("--regime");
    o.gate = take("--gate") == "1";
    o.last_warp_first = take("--first-warp") == "last";
    o.lengths = parse_lengths(take("--lengths"));
    if (!given.empty()) refuse("unknown option " + given.begin()->first);
    if (o.warpgroup && (o.dstate != 128 || o.headdim % 64 != 0)) refuse("no warpgroup product of this shape");
    return o;
}

//! Everything that the kernel sees, but for its grid.
struct Case {
    explicit Case(const Options& options);
    int sequences() const { return static_cast<int>(options.lengths.size()); }
    int group_of(int head) const { return head / (options.heads / options.groups); }
    char* slot(int sequence) { return memory.data() + pool.stride_bytes * slots[sequence]; }
    float* state(int sequence) { return reinterpret_cast<float*>(slot(sequence) + pool.state); }
    double* scales(int sequence) { return reinterpret_cast<double*>(slot(sequence) + pool.state_scale); }

    Options options;
    std::mt19937 random{1};
    std::vector<int> starts{0};
    std::vector<Bf16> x, z, B, C, y;
    int channels, columns; // elements from token to token
    std::vector<float> dt, A, D, bias;
    Mamba2Slots pool;
    std::vector<char> memory;
    std::vector<int> slots;
    std::vector<uint8_t> has_initial;

private:
    float normal() { return std::normal_distribution<float>()(random); }
    std::vector<Bf16> activations(int features);
    void make_decays();
    void lay_out_pool();
    void fill_slot(int sequence);
    void pad(int sequence);
};

Case::Case(const Options& o) : options(o), channels(o.heads * o.headdim + kGap), columns(o.groups * o.dstate + kGap) {
    for (int length : o.lengths)
        starts.push_back(starts.back() + length);
    x = activations(o.heads * o.headdim);
    z = activations(o.heads * o.headdim);
    B = activations(o.groups * o.dstate);
    C = activations(o.groups * o.dstate);
    y.resize(x.size());
    std::memset(static_cast<void*>(y.data()), kPoison, y.size() * sizeof(Bf16));
    make_decays();
    lay_out_pool();
    for (int i = 0; i < sequences(); ++i) {
        slots.push_back(sequences() + 1 - i);
        has_initial.push_back(i % 2);
        if (has_initial[i]) fill_slot(i);
    }
    if (sequences() > 3) pad(2);
}

//! A sequence without a slot; its tokens, neighbours of others', hold NaN.
void Case::pad(int sequence) {
    slots[sequence] = -1;
    const auto spoil = [&](auto& data, int per_token) {
        std::memset(static_cast<void*>(data.data() + static_cast<size_t>(starts[sequence]) * per_token), kPoison,
            static_cast<size_t>(starts[sequence + 1] - starts[sequence]) * per_token * sizeof(data[0]));
    };
    spoil(x, channels);
    spoil(z, channels);
    spoil(B, columns);
    spoil(C, columns);
    spoil(dt, options.heads);
}

//! [tokens, features] with gaps, and a token of gap behind.
std::vector<Bf16> Case::activations(int features) {
    std::vector<Bf16> out((starts.back() + 1) * static_cast<size_t>(features + kGap));
    std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(Bf16));
    for (int token = 0; token < starts.back(); ++token) {
        for (int i = 0; i < features; ++i)
            out[token * static_cast<size_t>(features + kGap) + i] = __float2bfloat16_rn(normal());
    }
    return out;
}

//! usual: models' range. still: dt near 1e-6, nothing decays. forgetful: every
//! token erases the state. slow: chunks carry on. swinging: from still to
//! erasing from token to token.
void Case::make_decays() {
    const std::map<std::string, float> biases{
        {"usual", 0.0f}, {"still", -14.0f}, {"forgetful", 30.0f}, {"slow", -4.0f}, {"swinging", 0.0f}};
    if (!biases.count(options.regime)) refuse("unknown regime " + options.regime);
    std::uniform_real_distribution<float> swing(-14.0f, 30.0f);
    for (int i = 0; i < starts.back() * options.heads; ++i)
        dt.push_back(options.regime == "swinging" ? swing(random) : normal());
    for (int i = 0; i < options.heads * options.headdim; ++i)
        D.push_back(normal());
    for (int head = 0; head < options.heads; ++head) {
        const float rate = 0.3f + 1.7f * (head + 1) / options.heads;
        A.push_back(options.regime == "forgetful" ? -10.0f * rate : -rate);
        bias.push_back(biases.at(options.regime) + (options.regime == "usual" ? normal() : 0.0f));
    }
}

void Case::lay_out_pool() {
    const int64_t H = options.heads, P = options.headdim, N = options.dstate;
    const auto end_of = [](int64_t start, int64_t bytes) { return (start + bytes + 127) / 128 * 128; };
    pool.slots = sequences() + 2;
    pool.ring_rows = pool.ring_dt_stride = kRingRows;
    pool.state = end_of(pool.cursor, H * kCursorCopies * static_cast<int64_t>(sizeof(Cursor)));
    pool.state_scale = end_of(pool.state, H * P * N * 4);
    pool.ring_x = end_of(pool.state_scale, H * kCursorCopies * 8);
    pool.ring_b = end_of(pool.ring_x, H * kRingRows * P * 2);
    pool.ring_dt = end_of(pool.ring_b, options.groups * kRingRows * N * 2);
    pool.stride_bytes = end_of(pool.ring_dt, H * kRingRows * 4);
    memory.assign(pool.stride_bytes * pool.slots, static_cast<char>(kPoison));
    pool.base = memory.data();
}

//! A state and kHistory + kPending live ring rows, which wrap around the ring's
//! end.
void Case::fill_slot(int sequence) {
    const int H = options.heads, P = options.headdim, N = options.dstate;
    char* at = slot(sequence);
    auto* cursors = reinterpret_cast<Cursor*>(at + pool.cursor);
    std::fill(cursors, cursors + H * kCursorCopies, Cursor{kOrigin, kHistory, kPending, kWindow});
    std::generate_n(state(sequence), H * P * N, [&] { return normal(); });
    for (int i = 0; i < H * kCursorCopies; ++i)
        scales(sequence)[i] = i % kCursorCopies ? scales(sequence)[i - 1] : std::exp2(3.0f * normal());
    const auto fill = [&](int64_t region, int blocks, int row, int width) {
        for (int i = 0; i < blocks * width; ++i) {
            const int element = (i / width * kRingRows + row) * width + i % width;
            reinterpret_cast<Bf16*>(at + region)[element] = __float2bfloat16_rn(normal());
        }
    };
    for (int j = 0; j < kHistory + kPending; ++j) {
        const int row = (kOrigin + j) % kRingRows;
        fill(pool.ring_x, H, row, P);
        fill(pool.ring_b, options.groups, row, N);
        for (int head = 0; head < H; ++head)
            reinterpret_cast<float*>(at + pool.ring_dt)[head * kRingRows + row] = 0.1f * (j + 1);
    }
}

// -----------------------------------------------------------------------------------------------------
// the kernel

template <class Traits>
void run_grid(const ScanMmaParams& params, bool last_warp_first) {
    blockDim.x = params.heads * params.scan.shape.headdim * 2;
    gridDim.x = params.scan.shape.ngroups * params.blocks_per_group;
    gridDim.y = params.scan.sequences;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
            std::memset(smem, kPoison, sizeof(smem));
            emulator::run_block(blockDim.x, last_warp_first, [&] { mamba2_scan_mma_kernel<Traits>(params); });
        }
    }
}

Mamba2ScanParams scan_params(const Case& c) {
    const Options& o = c.options;
    const auto tensor = [](const auto& data, int dtype, std::initializer_list<int64_t> strides) {
        replayssm_tensor out{};
        out.data = data.data();
        out.dtype = dtype;
        std::copy(strides.begin(), strides.end(), out.strides);
        return out;
    };
    Mamba2ScanParams p;
    p.pool = c.pool;
    p.shape = {o.heads, o.groups, o.heads / o.groups, o.headdim, o.dstate, kWindow, false};
    p.in.x = tensor(c.x, REPLAYSSM_BFLOAT16, {0, c.channels, o.headdim, 1});
    p.in.y = tensor(c.y, REPLAYSSM_BFLOAT16, {0, c.channels, o.headdim, 1});
    if (o.gate) p.in.z = tensor(c.z, REPLAYSSM_BFLOAT16, {0, c.channels, o.headdim, 1});
    p.in.B = tensor(c.B, REPLAYSSM_BFLOAT16, {0, c.columns, o.dstate, 1});
    p.in.C = tensor(c.C, REPLAYSSM_BFLOAT16, {0, c.columns, o.dstate, 1});
    p.in.dt = tensor(c.dt, REPLAYSSM_FLOAT32, {0, o.heads, 1});
    p.in.A = tensor(c.A, REPLAYSSM_FLOAT32, {1});
    p.in.D = tensor(c.D, REPLAYSSM_FLOAT32, {o.headdim, 1});
    p.in.dt_bias = tensor(c.bias, REPLAYSSM_FLOAT32, {1});
    p.in.dt_max = INFINITY;
    p.slots = {c.slots.data(), 32, 0};
    p.cu_seqlens = {c.starts.data(), 32, 0};
    p.has_initial = c.has_initial.data();
    p.sequences = c.sequences();
    return p;
}

void run_kernel(const Case& c) {
    const Options& o = c.options;
    const int padded = o.dstate <= 64 ? 64 : o.dstate <= 128 ? 128 : 256, warps = o.headdim / 16;
    const int blocks_per_group = (o.heads / o.groups + o.heads_per_block - 1) / o.heads_per_block;
    const ScanMmaParams params{scan_params(c), ScanShared(padded, o.heads_per_block * warps, o.heads_per_block),
        REPLAYSSM_FLOAT32, o.heads_per_block, warps, blocks_per_group};
    if (params.shared.bytes > kSharedBytes) refuse("a block's shared memory does not fit");
    if (o.warpgroup && warps == 4) return run_grid<ScanTraits<128, true, 4>>(params, o.last_warp_first);
    if (o.warpgroup) return run_grid<ScanTraits<128, true, 8>>(params, o.last_warp_first);
    if (padded == 64) return run_grid<ScanTraits<64, false, 0>>(params, o.last_warp_first);
    if (padded == 128) return run_grid<ScanTraits<128, false, 0>>(params, o.last_warp_first);
    return run_grid<ScanTraits<256, false, 0>>(params, o.last_warp_first);
}

// -------------------------------------------------------------------------------------------------
// the comparison

double value_of(Bf16 value) { return __bfloat162float(value); }

//! One row of a head's state in double precision, and the same sums of absolute
//! values: what errors are measured by.
struct StateRow {
    std::vector<double> value, magnitude;

    void fold(double decay, double input, const Bf16* b) {
        for (size_t n = 0; n < value.size(); ++n) {
            value[n] = decay * value[n] + input * value_of(b[n]);
            magnitude[n] = decay * magnitude[n] + std::fabs(input * value_of(b[n]));
        }
    }
};

//! The row in front of the first token; memory: the pool before the kernel ran.
StateRow initial_row(const Case& c, const std::vector<char>& memory, int sequence, int head, int channel) {
    const Options& o = c.options;
    StateRow row{std::vector<double>(o.dstate, 0.0), std::vector<double>(o.dstate, 0.0)};
    if (!c.has_initial[sequence]) return row;
    const char* slot = memory.data() + c.pool.stride_bytes * c.slots[sequence];
    const auto* state = reinterpret_cast<const float*>(slot + c.pool.state);
    const double scale = reinterpret_cast<const double*>(slot + c.pool.state_scale)[head * kCursorCopies];
    for (int n = 0; n < o.dstate; ++n) {
        row.value[n] = scale * state[(head * o.headdim + channel) * o.dstate + n];
        row.magnitude[n] = std::fabs(row.value[n]);
    }
    for (int j = 0; j < kHistory + kPending; ++j) {
        const int at = (kOrigin + j) % kRingRows;
        const double dt = reinterpret_cast<const float*>(slot + c.pool.ring_dt)[head * kRingRows + at];
        const auto* x = reinterpret_cast<const Bf16*>(slot + c.pool.ring_x) + (head * kRingRows + at) * o.headdim;
        const auto* b =
            reinterpret_cast<const Bf16*>(slot + c.pool.ring_b) + (c.group_of(head) * kRingRows + at) * o.dstate;
        row.fold(std::exp(c.A[head] * dt), dt * value_of(x[channel]), b);
    }
    return row;
}

struct Measures {
    double output = 0, state = 0; // largest error over magnitude; an output's
                                  // beyond rounding to bf16
    int not_finite = 0, cursors = 0, scales = 0, touched = 0;

    void output_error(double got, double want, double magnitude) {
        if (!std::isfinite(got)) ++not_finite;
        const double beyond = std::fabs(got - want) - std::fabs(want) / 256; // half a step of bf16
        if (beyond > 0) output = std::max(output, beyond / magnitude);
    }
    void state_error(double got, double want, double magnitude) {
        if (!std::isfinite(got)) ++not_finite;
        if (got != want) state = std::max(state, std::fabs(got - want) / std::max(magnitude, 1e-30));
    }
};

void compare_row(const Case& c, StateRow row, int sequence, int head, int channel, Measures& out) {
    const Options& o = c.options;
    for (int token = c.starts[sequence]; token < c.starts[sequence + 1]; ++token) {
        const size_t at = token * static_cast<size_t>(c.channels) + head * o.headdim + channel;
        const size_t shared = token * static_cast<size_t>(c.columns) + c.group_of(head) * o.dstate;
        const double raw = static_cast<double>(c.dt[token * o.heads + head]) + c.bias[head];
        const double dt = raw > 20 ? raw : std::log1p(std::exp(raw)), x = value_of(c.x[at]);
        row.fold(std::exp(c.A[head] * dt), dt * x, c.B.data() + shared);
        double sum = c.D[head * o.headdim + channel] * x, magnitude = std::fabs(sum);
        for (int n = 0; n < o.dstate; ++n) {
            sum += row.value[n] * value_of(c.C[shared + n]);
            magnitude += row.magnitude[n] * std::fabs(value_of(c.C[shared + n]));
        }
        const double z = value_of(c.z[at]), gate = o.gate ? z / (1 + std::exp(-z)) : 1.0;
        out.output_error(value_of(c.y[at]), sum * gate, magnitude * std::fabs(gate));
    }
    const char* slot = c.memory.data() + c.pool.stride_bytes * c.slots[sequence];
    const auto* state = reinterpret_cast<const float*>(slot + c.pool.state);
    for (int n = 0; n < o.dstate; ++n)
        out.state_error(state[(head * o.headdim + channel) * o.dstate + n], row.value[n], row.magnitude[n]);
    const Cursor* cursor = reinterpret_cast<const Cursor*>(slot + c.pool.cursor) + head * kCursorCopies;
    for (int copy = 0; copy < kCursorCopies; ++copy) {
        const Cursor& k = cursor[copy];
        out.cursors += k.origin != 0 || k.history != 0 || k.pending != 0 || k.limit != kWindow;
        const double scale = reinterpret_cast<const double*>(slot + c.pool.state_scale)[head * kCursorCopies + copy];
        out.scales += scale != 1.0;
    }
}

//! Bytes outside what the kernel may write that it has written, and outputs of
//! padding that are not zero.
int count_touched(const Case& c, std::vector<char> before) {
    int touched = 0;
    for (int i = 0; i < c.sequences(); ++i) {
        if (c.slots[i] >= 0) { // cursors, state and scales are what the kernel writes of a slot
            const int64_t slot = c.pool.stride_bytes * c.slots[i], heads = c.options.heads;
            const int64_t cursors = heads * kCursorCopies * static_cast<int64_t>(sizeof(Cursor));
            const int64_t state = heads * c.options.headdim * c.options.dstate * 4;
            std::copy_n(c.memory.begin() + slot, cursors, before.begin() + slot);
            std::copy_n(c.memory.begin() + slot + c.pool.state, state, before.begin() + slot + c.pool.state);
            const int64_t scales = heads * kCursorCopies * 8, at = slot + c.pool.state_scale;
            std::copy_n(c.memory.begin() + at, scales, before.begin() + at);
        }
        for (int token = c.starts[i]; c.slots[i] < 0 && token < c.starts[i + 1]; ++token) {
            for (int at = 0; at < c.channels - kGap; ++at)
                touched += value_of(c.y[token * static_cast<size_t>(c.channels) + at]) != 0.0;
        }
    }
    for (size_t i = 0; i < before.size(); ++i)
        touched += before[i] != c.memory[i];
    const int tokens = c.starts.back();
    for (size_t i = 0; i < c.y.size(); ++i) {
        const bool gap = static_cast<int>(i % c.channels) >= c.channels - kGap;
        const bool behind = static_cast<int>(i / c.channels) >= tokens;
        touched += (gap || behind) && !std::isnan(value_of(c.y[i]));
    }
    return touched;
}

uint64_t hash_bytes(uint64_t hash, const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
        hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull; // FNV-1a
    return hash;
}

} // namespace

int main(int argc, char** argv) {
    Case c(parse(argc, argv));
    const std::vector<char> before = c.memory;
    run_kernel(c);
    Measures measures;
    for (int i = 0; i < c.sequences(); ++i) {
        if (c.slots[i] < 0) continue;
        for (int row = 0; row < c.options.heads * c.options.headdim; ++row) {
            const int head = row / c.options.headdim, channel = row % c.options.headdim;
            compare_row(c, initial_row(c, before, i, head, channel), i, head, channel, measures);
        }
    }
    const uint64_t hash = hash_bytes(14695981039346656037ull, c.y.data(), c.y.size() * sizeof(Bf16));
    std::printf("output %.3e\nstate %.3e\nnot_finite %d\ncursors %d\nscales %d\ntouched "
                "%d\nhash %016llx\n",
        measures.output, measures.state, measures.not_finite, measures.cursors, measures.scales,
        count_touched(c, before), static_cast<unsigned long long>(hash_bytes(hash, c.memory.data(), c.memory.size())));
    return 0;
}
