/* C interface of libtrtllm_replayssm: ReplaySSM operations on device memory.
 *
 * Every operation is asynchronous on the CUDA stream it is given, allocates nothing, reads nothing back to the host and
 * may be captured in a CUDA graph. It checks its arguments, returns a replayssm_status, and on anything but
 * REPLAYSSM_OK leaves a message for the calling thread that names the argument, the value that came and what is allowed
 * (replayssm_last_error). What the operations compute is in docs/contracts.md, where a slot keeps its bytes in
 * trtllm_replayssm/layout.py and plugins/common/slot_layout.h.
 *
 * Every struct begins with struct_size = sizeof(the struct the caller was compiled with). Members are only ever added
 * at the end; a size that this library does not know is an error.
 */
#ifndef TRTLLM_REPLAYSSM_REPLAYSSM_H
#define TRTLLM_REPLAYSSM_REPLAYSSM_H

#include <stdint.h>

#if defined(__GNUC__)
#define REPLAYSSM_API __attribute__((visibility("default")))
#else
#define REPLAYSSM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a meaning changes. The Python binding refuses a library with another number. */
#define REPLAYSSM_ABI_VERSION 4

typedef enum replayssm_status {
    REPLAYSSM_OK = 0,
    REPLAYSSM_INVALID_ARGUMENT = 1, /* the caller can put it right */
    REPLAYSSM_UNSUPPORTED = 2,      /* legal in the format, not in this library */
    REPLAYSSM_CUDA_ERROR = 3,       /* the CUDA runtime refused the launch */
} replayssm_status;

/* The codes that a packed layout uses too. */
typedef enum replayssm_dtype {
    REPLAYSSM_FLOAT64 = 1,
    REPLAYSSM_FLOAT32 = 2,
    REPLAYSSM_BFLOAT16 = 3,
    REPLAYSSM_FLOAT16 = 4,
    REPLAYSSM_INT16 = 5,
    REPLAYSSM_FLOAT8_E4M3 = 6,
    REPLAYSSM_INT8 = 7,
} replayssm_dtype;

typedef enum replayssm_kind {
    REPLAYSSM_MAMBA2 = 1,
    REPLAYSSM_GATED_DELTA = 2,
    REPLAYSSM_KIMI_DELTA = 3,
} replayssm_kind;

typedef enum replayssm_read_copy {
    REPLAYSSM_COPY_NONE = 0,
    REPLAYSSM_COPY_BF16 = 1,
    REPLAYSSM_COPY_FP8_E4M3 = 2,
    REPLAYSSM_COPY_INT8 = 3,
} replayssm_read_copy;

/* trtllm_replayssm.RecurrenceSpec, field by field. */
typedef struct replayssm_recurrence_spec {
    uint32_t struct_size;
    int32_t kind;         /* replayssm_kind */
    int32_t nheads;       /* H or HV */
    int32_t ngroups;      /* G or HK */
    int32_t headdim;      /* P or V */
    int32_t dstate;       /* N or K */
    int32_t state_dtype;  /* replayssm_dtype */
    int32_t act_dtype;    /* replayssm_dtype */
    int32_t window;       /* L */
    int32_t spec_len;     /* most tokens of one step */
    int32_t read_copy;    /* replayssm_read_copy */
    int32_t stagger;      /* 0 or 1 */
    int32_t dt_softplus;  /* 0 or 1; Mamba-2 */
    float dt_min;         /* Mamba-2 */
    float dt_max;         /* Mamba-2; may be infinite */
    int32_t gate_bounded; /* 0 softplus, 1 bounded; KDA */
    float gate_lower_bound;
    int32_t qk_l2norm; /* 0 or 1; GDN, KDA */
} replayssm_recurrence_spec;

/* trtllm_replayssm.ConvSpec. */
typedef struct replayssm_conv_spec {
    uint32_t struct_size;
    int32_t channels;
    int32_t kernel;
    int32_t act_dtype;
    int32_t spec_len;
    int32_t silu; /* 1 silu, 0 no activation */
} replayssm_conv_spec;

#define REPLAYSSM_LAYOUT_REGIONS 15

/* One region of a slot; offset -1 where the layout has no such region. Strides in elements, leading axes first. */
typedef struct replayssm_region {
    int64_t offset;
    int64_t nbytes;
    int32_t dtype;
    int32_t rank;
    int32_t reserved[2];
    int64_t strides[4];
} replayssm_region;

/* Byte for byte what bytes(SlotLayout) and bytes(ConvLayout) give. Regions in the order of layout.REGION_NAMES. */
typedef struct replayssm_layout {
    char magic[8]; /* RSSMSLOT */
    uint32_t version;
    uint32_t region_count;
    int64_t slot_bytes;
    int64_t ring_rows; /* a convolution: columns */
    replayssm_region regions[REPLAYSSM_LAYOUT_REGIONS];
} replayssm_layout;

/* The slots of one layer: slot i begins at base + i * stride_bytes. Base and stride are multiples of 16. */
typedef struct replayssm_pool {
    void* base;
    int64_t stride_bytes;
    int64_t slots;
} replayssm_pool;

/* A device tensor. data NULL = absent, where the operation allows that. Strides in elements; axes as the operation
 * says, trailing entries unused. The last axis named in [brackets] of a comment below is dense unless it says
 * otherwise. */
typedef struct replayssm_tensor {
    const void* data;
    int64_t strides[4];
    int32_t dtype;
    int32_t reserved;
} replayssm_tensor;

/* Device vector of whole numbers, dense. bits is 32 or 64. */
typedef struct replayssm_index {
    const void* data;
    int32_t bits;
    int32_t reserved;
} replayssm_index;

/* How a step is cut into thread blocks. Zeros let the library choose; results do not depend on it. */
typedef struct replayssm_step_tuning {
    int32_t heads_per_block; /* heads that one block takes one after another: 0 or a divisor of heads per group */
    int32_t flags;           /* REPLAYSSM_STEP_..., or 0 */
} replayssm_step_tuning;

/* Set what the library would otherwise choose: */
#define REPLAYSSM_STEP_EVEN_BLOCKS 1  /* no smaller blocks at the end of the grid */
#define REPLAYSSM_STEP_STATE_LAST 2   /* ask for the ring rows before the state */
#define REPLAYSSM_STEP_PLAIN_LAUNCH 4 /* no programmatic dependent launch */
#define REPLAYSSM_STEP_PART_HEADS 8   /* gated delta: a block takes a part of a head */

/* y = one step of `tokens` tokens for each of `rows` sequences. x, z, B, C, y have act_dtype, 16-byte aligned data and
 * strides; dt, dt_bias, D may be fp32, bf16 or fp16, A is fp32. slots outside [0, pool.slots) are padding rows. */
typedef struct replayssm_mamba2_step_params {
    uint32_t struct_size;
    int32_t rows;
    int32_t tokens;
    replayssm_step_tuning tuning;
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index slots;    /* [rows] */
    replayssm_index accepted; /* [rows], or absent: all pending tokens stay */
    replayssm_tensor x;       /* [rows, tokens, H, P] */
    replayssm_tensor dt;      /* [rows, tokens, H], any strides */
    replayssm_tensor A;       /* [H] */
    replayssm_tensor B;       /* [rows, tokens, G, N] */
    replayssm_tensor C;       /* [rows, tokens, G, N] */
    replayssm_tensor D;       /* [H, P], any strides (a [H] tensor has stride 0 along P), or absent */
    replayssm_tensor z;       /* [rows, tokens, H, P], or absent */
    replayssm_tensor dt_bias; /* [H], or absent */
    replayssm_tensor y;       /* [rows, tokens, H, P], out */
} replayssm_mamba2_step_params;

/* y = a scan over packed prompts; sequence i has tokens cu_seqlens[i] .. cu_seqlens[i+1]-1. exact 1: token by token, so
 * that the state has the bits that steps over the same tokens would leave; 0: in chunks on tensor cores where there is
 * a kernel (act_dtype bf16), the state within fp32 rounding of that. */
typedef struct replayssm_mamba2_scan_params {
    uint32_t struct_size;
    int32_t sequences;
    int64_t tokens; /* rows of the packed tensors */
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index slots;      /* [sequences] */
    replayssm_index cu_seqlens; /* [sequences + 1] */
    const uint8_t* has_initial; /* [sequences], or NULL: every sequence starts from zero */
    replayssm_tensor x;         /* [tokens, H, P] */
    replayssm_tensor dt;        /* [tokens, H] */
    replayssm_tensor A;         /* [H] */
    replayssm_tensor B;         /* [tokens, G, N] */
    replayssm_tensor C;         /* [tokens, G, N] */
    replayssm_tensor D;         /* as in the step */
    replayssm_tensor z;         /* [tokens, H, P], or absent */
    replayssm_tensor dt_bias;   /* [H], or absent */
    replayssm_tensor y;         /* [tokens, H, P], out */
    int32_t exact;              /* 0 or 1 */
    int32_t reserved;
} replayssm_mamba2_scan_params;

/* o = one step of `tokens` tokens of Gated DeltaNet (GDN) or Kimi Delta Attention (KDA) for each of `rows` sequences.
 * q, k, v, o have act_dtype, 16-byte aligned data and strides; a and b are the raw projections (before gate and
 * sigmoid), of any strides, fp32, bf16 or fp16; A_log and dt_bias are fp32. slots outside [0, pool.slots) are padding
 * rows. */
typedef struct replayssm_gated_delta_step_params {
    uint32_t struct_size;
    int32_t rows;
    int32_t tokens;
    replayssm_step_tuning tuning; /* KDA: a block takes one head at most */
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index slots;    /* [rows] */
    replayssm_index accepted; /* [rows], or absent: all pending tokens stay */
    replayssm_tensor q;       /* [rows, tokens, HK, K], before normalisation */
    replayssm_tensor k;       /* [rows, tokens, HK, K] */
    replayssm_tensor v;       /* [rows, tokens, HV, V] */
    replayssm_tensor a;       /* GDN [rows, tokens, HV], KDA [rows, tokens, HV, K] */
    replayssm_tensor b;       /* [rows, tokens, HV] */
    replayssm_tensor A_log;   /* [HV] */
    replayssm_tensor dt_bias; /* GDN [HV], KDA [HV, K] */
    replayssm_tensor o;       /* [rows, tokens, HV, V], out */
    float scale;              /* of the normalised q; 0: K^-0.5 */
    int32_t reserved;
} replayssm_gated_delta_step_params;

/* o = a scan over packed prompts; sequence i has tokens cu_seqlens[i] .. cu_seqlens[i+1]-1. exact as in the Mamba-2
 * scan. */
typedef struct replayssm_gated_delta_scan_params {
    uint32_t struct_size;
    int32_t sequences;
    int64_t tokens; /* rows of the packed tensors */
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index slots;      /* [sequences] */
    replayssm_index cu_seqlens; /* [sequences + 1] */
    const uint8_t* has_initial; /* [sequences], or NULL: every sequence starts from zero */
    replayssm_tensor q;         /* [tokens, HK, K] */
    replayssm_tensor k;         /* [tokens, HK, K] */
    replayssm_tensor v;         /* [tokens, HV, V] */
    replayssm_tensor a;         /* GDN [tokens, HV], KDA [tokens, HV, K] */
    replayssm_tensor b;         /* [tokens, HV] */
    replayssm_tensor A_log;     /* as in the step */
    replayssm_tensor dt_bias;   /* as in the step */
    replayssm_tensor o;         /* [tokens, HV, V], out */
    float scale;                /* of the normalised q; 0: K^-0.5 */
    int32_t exact;              /* 0 or 1 */
} replayssm_gated_delta_scan_params;

/* dst = src with the first `count` rows of its ring folded in. Pairs with an index outside the pool are passed over. */
typedef struct replayssm_materialize_params {
    uint32_t struct_size;
    int32_t pairs;
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index src;   /* [pairs] */
    replayssm_index count; /* [pairs] */
    replayssm_index dst;   /* [pairs], no two equal, none of them another pair's src */
    replayssm_tensor A;    /* Mamba-2: fp32 [H]; absent for the other kinds */
} replayssm_materialize_params;

/* Zero state, empty ring, reset cursor. */
typedef struct replayssm_reset_params {
    uint32_t struct_size;
    int32_t count;
    replayssm_recurrence_spec spec;
    replayssm_pool pool;
    replayssm_index slots; /* [count] */
} replayssm_reset_params;

/* One step of the convolution. x and y: act_dtype, 16-byte aligned data and strides; weight and bias: fp32, bf16 or
 * fp16. */
typedef struct replayssm_conv_step_params {
    uint32_t struct_size;
    int32_t rows;
    int32_t tokens;
    int32_t reserved;
    replayssm_conv_spec spec;
    replayssm_pool pool;
    replayssm_index slots;    /* [rows] */
    replayssm_index accepted; /* [rows], or absent */
    replayssm_tensor x;       /* [rows, tokens, C] */
    replayssm_tensor weight;  /* [C, kernel], any strides */
    replayssm_tensor bias;    /* [C], or absent */
    replayssm_tensor y;       /* [rows, tokens, C], out */
} replayssm_conv_step_params;

typedef struct replayssm_conv_scan_params {
    uint32_t struct_size;
    int32_t sequences;
    int64_t tokens;
    replayssm_conv_spec spec;
    replayssm_pool pool;
    replayssm_index slots;      /* [sequences] */
    replayssm_index cu_seqlens; /* [sequences + 1] */
    const uint8_t* has_initial; /* [sequences], or NULL */
    replayssm_tensor x;         /* [tokens, C] */
    replayssm_tensor weight;    /* [C, kernel] */
    replayssm_tensor bias;      /* [C], or absent */
    replayssm_tensor y;         /* [tokens, C], out */
} replayssm_conv_scan_params;

typedef struct replayssm_conv_materialize_params {
    uint32_t struct_size;
    int32_t pairs;
    replayssm_conv_spec spec;
    replayssm_pool pool;
    replayssm_index src;
    replayssm_index count;
    replayssm_index dst;
} replayssm_conv_materialize_params;

typedef struct replayssm_conv_reset_params {
    uint32_t struct_size;
    int32_t count;
    replayssm_conv_spec spec;
    replayssm_pool pool;
    replayssm_index slots;
} replayssm_conv_reset_params;

/* cache[slot_mapping[i], c, h, positions[i, t], :] = new_kv[i, t, c, h, :] for the first counts[i] tokens t of every
 * row i; c is 0 for keys, 1 for values (parts 2), or 0 alone where one vector is both (parts 1). All arrays are dense
 * and of one dtype. Slots and positions outside the cache are passed over. */
typedef struct replayssm_kv_append_params {
    uint32_t struct_size;
    int32_t rows;
    int32_t tokens; /* of every row, those that do not count included */
    int32_t kv_heads;
    int32_t head_dim;
    int32_t dtype; /* float32, bfloat16 or float16 */
    int32_t parts; /* 1 or 2 */
    int32_t reserved;
    int64_t slots;
    int64_t max_positions;
    const void* new_kv;           /* [rows, tokens, parts, kv_heads, head_dim] */
    void* cache;                  /* [slots, parts, kv_heads, max_positions, head_dim] */
    replayssm_index slot_mapping; /* [rows], no slot twice */
    replayssm_index positions;    /* [rows, tokens] */
    replayssm_index counts;       /* [rows], or absent: all tokens */
} replayssm_kv_append_params;

REPLAYSSM_API int32_t replayssm_abi_version(void);
/* Package version the library was built from, and the GPU architectures it holds code for ("90", "80 90 100"). */
REPLAYSSM_API const char* replayssm_version(void);
REPLAYSSM_API const char* replayssm_architectures(void);
/* Message of the calling thread's last failed call; empty if it had none. */
REPLAYSSM_API const char* replayssm_last_error(void);

/* Host only: no GPU is touched. */
REPLAYSSM_API int32_t replayssm_slot_layout(const replayssm_recurrence_spec* spec, replayssm_layout* out);
REPLAYSSM_API int32_t replayssm_conv_layout(const replayssm_conv_spec* spec, replayssm_layout* out);

/* stream is a cudaStream_t. */
REPLAYSSM_API int32_t replayssm_mamba2_step(const replayssm_mamba2_step_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_mamba2_scan(const replayssm_mamba2_scan_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_gated_delta_step(const replayssm_gated_delta_step_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_gated_delta_scan(const replayssm_gated_delta_scan_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_materialize(const replayssm_materialize_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_reset(const replayssm_reset_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_conv_step(const replayssm_conv_step_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_conv_scan(const replayssm_conv_scan_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_conv_materialize(const replayssm_conv_materialize_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_conv_reset(const replayssm_conv_reset_params* params, void* stream);
REPLAYSSM_API int32_t replayssm_kv_append(const replayssm_kv_append_params* params, void* stream);

#ifdef __cplusplus
}
#endif
#endif
