"""read_hf_config: every published form of config.json, and one-line errors for the rest.

Oracles: parameter counts on NVIDIA's model card and of transformers' models on the meta device; layer counts and state
sizes published for the models; configs that transformers writes for the same model in another form.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import oracles
import pytest
from published_configs import KIMI_48B

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.layout import SlotLayout
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import HybridDecoder, weight_shapes
from trtllm_replayssm.models.fields import read_json
from trtllm_replayssm.models.hf import read_hf_config

NANO_4B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 3136,
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    "num_hidden_layers": 42,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12544,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
SUPER: dict[str, Any] = {
    **NANO_4B,
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "num_hidden_layers": 88,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "time_step_limit": [0.0, math.inf],
}


def read(folder: Path, data: dict[str, Any], **options: Any) -> HybridConfig:
    """Write config.json as Python does (Infinity included) and read it."""
    (folder / "config.json").write_text(json.dumps(data))
    return read_hf_config(folder, **options)


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in names}


def parameters(config: HybridConfig) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def test_nano_4b_has_the_parameters_of_its_model_card(tmp_path: Path) -> None:
    config = read(tmp_path, NANO_4B)
    assert [config.layers.count(kind) for kind in ("mamba2", "attention", "mlp")] == [21, 4, 17]
    assert parameters(config) == 3_973_556_832
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((2,), 1, 0)
    assert config.rotary_dim == 0 and (config.dt_min, config.dt_max) == (0.0, math.inf)
    assert SlotLayout(config.recurrence_spec())["state"].nbytes == 3_932_160


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 26_895_998_464),
        (
            {
                "hidden_size": 2560,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "intermediate_size": 9216,
                "linear_num_value_heads": 32,
                "tie_word_embeddings": True,
            },
            4_205_751_296,
        ),
    ],
    ids=["Qwen3.5-27B", "Qwen3.5-4B"],
)
def test_qwen_sizes(tmp_path: Path, changes: dict[str, Any], count: int) -> None:
    config = read(tmp_path, {**QWEN_27B, **changes})
    assert parameters(config) == count
    assert config.layers[:8] == ("gated_delta", "mlp") * 3 + ("attention", "mlp")
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.attention_layers == tuple(range(3, config.layers.count("mlp"), 4))


@pytest.mark.parametrize("kind", oracles.KINDS)
def test_parameter_count_equals_transformers(kind: str, tmp_path: Path) -> None:
    config = read_hf_config(oracles.tiny_hf_dir(kind, tmp_path))
    assert parameters(config) == sum(p.numel() for p in oracles.hf_model(kind).parameters())
    assert HybridConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


NAMES = {
    "published": {"M": "mamba", "*": "attention", "-": "mlp"},
    "transformers": {"M": "linear_attention", "*": "full_attention", "-": "mlp"},
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("field", ["layers_block_type", "layer_types"])
def test_layer_lists_equal_the_pattern(tmp_path: Path, names: str, field: str) -> None:
    want = read(tmp_path, NANO_4B)
    listed = [NAMES[names][sign] for sign in NANO_4B["hybrid_override_pattern"]]
    bare = without(NANO_4B, "hybrid_override_pattern", "num_hidden_layers")
    assert read(tmp_path, {**bare, field: listed}) == want
    assert read(tmp_path, {**NANO_4B, field: listed}) == want
    assert read(tmp_path, {**bare, field: listed, "num_hidden_layers": 52}) == want, "not used beside a list"


TIME_STEP_LIMITS = [[0.0, math.inf], [0.0, 1e308], [0.0, {"__float__": "Infinity"}], None]


@pytest.mark.parametrize("limit", TIME_STEP_LIMITS, ids=str)
def test_time_step_limit_without_a_limit(tmp_path: Path, limit: Any) -> None:
    data = NANO_4B if limit is None else {**NANO_4B, "time_step_limit": limit}
    config = read(tmp_path, {**data, "time_step_min": 0.001, "time_step_max": 0.1})
    assert config == read(tmp_path, NANO_4B)
    assert config.recurrence_spec().dt_max == math.inf


def test_time_step_limit_that_limits(tmp_path: Path) -> None:
    config = read(tmp_path, {**NANO_4B, "time_step_limit": [0.002, 3]})
    assert (config.recurrence_spec().dt_min, config.recurrence_spec().dt_max) == (0.002, 3.0)


def test_qwen_layer_types_and_wrapper(tmp_path: Path) -> None:
    want = read(tmp_path, {**QWEN_27B, "tie_word_embeddings": True})
    listed = (["linear_attention"] * 3 + ["full_attention"]) * 16
    assert read(tmp_path, {**QWEN_27B, "tie_word_embeddings": True, "layer_types": listed}) == want
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": QWEN_27B,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 27},
    }
    assert read(tmp_path, wrapper) == want


def test_qwen_rope_in_older_form(tmp_path: Path) -> None:
    beside = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None}
    old = {**without(QWEN_27B, "rope_parameters"), **beside}
    assert read(tmp_path, old) == read(tmp_path, QWEN_27B)


def test_stop_tokens_of_generation_config_join(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 2]}))
    assert read(tmp_path, NANO_4B).eos_token_ids == (2, 11)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, {**NANO_4B, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "torch.float16"}, "float16"), ({"torch_dtype": "float8"}, "bfloat16")],
)
def test_dtype(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    assert read(tmp_path, {**NANO_4B, **changes}).dtype == dtype
    assert read(tmp_path, {**without(NANO_4B, "torch_dtype"), "dtype": dtype}).dtype == dtype


def test_moe_is_refused_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"40 of 88 layers are mixtures of experts \(MoE\); MoE is not supported yet"):
        read(tmp_path, SUPER)
    config = read(tmp_path, SUPER, allow_moe=True)
    assert [config.layers.count(kind) for kind in ("mamba2", "attention", "moe")] == [40, 8, 40]
    assert len(config.recurrent_layers) * SlotLayout(config.recurrence_spec())["state"].nbytes == 160 << 20
    with pytest.raises(ReplayError, match="layers has 40 mixture-of-experts"):
        HybridDecoder(config)


def test_qwen_moe(tmp_path: Path) -> None:
    sparse = {**QWEN_27B, "model_type": "qwen3_next", "num_experts": 512, "decoder_sparse_step": 2}
    with pytest.raises(ReplayError, match="32 of 128 layers are mixtures of experts"):
        read(tmp_path, sparse)
    assert "moe" not in read(tmp_path, {**sparse, "mlp_only_layers": list(range(64))}).layers
    wrapper = {"model_type": "qwen3_5_moe", "text_config": without(QWEN_27B, "intermediate_size")}
    config = read(tmp_path, wrapper, allow_moe=True)
    assert config.layers.count("moe") == 64 and config.intermediate_size == 0


def test_kimi_published(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"26 of 54 layers are mixtures of experts \(MoE\); MoE is not supported yet"):
        read(tmp_path, KIMI_48B)
    config = read(tmp_path, KIMI_48B, allow_moe=True)
    assert [config.layers.count(kind) for kind in ("kimi_delta", "attention", "mlp", "moe")] == [20, 7, 1, 26]
    assert [i // 2 + 1 for i, kind in enumerate(config.layers) if kind == "attention"] == [4, 8, 12, 16, 20, 24, 27]
    assert SlotLayout(config.recurrence_spec())["state"].nbytes == 2_097_152
    assert (config.head_dim, config.latent_rank, config.latent_shared_dim, config.latent_q_rank) == (192, 512, 64, 0)
    spec = config.recurrence_spec()
    assert (spec.kind, spec.gate, spec.nheads, spec.ngroups, spec.headdim, spec.dstate) == (
        "kimi_delta", "softplus", 32, 32, 128, 128)  # fmt: skip


def test_kimi_forms_are_one(tmp_path: Path) -> None:
    """The published form, without experts, and the form that transformers writes for it."""
    import transformers

    dense = {**KIMI_48B, "first_k_dense_replace": 27}
    want = read(tmp_path, dense)
    assert "moe" not in want.layers and read(tmp_path, {**KIMI_48B, "num_experts": None}) == want
    written = transformers.KimiLinearConfig(**without(dense, "model_type"), pad_token_id=None)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    assert read(tmp_path, {**written.to_dict(), **tokens, "linear_attn_config": None}) == want
    bounded = dataclasses.replace(want, gate="bounded", gate_lower_bound=-4.0).recurrence_spec()
    assert (bounded.gate, bounded.gate_lower_bound) == ("bounded", -4.0)


KIMI_ERRORS = [
    ({"gate_lower_bound": -5.0}, "gate_lower_bound is -5.0; only None is supported"),
    ({"use_full_rank_gate": True}, "use_full_rank_gate is True; only False is supported"),
    ({"hidden_act": "situ"}, "hidden_act is 'situ'; only silu is supported"),
    ({"mla_use_nope": False}, "mla_use_nope is False; only True is supported"),
    ({"attention_bias": True}, "attention_bias is True; only False is supported"),
    ({"linear_attn_config": [1]}, r"linear_attn_config is \[1\]; it must be an object"),
    (
        {"linear_attn_config": {**KIMI_48B["linear_attn_config"], "kda_layers": [1, 2, 3]}},
        "full_attn_layers and kda_layers must name each of the layers 1 to 27 once",
    ),
    ({"linear_attn_config": None}, "config.json: layer_types is missing"),
    ({"linear_attn_config": None, "layer_types": ["kda"]}, "layer_types holds kda; known types are linear_attention"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries; num_hidden_layers is 27"),
    ({"mlp_layer_types": ["none"]}, "mlp_layer_types holds none; known types are dense, sparse"),
    ({"moe_layer_freq": 0}, "moe_layer_freq is 0; it must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be at least 1"),
    (
        {"qk_rope_head_dim": 0},
        r"config.json: qk_rope_head_dim is 0; it must be a whole number from 1 to 127 \(less than qk_nope_head_dim",
    ),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8; with kv_lora_rank it must be num_attention_heads"),
    ({"v_head_dim": None}, "v_head_dim is missing"),
]


@pytest.mark.parametrize(("changes", "message"), KIMI_ERRORS, ids=[m for _, m in KIMI_ERRORS])
def test_kimi_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message) as caught:
        read(tmp_path, {**KIMI_48B, "first_k_dense_replace": 27, **changes})
    assert "\n" not in str(caught.value)


NEMOTRON_ERRORS = [
    ({"model_type": "llama", "architectures": ["X"]}, r"model_type is 'llama' \(architectures \['X'\]\); supported"),
    ({"model_type": None}, "model_type is None"),
    ({"hidden_size": None}, "config.json: hidden_size is missing"),
    ({"hidden_size": 3136.5}, "config.json: hidden_size is 3136.5; it must be a whole number"),
    ({"hidden_size": True}, "config.json: hidden_size is True; it must be a whole number"),
    ({"n_groups": None, "mamba_n_groups": "8"}, "config.json: mamba_n_groups is '8'"),
    ({"use_bias": 1}, "config.json: use_bias is 1; it must be true or false"),
    ({"layer_norm_epsilon": "x"}, "config.json: layer_norm_epsilon is 'x'; it must be a number"),
    ({"layer_norm_epsilon": math.nan}, "config.json: layer_norm_epsilon is nan"),
    ({"mlp_hidden_act": "silu"}, "config.json: mlp_hidden_act is 'silu'; only relu2 is supported"),
    ({"sliding_window": 128}, "config.json: sliding_window is 128; only None is supported"),
    ({"hybrid_override_pattern": None}, "neither layers_block_type nor hybrid_override_pattern"),
    ({"hybrid_override_pattern": 3}, "hybrid_override_pattern is 3; it must be a string"),
    ({"hybrid_override_pattern": "MXM"}, "hybrid_override_pattern holds 'X'; known signs are M, "),
    ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern has 2 layers; num_hidden_layers is 42"),
    ({"layers_block_type": ["mamba"]}, "layers_block_type and hybrid_override_pattern list different layers"),
    ({"layers_block_type": ["rnn"]}, "layers_block_type holds rnn; known types are mamba"),
    ({"layers_block_type": "mamba"}, "layers_block_type is 'mamba'; it must be a list of strings"),
    ({"time_step_limit": [0.1]}, r"time_step_limit is \[0.1\]; it must be \[least, most\]"),
    ({"time_step_limit": [0.0, {"__float__": "much"}]}, "time_step_limit is"),
    ({"time_step_limit": [2.0, 1.0]}, r"time_step_limit\[0\] is 2.0 with time_step_limit\[1\] 1.0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is there; quantized checkpoints are not supported"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'; it must be a whole number or a list of them"),
    ({"eos_token_id": 131072}, ": eos_token_id is 131072; it must be a whole number from 0 to 131071"),
    ({"mamba_head_dim": 7}, "config.json: mamba_head_dim is 7"),
    ({"n_groups": 7}, "n_groups is 7; it must divide mamba_num_heads, which is 96"),
    ({"num_key_value_heads": 7}, "num_key_value_heads is 7; it must divide num_attention_heads, which is 40"),
    ({"mamba_ssm_cache_dtype": "int8"}, "config.json: mamba_ssm_cache_dtype is 'int8'"),
    ({"text_config": 3}, "text_config is 3; it must be an object"),
]
QWEN_ERRORS = [
    ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries; num_hidden_layers is 64"),
    ({"layer_types": ["mamba"]}, "layer_types holds mamba; known types are linear_attention, full_attention"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0; it must be at least 1"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be at least 1"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type is 'yarn'; only default, mrope"),
    ({"rope_parameters": {"type": "linear"}}, "rope_parameters: rope_type is 'linear'"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; only silu, swish is supported"),
    ({"attn_output_gate": False}, "attn_output_gate is False; only True is supported"),
    ({"head_dim": 252}, r"head_dim \* partial_rotary_factor is 63; it must be even"),
    ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
]


KIMI_DENSE = {**KIMI_48B, "first_k_dense_replace": 27}
KIMI_BESIDE = {
    **without(KIMI_DENSE, "linear_attn_config"),
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 9,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
#: Sizes that HybridConfig or a spec refuses, by the key that the family has for them: a config, and its keys.
SIZES = {
    "nemotron_h": (NANO_4B, ["mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel"]),
    "qwen3_5": (
        QWEN_27B,
        [
            *("linear_num_value_heads", "linear_num_key_heads", "linear_value_head_dim", "linear_key_head_dim"),
            *("linear_conv_kernel_dim", "num_attention_heads", "num_key_value_heads", "head_dim"),
        ],
    ),
    "kimi published": (
        KIMI_DENSE,
        ["num_heads", "head_dim", "short_conv_kernel_size", "v_head_dim", "model_max_length"],
    ),
    "kimi of transformers": (KIMI_BESIDE, ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"]),
}
COMMON_SIZES = ["hidden_size", "intermediate_size", "vocab_size"]
INTERNAL = (
    r"\b(ssm_\w*(?<!ssm_state_size)|nheads|ngroups|headdim|dstate|kernel|channels|latent_\w+|max_positions|norm_eps)\b"
)
ZEROES = [(name, key) for name, (_, keys) in SIZES.items() for key in [*keys, *COMMON_SIZES]]
ZEROES += [("nemotron_h", "max_position_embeddings"), ("nemotron_h", "layer_norm_epsilon"), ("qwen3_5", "rms_norm_eps")]


@pytest.mark.parametrize(("name", "key"), ZEROES)
def test_errors_name_the_keys_of_the_file(tmp_path: Path, name: str, key: str) -> None:
    data = dict(SIZES[name][0])
    inner = data.get("linear_attn_config", {})
    if key in inner:
        data["linear_attn_config"] = {**inner, key: 0}
    else:
        assert key in data or key.endswith("eps") or key == "layer_norm_epsilon"
        data[key] = 0
    with pytest.raises(ReplayError) as caught:
        read(tmp_path, data)
    prefix, message = f"{tmp_path / 'config.json'}: ", str(caught.value)
    shown = f"linear_attn_config.{key}" if key in inner else key
    assert message.startswith(f"{prefix}{shown} is 0"), message
    assert not re.search(INTERNAL, message), message


def test_errors_of_derived_sizes_name_their_keys(tmp_path: Path) -> None:
    for data, changes, message in (
        (NANO_4B, {"mamba_num_heads": 1000, "mamba_head_dim": 80},
         "mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size is 82048; it must be"),
        (NANO_4B, {"hybrid_override_pattern": "*-", "num_hidden_layers": 2},
         "hybrid_override_pattern has no recurrent layer; at least one must be M"),
        (NANO_4B, {"hybrid_override_pattern": None, "layers_block_type": ["mlp"]},
         "layers_block_type has no recurrent layer; at least one must be mamba"),
        (QWEN_27B, {"full_attention_interval": 1},
         "full_attention_interval has no recurrent layer; at least one must be linear_attention"),
        (QWEN_27B, {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        (QWEN_27B, {"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype is 'int8'; it must be one of"),
        (KIMI_DENSE, {"qk_nope_head_dim": 5000}, "qk_nope_head_dim + qk_rope_head_dim is 5064; it must be"),
    ):  # fmt: skip
        with pytest.raises(ReplayError) as caught:
            read(tmp_path, {**data, **changes})
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


@pytest.mark.parametrize(("changes", "message"), NEMOTRON_ERRORS, ids=[m for _, m in NEMOTRON_ERRORS])
def test_nemotron_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message) as caught:
        read(tmp_path, {**NANO_4B, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), QWEN_ERRORS, ids=[m for _, m in QWEN_ERRORS])
def test_qwen_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message) as caught:
        read(tmp_path, {**QWEN_27B, **changes})
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    with pytest.raises(ReplayError, match="nowhere is not a directory; give one that holds a downloaded Hugging"):
        read_hf_config(tmp_path / "nowhere")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "holds a JSON list; it must be an object"),
        ("\xff", "JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"model_type": ["nemotron_h"]}', r"model_type is \['nemotron_h'\]"),
        ('{"model_type": {}}', "model_type is {}"),
    ):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ReplayError, match=message):
            read_hf_config(tmp_path)


CONFIG_ERRORS = [
    ({"family": "llama"}, "family is 'llama'; it must be one of nemotron_h"),
    ({"layers": ()}, "layers is empty"),
    ({"layers": ("mlp",)}, "layers has no recurrent layer"),
    ({"layers": ("mamba2", "gated_delta")}, "layers mixes gated_delta and mamba2"),
    ({"layers": ("mamba2", "lstm")}, r"layers\[1\] is 'lstm'"),
    ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be a positive number"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"rotary_dim": 3}, "rotary_dim is 3; it must be even"),
    ({"rotary_dim": 130}, r"rotary_dim is 130; it must be a whole number from 0 to 128 \(head_dim\)"),
    ({"layers": ("gated_delta",), "conv_bias": True}, "conv_bias is True for gated_delta layers"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"latent_value_dim": 8}, "latent_value_dim is 8 with latent_rank 0; it applies to latent attention only"),
    ({"latent_rank": -1}, "latent_rank is -1"),
    ({"gate": "bounded"}, "gate is 'bounded' for kind mamba2; it applies to kimi_delta only"),
    (
        {"latent_rank": 8, "latent_shared_dim": 8, "latent_value_dim": 8, "num_key_value_heads": 40, "qk_norm": True},
        "qk_norm is True with latent_rank 8; latent attention has none",
    ),
    (
        {"layers": ("kimi_delta",), "conv_bias": False, "gate": "tanh"},
        "gate is 'tanh'; it must be one of softplus, bounded",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_ERRORS, ids=[m for _, m in CONFIG_ERRORS])
def test_hybrid_config_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    good = read(tmp_path, NANO_4B).to_dict()
    with pytest.raises(ReplayError, match=message):
        HybridConfig.from_dict({**good, **changes})


def test_from_dict_errors(tmp_path: Path) -> None:
    good = read(tmp_path, NANO_4B).to_dict()
    for data, message in (
        ({**good, "colour": 1}, "HybridConfig has no field colour"),
        (without(good, "layers"), "HybridConfig needs layers"),
        ({**good, "layers": "M-"}, "layers is 'M-'; it must be a list"),
        ([], "HybridConfig data is list"),
    ):
        with pytest.raises(ReplayError, match=message):
            HybridConfig.from_dict(data)  # type: ignore[arg-type]


def test_read_json_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
