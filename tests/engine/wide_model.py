"""A model whose decode steps are bound by its recurrent states, for timing: random weights, layers of a large model.

    python tests/engine/wide_model.py OUT [--layers 4] [--hidden 64] [--dtype float32]

Mixers of Nemotron-3-Super's size (128 heads of 64 x 128, 8 groups: 4 MiB of fp32 state a sequence and layer), one
attention layer, and a narrow residual stream, so that the matrices are small beside the states, as they are for the
large batches of a large model spread over several GPUs. It writes no sensible text.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtllm_replayssm.models.checkpoint import convert

HEADS, HEAD_DIM, STATE, GROUPS, KERNEL = 128, 64, 128, 8, 4
VOCAB = 256


def hf_config(layers: int, hidden: int) -> dict[str, object]:
    """config.json of a Nemotron-H with ``layers`` mixers and one attention layer."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers + 1,
        "hybrid_override_pattern": "M" * layers + "*",
        "mamba_num_heads": HEADS,
        "mamba_head_dim": HEAD_DIM,
        "ssm_state_size": STATE,
        "n_groups": GROUPS,
        "conv_kernel": KERNEL,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": False,
        "intermediate_size": hidden,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def weights(layers: int, hidden: int) -> dict[str, torch.Tensor]:
    """Random weights under the names of the published checkpoints; decays and step sizes in their usual ranges."""
    generator = torch.Generator().manual_seed(0)
    inner, conv = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * GROUPS * STATE

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    made = {
        "backbone.embeddings.weight": matrix(VOCAB, hidden),
        "backbone.norm_f.weight": ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for i in range(layers):
        mixer = f"backbone.layers.{i}.mixer"
        made.update(
            {
                f"backbone.layers.{i}.norm.weight": ones(hidden),
                f"{mixer}.in_proj.weight": matrix(inner + conv + HEADS, hidden),
                f"{mixer}.out_proj.weight": matrix(hidden, inner),
                f"{mixer}.conv1d.weight": matrix(conv, KERNEL)[:, None].contiguous(),
                f"{mixer}.conv1d.bias": torch.zeros(conv, dtype=torch.bfloat16),
                f"{mixer}.A_log": (1 + 15 * torch.rand(HEADS, generator=generator)).log().to(torch.bfloat16),
                f"{mixer}.D": ones(HEADS),
                f"{mixer}.dt_bias": (torch.randn(HEADS, generator=generator) - 4).to(torch.bfloat16),
                f"{mixer}.norm.weight": ones(inner),
            }
        )
    mixer = f"backbone.layers.{layers}.mixer"
    made[f"backbone.layers.{layers}.norm.weight"] = ones(hidden)
    for name, shape in (("q", (256, hidden)), ("k", (64, hidden)), ("v", (64, hidden)), ("o", (hidden, 256))):
        made[f"{mixer}.{name}_proj.weight"] = matrix(*shape)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Write the checkpoint directory OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="mixers (%(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the residual stream (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / "config.json").write_text(json.dumps(hf_config(args.layers, args.hidden)), encoding="utf-8")
        save_file(weights(args.layers, args.hidden), source / "model.safetensors", {"format": "pt"})
        summary = convert(source, args.out, dtype=args.dtype, overwrite=True)
    print(f"{args.out}: {summary['layers']}, {summary['parameters']:,} parameters, {args.dtype}")


if __name__ == "__main__":
    main()
