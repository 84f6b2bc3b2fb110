"""One model twice: through its emitted network, interpreted, and through TorchOps. Every result of every operation of
the model code is compared in every call.

The network's stateful operations run on the torch reference over pools of their own. In ``plugin`` networks everything
comes from the plugin layer: spec from its fields, operands from its inputs at its offset fields, slots from its state
tensor, rows from its row inputs. In ``io`` networks operands come from the outputs, and the results go into the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from network_interpreter import Interpreter, Values

from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, SlotLayout, reference
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import HybridDecoder, keeps_float32, weight_shapes
from trtllm_replayssm.models.host_weights import host_weights
from trtllm_replayssm.ops import tensorrt_network as tn
from trtllm_replayssm.ops.base import Ops
from trtllm_replayssm.ops.tensorrt_ops import TensorRTOps
from trtllm_replayssm.ops.torch_ops import TorchOps
from trtllm_replayssm.plugins import TYPE_IDS, plugin_inputs
from trtllm_replayssm.pool import StatePool, torch_dtype
from trtllm_replayssm.runtime.state import Batch, ModelState

_COMMON: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "head_dim": 8}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
#: Rows of in_proj: 132 elements in Mamba-2, 528 bytes in fp32 (whole 16-byte vectors), 264 in fp16 (not).
_SSM = {"ssm_heads": 4, "ssm_groups": 2, "ssm_head_dim": 8, "ssm_state_size": 16}
CONFIGS = {
    "nemotron_h": HybridConfig(
        family="nemotron_h",
        layers=("mamba2", "mlp", "attention", "mamba2", "mlp", "attention"),
        mlp_kind="relu2",
        conv_bias=True,
        **_COMMON,
        **_ATTENTION,
        **_SSM,
    ),
    "biases": HybridConfig(
        family="nemotron_h",
        layers=("attention", "mamba2", "mlp"),
        mlp_kind="relu2",
        dt_min=0.25,
        dt_max=0.75,
        mixer_bias=True,
        mlp_bias=True,
        attention_bias=True,
        **_COMMON,
        **_ATTENTION,
        **_SSM,
    ),
    "qwen3_5": HybridConfig(
        family="qwen3_5",
        layers=("gated_delta", "mlp", "attention", "mlp", "gated_delta", "mlp"),
        attention_gate=True,
        qk_norm=True,
        rotary_dim=4,
        tie_embeddings=True,
        **_COMMON,
        **_ATTENTION,
        **_SSM,
    ),
    "kimi_linear": HybridConfig(
        family="kimi_linear",
        layers=("kimi_delta", "mlp", "attention", "mlp"),
        num_attention_heads=4,
        num_key_value_heads=4,
        latent_rank=16,
        latent_shared_dim=3,
        latent_value_dim=6,
        latent_q_rank=12,
        **_COMMON,
        **_SSM,
    ),
}
#: Largest difference, in units of the largest value of the same result: summation order in fp32; in 16 bits single
#: roundings that fall the other way, and torch's own 16-bit attention, which rounds the probabilities.
TOLERANCE = {"float32": 1e-5, "float16": 8 * 2.0**-10, "bfloat16": 8 * 2.0**-7}
_KINDS = {2: "gated_delta", 3: "kimi_delta"}


def random_weights(config: HybridConfig, dtype: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights with which activations stay near 1; matrices in ``dtype``."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=rng)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif len(shape) == 2 and "embedding" not in name:
            values = values / shape[1] ** 0.5
        elif name.endswith((".A_log", ".bias")):
            values = 0.5 * values
        weights[name] = values if keeps_float32(name) else values.to(torch_dtype(dtype))
    return weights


def emit(
    trt: Any, config: Any, options: tn.NetworkOptions, weights: Any = None, builder: Any = None
) -> tuple[Any, Any]:
    """A network and its NetworkIO."""
    network = tn.create_network(trt, trt.Builder if builder is None else builder)
    given = host_weights(random_weights(config, options.dtype)) if weights is None else weights
    return network, tn.emit_network(trt, network, config, given, options)


@dataclass
class Row:
    """One row of a call: slot (-1: pad), position of its first token, its tokens, accepted of its previous step."""

    slot: int
    start: int
    tokens: list[int]
    accepted: int = -1


def recording(base: type[Any]) -> type[Any]:
    """``base``, an interpreter of Ops, with a list ``record`` of (operation, result) in the order of the calls."""

    def recorded(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = getattr(base, name)(self, *args, **kwargs)
            self.__dict__.setdefault("record", []).append((name, result))
            return result

        return method

    names = sorted(Ops.__abstractmethods__ - {"split"})
    return type(f"Recording{base.__name__}", (base,), {name: recorded(name) for name in names})


class Twice:
    """A model with room for ``slots`` sequences, as a network of ``trt`` and in torch.

    ``worst`` is the largest difference of any result so far, in units of that result's largest value; inf for NaN.
    """

    def __init__(
        self,
        trt: Any,
        config: HybridConfig,
        dtype: str,
        replay: str,
        *,
        weights: dict[str, torch.Tensor] | None = None,
        slots: int = 4,
        spec_len: int = 4,
        builder: Any = None,
        **options: Any,
    ) -> None:
        self.trt, self.config, self.slots = trt, config, slots
        self.weights = random_weights(config, dtype) if weights is None else weights
        self.options = tn.NetworkOptions(dtype, 32, replay=replay, spec_len=spec_len, **options)
        state = {
            "slots": slots,
            "max_positions": 32,
            "spec_len": spec_len,
            "window": self.options.window,
            "stagger": self.options.stagger,
            "dtype": dtype,
        }
        self.torch_state, self.state = (ModelState(config, **state) for _ in range(2))
        self.network = tn.create_network(trt, trt.Builder if builder is None else builder)
        made: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            recorder = recording(TensorRTOps)
            patch.setattr(tn, "TensorRTOps", lambda *args: made.append(recorder(*args)) or made[0])
            self.io = tn.emit_network(trt, self.network, config, host_weights(self.weights), self.options)
        self.record = made[0].record
        self.interpreter = Interpreter(trt, self.network, self.io.keep)
        self.caches = {
            t.name: torch.full((slots, *t.dims[1:]), torch.nan, dtype=torch_dtype(dtype))
            for t in self.io.by_role("kv_cache")
        }
        self.worst = 0.0
        self.compared = 0
        self.values: Values = {}

    def call(self, phase: str, rows: Sequence[Row]) -> torch.Tensor:
        """Run one call both ways, compare, and return the network's logits [B, S_out, vocab]."""
        self.phase, self.rows = phase, rows
        feeds = self._feeds()
        self.values = self.interpreter.run(feeds, self._supply)
        self._append()
        self._compare(self._torch_record())
        return self.values["logits"]

    # The network.

    def _feeds(self) -> dict[str, torch.Tensor]:
        rows = self.rows
        lengths = [len(row.tokens) for row in rows]
        width = max(lengths)
        context = self.phase == tn.CONTEXT
        ids, positions = (torch.zeros(len(rows), width, dtype=torch.int32) for _ in range(2))
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = torch.tensor(row.tokens)
            positions[i, : lengths[i]] = torch.arange(row.start, row.start + lengths[i])
        last = [[n - 1] for n in lengths] if context else [list(range(width))] * len(rows)
        ints = {
            "slot_mapping": [row.slot for row in rows],
            "last_token_ids": lengths,
            "host_request_types": [int(not context)] * len(rows),
            "accepted": [row.accepted for row in rows],
            "has_initial": [int(context and row.start > 0) for row in rows],
            "kv_index": list(range(max(1, *(row.start for row in rows), 0))),
            "token_index": list(range(width)),
            "logit_index": last,
        }
        feeds = {name: torch.tensor(value, dtype=torch.int32) for name, value in ints.items()}
        feeds |= {"input_ids": ids, "positions": positions, **self.caches}
        for kind, pools in (("replay", self.state.recurrent), ("conv", self.state.conv)):
            feeds |= {f"{kind}_state_{i}": pool.memory.view(torch.int32) for i, pool in pools.items()}
        self.feeds = {t.name: feeds[t.name] for t in self.io.inputs if t.name in feeds}
        return self.feeds

    def _supply(self, name: str, values: Values, layer: Any) -> torch.Tensor:
        if layer is None:
            return self._seam(name, values)
        fields = {key: value.item() for key, value in layer.plugin.fields.items()}
        names = plugin_inputs(layer.plugin.plugin_type, fields)
        inputs = {key: values[layer.get_input(i).name] for i, key in enumerate(names)}
        dtype = {code: name for name, code in TYPE_IDS.items()}
        sizes = (fields.get("nheads", 0), fields.get("ngroups", 0), fields.get("headdim", 0), fields.get("dstate", 0))
        layout: SlotLayout | ConvLayout
        if layer.plugin.plugin_type == "ReplayCausalConv":
            conv = ConvSpec(fields["channels"], fields["kernel"], dtype[fields["type_id"]], fields["spec_len"])
            layout, widths = ConvLayout(conv), {"x": conv.channels}
        else:
            kind = _KINDS[fields["kind"]] if "kind" in fields else "mamba2"
            spec = RecurrenceSpec(
                kind,
                *sizes,
                state_dtype=dtype[fields["state_type_id"]],
                act_dtype=dtype[fields["type_id"]],
                window=fields["window"],
                spec_len=fields["spec_len"],
                stagger=bool(fields["stagger"]),
                **_formula(kind, fields),
            )
            layout, widths = SlotLayout(spec), _widths(spec)
        data = {}
        for key, width in widths.items():
            if key == "z" and not fields["z_enabled"]:
                continue
            offset = fields[f"{key.lower()}_offset"]
            row, size = inputs[key].shape[-1], inputs[key].element_size()
            if key not in ("dt", "a", "b"):
                assert offset * size % 16 == 0 and row * size % 16 == 0, f"{name}: {key} is not aligned"
            data[key] = inputs[key][..., offset : offset + width]
        pool = StatePool(layout, inputs["state"].view(torch.uint8))
        self.plugin_rows = {
            key: inputs.get(key) for key in ("slot_mapping", "last_token_ids", "accepted", "has_initial")
        }
        assert inputs["host_request_types"].tolist() == [int(self.phase == tn.GENERATION)] * len(self.rows)
        return self._operation(pool, data, inputs)

    def _seam(self, name: str, values: Values) -> torch.Tensor:
        """Result ``{conv|replay}_{layer}_y`` of an io network."""
        kind, layer_text, _ = name.split("_")
        layer = int(layer_text)
        pool = (self.state.conv if kind == "conv" else self.state.recurrent)[layer]
        keys = ("x",) if kind == "conv" else tuple(_widths(self.state.spec))
        data = {key: values[f"{kind}_{layer}_{key.lower()}"] for key in keys}
        stateful = [i for i, k in enumerate(self.config.layers) if k != "mlp"][layer]
        mixer = f"layers.{stateful}.mixer"
        found = {key: self.weights.get(f"{mixer}.{key}") for key in ("D", "A_log", "dt_bias")}
        params = {key: value for key, value in found.items() if value is not None}
        params |= {"weight": self.weights[f"{mixer}.conv.weight"], "bias": self.weights.get(f"{mixer}.conv.bias")}
        params["A"] = -torch.exp(params["A_log"])
        self.plugin_rows = {
            "slot_mapping": torch.tensor([row.slot for row in self.rows], dtype=torch.int32),
            "last_token_ids": torch.tensor([len(row.tokens) for row in self.rows]),
            "accepted": torch.tensor([row.accepted for row in self.rows], dtype=torch.int32),
            "has_initial": torch.tensor([row.start > 0 for row in self.rows], dtype=torch.int32),
        }
        return self._operation(pool, data, params)

    def _operation(self, pool: StatePool, data: dict[str, torch.Tensor], params: dict[str, Any]) -> torch.Tensor:
        """The reference on padded operands [B, S, F]."""
        rows, context = self.plugin_rows, self.phase == tn.CONTEXT
        options: dict[str, Any]
        if context:
            lengths = rows["last_token_ids"].tolist()
            data = {key: torch.cat([x[i, :n] for i, n in enumerate(lengths)]) for key, x in data.items()}
            ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            options = {"cu_seqlens": ends, "has_initial": rows["has_initial"].bool()}
        else:
            options = {"accepted": rows["accepted"]}
        phase = "scan" if context else "step"
        slots, spec = rows["slot_mapping"], pool.layout.spec
        if isinstance(spec, ConvSpec):
            run = getattr(reference, f"conv_{phase}")
            y = run(pool, slots, data["x"], params["weight"], params.get("bias"), **options)
        else:
            lead = data[next(iter(data))].shape[:-1]
            heads = {key: x.reshape(*lead, *_head_shape(spec, key)) for key, x in data.items()}
            if spec.kind == "mamba2":
                run = getattr(reference, f"mamba2_{phase}")
                y = run(pool, slots, heads["x"], heads["dt"], params["A"], heads["B"], heads["C"], D=params["D"],
                        z=heads.get("z"), dt_bias=params["dt_bias"], **options)  # fmt: skip
            else:
                bias = params["dt_bias"].reshape(spec.nheads, -1) if spec.kind == "kimi_delta" else params["dt_bias"]
                run = getattr(reference, f"gated_delta_{phase}")
                y = run(pool, slots, *(heads[key] for key in "qkvab"), params["A_log"], bias, **options)
            y = y.reshape(*lead, -1)
        if not context:
            return y
        out = y.new_zeros(len(self.rows), max(lengths), y.shape[-1])
        for i, piece in enumerate(y.split(lengths)):
            out[i, : lengths[i]] = piece
        return out

    def _append(self) -> None:
        """What a runner does after a call: the new keys and values of live rows go into the caches."""
        for tensor in self.io.by_role("new_kv"):
            cache, new = self.caches[f"kv_cache_{tensor.layer}"], self.values[tensor.name]
            for i, row in enumerate(self.rows):
                if row.slot >= 0:
                    n = len(row.tokens)
                    cache[row.slot, :, :, row.start : row.start + n] = new[i, :n].permute(1, 2, 0, 3)

    # Torch.

    def _torch_record(self) -> list[tuple[str, torch.Tensor]]:
        slots, starts = [row.slot for row in self.rows], [row.start for row in self.rows]
        if self.phase == tn.CONTEXT:
            batch = Batch.scan(slots, [len(row.tokens) for row in self.rows], starts=starts)
        else:
            accepted = [row.accepted for row in self.rows]
            batch = Batch.step(slots, starts, len(self.rows[0].tokens), accepted=accepted)
        ops = recording(TorchOps)(self.weights, self.torch_state, batch)
        ids = torch.tensor([token for row in self.rows for token in row.tokens])
        with torch.inference_mode():
            HybridDecoder(self.config).forward(ops, ids)
        return list(ops.record)

    def _compare(self, wanted: list[tuple[str, torch.Tensor]]) -> None:
        assert [name for name, _ in self.record] == [name for name, _ in wanted]
        at_end = False
        for (name, view), (_, want) in zip(self.record, wanted, strict=True):
            got = self.values[view.node.tensor.name][..., view.offset : view.offset + view.width]
            at_end = at_end or name == "select_last"
            if not at_end:
                got = torch.cat([got[i, : len(row.tokens)] for i, row in enumerate(self.rows)])
            got = got.reshape(want.shape)
            assert torch.isfinite(want).all(), name
            self.compared += got.numel()
            scale = float(want.abs().max()) or 1.0
            error = float((got.double() - want.double()).abs().max()) / scale
            self.worst = max(self.worst, error if torch.isfinite(got).all() else math.inf)


def _formula(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What else a RecurrenceSpec has for a kind, from plugin fields."""
    if kind == "mamba2":
        return {"dt_softplus": bool(fields["dt_softplus"]), "dt_min": fields["dt_min"], "dt_max": fields["dt_max"]}
    options: dict[str, Any] = {"qk_l2norm": bool(fields["qk_l2norm"])}
    if kind == "kimi_delta":
        options["gate"] = "bounded" if fields["gate_bounded"] else "softplus"
        options["gate_lower_bound"] = fields["gate_lower_bound"]
    return options


def _widths(spec: RecurrenceSpec) -> dict[str, int]:
    inner, group = spec.nheads * spec.headdim, spec.ngroups * spec.dstate
    if spec.kind == "mamba2":
        return {"x": inner, "dt": spec.nheads, "B": group, "C": group, "z": inner}
    gate = spec.nheads * (spec.dstate if spec.kind == "kimi_delta" else 1)
    return {"q": group, "k": group, "v": inner, "a": gate, "b": spec.nheads}


def _head_shape(spec: RecurrenceSpec, key: str) -> tuple[int, ...]:
    if key in ("dt", "b"):
        return (spec.nheads,)
    if key == "a":
        return (spec.nheads, spec.dstate) if spec.kind == "kimi_delta" else (spec.nheads,)
    return (spec.nheads, spec.headdim) if key in ("x", "z", "v") else (spec.ngroups, spec.dstate)


def conversation(model: Twice) -> None:
    """Prompts of several lengths, one in pieces; steps with a pad row; drafts with rejections; a slot used again."""
    rng = torch.Generator().manual_seed(1)

    def tokens(n: int) -> list[int]:
        return torch.randint(0, model.config.vocab_size, (n,), generator=rng).tolist()

    model.call(tn.CONTEXT, [Row(2, 0, tokens(5)), Row(0, 0, tokens(1)), Row(3, 0, tokens(7))])
    model.call(tn.CONTEXT, [Row(0, 1, tokens(4)), Row(1, 0, tokens(2))])
    places = {0: 5, 1: 2, 2: 5, 3: 7}
    for _ in range(2):
        model.call(tn.GENERATION, [Row(slot, places[slot], tokens(1)) for slot in (1, 3)] + [Row(-1, 0, tokens(1))])
        places = {slot: place + (slot in (1, 3)) for slot, place in places.items()}
    for accepted in ([-1, -1, -1], [2, 0, 4], [1, 4, 3]):
        kept = accepted if accepted[0] >= 0 else [0, 0, 0]
        order = (3, 0, 2)
        places = {**places, **{slot: places[slot] + n for slot, n in zip(order, kept, strict=True)}}
        rows = [Row(slot, places[slot], tokens(4), n) for slot, n in zip(order, accepted, strict=True)]
        model.call(tn.GENERATION, rows)
    model.call(tn.CONTEXT, [Row(2, 0, tokens(3))])
    model.call(tn.GENERATION, [Row(2, 3, tokens(1)), Row(1, places[1], tokens(1))])
