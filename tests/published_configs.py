"""config.json of published models, as far as the planner needs them: dimensions, no training settings."""

from __future__ import annotations

NANO = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 3136, "num_hidden_layers": 42,
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 96, "n_groups": 8, "mamba_head_dim": 80,
    "ssm_state_size": 128, "intermediate_size": 12544, "max_position_embeddings": 262144,
}  # fmt: skip
SUPER = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096,
    "layers_block_type": ["mamba", "moe"] * 40 + ["attention"] * 8, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 128, "n_groups": 8, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
    "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "max_position_embeddings": 262144,
}  # fmt: skip
KIMI_48B = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "intermediate_size": 9216, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "model_max_length": 1048576,
}  # fmt: skip
QWEN_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_value_head_dim": 128, "linear_key_head_dim": 128, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip
