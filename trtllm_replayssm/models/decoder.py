"""HybridDecoder: the one network of all hybrid models, and the list of the weights it needs.

Written against Ops alone; holds no weights and no state, so one decoder serves any interpreter and any batch.
"""

from __future__ import annotations

from ..errors import ReplayError
from ..ops.base import Ops, TensorT
from ..spec import GATED_DELTA, KIMI_DELTA, MAMBA2
from . import blocks
from .config import ATTENTION, MLP, MOE, STATEFUL_KINDS, HybridConfig

EMBEDDING = "embedding.weight"
FINAL_NORM = "final_norm.weight"
LM_HEAD = "lm_head.weight"


class HybridDecoder:
    """Embedding, the config's layers with pre-norm and residual, final norm, output projection.

    Raises:
        ReplayError: the config has mixture-of-experts layers.
    """

    def __init__(self, config: HybridConfig) -> None:
        if MOE in config.layers:
            count = config.layers.count(MOE)
            raise ReplayError(f"layers has {count} mixture-of-experts (MoE) layers; MoE is not supported yet")
        self.config = config

    def forward(self, ops: Ops[TensorT], input_ids: TensorT, *, all_logits: bool = False) -> TensorT:
        """Logits fp32 of the batch that ``ops`` was made for.

        Args:
            ops: an interpreter, holding weights, state and batch. Its state is advanced.
            input_ids: [tokens], integers in [0, vocab_size), packed like the batch.
            all_logits: in a scan, logits of every token instead of each row's last one.

        Returns:
            [tokens, vocab_size] in a step or with ``all_logits``, else [rows, vocab_size].
        """
        config = self.config
        x = ops.embedding(input_ids, EMBEDDING)
        layer = 0
        for i, kind in enumerate(config.layers):
            normed = ops.rms_norm(x, f"layers.{i}.norm.weight", config.norm_eps)
            x = ops.add(x, self._mixer(ops, kind, f"layers.{i}.mixer", layer, normed))
            layer += kind in STATEFUL_KINDS
        if not all_logits:
            x = ops.select_last(x)
        x = ops.rms_norm(x, FINAL_NORM, config.norm_eps)
        return ops.to_float32(ops.linear(x, EMBEDDING if config.tie_embeddings else LM_HEAD))

    def _mixer(self, ops: Ops[TensorT], kind: str, name: str, layer: int, u: TensorT) -> TensorT:
        if kind == MAMBA2:
            return blocks.mamba2(ops, self.config, name, layer, u)
        if kind == GATED_DELTA:
            return blocks.gated_delta(ops, self.config, name, layer, u)
        if kind == KIMI_DELTA:
            return blocks.kimi_delta(ops, self.config, name, layer, u)
        if kind == ATTENTION:
            attend = blocks.latent_attention if self.config.latent_rank else blocks.attention
            return attend(ops, self.config, name, layer, u)
        assert kind == MLP, kind
        return blocks.mlp(ops, self.config, name, u)


def weight_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the decoder of ``config`` reads, in network order.

    Raises:
        ReplayError: the config has mixture-of-experts layers.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i, kind in enumerate(HybridDecoder(config).config.layers):
        shapes[f"layers.{i}.norm.weight"] = (hidden,)
        for name, shape in _MIXER_SHAPES[kind](config).items():
            shapes[f"layers.{i}.mixer.{name}"] = shape
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def keeps_float32(name: str) -> bool:
    """Whether a weight stays fp32 in checkpoints of any dtype.

    Those are the norm weights and the A_log, D and dt_bias of the heads: small, and used in fp32 arithmetic.
    """
    return name.endswith(("norm.weight", ".A_log", ".D", ".dt_bias"))


def _projection(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def _recurrent_shapes(config: HybridConfig, norm_size: int, in_rows: int) -> dict[str, tuple[int, ...]]:
    heads = (config.ssm_heads,)
    shapes = _projection("in_proj", in_rows, config.hidden_size, config.mixer_bias)
    shapes["conv.weight"] = (config.conv_channels, config.conv_kernel)
    if config.conv_bias:
        shapes["conv.bias"] = (config.conv_channels,)
    shapes.update({"A_log": heads, "dt_bias": heads, "norm.weight": (norm_size,)})
    return {**shapes, **_projection("out_proj", config.hidden_size, config.ssm_inner_size, config.mixer_bias)}


def _mamba2_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    in_rows = config.ssm_inner_size + config.conv_channels + config.ssm_heads
    return {**_recurrent_shapes(config, config.ssm_inner_size, in_rows), "D": (config.ssm_heads,)}


def _gated_delta_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    in_rows = config.conv_channels + config.ssm_inner_size + 2 * config.ssm_heads
    return _recurrent_shapes(config, config.ssm_head_dim, in_rows)


def _kimi_delta_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    rank, heads = config.ssm_head_dim, config.ssm_heads
    shapes = _recurrent_shapes(config, rank, config.conv_channels + 2 * rank + heads)
    shapes["dt_bias"] = (heads, config.ssm_state_size)
    gates = {"f_proj.weight": heads * config.ssm_state_size, "g_proj.weight": config.ssm_inner_size}
    return {**shapes, **{name: (rows, rank) for name, rows in gates.items()}}


def _latent_attention_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.latent_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if config.latent_q_rank:
        shapes = {"q_down_proj.weight": (config.latent_q_rank, hidden), "q_norm.weight": (config.latent_q_rank,)}
    up_rows = heads * (config.head_dim - config.latent_shared_dim + config.latent_value_dim)
    return {
        **shapes,
        "q_proj.weight": (heads * config.head_dim, config.latent_q_rank or hidden),
        "kv_down_proj.weight": (rank + config.latent_shared_dim, hidden),
        "kv_norm.weight": (rank,),
        "kv_up_proj.weight": (up_rows, rank),
        "o_proj.weight": (hidden, heads * config.latent_value_dim),
    }


def _attention_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    if config.latent_rank:
        return _latent_attention_shapes(config)
    q_size = config.num_attention_heads * config.head_dim
    rows = q_size * (2 if config.attention_gate else 1) + 2 * config.num_key_value_heads * config.head_dim
    shapes = _projection("qkv_proj", rows, config.hidden_size, config.attention_bias)
    if config.qk_norm:
        shapes.update({"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)})
    return {**shapes, **_projection("o_proj", config.hidden_size, q_size, config.attention_bias)}


def _mlp_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    size, hidden = config.intermediate_size, config.hidden_size
    first = ("up_proj", size) if config.mlp_kind == "relu2" else ("gate_up_proj", 2 * size)
    return {**_projection(*first, hidden, config.mlp_bias), **_projection("down_proj", hidden, size, config.mlp_bias)}


_MIXER_SHAPES = {
    MAMBA2: _mamba2_shapes,
    GATED_DELTA: _gated_delta_shapes,
    KIMI_DELTA: _kimi_delta_shapes,
    ATTENTION: _attention_shapes,
    MLP: _mlp_shapes,
}
