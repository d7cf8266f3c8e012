"""The HIP compiler: an installed one, else one put together here; where neither can be had, one line and a code."""

from __future__ import annotations

import os
import runpy
import struct
import subprocess
from pathlib import Path

import pytest
from gpu_compilers import ROOT, UNAVAILABLE, hipcc
from scripts import put_script

SCRIPT = ROOT / ".ci" / "hip_toolchain.sh"
GPUS = ("gfx90a", "gfx942", "gfx950")


def call(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), str(folder / "toolchain")],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def installed(folder: Path, *, works: bool) -> Path:
    """A ROCm whose hipcc compiles everything, or nothing."""
    compiler = folder / "bin" / "hipcc"
    compiler.parent.mkdir(parents=True)
    compiler.symlink_to("/bin/true" if works else "/bin/false")
    return folder


def bare_path(folder: Path) -> str:
    """A $PATH with what a shell script needs, and no package manager."""
    folder.mkdir()
    for name in (
        "bash",
        "dirname",
        "realpath",
        "mktemp",
        "rm",
        "mkdir",
        "flock",
        "uname",
        "grep",
        "tail",
        "awk",
        "env",
    ):
        (folder / name).symlink_to(next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists()))
    return str(folder)


def test_an_installed_rocm_is_used(tmp_path: Path) -> None:
    rocm = installed(tmp_path / "rocm", works=True)
    result = call(tmp_path, ROCM_PATH=str(rocm))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{rocm}/bin/hipcc\n", "")


def test_one_that_was_put_together_is_found_again(tmp_path: Path) -> None:
    broken = installed(tmp_path / "rocm", works=False)
    made = installed(tmp_path / "toolchain" / "rocm", works=True)
    result = call(tmp_path, ROCM_PATH=str(broken))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{made}/bin/hipcc\n", "")


def test_where_none_can_be_had_one_line_says_why(tmp_path: Path) -> None:
    result = call(tmp_path, PATH=bare_path(tmp_path / "bin"))
    if result.returncode == 0:
        pytest.skip("there is a ROCm in /opt/rocm")
    assert (result.returncode, result.stdout) == (UNAVAILABLE, "")
    assert result.stderr == "no HIP toolchain: putting one together takes apt-get, and there is none\n"
    assert not (tmp_path / "toolchain").exists()


def test_a_package_that_cannot_be_had_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    path = bare_path(tmp_path / "bin")
    for name, code in (("apt-get", 0), ("dpkg", 0), ("python3", 1)):
        put_script(tmp_path / "bin" / name, f"echo 'no such package' >&2\nexit {code}")
    result = call(tmp_path, PATH=path)
    if result.returncode == 0:
        pytest.skip("there is a ROCm in /opt/rocm")
    assert (result.returncode, result.stdout) == (UNAVAILABLE, "")
    assert result.stderr.splitlines()[-1].startswith("no HIP toolchain: pip install ziglang==")
    assert result.stderr.endswith(": no such package\n")
    assert not list(tmp_path.glob("toolchain*/*"))


def test_a_kernel_for_every_gpu_in_one_object(tmp_path: Path) -> None:
    source = tmp_path / "add.hip"
    source.write_text(
        "#include <hip/hip_runtime.h>\n"
        "__global__ void add(int* x, int n) { x[threadIdx.x] += n; }\n"
        'extern "C" int launch(int* x) { add<<<1, 64>>>(x, 3); return hipGetLastError(); }\n'
    )
    gpus = [f"--offload-arch={gpu}" for gpu in GPUS]
    made = tmp_path / "add.o"
    command = [
        str(hipcc()),
        *gpus,
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-c",
        str(source),
        "-o",
        str(made),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr
    found = bundled(made.read_bytes())
    assert [target.rpartition("--")[2] for target in found][1:] == list(GPUS)
    assert all(code.startswith(b"\x7fELF") and b"add" in code for code in list(found.values())[1:])


def bundled(text: bytes) -> dict[str, bytes]:
    """The code objects, by target, of the first bundle in `text`."""
    start = text.index(b"__CLANG_OFFLOAD_BUNDLE__")
    (count,) = struct.unpack_from("<Q", text, start + 24)
    found, at = {}, start + 32
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", text, at)
        target = text[at + 24 : at + 24 + length].decode()
        found[target] = text[start + offset : start + offset + size]
        at += 24 + length
    return found


@pytest.mark.parametrize("align", [1, 8, 4096])
def test_bundles_hold_what_went_in(align: int) -> None:
    bundle = runpy.run_path(str(ROOT / ".ci" / "offload_bundler.py"))["bundle"]
    parts = {"host-x86_64": b"", "hipv4-one": b"a", "hipv4-two": b"b" * 4097, "hipv4-three": b"c" * 8}
    made = bundle(list(parts), list(parts.values()), align)
    assert bundled(b"before" + made) == parts
    assert [made.index(part) % align for part in parts.values() if part] == [0, 0, 0]
