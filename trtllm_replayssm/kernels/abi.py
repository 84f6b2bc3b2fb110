"""ctypes mirror of plugins/c_api/replayssm.h: the same structs, member for member. Needs the standard library alone."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_float, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from typing import Any

from ..layout import REGION_NAMES
from ..spec import DTYPE_BYTES, KINDS, READ_COPIES, ConvSpec, RecurrenceSpec

ABI_VERSION = 4

#: replayssm_status of an error of the CUDA runtime; any other but 0 is the caller's to put right.
CUDA_ERROR = 3

DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_BYTES, start=1)}
KIND_CODES = {name: code for code, name in enumerate(KINDS, start=1)}
READ_COPY_CODES = {name: code for code, name in enumerate(READ_COPIES)}


class CRecurrenceSpec(ctypes.Structure):
    """replayssm_recurrence_spec"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("nheads", c_int32),
        ("ngroups", c_int32),
        ("headdim", c_int32),
        ("dstate", c_int32),
        ("state_dtype", c_int32),
        ("act_dtype", c_int32),
        ("window", c_int32),
        ("spec_len", c_int32),
        ("read_copy", c_int32),
        ("stagger", c_int32),
        ("dt_softplus", c_int32),
        ("dt_min", c_float),
        ("dt_max", c_float),
        ("gate_bounded", c_int32),
        ("gate_lower_bound", c_float),
        ("qk_l2norm", c_int32),
    ]


class CConvSpec(ctypes.Structure):
    """replayssm_conv_spec"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("channels", c_int32),
        ("kernel", c_int32),
        ("act_dtype", c_int32),
        ("spec_len", c_int32),
        ("silu", c_int32),
    ]


class CRegion(ctypes.Structure):
    """replayssm_region"""

    _fields_ = [
        ("offset", c_int64),
        ("nbytes", c_int64),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("reserved", c_int32 * 2),
        ("strides", c_int64 * 4),
    ]


class CLayout(ctypes.Structure):
    """replayssm_layout: ``bytes(CLayout)`` equals ``bytes(SlotLayout)`` or ``bytes(ConvLayout)``"""

    _fields_ = [
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("region_count", c_uint32),
        ("slot_bytes", c_int64),
        ("ring_rows", c_int64),
        ("regions", CRegion * len(REGION_NAMES)),
    ]


class CPool(ctypes.Structure):
    """replayssm_pool"""

    _fields_ = [("base", c_void_p), ("stride_bytes", c_int64), ("slots", c_int64)]


class CTensor(ctypes.Structure):
    """replayssm_tensor"""

    _fields_ = [("data", c_void_p), ("strides", c_int64 * 4), ("dtype", c_int32), ("reserved", c_int32)]


class CIndex(ctypes.Structure):
    """replayssm_index"""

    _fields_ = [("data", c_void_p), ("bits", c_int32), ("reserved", c_int32)]


class CStepTuning(ctypes.Structure):
    """replayssm_step_tuning"""

    _fields_ = [
        ("heads_per_block", c_int32),
        ("flags", c_int32),
    ]


_MAMBA2_TENSORS = [(name, CTensor) for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "y")]


class Mamba2StepParams(ctypes.Structure):
    """replayssm_mamba2_step_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rows", c_int32),
        ("tokens", c_int32),
        ("tuning", CStepTuning),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("accepted", CIndex),
        *_MAMBA2_TENSORS,
    ]


class Mamba2ScanParams(ctypes.Structure):
    """replayssm_mamba2_scan_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("sequences", c_int32),
        ("tokens", c_int64),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("cu_seqlens", CIndex),
        ("has_initial", ctypes.POINTER(c_uint8)),
        *_MAMBA2_TENSORS,
        ("exact", c_int32),
        ("reserved", c_int32),
    ]


_GATED_DELTA_TENSORS = [(name, CTensor) for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "o")]


class GatedDeltaStepParams(ctypes.Structure):
    """replayssm_gated_delta_step_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rows", c_int32),
        ("tokens", c_int32),
        ("tuning", CStepTuning),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("accepted", CIndex),
        *_GATED_DELTA_TENSORS,
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class GatedDeltaScanParams(ctypes.Structure):
    """replayssm_gated_delta_scan_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("sequences", c_int32),
        ("tokens", c_int64),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("cu_seqlens", CIndex),
        ("has_initial", ctypes.POINTER(c_uint8)),
        *_GATED_DELTA_TENSORS,
        ("scale", c_float),
        ("exact", c_int32),
    ]


class MaterializeParams(ctypes.Structure):
    """replayssm_materialize_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("pairs", c_int32),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("src", CIndex),
        ("count", CIndex),
        ("dst", CIndex),
        ("A", CTensor),
    ]


class ResetParams(ctypes.Structure):
    """replayssm_reset_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("count", c_int32),
        ("spec", CRecurrenceSpec),
        ("pool", CPool),
        ("slots", CIndex),
    ]


class ConvStepParams(ctypes.Structure):
    """replayssm_conv_step_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rows", c_int32),
        ("tokens", c_int32),
        ("reserved", c_int32),
        ("spec", CConvSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("accepted", CIndex),
        ("x", CTensor),
        ("weight", CTensor),
        ("bias", CTensor),
        ("y", CTensor),
    ]


class ConvScanParams(ctypes.Structure):
    """replayssm_conv_scan_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("sequences", c_int32),
        ("tokens", c_int64),
        ("spec", CConvSpec),
        ("pool", CPool),
        ("slots", CIndex),
        ("cu_seqlens", CIndex),
        ("has_initial", ctypes.POINTER(c_uint8)),
        ("x", CTensor),
        ("weight", CTensor),
        ("bias", CTensor),
        ("y", CTensor),
    ]


class ConvMaterializeParams(ctypes.Structure):
    """replayssm_conv_materialize_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("pairs", c_int32),
        ("spec", CConvSpec),
        ("pool", CPool),
        ("src", CIndex),
        ("count", CIndex),
        ("dst", CIndex),
    ]


class ConvResetParams(ctypes.Structure):
    """replayssm_conv_reset_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("count", c_int32),
        ("spec", CConvSpec),
        ("pool", CPool),
        ("slots", CIndex),
    ]


class KvAppendParams(ctypes.Structure):
    """replayssm_kv_append_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rows", c_int32),
        ("tokens", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("parts", c_int32),
        ("reserved", c_int32),
        ("slots", c_int64),
        ("max_positions", c_int64),
        ("new_kv", c_void_p),
        ("cache", c_void_p),
        ("slot_mapping", CIndex),
        ("positions", CIndex),
        ("counts", CIndex),
    ]


#: Entry points that take (params*, stream).
OPERATIONS: dict[str, Any] = {
    "replayssm_mamba2_step": Mamba2StepParams,
    "replayssm_mamba2_scan": Mamba2ScanParams,
    "replayssm_gated_delta_step": GatedDeltaStepParams,
    "replayssm_gated_delta_scan": GatedDeltaScanParams,
    "replayssm_materialize": MaterializeParams,
    "replayssm_reset": ResetParams,
    "replayssm_conv_step": ConvStepParams,
    "replayssm_conv_scan": ConvScanParams,
    "replayssm_conv_materialize": ConvMaterializeParams,
    "replayssm_conv_reset": ConvResetParams,
    "replayssm_kv_append": KvAppendParams,
}


def c_recurrence_spec(spec: RecurrenceSpec) -> CRecurrenceSpec:
    """The C struct of a spec."""
    return CRecurrenceSpec(
        struct_size=ctypes.sizeof(CRecurrenceSpec),
        kind=KIND_CODES[spec.kind],
        nheads=spec.nheads,
        ngroups=spec.ngroups,
        headdim=spec.headdim,
        dstate=spec.dstate,
        state_dtype=DTYPE_CODES[spec.state_dtype],
        act_dtype=DTYPE_CODES[spec.act_dtype],
        window=spec.window,
        spec_len=spec.spec_len,
        read_copy=READ_COPY_CODES[spec.read_copy],
        stagger=int(spec.stagger),
        dt_softplus=int(spec.dt_softplus),
        dt_min=spec.dt_min,
        dt_max=spec.dt_max,
        gate_bounded=int(spec.gate == "bounded"),
        gate_lower_bound=spec.gate_lower_bound,
        qk_l2norm=int(spec.qk_l2norm),
    )


def c_conv_spec(spec: ConvSpec) -> CConvSpec:
    """The C struct of a convolution's spec."""
    return CConvSpec(
        struct_size=ctypes.sizeof(CConvSpec),
        channels=spec.channels,
        kernel=spec.kernel,
        act_dtype=DTYPE_CODES[spec.act_dtype],
        spec_len=spec.spec_len,
        silu=int(spec.activation == "silu"),
    )
