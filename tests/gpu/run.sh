#!/usr/bin/env bash
# Runs the tests that need a GPU on one, and measures it; under five minutes, building aside.
#   tests/gpu/run.sh [FOLDER]            builds for this GPU; results in FOLDER (build/gpu-results): tests.txt, figures.json, figures.txt
#   tests/gpu/run.sh --bundle            only builds, for sm_90, with the libraries beside, to be run on another machine, where nothing
#                                        can be installed: build/gpu-bundle
#   tests/gpu/run.sh --bundled [FOLDER]  runs what the bundle has
# Transfers between GPUs need NCCL (libnccl.so.2); server and worker share the one GPU, as two hosts would.
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=(cachestore_tests cuda_tests gpu_client_tests kernel_bench kvtierd nccl_bench)
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
    strip "$bundle/$program"
    ldd "build/gpu/bin/$program" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p'
  done | sort -u | grep -vE '/lib(c|m|dl|rt|pthread|resolv)\.so' | xargs -r cp -L -t "$bundle/"
  printf 'run.sh: the bundle is in %s, %s\n' "$bundle" "$(du -sh "$bundle" | cut -f1)"
  exit 0
fi

bundled=false
if [[ ${1:-} == --bundled ]]; then
  bundled=true
  shift
fi
results=${1:-build/gpu-results}
mkdir -p "$results"
if ! gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>&1 | head -n 1) || [[ -z $gpu || $gpu == *fail* ]]; then
  printf 'run.sh: there is no GPU here (nvidia-smi: %s); nothing was run\n' "${gpu:-nothing}" >&2
  exit 3
fi
if $bundled; then
  bin=$bundle
  export LD_LIBRARY_PATH=$PWD/$bundle${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  build native
  bin=build/gpu/bin
fi
nccl=$(ldconfig -p 2>/dev/null | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)

export TEST_DEVICE=cuda:0 TEST_KVTIERD=$bin/kvtierd
{
  printf '%s, %s\n' "$gpu" "$(date -u +%F)"
  status=0
  timeout 60 env KVTIER_EXHAUSTIVE=1 "$bin/cuda_tests" || status=1
  # As many tests at a time as there are cores, to 8: each has a context of its own on the GPU.
  shards=$((jobs < 8 ? jobs : 8))
  pids=()
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard timeout 90 "$bin/cachestore_tests" --gtest_brief=1 \
      >"$results/store-$shard.txt" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$results"/store-*.txt
  if [[ -n $nccl ]]; then
    timeout 50 "$bin/gpu_client_tests" || status=1
  else
    printf 'skipped: gpu_client_tests, nccl_bench: there is no libnccl.so.2 here\n'
  fi
  printf 'tests on the GPU: %s\n' "$([[ $status -eq 0 ]] && echo passed || echo FAILED)"
} 2>&1 | tee "$results/tests.txt"
{
  timeout 50 "$bin/kernel_bench" --json-file "$results/kernels.json"
  [[ -z $nccl ]] || timeout 40 "$bin/nccl_bench" --json-file "$results/nccl.json"
} | tee "$results/figures.txt"
{
  printf '{"kernels": '
  cat "$results/kernels.json"
  [[ -z $nccl ]] || { printf ', "nccl": ' && cat "$results/nccl.json"; }
  printf '}\n'
} >"$results/figures.json"
grep -q 'tests on the GPU: passed' "$results/tests.txt"
