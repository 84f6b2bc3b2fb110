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
