#!/usr/bin/env bash
# Every GPU test over two real GPUs, and every two-GPU benchmark. The tests take six to nine minutes, and all benchmarks
# together about ten:
#
#   benchmarks/two_gpus.sh                        all parts
#   benchmarks/two_gpus.sh tests step overlap     some of them
#
# JSON goes to OUT (default: benchmarks/results), traces and pictures beside it. A part that fails does not stop the others;
# the exit status says whether one did.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=()

part() { # name, seconds, command...
    local name=$1 seconds=$2
    shift 2
    printf '\n== %s: %s\n' "$name" "$*"
    timeout --kill-after=10 "$seconds" "$@" || failed+=("$name")
}

for name in ${*:-tests step host_step moe overlap collective_gemm megatron_gpt megatron_curves soak}; do
    case $name in
    tests) part tests 570 "$python" -m pytest -m gpu -q -p no:cacheprovider tests ;;
    step)
        part step 260 "$python" -m benchmarks.step --cases llama --impls 'unsharded,gtp,fsdp2 per block,fsdp2 per linear' \
            --out "$out/step.json"
        ;;
    host_step) part host_step 60 "$python" -m benchmarks.host_step --out "$out/host_step.json" ;;
    moe) part moe 120 "$python" -m benchmarks.step --cases moe --tokens 4096,1024 --out "$out/step_moe.json" ;;
    overlap) part overlap 100 "$python" -m benchmarks.overlap --out "$out/overlap.json" ;;
    collective_gemm)
        part collective_gemm 120 "$python" -m benchmarks.collective_gemm --quick --out "$out/collective_gemm.json"
        ;;
    megatron_gpt) part megatron_gpt 120 "$python" -m benchmarks.megatron_gpt --quick --out "$out/megatron_gpt.json" ;;
    megatron_curves) part megatron_curves 120 "$python" -m benchmarks.megatron_gpt --steps 200 --out "$out/megatron_curves.json" ;;
    soak) part soak 120 "$python" -m benchmarks.soak --out "$out/soak.json" ;;
    *) echo "no part named $name"; failed+=("$name") ;;
    esac
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
