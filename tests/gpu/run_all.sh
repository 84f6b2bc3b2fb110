#!/usr/bin/env bash
# Everything that needs the GPU, in one go. Run from the repository root, after `make lib`.
#   tests/gpu/run_all.sh OUTPUT_DIR [tests] [sanitizer] [bench] [profile]
#
# JOBS  processes that run tests (default: one less than there are cores, 12 at most; a test waits for the CPU more than for
#       the GPU). With pytest-xdist they share all tests, without it each takes a file at a time.
set -uo pipefail
out=$1
cores=$(($(nproc) - 1))
jobs=${JOBS:-$((cores < 1 ? 1 : cores > 12 ? 12 : cores))}
shift
failed=0
for part in "$@"; do
    started=$SECONDS
    case $part in
    tests)
        if python3 -c 'import xdist' 2>/dev/null; then
            python3 -m pytest tests/gpu -q --tb=short -p no:cacheprovider -n "$jobs" --dist worksteal -rf \
                >"$out/tests.log" 2>&1 || failed=1
            grep -E '^(FAILED|ERROR)' "$out/tests.log"
            tail -n 1 "$out/tests.log"
            echo "== $part: $((SECONDS - started)) s"
            continue
        fi
        # shellcheck disable=SC2016
        printf '%s\n' tests/gpu/test_*.py | xargs -P "$jobs" -I{} sh -c \
            'python3 -m pytest {} -q --tb=short -p no:cacheprovider >"$0/$(basename {} .py).log" 2>&1' "$out" || failed=1
        for file in tests/gpu/test_*.py; do
            log=$out/$(basename "$file" .py).log
            echo "$(basename "$file"): $(tail -n 1 "$log")"
            grep -E '^(FAILED|ERROR)' "$log"
        done
        ;;
    sanitizer)
        pids=()
        for tool in memcheck racecheck initcheck; do
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                python3 tests/gpu/sanitizer_cases.py >"$out/$tool.log" 2>&1 &
            pids+=("$!")
        done
        for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
        tail -n 2 "$out"/*check.log
        ;;
    bench)
        python3 -m benchmarks.bench_mamba2 --csv "$out/mamba2_step.csv" || failed=1
        python3 -m benchmarks.bench_scan --exact --csv "$out/mamba2_scan.csv" || failed=1
        python3 -m benchmarks.bench_gated_delta --csv "$out/gated_delta.csv" || failed=1
        ;;
    profile)
        # Few calls on little memory: ncu saves and restores what a kernel writes.
        ncu --clock-control none --set full -k regex:mamba2_step -s 4 -c 1 -f -o "$out/profile" \
            python3 -m benchmarks.bench_mamba2 --modes mixed --batches 32 --bandwidth 4.3 >"$out/ncu.log" 2>&1 || failed=1
        ncu --import "$out/profile.ncu-rep" --page details >"$out/profile.txt"
        ;;
    *)
        echo "unknown part $part; there are tests, sanitizer, bench, profile" >&2
        failed=1
        ;;
    esac
    echo "== $part: $((SECONDS - started)) s"
done
exit "$failed"
