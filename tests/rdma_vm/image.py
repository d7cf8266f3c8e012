"""What the machine boots: Debian's kernel, an initial RAM file system with the modules, and pyverbs for tests inside.

All of it is fetched once, by apt, into a cache folder (MONARCH_RDMA_TEST_VM_CACHE, else ~/.cache/monarch_rdma/rdma_vm),
and needs no network after that. Programs (QEMU, perftest, ...) are packages of the host, installed if we may.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_INIT = Path(__file__).with_name("guest_init.sh")

# Soft-RoCE needs crc32 for its checksums, but does not name it as a dependency: it comes first.
_MODULES = (
    "crc32_generic", "virtio_pci", "virtio_console", "virtio_net", "9p", "9pnet_virtio", "overlay",
    "rdma_rxe", "rdma_ucm", "dummy", "sch_netem",
)  # fmt: skip
_FETCH_SECONDS = 300


class Unavailable(Exception):
    """The machine cannot be had on this host; the text says in one sentence why and what would help."""


@dataclass(frozen=True)
class Image:
    kernel: Path
    initramfs: Path
    pyverbs: Path
    """A folder for PYTHONPATH. Importing pyverbs works where Python is the distribution's version."""


def prepare(say: Callable[[str], None] = lambda line: None) -> Image:
    """The image; made the first time, which takes about a minute. `say` is told what takes long.

    Raises Unavailable.
    """
    _install_programs(say)
    cache = _cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kernel = _made(cache / "kernel", lambda folder: _fetch_kernel(folder, say))
        busybox = _made(cache / "busybox", lambda folder: _fetch("busybox-static", folder, say))
        pyverbs = _made(cache / "pyverbs", lambda folder: _fetch("python3-pyverbs", folder, say))
        recipe = hashlib.sha256("\n".join((_INIT.read_text(), *_MODULES)).encode()).hexdigest()[:16]
        initramfs = _made(cache / f"initramfs-{recipe}", lambda folder: _pack(folder, kernel, busybox))
    return Image(kernel / "vmlinuz", initramfs / "initramfs.gz", pyverbs / "usr/lib/python3/dist-packages")


def _cache_folder() -> Path:
    named = os.environ.get("MONARCH_RDMA_TEST_VM_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(home) / "monarch_rdma" / "rdma_vm"


def _install_programs(say: Callable[[str], None]) -> None:
    done = _run([str(ROOT / ".ci/system_packages.sh"), "rdma"])
    if done.returncode:
        raise Unavailable(f"the RDMA machine cannot be had here: {done.stdout.strip()} {_last_line(done)}")
    if done.stdout.strip():
        say(done.stdout.strip())


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` unless it is there: it appears whole or not at all."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            inside = Path(scratch) / "made"
            inside.mkdir()
            make(inside)
            inside.rename(folder)
    return folder


def _fetch_kernel(folder: Path, say: Callable[[str], None]) -> None:
    """vmlinuz, and modules/ with the files named in `order`."""
    with _unpacked(_kernel_package(), say) as unpacked:
        release = next((unpacked / "lib/modules").iterdir()).name
        (unpacked / f"boot/vmlinuz-{release}").rename(folder / "vmlinuz")
        _checked(["depmod", "-b", str(unpacked), release], "depmod")
        (folder / "modules").mkdir()
        order: dict[str, None] = {}
        for module in _MODULES:
            for file in _with_dependencies(unpacked, release, module):
                if file.name not in order:
                    shutil.copy(file, folder / "modules")
                    order[file.name] = None
        (folder / "order").write_text("\n".join(order) + "\n")


def _with_dependencies(root: Path, release: str, module: str) -> Iterator[Path]:
    """The files to load for a module, in order. A module that is built in has none."""
    listed = _checked(["modprobe", "-d", str(root), "-S", release, "--show-depends", module], f"module {module}")
    for line in listed.splitlines():
        if line.startswith("insmod "):
            yield Path(line.split()[1])


def _kernel_package() -> str:
    """The package that the metapackage of the newest kernel stands for."""
    for _ in range(2):
        named = _run(["apt-cache", "depends", "linux-image-amd64"]).stdout
        for line in named.splitlines():
            if line.strip().startswith("Depends: linux-image-"):
                return line.split()[1]
        _run(["apt-get", "update", "-qq"])
    raise Unavailable("the RDMA machine cannot be had here: it boots Debian's kernel, and apt has no linux-image-amd64")


def _fetch(package: str, folder: Path, say: Callable[[str], None]) -> None:
    """The files of a package below `folder`. Needs no root, and installs nothing."""
    say(f"Fetching {package}")
    download = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        done = _run(download, cwd=scratch)
        if done.returncode:  # lists that are missing or old
            _run(["apt-get", "update", "-qq"])
            done = _run(download, cwd=scratch)
        if done.returncode:
            raise Unavailable(f"the RDMA machine cannot be had here: package {package}: {_last_line(done)}")
        deb = next(Path(scratch).glob("*.deb"))
        _checked(["dpkg", "-x", str(deb), str(folder)], package)


@contextmanager
def _unpacked(package: str, say: Callable[[str], None]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=_cache_folder(), prefix=".unpacking-") as scratch:
        folder = Path(scratch) / "files"
        folder.mkdir()
        _fetch(package, folder, say)
        yield folder


def _pack(folder: Path, kernel: Path, busybox: Path) -> None:
    """initramfs.gz: busybox, the modules and guest_init.sh as /init."""
    tree = folder.parent / "tree"
    for name in ("bin", "proc", "sys", "dev", "host", "memory", "root"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox / "bin/busybox", tree / "bin/busybox")
    shutil.copytree(kernel / "modules", tree / "modules")
    shutil.copy(kernel / "order", tree / "modules/order")
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(sorted(str(path.relative_to(tree)) for path in tree.rglob("*")))
    archive = subprocess.run(
        [busybox / "bin/busybox", "cpio", "-o", "-H", "newc"],
        cwd=tree, input=names.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    ).stdout  # fmt: skip
    (folder / "initramfs.gz").write_bytes(gzip.compress(archive, 1))


def _run(command: list[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Its result; a program that is missing or too slow is a failed one, with a line that says so."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_FETCH_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} took over {_FETCH_SECONDS} s")


def _checked(command: list[str], what: str) -> str:
    done = _run(command)
    if done.returncode:
        raise Unavailable(f"the RDMA machine cannot be had here: {what}: {_last_line(done)}")
    return done.stdout


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
    return lines[-1]
