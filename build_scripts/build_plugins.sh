#!/usr/bin/env bash
# Builds trtllm_replayssm/lib/libtrtllm_replayssm.so with nvcc alone (no CMake, no TensorRT SDK, no GPU).
#
#   build_scripts/build_plugins.sh                                    sm_90 (H100, H200)
#   CUDA_ARCHS="80 89 90 100 120" build_scripts/build_plugins.sh      all that releases carry
#
# CUDA_ARCHS  GPU architectures, separated by spaces; default 90.   JOBS  parallel compilations; default all cores.
# NVCC        the compiler. Otherwise: nvcc on PATH, in CUDA_HOME, or of the PyPI wheels that the python in PYTHON sees:
#             pip install "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*" \
#                 "nvidia-nvvm==13.0.*" "nvidia-cuda-cccl==13.0.*"
# DEBUG_CHECKS=1  the plugins also look for bad slot ids on the device and print them (see plugins/tensorrt/README.md).
# TENSORRT_INCLUDE_DIR  headers of a TensorRT SDK that replace plugins/abi's declarations of the same major version.
# Objects that are newer than all that they were compiled from are kept. A C++17 host compiler is needed too.
set -euo pipefail
cd "$(dirname "$0")/.."

archs=${CUDA_ARCHS:-90}
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-python3}
out=trtllm_replayssm/lib/libtrtllm_replayssm.so
objects=build/lib-objects
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' trtllm_replayssm/__init__.py)

find_nvcc() {
    if [ -n "${NVCC:-}" ]; then echo "$NVCC"; return; fi
    if command -v nvcc >/dev/null; then command -v nvcc; return; fi
    if [ -n "${CUDA_HOME:-}" ] && [ -x "$CUDA_HOME/bin/nvcc" ]; then echo "$CUDA_HOME/bin/nvcc"; return; fi
    "$python" - <<'PY'
import pathlib
import site
import sys

for root in [*site.getsitepackages(), site.getusersitepackages()]:
    for path in sorted(pathlib.Path(root).glob("nvidia/*/bin/nvcc"), reverse=True):
        print(path)
        sys.exit(0)
sys.exit("no nvcc: set NVCC or CUDA_HOME, put nvcc on PATH, or install its PyPI wheels (see the top of this script)")
PY
}

nvcc=$(find_nvcc)
root=$(cd "$(dirname "$nvcc")/.." && pwd)
flags=(-std=c++17 -O3 -Xcompiler "-fPIC,-fvisibility=hidden,-Wall")
flags+=("-DREPLAYSSM_VERSION_STRING=\"$version\"" "-DREPLAYSSM_ARCH_STRING=\"$archs\"")
if [ "${DEBUG_CHECKS:-0}" = 1 ]; then flags+=(-DREPLAYSSM_DEBUG_CHECKS); fi
if [ -n "${TENSORRT_INCLUDE_DIR:-}" ]; then flags+=(-DREPLAYSSM_TENSORRT_SDK -isystem "$TENSORRT_INCLUDE_DIR"); fi
for arch in $archs; do
    suffix=$arch
    if [ "$arch" = 90 ]; then suffix=90a; fi # wgmma and setmaxnreg
    flags+=(-gencode "arch=compute_$suffix,code=sm_$suffix")
done
link=(-shared -cudart static -Xlinker "--exclude-libs,ALL,--no-undefined,--version-script=plugins/exports.map")
if [ -e "$root/lib/libcudart_static.a" ]; then link+=("-L$root/lib"); fi

# Other flags or another compiler make every object stale.
mkdir -p "$objects" "$(dirname "$out")"
stamp="$objects/flags"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$nvcc ${flags[*]}" ]; then
    rm -f "$objects"/*.o
    echo "$nvcc ${flags[*]}" >"$stamp"
fi

object_of() { echo "$objects/$(echo "${1#plugins/}" | tr '/' '_').o"; }
# Whether an object has to be compiled: it, or the list of what it was compiled from, is missing or older than a source.
is_stale() {
    local object=$1 file
    [ -e "$object" ] && [ -e "$object.d" ] || return 0
    for file in $(sed -e 's/^[^:]*://' -e 's/\\$//' "$object.d"); do
        [ ! "$file" -nt "$object" ] && [ -e "$file" ] || return 0
    done
    return 1
}
sources=$(find plugins -name '*.cu' -o -name '*.cpp' | sort)
started=$SECONDS
running=0
failed=0
for source in $sources; do
    object=$(object_of "$source")
    is_stale "$object" || continue
    echo "$source"
    (
        "$nvcc" "${flags[@]}" -MMD -MF "$object.d" -MT object -c "$source" -o "$object.part"
        mv "$object.part" "$object"
    ) &
    running=$((running + 1))
    if [ "$running" -ge "$jobs" ]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
done
while [ "$running" -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
done
if [ "$failed" -ne 0 ]; then
    echo "build failed" >&2
    exit 1
fi
# shellcheck disable=SC2046
"$nvcc" "${link[@]}" $(for source in $sources; do object_of "$source"; done) -o "$out.part"
mv "$out.part" "$out"
echo "built $out for sm $archs in $((SECONDS - started)) s"
