"""The TensorRT plugins from Python: the library, their registration, and their fields and inputs as data.

Runs on Python 3.9 and needs numpy alone, since engine builds with TensorRT 8.6 do. :data:`PLUGIN_FIELDS` and
:func:`plugin_inputs` say what plugins/tensorrt implements; tests/cpu/test_plugin_registry.py compares them with what
the library's creators report. Neither TensorRT nor the library is loaded before a function here is called.

With TensorRT 8.6::

    register()
    creator = trt.get_plugin_registry().get_plugin_creator("ReplayMamba2", PLUGIN_VERSION, PLUGIN_NAMESPACE)
    fields = trt.PluginFieldCollection(plugin_fields(trt, "ReplayMamba2", {"nheads": 8, ...}))
    layer = network.add_plugin_v2(tensors, creator.create_plugin("layer name", fields))

From TensorRT 10 on: ``get_creator``, ``create_plugin(name, fields, trt.TensorRTPhase.BUILD)`` and ``add_plugin_v3``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .errors import ReplayError, require
from .kernels.library import library_path

PLUGIN_NAMESPACE = "replayssm"
PLUGIN_VERSION = "1"

#: TensorRT's DataType codes that ``type_id`` and ``state_type_id`` take.
TYPE_IDS = {"float32": 0, "float16": 1, "bfloat16": 7}

#: What a plugin takes in one call: rows, and (ReplayCausalConv) tokens of context rows.
MAX_ROWS = 32_767
MAX_CONTEXT_TOKENS = 2_097_120

INT32, FLOAT32 = "INT32", "FLOAT32"


class PluginFieldSpec(NamedTuple):
    """One field of a plugin. ``type`` is INT32 or FLOAT32 (INT8 is taken for an INT32 too); the value is one number."""

    type: str
    required: bool
    default: float


def _required(*names: str) -> dict[str, PluginFieldSpec]:
    return {name: PluginFieldSpec(INT32, True, 0) for name in names}


def _ints(**defaults: int) -> dict[str, PluginFieldSpec]:
    return {name: PluginFieldSpec(INT32, False, default) for name, default in defaults.items()}


def _floats(**defaults: float) -> dict[str, PluginFieldSpec]:
    return {name: PluginFieldSpec(FLOAT32, False, default) for name, default in defaults.items()}


#: What every plugin has: how rows, state and the two optional row inputs come in.
_ROW_FIELDS = _ints(
    remove_input_padding=1, paged_state=1, aliased_state=0, has_accepted=0, has_initial=0, slot_stride=0, max_slots=0
)

#: Plugin name -> field name -> spec, in the order of the plugin's getFieldNames.
PLUGIN_FIELDS: dict[str, dict[str, PluginFieldSpec]] = {
    "ReplayCausalConv": {
        **_required("channels", "kernel", "type_id"),
        **_ints(spec_len=1, silu=1, has_bias=1),
        **_ROW_FIELDS,
        **_ints(x_offset=0),
    },
    "ReplayMamba2": {
        **_required("nheads", "ngroups", "headdim", "dstate", "type_id"),
        **_ints(state_type_id=0, window=16, spec_len=1, stagger=1, dt_softplus=1),
        **_floats(dt_min=0.0, dt_max=math.inf),
        **_ints(z_enabled=0, exact_scan=0),
        **_ROW_FIELDS,
        **_ints(x_offset=0, dt_offset=0, b_offset=0, c_offset=0, z_offset=0),
    },
    "ReplayGatedDelta": {
        **_required("kind", "nheads", "ngroups", "headdim", "dstate", "type_id"),
        **_ints(state_type_id=0, window=16, spec_len=1, stagger=1, qk_l2norm=1, gate_bounded=0),
        **_floats(gate_lower_bound=-5.0, scale=0.0),
        **_ints(exact_scan=0),
        **_ROW_FIELDS,
        **_ints(q_offset=0, k_offset=0, v_offset=0, a_offset=0, b_offset=0),
    },
}

#: Inputs in front of the row inputs, and the flags that add one.
_DATA_INPUTS = {
    "ReplayCausalConv": ("x", "state", "weight", "bias"),
    "ReplayMamba2": ("x", "state", "dt", "dt_bias", "A", "B", "C", "D"),
    "ReplayGatedDelta": ("q", "state", "k", "v", "a", "b", "A_log", "dt_bias"),
}
_OPTIONAL_INPUTS = {
    "bias": "has_bias",
    "host_context_lengths": "remove_input_padding",
    "z": "z_enabled",
    "accepted": "has_accepted",
    "has_initial": "has_initial",
}
#: Data inputs that are read by vectors: first column and row length must be multiples of ALIGNMENT bytes.
VECTOR_INPUTS = ("x", "z", "B", "C", "q", "k", "v")
ALIGNMENT = 16
_ROW_INPUTS = ("host_request_types", "last_token_ids", "host_context_lengths", "slot_mapping")
#: Inputs that hold addresses or numbers in host memory: they may feed these plugins only, never a TensorRT layer.
HOST_INPUTS = ("host_request_types", "host_context_lengths")


def plugin_inputs(name: str, flags: Mapping[str, Any]) -> list[str]:
    """Names of the plugin's inputs in order, for field values ``flags`` (absent ones have their defaults).

    Raises:
        ReplayError: no such plugin, or a flag that it does not have.
    """
    fields = _fields_of(name)
    _refuse_unknown(name, flags)
    names = [*_DATA_INPUTS[name], *_ROW_INPUTS, "z", "accepted", "has_initial"]

    def present(tensor: str) -> bool:
        flag = _OPTIONAL_INPUTS.get(tensor)
        if flag is None:
            return True
        return flag in fields and bool(flags.get(flag, fields[flag].default))

    return [tensor for tensor in names if present(tensor)]


def plugin_field_values(name: str, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """``values`` as the arrays [1] that the plugin's fields take, int32 or float32; absent ones are left out.

    Raises:
        ReplayError: unknown plugin or field, a required one missing, a value that is no number or does not fit.
    """
    fields = _fields_of(name)
    _refuse_unknown(name, values)
    missing = [field for field, spec in fields.items() if spec.required and field not in values]
    require(not missing, f"plugin {name} needs field {', '.join(missing)}")
    return {field: _array(name, field, fields[field], value) for field, value in values.items()}


def plugin_fields(trt: Any, name: str, values: Mapping[str, Any]) -> list[Any]:
    """``values`` as a list of ``trt.PluginField``; ``trt`` is the tensorrt module. Raises as plugin_field_values."""
    kinds = {INT32: trt.PluginFieldType.INT32, FLOAT32: trt.PluginFieldType.FLOAT32}
    made = []
    for field, array in plugin_field_values(name, values).items():
        type_ = PLUGIN_FIELDS[name][field].type
        made.append(trt.PluginField(field, _held(type_, array[0].item()), kinds[type_]))
    return made


@functools.cache
def _held(type_: str, value: float) -> np.ndarray:
    """The array [1] of a value, the same one each time and never freed: a PluginField holds its address alone."""
    return np.array([value], dtype=np.float32 if type_ == FLOAT32 else np.int32)


def load_library(path: str | os.PathLike[str] | None = None) -> ctypes.CDLL:
    """The plugin library, loaded once per path. It links no TensorRT, so the order of imports does not matter.

    Raises:
        ReplayError: no such file, not loadable, or built without the plugins.
    """
    return _load(str(library_path() if path is None else path))


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    if not os.path.isfile(path):
        raise ReplayError(f"plugin library {path} does not exist; build it with `make lib` (needs nvcc)")
    try:
        library = ctypes.CDLL(path)
        library.initTrtllmReplaySsmPlugins.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.initTrtllmReplaySsmPlugins.restype = ctypes.c_bool
        library.replayssm_plugin_status.argtypes = [ctypes.c_char_p, ctypes.c_int32]
        library.replayssm_plugin_status.restype = ctypes.c_int32
        library.replayssm_last_error.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise ReplayError(f"plugin library {path} cannot be used: {error}; build it again with `make lib`") from None
    return library


def plugin_status(path: str | os.PathLike[str] | None = None) -> str:
    """What the library has registered where, and what it refused: one line each. Raises as :func:`load_library`."""
    library = load_library(path)
    buffer = ctypes.create_string_buffer(library.replayssm_plugin_status(None, 0) + 1)
    library.replayssm_plugin_status(buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def last_error(path: str | os.PathLike[str] | None = None) -> str:
    """Why the calling thread's last create_plugin or deserialisation was refused; empty if none was."""
    text: bytes = load_library(path).replayssm_last_error()
    return text.decode(errors="replace")


def register(
    logger: int | None = None, namespace: str = PLUGIN_NAMESPACE, path: str | os.PathLike[str] | None = None
) -> list[str]:
    """Register the plugins' creators with every TensorRT that the process has loaded; again changes nothing.

    Args:
        logger: address of an ``nvinfer1::ILogger`` that outlives the process's engines, or None for stderr.
        namespace: of the creators: a name of printable characters without blanks.

    Returns:
        One line for each creator that the library has registered in that namespace: name, version, namespace,
        interface, library.

    Raises:
        ReplayError: another kind of logger or namespace; no TensorRT is loaded (import tensorrt first), or none that
            the library knows; as load_library.
    """
    address = logger is None or (isinstance(logger, int) and not isinstance(logger, bool) and logger > 0)
    require(address, f"logger is {logger!r}; it must be None or the address of an nvinfer1::ILogger")
    named = isinstance(namespace, str) and namespace.isprintable() and namespace.split() == [namespace]
    require(named, f"namespace is {namespace!r}; it must be a name without blanks")
    library = load_library(path)
    done = library.initTrtllmReplaySsmPlugins(logger, namespace.encode())
    lines = plugin_status(path).splitlines()
    if not done:
        reason = library.replayssm_last_error().decode(errors="replace")
        raise ReplayError(f"the plugins were not registered: {reason}")
    prefix = "registered "
    found = [line[len(prefix) :] for line in lines if line.startswith(prefix)]
    return [line for line in found if f" {namespace} " in line or f" {namespace}_v2 " in line]


def _fields_of(name: str) -> dict[str, PluginFieldSpec]:
    if name not in PLUGIN_FIELDS:
        raise ReplayError(f"there is no plugin {name!r}; there are {', '.join(PLUGIN_FIELDS)}")
    return PLUGIN_FIELDS[name]


def _refuse_unknown(name: str, values: Mapping[str, Any]) -> None:
    unknown = sorted(str(field) for field in set(values) - set(PLUGIN_FIELDS[name]))
    require(not unknown, f"plugin {name} has no field {', '.join(unknown)}; it has {', '.join(PLUGIN_FIELDS[name])}")


def _array(plugin: str, field: str, spec: PluginFieldSpec, value: Any) -> np.ndarray:
    number = isinstance(value, (int, float, np.integer, np.floating, np.bool_))
    if spec.type == FLOAT32:
        require(number and value == value, f"field {field} of {plugin} is {value!r}; it must be a number")
        fits = value == 0 or abs(value) == math.inf or 2.0**-126 <= abs(value) < 2.0**128 - 2.0**103
        require(fits, f"field {field} of {plugin} is {value!r}; it must be 0, infinite or a normal float32")
        return np.array([value], dtype=np.float32)
    whole = number and not isinstance(value, (float, np.floating))
    require(whole, f"field {field} of {plugin} is {value!r}; it must be a whole number")
    require(-(2**31) <= int(value) < 2**31, f"field {field} of {plugin} is {value!r}; it must fit 32 bits")
    return np.array([int(value)], dtype=np.int32)
