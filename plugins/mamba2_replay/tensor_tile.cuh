//! S C on tensor cores, from the state as a thread's tile holds it (fold.cuh), in m16n8k16 products with fp32 sums.
//!
//! Lane 8 g + l of a warp has rows 4 g .. 4 g + 3 (or 2 g, 2 g + 1), and of each the columns of l. As a product sees it
//! (lane 4 i + q has rows i and i + 8 of the first operand), i = 2 g + h with h = l / 4, q = l % 4: row i is half h of
//! the columns of group g's first row of two, row i + 8 of the second. So the second operand has two halves as well:
//! column 4 h + t is half h of C_t, and sum (2 g, t) + sum (2 g + 1, 4 + t) is what is wanted: four tokens a product.
//! Those sums are in the lanes l = 0, 1 (h = 0) and 6, 7 (h = 1): lane 6 h + s has tokens 2 s and 2 s + 1.
//! Which column of N stands at which k is the same for both operands, and does not matter otherwise.
#pragma once

#include "../common/tensor_core.cuh"
#include "step_shared.cuh"

namespace replayssm {

//! How a lane takes part in such products.
struct TensorLane {
    int half, q;    // of the first operand, and of the sums
    int token;      // of four: its column of the second operand
    int token_half; // which half of C_token
    int sum_token;  // first of the two tokens of its sums, of four

    __device__ __forceinline__ explicit TensorLane(int lane)
        : half(lane >> 2 & 1), q(lane & 3), token(lane >> 2 & 3), token_half(lane >> 4), sum_token((lane & 1) * 2) {}

    //! Whether its sums are wanted; the other lanes' are products of unlike halves.
    __device__ __forceinline__ bool wanted() const { return q >> 1 == half; }
};

//! The two (fp32 state) or one (bf16 state) terms of a chunk of rows r and r + 1, as first operands. A product takes
//! four columns a lane: a chunk of an fp32 state is one, of a bf16 state two.
template <class state_t, int kDstate, int kRows>
__device__ __forceinline__ void tile_terms(
    const StateTile<state_t, kDstate, kRows>& tile, int r, int chunk, int, uint32_t (&out)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* S = tile.S[r + (i & 1)][chunk] + (i >> 1) * 2;
        uint32_t terms[2];
        split<2>(S[0], S[1], terms);
        out[0][i] = terms[0];
        out[1][i] = terms[1];
    }
}
template <class state_t, int kDstate, int kRows>
__device__ __forceinline__ void tile_terms(
    const PackedTile<state_t, kDstate, kRows>& tile, int r, int chunk, int part, uint32_t (&out)[1][4]) {
    static_assert(std::is_same_v<state_t, __nv_bfloat16>, "products of bf16");
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4& bits = tile.bits[r + (i & 1)][chunk];
        out[0][i] = i >> 1 ? (part ? bits.w : bits.y) : (part ? bits.z : bits.x);
    }
}

//! sums[pair of rows][four tokens] += S C of four tokens each; C: token 0's row, bf16 in shared memory.
template <class Tile, int kFours>
__device__ __forceinline__ void tensor_products(
    const Tile& tile, const char* C, int c_bytes, const TensorLane& lane, float (&sums)[Tile::kRows / 2][kFours][4]) {
    constexpr int kPairs = Tile::kRows / 2, kParts = Tile::kVec / 4;
    constexpr int kTerms = sizeof(typename Tile::state_t) == 2 ? 1 : 2;
    static_assert(Tile::kDstate % Tile::kChunk == 0, "whole chunks");
    const char* own = C + lane.token * c_bytes + (lane.token_half * 4 + lane.q) * Tile::kVec * 2;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        uint32_t c[kFours][2 * kParts];
#pragma unroll
        for (int f = 0; f < kFours; ++f) {
            const auto pack = load_pack<uint32_t, 2 * kParts>(own + f * 4 * c_bytes + chunk * Tile::kChunk * 2);
#pragma unroll
            for (int i = 0; i < 2 * kParts; ++i)
                c[f][i] = pack.value[i];
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            uint32_t terms[kPairs][kTerms][4];
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair)
                tile_terms(tile, 2 * pair, chunk, part, terms[pair]);
#pragma unroll
            for (int term = 0; term < kTerms; ++term)
#pragma unroll
                for (int f = 0; f < kFours; ++f)
#pragma unroll
                    for (int pair = 0; pair < kPairs; ++pair)
                        mma(sums[pair][f], terms[pair][term], c[f][2 * part], c[f][2 * part + 1]);
        }
    }
}

//! One token's S C, C bf16 in shared memory: out[r] as Tile::dot<1> leaves it, in two of the eight lanes.
template <class Tile>
__device__ __forceinline__ void tensor_dot(const Tile& tile, const char* C, int lane, float (&out)[Tile::kRows]) {
    float sums[Tile::kRows / 2][1][4] = {};
    tensor_products<Tile, 1>(tile, C, 0, TensorLane(lane), sums);
    const bool own = (lane & 7) == 0 || (lane & 7) == 7;
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r)
        out[r] = own ? sums[r / 2][0][(r & 1) * 2] : 0.0f;
}

} // namespace replayssm
