#!/usr/bin/env bash
# Everything that needs a GPU and TensorRT: plugins alone, engines of a tiny model, each built, loaded in a new process and
# compared with torch, the step timed. Run from the repository root, after `make lib` and tests/engine/prepare.py.
#
#   tests/engine/run_all.sh PYTHON PREPARED OUT [plugins] [engines] [bench] [wide]
#
# PYTHON    command that runs a script with TensorRT, e.g. "python3", or for a TensorRT 8.6 that lies in a directory with
#           its own Python 3.9: "DIR/run.sh DIR"
# PREPARED  directory made by prepare.py, for `wide` also by wide_model.py (PREPARED/wide-float32, wide-float16)
# OUT       gets RESULTS.md and logs; engines go to OUT.engines
# ENGINES        engines to build and check, in this order (default: float32-w16 float32-w1 float16-w16 float16-w1)
# BUILD_SECONDS  most that one build may take (default 240)    CHECK_SECONDS  most that one check may take (default 240)
# BUILD_OPTIONS  further options of every build, e.g. "--builder-optimization-level 1"
# CHECK_OPTIONS  further options of every check, e.g. "--no-graphs"
# Where no cuda-python is installed, TRTLLM_REPLAYSSM_CUDART may name a libcudart.so; one is looked for otherwise.
# PYTHON and the options are lists of words:
# shellcheck disable=SC2086
set -uo pipefail
python=$1 prepared=$2 out=$3
shift 3
parts=${*:-plugins engines bench wide}
engines=$out.engines
mkdir -p "$out" "$engines"
ENGINES=${ENGINES:-float32-w16 float32-w1 float16-w16 float16-w1}
failed=0

if [ -z "${TRTLLM_REPLAYSSM_CUDART:-}" ]; then
    found=$(find /usr/local/cuda*/ /usr/lib /usr/local/lib /opt -name 'libcudart.so.1[23]*' 2>/dev/null | sort -V | tail -n 1)
    if [ -n "$found" ]; then export TRTLLM_REPLAYSSM_CUDART=$found; fi
fi
echo "libcudart: ${TRTLLM_REPLAYSSM_CUDART:-by name}"

limited() { # seconds, command
    timeout -k 10 "$@"
}

build() { # name, checkpoint, options; what is there of an earlier run does not count
    local name=$1 checkpoint=$prepared/$2
    shift 2
    rm -rf "${engines:?}/$name" "$engines/.$name".*.part
    limited "${BUILD_SECONDS:-240}" $python -m trtllm_replayssm build "$checkpoint" "$engines/$name" \
        --max-input-len 64 --max-positions 1024 "$@" ${BUILD_OPTIONS:-} >"$out/build-$name.log" 2>&1
}

build_named() { # name
    case $1 in
    # fp16 engines share one timing cache, so that those that are timed against each other have the same kernels.
    float32-w16) build "$1" checkpoint-float32 --window 16 --draft-tokens 3 --max-batch 16 ;;
    float32-w1) build "$1" checkpoint-float32 --window 1 --max-batch 16 ;;
    float16-w16) build "$1" checkpoint-float16 --window 16 --max-batch 512 --timing-cache "$engines/timing" ;;
    float16-w1) build "$1" checkpoint-float16 --window 1 --max-batch 512 --timing-cache "$engines/timing" ;;
    wide-*-w16) build "$1" "${1%-*}" --window 16 --max-batch 256 ;;
    wide-*-w1) build "$1" "${1%-*}" --window 1 --max-batch 256 ;;
    *)
        echo "unknown engine $1" >"$out/build-$1.log"
        return 2
        ;;
    esac
}

row() { # name, what became of it: a line of the table for an engine that was not compared
    echo "| $1 | | | | | $2 | | | | | |" | tee -a "$out/model.md"
}

ended() { # exit code, seconds allowed
    if [ "$1" = 124 ] || [ "$1" = 137 ]; then echo "not done after $2 s"; else echo "exit code $1"; fi
}

check_engines() {
    echo "| dtype | window | T | rows x tokens | positions | tokens | logits | states | graphs | load s | us per step, host included |
|---|---|---|---|---|---|---|---|---|---|---|" >"$out/model.md"
    for name in $ENGINES; do
        local began=$SECONDS lines
        build_named "$name"
        local status=$?
        tail -n 3 "$out/build-$name.log"
        echo "== build $name: $((SECONDS - began)) s"
        if [ "$status" != 0 ] || [ ! -f "$engines/$name/rank0.engine" ]; then
            failed=1
            row "$name" "no engine: $(ended "$status" "${BUILD_SECONDS:-240}")"
            continue
        fi
        lines=$(wc -l <"$out/model.md")
        limited "${CHECK_SECONDS:-240}" $python tests/engine/check_model.py "$engines/$name" \
            "$prepared/expected-${name%-*}.npz" "$out/model.md" ${CHECK_OPTIONS:-} >"$out/model-$name.log" 2>&1
        status=$?
        tail -n 12 "$out/model-$name.log"
        if [ "$status" != 0 ]; then
            failed=1
            if [ "$(wc -l <"$out/model.md")" = "$lines" ]; then
                row "$name" "not compared: $(ended "$status" "${CHECK_SECONDS:-240}")"
            fi
        fi
    done
}

time_pair() { # name, title: engines NAME-w16 and NAME-w1
    local both=("$engines/$1-w16" "$engines/$1-w1")
    if [ ! -f "${both[0]}/rank0.engine" ] || [ ! -f "${both[1]}/rank0.engine" ]; then
        echo "no pair of $1 engines to time"
        return
    fi
    local table=$out/bench-$1.md
    rm -f "$table"
    if limited "${CHECK_SECONDS:-240}" $python tests/engine/bench_step.py "${both[@]}" "$table" \
        >"$out/bench-$1.log" 2>&1; then
        { printf '%s: ' "$2" && cat "$table"; } >>"$out/bench.md"
    else
        failed=1
        printf '%s, %s: not timed\n\n' "$2" "$1" >>"$out/bench.md"
    fi
    tail -n 12 "$out/bench-$1.log"
}

case " $parts " in *" bench "* | *" wide "*) rm -f "$out/bench.md" ;; esac
for part in $parts; do
    started=$SECONDS
    case $part in
    plugins)
        limited "${CHECK_SECONDS:-240}" $python tests/engine/check_plugins.py "$out/plugins.md" >"$out/plugins.log" 2>&1 ||
            failed=1
        tail -n 40 "$out/plugins.log"
        ;;
    engines) check_engines ;;
    bench)
        for dtype in float32 float16; do time_pair "$dtype" "The model of the checks"; done
        ;;
    wide)
        for dtype in float32 float16; do
            name=wide-$dtype
            if [ ! -d "$prepared/$name" ]; then
                echo "$prepared/$name is not there; wide_model.py makes it"
                continue
            fi
            for window in w16 w1; do
                build_named "$name-$window" || failed=1
                tail -n 3 "$out/build-$name-$window.log"
            done
            time_pair "$name" "A model bound by its states (wide_model.py)"
        done
        ;;
    *)
        echo "unknown part $part; there are plugins, engines, bench, wide" >&2
        failed=1
        ;;
    esac
    echo "== $part: $((SECONDS - started)) s"
done
cat "$out"/plugins.md "$out"/model.md "$out"/bench.md >"$out/RESULTS.md" 2>/dev/null
exit "$failed"
