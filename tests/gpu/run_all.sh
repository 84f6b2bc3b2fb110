#!/usr/bin/env bash
# Everything that needs the GPU, in one go. Run from the repository root, after `make lib`.
#   tests/gpu/run_all.sh OUTPUT_DIR [tests] [sanitizer] [bench] [profile]
set -uo pipefail
out=$1
shift
failed=0
for part in "$@"; do
    started=$SECONDS
    case $part in
    tests) python3 -m pytest tests/gpu -q --tb=short -p no:cacheprovider 2>&1 | tee "$out/tests.log" || failed=1 ;;
    sanitizer)
        jobs=()
        for tool in memcheck racecheck initcheck; do
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                python3 tests/gpu/sanitizer_cases.py >"$out/$tool.log" 2>&1 &
            jobs+=("$!")
        done
        for job in "${jobs[@]}"; do wait "$job" || failed=1; done
        tail -n 2 "$out"/*check.log
        ;;
    bench) python3 -m benchmarks.bench_mamba2 --csv "$out/mamba2_step.csv" || failed=1 ;;
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
