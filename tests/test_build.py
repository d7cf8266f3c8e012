"""What the build leaves behind: one core per process, a small face, portable files, and plain words when it cannot."""

from __future__ import annotations

import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from scripts import put_script

import monarch_rdma

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(monarch_rdma.__file__).parent
CORE = PACKAGE / "libmonarch_rdma.so"
BENCH = PACKAGE / "bin" / "transport_bench"
EXTENSIONS = ("_engine", "_C")


def run(*command: str | Path, **options: Any) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def python(code: str) -> str:
    """Runs `code` in a fresh interpreter, outside the source tree; returns what it printed."""
    return run(sys.executable, "-c", code, cwd="/").strip()


def native_files() -> list[Path]:
    return [CORE, BENCH, *(PACKAGE / f"{name}.abi3.so" for name in EXTENSIONS)]


def needed(path: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", path))


def test_one_copy_of_the_core_in_a_process() -> None:
    mapped = python(
        "import torch\n"
        "from monarch_rdma import _C, _engine\n"
        "assert torch.ops.monarch_rdma.engine_version() == _engine.ffi.string(_engine.lib.mr_version()).decode()\n"
        "for line in open('/proc/self/maps'):\n"
        "    if 'monarch_rdma.so' in line: print(line.split()[3:6])"
    )
    assert len(set(mapped.splitlines())) == 1, mapped
    assert str(CORE) in mapped


def test_the_core_exports_its_two_faces_and_nothing_else() -> None:
    lines = [line.split(maxsplit=2)[-1] for line in run("nm", "-D", "-C", "--defined-only", CORE).splitlines()]
    kernels = {re.sub(r"mr::kernels::|\(.*", "", line) for line in lines if line.startswith("mr::kernels::")}
    exported = {line for line in lines if not line.startswith("mr::kernels::")}
    face = (ROOT / "csrc" / "kernels" / "kernels.h").read_text()
    assert "reduce" in kernels
    assert all(re.search(rf"(?<!\w){re.escape(name.split('::')[-1])}\(", face) for name in kernels), kernels
    header = (ROOT / "csrc" / "engine.h").read_text()
    declared = set(re.findall(r"\b(mr_\w+)\(", re.sub(r"/\*.*?\*/|typedef [^;]*;", "", header, flags=re.DOTALL)))
    assert len(declared) > 40
    assert exported == declared


def test_every_declaration_is_callable_from_python() -> None:
    names = python("from monarch_rdma import _engine\nprint(*dir(_engine.lib))").split()
    assert {"mr_engine_create", "mr_transfer", "mr_op_wait", "MR_PEER_LOST", "MR_MAX_DIMS"} <= set(names)


def test_the_core_needs_neither_torch_nor_python() -> None:
    for path in (CORE, BENCH, PACKAGE / "_engine.abi3.so"):
        assert not [name for name in needed(path) if re.search("torch|c10|python", name)], path
    assert not [name for name in needed(PACKAGE / "_C.abi3.so") if "python" in name], "not only the stable ABI"


@pytest.mark.parametrize("path", native_files(), ids=lambda path: path.name)
def test_libraries_are_searched_beside_the_file_only(path: Path) -> None:
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", run("readelf", "-d", path))
    searched = [entry for found in paths for entry in found.split(":")]
    assert all(entry.split("/")[0] == "$ORIGIN" for entry in searched), searched
    assert searched or path == CORE


def test_extensions_serve_every_python_from_3_10() -> None:
    assert {path.name for path in PACKAGE.glob("*.so")} == {
        "libmonarch_rdma.so",
        *(f"{name}.abi3.so" for name in EXTENSIONS),
    }


@pytest.mark.parametrize("module", ["monarch_rdma", "monarch_rdma.rdma", "monarch_rdma.errors", "monarch_rdma.config"])
def test_import_leaves_torch_alone(module: str) -> None:
    assert python(f"import sys, {module}\nprint('torch' in sys.modules)") == "False"


def test_import_is_quick() -> None:
    # Seconds of CPU: on a busy machine the wall clock would measure the other processes.
    code = "import time; began = time.process_time()\nimport monarch_rdma\nprint(time.process_time() - began)"
    assert statistics.median(float(python(code)) for _ in range(5)) < 0.3


def test_versions_agree() -> None:
    core = python("from monarch_rdma import _engine\nprint(_engine.ffi.string(_engine.lib.mr_version()).decode())")
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert declared
    assert core == declared[1] == monarch_rdma.__version__


def test_source_distribution_holds_everything(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    missing = {name for name in tracked - held if (ROOT / name).exists()} - {".gitignore"}
    assert not missing
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]


# --- when something is missing ------------------------------------------------------------------------------------


def built_tree(tmp_path: Path) -> Path:
    """A copy of the sources to build in, so that this checkout's own build is not touched."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("build_backend", "csrc", "monarch_rdma"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "bin", "__pycache__"))
    return tmp_path


def failed_build(tree: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_a_missing_compiler_is_said_in_a_sentence(tmp_path: Path) -> None:
    said = failed_build(built_tree(tmp_path), CXX="no-such-compiler")
    assert "libmonarch_rdma.so: cannot be built: no no-such-compiler; on Debian or Ubuntu: apt-get install g++" in said


def test_a_missing_openssl_header_is_said_in_a_sentence(tmp_path: Path) -> None:
    # A compiler whose default include path is empty: to it no header is installed.
    compiler = put_script(tmp_path / "bare-g++", 'exec g++ -nostdinc "$@"')
    said = failed_build(built_tree(tmp_path), CXX=str(compiler))
    assert "no header openssl/ssl.h; on Debian or Ubuntu: apt-get install libssl-dev" in said


@pytest.mark.parametrize(("installed", "why"), [(None, "no torch here"), ("2.9.1+cpu", "torch 2.9.1+cpu is older")])
def test_without_a_usable_torch_only_the_ops_are_left_out(
    installed: str | None, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == "torch" and installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed or "1"

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", "--version"])
    build = runpy.run_path("setup.py")
    monkeypatch.setattr(metadata, "version", version)
    capsys.readouterr()
    assert build["find_torch"]() is False
    assert capsys.readouterr().out.startswith(f"monarch_rdma: _C: left out: {why}")
