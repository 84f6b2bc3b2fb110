#!/usr/bin/env bash
# Everything that needs a GPU and TensorRT: plugins alone, engines of the tiny model built, loaded in new processes and
# compared with torch, the step timed. Run from the repository root, after `make lib` and tests/engine/prepare.py.
#
#   tests/engine/run_all.sh PYTHON PREPARED OUT [plugins] [build] [model] [bench]
#
# PYTHON    command that runs a script with TensorRT, e.g. "python3", or for a TensorRT 8.6 that lies in a directory with
#           its own Python 3.9: "DIR/run.sh DIR"
# PREPARED  directory made by prepare.py          OUT  gets RESULTS.md and logs; engines go to OUT.engines
# ENGINES   engines to build and check, of float32-w16 float32-w1 float16-w16 float16-w1 (default: all four)
# Where no cuda-python is installed, TRTLLM_REPLAYSSM_CUDART may name a libcudart.so; one is looked for otherwise.
set -uo pipefail
python=$1 prepared=$2 out=$3
shift 3
parts=${*:-plugins build model bench}
engines=$out.engines
mkdir -p "$out" "$engines"
ENGINES=${ENGINES:-float32-w16 float32-w1 float16-w16 float16-w1}
failed=0

if [ -z "${TRTLLM_REPLAYSSM_CUDART:-}" ]; then
    found=$(find /usr/local/cuda*/ /usr/lib /usr/local/lib /opt -name 'libcudart.so.1[23]*' 2>/dev/null | sort -V | tail -n 1)
    if [ -n "$found" ]; then export TRTLLM_REPLAYSSM_CUDART=$found; fi
fi
echo "libcudart: ${TRTLLM_REPLAYSSM_CUDART:-by name}"

build() { # name, dtype, options
    local name=$1 dtype=$2
    shift 2
    # shellcheck disable=SC2086
    $python -m trtllm_replayssm build "$prepared/checkpoint-$dtype" "$engines/$name" --overwrite --max-input-len 64 \
        --max-positions 1024 "$@" >"$out/build-$name.log" 2>&1
}

for part in $parts; do
    started=$SECONDS
    case $part in
    plugins) # shellcheck disable=SC2086
        $python tests/engine/check_plugins.py "$out/plugins.md" >"$out/plugins.log" 2>&1 || failed=1
        tail -n 40 "$out/plugins.log"
        ;;
    build)
        jobs=()
        for name in $ENGINES; do
            case $name in
            float32-w16) build "$name" float32 --window 16 --draft-tokens 3 --max-batch 16 & ;;
            float32-w1) build "$name" float32 --window 1 --max-batch 16 & ;;
            float16-w16) build "$name" float16 --window 16 --max-batch 512 --timing-cache "$engines/timing" & ;;
            *) continue ;;
            esac
            jobs+=("$!")
        done
        for job in "${jobs[@]}"; do wait "$job" || failed=1; done
        # Of one timing cache with the engine that it is timed against, so that both have the same kernels.
        if [[ " $ENGINES " == *" float16-w1 "* ]]; then
            build float16-w1 float16 --window 1 --max-batch 512 --timing-cache "$engines/timing" || failed=1
        fi
        tail -n 3 "$out"/build-*.log
        ls -la "$engines"/*/rank0.engine
        ;;
    model)
        echo "| dtype | window | T | rows x tokens | positions | tokens | logits | states | load s | us per step, host included |
|---|---|---|---|---|---|---|---|---|---|" >"$out/model.md"
        for name in $ENGINES; do
            # shellcheck disable=SC2086
            $python tests/engine/check_model.py "$engines/$name" "$prepared/expected-${name%-*}.npz" "$out/model.md" \
                >"$out/model-$name.log" 2>&1 || failed=1
            tail -n 12 "$out/model-$name.log"
        done
        ;;
    bench)
        rm -f "$out/bench.md"
        # shellcheck disable=SC2086
        $python tests/engine/bench_step.py "$engines/float16-w16" "$engines/float16-w1" "$out/bench.md" \
            >"$out/bench.log" 2>&1 || failed=1
        tail -n 12 "$out/bench.log"
        ;;
    *)
        echo "unknown part $part; there are plugins, build, model, bench" >&2
        failed=1
        ;;
    esac
    echo "== $part: $((SECONDS - started)) s"
done
cat "$out"/plugins.md "$out"/model.md "$out"/bench.md >"$out/RESULTS.md" 2>/dev/null
exit "$failed"
