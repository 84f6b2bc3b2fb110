"""HFWeights: the same weights, bit for bit, from every published naming and file layout; errors name the tensor.

Oracles: files that transformers writes itself (sharded, multimodal wrapper), names changed to other published forms,
and transformers' own reordering of Qwen3-Next's grouped rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.models.decoder import weight_shapes
from trtllm_replayssm.models.hf import HFWeights, read_hf_config

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory per kind, as transformers saves it. Not to be changed."""
    return {kind: oracles.tiny_hf_dir(kind, tmp_path_factory.mktemp(kind)) for kind in oracles.KINDS}


def load(directory: Path) -> Tensors:
    """All weights under our names, fp32."""
    weights = HFWeights(directory, read_hf_config(directory))
    return {name: weights.make(name, torch.float32) for name in weights}


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of the directory ``source`` with changed tensors."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    tensors = change(load_file(source / "model.safetensors"))
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    return target


def edit_config(directory: Path, **changes: Any) -> None:
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, **changes}))


def assert_equal(got: Tensors, want: Tensors) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", oracles.KINDS)
def test_every_weight_of_the_decoder_is_made(saved: dict[str, Path], kind: str) -> None:
    weights = load(saved[kind])
    shapes = weight_shapes(read_hf_config(saved[kind]))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shapes


PREFIXES = [
    ("nemotron_h", "backbone.", "model."),
    ("nemotron_h", "backbone.", ""),
    ("qwen3_next", "model.", ""),
    ("qwen3_5", "model.", "model.language_model."),
    ("qwen3_5", "model.", "language_model.model."),
    ("kimi_linear", "model.", ""),
]


@pytest.mark.parametrize(("kind", "old", "new"), PREFIXES)
def test_prefixes(saved: dict[str, Path], tmp_path: Path, kind: str, old: str, new: str) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        assert any(name.startswith(old) for name in tensors)
        return {new + k[len(old) :] if k.startswith(old) else k: v for k, v in tensors.items()}

    assert_equal(load(rewritten(saved[kind], tmp_path, renamed)), load(saved[kind]))


@pytest.mark.parametrize("kind", oracles.KINDS)
def test_sharded_as_transformers_shards(saved: dict[str, Path], tmp_path: Path, kind: str) -> None:
    oracles.hf_model(kind).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal(load(tmp_path), load(saved[kind]))


def test_multimodal_wrapper_as_transformers_writes_it(saved: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3_5ForConditionalGeneration: text_config, model.language_model. prefix, a vision tower to skip."""
    import transformers

    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config=oracles.hf_config("qwen3_5").to_dict(), vision_config={**vision, "num_position_embeddings": 16}
    )
    wrapper = transformers.Qwen3_5ForConditionalGeneration._from_config(config).float()
    text = oracles.hf_model("qwen3_5")
    wrapper.model.language_model.load_state_dict(text.model.state_dict())
    wrapper.lm_head.load_state_dict(text.lm_head.state_dict())
    wrapper.save_pretrained(tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    weights = HFWeights(tmp_path, read_hf_config(tmp_path))
    assert weights.skipped and set(weights.skipped) == {n for n in names if n.startswith("model.visual.")}
    assert_equal(load(tmp_path), load(saved["qwen3_5"]))


def test_unused_parts_are_skipped_and_listed(saved: dict[str, Path], tmp_path: Path) -> None:
    extra = ["mtp.layers.0.mixer.q_proj.weight", "model.visual.blocks.0.norm.weight", "layers.0.rotary_emb.inv_freq"]
    path = rewritten(saved["nemotron_h"], tmp_path, lambda t: {**t, **{name: torch.zeros(2) for name in extra}})
    assert sorted(HFWeights(path, read_hf_config(path)).skipped) == sorted(extra)
    assert_equal(load(path), load(saved["nemotron_h"]))


def flat_projections(tensors: Tensors) -> Tensors:
    """Qwen3-Next's grouped projections as Qwen3.5's flat ones, ordered by transformers' own method."""
    reorder = oracles.hf_model("qwen3_next").model.layers[0].linear_attn.fix_query_key_value_ordering
    out = dict(tensors)
    for name in [n for n in tensors if n.endswith("in_proj_qkvz.weight")]:
        stem = name.removesuffix("in_proj_qkvz.weight")
        qkvz, ba = (out.pop(f"{stem}in_proj_{part}.weight") for part in ("qkvz", "ba"))
        q, k, v, z, b, a = (t[0].flatten(1).T for t in reorder(qkvz.T[None], ba.T[None]))
        named = {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}
        out |= {f"{stem}in_proj_{part}.weight": tensor for part, tensor in named.items()}
    return out


def test_grouped_and_flat_projections_are_one(saved: dict[str, Path], tmp_path: Path) -> None:
    path = rewritten(saved["qwen3_next"], tmp_path, flat_projections)
    assert_equal(load(path), load(saved["qwen3_next"]))


def test_attention_rows_are_queries_gates_keys_values(saved: dict[str, Path]) -> None:
    tensors = load_file(saved["qwen3_5"] / "model.safetensors")
    stem = "model.layers.3.self_attn"
    published = tensors[f"{stem}.q_proj.weight"].view(4, 2, 16, 32)
    fused = load(saved["qwen3_5"])["layers.6.mixer.qkv_proj.weight"]
    q, gate, k, v = fused.split([64, 64, 32, 32])
    for head in range(4):
        assert torch.equal(q[16 * head : 16 * head + 16], published[head, 0])
        assert torch.equal(gate[16 * head : 16 * head + 16], published[head, 1])
    assert torch.equal(k, tensors[f"{stem}.k_proj.weight"]) and torch.equal(v, tensors[f"{stem}.v_proj.weight"])


def as_published(tensors: Tensors) -> Tensors:
    """transformers writes dense MLPs under the experts' prefix; published checkpoints do not. A_log as [heads]."""
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    return {name: tensor.flatten() if name.endswith("A_log") else tensor for name, tensor in renamed.items()}


def test_kimi_names_as_published(saved: dict[str, Path], tmp_path: Path) -> None:
    path = rewritten(saved["kimi_linear"], tmp_path, as_published)
    assert_equal(load(path), load(saved["kimi_linear"]))


def test_kimi_rows(saved: dict[str, Path]) -> None:
    tensors, ours = load_file(saved["kimi_linear"] / "model.safetensors"), load(saved["kimi_linear"])
    stem = "model.layers.0.self_attn"
    parts = ours["layers.0.mixer.in_proj.weight"].split([48, 48, 48, 16, 16, 3])
    for part, name in zip(parts, ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"), strict=True):
        assert torch.equal(part, tensors[f"{stem}.{name}.weight"]), name
    for part, name in zip(ours["layers.0.mixer.conv.weight"].split(48), "qkv", strict=True):
        assert torch.equal(part, tensors[f"{stem}.{name}_conv1d.weight"][:, 0])
    assert torch.equal(ours["layers.0.mixer.dt_bias"][1], tensors[f"{stem}.dt_bias"][16:32])


def test_norms_fold_one_plus_w_but_for_the_gated_one(saved: dict[str, Path], tmp_path: Path) -> None:
    path = rewritten(saved["qwen3_5"], tmp_path, lambda t: {k: v.bfloat16() for k, v in t.items()})
    published, ours = load_file(path / "model.safetensors"), load(path)
    w = published["model.layers.1.post_attention_layernorm.weight"]
    assert torch.equal(ours["layers.3.norm.weight"], w.float() + 1.0), "in fp32: bf16 would lose the low bits of w"
    assert torch.equal(ours["layers.0.mixer.norm.weight"], published["model.layers.0.linear_attn.norm.weight"].float())


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_embeddings(saved: dict[str, Path], tmp_path: Path, head: str) -> None:
    def change(tensors: Tensors) -> Tensors:
        embedding = tensors["model.embed_tokens.weight"]
        lm_head = {"equal": embedding.clone(), "different": tensors["lm_head.weight"]}
        rest = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
        return {**rest, "lm_head.weight": lm_head[head]} if head in lm_head else rest

    path = rewritten(saved["qwen3_5"], tmp_path, change)
    edit_config(path, tie_word_embeddings=True)
    if head == "different":
        with pytest.raises(ReplayError, match=r"lm_head\.weight differs from the embedding, but tie_word_embeddings"):
            load(path)
    else:
        want = load(saved["qwen3_5"])
        want.pop("lm_head.weight")
        assert_equal(load(path), want)


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


D, MLP = "backbone.layers.0.mixer.D", "backbone.layers.1.mixer.up_proj.weight"
A_LOG = "backbone.layers.0.mixer.A_log"
TENSOR_ERRORS = {
    "missing": (drop(D), r"tensor layers\.0\.mixer\.D is missing from the checkpoint"),
    "missing head": (drop("lm_head.weight"), r"tensor lm_head\.weight is missing"),
    "missing many": (lambda t: {D: t[D]}, r"tensor embeddings\.weight, .* and \d+ more is missing"),
    "surplus": (
        put("backbone.layers.9.mixer.D", torch.zeros(6)),
        r"tensor backbone\.layers\.9\.mixer\.D is in the checkpoint, but its config has no such weight",
    ),
    "transposed": (
        lambda t: {**t, MLP: t[MLP].T.contiguous()},
        r"tensor backbone\.layers\.1\.mixer\.up_proj\.weight has shape .* implies",
    ),
    "shape": (put(D, torch.zeros(7)), r"tensor backbone\.layers\.0\.mixer\.D has shape \[7\]; .* implies \[6\]"),
    "quantized": (
        put(MLP, torch.zeros(48, 32, dtype=torch.float8_e4m3fn)),
        r"tensor backbone\.layers\.1\.mixer\.up_proj\.weight is F8_E4M3; weights must be F32, BF16, F16, F64",
    ),
    "integers": (put(D, torch.zeros(6, dtype=torch.int64)), r"tensor backbone\.layers\.0\.mixer\.D is I64"),
    "twice": (put("model.layers.0.mixer.D", torch.zeros(6)), r"are the same weight"),
    "nan": (put(D, torch.full((6,), torch.nan)), r"tensor backbone\.layers\.0\.mixer\.D holds NaN or infinite values"),
    "decay": (put(A_LOG, torch.full((6,), 89.0)), r"tensor backbone\.layers\.0\.mixer\.A_log holds 89; at most 88 "),
}


@pytest.mark.parametrize("case", TENSOR_ERRORS)
def test_tensor_errors(saved: dict[str, Path], tmp_path: Path, case: str) -> None:
    change, message = TENSOR_ERRORS[case]
    path = rewritten(saved["nemotron_h"], tmp_path, change)
    with pytest.raises(ReplayError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_qwen_projection_is_named_in_the_form_that_is_there(saved: dict[str, Path], tmp_path: Path) -> None:
    path = rewritten(saved["qwen3_next"], tmp_path, drop("model.layers.1.linear_attn.in_proj_ba.weight"))
    with pytest.raises(ReplayError, match=r"tensor layers\.1\.linear_attn\.in_proj_ba\.weight is missing"):
        load(path)


def test_float16_overflow_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    path = rewritten(saved["nemotron_h"], tmp_path, lambda t: {**t, MLP: t[MLP] * 1e6})
    weights = HFWeights(path, read_hf_config(path))
    assert torch.isfinite(weights.make("layers.1.mixer.up_proj.weight", torch.bfloat16)).all()
    with pytest.raises(ReplayError, match=r"up_proj\.weight holds NaN or infinite values \(as torch\.float16\)"):
        weights.make("layers.1.mixer.up_proj.weight", torch.float16)


def sharded(saved: dict[str, Path], folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the tiny Nemotron-H in one shard and its index."""
    shutil.copy(saved["nemotron_h"] / "config.json", folder)
    shutil.copy(saved["nemotron_h"] / "model.safetensors", folder / "a.safetensors")
    names = list(load_file(folder / "a.safetensors"))
    return folder, {"weight_map": dict.fromkeys(names, "a.safetensors")}


INDEX_ERRORS = {
    "missing shard": (lambda m: {**m, D: "b.safetensors"}, r"names b\.safetensors, which is not in"),
    "outside": (lambda m: {**m, D: "../b.safetensors"}, r"'\.\./b\.safetensors' is not a plain file name"),
    "not held": (lambda m: {**m, "ghost": "a.safetensors"}, r"ghost is not in .*a\.safetensors, where the index"),
    "empty": (lambda m: {}, "weight_map must be an object of tensor names and file names"),
    "mistyped": (lambda m: {**m, D: 3}, "weight_map must be an object"),
    "list": (lambda m: list(m), "weight_map must be an object"),
}


@pytest.mark.parametrize("case", INDEX_ERRORS)
def test_index_errors(saved: dict[str, Path], tmp_path: Path, case: str) -> None:
    path, index = sharded(saved, tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load(path), load(saved["nemotron_h"]))
    change, message = INDEX_ERRORS[case]
    changed = {"weight_map": change(index["weight_map"])}
    (path / "model.safetensors.index.json").write_text(json.dumps(changed))
    with pytest.raises(ReplayError, match=message):
        load(path)


def test_damaged_files(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(saved["nemotron_h"] / "config.json", tmp_path)
    with pytest.raises(ReplayError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(tmp_path)
    whole = (saved["nemotron_h"] / "model.safetensors").read_bytes()
    for data in (whole[:-10], whole[:100], b"", b"not safetensors at all"):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(ReplayError, match=r"model\.safetensors is not a whole safetensors file") as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ReplayError, match=r"index\.json is not JSON"):
        load(tmp_path)
