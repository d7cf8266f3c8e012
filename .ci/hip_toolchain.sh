#!/usr/bin/env bash
# Prints the path of a hipcc that compiles for gfx90a, gfx942 and gfx950: that of an installed ROCm ($ROCM_PATH,
# /opt/rocm), else one that is put together, once, in DIR (build/hip_toolchain). Needs no GPU, no ROCm and no root.
#
#   .ci/hip_toolchain.sh [DIR]        exit 0: the path is on stdout; 77: it cannot be had here, a line on stderr says why
#
# The compiler is the clang with AMD's backend inside the ziglang package, with the resource headers of the clang-tidy
# package of the same version; HIP's headers and device libraries are Debian's newest, unpacked and not installed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=$(realpath -m "${1:-$here/../build/hip_toolchain}")
gpus=(gfx90a gfx942 gfx950)
python_packages=(ziglang==0.17.1 clang-tidy==22.1.8)
clang=22 # the major version of both, which the device libraries have to be for
system_packages=(libamdhip64-dev rocm-device-libs-$clang libhsa-runtime-dev librccl-dev)

skip() { echo "no HIP toolchain: $*" >&2; exit 77; }
last_line() { grep -v '^[[:space:]]*$' "$1" | tail -n 1; }

compiles() { # compiles HIPCC LOG: a kernel for each GPU
  local gpu kernel=$'#include <hip/hip_runtime.h>\n__global__ void zero(int* x) { x[threadIdx.x] = 0; }'
  for gpu in "${gpus[@]}"; do
    "$1" -x hip --offload-arch="$gpu" --cuda-device-only -O1 -c -o /dev/null - >"$2" 2>&1 <<<"$kernel" || return 1
  done
}

log=$(mktemp)
trap 'rm -rf "$log" "${work:-}"' EXIT

for rocm in "${ROCM_PATH:-}" /opt/rocm; do
  if [ -n "$rocm" ] && [ -x "$rocm/bin/hipcc" ] && compiles "$rocm/bin/hipcc" "$log"; then
    echo "$rocm/bin/hipcc"
    exit 0
  fi
done

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # two callers: the second finds what the first has made
if [ -x "$dir/rocm/bin/hipcc" ]; then
  echo "$dir/rocm/bin/hipcc"
  exit 0
fi

for tool in apt-get dpkg python3; do
  command -v $tool >/dev/null || skip "putting one together takes $tool, and there is none"
done
[ "$(uname -m)" = x86_64 ] || skip "putting one together is for x86_64 only"

echo "Putting a HIP compiler together in $dir (about a minute, 600 MB)" >&2
work=$(mktemp -d "$dir.XXXXXX")
cd "$work"
python3 -m pip --disable-pip-version-check install -q --no-deps --target python "${python_packages[@]}" >"$log" 2>&1 ||
  skip "pip install ${python_packages[*]}: $(last_line "$log")"

# Debian's newest packages, from the mirror that apt uses here, through lists and a cache that are ours alone.
mirror=$(apt-get indextargets --format "\$(REPO_URI) \$(ORIGIN) \$(COMPONENT)" | awk '$2 == "Debian" && $3 == "main" { print $1; exit }')
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$mirror" ] && [ -e $keys ] || skip "HIP's headers come from Debian's packages, and apt knows no Debian mirror"
mkdir -p apt/lists/partial apt/cache/archives/partial packages root
for suite in experimental sid; do echo "deb [signed-by=$keys] $mirror $suite main"; done >apt/sources.list
private=(-o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/apt/lists"
  -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
apt-get "${private[@]}" update -qq >"$log" 2>&1 || skip "apt-get update: $(last_line "$log")"
for package in "${system_packages[@]}"; do
  version=$(apt-cache "${private[@]}" madison "$package" | awk '{ print $3 }' | sort -V | tail -n 1)
  [ -n "$version" ] || skip "Debian has no $package any more"
  (cd packages && apt-get "${private[@]}" download -q "$package=$version") >"$log" 2>&1 ||
    skip "apt-get download $package=$version: $(last_line "$log")"
done
for package in packages/*.deb; do dpkg -x "$package" root; done

mkdir -p rocm/amdgcn rocm/bin rocm/share bin
mv root/usr/include rocm/include
mv root/usr/share/hip rocm/share/hip
mv "root/usr/lib/llvm-$clang/lib/clang/$clang/amdgcn/bitcode" rocm/amdgcn/bitcode
rm -rf apt packages root
cp "$here/offload_bundler.py" bin/clang-offload-bundler
cat >bin/lld <<'LLD'
#!/bin/sh
# clang asks for "lld -flavor gnu ..."
[ "$1" = -flavor ] && shift 2
exec "$(dirname "$0")/../python/ziglang/zig" ld.lld "$@"
LLD
cat >rocm/bin/hipcc <<HIPCC
#!/bin/sh
top=\$(cd "\$(dirname "\$(readlink -f "\$0")")/../.." && pwd)
exec "\$top/python/ziglang/zig" clang -resource-dir "\$top/python/clang_tidy/data/lib/clang/$clang" -B"\$top/bin" \\
  --rocm-path="\$top/rocm" --target=x86_64-linux-gnu -x hip "\$@"
HIPCC
chmod +x bin/* rocm/bin/hipcc
compiles "$work/rocm/bin/hipcc" "$log" || skip "what was put together does not compile: $(grep -m 1 error "$log" || last_line "$log")"
chmod 755 "$work"
mv "$work" "$dir"
echo "$dir/rocm/bin/hipcc"
