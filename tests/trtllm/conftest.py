"""Tests against the real tensorrt_llm 1.2.1, on a machine with a GPU. Outside the default test paths:

    python -m pytest tests/trtllm

Where tensorrt_llm 1.2.1, a GPU or the plugin library is missing, every test here is skipped with that reason. CI runs
tests/cpu alone, where the same code meets a recorded stand-in (tests/recorded_trtllm).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trtllm_cases import make_config, make_weights, write_checkpoint

from trtllm_replayssm import plugins
from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.trtllm import requirement
from trtllm_replayssm.trtllm.build import build

MAX_INPUT_LEN, MAX_SEQ_LEN, MAX_BATCH_SIZE = 64, 400, 4


def missing() -> str:
    """Why these tests cannot run here; empty where they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if not plugins.library_path().is_file():
        return f"{plugins.library_path()} does not exist; build it with `make lib`"
    try:
        requirement.tensorrt_llm()
        requirement.module("functional")
    except ReplayError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason and Path(item.path).parent == Path(__file__).resolve().parent:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """engines(case, dtype, window): (checkpoint, engine) directories, built once."""
    made: dict[tuple[str, str, int], tuple[Path, Path]] = {}

    def get(case: str, dtype: str = "bfloat16", window: int = 16) -> tuple[Path, Path]:
        key = (case, dtype, window)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{case}-{dtype}-{window}")
            config = make_config(case, dtype)
            write_checkpoint(folder / "checkpoint", config, make_weights(config), window=window)
            build(folder / "checkpoint", folder / "engine", max_batch_size=MAX_BATCH_SIZE,
                  max_input_len=MAX_INPUT_LEN, max_seq_len=MAX_SEQ_LEN, max_num_tokens=1024)  # fmt: skip
            made[key] = (folder / "checkpoint", folder / "engine")
        return made[key]

    return get
