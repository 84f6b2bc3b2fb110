//! In the place of those functions of common/tensor_core.cuh that are PTX; the
//! others are the kernel's own. What the instructions do is written from the
//! PTX manual: fragments (lane = 4 g + q), descriptors and swizzles. Products
//! are summed exactly and truncated to fp32 once an instruction, as tensor
//! cores do to about this precision.
#pragma once

#include "async_copy.cuh"

namespace replayssm {

inline int fresh(int value) { return value; }

template <class T>
const T* advance(const T* start, int count, int stride_bytes) {
    const auto bytes = static_cast<int64_t>(count) * stride_bytes;
    return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(start) + bytes);
}

inline float exp2_fast(float value) { return exp2f(value); }
inline float reciprocal_fast(float value) { return 1.0f / value; }

//! Half 0 (low) or 1 (high) of two bf16.
inline float bf16_of(uint32_t pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); }

inline float truncated(double value) {
    const float nearest = static_cast<float>(value);
    const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
    return beyond ? std::nextafter(nearest, 0.0f) : nearest;
}

// ------------------------------------------------------------------------------------------------
// 8 x 8 matrices

struct MatrixAccess {
    uint32_t* registers;
    uint32_t address;
};

//! A lane's own row, so that it is the lane that has read it.
inline void touch(uint32_t address) {
    if (!races::kChecked) return;
    volatile const char* row = at_shared(address, 16);
    for (int i = 0; i < 16; ++i)
        (void)row[i];
}

//! The eight rows of a matrix must lie in different banks: the kernel's
//! comments promise that no access has a conflict.
inline void check_banks(MatrixAccess** rows) {
    unsigned used = 0;
    for (int row = 0; row < 8; ++row)
        used |= 1u << rows[row]->address / 16 % 8;
    if (used != 0xff) emulator::fail("bank conflict of a matrix access");
}

template <bool kTransposed>
void load_matrices(MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
        MatrixAccess** rows = lanes + 8 * m;
        check_banks(rows);
        uint16_t element[8][8];
        for (int row = 0; row < 8; ++row)
            std::memcpy(element[row], at_shared(rows[row]->address, 16), 16);
        for (int lane = 0; lane < kWarp; ++lane) {
            const int g = lane / 4, q = lane % 4;
            const uint32_t low = kTransposed ? element[2 * q][g] : element[g][2 * q];
            const uint32_t high = kTransposed ? element[2 * q + 1][g] : element[g][2 * q + 1];
            lanes[lane]->registers[m] = low | high << 16;
        }
    }
}

inline void ldmatrix(uint32_t (&out)[4], uint32_t address) {
    touch(address);
    MatrixAccess access{out, address};
    emulator::meet_warp("ldmatrix", &access, load_matrices<false>);
}

inline void ldmatrix_trans(uint32_t (&out)[4], uint32_t address) {
    touch(address);
    MatrixAccess access{out, address};
    emulator::meet_warp("ldmatrix.trans", &access, load_matrices<true>);
}

inline void store_matrices_transposed(MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
        MatrixAccess** rows = lanes + 8 * m;
        check_banks(rows);
        for (int lane = 0; lane < kWarp; ++lane) {
            const int g = lane / 4, q = lane % 4;
            for (int half = 0; half < 2; ++half) {
                const auto bits = static_cast<uint16_t>(lanes[lane]->registers[m] >> 16 * half);
                std::memcpy(at_shared(rows[2 * q + half]->address, 16) + 2 * g, &bits, 2);
            }
        }
    }
}

inline void stmatrix_trans(uint32_t address, const uint32_t (&in)[4]) {
    uint32_t copy[4];
    std::memcpy(copy, in, sizeof(copy));
    MatrixAccess access{copy, address};
    emulator::meet_warp("stmatrix.trans", &access, store_matrices_transposed);
}

// -----------------------------------------------------------------------------------------------
// products of a warp

//! A lane's part of the first operand into rows first .. first + 15.
inline void place_first_operand(const uint32_t* a, int lane, int first, float (*out)[16]) {
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half)
            out[first + g + 8 * (i & 1)][2 * q + half + 8 * (i >> 1)] = bf16_of(a[i], half);
    }
}

//! Row and column of sum i of a lane in a 16 x 8 tile.
inline int sum_row(int lane, int i) { return lane / 4 + 8 * (i >> 1); }
inline int sum_column(int lane, int i) { return 2 * (lane % 4) + (i & 1); }

struct WarpProduct {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};

inline void multiply_warp(WarpProduct** lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
        place_first_operand(lanes[lane]->a, lane, 0, a);
        for (int i = 0; i < 2; ++i) {
            for (int half = 0; half < 2; ++half)
                b[2 * (lane % 4) + half + 8 * i][lane / 4] = bf16_of(lanes[lane]->b[i], half);
        }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < 4; ++i) {
            double sum = lanes[lane]->d[i];
            for (int k = 0; k < 16; ++k)
                sum += static_cast<double>(a[sum_row(lane, i)][k]) * b[k][sum_column(lane, i)];
            lanes[lane]->d[i] = truncated(sum);
        }
    }
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    WarpProduct product{d, a, {b0, b1}};
    emulator::meet_warp("mma", &product, multiply_warp);
}

inline void mma_half(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
    const uint32_t whole[4] = {a[0], a[1], 0, 0};
    mma(d, whole, b0, 0);
}

inline void mma_from_zero(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    std::fill(d, d + 4, 0.0f);
    mma(d, a, b0, b1);
}

// ------------------------------------------------------------------------------------------
// products of a warpgroup

//! Element (k, n) of an operand in shared memory; transposed: rows of k. Rows
//! of 128 bytes with 128-byte swizzle are the only kind that the kernel uses.
//! More than 64 columns would lie the leading offset apart; no operand has
//! them.
inline float shared_element(uint64_t descriptor, bool transposed, int k, int n) {
    constexpr uint32_t kRowBytes = 128, kSwizzle128 = 1;
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    if (descriptor >> 62 != kSwizzle128) emulator::fail("swizzle of a matrix descriptor");
    const uint32_t start = field(0), eight_rows = field(32);
    const int row = transposed ? k : n, column = transposed ? n : k;
    if (column >= 64) emulator::fail("column behind a row of a matrix");
    const uint32_t linear = start + row / 8 * eight_rows + row % 8 * kRowBytes + column * 2;
    uint16_t bits;
    std::memcpy(&bits, at_shared(linear ^ (linear >> 3 & 0x70), 2), 2);
    return bf16_of(bits, 0);
}

struct GroupProduct {
    float (*d)[4];
    const uint32_t* registers; // first operand, or
    uint64_t a;                // where it lies
    uint64_t b;
};

template <bool kTransposedA, bool kTransposedB, bool kAccumulate>
void multiply_group(GroupProduct** threads) {
    static float a[64][16], b[16][64];
    const GroupProduct first = *threads[0];
    for (int thread = 0; thread < emulator::kGroupThreads; ++thread) {
        const GroupProduct& own = *threads[thread];
        if (own.a != first.a || own.b != first.b) emulator::fail("matrix descriptors of a warpgroup differ");
        if (own.registers != nullptr) place_first_operand(own.registers, thread % kWarp, thread / kWarp * 16, a);
    }
    for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < 64; ++i) {
            if (first.registers == nullptr) a[i][k] = shared_element(first.a, kTransposedA, k, i);
            b[k][i] = shared_element(first.b, kTransposedB, k, i);
        }
    }
    for (int thread = 0; thread < emulator::kGroupThreads; ++thread) {
        for (int at = 0; at < 32; ++at) {
            const int lane = thread % kWarp, tile = at / 4, i = at % 4;
            const int row = thread / kWarp * 16 + sum_row(lane, i), column = tile * 8 + sum_column(lane, i);
            float& d = threads[thread]->d[tile][i];
            double sum = kAccumulate ? d : 0.0;
            for (int k = 0; k < 16; ++k)
                sum += static_cast<double>(a[row][k]) * b[k][column];
            d = truncated(sum);
        }
    }
}

template <int kTransposed, int kAccumulate>
void warpgroup_mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    GroupProduct product{d, a, 0, b};
    emulator::meet_group("wgmma of registers", &product, multiply_group<false, kTransposed, kAccumulate>);
}

template <int kTransposedA, int kTransposedB, int kAccumulate>
void warpgroup_mma(float (&d)[8][4], uint64_t a, uint64_t b) {
    GroupProduct product{d, nullptr, a, b};
    emulator::meet_group("wgmma", &product, multiply_group<kTransposedA, kTransposedB, kAccumulate>);
}

//! Products are complete when they have been asked for.
inline void warpgroup_fence() {}
inline void warpgroup_commit() {}
template <int kPending>
void warpgroup_wait() {}
inline void hold(float (&)[8][4]) {}
inline void publish_to_products() {}

// ---------------------------------------------------------------------------------------------
// copies and barriers

inline void copy16(uint32_t target, const void* source, bool exists) {
    if (exists && reinterpret_cast<uintptr_t>(source) % 16 != 0) emulator::fail("source of a copy is not aligned");
    own_copies().open.push_back({target, source, exists});
}

template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}

inline void copy_commit() {
    own_copies().groups.push_back(std::move(own_copies().open));
    own_copies().open.clear();
}

template <int kPending>
void copy_wait() {
    auto& groups = own_copies().groups;
    while (static_cast<int>(groups.size()) > kPending) {
        complete(groups.front());
        groups.erase(groups.begin());
    }
}

inline void named_barrier(int id, int threads) {
    if (id < 1 || id >= emulator::kNamedBarriers) emulator::fail("number of a barrier");
    emulator::meet(emulator::block->named[id], threads, "named barrier", [] {});
}

class SplitBarrier {
    struct Words {
        int16_t arrivals, arrived, completions, unused;
    };
    static Words& words(uint32_t barrier, int rank = emulator::rank) {
        return *reinterpret_cast<Words*>(at_shared(barrier, sizeof(Words), rank));
    }
    static void count(uint32_t barrier, int rank = emulator::rank) {
        const races::Unseen unseen;
        Words& w = words(barrier, rank);
        races::release(&w);
        ++emulator::block->progress;
        if (++w.arrived < w.arrivals) return;
        w.arrived = 0;
        ++w.completions;
    }

public:
    static void init(uint32_t barrier, int arrivals) { words(barrier) = {static_cast<int16_t>(arrivals), 0, 0, 0}; }
    static void arrive(uint32_t barrier) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) count(barrier);
    }
    static void arrive_alone(uint32_t barrier) { count(barrier); }
    static void arrive_in(uint32_t barrier, int rank) { count(barrier, rank); } // of another block
    static void arrive_after_copies(uint32_t barrier) {
        complete(own_copies().open);
        own_copies().open.clear();
        count(barrier);
    }
    static void wait(uint32_t barrier, uint32_t parity) {
        const races::Unseen unseen;
        while ((words(barrier).completions & 1) == static_cast<int>(parity))
            emulator::let_others_run();
        races::acquire(&words(barrier));
    }
};

} // namespace replayssm
