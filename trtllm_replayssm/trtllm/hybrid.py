"""ReplayHybridForCausalLM: any model of models/ as a tensorrt_llm model. Importing this module needs tensorrt_llm.

The modules hold the weights under the names of our checkpoints; HybridDecoder emits the layers through TrtllmOps.
Inputs are those of the two stock models whose architecture strings the C++ runtime knows: RecurrentGemmaForCausalLM
where the model has attention, MambaForCausalLM where it has none.

Not for: speculative decoding, beam search, tensor or pipeline parallelism, quantised weights, LoRA, prompt tables,
padded input. Each is refused with a ReplayError.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ..errors import ReplayError, require
from ..models.checkpoint import read_replayssm, trtllm_config
from ..models.config import RECURRENT_KINDS, HybridConfig
from ..models.decoder import EMBEDDING, HybridDecoder, keeps_float32, weight_shapes
from . import budget, requirement
from .functional import Rows
from .network_ops import NetworkInputs, TrtllmOps, require_call_sizes, require_supported

_PretrainedModel: Any = requirement.module("models.modeling_utils").PretrainedModel
_functional = requirement.module("functional")
_layers = requirement.module("layers")
_common = requirement.module("_common")
_Module = requirement.module("module").Module
_Parameter = requirement.module("parameter").Parameter
_KVCacheType = requirement.module("bindings").KVCacheType
_trt = requirement.tensorrt()

#: Top-level keys of config.json that must say what the ``replayssm`` object says.
_TRUTHFUL_KEYS = (
    "dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_size",
    "rnn_hidden_size",
    "rnn_head_size",
    "rnn_conv_dim_size",
    "state_dtype",
    "architecture",
)
#: Head sizes that gpt_attention's decoding kernel is built for.
ATTENTION_HEAD_SIZES = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)


class ReplayHybridForCausalLM(_PretrainedModel):
    """A hybrid decoder over TensorRT-LLM's paged KV cache and state pools.

    Args:
        config: PretrainedConfig made from a config.json of ``trtllm-replayssm convert``.

    Attributes:
        hybrid: the HybridConfig under ``config.replayssm``. window: of every recurrent layer. pools: PoolShape.

    Raises:
        ReplayError: no ``replayssm`` object, top-level keys that contradict it, a slot that does not fit the state
            pools, or a feature that the module docstring rules out.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        ours = getattr(config, "replayssm", None)
        if not isinstance(ours, Mapping):
            raise ReplayError("config has no replayssm object; make the checkpoint with `trtllm-replayssm convert`")
        self.hybrid, self.window = read_replayssm(ours, "config")
        _check_config(config, self.hybrid, self.window)
        self.pools = budget.checked(self.hybrid, self.window, config.state_size, config.conv_kernel)
        self.gather_context_logits = False
        self._logits_dtype = config.logits_dtype
        _add_modules(self, self.hybrid)

    def __post_init__(self) -> None:
        """Nothing: the stock hook quantises modules and fuses stock layers."""

    def load(self, weights: dict[str, Any], from_pruned: bool = False) -> None:
        """Take ``weights`` (tensors by our names). Raises ReplayError for a missing, unknown or misshapen one."""
        shapes = weight_shapes(self.hybrid)
        missing, surplus = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
        require(not missing, f"weight {', '.join(missing[:5])} is missing")
        require(not surplus, f"weight {', '.join(surplus[:5])} is not one that the config has")
        for name, shape in shapes.items():
            got = tuple(weights[name].shape)
            require(got == shape, f"weight {name} has shape {list(got)}; the config implies {list(shape)}")
        super().load(weights, from_pruned=from_pruned)

    def forward(self, input_ids: Any, inputs: NetworkInputs) -> Any:
        """Emit the model; marks ``logits`` [rows, vocab] ([tokens, vocab] with gather_context_logits) as output."""
        spec = self.hybrid.recurrence_spec(window=self.window)
        ops = TrtllmOps(self, self.hybrid, spec, self.hybrid.conv_spec(), inputs)
        decoder = HybridDecoder(self.hybrid)
        logits = ops.tensor(decoder.forward(ops, input_ids, all_logits=self.gather_context_logits))
        logits.mark_output("logits", self._logits_dtype)
        return logits

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int,
        use_cache: bool,
        max_beam_width: int = 1,
        opt_num_tokens: int | None = None,
        opt_batch_size: int = 0,
        prompt_embedding_table_size: int = 0,
        max_draft_len: int = 0,
        gather_context_logits: bool = False,
        lora_target_modules: list[str] | None = None,
        speculative_decoding_draft_tokens_external: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        """Declare the network inputs; the arguments of :meth:`forward`.

        Raises:
            ReplayError: an option that the module docstring rules out, or more rows or tokens than the plugins take.
        """
        refused = {
            "max_beam_width": max_beam_width != 1,
            "max_draft_len": max_draft_len != 0,
            "speculative_decoding_draft_tokens_external": speculative_decoding_draft_tokens_external,
            "prompt_embedding_table_size": prompt_embedding_table_size != 0,
            "lora_target_modules": bool(lora_target_modules),
            **{name: bool(value) for name, value in others.items() if name != "gather_generation_logits"},
        }
        wrong = [name for name, bad in refused.items() if bad]
        require(not wrong, f"{', '.join(wrong)}: ReplayHybridForCausalLM does not have that")
        require(use_cache, "kv_cache_type is disabled; ReplayHybridForCausalLM decodes and needs paged")
        require_call_sizes(max_batch_size, max_num_tokens)
        flags = _checked_plugin_config(bool(self.hybrid.attention_layers))
        self.gather_context_logits = bool(gather_context_logits)
        profiles, ranges = self.get_profiles_ranges(
            max_batch_size=max_batch_size,
            max_beam_width=1,
            max_input_len=max_input_len,
            max_num_tokens=max_num_tokens,
            max_draft_len=0,
            opt_batch_size=opt_batch_size,
            opt_num_tokens=opt_num_tokens,
            enable_ctx_gen_opt_profiles=False,
            multiple_profiles=flags.multiple_profiles,
            kv_cache_type=_KVCacheType.PAGED,
        )
        input_ids = _input("input_ids", "int32", num_tokens=ranges["num_tokens_range"])
        attention: dict[str, Any] = {}
        if self.hybrid.attention_layers:
            _input("position_ids", "int32", position_ids_num_tokens_range=ranges["num_tokens_range"])
            attention = self._attention_inputs(max_batch_size, max_input_len, max_seq_len, profiles)
            host = {name: attention[name] for name in ("host_request_types", "host_context_lengths")}
        else:
            names = ("host_request_types", "host_context_lengths")
            host = {name: _input(name, "int32", batch_size=ranges["bb_range"]) for name in names}
        states = {
            layer: tuple(_pointer(f"{kind}_state_ptr_{layer}", profiles) for kind in ("conv", "rnn"))
            for layer in self.hybrid.recurrent_layers
        }
        rows = Rows(
            last_token_ids=_input("last_token_ids", "int32", batch_size_last_token_ids=ranges["bbd_range"]),
            slot_mapping=_input("slot_mapping", "int32", batch_size=ranges["bb_range"]),
            **host,
        )
        return {"input_ids": input_ids, "inputs": NetworkInputs(rows, states, attention, self.pools)}

    def _attention_inputs(
        self, max_batch_size: int, max_input_len: int, max_seq_len: int, profiles: int
    ) -> dict[str, Any]:
        """The attention inputs as gpt_attention's arguments.

        The attention layers are counted among themselves here: with a paged KV cache no input is named by layer, and
        the stock helper mixes up the two counts where the first attention layer comes late.
        """
        flags = _common.default_net().plugin_config
        made = self.prepare_attention_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=1,
            max_input_len=max_input_len,
            max_seq_len=max_seq_len,
            num_kv_heads=self.hybrid.num_key_value_heads,
            head_size=self.hybrid.head_dim,
            num_layers=len(self.hybrid.attention_layers),
            kv_dtype=getattr(_trt, {"bfloat16": "bfloat16", "float16": "float16"}.get(self.hybrid.dtype, "float32")),
            kv_cache_type=_KVCacheType.PAGED,
            num_profiles=profiles,
            remove_input_padding=True,
            use_gpt_attention_plugin=True,
            tokens_per_block=flags.tokens_per_block,
            mapping=self.config.mapping,
        )
        names = (
            "sequence_length",
            "host_past_key_value_lengths",
            "host_max_attention_window_sizes",
            "host_sink_token_length",
            "context_lengths",
            "cache_indirection",
            "host_request_types",
            "host_context_lengths",
            "kv_cache_block_offsets",
            "host_kv_cache_block_offsets",
            "host_kv_cache_pool_pointers",
            "host_kv_cache_pool_mapping",
            "host_runtime_perf_knobs",
            "host_context_progress",
        )
        return {**{name: made[name] for name in names}, "max_context_length": max_input_len}


def _check_config(config: Any, hybrid: HybridConfig, window: int) -> None:
    require_supported(hybrid)
    implied = trtllm_config(hybrid, window)
    for key in _TRUTHFUL_KEYS:
        value = getattr(config, key, None)
        require(value == implied[key], f"config: {key} is {value!r}; the replayssm object implies {implied[key]!r}")
    world = config.mapping.world_size
    require(world == 1, f"mapping.world_size is {world}; ReplayHybridForCausalLM runs on one GPU")
    for name in ("quant_algo", "kv_cache_quant_algo"):
        algorithm = getattr(config.quantization, name)
        require(algorithm is None, f"quantization.{name} is {algorithm}; ReplayHybridForCausalLM is not quantised")
    require(
        not hybrid.attention_layers or hybrid.head_dim in ATTENTION_HEAD_SIZES,
        f"head_dim is {hybrid.head_dim}; TensorRT-LLM's attention has {', '.join(map(str, ATTENTION_HEAD_SIZES))}",
    )


def _checked_plugin_config(attention: bool) -> Any:
    """The network's plugin config. Raises ReplayError where it is not the one that C++ in-flight batching needs."""
    flags = _common.default_net().plugin_config
    needed = {"remove_input_padding": True, "paged_state": True, "mamba_conv1d_plugin": "auto"}
    if attention:
        needed |= {"gpt_attention_plugin": "auto", "paged_kv_cache": True}
    for name, value in needed.items():
        have = getattr(flags, name)
        word = "enable" if value is True else value
        require(bool(have), f"plugin_config.{name} is {have!r}; ReplayHybridForCausalLM needs it: --{name} {word}")
    return flags


def _input(name: str, dtype: str, **ranges: Any) -> Any:
    """A network input of one dynamic axis, whose name and range per profile is the keyword argument."""
    return _functional.Tensor(name=name, dtype=getattr(_trt, dtype), shape=[-1], dim_range=OrderedDict(ranges))


def _pointer(name: str, profiles: int) -> Any:
    """A network input int64 [1]: the address of a layer's pool."""
    one = OrderedDict(buffer_count=[1] * profiles)
    return _functional.Tensor(name=name, dtype=_trt.int64, shape=[1], dim_range=one)


def _add_modules(model: Any, hybrid: HybridConfig) -> None:
    """Modules and parameters of ``hybrid`` under their weight names."""
    assert set(hybrid.layers) & set(RECURRENT_KINDS)
    shapes = weight_shapes(hybrid)
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        dtype = "float32" if keeps_float32(name) else hybrid.dtype
        if name == EMBEDDING:
            _place(model, path, _layers.Embedding(*shape, dtype=dtype))
        elif leaf == "weight" and len(shape) == 2 and not path.endswith(".conv"):
            bias = f"{path}.bias" in shapes
            _place(model, path, _layers.ColumnLinear(shape[1], shape[0], bias=bias, dtype=dtype, gather_output=False))
        elif not (leaf == "bias" and len(shapes[f"{path}.weight"]) == 2 and not path.endswith(".conv")):
            setattr(_place(model, path), leaf, _Parameter(shape=shape, dtype=dtype))


def _place(model: Any, path: str, module: Any = None) -> Any:
    """The Module at ``path``, made of empty Modules where it is not there; ``module`` becomes the last one."""
    *parents, last = path.split(".")
    for part in parents:
        model = _child(model, part)
    if module is None:
        return _child(model, last)
    setattr(model, last, module)
    return module


def _child(model: Any, name: str) -> Any:
    children = dict(model.named_children())
    if name not in children:
        setattr(model, name, _Module())
    return getattr(model, name)
