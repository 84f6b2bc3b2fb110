"""Engine directories: what each is, and whether it runs with the TensorRT and the plugin library that are here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ReplayError
from .probes import Result


def examine_engine(path: str, found: Mapping[str, Result]) -> dict[str, Any]:
    """One engine directory, judged by the probes' results.

    Returns:
        name, runs, detail (what it is, or the first thing that is in its way), do (a command, '' where none would do).
    """
    from ..build.directory import check_library, check_tensorrt, describe, read_decay, read_engine, read_engine_config

    directory = Path(path)
    again = f"trtllm-replayssm build CHECKPOINT {path if not directory.exists() else 'ENGINE'}"
    try:
        config = read_engine_config(directory)
        again = f"trtllm-replayssm build CHECKPOINT {path} --overwrite"
        read_engine(directory, config)
        read_decay(directory, config)
        module = config.tensorrt[0]
        version = found.get(module, {}).get("version")
        if version is None:
            return _row(path, False, f"needs {' '.join(config.tensorrt)}, which is not here", f"pip install {module}")
        check_tensorrt(config, module, version)
        library = found["library"]
        if "version" not in library:
            return _row(path, False, f"needs the plugin library, which is {library['status']}", "make lib")
        from ..plugins import library_path

        check_library(config, library_path(), library["version"])
    except (ReplayError, OSError) as error:
        return _row(path, False, str(error), again)
    it = describe(directory, config)
    detail = (
        f"{it['family']}, {it['dtype']}, window {it['window']}, {it['draft_tokens']} drafts, "
        f"{it['max_batch']} sequences of {it['max_positions']:,} tokens, {it['tensorrt']}"
    )
    return _row(path, True, detail, "")


def _row(name: str, runs: bool, detail: str, do: str) -> dict[str, Any]:
    return {"name": name, "runs": runs, "detail": detail, "do": do}
