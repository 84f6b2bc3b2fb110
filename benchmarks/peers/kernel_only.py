"""Makes a folder with the peers' kernels alone, for machines where the whole packages cannot be installed.

    pip download --no-deps --dest wheels vllm==0.33.0 flashinfer-python==0.7.4 mamba-ssm==2.3.2.post1 fla-core==0.6.0
    python -m benchmarks.peers.kernel_only --wheels wheels --output kernels
    PYTHONPATH=kernels python -m benchmarks.bench_against_peers

From each archive only the files below are taken, unchanged; the ``__init__`` of most packages is left empty, and where
a kernel file imports the rest of its package (platform queries, a logger), a stand-in of a few lines is written.
FlashInfer's kernels are compiled on first use; its C++ headers are taken along unless --no-headers. Needs the standard
library alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from trtllm_replayssm.errors import ReplayError

_VLLM_OPS = "vllm/model_executor/layers/mamba/ops/"
_VLLM_FLA = "vllm/third_party/flash_linear_attention/ops/"
#: Archive pattern -> files wanted, as patterns of paths inside the archive (a leading folder of an sdist left out).
WANTED = {
    "vllm-*.whl": (
        f"{_VLLM_OPS}mamba_ssm.py",
        f"{_VLLM_OPS}replayssm_config.py",
        f"{_VLLM_OPS}selective_state_update_replayssm_output_only.py",
        f"{_VLLM_OPS}triton_helpers.py",
        f"{_VLLM_OPS}ssd_[bcs]*.py",
        f"{_VLLM_OPS}configs/selective_state_update/*NVIDIA*",
        f"{_VLLM_FLA}*.py",
        "*.dist-info/METADATA",
    ),
    "flashinfer_python-*.whl": (
        *(f"flashinfer/{name}.py" for name in ("_build_meta", "version", "api_logging", "autotune_cache", "utils")),
        *(f"flashinfer/{name}.py" for name in ("compilation_context", "tactics_blocklist", "tllm_enums", "tllm_utils")),
        "flashinfer/autotuner/*.py",
        "flashinfer/trace/*.py",
        "flashinfer/fused_moe/utils.py",
        *(f"flashinfer/jit/{name}.py" for name in ("_cuda_architecture", "core", "cpp_ext", "env", "spdlog", "utils")),
        "flashinfer/jit/tllm_utils.py",
        "flashinfer/jit/mamba/*.py",
        "flashinfer/mamba/checkpointing_ssu.py",
        "flashinfer/mamba/selective_state_update.py",
        *(f"flashinfer/data/csrc/{name}*" for name in ("checkpointing_ssu", "selective_state_update", "tvm_ffi_utils")),
        "flashinfer/data/csrc/flashinfer_mamba_binding.cu",
        "*.dist-info/METADATA",
    ),
    "fla_core-*.whl": ("fla/*.py", "*.dist-info/METADATA"),
    "mamba_ssm-*.tar.gz": (
        "mamba_ssm/ops/triton/[ls]*.py",
        "mamba_ssm/ops/triton/k_activations.py",
        "mamba_ssm/utils/determinism.py",
        "mamba_ssm/utils/torch.py",
        "PKG-INFO",
    ),
}
#: What FlashInfer's kernels include.
HEADERS = ("flashinfer/data/include/*", "flashinfer/data/cutlass/include/*")
#: Packages whose own __init__ is kept; all others are left empty.
KEPT_INIT = ("fla/", "flashinfer/autotuner/", "flashinfer/trace/", "flashinfer/jit/mamba/")
STAND_INS = {
    "vllm/envs.py": "VLLM_TUNED_CONFIG_FOLDER = None\n",
    "vllm/_custom_ops.py": "",
    "vllm/logger.py": """\
import logging

class _Logger(logging.LoggerAdapter):
    def info_once(self, message, *values, **ignored):
        self.info(message, *values)

    def warning_once(self, message, *values, **ignored):
        self.warning(message, *values)

def init_logger(name):
    return _Logger(logging.getLogger(name), {})
""",
    "vllm/platforms.py": """\
import torch

class _Cuda:
    def is_cuda(self):
        return True

    is_cuda_alike = is_cuda

    def is_device_capability(self, capability):
        major, minor = torch.cuda.get_device_capability()
        return capability in (major * 10 + minor, (major, minor))

    def is_device_capability_family(self, family, device_id=0):
        return torch.cuda.get_device_capability()[0] * 10 == family

    def is_cpu(self):
        return False

    is_rocm = is_xpu = is_cpu

current_platform = _Cuda()
""",
    "vllm/triton_utils.py": """\
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice

HAS_TRITON = True
""",
    "vllm/utils/gpu_sync_debug.py": "import contextlib\n\ngpu_sync_allowed = contextlib.nullcontext\n",
    "vllm/utils/torch_utils.py": """\
import torch

def async_tensor_h2d(data, dtype, device):
    return torch.as_tensor(data).to(device=device, dtype=dtype)
""",
    "vllm/utils/platform_utils.py": """\
import torch

def get_device_name_as_file_name():
    return torch.cuda.get_device_name().replace(" ", "_")
""",
    "vllm/v1/attention/backends/utils.py": "NULL_BLOCK_ID = 0\nPAD_SLOT_ID = -1\n",
}


def archive_members(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(path inside the archive, reader of its bytes) of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                yield name, lambda name=name: wheel.read(name)  # type: ignore[misc]
        return
    with tarfile.open(path) as sdist:
        for member in sdist.getmembers():
            stream = sdist.extractfile(member)
            if stream is not None:
                yield member.name.partition("/")[2], stream.read


def extract(archive: Path, patterns: tuple[str, ...], output: Path) -> list[str]:
    """Write the wanted files of one archive under ``output``. Returns their paths.

    Raises:
        ReplayError: a pattern that matches nothing, so another release with other files.
    """
    written = []
    unused = set(patterns)
    for name, read in archive_members(archive):
        hits = {pattern for pattern in patterns if fnmatch.fnmatch(name, pattern)}
        if not hits or name.endswith("/"):
            continue
        unused -= hits
        if name.endswith("/__init__.py") and not name.startswith(KEPT_INIT):
            continue
        target = output / (f"{archive.name.removesuffix('.tar.gz')}.dist-info/METADATA" if name == "PKG-INFO" else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read())
        written.append(name)
    if unused:
        raise ReplayError(f"{archive.name} has no file {', '.join(sorted(unused))}; this script knows another release")
    return written


def complete_packages(output: Path) -> None:
    """An empty __init__.py in every folder of Python files that lacks one."""
    for source in output.rglob("*.py"):
        for folder in source.parents:
            if folder == output:
                break
            (folder / "__init__.py").touch()


def build(wheels: Path, output: Path, headers: bool) -> None:
    """Make the folder from the archives that are there. Raises ReplayError if there is none."""
    found = 0
    for pattern, wanted in WANTED.items():
        for archive in sorted(wheels.glob(pattern)):
            found += 1
            names = wanted + (HEADERS if headers and "flashinfer" in pattern else ())
            print(f"{archive.name}: {len(extract(archive, names, output))} files")
            if archive.name.startswith("vllm"):
                for name, text in STAND_INS.items():
                    (output / name).parent.mkdir(parents=True, exist_ok=True)
                    (output / name).write_text(text)
    if not found:
        raise ReplayError(f"{wheels} holds none of {', '.join(WANTED)}")
    complete_packages(output)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the downloaded archives")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--no-headers", action="store_true", help="leave FlashInfer's C++ headers out")
    args = parser.parse_args()
    try:
        build(args.wheels, args.output, not args.no_headers)
    except ReplayError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
