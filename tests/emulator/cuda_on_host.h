//! Runs the blocks of a CUDA kernel on a CPU: a fiber for each thread of a
//! block, which runs until it has to wait for others. Lanes take turns at every
//! collective, not at every instruction, so code that relies on lockstep
//! without saying so (no __syncwarp) fails here. A warp goes on until it waits
//! for another warp, so warps are as far apart as the barriers allow, the first
//! or the last ahead: a missing barrier often shows. Not seen: races between
//! two collectives of a warp or warpgroup (each is a full barrier here) and
//! fences. One block at a time, or one cluster of blocks. Included before any source of the kernel: it
//! makes the CUDA keywords empty and defines what device code calls.
#pragma once

#include <cuda_runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __maxnreg__
#undef __align__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __maxnreg__(...)
#define __align__(...)
#define REPLAYSSM_EMULATOR 1
#define __CUDA_ARCH_FEAT_SM90_ALL // kernels with warpgroup products are
                                  // compiled, too

using std::max;
using std::min;

//! With -fsanitize=thread every thread of a block is a fiber that
//! ThreadSanitizer knows, and only what orders threads of a GPU orders them: it
//! reports accesses of different warps that no barrier lies between, whichever
//! warp ran first.
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace races {

#if defined(__SANITIZE_THREAD__)
constexpr bool kChecked = true;
using Fiber = void*;
inline Fiber current() { return __tsan_get_current_fiber(); }
inline Fiber create() { return __tsan_create_fiber(0); }
inline void destroy(Fiber fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(Fiber fiber) { __tsan_switch_to_fiber(fiber, 1); } // 1: orders nothing
inline void acquire(void* place) { __tsan_acquire(place); }
inline void release(void* place) { __tsan_release(place); }
//! Accesses that are the emulator's own affair.
struct Unseen {
    Unseen() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    }
};
#else
constexpr bool kChecked = false;
struct Fiber {};
inline Fiber current() { return {}; }
inline Fiber create() { return {}; }
inline void destroy(Fiber) {}
inline void switch_to(Fiber) {}
inline void acquire(void*) {}
inline void release(void*) {}
struct Unseen {
    Unseen() {}
};
#endif

} // namespace races

namespace emulator {

constexpr int kLanes = 32;
constexpr int kGroupThreads = 128; // of a warpgroup
constexpr int kNamedBarriers = 16;
constexpr size_t kStackBytes = races::kChecked ? 1 << 18 : 1 << 16;
constexpr int kMostIdleRounds = 8; // of a block's threads, without anything that another may wait for

[[noreturn]] inline void fail(const char* what);

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

} // namespace emulator

inline emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

inline void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s (thread %u of block %u, %u)\n", what, threadIdx.x, blockIdx.x, blockIdx.y);
    std::exit(3);
}

//! Bytes that were asked for to come to L2: readable ones, since the GPU looks
//! at their pages.
inline void prefetched(const void* source, uint32_t bytes, uint32_t alignment = 1) {
    static volatile char sink;
    if (reinterpret_cast<uintptr_t>(source) % alignment != 0 || bytes % alignment != 0)
        fail("a prefetch is not aligned");
    for (uint32_t i = 0; i < bytes; ++i)
        sink = static_cast<const char*>(source)[i];
}

//! What might have stood in the place of a slot's number, a count or a cursor, and leads to memory that is there.
inline uint64_t plausible(uint64_t bits, int bytes, uint64_t random) {
    const uint64_t high = bits >> 32;
    if (bytes == 4 || high < 16 || high == 0xffffffffu) return random % 8 - 1;
    const uint64_t origin = random % 2 ? bits & 0xffff : random / 2 % 5;
    const uint64_t history = random / 16 % 2 ? bits >> 16 & 0xffff : random / 32 % 5;
    return origin | history << 16 | random / 256 % 3 << 32 | (random / 1024 % 2 ? bits >> 48 : random / 2048 % 5) << 48;
}

//! What a read before the wait for other kernels gives. EMULATED_STALE in the
//! environment: 1: of every four warps and blocks in turn one sees the value, the
//! others what might have stood there before. Other numbers begin random series:
//! one read in three gives the value, the others a plausible one.
template <class T>
T peeked(T bits) {
    const char* series = std::getenv("EMULATED_STALE");
    if (!series) return bits;
    if (std::atoi(series) != 1) {
        static unsigned reads[1024]; // of a thread; lanes of a warp read alike
        uint64_t random = std::atoi(series) * 9176ull + reads[threadIdx.x]++ * 131ull;
        random += blockIdx.x * 32 + threadIdx.x / kLanes;
        random = (random ^ 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        random = (random ^ random >> 31) * 0x94d049bb133111ebull >> 20;
        return random % 3 == 0 ? bits : static_cast<T>(plausible(bits, sizeof(T), random / 3));
    }
    switch ((blockIdx.x + threadIdx.x / kLanes) % 4) {
        case 0: return bits;
        case 1: return bits ^ 1;                                               // another slot, another origin
        case 2: return sizeof(T) == 8 ? bits ^ T{1} << 8 * sizeof(T) / 4 : -1; // another history; padding
        default: return static_cast<T>(0x7f00f3ffe0018005ull);                 // anything
    }
}

inline uint2 peeked(uint2 bits) {
    const uint64_t word = peeked(static_cast<uint64_t>(bits.y) << 32 | bits.x);
    return {static_cast<unsigned>(word), static_cast<unsigned>(word >> 32)};
}

//! A place where `count` threads meet again and again, all for the same
//! operation.
struct Rendezvous {
    int arrived = 0;
    int64_t generation = 0;
    const char* operation = nullptr;
};

//! Threads that meet, and what each has brought along.
template <int kCount>
struct Team {
    Rendezvous rendezvous;
    void* brought[kCount];
};

//! Bytes on their way to shared memory; zeros where the source does not exist.
struct Copy {
    uint32_t target;
    const void* source;
    bool exists;
    uint32_t bytes = 16;
};

//! Asynchronous copies of one thread. They take place when the thread waits for
//! them or reports them to a barrier, not before: what is read too early reads
//! what was there.
struct Copies {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

struct Block {
    explicit Block(int threads)
        : warps(threads / kLanes), groups((threads + kGroupThreads - 1) / kGroupThreads), copies(threads),
          contexts(threads), finished(threads, false) {}

    Rendezvous all;
    Rendezvous named[kNamedBarriers];
    std::vector<Team<kLanes>> warps;
    std::vector<Team<kGroupThreads>> groups;
    std::vector<Copies> copies;
    std::vector<ucontext_t> contexts;
    std::vector<races::Fiber> fibers;
    races::Fiber main = races::current();
    std::vector<bool> finished;
    std::function<void()> body;
    int64_t progress = 0; // what others may have waited for
    ucontext_t scheduler;
};

//! Blocks that run at once; a block alone is one, too.
struct Cluster {
    Rendezvous all;
    std::vector<std::unique_ptr<Block>> blocks;
};

inline Cluster* cluster = nullptr;
inline Block* block = nullptr; // that runs
inline int rank = 0;           // its number in the cluster

inline void let_others_run() {
    const unsigned thread = threadIdx.x;
    const races::Fiber main = [] {
        const races::Unseen unseen;
        return block->main;
    }();
    races::switch_to(main);
    swapcontext(&block->contexts[thread], &block->scheduler);
}

//! The last of `count` threads to arrive runs `together`, then all go on.
template <class Action>
void meet(Rendezvous& place, int count, const char* operation, Action together) {
    const races::Unseen unseen;
    races::release(&place);
    if (place.arrived == 0) place.operation = operation;
    if (std::strcmp(place.operation, operation) != 0) fail("threads meet for different operations");
    const int64_t generation = place.generation;
    ++block->progress;
    if (++place.arrived == count) {
        together();
        place.arrived = 0;
        ++place.generation;
    }
    while (place.generation == generation)
        let_others_run();
    races::acquire(&place);
}

//! All lanes of a warp; together(what the lanes have brought).
template <class Argument, class Action>
void meet_warp(const char* operation, Argument* argument, Action together) {
    Team<kLanes>& warp = block->warps[threadIdx.x / kLanes];
    warp.brought[threadIdx.x % kLanes] = argument;
    meet(warp.rendezvous, kLanes, operation, [&] { together(reinterpret_cast<Argument**>(warp.brought)); });
}

template <class Argument, class Action>
void meet_group(const char* operation, Argument* argument, Action together) {
    Team<kGroupThreads>& group = block->groups[threadIdx.x / kGroupThreads];
    group.brought[threadIdx.x % kGroupThreads] = argument;
    meet(group.rendezvous, kGroupThreads, operation, [&] { together(reinterpret_cast<Argument**>(group.brought)); });
}

//! All threads of a cluster.
inline void meet_cluster() {
    const int threads = [] {
        const races::Unseen unseen;
        return static_cast<int>(cluster->blocks.size() * blockDim.x);
    }();
    meet(cluster->all, threads, "meet_cluster", [] {});
}

inline void run_thread() {
    block->body();
    races::release(block);
    {
        const races::Unseen unseen;
        block->finished[threadIdx.x] = true;
        ++block->progress;
    }
    let_others_run();
}

//! A warp's threads in turn, until none gets on; returns how many are not
//! finished.
inline int run_warp(int warp) {
    const races::Unseen unseen;
    int left;
    int64_t before;
    do {
        left = 0;
        before = block->progress;
        for (int thread = warp * kLanes; thread < (warp + 1) * kLanes; ++thread) {
            if (block->finished[thread]) continue;
            ++left;
            threadIdx.x = thread;
            races::switch_to(block->fibers[thread]);
            swapcontext(&block->scheduler, &block->contexts[thread]);
        }
    } while (block->progress != before);
    return left;
}

//! Fibers of a block's threads, on stacks from number `first_stack` on.
inline std::unique_ptr<Block> make_block(int threads, int first_stack, std::function<void()> body) {
    static std::vector<std::vector<char>> stacks;
    auto here = std::make_unique<Block>(threads);
    here->body = std::move(body);
    while (static_cast<int>(stacks.size()) < first_stack + threads)
        stacks.emplace_back(kStackBytes);
    for (int thread = 0; thread < threads; ++thread) {
        ucontext_t& context = here->contexts[thread];
        getcontext(&context);
        context.uc_stack.ss_sp = stacks[first_stack + thread].data();
        context.uc_stack.ss_size = kStackBytes;
        context.uc_link = &here->scheduler;
        makecontext(&context, run_thread, 0);
        here->fibers.push_back(races::create());
    }
    return here;
}

//! Runs body() once for each thread of `blocks` blocks, to the end; blockIdx
//! names the first.
inline void run_cluster(int blocks, int threads, bool last_warp_first, const std::function<void()>& body) {
    Cluster together;
    cluster = &together;
    for (int i = 0; i < blocks; ++i)
        together.blocks.push_back(make_block(threads, i * threads, body));
    const races::Unseen unseen;
    const int warps = threads / kLanes;
    const unsigned first = blockIdx.x;
    int left = threads, idle = 0;
    while (left > 0) {
        int64_t done = 0;
        left = 0;
        for (rank = 0; rank < blocks; ++rank) {
            block = together.blocks[rank].get();
            blockIdx.x = first + rank;
            const int64_t before = block->progress;
            for (int i = 0; i < warps; ++i)
                left += run_warp(last_warp_first ? warps - 1 - i : i);
            done += block->progress - before;
        }
        idle = done == 0 ? idle + 1 : 0;
        if (idle > kMostIdleRounds) fail("all threads wait");
    }
    for (const auto& here : together.blocks) {
        races::acquire(here.get());
        for (races::Fiber fiber : here->fibers)
            races::destroy(fiber);
    }
    blockIdx.x = first;
    rank = 0;
    block = nullptr;
    cluster = nullptr;
}

//! Runs body() once for each thread of the block that blockIdx names, to the
//! end.
inline void run_block(int threads, bool last_warp_first, const std::function<void()>& body) {
    run_cluster(1, threads, last_warp_first, body);
}

//! Value of the lane that source(lane) names.
template <class T, class Source>
T shuffle(const char* operation, T value, Source source) {
    struct Exchange {
        T in, out;
        int source;
    } mine{value, value, source(static_cast<int>(threadIdx.x % kLanes))};
    meet_warp(operation, &mine, [](Exchange** lanes) {
        for (int lane = 0; lane < kLanes; ++lane)
            lanes[lane]->out = lanes[lanes[lane]->source]->in;
    });
    return mine.out;
}

} // namespace emulator

inline void __syncwarp(unsigned = ~0u) {
    emulator::meet_warp("__syncwarp", static_cast<void*>(nullptr), [](void**) {});
}
inline void __syncthreads() {
    emulator::meet(emulator::block->all, blockDim.x, "__syncthreads", [] {});
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::shuffle("__shfl_sync", value, [=](int) { return lane; });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width) {
    return emulator::shuffle("__shfl_sync", value, [=](int own) { return own / width * width + lane % width; });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::shuffle("__shfl_xor_sync", value, [=](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance, int width = emulator::kLanes) {
    return emulator::shuffle(
        "__shfl_up_sync", value, [=](int lane) { return lane % width < distance ? lane : lane - distance; });
}

template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
    return emulator::shuffle("__shfl_down_sync", value,
        [=](int lane) { return lane + distance < emulator::kLanes ? lane + distance : lane; });
}

inline bool __all_sync(unsigned, bool value) {
    struct Vote {
        bool in, out;
    } mine{value, false};
    emulator::meet_warp("__all_sync", &mine, [](Vote** lanes) {
        bool all = true;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            all = all && lanes[lane]->in;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            lanes[lane]->out = all;
    });
    return mine.out;
}

inline unsigned __ballot_sync(unsigned, bool value) {
    struct Vote {
        bool in;
        unsigned out;
    } mine{value, 0};
    emulator::meet_warp("__ballot_sync", &mine, [](Vote** lanes) {
        unsigned votes = 0;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            votes |= static_cast<unsigned>(lanes[lane]->in) << lane;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            lanes[lane]->out = votes;
    });
    return mine.out;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

//! fmaf rounds once; the others must not be contracted, see -ffp-contract=off
//! of the test.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return static_cast<float>(1.0000002 / std::sqrt(static_cast<double>(a))); } // 2 ulp off

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
void __stcs(T* address, T value) {
    *address = value;
}
