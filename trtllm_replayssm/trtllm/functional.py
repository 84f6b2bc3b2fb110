"""The ReplaySSM operations on tensorrt_llm's Tensors, in the manner of its functional module.

Each adds one plugin (docs: plugins/tensorrt) to the current network and returns its output. Called under
``net_guard``, with the plugins registered. ``remove_input_padding`` and ``paged_state`` are those of the network's
plugin config. Activations are packed ``[tokens, F]``, or ``[rows, S, F]`` without remove_input_padding.

A data input may be a wider tensor that holds it as columns: ``offsets={"B": 4096}`` makes the plugin read B's columns
from 4096 on, so that the pieces of a fused projection are never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import plugins
from ..errors import ReplayError, require
from ..kernels.abi import KIND_CODES
from ..spec import DTYPE_BYTES, GATED_DELTA, KIMI_DELTA, MAMBA2, ConvSpec, RecurrenceSpec
from . import requirement

_DELTA_KINDS = (GATED_DELTA, KIMI_DELTA)
_NAMES = {code: name for name, code in plugins.TYPE_IDS.items()}


@dataclass(frozen=True, eq=False)
class Rows:
    """What says which sequence a row of the batch is, and in which phase. B rows.

    Attributes:
        host_request_types: int32 [B] in host memory, 0 context, 1 generation, context rows first.
        last_token_ids: int32 [B], inclusive sums of the rows' tokens (padded input: tokens per row).
        slot_mapping: int32 [B], slot of each row.
        host_context_lengths: int32 [B] in host memory; with remove_input_padding.
        accepted, has_initial: int32 [B] or None.
    """

    host_request_types: Any
    last_token_ids: Any
    slot_mapping: Any
    host_context_lengths: Any = None
    accepted: Any = None
    has_initial: Any = None


@dataclass(frozen=True, eq=False)
class Pool:
    """Where the slots of a layer are.

    Attributes:
        state: int64 [1] in host memory that holds the pool's address (paged_state), else int32 [slots, words].
        stride: bytes between slots, a multiple of 16; 0 is the slot's own size. slots: how many there are; 0: unknown.
    """

    state: Any
    stride: int = 0
    slots: int = 0


def replay_mamba2(
    x: Any,
    dt: Any,
    dt_bias: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    pool: Pool,
    rows: Rows,
    spec: RecurrenceSpec,
    *,
    z: Any = None,
    offsets: Mapping[str, int] | None = None,
    exact_scan: bool = False,
) -> Any:
    """Mamba-2 with ReplaySSM memory.

    Args:
        x: [.., H*P]. dt: [.., H] before bias and softplus. B, C: [.., G*N]. z: [.., H*P] or None, gates the output.
        dt_bias, A, D: fp32 [H]; A is negative.
        spec: of kind mamba2, without read copy; its act_dtype is that of x.
        offsets: first column of x, dt, B, C, z in their tensors.
        exact_scan: prompts token by token, whose state has the bits of decoding.

    Returns:
        [.., H*P] of x's dtype.

    Raises:
        ReplayError: a dtype, spec, offset or tensor that the plugin does not take; plugins not registered.
    """
    require(spec.kind == MAMBA2, f"kind is {spec.kind}; replay_mamba2 takes {MAMBA2}")
    data = {"x": x, "dt": dt, "dt_bias": dt_bias, "A": A, "B": B, "C": C, "D": D, "z": z}
    values = {
        **_recurrence_values(spec, x),
        "dt_softplus": int(spec.dt_softplus),
        "dt_min": spec.dt_min,
        "dt_max": spec.dt_max,
        "z_enabled": int(z is not None),
        "exact_scan": int(exact_scan),
        **_offset_values(("x", "dt", "B", "C", "z"), offsets, spec.act_dtype),
    }
    return _emit("ReplayMamba2", data, pool, rows, values)


def replay_gated_delta(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    pool: Pool,
    rows: Rows,
    spec: RecurrenceSpec,
    *,
    offsets: Mapping[str, int] | None = None,
    scale: float = 0.0,
    exact_scan: bool = False,
) -> Any:
    """Gated DeltaNet or Kimi Delta Attention with ReplaySSM memory.

    Args:
        q, k: [.., HK*K] before normalisation. v: [.., HV*V]. b: [.., HV] raw. a: [.., HV] raw, KDA [.., HV*K].
        A_log: fp32 [HV]. dt_bias: fp32 [HV], KDA [HV*K].
        spec: of kind gated_delta or kimi_delta, without read copy; its act_dtype is that of q.
        offsets: first column of q, k, v, a, b in their tensors.
        scale: of q; 0 is K^-0.5. exact_scan: as in replay_mamba2.

    Returns:
        [.., HV*V] of q's dtype.

    Raises:
        ReplayError: as replay_mamba2.
    """
    require(spec.kind in _DELTA_KINDS, f"kind is {spec.kind}; replay_gated_delta takes {', '.join(_DELTA_KINDS)}")
    data = {"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    values = {
        "kind": KIND_CODES[spec.kind],
        **_recurrence_values(spec, q),
        "qk_l2norm": int(spec.qk_l2norm),
        "gate_bounded": int(spec.gate == "bounded"),
        "gate_lower_bound": spec.gate_lower_bound,
        "scale": scale,
        "exact_scan": int(exact_scan),
        **_offset_values(("q", "k", "v", "a", "b"), offsets, spec.act_dtype),
    }
    return _emit("ReplayGatedDelta", data, pool, rows, values)


def replay_causal_conv(
    x: Any, weight: Any, bias: Any, pool: Pool, rows: Rows, spec: ConvSpec, *, offsets: Mapping[str, int] | None = None
) -> Any:
    """Depthwise causal convolution with its history per slot, and SiLU where ``spec.activation`` says so.

    Args:
        x: [.., C]. weight: [C, kernel] of x's dtype or fp32. bias: [C] of the same dtype, or None.
        offsets: first column of x in its tensor.

    Returns:
        [.., C] of x's dtype.

    Raises:
        ReplayError: as replay_mamba2.
    """
    values = {
        "channels": spec.channels,
        "kernel": spec.kernel,
        "type_id": _type_id(x, spec.act_dtype),
        "spec_len": spec.spec_len,
        "silu": int(spec.activation == "silu"),
        "has_bias": int(bias is not None),
        **_offset_values(("x",), offsets, spec.act_dtype),
    }
    return _emit("ReplayCausalConv", {"x": x, "weight": weight, "bias": bias}, pool, rows, values)


def _recurrence_values(spec: RecurrenceSpec, tensor: Any) -> dict[str, Any]:
    require(spec.read_copy == "none", f"read_copy is {spec.read_copy}; the plugins keep none")
    require(spec.state_dtype in plugins.TYPE_IDS, f"state_dtype is {spec.state_dtype}; the plugins do not keep it")
    return {
        "nheads": spec.nheads,
        "ngroups": spec.ngroups,
        "headdim": spec.headdim,
        "dstate": spec.dstate,
        "type_id": _type_id(tensor, spec.act_dtype),
        "state_type_id": plugins.TYPE_IDS[spec.state_dtype],
        "window": spec.window,
        "spec_len": spec.spec_len,
        "stagger": int(spec.stagger),
    }


def _type_id(tensor: Any, act_dtype: str) -> int:
    code = int(tensor.dtype)
    found = _NAMES.get(code, str(tensor.dtype))
    require(found == act_dtype, f"the input is {found}; the spec's act_dtype is {act_dtype}")
    return code


def is_aligned(columns: int, dtype: str) -> bool:
    """Whether ``columns`` elements of ``dtype`` are whole 16-byte vectors."""
    return columns * DTYPE_BYTES[dtype] % plugins.ALIGNMENT == 0


def _offset_values(names: tuple[str, ...], offsets: Mapping[str, int] | None, dtype: str) -> dict[str, int]:
    given = dict(offsets or {})
    unknown = sorted(set(given) - set(names))
    require(not unknown, f"offsets names {', '.join(unknown)}; this operation has {', '.join(names)}")
    for name, offset in given.items():
        whole = isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0
        require(whole, f"offset of {name} is {offset!r}; it must be a whole number, 0 or more")
        require(
            name not in plugins.VECTOR_INPUTS or is_aligned(offset, dtype),
            f"offset of {name} is {offset} elements of {dtype}; it must be a multiple of {plugins.ALIGNMENT} bytes",
        )
    return {f"{name.lower()}_offset": offset for name, offset in given.items()}


def _emit(name: str, data: Mapping[str, Any], pool: Pool, rows: Rows, values: dict[str, Any]) -> Any:
    """Add the plugin ``name`` to the current network; its output as a tensorrt_llm Tensor."""
    trt, common, functional = requirement.tensorrt(), requirement.module("_common"), requirement.module("functional")
    flags = common.default_net().plugin_config
    values = {
        **values,
        "remove_input_padding": int(bool(flags.remove_input_padding)),
        "paged_state": int(bool(flags.paged_state)),
        "has_accepted": int(rows.accepted is not None),
        "has_initial": int(rows.has_initial is not None),
        "slot_stride": pool.stride,
        "max_slots": pool.slots,
    }
    tensors = {**data, **vars(rows), "state": pool.state}
    order = plugins.plugin_inputs(name, values)
    missing = [tensor for tensor in order if tensors[tensor] is None]
    require(not missing, f"{name} needs the tensor {', '.join(missing)}, which is None")
    creator = trt.get_plugin_registry().get_creator(name, plugins.PLUGIN_VERSION, plugins.PLUGIN_NAMESPACE)
    if creator is None:
        raise ReplayError(
            f"plugin {name} is not in TensorRT's registry; call trtllm_replayssm.plugins.register() after importing "
            "tensorrt, or start the process with LD_PRELOAD=libtrtllm_replayssm.so"
        )
    fields = plugins.plugin_fields(trt, name, values)
    plugin = creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise ReplayError(f"{name} refused its fields: {plugins.last_error()}")
    inputs = [tensors[tensor].trt_tensor for tensor in order]
    layer = common.default_trtnet().add_plugin_v3(inputs, [], plugin)
    if layer is None:
        raise ReplayError(f"TensorRT did not add {name} to the network; its log says why")
    return functional._create_tensor(layer.get_output(0), layer)
