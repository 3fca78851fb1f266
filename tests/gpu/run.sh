#!/usr/bin/env bash
# Runs the tests that need a GPU on one, and measures it; under five minutes.
#   tests/gpu/run.sh [FOLDER]            builds for this GPU; results in FOLDER (build/gpu-results): tests.txt, kernels.json, kernels.txt
#   tests/gpu/run.sh --bundle            only builds, for sm_90, with the libraries beside, to be run on another machine, where nothing
#                                        can be installed: build/gpu-bundle; run.sh there takes it in place of a build
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=(cachestore_tests cuda_tests kernel_bench)
bundle=build/gpu-bundle
jobs=$(nproc)

build() {
  cmake -S . -B build/gpu -G Ninja -D CMAKE_BUILD_TYPE=Release -D KVTIER_CUDA=ON -D KVTIER_EMULATE_CUDA=OFF \
    -D KVTIER_CUDA_ARCHITECTURES="$1" >build/gpu-configure.log || { cat build/gpu-configure.log && return 1; }
  cmake --build build/gpu --parallel "$jobs" --target "${programs[@]}"
}

if [[ ${1:-} == --bundle ]]; then
  mkdir -p build && build 90
  rm -rf "$bundle" && mkdir -p "$bundle"
  for program in "${programs[@]}"; do
    cp "build/gpu/bin/$program" "$bundle/"
    ldd "build/gpu/bin/$program" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p'
  done | sort -u | grep -vE '/lib(c|m|dl|rt|pthread|resolv)\.so' | xargs -r cp -L -t "$bundle/"
  printf 'run.sh: the bundle is in %s, %s\n' "$bundle" "$(du -sh "$bundle" | cut -f1)"
  exit 0
fi

results=${1:-build/gpu-results}
mkdir -p "$results"
if ! gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>&1 | head -n 1) || [[ -z $gpu || $gpu == *fail* ]]; then
  printf 'run.sh: there is no GPU here (nvidia-smi: %s); nothing was run\n' "${gpu:-nothing}" >&2
  exit 3
fi
if [[ -d $bundle ]]; then
  bin=$bundle
  export LD_LIBRARY_PATH=$PWD/$bundle${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  build native
  bin=build/gpu/bin
fi

export TEST_DEVICE=cuda:0
{
  printf '%s, %s\n' "$gpu" "$(date -u +%F)"
  status=0
  timeout 90 "$bin/cuda_tests" || status=1
  # As many tests at a time as there are cores, to 8: each has a context of its own on the GPU.
  shards=$((jobs < 8 ? jobs : 8))
  pids=()
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard timeout 150 "$bin/cachestore_tests" --gtest_brief=1 \
      >"$results/store-$shard.txt" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$results"/store-*.txt
  printf 'tests on the GPU: %s\n' "$([[ $status -eq 0 ]] && echo passed || echo FAILED)"
} 2>&1 | tee "$results/tests.txt"
timeout 60 "$bin/kernel_bench" | tee "$results/kernels.txt"
timeout 60 "$bin/kernel_bench" --json >"$results/kernels.json"
grep -q 'tests on the GPU: passed' "$results/tests.txt"
