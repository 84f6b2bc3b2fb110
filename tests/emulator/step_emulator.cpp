//! Runs the Mamba-2 step kernels on a CPU on one made-up case and compares them
//! with the recurrence: outputs in double precision, checkpoints to the bit (an
//! fp32 state and its scale). Then materializes from the slots that the step
//! left, checkpoints to the bit again. Prints a line `name value` for each
//! measure; tests/cpu/test_step_emulator.py knows the bounds.
//!
//!   step_emulator --heads 4 --groups 2 --headdim 64 --dstate 128
//!   --heads-per-block 2 --tokens 4 --window 16 --generic 0
//!                 --state fp32 --gate 1 --decays usual --slot-gap 0
//!                 --first-warp first --histories 0,5,12,16
//!
//! generic: the kernel for any sizes, otherwise the tuned one.
//! Row i has histories[i] live ring rows, which wrap around the ring's end, and
//! two pending ones, one of which stays. The second row of more than two is
//! padding (slot -1). Memory that the kernel must not read holds NaN. slot-gap:
//! bytes between slots, in memory of which only what is used exists. decays:
//! usual; growing: A > 0; wild: any from row to row, 0 and 1 included. Head 0 of
//! the first row has a state and a scale of zero.
#include "cuda_on_host.h"

#include "mamba2_replay/materialize_kernel.cuh"
#include "mamba2_replay/step_kernel.cuh"

#include <map>
#include <random>
#include <string>
#include <sys/mman.h>

namespace replayssm {
alignas(1024) char smem[kSharedBytes];
}

namespace {

using namespace replayssm;
using Bf16 = __nv_bfloat16;

constexpr int kPending = 2, kAccepted = 1;
constexpr unsigned char kPoison = 0xff; // NaN in every float type

struct Options {
    int heads = 0, groups = 0, headdim = 0, dstate = 0, heads_per_block = 0, tokens = 0, window = 0;
    int64_t slot_gap = 0;
    bool packed = false, gate = true, last_warp_first = false, generic = false;
    std::string decays;
    std::vector<int> histories;
};

[[noreturn]] void refuse(const std::string& what) {
    std::fprintf(stderr, "step_emulator: %s\n", what.c_str());
    std::exit(2);
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
    o.tokens = std::stoi(take("--tokens"));
    o.window = std::stoi(take("--window"));
    o.packed = take("--state") == "bf16";
    o.gate = take("--gate") == "1";
    o.decays = take("--decays");
    if (o.decays != "usual" && o.decays != "growing" && o.decays != "wild") refuse("unknown decays " + o.decays);
    o.generic = take("--generic") == "1";
    o.slot_gap = std::stoll(take("--slot-gap"));
    o.last_warp_first = take("--first-warp") == "last";
    const std::string text = take("--histories");
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        o.histories.push_back(std::stoi(text.substr(at, end - at)));
        at = end + 1;
    }
    if (!given.empty()) refuse("unknown option " + given.begin()->first);
    return o;
}

//! Bytes of slots, `stride` apart; pages that nothing has written do not exist.
class SlotMemory {
public:
    SlotMemory() = default;
    SlotMemory(const SlotMemory&) = delete;
    ~SlotMemory() {
        if (base_ != nullptr) munmap(base_, size_);
    }

    void allocate(int64_t slots, int64_t slot_bytes, int64_t stride) {
        slots_ = slots, slot_bytes_ = slot_bytes, stride_ = stride, size_ = slots * stride;
        void* made = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) refuse("no room for the slots");
        base_ = static_cast<char*>(made);
        for (int64_t i = 0; i < slots; ++i)
            std::memset(slot(i), kPoison, slot_bytes);
    }

    char* slot(int64_t i) const { return base_ + i * stride_; }
    int64_t slot_bytes() const { return slot_bytes_; }
    std::vector<char> copy() const {
        std::vector<char> out;
        for (int64_t i = 0; i < slots_; ++i)
            out.insert(out.end(), slot(i), slot(i) + slot_bytes_);
        return out;
    }
    //! Bytes just behind a slot that are no longer zero.
    int touched_gap(int64_t i) const {
        const char* end = slot(i) + slot_bytes_;
        return static_cast<int>(std::count_if(
            end, end + std::min<int64_t>(stride_ - slot_bytes_, 4096), [](char byte) { return byte != 0; }));
    }

private:
    char* base_ = nullptr;
    int64_t slots_ = 0, slot_bytes_ = 0, stride_ = 0, size_ = 0;
};

//! Everything that the kernel sees, but for its grid.
struct Case {
    Options options;
    Mamba2Slots pool;
    int ring_rows, committed_cap;
    SlotMemory memory;
    std::vector<int> slots, accepted;
    std::vector<Bf16> x, z, B, C, y;
    std::vector<float> dt, A, D, bias;
    std::mt19937 random{5};

    explicit Case(const Options& o);
    int rows() const { return static_cast<int>(options.histories.size()); }
    char* slot(int row) const { return memory.slot(slots[row]); }
    float normal() { return std::normal_distribution<float>()(random); }
    int committed(int row) const { return options.histories[row] + kAccepted; }
    bool flush(int row) const { return committed(row) + options.tokens > options.window; }
    void fill_slot(int row);
    void pad(int row);
    size_t state_bytes() const { return options.packed ? 2 : 4; }
    float ring_step();
};

Case::Case(const Options& o) : options(o) {
    const int64_t H = o.heads, P = o.headdim, N = o.dstate, T = o.tokens;
    ring_rows = std::max(o.window, std::max(o.tokens, kPending)) + std::max(o.tokens, kPending);
    committed_cap = ring_rows - std::max(o.tokens, kPending);
    const auto end_of = [](int64_t start, int64_t bytes) { return (start + bytes + 127) / 128 * 128; };
    pool.slots = rows() + 2;
    pool.ring_rows = ring_rows;
    pool.ring_dt_stride = (ring_rows + 3) / 4 * 4;
    pool.state = end_of(0, H * kCursorCopies * static_cast<int64_t>(sizeof(Cursor)));
    pool.state_scale = o.packed ? -1 : end_of(pool.state, H * P * N * 4);
    pool.ring_x = o.packed ? end_of(pool.state, H * P * N * 2) : end_of(pool.state_scale, H * kCursorCopies * 8);
    pool.ring_b = end_of(pool.ring_x, H * ring_rows * P * 2);
    pool.ring_dt = end_of(pool.ring_b, o.groups * ring_rows * N * 2);
    const int64_t slot_bytes = end_of(pool.ring_dt, H * pool.ring_dt_stride * 4);
    pool.stride_bytes = slot_bytes + o.slot_gap;
    memory.allocate(pool.slots, slot_bytes, pool.stride_bytes);
    pool.base = memory.slot(0);
    const auto bf16 = [&](std::vector<Bf16>& out, int64_t count) {
        out.resize(count);
        for (Bf16& value : out)
            value = __float2bfloat16_rn(normal());
    };
    bf16(x, rows() * T * H * P);
    bf16(z, rows() * T * H * P);
    bf16(B, rows() * T * o.groups * N);
    bf16(C, rows() * T * o.groups * N);
    y.resize(x.size());
    std::memset(y.data(), kPoison, y.size() * sizeof(Bf16));
    for (int64_t i = 0; i < rows() * T * H; ++i)
        dt.push_back(normal() - 2.0f);
    for (int h = 0; h < H; ++h) {
        A.push_back(o.decays == "growing" ? 0.5f * (h + 1) / H : -0.3f - 2.0f * (h + 1) / H);
        bias.push_back(normal());
    }
    for (int64_t i = 0; i < H * P; ++i)
        D.push_back(normal());
    for (int row = 0; row < rows(); ++row) {
        slots.push_back(rows() > 2 && row == 1 ? -1 : rows() - row);
        accepted.push_back(kAccepted);
        if (slots[row] >= 0) {
            fill_slot(row);
        } else {
            pad(row);
        }
    }
}

//! NaN in all of a row's inputs.
void Case::pad(int row) {
    const auto spoil = [&](auto& data) {
        const size_t per_row = data.size() / rows();
        std::memset(static_cast<void*>(data.data() + row * per_row), kPoison, per_row * sizeof(data[0]));
    };
    spoil(x);
    spoil(z);
    spoil(B);
    spoil(C);
    spoil(dt);
}

//! dt of a ring row. wild: decays near 1, of 1, 0.5, 0.001, of exactly 0 and any.
float Case::ring_step() {
    const float usual = 0.02f + 0.3f * std::fabs(normal()), some[] = {1e-5f, 0.0f, 0.3f, 3.5f, 400.0f};
    const size_t i = options.decays == "wild" ? random() % 7 : 7;
    return i < 5 ? some[i] : usual;
}

void Case::fill_slot(int row) {
    const int H = options.heads, P = options.headdim, N = options.dstate, history = options.histories[row];
    char* at = slot(row);
    const int origin = ring_rows - 3;
    auto* cursors = reinterpret_cast<Cursor*>(at + pool.cursor);
    std::fill(cursors, cursors + H * kCursorCopies,
        Cursor{static_cast<int16_t>(origin), static_cast<int16_t>(history), kPending,
            static_cast<int16_t>(options.window)});
    for (int64_t i = 0; i < static_cast<int64_t>(H) * P * N; ++i) {
        if (options.packed) reinterpret_cast<Bf16*>(at + pool.state)[i] = __float2bfloat16_rn(normal());
        if (!options.packed) reinterpret_cast<float*>(at + pool.state)[i] = normal();
    }
    for (int i = 0; !options.packed && i < H * kCursorCopies; ++i) {
        double& scale = reinterpret_cast<double*>(at + pool.state_scale)[i];
        scale = i % kCursorCopies ? (&scale)[-1] : std::exp2(std::uniform_real_distribution<double>(-16, 16)(random));
    }
    if (row == 0) {
        std::memset(at + pool.state, 0, P * N * state_bytes());
        if (!options.packed) std::memset(at + pool.state_scale, 0, kCursorCopies * 8);
    }
    for (int j = 0; j < history + kAccepted; ++j) {
        const int r = (origin + j) % ring_rows;
        for (int i = 0; i < H * P; ++i)
            reinterpret_cast<Bf16*>(at + pool.ring_x)[(i / P * ring_rows + r) * P + i % P] =
                __float2bfloat16_rn(normal());
        for (int i = 0; i < options.groups * N; ++i)
            reinterpret_cast<Bf16*>(at + pool.ring_b)[(i / N * ring_rows + r) * N + i % N] =
                __float2bfloat16_rn(normal());
        for (int h = 0; h < H; ++h)
            reinterpret_cast<float*>(at + pool.ring_dt)[h * pool.ring_dt_stride + r] = ring_step();
    }
}

// -----------------------------------------------------------------------------------------------------
// the kernel

//! Slots and cursors as a block finds them that begins before the kernels in
//! front are done: anything, until it waits for them.
void spoil_until_the_wait(const Case& c, std::vector<int>& slots) {
    const size_t bytes = c.options.heads * kCursorCopies * sizeof(Cursor);
    std::vector<std::vector<char>> cursors;
    std::mt19937 random(blockIdx.x);
    for (int64_t i = 0; i < c.pool.slots; ++i) {
        char* at = c.memory.slot(i) + c.pool.cursor;
        cursors.emplace_back(at, at + bytes);
        for (size_t k = 0; k < bytes; ++k)
            at[k] = static_cast<char>(random() % 3 == 0 ? random() : random() % 4);
    }
    const int wrong[] = {-1, 0, 1 << 30, static_cast<int>(c.pool.slots) - 1, slots[0], -(1 << 30)};
    for (int& slot : slots)
        slot = wrong[random() % 6];
    end_previous_kernels = [&c, &slots, bytes, cursors] {
        slots = c.slots;
        for (int64_t i = 0; i < c.pool.slots; ++i)
            std::memcpy(c.memory.slot(i) + c.pool.cursor, cursors[i].data(), bytes);
    };
}

template <class state_t, int kDstate, bool kOneToken>
void run_grid(const Case& c, Mamba2StepParams p) {
    using Traits = StepTraits<state_t, kDstate, kOneToken>;
    const Options& o = c.options;
    using Tile = StepTile<state_t, kDstate, Traits::kRows>;
    const int block_rows = o.headdim / Traits::kSplit;
    p.shared = StepShared(c.committed_cap, o.tokens, block_rows, Tile::padded_dstate(o.dstate), 2, o.heads_per_block,
        kDstate ? o.headdim * kDstate * sizeof(state_t) : 0, o.gate, step_form<kDstate, kOneToken>());
    if (p.shared.bytes > kSharedBytes) refuse("a block's shared memory does not fit");
    p.row_vectors = Divisor(block_rows / row_access_elems<Bf16, Traits::kSplit>());
    p.segments[0].blocks *= Traits::kSplit;
    p.segments[0].blocks_per_row = Divisor(p.segments[0].blocks_per_row.value * Traits::kSplit);
    blockDim.x = Traits::kThreadsPerRow * o.headdim;
    gridDim.x = p.segments[0].blocks;
    p.ahead = {static_cast<int>(gridDim.x) - 1, 3, 1};
    std::vector<int> slots = c.slots;
    p.slots = {slots.data(), 32, 0};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        std::memset(smem, kPoison, sizeof(smem));
        if (blockIdx.x % 2 == 0) spoil_until_the_wait(c, slots);
        emulator::run_block(
            blockDim.x, o.last_warp_first, [&] { mamba2_step_kernel<Bf16, state_t, kDstate, kOneToken>(p); });
    }
}

template <class state_t, int kDstate>
void run_tokens(const Case& c, const Mamba2StepParams& p) {
    return c.options.tokens == 1 ? run_grid<state_t, kDstate, true>(c, p) : run_grid<state_t, kDstate, false>(c, p);
}

template <class state_t>
void run_state(const Case& c, const Mamba2StepParams& p) {
    if (c.options.generic) return run_grid<state_t, 0, false>(c, p);
    switch (c.options.dstate) {
        case 64: return run_tokens<state_t, 64>(c, p);
        case 128: return run_tokens<state_t, 128>(c, p);
        case 256: return run_tokens<state_t, 256>(c, p);
        default: refuse("dstate must be 64, 128 or 256, or the kernel generic");
    }
}

void run_kernel(const Case& c) {
    const Options& o = c.options;
    const auto tensor = [](const auto& data, int dtype, int row, int token, int head) {
        return StepTensor{data.data(), row, token, head, dtype};
    };
    Mamba2StepParams p;
    p.pool = c.pool;
    p.shape = {o.heads, o.groups, o.heads / o.groups, o.headdim, o.dstate, o.window, false};
    const int HP = o.heads * o.headdim, GN = o.groups * o.dstate, T = o.tokens;
    p.in.x = tensor(c.x, REPLAYSSM_BFLOAT16, T * HP, HP, o.headdim);
    p.in.y = tensor(c.y, REPLAYSSM_BFLOAT16, T * HP, HP, o.headdim);
    if (o.gate) p.in.z = tensor(c.z, REPLAYSSM_BFLOAT16, T * HP, HP, o.headdim);
    p.in.B = tensor(c.B, REPLAYSSM_BFLOAT16, T * GN, GN, o.dstate);
    p.in.C = tensor(c.C, REPLAYSSM_BFLOAT16, T * GN, GN, o.dstate);
    p.in.dt = tensor(c.dt, REPLAYSSM_FLOAT32, T * o.heads, o.heads, 1);
    p.in.A = tensor(c.A, REPLAYSSM_FLOAT32, 0, 0, 1);
    p.in.dt_bias = tensor(c.bias, REPLAYSSM_FLOAT32, 0, 0, 1);
    p.in.D = tensor(c.D, REPLAYSSM_FLOAT32, 0, 1, o.headdim);
    p.in.dt_max = INFINITY;
    p.accepted = {c.accepted.data(), 32, 0};
    p.rows = c.rows();
    p.tokens = T;
    p.committed_cap = c.committed_cap;
    p.heads_per_group = Divisor(o.heads / o.groups);
    StepSegment& segment = p.segments[0];
    segment.heads = o.heads_per_block;
    segment.blocks_per_row = Divisor(o.heads / o.heads_per_block);
    segment.blocks = c.rows() * static_cast<int>(segment.blocks_per_row.value);
    return o.packed ? run_state<Bf16>(c, p) : run_state<float>(c, p);
}

//! Pairs of materialize: the step's rows by turns into a slot that no row has
//! and into their own, with all rows of the ring or fewer; one that must be
//! skipped.
struct Pairs {
    std::vector<int> src, count, dst;
    explicit Pairs(const Case& c) {
        for (int row = 0; row < c.rows(); ++row) {
            if (c.slots[row] < 0) continue;
            const bool spare = src.size() < 2;
            src.push_back(c.slots[row]);
            count.push_back(src.size() % 2 ? -1 : c.options.tokens / 2 + 1);
            dst.push_back(!spare ? c.slots[row] : src.size() == 1 ? 0 : static_cast<int>(c.pool.slots) - 1);
        }
        src.push_back(c.slots[0]), count.push_back(-1), dst.push_back(-1);
    }
};

template <class state_t>
void run_materialize(const Case& c, const Pairs& pairs) {
    const Options& o = c.options;
    Mamba2MaterializeParams p;
    p.pool = c.pool;
    p.shape = {o.heads, o.groups, o.heads / o.groups, o.headdim, o.dstate, o.window, true};
    p.src = {pairs.src.data(), 32, 0};
    p.count = {pairs.count.data(), 32, 0};
    p.dst = {pairs.dst.data(), 32, 0};
    p.A = c.A.data();
    p.A_stride = 1;
    blockDim.x = 2 * o.headdim;
    gridDim = {static_cast<unsigned>(kQuarter * o.heads), static_cast<unsigned>(pairs.src.size()), 1};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
            std::memset(smem, kPoison, sizeof(smem));
            emulator::run_block(blockDim.x, o.last_warp_first, [&] { mamba2_materialize_kernel<Bf16, state_t>(p); });
        }
    }
}

// -------------------------------------------------------------------------------------------------
// the comparison

double value_of(Bf16 value) { return __bfloat162float(value); }
float state_at(const Case& c, const char* slot, int64_t i) {
    return c.options.packed ? __bfloat162float(reinterpret_cast<const Bf16*>(slot + c.pool.state)[i])
                            : reinterpret_cast<const float*>(slot + c.pool.state)[i];
}

//! The `copy`-th scale of a head: what its state is multiplied by.
double scale_at(const Case& c, const char* slot, int head, int copy) {
    if (c.options.packed) return 1.0;
    return reinterpret_cast<const double*>(slot + c.pool.state_scale)[head * kCursorCopies + copy];
}

struct Measures {
    double output = 0; // largest error beyond rounding to bf16, over the sum of
                       // absolute values
    int not_finite = 0, states = 0, scales = 0, cursors = 0, rings = 0, touched = 0, materialized = 0;
};

struct Folded {
    float state;
    double scale;
    double value() const { return scale * state; }
};

//! Element n of channel `channel` of a head, and its scale, after the fold of `count` ring rows, as they are stored.
Folded folded(const Case& c, const char* slot, int head, int channel, int n, int origin, int count) {
    const Options& o = c.options;
    const int N = o.dstate, P = o.headdim, R = c.ring_rows, group = head / (o.heads / o.groups);
    const auto* ring_x = reinterpret_cast<const Bf16*>(slot + c.pool.ring_x) + head * R * P + channel;
    const auto* ring_b = reinterpret_cast<const Bf16*>(slot + c.pool.ring_b) + group * R * N;
    const auto* ring_dt = reinterpret_cast<const float*>(slot + c.pool.ring_dt) + head * c.pool.ring_dt_stride;
    float S = state_at(c, slot, (static_cast<int64_t>(head) * P + channel) * N + n);
    double scale = scale_at(c, slot, head, 0);
    for (int j = 0; j < count; ++j) {
        const int r = (origin + j) % R;
        scale *= expf(c.A[head] * ring_dt[r]);
        if (!(scale >= 0x1p-16 && scale <= 0x1p16)) S *= static_cast<float>(scale), scale = 1.0;
        const float input = ring_dt[r] * (1.0f / static_cast<float>(scale));
        const float w = input * static_cast<float>(value_of(ring_x[r * P]));
        S = std::fma(w, static_cast<float>(value_of(ring_b[r * N + n])), S);
    }
    if (!o.packed) return {S, scale};
    return {count ? __bfloat162float(__float2bfloat16_rn(S * static_cast<float>(scale))) : S, 1.0};
}

//! One channel of one head: the checkpoint by the fold's own operations,
//! outputs in double precision.
void compare_channel(
    const Case& c, const char* before, const char* after, int row, int head, int channel, Measures& out) {
    const Options& o = c.options;
    const int N = o.dstate, P = o.headdim, T = o.tokens, group = head / (o.heads / o.groups), R = c.ring_rows;
    const Cursor cursor = reinterpret_cast<const Cursor*>(before + c.pool.cursor)[head * kCursorCopies];
    const auto* ring_x = reinterpret_cast<const Bf16*>(before + c.pool.ring_x) + head * R * P + channel;
    const auto* ring_b = reinterpret_cast<const Bf16*>(before + c.pool.ring_b) + group * R * N;
    const auto* ring_dt = reinterpret_cast<const float*>(before + c.pool.ring_dt) + head * c.pool.ring_dt_stride;
    std::vector<double> S(N), size(N);
    for (int n = 0; n < N; ++n) {
        const Folded want = folded(c, before, head, channel, n, cursor.origin, c.flush(row) ? c.committed(row) : 0);
        out.states += !(state_at(c, after, (static_cast<int64_t>(head) * P + channel) * N + n) == want.state);
        for (int copy = 0; n == 0 && copy < kCursorCopies; ++copy)
            out.scales += !(scale_at(c, after, head, copy) == want.scale);
        S[n] = want.value();
        size[n] = std::fabs(S[n]);
    }
    const auto fold = [&](double dt, double x, const Bf16* b) {
        const double decay = std::exp(c.A[head] * dt);
        for (int n = 0; n < N; ++n) {
            S[n] = decay * S[n] + dt * x * value_of(b[n]);
            size[n] = decay * size[n] + std::fabs(dt * x * value_of(b[n]));
        }
    };
    for (int j = 0; !c.flush(row) && j < c.committed(row); ++j) {
        const int r = (cursor.origin + j) % R;
        fold(ring_dt[r], value_of(ring_x[r * P]), ring_b + r * N);
    }
    for (int t = 0; t < T; ++t) {
        const size_t at = ((static_cast<size_t>(row) * T + t) * o.heads + head) * P + channel;
        const size_t bc = ((static_cast<size_t>(row) * T + t) * o.groups + group) * N;
        const double raw = static_cast<double>(c.dt[(row * T + t) * o.heads + head]) + c.bias[head];
        const double dt = std::log1p(std::exp(raw)), x = value_of(c.x[at]);
        fold(dt, x, c.B.data() + bc);
        double sum = c.D[head * P + channel] * x, magnitude = std::fabs(sum);
        for (int n = 0; n < N; ++n) {
            sum += S[n] * value_of(c.C[bc + n]);
            magnitude += size[n] * std::fabs(value_of(c.C[bc + n]));
        }
        const double z = value_of(c.z[at]), gate = o.gate ? z / (1 + std::exp(-z)) : 1.0, want = sum * gate;
        const double got = value_of(c.y[at]), beyond = std::fabs(got - want) - std::fabs(want) / 256;
        if (!std::isfinite(got)) ++out.not_finite;
        if (beyond > 0) out.output = std::max(out.output, beyond / (magnitude * std::fabs(gate)));
        const int r = (cursor.origin + c.committed(row) + t) % R;
        const auto* appended = reinterpret_cast<const Bf16*>(after + c.pool.ring_x) + (head * R + r) * P + channel;
        out.rings += !(value_of(*appended) == x);
        const float kept = reinterpret_cast<const float*>(after + c.pool.ring_dt)[head * c.pool.ring_dt_stride + r];
        out.rings += !(std::fabs(kept - dt) <= 1e-5 * dt);
        for (int n = 0; n < N; ++n)
            out.rings += !(value_of(reinterpret_cast<const Bf16*>(after + c.pool.ring_b)[(group * R + r) * N + n]) ==
                value_of(c.B[bc + n]));
    }
}

void compare_cursors(const Case& c, const char* before, const char* after, int row, Measures& out) {
    const Cursor was = *reinterpret_cast<const Cursor*>(before + c.pool.cursor);
    const int origin = c.flush(row) ? (was.origin + c.committed(row)) % c.ring_rows : was.origin;
    const int history = c.flush(row) ? 0 : c.committed(row);
    for (int i = 0; i < c.options.heads * kCursorCopies; ++i) {
        const Cursor& k = reinterpret_cast<const Cursor*>(after + c.pool.cursor)[i];
        out.cursors +=
            k.origin != origin || k.history != history || k.pending != c.options.tokens || k.limit != c.options.window;
    }
}

//! Bytes of the ring rows that were live before the step and have changed:
//! other blocks may still have to read them.
int count_overwritten(const Case& c, const char* before, const char* after, int row) {
    const Options& o = c.options;
    const Cursor cursor = *reinterpret_cast<const Cursor*>(before + c.pool.cursor);
    int overwritten = 0;
    const auto compare = [&](int64_t region, int blocks, int rows, int width) {
        for (int i = 0; i < blocks * c.committed(row); ++i) {
            const int r = (cursor.origin + i % c.committed(row)) % c.ring_rows;
            const int64_t at = region + static_cast<int64_t>(i / c.committed(row) * rows + r) * width;
            overwritten += std::memcmp(before + at, after + at, width) != 0;
        }
    };
    compare(c.pool.ring_x, o.heads, c.ring_rows, o.headdim * 2);
    compare(c.pool.ring_b, o.groups, c.ring_rows, o.dstate * 2);
    compare(c.pool.ring_dt, o.heads, c.pool.ring_dt_stride, 4);
    return overwritten;
}

//! Bytes of slots that no row names, of gaps, and live ring rows, that changed;
//! outputs of padding that are not zero.
int count_touched(const Case& c, const std::vector<char>& before) {
    std::vector<bool> named(c.pool.slots, false);
    int touched = 0;
    for (int row = 0; row < c.rows(); ++row) {
        if (c.slots[row] >= 0) {
            named[c.slots[row]] = true;
            touched += count_overwritten(c, before.data() + c.memory.slot_bytes() * c.slots[row], c.slot(row), row);
        }
        const size_t per_row = c.y.size() / c.rows();
        for (size_t i = 0; c.slots[row] < 0 && i < per_row; ++i)
            touched += value_of(c.y[row * per_row + i]) != 0.0;
    }
    const std::vector<char> after = c.memory.copy();
    for (size_t i = 0; i < before.size(); ++i)
        touched += !named[i / c.memory.slot_bytes()] && before[i] != after[i];
    for (int64_t i = 0; i < c.pool.slots; ++i)
        touched += c.memory.touched_gap(i);
    return touched;
}

//! Checkpoints and cursors of materialize that are not as they should be, and
//! bytes of other slots that changed.
int count_materialized(const Case& c, const Pairs& pairs, const std::vector<char>& before) {
    const Options& o = c.options;
    std::vector<bool> written(c.pool.slots, false);
    int wrong = 0;
    for (size_t i = 0; i + 1 < pairs.src.size(); ++i) {
        const char* from = before.data() + c.memory.slot_bytes() * pairs.src[i];
        const char* to = c.memory.slot(pairs.dst[i]);
        const Cursor cursor = *reinterpret_cast<const Cursor*>(from + c.pool.cursor);
        const int rows = cursor.history + cursor.pending;
        const int count = pairs.count[i] < 0 ? rows : std::min(rows, pairs.count[i]);
        written[pairs.dst[i]] = true;
        for (int64_t at = 0; at < static_cast<int64_t>(o.heads) * o.headdim * o.dstate; ++at) {
            const int row = static_cast<int>(at / o.dstate);
            const Folded want = folded(
                c, from, row / o.headdim, row % o.headdim, static_cast<int>(at % o.dstate), cursor.origin, count);
            wrong += !(state_at(c, to, at) == want.state);
            const int copy = static_cast<int>(at % kCursorCopies);
            wrong += !(scale_at(c, to, row / o.headdim, copy) == want.scale);
        }
        const int limit = o.window - pairs.dst[i] % o.window;
        for (int k = 0; k < o.heads * kCursorCopies; ++k) {
            const Cursor& now = reinterpret_cast<const Cursor*>(to + c.pool.cursor)[k];
            wrong += now.origin != 0 || now.history != 0 || now.pending != 0 || now.limit != limit;
        }
    }
    const std::vector<char> after = c.memory.copy();
    for (size_t i = 0; i < before.size(); ++i)
        wrong += !written[i / c.memory.slot_bytes()] && before[i] != after[i];
    return wrong;
}

} // namespace

int main(int argc, char** argv) {
    Case c(parse(argc, argv));
    const std::vector<char> before = c.memory.copy();
    run_kernel(c);
    Measures measures;
    for (int row = 0; row < c.rows(); ++row) {
        if (c.slots[row] < 0) continue;
        const char* was = before.data() + c.memory.slot_bytes() * c.slots[row];
        for (int i = 0; i < c.options.heads * c.options.headdim; ++i)
            compare_channel(c, was, c.slot(row), row, i / c.options.headdim, i % c.options.headdim, measures);
        compare_cursors(c, was, c.slot(row), row, measures);
    }
    measures.touched = count_touched(c, before);
    const std::vector<char> stepped = c.memory.copy();
    const Pairs pairs(c);
    if (c.options.packed) run_materialize<Bf16>(c, pairs);
    if (!c.options.packed) run_materialize<float>(c, pairs);
    measures.materialized = count_materialized(c, pairs, stepped);
    std::printf("output %.3e\nnot_finite %d\nstates %d\nscales %d\ncursors %d\n"
                "rings %d\ntouched %d\nmaterialized %d\n",
        measures.output, measures.not_finite, measures.states, measures.scales, measures.cursors, measures.rings,
        measures.touched, measures.materialized);
    return 0;
}
