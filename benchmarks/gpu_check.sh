#!/usr/bin/env bash
# The GPU kernels on this machine's NVIDIA GPU, in about ten minutes: built by nvcc as they are written and as hipify
# translates them, compared with the CPU's kernels, watched by compute-sanitizer, between two processes, and timed
# beside a device-to-device copy. Needs nvcc and g++; python3 with torch to hipify (or an earlier run's result). With a
# torch for CUDA the package's own module is built too, and torch.distributed's collectives run on it in two processes.
#
#   benchmarks/gpu_check.sh              exit 0: everything was right, and as fast as meant; the last line says so
#   benchmarks/gpu_check.sh --dry-run    says what it would run, and that all the sources are there; wants no GPU
set -uo pipefail
cd "$(dirname "$0")/.."
out=build/gpu_check
goal=${GPU_CHECK_GOAL:-0.85} # of the copy's speed

stop() { echo "gpu_check: $*" >&2; exit 1; }
dry_run=
case "${1:-}" in
  "") ;;
  --dry-run) dry_run=1 ;;
  *) stop "unknown argument $1; there is --dry-run" ;;
esac
if [ -n "$dry_run" ]; then
  nvcc=nvcc sanitizer=compute-sanitizer capability=90
else
  nvidia-smi -L >/dev/null 2>&1 || stop "there is no NVIDIA GPU here (nvidia-smi finds none)"
  nvcc=$(PATH="${CUDA_HOME:-/usr/local/cuda}/bin:$PATH" command -v nvcc) || stop "there is no nvcc here"
  command -v g++ >/dev/null || stop "there is no g++ here"
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  sanitizer=$(PATH="${CUDA_HOME:-/usr/local/cuda}/bin:$PATH" command -v compute-sanitizer) || sanitizer=
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  "$nvcc" --version | tail -n 1
fi

failed=() left_out=()
stage() { # stage NAME SECONDS COMMAND...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  if [ -n "$dry_run" ]; then
    echo "$name, at most $limit s: $*"
    return 0
  fi
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" 2>&1
  local code=$?
  [ $code -eq 0 ] || failed+=("$name")
  echo "== $name: exit $code after $((SECONDS - began)) s"
  return $code
}

compile() { # compile TARGET KERNELS CHECKS SUFFIX [FLAG...]: the program from these folders' sources
  local target=$1 kernels=$2 checks=$3 suffix=$4 file job jobs=()
  shift 4
  if [ -n "$dry_run" ]; then
    echo "$target/gpu_check: $nvcc -arch=sm_$capability $* of $kernels/*.$suffix $checks/*.$suffix"
    [ "$suffix" = hip ] && return 0 # they are made by hipify
    for file in "$kernels"/*."$suffix" "$checks"/*."$suffix" csrc/memory/{strided_copy,view}.cc hip_kernels/boxes.cc; do
      [ -f "$file" ] || stop "there is no $file"
    done
    return 0
  fi
  mkdir -p "$target"
  for file in "$kernels"/*."$suffix" "$checks"/*."$suffix"; do
    "$nvcc" -x cu -std=c++20 -O3 "-arch=sm_$capability" -lineinfo "$@" -Icsrc "-I$kernels" -c "$file" \
      -o "$target/$(basename "$file" ".$suffix").o" & jobs+=($!)
  done
  for file in csrc/kernels/*.cc csrc/memory/{strided_copy,view}.cc hip_kernels/boxes.cc; do
    g++ -std=c++20 -O3 -ffp-contract=off -Icsrc -c "$file" -o "$target/host_$(basename "$file" .cc).o" & jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || return 1; done
  "$nvcc" "-arch=sm_$capability" "$target"/*.o -o "$target/gpu_check"
}

hipify() {
  [ -z "$dry_run" ] || return 0
  python3 -m hipify_rules --out "$out/hipified/kernels" --root hip_kernels hip_kernels/*.cu hip_kernels/*.cuh hip_kernels/kernels.h &&
    python3 -m hipify_rules --out "$out/hipified/checks" --root benchmarks/gpu_check benchmarks/gpu_check/*.{cu,h}
}

has_torch_for_cuda() {
  [ -n "$dry_run" ] || python3 -c 'import sys, torch; sys.exit(not (torch.version.cuda and torch.cuda.is_available()))' 2>/dev/null
}

began=$SECONDS
compile "$out/as_written" hip_kernels benchmarks/gpu_check cu || stop "nvcc's messages are above"
echo "== built in $((SECONDS - began)) s"
program=$out/as_written/gpu_check
stage cases 60 "$program" cases 6 8
stage processes 30 "$program" processes 20
if [ -n "$sanitizer" ]; then
  stage memcheck 90 "$sanitizer" --tool memcheck --error-exitcode 1 "$program" cases 1 1
  stage racecheck 90 "$sanitizer" --tool racecheck --error-exitcode 1 "$program" cases 1 1
else
  failed+=("compute-sanitizer (there is none here)")
fi
stage speed 60 "$program" speed "$goal"

if has_torch_for_cuda; then
  stage module 180 env "TORCH_CUDA_ARCH_LIST=${capability%?}.${capability: -1}" python3 setup.py -q build_ext --inplace &&
    stage collectives 60 python3 benchmarks/gpu_check/collectives.py 1
else
  left_out+=("torch.distributed's collectives (python3 has no torch for CUDA that finds the GPU)")
fi

mkdir -p "$out"
if hipify >"$out/hipify.log" 2>&1 || [ -d "$out/hipified/checks" ]; then
  began=$SECONDS
  if compile "$out/as_hip" "$out/hipified/kernels" "$out/hipified/checks" hip -Itests/hip_on_nvidia; then
    echo "== hipified, built in $((SECONDS - began)) s"
    stage hipified_cases 60 "$out/as_hip/gpu_check" cases 6 8
    stage hipified_processes 30 "$out/as_hip/gpu_check" processes 20
    stage hipified_speed 60 "$out/as_hip/gpu_check" speed "$goal"
  else
    failed+=("building the hipified sources")
  fi
else
  failed+=("hipify ($(tail -n 1 "$out/hipify.log"))")
fi

[ ${#left_out[@]} -eq 0 ] || echo "gpu_check: left out: ${left_out[*]}"
if [ -n "$dry_run" ]; then
  echo "gpu_check: nothing was run"
  exit 0
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "gpu_check: failed: ${failed[*]}"
  exit 1
fi
echo "gpu_check: everything was right"
