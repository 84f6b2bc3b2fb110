//! Several tokens on tensor cores, dstate known: B.C of the step's rows, and the outputs (tensor_tile.cuh).
#pragma once

#include "step_rows.cuh"

namespace replayssm {

//! Rows of B and C in tiles of 16: tile 0 has the step's tokens, tile i ring rows 16 (i - 1) .. . A warp takes every
//! so many tiles, straight from global memory into the fragments of B.C: of rows g and g + 8 (lane = 4 g + q) a lane
//! has 8 of every 32 columns, from 8 q on, and the same columns of C_g.
template <class Tile, class act_t>
struct TensorRows {
    static constexpr int kVectors = Tile::kDstate / 32;
    static_assert(std::is_same_v<act_t, __nv_bfloat16>, "products of bf16");

    uint4 C[kVectors];
    uint4 rows[2][kVectors];

    static __device__ __forceinline__ int warp() { return threadIdx.x / kWarp; }
    static __device__ __forceinline__ int warps() { return blockDim.x / kWarp; }
    static __device__ __forceinline__ int row_of_lane() { return threadIdx.x % kWarp / 4; }
    static __device__ __forceinline__ int column() { return threadIdx.x % 4 * 8; }

    static __device__ __forceinline__ void load_row(uint4 (&out)[kVectors], const act_t* row, bool exists) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            out[v] = make_uint4(0, 0, 0, 0);
            if (exists) out[v] = *reinterpret_cast<const uint4*>(row + v * 32 + column());
        }
    }

    static __device__ __forceinline__ const act_t* token_row(const StepTensor& tensor, const StepBlock& b, int token) {
        return static_cast<const act_t*>(tensor.data) + b.row * tensor.row + b.group * tensor.head +
            token * tensor.token;
    }

    static __device__ __forceinline__ act_t* ring_rows(const Mamba2StepParams& p, const StepBlock& b) {
        return reinterpret_cast<act_t*>(b.slot + p.pool.ring_b) + b.group * p.pool.ring_rows * Tile::kDstate;
    }

    __device__ __forceinline__ void load_c(const Mamba2StepParams& p, const StepBlock& b, int first) {
        const int token = first + row_of_lane();
        load_row(C, token_row(p.in.C, b, token), token < b.tokens);
    }

    __device__ __forceinline__ void load_token_tile(const Mamba2StepParams& p, const StepBlock& b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = row_of_lane() + 8 * i;
            load_row(rows[i], token_row(p.in.B, b, token), token < b.tokens);
        }
    }

    __device__ __forceinline__ void load_ring_tile(const Mamba2StepParams& p, const StepBlock& b, int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = (tile - 1) * 16 + row_of_lane() + 8 * i;
            load_row(rows[i], ring_rows(p, b) + ring_row(b.plan.origin, j, p.pool.ring_rows) * Tile::kDstate,
                j < b.plan.committed);
        }
    }

    __device__ __forceinline__ void load_tokens(const Mamba2StepParams& p, const StepBlock& b) {
        load_c(p, b, 0);
        if (warp() == 0) load_token_tile(p, b);
    }

    //! By the block: C to shared memory, there after wait_for_own_copies and a barrier.
    static __device__ __forceinline__ void copy_c(const Mamba2StepParams& p, char* smem, const StepBlock& b) {
        constexpr int kPieces = Tile::kDstate / 8;
        for (int i = threadIdx.x; i < b.tokens * kPieces; i += blockDim.x) {
            const int token = i / kPieces, n = i % kPieces * 8;
            copy_piece<16>(
                smem + p.shared.C + token * tensor_c_bytes(Tile::kDstate) + n * 2, token_row(p.in.C, b, token) + n);
        }
    }

    __device__ __forceinline__ void load_ring(const Mamba2StepParams& p, const StepBlock& b) {
        if (warp() > 0) load_ring_tile(p, b, warp());
    }

    //! B_r . C_t of the tile's rows, the first of which is row `first` of the step; `count` of them exist.
    __device__ __forceinline__ void multiply(
        const Mamba2StepParams& p, char* smem, const StepBlock& b, int first, int count) {
        const int row = row_of_lane(), token = threadIdx.x % 4 * 2;
#pragma unroll 1
        for (int t0 = 0; t0 < b.tokens; t0 += 8) {
            if (b.tokens > 8) load_c(p, b, t0);
            float sums[4] = {};
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t low[4] = {rows[0][v].x, rows[1][v].x, rows[0][v].y, rows[1][v].y};
                const uint32_t high[4] = {rows[0][v].z, rows[1][v].z, rows[0][v].w, rows[1][v].w};
                mma(sums, low, C[v].x, C[v].y);
                mma(sums, high, C[v].z, C[v].w);
            }
            float* BC = reinterpret_cast<float*>(smem + p.shared.BC) + (t0 + token) * p.shared.rows_cap + first + row;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (t0 + token + (i & 1) < b.tokens && row + (i >> 1) * 8 < count)
                    BC[(i & 1) * p.shared.rows_cap + (i >> 1) * 8] = sums[i];
            }
        }
    }

    //! B.C where outputs read the rows, B in fp32 where they are folded; appends the tokens' B where this block is the
    //! first of its group.
    __device__ __forceinline__ void finish(const Mamba2StepParams& p, char* smem, const StepBlock& b) {
        const int tiles = 1 + (b.plan.committed + 15) / 16;
        for (int tile = warp(); tile < tiles; tile += warps()) {
            if (tile != warp()) load_ring_tile(p, b, tile);
            const int first = (tile - 1) * 16, row = row_of_lane();
            if (tile == 0) {
                multiply(p, smem, b, 0, b.tokens);
                if (b.first_head == b.group * p.shape.heads_per_group) append(p, b);
            } else if (!b.plan.flush) {
                multiply(p, smem, b, b.tokens + first, b.plan.committed - first);
            } else {
                float* B = reinterpret_cast<float*>(smem + p.shared.ring_B);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int j = first + row + 8 * i;
                    if (j >= b.plan.committed) continue;
#pragma unroll
                    for (int v = 0; v < kVectors; ++v)
                        put_row_vector<Tile, act_t>(B + j * Tile::kDstate, v * 32 + column(), rows[i][v]);
                }
            }
        }
    }

    __device__ __forceinline__ void append(const Mamba2StepParams& p, const StepBlock& b) {
        const int append_row = ring_row(b.plan.origin, b.plan.committed, p.pool.ring_rows);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = row_of_lane() + 8 * i;
            if (token >= b.tokens) continue;
            act_t* to = ring_rows(p, b) + ring_row(append_row, token, p.pool.ring_rows) * Tile::kDstate;
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                *reinterpret_cast<uint4*>(to + v * 32 + column()) = rows[i][v];
        }
    }
};

//! Outputs of tokens t0 .. t0 + 4 kFours - 1. A lane has four (two) of their eight neighbouring lanes' sums: of rows
//! own .. own + kOwn - 1 (half h: rows 2 h ..) two tokens. y points at this lane's first row of token 0.
template <class Tile, class act_t, int kFours>
struct TensorOutputs {
    static constexpr int kRows = Tile::kRows, kPairs = kRows / 2, kOwn = kRows / 2;
    float sums[kPairs][kFours][4]; // [two rows][four tokens][row of two, token of two]

    //! Scale S C by the decays up to each token.
    __device__ __forceinline__ void decay(const float* decays, const TensorLane& lane) {
#pragma unroll
        for (int f = 0; f < kFours; ++f) {
            const auto by = load_pack<float, 2>(decays + 4 * f + lane.sum_token);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[pair][f][i] = __fmul_rn(sums[pair][f][i], by.value[i & 1]);
        }
    }

    //! Add x_j times its weights for ring rows j < count, 16 rows a product: lane l of eight has rows l and l + 8.
    __device__ __forceinline__ void add_ring(
        const char* x, int row_bytes, int count, const char* weights, int tokens, int lane8, const TensorLane& lane) {
        weights += lane.token * kWeightBytes + (lane.token_half * 4 + lane.q) * 8;
#pragma unroll 1
        for (int j0 = 0; j0 < count; j0 += kWeightRows, weights += tokens * kWeightBytes) {
            Pack<uint32_t, kPairs> rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = j0 + 8 * i + lane8;
                rows[i] = Pack<uint32_t, kPairs>{};
                if (j < count) rows[i] = load_pack<uint32_t, kPairs>(x + j * row_bytes);
            }
#pragma unroll
            for (int f = 0; f < kFours; ++f) {
                const auto w = load_pack<uint32_t, 2>(weights + f * 4 * kWeightBytes);
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair) {
                    const uint32_t a[2] = {__byte_perm(rows[0].value[pair], rows[1].value[pair], 0x5410),
                        __byte_perm(rows[0].value[pair], rows[1].value[pair], 0x7632)};
                    mma_half(sums[pair][f], a, w.value[0]);
                    mma_half(sums[pair][f], a, w.value[1]);
                }
            }
        }
    }

    //! Add the step's own rows 0 .. last, each to the tokens from it on: half h has rows h, h + 2, ...
    __device__ __forceinline__ void add_tokens(
        const char* x, int row_bytes, int last, const float* coef, int stride, int t0, const TensorLane& lane) {
        for (int j = lane.half; j <= last; j += 2) {
            const auto row = load_pack<act_t, kRows>(x + j * row_bytes);
#pragma unroll
            for (int f = 0; f < kFours; ++f) {
                const auto by = load_pack<float, 2>(coef + j * stride + 4 * f + lane.sum_token);
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (j > t0 + 4 * f + lane.sum_token + (i & 1)) continue;
                        sums[pair][f][i] =
                            __fmaf_rn(by.value[i & 1], to_float(row.value[2 * pair + (i >> 1)]), sums[pair][f][i]);
                    }
            }
        }
    }

    //! Value i of this lane: row i / 2, token i % 2 (one row: token i), summed over both halves.
    __device__ __forceinline__ void total(int f, const TensorLane& lane, float (&out)[2 * kOwn]) const {
#pragma unroll
        for (int i = 0; i < 2 * kOwn; ++i) {
            const float first = kPairs == 2 ? sums[0][f][i] : sums[0][f][i];
            const float second = kPairs == 2 ? sums[kPairs - 1][f][i] : sums[0][f][2 + i];
            const float other = __shfl_xor_sync(kFullMask, lane.half ? first : second, 6);
            out[i] = __fadd_rn(lane.half ? second : first, other);
        }
    }
};

template <class Tile, class act_t, int kFours>
__device__ __forceinline__ void write_tensor_outputs(const Tile& tile, const Mamba2StepParams& p, const char* smem,
    const StepBlock& b, int k, const float (&D)[Tile::kRows / 2], act_t* y, int t0) {
    using Outputs = TensorOutputs<Tile, act_t, kFours>;
    constexpr int kOwn = Outputs::kOwn;
    const TensorLane lane(b.thread & (kWarp - 1));
    const int first = (b.thread >> 3) * Tile::kRows, stride = p.shared.coef_stride, row_bytes = p.shared.row_bytes;
    const char* x = smem + p.shared.x + (k & 1) * p.shared.buffer_bytes + first * sizeof(act_t);
    Outputs out{};
    constexpr int kBytes = tensor_c_bytes(Tile::kDstate);
    tensor_products<Tile, kFours>(tile, smem + p.shared.C + t0 * kBytes, kBytes, lane, out.sums);
    out.decay(reinterpret_cast<const float*>(smem + p.shared.decay) + k * stride + t0, lane);
    out.add_ring(x + b.tokens * row_bytes, row_bytes, b.plan.history,
        smem + p.shared.weight + k * p.shared.weight_bytes + t0 * kWeightBytes, stride, b.thread & 7, lane);
    out.add_tokens(x, row_bytes, min(b.tokens, t0 + 4 * kFours) - 1,
        reinterpret_cast<const float*>(smem + p.shared.coef) + k * p.shared.coef_rows * stride + t0, stride, t0, lane);
    x += lane.half * kOwn * sizeof(act_t);
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
        float value[2 * kOwn];
        out.total(f, lane, value);
        if (!lane.wanted()) continue;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int t = t0 + 4 * f + lane.sum_token + u;
            if (t >= b.tokens) continue;
            const auto x_t = load_pack<act_t, kOwn>(x + t * row_bytes);
            Pack<act_t, kOwn> pack;
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
                float v = __fmaf_rn(D[r], to_float(x_t.value[r]), value[2 * r + u]);
                if (p.in.z.data != nullptr) {
                    const char* z = x + (p.shared.rows_cap + t) * row_bytes + r * sizeof(act_t);
                    v *= silu(to_float(*reinterpret_cast<const act_t*>(z)));
                }
                pack.value[r] = from_float<act_t>(v);
            }
            store_pack(y + t * p.in.y.token, pack);
        }
    }
}

//! All tokens' outputs, eight at a time while there are more than four.
template <class Tile, class act_t>
__device__ __forceinline__ void write_all_tensor_outputs(const Tile& tile, const Mamba2StepParams& p, const char* smem,
    const StepBlock& b, int k, const float (&D)[Tile::kRows / 2], act_t* y) {
    int t = 0;
#pragma unroll 1
    for (; t + 4 < b.tokens; t += 8)
        write_tensor_outputs<Tile, act_t, 2>(tile, p, smem, b, k, D, y, t);
    if (t < b.tokens) write_tensor_outputs<Tile, act_t, 1>(tile, p, smem, b, k, D, y, t);
}

} // namespace replayssm
