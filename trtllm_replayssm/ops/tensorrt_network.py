"""From a model to a TensorRT network: emit_network, and what a builder needs beside it.

    network = create_network(trt, builder); io = emit_network(trt, network, config, weights, options)
    configure_builder(trt, builder_config, options); add_profiles(trt, builder, builder_config, io, limits)

One network serves both phases; an engine has one optimization profile for each. A call has B rows of S tokens: a
*context* call S = the longest prompt piece of its rows, a *generation* call S = the tokens of the step.

Roles of the tensors (B rows, S tokens; {layer} counts stateful layers; names are roles with ``_{layer}`` behind):
    input_ids      int32 [B, S]; pad tokens: any token.
    positions      int32 [B, S]; pad tokens: any position. positions[b, 0] is the length of the row's past.
    slot_mapping   int32 [B]; -1: pad row, whose outputs are finite and mean nothing.
    last_token_ids int32 [B]: tokens of each row.
    host_request_types  int32 [B] in host memory: 0 context, 1 generation.
    accepted       int32 [B], with spec_len > 1: tokens of the row's previous step that stay; -1: all.
    has_initial    int32 [B]: 1 where a context row continues what its slot holds.
    kv_index       int32 [bound] = 0, 1, ... bound - 1; bound >= 1 and no less than the longest past of the rows.
    token_index    int32 [S] = 0, 1, ... S - 1; with kv_index in networks that have attention.
    logit_index    int32 [B, S_out]: tokens of each row whose logits are wanted (context: the last, generation: all).
    replay_state, conv_state  int32 [slots, words]: a pool of slots (layout.py), changed in place by the plugins.
    kv_cache       act dtype [slots, parts, kv_heads, max_positions, head_dim], read only. Parts are keys and values, or
                   with latent attention one vector that is both.
    new_kv         output, act dtype [B, S, parts, kv_heads, head_dim]: goes into kv_cache after the call.
    logits         output, fp32 [B, S_out, vocab].
    conv_operand, conv_result, replay_operand, replay_result: the seams of ``replay="io"`` (tensorrt_replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ReplayError, require
from ..models.config import HybridConfig
from ..models.decoder import HybridDecoder
from ..models.host_weights import WeightLike
from .tensorrt_api import TensorRTApi
from .tensorrt_io import (
    BOUND,
    CONTEXT,
    GENERATION,
    IO,
    LOGITS,
    PHASES,
    PLUGIN,
    ROWS,
    SLOTS,
    TOKENS,
    IOTensor,
    NetworkIO,
    NetworkOptions,
    ProfileLimits,
)
from .tensorrt_layers import Layers
from .tensorrt_ops import TensorRTOps
from .tensorrt_views import View

__all__ = [
    "BOUND",
    "CONTEXT",
    "GENERATION",
    "IO",
    "LOGITS",
    "PHASES",
    "PLUGIN",
    "ROWS",
    "SLOTS",
    "TOKENS",
    "IOTensor",
    "NetworkIO",
    "NetworkOptions",
    "ProfileLimits",
    "add_profiles",
    "check_options",
    "chooses_precision",
    "configure_builder",
    "create_network",
    "emit_network",
    "prefer_precision",
]


def check_options(trt: Any, config: HybridConfig, options: NetworkOptions) -> None:
    """Raise ReplayError for options that this TensorRT or this model does not allow."""
    api = TensorRTApi(trt)
    api.dtype(options.dtype)
    if options.replay == PLUGIN:
        api.require_plugins()
    options.recurrence_spec(config)
    top = config.max_positions
    require(options.max_positions <= top, f"max_positions is {options.max_positions}; the model was made for {top}")


def create_network(trt: Any, builder: Any) -> Any:
    """An empty network: strongly typed where there is such a mode, else with explicit batch dimensions."""
    return TensorRTApi(trt).create_network(builder)


def emit_network(
    trt: Any, network: Any, config: HybridConfig, weights: Mapping[str, WeightLike], options: NetworkOptions
) -> NetworkIO:
    """Add the model to an empty network.

    Args:
        trt: the module tensorrt (8.6, 10, 11) or tensorrt_rtx. network: of :func:`create_network`.
        config: the model. weights: by name (decoder.weight_shapes), HostWeight or numpy arrays of fp32 or fp16; they
            are rounded to the dtype of ``options``. options: how.

    Returns:
        the network's inputs and outputs. Hold it until the engine is built: constants refer to its arrays.

    Raises:
        ReplayError: see :func:`check_options`; a weight missing or of a wrong shape; a plugin that is not registered or
            refuses its fields; a layer that TensorRT refuses.
    """
    check_options(trt, config, options)
    layers = Layers(TensorRTApi(trt), network)
    ops = TensorRTOps(layers, config, weights, options)
    ids = View.whole(layers.input("input_ids", (ROWS, TOKENS)), 1)
    logits = HybridDecoder(config).forward(ops, ids)
    layers.output(logits.node, "logits", (ROWS, LOGITS, config.vocab_size))
    return NetworkIO(tuple(layers.io), tuple(layers.keep))


def configure_builder(
    trt: Any, builder_config: Any, options: NetworkOptions, workspace_bytes: int | None = None
) -> None:
    """Make the builder keep to the network's types (TF32 off, fp16 where it must be asked for); workspace limit."""
    TensorRTApi(trt).configure(builder_config, options.dtype, workspace_bytes)


def chooses_precision(trt: Any, options: NetworkOptions) -> bool:
    """Whether layers ask for dtypes that this TensorRT could leave: a network of 8.6 with fp16."""
    return TensorRTApi(trt).asks_for_precision(options.dtype)


def prefer_precision(trt: Any, builder_config: Any, options: NetworkOptions) -> bool:
    """After configure_builder: make the layers' precisions a wish. Returns whether there was one to loosen."""
    loosened = chooses_precision(trt, options)
    if loosened:
        TensorRTApi(trt).prefer(builder_config)
    return loosened


def add_profiles(trt: Any, builder: Any, builder_config: Any, io: NetworkIO, limits: ProfileLimits) -> tuple[str, ...]:
    """One optimization profile per phase.

    Returns:
        the phases in the order of the profiles.

    Raises:
        ReplayError: limits that the caches cannot hold or address, or that TensorRT refuses.
    """
    caches = io.by_role("kv_cache")
    for cache in caches:
        length = cache.dims[3]
        require(limits.max_positions <= length, f"max_positions is {limits.max_positions}; {cache.name} has {length}")
        rows = limits.slots * math.prod(cache.dims[1:4])
        require(rows < 1 << 31, f"slots is {limits.slots}; {cache.name} would have {rows} rows, more than int32 counts")
    continues = io.get("has_initial") is not None or io.get("host_request_types") is None
    for phase in PHASES:
        ranges = limits.ranges(phase, continues=continues)
        profile = builder.create_optimization_profile()
        for tensor in io.inputs:
            spans = [ranges[axis] if isinstance(axis, str) else (axis,) * 3 for axis in tensor.shape]
            least, usual, most = (tuple(span[i] for span in spans) for i in range(3))
            profile.set_shape(tensor.name, least, usual, most)
        if builder_config.add_optimization_profile(profile) < 0:
            raise ReplayError(f"{TensorRTApi(trt).label} refuses the {phase} profile of {limits}")
    return PHASES
