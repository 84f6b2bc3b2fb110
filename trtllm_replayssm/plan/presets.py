"""Presets: published hybrid models and GPUs, as data.

Sources of the dimensions, as marked in ``source``: ``published`` is the published config.json; ``bridge`` is NVIDIA
Megatron-Bridge; ``hf`` is the default of the Hugging Face class that names the checkpoint; ``quoted`` is a third
party that quotes the config. Totals are counts of the built model, or of the dimensions where ``params_from`` says
so. Vocabulary sizes are those of the Hugging Face classes.
"""

from __future__ import annotations

from ..errors import ReplayError
from ..spec import GATED_DELTA, KIMI_DELTA, MAMBA2
from .shapes import Attention, Experts, Gpu, ModelShape, Recurrent

_BUILT = "count of the model built from its config"
_NEMOTRON_VOCAB = 131072
_QWEN35_VOCAB = 248320


def _nemotron(name: str, m: tuple[int, int, int, int], attn: tuple[int, int], hidden: int, params: int, source: str,
              ffn: str, experts: Experts | None = None, params_from: str = _BUILT) -> ModelShape:  # fmt: skip
    """Nemotron-H: ``m`` = (layers, H, P, N) with 8 groups, ``attn`` = (layers, KV heads) of head size 128."""
    layers, heads, headdim, dstate = m
    recurrent = Recurrent(MAMBA2, layers, heads, 8, headdim, dstate)
    attention = Attention(attn[0], attn[1], 128)
    lookup = _NEMOTRON_VOCAB * hidden
    return ModelShape(name, recurrent, attention, ffn, params, lookup, params_from, source, experts)


def _qwen(name: str, g: tuple[int, int], attn: tuple[int, int], hidden: int, params: int, source: str,
          ffn: str, experts: Experts | None = None, vocab: int = _QWEN35_VOCAB) -> ModelShape:  # fmt: skip
    """Qwen3-Next and later: ``g`` = (layers, HV) with 16 key heads and K = V = 128; ``vocab`` 0 = tied embedding."""
    recurrent = Recurrent(GATED_DELTA, g[0], g[1], 16, 128, 128)
    attention = Attention(attn[0], attn[1], 256)
    return ModelShape(name, recurrent, attention, ffn, params, vocab * hidden, _BUILT, source, experts)


def _kimi(name: str, layers: tuple[int, int], heads: int, hidden: int, latent: int, vocab: int, params: int,
          source: str, ffn: str, experts: Experts, params_from: str = _BUILT) -> ModelShape:  # fmt: skip
    """KDA + MLA: ``layers`` = (KDA, MLA), K = V = 128, ``latent`` = cached elements per token (kv_lora + rope)."""
    recurrent = Recurrent(KIMI_DELTA, layers[0], heads, heads, 128, 128)
    attention = Attention(layers[1], latent=latent)
    return ModelShape(name, recurrent, attention, ffn, params, vocab * hidden, params_from, source, experts)


def _moe(
    layers: int, count: int, top_k: int, matrices: int, width_in: int, width: int, dense: int = 0
) -> tuple[str, Experts]:
    """Description and experts of ``layers`` MoE layers beside ``dense`` MLPs."""
    title = f"{dense} MLP + " if dense else ""
    title += f"{layers} MoE ({count} experts, top {top_k})"
    return title, Experts(layers, count, top_k, matrices * width_in * width)


_SIZED = "estimate from the dimensions"

MODELS: dict[str, ModelShape] = {
    "nemotron-3-nano-4b": _nemotron(
        "Nemotron-3-Nano-4B", (21, 96, 80, 128), (4, 8), 3136, 3_973_556_832, "bridge", "17 MLP"
    ),
    "nemotron-3-nano-30b": _nemotron(
        "Nemotron-3-Nano-30B-A3B", (23, 64, 64, 128), (6, 2), 2688, 31_578_000_000, "published",
        *_moe(23, 128, 6, 2, 2688, 1856),
    ),
    "nemotron-3-super": _nemotron(
        "Nemotron-3-Super-120B-A12B", (40, 128, 64, 128), (8, 2), 4096, 120_670_000_000, "published",
        *_moe(40, 512, 22, 2, 1024, 2688),
    ),
    "nemotron-3-ultra": _nemotron(
        "Nemotron-3-Ultra-550B-A55B", (48, 256, 64, 128), (12, 2), 8192, 549_300_000_000, "published",
        *_moe(48, 512, 22, 2, 2048, 5120),
    ),
    "nemotron-nano-9b-v2": _nemotron(
        "Nemotron-Nano-9B-v2", (27, 128, 80, 128), (4, 8), 4480, 8_890_000_000,
        "bridge; groups not confirmed", "25 MLP", params_from=_SIZED,
    ),
    "nemotron-h-56b": _nemotron(
        "Nemotron-H-56B", (54, 256, 64, 256), (10, 8), 8192, 56_300_000_000, "published", "54 MLP"
    ),
    "qwen3-next-80b": _qwen(
        "Qwen3-Next-80B-A3B", (36, 32), (12, 2), 2048, 79_670_000_000, "hf",
        *_moe(48, 512, 10, 3, 2048, 512), vocab=151936,
    ),
    "qwen3.5-4b": _qwen("Qwen3.5-4B", (24, 32), (8, 4), 2560, 4_206_000_000, "quoted", "32 MLP", vocab=0),
    "qwen3.5-27b": _qwen("Qwen3.5-27B", (48, 48), (16, 4), 5120, 26_900_000_000, "published", "64 MLP"),
    "qwen3.5-35b": _qwen(
        "Qwen3.5-35B-A3B", (30, 32), (10, 2), 2048, 34_660_000_000, "published", *_moe(40, 256, 8, 3, 2048, 512)
    ),
    "qwen3.5-122b": _qwen(
        "Qwen3.5-122B-A10B", (36, 64), (12, 2), 3072, 122_100_000_000, "published", *_moe(48, 256, 8, 3, 3072, 1024)
    ),
    "qwen3.5-397b": _qwen(
        "Qwen3.5-397B-A17B", (45, 64), (15, 2), 4096, 396_300_000_000, "published", *_moe(60, 512, 10, 3, 4096, 1024)
    ),
    "kimi-linear-48b": _kimi(
        "Kimi-Linear-48B-A3B", (20, 7), 32, 2304, 512 + 64, 163840, 49_120_000_000, "quoted, hf",
        *_moe(26, 256, 8, 3, 2304, 1024, dense=1),
    ),
    "kimi-k3": _kimi(
        "Kimi-K3 (text)", (69, 24), 96, 7168, 512 + 64, 163840, 2_780_000_000_000, "published, bridge",
        *_moe(92, 896, 16, 3, 3584, 3072, dense=1), params_from=_SIZED,
    ),
    "glm-5.3-flash": _kimi(
        "GLM-5.3-Flash (text)", (34, 11), 64, 4096, 512, 154880, 312_700_000_000, "hf, quoted",
        *_moe(42, 288, 8, 3, 4096, 2048, dense=3),
    ),
    "ling-3.0-flash": _kimi(
        "Ling-3.0-Flash", (35, 7), 32, 2560, 512 + 64, 157184, 124_400_000_000, "hf",
        *_moe(40, 512, 8, 3, 2560, 768, dense=2),
    ),
}  # fmt: skip

ALIASES = {
    "nemotron-3.5-lightning": "nemotron-3-nano-30b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.8-27b": "qwen3.5-27b",
    "qwen3.6-35b": "qwen3.5-35b",
}


def _gpu(name: str, terabytes: float, gigabytes: float, teraflops: float, source: str = "datasheet") -> Gpu:
    return Gpu(name, round(terabytes * 1e12), round(gigabytes * 1e9), round(teraflops * 1e12), source)


#: Dense bf16 rates. "measured copy": a device-to-device copy on that GPU; the datasheet says 4.8 TB/s for the H200.
GPUS: dict[str, Gpu] = {
    "a100-40gb": _gpu("A100 SXM 40 GB", 1.555, 40, 312),
    "a100-80gb": _gpu("A100 SXM 80 GB", 2.039, 80, 312),
    "l4": _gpu("L4", 0.300, 24, 121),
    "l40s": _gpu("L40S", 0.864, 48, 362),
    "h100": _gpu("H100 SXM", 3.35, 80, 989),
    "h100-pcie": _gpu("H100 PCIe", 2.0, 80, 756),
    "h100-nvl": _gpu("H100 NVL", 3.9, 94, 835),
    "h200": _gpu("H200 SXM", 4.27, 141, 989, "measured copy"),
    "b200": _gpu("B200", 8.0, 180, 2250),
    "gb200": _gpu("GB200", 8.0, 186, 2500),
    "b300": _gpu("B300", 8.0, 288, 2500),
    "rtx-4090": _gpu("GeForce RTX 4090", 1.008, 24, 165),
    "rtx-5090": _gpu("GeForce RTX 5090", 1.792, 32, 209),
}


def model_preset(name: str) -> ModelShape:
    """Preset by key or alias, any case. Raises ReplayError naming the keys there are."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in MODELS:
        raise ReplayError(f"model is {name!r}; it must be a path to a config.json or its directory, or one of "
                          f"{', '.join(MODELS)}")  # fmt: skip
    return MODELS[key]


def gpu_preset(name: str) -> Gpu:
    """GPU by key, any case. Raises ReplayError naming the keys there are."""
    key = name.strip().lower()
    if key not in GPUS:
        raise ReplayError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)} (or give --bandwidth and --memory)")
    return GPUS[key]


def device_class(name: str) -> str:
    """Key of the preset that a device name as the driver gives it belongs to, or '' where there is none."""
    plain = f" {name.lower()} ".replace("-", " ").replace("_", " ")
    return next((key for parts, key in _DEVICE_NAMES if all(part in plain for part in parts)), "")


#: Words of a device name -> preset; the first line whose words all occur counts.
_DEVICE_NAMES = (
    (("gb200",), "gb200"),
    (("b200",), "b200"),
    (("b300",), "b300"),
    (("h200",), "h200"),
    (("h100", "nvl"), "h100-nvl"),
    (("h100", "pcie"), "h100-pcie"),
    (("h100",), "h100"),
    (("a100", "80gb"), "a100-80gb"),
    (("a100",), "a100-40gb"),
    (("l40s",), "l40s"),
    ((" l4 ",), "l4"),
    (("rtx 4090",), "rtx-4090"),
    (("rtx 5090",), "rtx-5090"),
)
