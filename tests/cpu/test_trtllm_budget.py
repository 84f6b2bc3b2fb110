"""Slot budget of TensorRT-LLM's state pools: sizes against hand-computed bytes, limits, and what the messages say.

Oracle: bytes worked out from docs/contracts.md by hand for two small models, and for published models the published
dimensions: the slot that layout.py lays out must fit, and one unit less of either key must not.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trtllm_cases import make_config, write_checkpoint

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.models.checkpoint import read_checkpoint, trtllm_config
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.trtllm import budget

_SIZES = {"vocab_size": 128, "hidden_size": 64, "max_positions": 64}
#: Recurrent dimensions of published models (heads, groups, headdim, dstate).
PUBLISHED = {
    "nemotron-3-super": ("nemotron_h", "mamba2", 128, 8, 64, 128),
    "nemotron-h-56b": ("nemotron_h", "mamba2", 256, 8, 64, 256),
    "qwen3.5-4b": ("qwen3_5", "gated_delta", 32, 16, 128, 128),
    "qwen3.5-27b": ("qwen3_5", "gated_delta", 48, 16, 128, 128),
}


def published(name: str, dtype: str = "bfloat16", state_dtype: str = "float32") -> HybridConfig:
    family, kind, heads, groups, headdim, dstate = PUBLISHED[name]
    return HybridConfig(family=family, layers=(kind,), dtype=dtype, ssm_heads=heads, ssm_groups=groups,
                        ssm_head_dim=headdim, ssm_state_size=dstate, state_dtype=state_dtype, **_SIZES)  # fmt: skip


def test_small_model_by_hand() -> None:
    """H=4, P=16, N=16, G=2, fp32, window 16: 17 ring rows.

    cursor 4*4*8 = 128 | state 4*16*16*4 = 4096 | scale 4*4*8 = 128 | x 4*17*16*4 = 4352 | B 2*17*16*4 = 2176 |
    dt 4*80 = 320: each starts on a multiple of 128. Convolution, C = 128: cursor 2*8 = 16 -> 128 | 4 columns of 512.
    """
    config = make_config("mamba2")
    assert budget.slot_bytes(config, 16) == (128 + 4096 + 128 + 4352 + 2176 + 384, 128 + 4 * 512)
    pools = budget.needed(config, 16)
    assert (pools.state_size, pools.state_stride) == (44, 64 * 44 * 4)  # 11264 / 256 = 44
    assert (pools.conv_kernel, pools.conv_stride) == (6, 5 * 512)  # 2176 / 512 = 4.25 rows


@pytest.mark.parametrize("window", [1, 8, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_needed_is_the_least_that_fits(name: str, dtype: str, window: int) -> None:
    config = published(name, dtype)
    pools = budget.needed(config, window)
    assert pools.state_stride >= pools.state_bytes and pools.conv_stride >= pools.conv_bytes
    assert pools.state_stride % 16 == 0 and pools.conv_stride % 16 == 0
    assert budget.checked(config, window, pools.state_size, pools.conv_kernel) == pools
    with pytest.raises(ReplayError, match=f"state_size is {pools.state_size - 1}: .* window {window} needs"):
        budget.checked(config, window, pools.state_size - 1, pools.conv_kernel)
    with pytest.raises(ReplayError, match=f"conv_kernel is {pools.conv_kernel - 1}: .* the convolution slot needs"):
        budget.checked(config, window, pools.state_size, pools.conv_kernel - 1)


def test_half_precision_states_fit_the_stock_pool() -> None:
    """The pool is fp32 whatever the state is: a bf16 state leaves half of it for the ring."""
    config = published("nemotron-3-super", state_dtype="bfloat16")
    assert budget.needed(config, 16).state_size == 128
    assert budget.largest_window(config, 128) == 64
    assert budget.needed(published("nemotron-3-super"), 16).state_size == 139


def test_message_names_bytes_window_and_key() -> None:
    config = published("qwen3.5-4b")
    room = 32 * 128 * 140 * 4
    fits = budget.largest_window(config, 140)
    assert 1 <= fits < 16
    assert budget.slot_bytes(config, fits)[0] <= room < budget.slot_bytes(config, fits + 1)[0]
    need, key = budget.slot_bytes(config, 16)[0], budget.needed(config, 16).state_size
    with pytest.raises(ReplayError) as error:
        budget.checked(config, 16, 140, 6)
    text = str(error.value)
    assert f"has {room} bytes per slot, window 16 needs {need}" in text
    assert f"window {fits} would fit, or set state_size to {key} or more" in text
    with pytest.raises(ReplayError, match="no window would fit, or set state_size to"):
        budget.checked(config, 16, 128, 6)
    with pytest.raises(ReplayError, match="conv_kernel is 4: TensorRT-LLM's convolution pool has 49152 bytes per slot"):
        budget.checked(config, 16, key, 4)


def test_documented_figures() -> None:
    """docs/trtllm.md quotes the sizes and the message as they are."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "trtllm.md").read_text()
    for name, title in (
        ("nemotron-3-super", r"Nemotron-3-Super \(128 heads"),
        ("qwen3.5-4b", r"Qwen3\.5-4B \(32 heads"),
    ):
        size = budget.needed(published(name), 16).state_size
        percent = f"{100 * (size / 128 - 1):.1f}"
        assert re.search(rf"\| {title}.*\| fp32 \| {size} \| \+{re.escape(percent)} %", text), name
    with pytest.raises(ReplayError) as error:
        budget.checked(published("qwen3.5-4b"), 16, 140, 6)
    assert str(error.value) in text


@pytest.mark.parametrize("state_size", [0, -1, True, "128", 1 << 30, None])
def test_bad_keys(state_size: object) -> None:
    with pytest.raises(ReplayError, match=r"state_size is .*; it must be a whole number from 1 to"):
        budget.checked(make_config("mamba2"), 16, state_size, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["nemotron_h", "mamba2", "qwen3_5"])
@pytest.mark.parametrize("window", [1, 16, 33])
def test_config_states_room_and_truth(case: str, window: int) -> None:
    config = make_config(case, "bfloat16")
    data = json.loads(json.dumps(trtllm_config(config, window)))
    pools = budget.needed(config, window)
    assert (data["state_size"], data["conv_kernel"]) == (pools.state_size, pools.conv_kernel)
    truth = data["replayssm"]
    assert (truth["ssm_state_size"], truth["conv_kernel"], truth["window"]) == (16, 4, window)
    assert data["rnn_hidden_size"] * data["state_size"] * 4 == pools.state_stride
    assert (data["conv_kernel"] - 1) * data["rnn_conv_dim_size"] * 2 == pools.conv_stride
    assert data["architecture"] == ("MambaForCausalLM" if case == "mamba2" else "RecurrentGemmaForCausalLM")
    assert len(data["layer_types"]) == data["num_hidden_layers"] == len(config.stateful_layers)
    assert data["state_dtype"] == "float32"


def test_checkpoint_round_trip_and_edited_keys(tmp_path: Path) -> None:
    """A reader takes any pool that is not smaller than the model's own dimensions; builds check the budget."""
    config = make_config("qwen3_5", "bfloat16")
    path = write_checkpoint(tmp_path / "checkpoint", config, window=9)
    assert read_checkpoint(path) == (config, 9)
    file = path / "config.json"
    data = json.loads(file.read_text())
    for key, value in {"state_size": 16, "conv_kernel": 40}.items():
        file.write_text(json.dumps({**data, key: value}))
        assert read_checkpoint(path) == (config, 9)
    for key, value, least in (("state_size", 15, 16), ("conv_kernel", "4", 4), ("conv_kernel", None, 4)):
        file.write_text(json.dumps({**data, key: value}))
        with pytest.raises(ReplayError, match=f"{key} is {value!r}; it must be a whole number, {least} or more"):
            read_checkpoint(path)
    file.write_text(json.dumps({**data, "rnn_head_size": 8}))
    with pytest.raises(ReplayError, match="rnn_head_size is 8; the replayssm object implies 16"):
        read_checkpoint(path)


def test_window_of_the_replayssm_object_is_checked() -> None:
    with pytest.raises(ReplayError, match="window is 65; it must be a whole number from 1 to 64"):
        trtllm_config(make_config("mamba2"), 65)


def test_needs_the_standard_library_alone() -> None:
    code = "import sys\nimport trtllm_replayssm.trtllm.budget\nprint(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                          cwd=Path(__file__).resolve().parents[2])  # fmt: skip
    assert "torch" not in done.stdout
    assert dataclasses.is_dataclass(budget.PoolShape)
