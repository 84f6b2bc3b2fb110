//! Keys and queries of a step: norms, KDA's gates, products of every row's key with every token's key and query, the
//! vectors that the state is multiplied by. One warp has one row at a time (RowPieces).
#pragma once

#include "step_parts.cuh"

namespace replayssm {

//! Sums over a warp of kCount values (a power of two up to 32); lane l ends with the total of value l / (32 / kCount).
template <int kCount>
__device__ __forceinline__ float warp_totals(float (&value)[kCount], int lane) {
    int count = kCount;
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) {
        if (count == 1) {
            value[0] = __fadd_rn(value[0], __shfl_xor_sync(kFullMask, value[0], d));
            continue;
        }
        const bool high = lane & d;
        count /= 2;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            if (i >= count) break;
            const float other = __shfl_xor_sync(kFullMask, high ? value[i] : value[count + i], d);
            value[i] = __fadd_rn(high ? value[count + i] : value[i], other);
        }
    }
    return value[0];
}

//! One token's rows in one warp: q and k as they come, KDA's g; then normalised.
template <class Traits>
struct TokenRows {
    using act_t = typename Traits::act_t;
    using Pieces = typename Traits::Pieces;
    static constexpr int kPieces = Traits::kPieces;
    Pieces q, k, g, raw_k;
    float k_norm, q_norm, kq; // 1 / |k|, scale / |q|, kn . qn

    //! Everything that does not wait for the slot. wanted: this warp has a token.
    __device__ __forceinline__ void load(const GatedDeltaStepParams& p, const DeltaBlock& b, int t, bool wanted) {
        const int K = b.dstate;
        q.load(static_cast<const act_t*>(p.in.q.data) + (b.row * p.in.q.row + t * p.in.q.token + b.group * p.in.q.head),
            K, wanted);
        k.load(static_cast<const act_t*>(p.in.k.data) + (b.row * p.in.k.row + t * p.in.k.token + b.group * p.in.k.head),
            K, wanted);
        if (Traits::channels(p)) load_gates(p, b, t, wanted);
    }

    //! g of every channel.
    __device__ __forceinline__ void load_gates(const GatedDeltaStepParams& p, const DeltaBlock& b, int t, bool wanted) {
        const int head = b.first_item / Traits::kParts;
        const int a_at = b.row * p.in.a.row + t * p.in.a.token + head * p.in.a.head;
        const float* bias = static_cast<const float*>(p.in.dt_bias.data) + head * p.in.dt_bias.head;
        const float A_log = __ldg(static_cast<const float*>(p.in.A_log.data) + head * p.in.A_log.head);
        unsigned bits[kPieces][4];
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int c = Pieces::channel(i) + v;
                bits[i][v] = 0;
                if (wanted && c < b.dstate)
                    bits[i][v] = load_bits(p.in.a.data, p.in.a.dtype, a_at + c * p.in.a.channel);
            }
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int c = Pieces::channel(i) + v;
                const float own = wanted && c < b.dstate ? __ldg(bias + c * p.in.dt_bias.channel) : 0.0f;
                const float rate = expf(A_log);
                g.value[i][v] = gate_of(p.shape, rate, bits_to_float(bits[i][v], p.in.a.dtype), own);
            }
    }

    //! k and q as they come, as vectors of products on tensor cores (step_tensor.cuh).
    __device__ __forceinline__ void put_vectors(char* vectors, int t) const {
        const int lane = threadIdx.x & (kWarp - 1), at = lane / 8 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8;
        char* const row = vectors + 2 * t * kTensorVectorBytes + at;
        Pack<act_t, 4> pack[2];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            pack[0].value[v] = from_float<act_t>(k.value[0][v]);
            pack[1].value[v] = from_float<act_t>(q.value[0][v]);
        }
        store_pack(row, pack[0]);
        store_pack(row + kTensorVectorBytes, pack[1]);
    }

    //! k and q become kn and qn; needs no slot.
    __device__ __forceinline__ void normalise(const GatedDeltaStepParams& p) {
        float sum[3] = {k.dot_part(k), q.dot_part(q), k.dot_part(q)};
        warp_sums(sum);
        k_norm = inverse_norm(sum[0], p.shape.qk_l2norm);
        q_norm = inverse_norm(sum[1], p.shape.qk_l2norm) * p.in.scale;
        raw_k = k;
        k.scale(k_norm);
        q.scale(q_norm);
        kq = sum[2] * k_norm * q_norm;
    }

    //! k, its norm and KDA's g to the ring where this block has to.
    __device__ __forceinline__ void append(const GatedDeltaStepParams& p, const DeltaBlock& b, int t) const {
        const int row = b.append_row(p.pool, t), K = b.dstate;
        if (b.first_of_group) {
            raw_k.store(b.region<act_t>(p.pool.ring_k) + (b.group * p.pool.ring_rows + row) * K, K);
            if (b.lane() == 0) b.region<float>(p.pool.ring_k_rnorm)[b.group * p.pool.scalar_stride + row] = k_norm;
        }
        const int head = b.first_item / Traits::kParts;
        if (Traits::channels(p) && b.first_item % Traits::kParts == 0)
            g.store(b.region<float>(p.pool.ring_g) + (head * p.pool.ring_rows + row) * K, K);
    }
};

//! Ring rows of k in one warp, from the newest on: row s from the newest belongs to warp s % warps.
template <class Traits>
struct RingKeys {
    using act_t = typename Traits::act_t;
    static constexpr int kHeld = Traits::kHeldRows;
    typename Traits::Pieces row[kHeld];
    float rnorm[kHeld];

    //! Row number, counted from the oldest; negative: no such row.
    static __device__ __forceinline__ int number(const DeltaBlock& b, int first, int i) {
        return b.plan.committed - 1 - (first + i * static_cast<int>(blockDim.x / kWarp) + b.warp());
    }

    //! Of rows first .. first + kHeld * warps - 1, this warp's.
    __device__ __forceinline__ void load(const GatedDeltaStepParams& p, const DeltaBlock& b, int first) {
        const act_t* ring = b.region<const act_t>(p.pool.ring_k) + b.group * p.pool.ring_rows * b.dstate;
        const float* norms = b.region<const float>(p.pool.ring_k_rnorm) + b.group * p.pool.scalar_stride;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int j = number(b, first, i), at = j < 0 ? 0 : b.committed_row(p.pool, j);
            row[i].load(ring + at * b.dstate, b.dstate, j >= 0);
            rnorm[i] = j < 0 ? 0.0f : norms[at];
        }
    }

    __device__ __forceinline__ void normalise() {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            row[i].scale(rnorm[i]);
    }

    //! For a fold.
    __device__ __forceinline__ void store(const DeltaBlock& b, float* keys, int first) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (number(b, first, i) >= 0) row[i].store(keys + number(b, first, i) * b.dstate, b.dstate);
    }

    //! value[2 i + u] -> dots of row number(first, i).
    __device__ __forceinline__ void put_sums(
        const DeltaBlock& b, float (&value)[2 * kHeld], float2* dots, int stride, int first) const {
        constexpr int kSharers = kWarp / (2 * kHeld);
        const int lane = b.lane(), index = lane / kSharers;
        const float sum = warp_totals(value, lane);
        const int j = number(b, first, index / 2);
        if (lane % kSharers == 0 && j >= 0) reinterpret_cast<float*>(dots + (b.tokens + j) * stride)[index % 2] = sum;
    }
};

//! By the block: start the copies of KDA's g of the committed rows.
template <class Traits>
__device__ __forceinline__ void start_gates(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b) {
    const int per_row = b.dstate / 4, head = b.first_item / Traits::kParts;
    const float* ring = b.region<const float>(p.pool.ring_g) + head * p.pool.ring_rows * b.dstate;
    float* gates = reinterpret_cast<float*>(smem + p.shared.gates);
    for (int i = b.thread; i < b.plan.committed * per_row; i += blockDim.x) {
        const int j = i / per_row, at = (i - j * per_row) * 4;
        copy_piece<16>(gates + j * b.dstate + at, ring + b.committed_row(p.pool, j) * b.dstate + at);
    }
}

//! By the block, in a folding step: the gates of the committed rows become decays.
__device__ __forceinline__ void gates_to_decays(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b) {
    float* gates = reinterpret_cast<float*>(smem + p.shared.gates);
    for (int i = b.thread * 4; i < b.plan.committed * b.dstate; i += blockDim.x * 4) {
        auto pack = load_pack<float, 4>(gates + i);
#pragma unroll
        for (int v = 0; v < 4; ++v)
            pack.value[v] = expf(pack.value[v]);
        store_pack(gates + i, pack);
    }
}

//! By a warp: the products of its ring rows, from `first` on, with one key and one query, both decayed up to token t.
//! acc: g of everything behind the newest row of this batch that a row has met; moves past the batch.
template <class Traits>
__device__ __forceinline__ void multiply_ring(const GatedDeltaStepParams& p, const char* smem, const DeltaBlock& b,
    const RingKeys<Traits>& ring, typename Traits::Pieces& acc, const typename Traits::Pieces& kn,
    const typename Traits::Pieces& qn, float2* dots, int first) {
    constexpr int kHeld = Traits::kHeldRows;
    const float* gates = reinterpret_cast<const float*>(smem + p.shared.gates);
    const int warps = blockDim.x / kWarp;
    float value[2 * kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        typename Traits::Pieces row = ring.row[i];
        if (Traits::channels(p)) {
            for (int w = 0; w < warps; ++w) {
                const int j = b.plan.committed - 1 - (first + i * warps + w);
                if (j < 0) break;
                if (w == b.warp()) row.multiply(acc.exponential());
                typename Traits::Pieces g;
                g.load(gates + j * b.dstate, b.dstate);
                acc.add(g);
            }
        }
        value[2 * i] = row.dot_part(kn);
        value[2 * i + 1] = row.dot_part(qn);
    }
    ring.put_sums(b, value, dots, p.shared.dot_stride, first);
}

//! Vector u (0 key, 1 query) of token t that the state is multiplied by.
__device__ __forceinline__ float* state_vector(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, int t, int u) {
    return reinterpret_cast<float*>(smem + p.shared.vectors) + (2 * t + u) * b.dstate;
}

//! By the block, one token of KDA: every warp has the token's rows in registers. Barriers: one where there are live rows.
template <class Traits>
__device__ __forceinline__ void prepare_one_token(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, TokenRows<Traits>& token, RingKeys<Traits>& ring) {
    using Pieces = typename Traits::Pieces;
    float2* dots = reinterpret_cast<float2*>(smem + p.shared.dots);
    const int live = b.plan.committed, step = Traits::kHeldRows * static_cast<int>(blockDim.x / kWarp);
    if (b.thread == 0) dots[0].y = token.kq;
    Pieces acc = token.g; // g since the row at hand
    if (live > 0) {
        wait_for_own_copies();
        __syncthreads(); // gates of the ring rows are there
    }
    for (int first = 0; first < live; first += step) {
        if (first > 0) ring.load(p, b, first);
        ring.normalise();
        if (b.plan.flush) {
            ring.store(b, reinterpret_cast<float*>(smem + p.shared.keys), first);
        } else {
            multiply_ring<Traits>(p, smem, b, ring, acc, token.k, token.q, dots, first);
        }
    }
    if (b.plan.flush) gates_to_decays(p, smem, b);
    if (b.warp() != 0) return;
    const Pieces decay = acc.exponential();
    token.k.multiply(decay);
    token.q.multiply(decay);
    token.k.store(state_vector(p, smem, b, 0, 0), b.dstate);
    token.q.store(state_vector(p, smem, b, 0, 1), b.dstate);
}

//! By the block: the products of the step's tokens m <= t, KDA: with the decay between them.
template <class Traits>
__device__ __forceinline__ void multiply_tokens(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b) {
    using Pieces = typename Traits::Pieces;
    float2* dots = reinterpret_cast<float2*>(smem + p.shared.dots);
    const float* gates = reinterpret_cast<const float*>(smem + p.shared.gates) + p.shared.committed_cap * b.dstate;
    for (int m = b.warp(); m < b.tokens; m += blockDim.x / kWarp) {
        Pieces key, acc;
        key.load(state_vector(p, smem, b, m, 0), b.dstate);
        acc.fill(0.0f);
        for (int first = m; first < b.tokens; first += 4) {
            float value[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = first + i;
                const bool wanted = t < b.tokens;
                Pieces row = key, kn, qn;
                if (Traits::channels(p)) {
                    Pieces g;
                    g.load(gates + t * b.dstate, b.dstate, wanted && t > m);
                    acc.add(g);
                    row.multiply(acc.exponential());
                }
                kn.load(state_vector(p, smem, b, t, 0), b.dstate, wanted);
                qn.load(state_vector(p, smem, b, t, 1), b.dstate, wanted);
                value[2 * i] = row.dot_part(kn);
                value[2 * i + 1] = row.dot_part(qn);
            }
            const float sum = warp_totals(value, b.lane());
            const int t = first + (b.lane() >> 3);
            if (b.lane() % 4 == 0 && t < b.tokens)
                reinterpret_cast<float*>(dots + m * p.shared.dot_stride + t)[(b.lane() >> 2) & 1] = sum;
        }
    }
}

//! By the block, KDA: the vectors of token t times exp(g_0 + ... + g_t).
__device__ __forceinline__ void decay_vectors(const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b) {
    const float* gates = reinterpret_cast<const float*>(smem + p.shared.gates) + p.shared.committed_cap * b.dstate;
    for (int c = b.thread; c < b.dstate; c += blockDim.x) {
        float acc = 0.0f;
        for (int t = 0; t < b.tokens; ++t) {
            acc += gates[t * b.dstate + c];
            const float decay = expf(acc);
            state_vector(p, smem, b, t, 0)[c] *= decay;
            state_vector(p, smem, b, t, 1)[c] *= decay;
        }
    }
}

//! By the block, any number of tokens. `token` holds the rows of token warp(). Ends with a barrier.
template <class Traits>
__device__ __forceinline__ void prepare_tokens(
    const GatedDeltaStepParams& p, char* smem, const DeltaBlock& b, TokenRows<Traits>& token, RingKeys<Traits>& ring) {
    using Pieces = typename Traits::Pieces;
    float2* dots = reinterpret_cast<float2*>(smem + p.shared.dots);
    float* gates = reinterpret_cast<float*>(smem + p.shared.gates);
    const int warps = blockDim.x / kWarp, live = b.plan.committed, step = Traits::kHeldRows * warps;
    const bool channels = Traits::channels(p);
    for (int t = b.warp(); t < b.tokens; t += warps) {
        if (t >= warps) {
            token.load(p, b, t, true);
            token.normalise(p);
        }
        token.append(p, b, t);
        token.k.store(state_vector(p, smem, b, t, 0), b.dstate);
        token.q.store(state_vector(p, smem, b, t, 1), b.dstate);
        if (channels) token.g.store(gates + (p.shared.committed_cap + t) * b.dstate, b.dstate);
    }
    wait_for_own_copies();
    __syncthreads(); // vectors, gates
    multiply_tokens<Traits>(p, smem, b);
    if (channels) {
        __syncthreads(); // nobody needs the plain vectors any more
        decay_vectors(p, smem, b);
        if (b.plan.flush) gates_to_decays(p, smem, b);
        __syncthreads(); // decayed vectors
    }
    Pieces total; // KDA: g of the ring rows
    total.fill(0.0f);
    for (int first = 0; first < live; first += step) {
        if (first > 0) ring.load(p, b, first);
        ring.normalise();
        if (b.plan.flush) {
            ring.store(b, reinterpret_cast<float*>(smem + p.shared.keys), first);
            continue;
        }
        const Pieces before = total;
        for (int t = 0; t < b.tokens; ++t) {
            Pieces kn, qn;
            kn.load(state_vector(p, smem, b, t, 0), b.dstate);
            qn.load(state_vector(p, smem, b, t, 1), b.dstate);
            total = before;
            multiply_ring<Traits>(p, smem, b, ring, total, kn, qn, dots + t, first);
        }
    }
    __syncthreads(); // products
    if (!channels || b.plan.history == 0) return;
    const Pieces decay = total.exponential();
    for (int i = b.warp(); i < 2 * b.tokens; i += warps) {
        float* row = state_vector(p, smem, b, 0, 0) + i * b.dstate;
        Pieces vector;
        vector.load(row, b.dstate);
        vector.multiply(decay);
        vector.store(row, b.dstate);
    }
    __syncthreads(); // vectors that the checkpoint meets
}

} // namespace replayssm
