"""Engines of tiny models by the real builder: their tensors, their config, their plugins in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtllm_cases import CASES, VOCAB_SIZE, make_config, write_checkpoint

from trtllm_replayssm import plugins, trtllm
from trtllm_replayssm.trtllm import budget, load

Engines = Callable[..., tuple[Path, Path]]
#: Deserialises an engine; its argument vector says whether the plugins are registered first. Prints its tensor names.
DESERIALISE = """
import json, sys
import tensorrt as trt
if sys.argv[2] == "register":
    from trtllm_replayssm import plugins
    plugins.register()
import tensorrt_llm
engine = trt.Runtime(trt.Logger()).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
if engine is None:
    sys.exit(7)
print(json.dumps([engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]))
"""


def deserialise(engine_dir: Path, how: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", DESERIALISE, str(engine_dir / "rank0.engine"), how],
                          capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, **environment})  # fmt: skip


def tensor_names(case: str) -> set[str]:
    config = make_config(case)
    names = {"input_ids", "logits", "last_token_ids", "slot_mapping", "host_request_types", "host_context_lengths"}
    for layer in config.recurrent_layers:
        names |= {f"conv_state_ptr_{layer}", f"rnn_state_ptr_{layer}"}
    if config.attention_layers:
        names |= {"position_ids", "cache_indirection", "kv_cache_block_offsets", "host_kv_cache_block_offsets",
                  "host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping", "sequence_length", "context_lengths",
                  "host_past_key_value_lengths", "host_sink_token_length", "host_runtime_perf_knobs",
                  "host_context_progress", "host_max_attention_window_sizes"}  # fmt: skip
    return names


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_engine_in_a_new_process(engines: Engines, case: str, dtype: str) -> None:
    """Registered by Python, and by LD_PRELOAD into a process that knows nothing of this package."""
    _, engine = engines(case, dtype)
    for how, environment in (("register", {}), ("preload", {"LD_PRELOAD": str(plugins.library_path())})):
        done = deserialise(engine, how, **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert set(found) == tensor_names(case)


def test_without_the_plugins_the_engine_is_refused(engines: Engines) -> None:
    _, engine = engines("mamba2")
    environment = dict.fromkeys(("LD_PRELOAD", "TRTLLM_REPLAYSSM_AUTOREGISTER"), "")
    assert deserialise(engine, "none", **environment).returncode != 0


@pytest.mark.parametrize("case", CASES)
def test_config_of_the_engine(engines: Engines, case: str) -> None:
    _, engine = engines(case)
    data = json.loads((engine / "config.json").read_text())
    made, pools = data["pretrained_config"], budget.needed(make_config(case, "bfloat16"), 16)
    assert (made["state_size"], made["conv_kernel"]) == (pools.state_size, pools.conv_kernel)
    assert made["vocab_size"] == VOCAB_SIZE and made["replayssm"]["ssm_state_size"] == 16
    assert load.check_engine(engine)["pools"]["state_stride"] == pools.state_stride


@pytest.mark.parametrize("case", CASES)
def test_trtllm_build_command(engines: Engines, tmp_path: Path, case: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", make_config(case, "bfloat16"))
    model_file = Path(trtllm.__file__).parent / trtllm.MODEL_CLS_FILE
    command: list[Any] = ["trtllm-build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine",
                          "--model_cls_file", model_file, "--model_cls_name", trtllm.MODEL_CLS_NAME,
                          "--max_batch_size", 2, "--max_input_len", 32, "--max_seq_len", 64,
                          "--max_num_tokens", 64]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    done = deserialise(tmp_path / "engine", "register")
    assert set(json.loads(done.stdout.strip().splitlines()[-1])) == tensor_names(case)
