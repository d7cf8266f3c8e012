"""The build of _kernels under a torch that says it is for ROCm or CUDA: what is compiled, where, and what is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_compilers import ROOT, hipcc, include_folder, nvcc

sys.path.insert(0, str(ROOT / "build_backend"))

import gpu_kernels

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"

# What setup.py does, after torch has been made to say what it is not.
BUILD = """\
import sys
import torch
if sys.argv[1] == "ROCm":
    torch.version.hip = "7.2.0"
else:
    torch.version.cuda = sys.argv[2]
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = lambda: False
sys.path.insert(0, "build_backend")
import gpu_kernels
from setuptools import Distribution
from setuptools.command.build_ext import build_ext
command = build_ext(Distribution({"name": "tree", "ext_modules": []}))
command.build_lib, command.build_temp = "build/lib", "build/temp"
command.ensure_finalized()
stable_abi = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
gpu_kernels.build(command, stable_abi, lambda what: print("said:", what), lambda why: sys.exit(f"stopped: {why}"))
"""
KERNEL = """\
#include <cuda_runtime.h>
#include "scale.cuh"
__global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }
extern "C" int launch(float* x, void* stream) {
  scale<<<1, 64, 0, (cudaStream_t)stream>>>(x);
  return (int)cudaGetLastError();
}
"""
MODULE = """\
#include <Python.h>
#include "launch.h"
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__kernels() { return launch ? PyModule_Create(&module) : nullptr; }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one kernel, laid out as this one."""
    for folder in ("build_backend", "hipify_rules"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "facts"))
    files = {
        "hip_kernels/scale.cu": KERNEL,
        "hip_kernels/scale.cuh": '#include "factors/two.h"\n#define FACTOR TWO\n',
        "hip_kernels/module.cc": MODULE,
        "csrc/launch.h": 'extern "C" int launch(float* x, void* stream);\n',
        "csrc/factors/two.h": "#define TWO 2.f  // for cudaStream_t\n",
        "hip_kernels/gpu_names.h": "#error not for what is translated\n",
        **{f"csrc/ops/{name}.cc": f"int mr_{name};\n" for name in gpu_kernels.OPS},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def files_of(tree: Path) -> dict[str, bytes]:
    found = (path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {
        str(path.relative_to(tree)): path.read_bytes() for path in found if "build" not in path.relative_to(tree).parts
    }


def build(tree: Path, gpu: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Builds the kernels of `tree` for `gpu`; empty libraries stand in for torch's and the runtime's."""
    stubs = tmp_path / "build" / "stubs"
    stubs.mkdir(parents=True)
    for name in ("amdhip64", "c10_hip", "torch_hip", "cudart", "c10_cuda", "torch_cuda"):
        made = ["g++", "-shared", "-x", "c++", os.devnull, "-o", str(stubs / f"lib{name}.so")]
        subprocess.run(made, check=True, timeout=60)
    if gpu == "ROCm":
        home = {"ROCM_HOME": str(hipcc().parent.parent), "PYTORCH_ROCM_ARCH": "gfx942;gfx950"}
        release = "7.2"
    else:
        folder = include_folder(nvcc(), "cuda.h", stubs)
        home = {"CUDA_HOME": folder.split("/targets/")[0].removesuffix("/include"), "TORCH_CUDA_ARCH_LIST": "8.0;9.0"}
        said = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        release = said.split("release ")[1].split(",")[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", BUILD, gpu, release],
        cwd=tree,
        env={"PATH": path, "HOME": str(stubs), "LIBRARY_PATH": str(stubs), **home},
        capture_output=True,
        text=True,
        timeout=600 if LONG else 110,
        check=False,
    )


@pytest.mark.parametrize("gpu", ["ROCm", "CUDA"])
def test_kernels_are_built_and_the_source_tree_stays_as_it_is(gpu: str, tree: Path, tmp_path: Path) -> None:
    before = files_of(tree)
    result = build(tree, gpu, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"said: the GPU kernels, for {gpu} " in result.stdout
    assert files_of(tree) == before
    (made,) = (tree / "build" / "lib" / "monarch_rdma").iterdir()
    assert made.name == "_kernels.abi3.so"
    code = made.read_bytes()
    if gpu == "ROCm":
        assert all(f"amdhsa--{one}".encode() in code for one in ("gfx942", "gfx950"))
        translated = tree / "build" / "hipified"
        assert "hipStream_t" in (translated / "hip_kernels" / "scale.hip").read_text()
        assert "hipStream_t" in (translated / "csrc" / "factors" / "two.h").read_text()
        assert not (translated / "hip_kernels" / "gpu_names.h").exists()
    else:
        assert b".nv_fatbin" in code
        assert not (tree / "build" / "hipified").exists()


def test_a_name_without_counterpart_stops_the_build_with_its_place(tree: Path, tmp_path: Path) -> None:
    (tree / "hip_kernels" / "scale.cuh").write_text("#define FACTOR 2.f\nauto f = cudaNoSuchThing;\n")
    result = build(tree, "ROCm", tmp_path)
    assert result.returncode != 0
    assert "stopped: hip_kernels/scale.cuh:2: cudaNoSuchThing has no HIP counterpart here; " in result.stderr
    assert "MONARCH_RDMA_BUILD_KERNELS=0 builds without" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(
    not LONG, reason="compiles every kernel, which their own tests do too; MONARCH_RDMA_TEST_ROUNDS=long"
)
@pytest.mark.parametrize("gpu", ["ROCm", "CUDA"])
def test_this_projects_kernels_are_built(gpu: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in ("build_backend", "hipify_rules", "hip_kernels", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = files_of(tree)
    result = build(tree, gpu, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tree / "build" / "lib" / "monarch_rdma" / "_kernels.abi3.so").exists()
    assert files_of(tree) == before


# --- where there is nothing to build for ----------------------------------------------------------------------------


def torch_for(hip: str | None = None, cuda: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(hip=hip, cuda=cuda))


@pytest.mark.parametrize(
    ("torch", "found", "said"),
    [
        (torch_for(), {}, "left out: torch 2.13.0 is for CPUs alone; GPU kernels take a torch for ROCm or CUDA"),
        (
            torch_for(hip="7.2"),
            {"IS_HIP_EXTENSION": False},
            "left out: torch 2.13.0 is for ROCm, but there is no hipcc",
        ),
        (torch_for(cuda="13.0"), {"CUDA_HOME": None}, "left out: torch 2.13.0 is for CUDA, but there is no nvcc"),
    ],
)
def test_without_a_gpu_torch_or_compiler_one_line_says_so(
    torch: SimpleNamespace, found: dict[str, object], said: str
) -> None:
    lines: list[str] = []
    assert gpu_kernels.gpu_of(torch, SimpleNamespace(**found), lines.append) is None
    assert len(lines) == 1 and lines[0].startswith(said)


def test_kernels_can_be_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_BUILD_KERNELS", "0")
    lines: list[str] = []
    torch = torch_for(hip="7.2")
    assert gpu_kernels.gpu_of(torch, SimpleNamespace(IS_HIP_EXTENSION=True), lines.append) is None
    assert lines == ["left out: MONARCH_RDMA_BUILD_KERNELS=0"]
