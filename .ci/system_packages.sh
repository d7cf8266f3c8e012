#!/usr/bin/env bash
# Makes sure that this host has the system packages for a purpose: installs what is missing when it may (root, or sudo
# without a password), else says in one sentence what to run, and fails.
#
#   .ci/system_packages.sh build [PYTHON]    compiler, make, OpenSSL and Python headers, venv for PYTHON (default
#                                            python3); libibverbs' headers if they can be had
#   .ci/system_packages.sh bench [PYTHON]    iperf3, which the benchmarks compare with
#   .ci/system_packages.sh jobs              SLURM and an SSH server, for the tests of jobs
#   .ci/system_packages.sh rdma              QEMU and RDMA tools, for the virtual machine of the RDMA tests
set -euo pipefail

purpose=${1:?build, bench, jobs or rdma}
PATH=$PATH:/usr/sbin:/sbin
python=${2:-python3}
missing=()
wanted=() # as missing, but it goes without

need() { # need PACKAGE COMMAND... : PACKAGE is missing unless COMMAND succeeds
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

has_header() { echo "#include <$1>" | "${CXX:-g++}" -I"${2:-.}" -E -x c++ - ; }

case $purpose in
  build)
    command -v "$python" >/dev/null || missing+=(python3 python3-venv python3-dev)
    need g++ command -v "${CXX:-g++}"
    need make command -v make
    # Without a compiler to ask, look where Debian puts the header.
    has_header openssl/ssl.h >/dev/null 2>&1 || [ -e /usr/include/openssl/ssl.h ] || missing+=(libssl-dev)
    has_header infiniband/verbs.h >/dev/null 2>&1 || [ -e /usr/include/infiniband/verbs.h ] || wanted+=(libibverbs-dev)
    if command -v "$python" >/dev/null; then
      version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed to develop; $python is $version. Name another with: make PYTHON=python3.12" >&2
        exit 1
      }
      need "python$version-venv" "$python" -c 'import ensurepip, venv'
      need "python$version-dev" test -e \
        "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h"
    fi
    ;;
  bench) need iperf3 command -v iperf3 ;;
  jobs)
    need slurm-wlm command -v slurmctld
    need openssh-server command -v sshd
    need openssh-client command -v ssh
    need openmpi-bin command -v mpirun.openmpi
    need mpich command -v mpiexec.hydra
    need util-linux command -v setpriv
    ;;
  rdma)
    need qemu-system-x86 command -v qemu-system-x86_64
    need ibverbs-providers compgen -G '/usr/lib/*/libibverbs/librxe-*.so'
    need ibverbs-utils command -v ibv_devinfo
    need perftest command -v ib_read_bw
    need iproute2 command -v rdma
    need kmod command -v depmod
    need util-linux command -v setpriv
    ;;
  *) echo "unknown purpose: $purpose (build, bench, jobs or rdma)" >&2; exit 2 ;;
esac

[ $((${#missing[@]} + ${#wanted[@]})) -gt 0 ] || exit 0

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! command -v apt-get >/dev/null || { [ -n "$sudo" ] && ! sudo -n true 2>/dev/null; }; then
  [ ${#wanted[@]} -eq 0 ] || echo "Left out without: sudo apt-get install ${wanted[*]}" >&2
  [ ${#missing[@]} -gt 0 ] || exit 0
  echo "Missing system packages; please run: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
missing+=("${wanted[@]}")
echo "Installing system packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
