//! Runs the scans of GDN and KDA on a CPU on one made-up case and compares them
//! with the recurrence in double precision. Prints a line `name value` for each
//! measure; tests/cpu/test_delta_scan_emulator.py knows the bounds.
//!
//!   delta_scan_emulator --kernel chunk --kind gdn --heads 4 --groups 2
//!   --headdim 64 --dstate 128 --warps 2
//!                       --gates pairs --regime usual --first-warp first
//!                       --lengths 0,1,63
//!
//! kernel: chunk, chunk-2 (two blocks share the preparation of KDA's chunks),
//! chunk-apart (GDN: two kinds of warps on schedulers of their own), exact-1 or exact-4 (state rows a thread). warps: of a block that hold a state,
//! for chunks. gates: fp32 loaded in pairs or one by one
//! (apart), bf16 or bf16-apart. Memory that the kernel must not read (rows
//! behind the last token, tokens of padding, gaps between tokens, unused slots
//! and ring rows, shared memory before its first write) holds NaN. Every second
//! sequence starts from its slot: a state, and ring rows that are folded into
//! it. Of four or more sequences the third is padding (slot -1).
#include "cuda_on_host.h"

#include "gated_delta_replay/scan_chunk_kernel.cuh"
#include "gated_delta_replay/scan_kernel.cuh"

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
constexpr float kBound = -5.0f;

struct Options {
    std::string kernel, regime;
    int heads = 0, groups = 0, headdim = 0, dstate = 0, warps = 0;
    bool bf16_gates = false, gates_apart = false, kda = false, bounded = false, last_warp_first = false;
    std::vector<int> lengths;
};

[[noreturn]] void refuse(const std::string& what) {
    std::fprintf(stderr, "delta_scan_emulator: %s\n", what.c_str());
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
    o.kernel = take("--kernel");
    const std::string kind = take("--kind");
    o.kda = kind != "gdn";
    o.bounded = kind == "kda-bounded";
    o.heads = std::stoi(take("--heads"));
    o.groups = std::stoi(take("--groups"));
    o.headdim = std::stoi(take("--headdim"));
    o.dstate = std::stoi(take("--dstate"));
    o.warps = std::stoi(take("--warps"));
    o.regime = take("--regime");
    const std::string gates = take("--gates");
    o.bf16_gates = gates.rfind("bf16", 0) == 0;
    o.gates_apart = gates.find("apart") != std::string::npos;
    o.last_warp_first = take("--first-warp") == "last";
    o.lengths = parse_lengths(take("--lengths"));
    if (!given.empty()) refuse("unknown option " + given.begin()->first);
    return o;
}

//! Everything that the kernel sees, but for its grid.
struct Case {
    explicit Case(const Options& options);
    int sequences() const { return static_cast<int>(options.lengths.size()); }
    int group_of(int head) const { return head / (options.heads / options.groups); }
    //! The scale that a sequence's slot begins with: near 1, or so near the
    //! lower end of its range that folds renew it.
    static float first_scale(int head) { return head % 2 ? 1.0f / 60000 : 1.7f; }
    int gates() const { return options.kda ? options.dstate : 1; } // of a head
    const char* slot(int sequence) const { return memory.data() + pool.stride_bytes * slots[sequence]; }
    char* slot(int sequence) { return memory.data() + pool.stride_bytes * slots[sequence]; }

    Options options;
    std::mt19937 random{1};
    std::vector<int> starts{0};
    std::vector<Bf16> q, k, v, o;
    int channels, keys; // elements from token to token
    std::vector<float> a, b, A_log, bias;
    std::vector<Bf16> narrow_a;
    GatedDeltaSlots pool;
    std::vector<char> memory;
    std::vector<int> slots;
    std::vector<uint8_t> has_initial;

private:
    float normal() { return std::normal_distribution<float>()(random); }
    std::vector<Bf16> activations(int features);
    void make_gates();
    void lay_out_pool();
    void fill_slot(int sequence);
    void pad(int sequence);
};

Case::Case(const Options& options_)
    : options(options_), channels(options_.heads * options_.headdim + kGap),
      keys(options_.groups * options_.dstate + kGap) {
    const Options& o_ = options;
    for (int length : o_.lengths)
        starts.push_back(starts.back() + length);
    q = activations(o_.groups * o_.dstate);
    k = activations(o_.groups * o_.dstate);
    v = activations(o_.heads * o_.headdim);
    o.resize(v.size());
    std::memset(static_cast<void*>(o.data()), kPoison, o.size() * sizeof(Bf16));
    make_gates();
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
    spoil(q, keys);
    spoil(k, keys);
    spoil(v, channels);
    spoil(a, options.heads * gates());
    spoil(b, options.heads);
}

//! [tokens, features] with gaps, and a token of gap behind. "alike": all tokens
//! have nearly the same key.
std::vector<Bf16> Case::activations(int features) {
    std::vector<Bf16> out((starts.back() + 1) * static_cast<size_t>(features + kGap));
    std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(Bf16));
    const float spread = options.regime == "alike" ? 0.05f : 1.0f;
    for (int token = 0; token < starts.back(); ++token) {
        for (int i = 0; i < features; ++i)
            out[token * static_cast<size_t>(features + kGap) + i] =
                __float2bfloat16_rn((1.0f - spread) * std::sin(1.0f + i) + spread * normal());
    }
    return out;
}

//! usual: models' range. still, alike: g near -1e-6, nothing decays. forgetful:
//! every token erases the state. bound: g = -5 at every token. swinging: from
//! still to erasing from token to token. wild: one gate in eight is infinite,
//! or so large that products with it are.
void Case::make_gates() {
    const std::map<std::string, float> biases{{"usual", 0.0f}, {"still", -14.0f}, {"alike", -14.0f},
        {"forgetful", 30.0f}, {"bound", 5.0f}, {"swinging", 0.0f}, {"wild", -5.0f}};
    if (!biases.count(options.regime)) refuse("unknown regime " + options.regime);
    std::uniform_real_distribution<float> swing(-14.0f, 30.0f);
    const bool still = options.regime != "usual" && options.regime != "swinging";
    for (int i = 0; i < starts.back() * options.heads * gates(); ++i)
        a.push_back(options.regime == "swinging" ? swing(random) : still ? 0.1f * normal() : normal());
    if (options.regime == "wild") {
        for (float& gate : a)
            if (random() % 8 == 0) gate = random() % 2 ? 3e38f : std::numeric_limits<float>::infinity();
    }
    if (options.bf16_gates) {
        for (float& gate : a) {
            narrow_a.push_back(__float2bfloat16_rn(gate));
            gate = __bfloat162float(narrow_a.back());
        }
    }
    for (int i = 0; i < starts.back() * options.heads; ++i)
        b.push_back(options.regime == "alike" ? 4.0f : normal());
    for (int head = 0; head < options.heads; ++head)
        A_log.push_back(options.regime == "bound" ? 0.0f : std::log(0.3f + 1.7f * (head + 1) / options.heads));
    for (int i = 0; i < options.heads * gates(); ++i)
        bias.push_back(biases.at(options.regime) + (options.regime == "usual" ? normal() : 0.0f));
}

void Case::lay_out_pool() {
    const int64_t H = options.heads, G = options.groups, V = options.headdim, K = options.dstate;
    int64_t end = 0;
    const auto take = [&](int64_t bytes) {
        const int64_t start = end;
        end = (end + bytes + 127) / 128 * 128;
        return start;
    };
    pool.slots = sequences() + 2;
    pool.ring_rows = pool.scalar_stride = kRingRows;
    pool.cursor = take(H * kCursorCopies * static_cast<int64_t>(sizeof(Cursor)));
    pool.state = take(H * V * K * 4);
    if (!options.kda) pool.state_scale = take(H * kCursorCopies * 8);
    pool.ring_k = take(G * kRingRows * K * 2);
    pool.ring_k_rnorm = take(G * kRingRows * 4);
    pool.ring_v = take(H * kRingRows * V * 2);
    pool.ring_d = take(H * kRingRows * V * 2);
    pool.ring_g = take(H * kRingRows * gates() * 4);
    pool.ring_beta = take(H * kRingRows * 4);
    pool.stride_bytes = end;
    memory.assign(pool.stride_bytes * pool.slots, static_cast<char>(kPoison));
    pool.base = memory.data();
}

//! A state and kHistory + kPending live ring rows, which wrap around the ring's
//! end.
void Case::fill_slot(int sequence) {
    const int H = options.heads, G = options.groups, V = options.headdim, K = options.dstate;
    char* at = slot(sequence);
    auto* cursors = reinterpret_cast<Cursor*>(at + pool.cursor);
    std::fill(cursors, cursors + H * kCursorCopies, Cursor{kOrigin, kHistory, kPending, kWindow});
    for (int i = 0; i < H * V * K; ++i)
        reinterpret_cast<float*>(at + pool.state)[i] = normal() / (options.kda ? 1.0f : first_scale(i / (V * K)));
    for (int i = 0; i < H * kCursorCopies && !options.kda; ++i)
        reinterpret_cast<double*>(at + pool.state_scale)[i] = first_scale(i / kCursorCopies);
    const auto fill = [&](int64_t region, int blocks, int row, int width, auto value) {
        for (int i = 0; i < blocks * width; ++i) {
            auto made = value();
            std::memcpy(
                at + region + ((i / width * kRingRows + row) * width + i % width) * sizeof(made), &made, sizeof(made));
        }
    };
    const auto activation = [&] { return __float2bfloat16_rn(normal()); };
    for (int j = 0; j < kHistory + kPending; ++j) {
        const int row = (kOrigin + j) % kRingRows;
        fill(pool.ring_k, G, row, K, activation);
        fill(pool.ring_v, H, row, V, activation);
        fill(pool.ring_k_rnorm, G, row, 1, [&] { return 0.09f; });
        fill(pool.ring_g, H, row, gates(), [&] { return -0.2f * (1.0f + std::fabs(normal())); });
        fill(pool.ring_beta, H, row, 1, [&] { return 0.1f * (j + 2); });
    }
}

// -----------------------------------------------------------------------------------------------------
// the kernels

template <class Body>
void run_grid(int threads, int blocks, const Case& c, Body body, int cluster = 1) {
    blockDim.x = threads;
    gridDim.x = blocks;
    gridDim.y = c.sequences();
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x += cluster) {
            for (int rank = 0; rank < cluster; ++rank)
                std::memset(shared_of(rank), kPoison, kSharedBytes);
            emulator::run_cluster(cluster, blockDim.x, c.options.last_warp_first, body);
        }
    }
}

GatedDeltaScanParams scan_params(const Case& c) {
    const Options& o = c.options;
    const auto tensor = [](const auto& data, int dtype, std::initializer_list<int64_t> strides) {
        replayssm_tensor out{};
        out.data = data.data();
        out.dtype = dtype;
        std::copy(strides.begin(), strides.end(), out.strides);
        return out;
    };
    GatedDeltaScanParams p;
    p.pool = c.pool;
    p.shape.nheads = o.heads;
    p.shape.ngroups = o.groups;
    p.shape.heads_per_group = o.heads / o.groups;
    p.shape.headdim = o.headdim;
    p.shape.dstate = o.dstate;
    p.shape.window = kWindow;
    p.shape.channel_gates = o.kda;
    p.shape.bounded = o.bounded;
    p.shape.gate_lower_bound = kBound;
    p.in.q = tensor(c.q, REPLAYSSM_BFLOAT16, {0, c.keys, o.dstate, 1});
    p.in.k = tensor(c.k, REPLAYSSM_BFLOAT16, {0, c.keys, o.dstate, 1});
    p.in.v = tensor(c.v, REPLAYSSM_BFLOAT16, {0, c.channels, o.headdim, 1});
    p.in.o = tensor(c.o, REPLAYSSM_BFLOAT16, {0, c.channels, o.headdim, 1});
    const std::initializer_list<int64_t> gate_strides{0, o.heads * c.gates(), c.gates(), 1};
    p.in.a = o.bf16_gates ? tensor(c.narrow_a, REPLAYSSM_BFLOAT16, gate_strides)
                          : tensor(c.a, REPLAYSSM_FLOAT32, gate_strides);
    p.in.b = tensor(c.b, REPLAYSSM_FLOAT32, {0, o.heads, 1});
    p.in.A_log = tensor(c.A_log, REPLAYSSM_FLOAT32, {1});
    p.in.dt_bias = tensor(c.bias, REPLAYSSM_FLOAT32, {c.gates(), 1});
    p.in.scale = 1.0f / std::sqrt(static_cast<float>(o.dstate));
    p.slots = {c.slots.data(), 32, 0};
    p.cu_seqlens = {c.starts.data(), 32, 0};
    p.has_initial = c.has_initial.data();
    p.sequences = c.sequences();
    return p;
}

template <class Traits>
void run_chunks(const Case& c) {
    const Options& o = c.options;
    const int most = o.warps * Traits::kSharers, blocks = (o.headdim / 16 + most - 1) / most * Traits::kSharers;
    const bool apart = o.kernel == "chunk-apart";
    const delta_scan::ChunkParams params{
        scan_params(c), Traits::shared(o.warps), REPLAYSSM_FLOAT32, blocks, o.warps, !o.gates_apart, apart};
    if (params.shared.bytes > kSharedBytes) refuse("a block's shared memory does not fit");
    const int warps = apart ? delta_scan::kWarpsApart : o.warps + Traits::kProducers + Traits::kFinishers;
    run_grid(
        warps * kWarp, o.heads * blocks, c, [&] { gated_delta_scan_chunk_kernel<Traits>(params); }, Traits::kSharers);
}

template <bool kChannels, int kSharers = 1>
void run_padded_chunks(const Case& c) {
    if (c.options.dstate > 64) return run_chunks<delta_scan::ChunkTraits<128, kChannels, kSharers>>(c);
    run_chunks<delta_scan::ChunkTraits<64, kChannels, kSharers>>(c);
}

template <int kDstate, int kRows, bool kChannels>
void run_tokens(const Case& c) {
    const Options& o = c.options;
    DeltaScanParams params;
    params.scan = scan_params(c);
    params.state_dtype = REPLAYSSM_FLOAT32;
    params.state_bytes = 4;
    params.shared = DeltaScanShared(o.dstate, o.headdim * kRows / 4, 2, o.kda, o.kda ? o.dstate * 4 : 0);
    run_grid(2 * o.headdim, o.heads * (4 / kRows), c,
        [&] { gated_delta_scan_kernel<Bf16, kDstate, kRows, kChannels>(params); });
}

template <bool kChannels>
void run_exact(const Case& c) {
    if (c.options.kernel == "exact-4") return run_tokens<128, 4, kChannels>(c);
    if (c.options.dstate == 128) return run_tokens<128, 1, kChannels>(c);
    run_tokens<0, 1, kChannels>(c);
}

void run_kernel(const Case& c) {
    const Options& o = c.options;
    if (o.kernel == "chunk-apart" && (o.kda || o.warps > delta_scan::kConsumersApart)) refuse("no such kernel");
    if (o.kernel == "chunk" || o.kernel == "chunk-apart")
        return o.kda ? run_padded_chunks<true>(c) : run_padded_chunks<false>(c);
    if (o.kernel == "chunk-2" && (!o.kda || o.warps > 4)) refuse("no such kernel of this kind");
    if (o.kernel == "chunk-2") return run_padded_chunks<true, 2>(c);
    if (o.kernel == "exact-4" && o.dstate != 128) refuse("no such kernel of this dstate");
    o.kda ? run_exact<true>(c) : run_exact<false>(c);
}

// ----------------------------------------------------------------------------------------------------
// the recurrence

double value_of(Bf16 bits) { return static_cast<double>(__bfloat162float(bits)); }
double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

//! One head's state [V][K] in double precision.
struct HeadState {
    const Case& c;
    int V, K;
    std::vector<double> S;

    explicit HeadState(const Case& c_) : c(c_), V(c_.options.headdim), K(c_.options.dstate), S(V * K, 0.0) {}

    //! g: one or K log-decays.
    void fold(const std::vector<double>& g, const std::vector<double>& kn, const Bf16* v, double beta) {
        for (int row = 0; row < V; ++row) {
            double held = 0;
            for (int n = 0; n < K; ++n) {
                S[row * K + n] *= std::exp(g[g.size() == 1 ? 0 : n]);
                held += S[row * K + n] * kn[n];
            }
            const double d = beta * (value_of(v[row]) - held);
            for (int n = 0; n < K; ++n)
                S[row * K + n] += d * kn[n];
        }
    }
};

std::vector<double> normalised(const Bf16* row, int K, double scale) {
    double sum = 1e-6;
    for (int n = 0; n < K; ++n)
        sum += value_of(row[n]) * value_of(row[n]);
    std::vector<double> out;
    for (int n = 0; n < K; ++n)
        out.push_back(value_of(row[n]) * scale / std::sqrt(sum));
    return out;
}

//! What the elements in a slot are multiplied by.
double state_scale(const Case& c, const char* slot, int head) {
    if (c.pool.state_scale < 0) return 1.0;
    return reinterpret_cast<const double*>(slot + c.pool.state_scale)[head * kCursorCopies];
}

//! What the sequence starts from; slot: as it was before the kernel ran.
HeadState initial_state(const Case& c, const std::vector<char>& memory, int sequence, int head) {
    const int V = c.options.headdim, K = c.options.dstate, group = c.group_of(head), gates = c.gates();
    HeadState state(c);
    if (!c.has_initial[sequence]) return state;
    const char* slot = memory.data() + c.pool.stride_bytes * c.slots[sequence];
    const auto floats = [&](int64_t region) { return reinterpret_cast<const float*>(slot + region); };
    for (int i = 0; i < V * K; ++i)
        state.S[i] = floats(c.pool.state)[head * V * K + i] * state_scale(c, slot, head);
    for (int j = 0; j < kHistory + kPending; ++j) {
        const int at = (kOrigin + j) % kRingRows;
        const auto* k = reinterpret_cast<const Bf16*>(slot + c.pool.ring_k) + (group * kRingRows + at) * K;
        const auto* v = reinterpret_cast<const Bf16*>(slot + c.pool.ring_v) + (head * kRingRows + at) * V;
        const float* g_at = floats(c.pool.ring_g) + (head * kRingRows + at) * gates;
        std::vector<double> kn, g(g_at, g_at + gates);
        for (int n = 0; n < K; ++n)
            kn.push_back(value_of(k[n]) * floats(c.pool.ring_k_rnorm)[group * kRingRows + at]);
        state.fold(g, kn, v, floats(c.pool.ring_beta)[head * kRingRows + at]);
    }
    return state;
}

std::vector<double> gates_of(const Case& c, int token, int head) {
    const double rate = std::exp(static_cast<double>(c.A_log[head]));
    std::vector<double> out;
    for (int n = 0; n < c.gates(); ++n) {
        const double raw =
            static_cast<double>(c.a[(token * c.options.heads + head) * c.gates() + n]) + c.bias[head * c.gates() + n];
        const double softened = raw > 20 ? raw : std::log1p(std::exp(raw));
        out.push_back(c.options.bounded ? kBound * sigmoid_of(rate * raw) : -rate * softened);
    }
    return out;
}

struct Measures {
    double output = 0; // largest error beyond rounding to bf16, over the rms of
                       // the head's outputs in the sequence
    double state = 0;  // largest ||error|| / ||state|| of a head of a sequence
    int not_finite = 0, touched = 0;
    int cursors = 0; // copies of cursor and scale that are not as they have to be
};

void compare_head(const Case& c, HeadState state, int sequence, int head, Measures& out) {
    const int V = c.options.headdim, K = c.options.dstate;
    double beyond = 0, squares = 1e-300;
    for (int token = c.starts[sequence]; token < c.starts[sequence + 1]; ++token) {
        const size_t key = token * static_cast<size_t>(c.keys) + c.group_of(head) * K,
                     at = token * static_cast<size_t>(c.channels) + head * V;
        const auto qn = normalised(&c.q[key], K, 1 / std::sqrt(static_cast<double>(K)));
        state.fold(gates_of(c, token, head), normalised(&c.k[key], K, 1), &c.v[at],
            sigmoid_of(c.b[token * c.options.heads + head]));
        for (int row = 0; row < V; ++row) {
            double want = 0;
            for (int n = 0; n < K; ++n)
                want += state.S[row * K + n] * qn[n];
            const double got = value_of(c.o[at + row]);
            out.not_finite += !std::isfinite(got);
            squares += want * want / (V * c.options.lengths[sequence]);
            beyond = std::max(beyond, std::fabs(got - want) - std::fabs(want) / 256); // half a step of bf16
        }
    }
    out.output = std::max(out.output, beyond / std::sqrt(squares));
    const char* slot = c.slot(sequence);
    double error = 0, norm = 1e-300;
    for (int i = 0; i < V * K; ++i) {
        const double got =
            reinterpret_cast<const float*>(slot + c.pool.state)[head * V * K + i] * state_scale(c, slot, head);
        out.not_finite += !std::isfinite(got);
        error += (got - state.S[i]) * (got - state.S[i]);
        norm += state.S[i] * state.S[i];
    }
    out.state = std::max(out.state, std::sqrt(error / norm));
    const Cursor* cursor = reinterpret_cast<const Cursor*>(slot + c.pool.cursor) + head * kCursorCopies;
    for (int copy = 0; copy < kCursorCopies; ++copy) {
        const Cursor& k = cursor[copy];
        out.cursors += k.origin != 0 || k.history != 0 || k.pending != 0 || k.limit != kWindow;
        if (c.pool.state_scale < 0) continue;
        const double scale = reinterpret_cast<const double*>(slot + c.pool.state_scale)[head * kCursorCopies + copy];
        out.cursors += scale != state_scale(c, slot, head) || !(scale >= kLeastScale && scale <= kMostScale) ||
            (c.options.kernel.rfind("chunk", 0) == 0 && scale != 1.0);
    }
}

//! Bytes outside what the kernel may write that it has written, and outputs of
//! padding that are not zero.
int count_touched(const Case& c, std::vector<char> before) {
    int touched = 0;
    for (int i = 0; i < c.sequences(); ++i) {
        if (c.slots[i] >= 0) { // cursors, state and scales are what the kernel
                               // writes of a slot; they come first
            const int64_t slot = c.pool.stride_bytes * c.slots[i];
            const int64_t state_end = c.pool.state + 4ll * c.options.heads * c.options.headdim * c.options.dstate;
            const int64_t written =
                c.pool.state_scale < 0 ? state_end : c.pool.state_scale + 8ll * c.options.heads * kCursorCopies;
            std::copy_n(c.memory.begin() + slot, written, before.begin() + slot);
        }
        for (int token = c.starts[i]; c.slots[i] < 0 && token < c.starts[i + 1]; ++token) {
            for (int at = 0; at < c.channels - kGap; ++at)
                touched += value_of(c.o[token * static_cast<size_t>(c.channels) + at]) != 0.0;
        }
    }
    for (size_t i = 0; i < before.size(); ++i)
        touched += before[i] != c.memory[i];
    for (size_t i = 0; i < c.o.size(); ++i) {
        const bool gap = static_cast<int>(i % c.channels) >= c.channels - kGap;
        const bool behind = static_cast<int>(i / c.channels) >= c.starts.back();
        touched += (gap || behind) && !std::isnan(value_of(c.o[i]));
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
        for (int head = 0; c.slots[i] >= 0 && head < c.options.heads; ++head)
            compare_head(c, initial_state(c, before, i, head), i, head, measures);
    }
    const uint64_t hash = hash_bytes(14695981039346656037ull, c.o.data(), c.o.size() * sizeof(Bf16));
    std::printf("output %.3e\nstate %.3e\nnot_finite %d\ncursors %d\ntouched "
                "%d\nhash %016llx\n",
        measures.output, measures.state, measures.not_finite, measures.cursors, count_touched(c, before),
        static_cast<unsigned long long>(hash_bytes(hash, c.memory.data(), c.memory.size())));
    return 0;
}
