"""What the kernel allows: reading other processes, memory that can be mapped by them, limits. Facts come from below
`root`, so that another host's can be looked at too."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import config
from . import isolated
from .check import Check
from .isolated import Failed

__all__ = ["can_read_processes", "checks"]

_GIB = 1 << 30

_TARGET = """
import ctypes, os, sys
word = ctypes.create_string_buffer(b"monarch")
print(ctypes.addressof(word), flush=True)
sys.stdin.read()
"""

_READER = """
import ctypes, json, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
word = ctypes.create_string_buffer(8)
here, there = Part(ctypes.addressof(word), 8), Part(address, 8)
count = libc.process_vm_readv(pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1),
                              ctypes.c_ulong(0))
print(json.dumps(0 if count == 8 and word.value == b"monarch" else ctypes.get_errno() or -1))
"""

_MEMFD = """
import fcntl, json, mmap, os
fd = os.memfd_create("monarch_rdma-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
mapped = mmap.mmap(fd, 4096)
mapped[:5] = b"bytes"
try:
    os.ftruncate(fd, 0)
    print(json.dumps("the seal against shrinking is not kept"))
except PermissionError:
    print(json.dumps("" if os.pread(fd, 5, 0) == b"bytes" else "bytes written to it are not there"))
"""


def checks(root: Path = Path("/")) -> list[Check]:
    """All of this module, in the order in which they are shown."""
    return [
        _version(),
        _process_vm(root),
        _ptrace_scope(root),
        _socket_directory(),
        _memfd(),
        _shared_huge_pages(root),
        _reserved_huge_pages(root),
        _dev_shm(root),
        _memory(root),
        _numa(root),
        _memlock(),
        _open_files(),
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _version() -> Check:
    release = os.uname().release
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    why = f"Linux {release}; 5.3 or newer is needed"
    return Check("kernel", "version", numbers >= (5, 3), why, "upgrade the kernel", required=True)


def can_read_processes() -> int:
    """0 where one process may read a sibling's memory by its id, as two members of a job do; else the errno."""
    with _sibling() as (pid, address):
        return int(isolated.run(_READER, str(pid), str(address)))


@contextlib.contextmanager
def _sibling() -> Iterator[tuple[int, int]]:
    """A process and the address of eight bytes in it."""
    command = [sys.executable, "-I", "-c", _TARGET]
    # Interrupted with us, it may find its pipe broken: that is nobody's business.
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True) as target:
        try:
            assert target.stdout is not None
            line = target.stdout.readline()
            if not line:
                raise Failed("the process to be read ended at once")
            yield target.pid, int(line)
        finally:
            target.kill()


def _process_vm(root: Path) -> Check:
    fix = "sysctl -w kernel.yama.ptrace_scope=0; in a container: docker run --cap-add=SYS_PTRACE"
    try:
        error = can_read_processes()
    except Failed as failure:
        return Check("same host", "process_vm", False, f"the probe failed: {failure}", fix)
    if error == 0:
        return Check("same host", "process_vm", True, "one process reads another's ordinary memory with one copy")
    reason = os.strerror(error) if error > 0 else "wrong bytes"
    why = f"refused ({reason}): ordinary memory goes over tcp, shared memory is mapped"
    return Check("same host", "process_vm", False, why, fix)


def _ptrace_scope(root: Path) -> Check:
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Check("same host", "ptrace scope", True, "no Yama: processes of one user may read each other")
    meaning = {"0": "processes of one user may read each other", "1": "only parents may read their children"}
    why = f"{scope}: {meaning.get(scope, 'only with CAP_SYS_PTRACE, or not at all')}"
    fix = "sysctl -w kernel.yama.ptrace_scope=0"
    allowed = str(config.get("allow_ptrace"))
    if scope == "1":
        why += "; option allow_ptrace "
        why += f"is {allowed!r}" if allowed != "no" else "= job lets peers read ordinary memory too, without tcp"
        fix = f"export {config.OPTIONS['allow_ptrace'].env}=job (docs/security.md: what it opens); or {fix}"
    return Check("same host", "ptrace scope", scope == "0" or (scope == "1" and allowed != "no"), why, fix)


def _socket_directory() -> Check:
    """Where engines of different network namespaces meet."""
    name, option = "socket directory", config.OPTIONS["unix_socket_dir"]
    setting = str(config.get(option.name))
    if setting == "none":
        return Check("same host", name, True, "none (option unix_socket_dir): containers meet over tcp alone")
    path = Path(setting or os.path.join(config.runtime_directory(), f"monarch_rdma-{os.geteuid()}"))
    try:
        facts = path.lstat()
        private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
        problem = "" if private else "is not a directory of this user, of mode 0700"
    except FileNotFoundError:
        problem = "" if os.access(path.parent, os.W_OK) else "cannot be made"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        fix = f"export {option.env}=DIRECTORY, or none"
        return Check("same host", name, False, f"{path} {problem}: containers meet over tcp alone", fix)
    why = f"{path}: where containers share it (and this user), they reach each other's memory over shm"
    return Check("same host", name, True, why)


def _memfd() -> Check:
    try:
        problem = isolated.run(_MEMFD)
    except Failed as failure:
        problem = str(failure)
    why = problem or "memory for others to map, sealed against shrinking"
    fix = "upgrade the kernel, or allow memfd_create in seccomp"
    return Check("same host", "memfd and seals", not problem, why, fix)


def _shared_huge_pages(root: Path) -> Check:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if text is None:
        return Check("same host", "huge pages, shared memory", False, "this kernel has none")
    chosen = (re.findall(r"\[(\w+)\]", text) or ["unknown"])[0]
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    ok = chosen in ("always", "within_size", "advise", "force")
    return Check("same host", "huge pages, shared memory", ok, f"{chosen}", f"echo advise > {path}")


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes (or numbers of pages) by name."""
    found = re.findall(r"^(\w+):\s+(\d+)( kB)?", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def _reserved_huge_pages(root: Path) -> Check:
    facts = _meminfo(root)
    total, free = facts.get("HugePages_Total", 0), facts.get("HugePages_Free", 0)
    size = facts.get("Hugepagesize", 0) >> 20
    why = f"{free} of {total} free, {size} MiB each" if total else "none reserved; transparent ones are used instead"
    return Check("same host", "huge pages, reserved", True, why)


def _dev_shm(root: Path) -> Check:
    path = root / "dev/shm"
    try:
        facts = os.statvfs(path)
    except OSError as error:
        why = f"{error.strerror}; monarch_rdma does not use it, torch's data loaders do"
        return Check("same host", "/dev/shm", False, why, "mount -t tmpfs tmpfs /dev/shm")
    free = facts.f_bavail * facts.f_frsize / _GIB
    why = f"{free:.1f} GiB free; monarch_rdma does not use it, torch's data loaders do"
    return Check("same host", "/dev/shm", free >= 1, why, "mount -o remount,size=8G /dev/shm; docker run --shm-size=8g")


def _memory(root: Path) -> Check:
    facts = _meminfo(root)
    available, total = facts.get("MemAvailable", 0), facts.get("MemTotal", 0)
    why = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    return Check("limits", "memory", available >= _GIB, why, "end other programs: ps aux --sort=-rss | head")


def _numa(root: Path) -> Check:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    cpus = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    where = ", ".join(f"{node.name}: CPUs {_read(node / 'cpulist')}" for node in nodes) or "no NUMA information"
    return Check("limits", "cores and NUMA nodes", True, f"{allowed} of {cpus} cores for us; {where}")


def _memlock() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("limits", "locked memory", True, "unlimited")
    why = f"{soft >> 10} KiB: enough for shm and tcp; a card registers no more than this"
    as_root = f"sudo prlimit --pid {os.getppid()} --memlock=unlimited"
    fix = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else as_root
    return Check("limits", "locked memory", soft >= 64 << 20, why, fix)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = f"{soft} (at most {hard}); a peer takes about 10"
    return Check("limits", "open files", soft >= 1024, why, f"ulimit -n {min(hard, 65536)}")
