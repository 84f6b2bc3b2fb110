"""ReplayHybridForCausalLM against the recorded stand-in of tensorrt_llm 1.2.1 (tests/recorded_trtllm/README.md).

- Input and output names, shapes, types: those that GenerationSession demands and the C++ executor offers.
- Numbers: the recorded network, run by an interpreter over pools with TensorRT-LLM's strides and full of garbage,
  against TorchOps on the same weights: prompts of mixed length, 40 steps (several flushes at window 5), a slot used
  again. fp32: 1e-5 of the largest logit (sums in another order; seen 2e-6). 16 bits: 8 eps (attention's
  probabilities are rounded elsewhere; seen 0.013 and 0.002).
- Everything that the class refuses. Teeth: a wrong weight or a wrong stride must show.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import torch
from recorded_trtllm import recorded
from recorded_trtllm.interpreter import Interpreter
from trtllm_cases import CASES, VOCAB_SIZE, make_config, make_weights

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.models.checkpoint import trtllm_config
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import weight_shapes
from trtllm_replayssm.runtime.state import Batch
from trtllm_replayssm.trtllm import budget

TOLERANCE = {"float32": 1e-5, "bfloat16": 8 * 2**-8, "float16": 8 * 2**-11}
SLOTS = 5
WINDOW = 5


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with recorded.installed() as found:
        yield found


def pretrained(config: HybridConfig, window: int = WINDOW, **changes: Any) -> Any:
    from tensorrt_llm.models import PretrainedConfig

    return PretrainedConfig.from_dict({**trtllm_config(config, window), **changes})


def emit(llm: Any, config: HybridConfig, weights: dict[str, torch.Tensor], window: int = WINDOW, **options: Any) -> Any:
    """The recorded network of the model, by way of the recorded builder."""
    from tensorrt_llm.builder import BuildConfig, build

    model = llm.model_class(pretrained(config, window))
    model.load(dict(weights))
    return build(model, BuildConfig(max_batch_size=4, max_input_len=64, max_seq_len=256, **options)).network


class Engine:
    """The recorded network with the inputs that TensorRT-LLM's runtime gives it."""

    def __init__(self, network: Any, config: HybridConfig, window: int = WINDOW) -> None:
        self.network = network.trt_network
        self.interpreter = Interpreter(self.network)
        pools = budget.needed(config, window)
        self.memory = {}
        for layer in config.recurrent_layers:
            for kind, stride in (("conv", pools.conv_stride), ("rnn", pools.state_stride)):
                garbage = torch.randint(0, 256, (SLOTS, stride), dtype=torch.uint8)
                self.memory[f"{kind}_state_ptr_{layer}"] = garbage

    def run(self, slots: list[int], ids: list[list[int]], past: list[int] | None = None) -> torch.Tensor:
        """Logits [rows, vocab]: a context call without ``past``, else one generation token per row."""
        context, rows = past is None, len(slots)
        lengths = [len(row) for row in ids]
        before = [0] * rows if past is None else past
        int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        known = {
            "input_ids": int32([t for row in ids for t in row]),
            "position_ids": int32([b + i for b, n in zip(before, lengths, strict=True) for i in range(n)]),
            "last_token_ids": int32(lengths).cumsum(0).int(),
            "slot_mapping": int32(slots),
            "host_request_types": int32([int(not context)] * rows),
            "host_context_lengths": int32(lengths if context else before),
            "context_lengths": int32(lengths if context else before),
            "sequence_length": int32([b + n for b, n in zip(before, lengths, strict=True)]),
            "host_past_key_value_lengths": int32(before),
            "kv_cache_block_offsets": int32(slots).view(1, rows, 1, 1).expand(1, rows, 2, 1),
            "cache_indirection": torch.zeros(rows, 1, 256, dtype=torch.int32),
            "host_sink_token_length": int32([0]),
            "host_runtime_perf_knobs": torch.full((16,), -1, dtype=torch.int64),
            "host_context_progress": torch.zeros(1, dtype=torch.int64),
            "host_kv_cache_pool_pointers": torch.zeros(1, 2, dtype=torch.int64),
        }
        known["host_kv_cache_block_offsets"] = known["kv_cache_block_offsets"]
        inputs: dict[str, torch.Tensor] = {}
        for name, tensor in self.network.inputs.items():
            found = self.memory.get(name, known.get(name))
            inputs[name] = torch.zeros(tensor.shape, dtype=torch.int32) if found is None else found
        with torch.inference_mode():
            return self.interpreter.run(inputs)["logits"]


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return oracles.gap(ours, theirs) / float(theirs.abs().max())


def compare(engine: Engine, runner: oracles.Runner, steps: int = 40) -> float:
    """Largest relative logit gap over a batch of prompts, steps, and a second prompt in a used slot."""
    slots, prompts = [2, 0, 3], [oracles.sequence(n, n, VOCAB_SIZE) for n in (5, 1, 19)]
    torch_scan = runner.scan(slots, prompts)
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    worst = relative_gap(engine.run(slots, prompts), torch_scan[ends])
    past = [len(p) for p in prompts]
    tokens = [[t] for t in oracles.sequence(3, 7, VOCAB_SIZE)]
    for i in range(steps):
        if i == steps // 2:
            prompt = oracles.sequence(4, 99, VOCAB_SIZE)
            again = runner.scan([slots[1]], [prompt])[-1:]
            worst = max(worst, relative_gap(engine.run([slots[1]], [prompt]), again))
            past[1] = 4
        expected = runner.forward(Batch.step(slots, past), [t for row in tokens for t in row])
        worst = max(worst, relative_gap(engine.run(slots, tokens, past), expected))
        tokens = [[int(t)] for t in expected.argmax(-1)]
        past = [p + 1 for p in past]
    return worst


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_numbers(llm: Any, case: str, dtype: str) -> None:
    config = make_config(case, dtype)
    weights = make_weights(config)
    engine = Engine(emit(llm, config, weights), config)
    runner = oracles.Runner(config, weights, window=WINDOW, slots=SLOTS, spec_len=1, dtype=dtype)
    assert compare(engine, runner) < TOLERANCE[dtype]


def test_kimi_delta_without_attention(llm: Any) -> None:
    config = make_config("mamba2", family="kimi_linear", layers=("kimi_delta", "mlp", "kimi_delta"), ssm_groups=4,
                         mlp_kind="swiglu", conv_bias=False)  # fmt: skip
    weights = make_weights(config)
    engine = Engine(emit(llm, config, weights), config)
    runner = oracles.Runner(config, weights, window=WINDOW, slots=SLOTS, spec_len=1)
    assert compare(engine, runner, steps=12) < TOLERANCE["float32"]


def test_teeth(llm: Any) -> None:
    """One wrong element of a conv weight, and a state pool with another sequence's bytes, are both seen."""
    config = make_config("nemotron_h")
    weights = make_weights(config)
    changed = {**weights, "layers.2.mixer.conv.weight": weights["layers.2.mixer.conv.weight"].clone()}
    changed["layers.2.mixer.conv.weight"][3, 1] += 0.5
    runner = oracles.Runner(config, weights, window=WINDOW, slots=SLOTS, spec_len=1)
    assert compare(Engine(emit(llm, config, changed), config), runner, steps=2) > 1e-3
    engine = Engine(emit(llm, config, weights), config)
    engine.run([0, 1], [[5, 6, 7], [8, 9]])
    runner.scan([0, 1], [[5, 6, 7], [8, 9]])
    engine.memory["rnn_state_ptr_1"][0] = engine.memory["rnn_state_ptr_1"][1]
    step = runner.forward(Batch.step([0, 1], [3, 2]), [4, 4])
    got = engine.run([0, 1], [[4], [4]], [3, 2])
    assert relative_gap(got[1:], step[1:]) < 2e-5 and relative_gap(got[:1], step[:1]) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_of_both_runtimes(llm: Any, case: str) -> None:
    from tensorrt_llm.runtime import expected_tensor_names

    config = make_config(case, "bfloat16")
    network = emit(llm, config, make_weights(config))
    net = network.trt_network
    layer_types = trtllm_config(config)["layer_types"]
    assert {*net.inputs, *net.outputs} == expected_tensor_names(layer_types)
    assert list(net.outputs) == ["logits"] and net.outputs["logits"].dtype is llm.trt.float32
    assert net.outputs["logits"].shape == (-1, VOCAB_SIZE)
    for name, tensor in net.inputs.items():
        if "_state_ptr_" in name:
            assert tensor.dtype is llm.trt.int64 and tensor.shape == (1,)
    for name in ("input_ids", "last_token_ids", "slot_mapping", "host_request_types", "host_context_lengths"):
        assert net.inputs[name].dtype is llm.trt.int32 and net.inputs[name].shape == (-1,)
    assert network.input_ranges["input_ids"] == {"num_tokens": [[1, 4, 8192]]}
    assert network.input_ranges["slot_mapping"] == {"batch_size": [[1, 2, 4]]}
    attention = layer_types.count("attention")
    if attention:
        assert net.inputs["host_kv_cache_pool_mapping"].shape == (attention, 2)
        assert net.inputs["host_max_attention_window_sizes"].shape == (attention,)


def test_host_memory_feeds_plugins_alone(llm: Any) -> None:
    """An address in host memory must reach no native TensorRT layer: that would read it on the device."""
    for case in CASES:
        config = make_config(case)
        net = emit(llm, config, make_weights(config)).trt_network
        host = [t for n, t in net.inputs.items() if n.startswith("host_") or "_state_ptr_" in n]
        for layer in net.layers:
            if layer.kind not in ("plugin_v3", "gpt_attention"):
                assert not any(tensor is one for tensor in layer.inputs for one in host), layer.kind
        used = [tensor for layer in net.layers for tensor in layer.inputs]
        pointers = [t for n, t in net.inputs.items() if "_state_ptr_" in n]
        assert all(sum(tensor is one for tensor in used) == 1 for one in pointers)


def test_fused_projections_are_read_in_place(llm: Any) -> None:
    """fp32 rows of the tiny model are whole 16-byte vectors: no slice is emitted in front of a replay plugin.

    In bf16 the projection has 196 columns, 392 bytes: x and z must be sliced, dt need not be.
    """
    for dtype, in_place in (("float32", True), ("bfloat16", False)):
        config = make_config("mamba2", dtype)
        net = emit(llm, config, make_weights(config)).trt_network
        slices = [layer for layer in net.layers if layer.kind == "slice"]
        assert len(slices) == (0 if in_place else 2 * len(config.recurrent_layers))
        scan = next(
            p.attributes["plugin"]
            for p in net.layers
            if p.kind == "plugin_v3" and "dt" in p.attributes["plugin"].widths()
        )
        assert (scan.offset("dt"), scan.offset("B"), scan.offset("C")) == (64 + 128, 64, 96)
    # Queries, keys and values that stand side by side in the projection go to attention without a copy.
    net = emit(llm, make_config("nemotron_h"), make_weights(make_config("nemotron_h"))).trt_network
    (attention,) = [layer for layer in net.layers if layer.kind == "gpt_attention"]
    assert attention.attributes["layer_idx"] == 0 and not [x for x in net.layers if x.kind == "concat"]


def test_plugin_fields(llm: Any) -> None:
    config = make_config("nemotron_h", "bfloat16", state_dtype="bfloat16", dt_min=0.001, dt_max=2.0)
    net = emit(llm, config, make_weights(config), window=7).trt_network
    plugins = [layer.attributes["plugin"] for layer in net.layers if layer.kind == "plugin_v3"]
    pools = budget.needed(config, 7)
    conv, scan = plugins[0], plugins[1]
    assert [p.name for p in plugins] == ["ReplayCausalConv", "ReplayMamba2"] * len(config.recurrent_layers)
    assert scan.fields["slot_stride"] == pools.state_stride and conv.fields["slot_stride"] == pools.conv_stride
    expected = {"window": 7, "spec_len": 1, "state_type_id": 7, "type_id": 7, "z_enabled": 1, "paged_state": 1,
                "remove_input_padding": 1, "has_accepted": 0, "has_initial": 0, "exact_scan": 0}  # fmt: skip
    assert {name: scan.fields[name] for name in expected} == expected
    assert (scan.fields["dt_min"], scan.fields["dt_max"]) == (pytest.approx(0.001), 2.0)
    assert conv.fields["has_bias"] == 1 and conv.fields["kernel"] == 4


def test_what_attention_is_told(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of its own; adjacent columns of one tensor as they lie, all others put side by side."""
    from trtllm_replayssm.trtllm.network_ops import NetworkInputs, TrtllmOps, Value

    config = make_config("nemotron_h")
    inputs = NetworkInputs(None, {}, {}, budget.needed(config, WINDOW))  # type: ignore[arg-type]
    ops = TrtllmOps(None, config, config.recurrence_spec(), config.conv_spec(), inputs)
    told: list[dict[str, Any]] = []
    f = SimpleNamespace(
        gpt_attention=lambda **given: (told.append(given), None),
        PositionEmbeddingType=SimpleNamespace(learned_absolute="none"),
        concat=lambda parts, dim=0: ("concat", *parts),
        shape=lambda tensor, axis: axis,
        slice=lambda tensor, start, sizes: (tensor, start[1], sizes[-1]),
    )
    monkeypatch.setattr(ops, "f", f)
    joined = Value("qkv", 256, 0, 256)
    layer, apart = config.attention_layers[0], Value("other", 64, 0, 64)
    q, k, v = ops.split(joined, [128, 64, 64])
    for values in ((q, k, v), (q, v, k), (q, k, apart)):
        ops.attention(layer, *values, scale=0.5)
    assert [given["qkv"] for given in told] == [
        "qkv",
        ("concat", ("qkv", 0, 128), ("qkv", 192, 64), ("qkv", 128, 64)),
        ("concat", ("qkv", 0, 128), ("qkv", 128, 64), "other"),
    ]
    assert told[0]["q_scaling"] == pytest.approx(1 / (0.5 * config.head_dim**0.5)) and told[0]["layer_idx"] == 0
    layers = emit(llm, config, make_weights(config)).trt_network.layers
    (attention,) = [layer for layer in layers if layer.kind == "gpt_attention"]
    assert attention.attributes["max_context_length"] == 64, "the longest prompt"


def test_gather_context_logits(llm: Any) -> None:
    config = make_config("nemotron_h")
    weights = make_weights(config)
    engine = Engine(emit(llm, config, weights, gather_context_logits=True), config)
    runner = oracles.Runner(config, weights, window=WINDOW, slots=SLOTS, spec_len=1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    got = engine.run([0, 1], prompts)
    assert got.shape == (6, VOCAB_SIZE) and relative_gap(got, runner.scan([0, 1], prompts)) < 2e-5


def test_parameter_names_are_the_checkpoint_names(llm: Any) -> None:
    for case in CASES:
        config = make_config(case, mixer_bias=case != "qwen3_5", mlp_bias=True, attention_bias=True)
        model = llm.model_class(pretrained(config))
        named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert named == weight_shapes(config)


def test_biases(llm: Any) -> None:
    config = make_config("nemotron_h", mixer_bias=True, mlp_bias=True, attention_bias=True)
    weights = make_weights(config)
    runner = oracles.Runner(config, weights, window=WINDOW, slots=SLOTS, spec_len=1)
    assert compare(Engine(emit(llm, config, weights), config), runner, steps=6) < 2e-5


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "replayssm": ({"replayssm": None}, "config has no replayssm object; make the checkpoint with"),
    "format": ({"replayssm": {"format_version": 2}}, "config: format_version is 2; this version reads 1"),
    "rnn_hidden_size": ({"rnn_hidden_size": 32}, "rnn_hidden_size is 32; the replayssm object implies 64"),
    "architecture": ({"architecture": "MambaForCausalLM"}, "architecture is 'MambaForCausalLM'; the replayssm object"),
    "layer_types": ({"layer_types": ["recurrent"]}, r"layer_types is \['recurrent'\]; the replayssm object implies"),
    "state_size": ({"state_size": 16}, "state_size is 16: TensorRT-LLM's state pool has 4096 bytes per slot, window 5"),
    "conv_kernel": ({"conv_kernel": 4}, "conv_kernel is 4: TensorRT-LLM's convolution pool has 1536 bytes per slot"),
    "mapping": ({"mapping": {"world_size": 2, "tp_size": 2}}, "mapping.world_size is 2; ReplayHybridForCausalLM runs"),
    "quantization": ({"quantization": {"quant_algo": "FP8"}}, "quantization.quant_algo is FP8; .* is not quantised"),
    "kv quantization": ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo is INT8"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_config_that_is_refused(llm: Any, name: str) -> None:
    changes, message = CHANGES[name]
    with pytest.raises(ReplayError, match=message):
        llm.model_class(pretrained(make_config("nemotron_h"), **changes))


def test_models_that_are_refused(llm: Any) -> None:
    with pytest.raises(ReplayError, match="head_dim is 40; TensorRT-LLM's attention has 32, 48, 64"):
        llm.model_class(pretrained(make_config("nemotron_h", head_dim=40)))
    latent = make_config("nemotron_h", family="kimi_linear", layers=("kimi_delta", "attention", "mlp"), ssm_groups=4,
                         conv_bias=False, mlp_kind="swiglu", num_key_value_heads=4, latent_rank=16,
                         latent_shared_dim=8, latent_value_dim=16)  # fmt: skip
    with pytest.raises(ReplayError, match="latent_rank is 16: multi-head latent attention"):
        llm.model_class(pretrained(latent))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_beam_width", 2),
        ("max_draft_len", 3),
        ("prompt_embedding_table_size", 8),
        ("lora_target_modules", ["attn_qkv"]),
        ("speculative_decoding_draft_tokens_external", True),
        ("spec_decoding_is_generation_length_variable", True),
    ],
)
def test_build_options_that_are_refused(llm: Any, argument: str, value: Any) -> None:
    model = llm.model_class(pretrained(make_config("nemotron_h")))
    sizes = {"max_batch_size": 2, "max_input_len": 8, "max_seq_len": 16, "max_num_tokens": 16, "use_cache": True}
    with pytest.raises(ReplayError, match=f"{argument}: ReplayHybridForCausalLM does not have that"):
        model.prepare_inputs(**sizes, **{argument: value})
    with pytest.raises(ReplayError, match="kv_cache_type is disabled"):
        model.prepare_inputs(**{**sizes, "use_cache": False})
    for size in ("max_batch_size", "max_num_tokens"):
        with pytest.raises(ReplayError, match=f"{size} is 16777216; it must be a whole number from 1 to "):
            model.prepare_inputs(**{**sizes, size: 1 << 24})


@pytest.mark.parametrize(
    ("flag", "value", "hint"),
    [
        ("remove_input_padding", False, "--remove_input_padding enable"),
        ("paged_state", False, "--paged_state enable"),
        ("mamba_conv1d_plugin", None, "--mamba_conv1d_plugin auto"),
        ("gpt_attention_plugin", None, "--gpt_attention_plugin auto"),
        ("paged_kv_cache", False, "--paged_kv_cache enable"),
    ],
)
def test_plugin_config_that_is_refused(llm: Any, flag: str, value: Any, hint: str) -> None:
    from tensorrt_llm.network import Network, net_guard

    model = llm.model_class(pretrained(make_config("nemotron_h")))
    network = Network()
    network.plugin_config.paged_kv_cache = True
    setattr(network.plugin_config, flag, value)
    with net_guard(network), pytest.raises(ReplayError, match=f"plugin_config.{flag} is {value!r}.*{hint}"):
        model.prepare_inputs(max_batch_size=2, max_input_len=8, max_seq_len=16, max_num_tokens=16, use_cache=True)


def test_weights_that_are_refused(llm: Any) -> None:
    config = make_config("nemotron_h")
    weights = make_weights(config)
    model = llm.model_class(pretrained(config))
    with pytest.raises(ReplayError, match=r"weight layers\.0\.mixer\.A_log is missing"):
        model.load({name: t for name, t in weights.items() if name != "layers.0.mixer.A_log"})
    with pytest.raises(ReplayError, match="weight extra is not one that the config has"):
        model.load({**weights, "extra": torch.zeros(1)})
    with pytest.raises(ReplayError, match=r"weight final_norm\.weight has shape \[63\]; the config implies \[64\]"):
        model.load({**weights, "final_norm.weight": torch.zeros(63)})


def test_stand_in_refuses_what_it_did_not_record(llm: Any) -> None:
    """Teeth of the stand-in itself."""
    from tensorrt_llm import functional
    from tensorrt_llm.plugin import PluginConfig

    with pytest.raises(AttributeError):
        functional.rms_norm  # noqa: B018
    with pytest.raises(AttributeError):
        llm.trt.Builder  # noqa: B018
    with pytest.raises(ValueError, match="has no field"):
        PluginConfig().replay_plugin = True
    assert isinstance(llm, SimpleNamespace)
