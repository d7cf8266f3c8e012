"""The GPU kernels on the CPU: hipified as for AMD's GPUs, then compiled by g++ with tests/gpu_emulation.

`torch.ops.monarch_rdma_emulated` are the ops of `_kernels` on CPU tensors; the launch functions of
hip_kernels/kernels.h that no op has, and the emulation's own, are called through cffi.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cffi
import torch
from torch.utils import cpp_extension

from hipify_rules import hipify_files

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "hip_kernels"
EMULATION = ROOT / "tests" / "gpu_emulation"
CHECK = ROOT / "benchmarks" / "gpu_check"
OPS = [
    ROOT / "csrc" / "ops" / f"{name}.cc" for name in ("checksum", "pack", "peers", "quantize", "reduce", "tensor_bytes")
]

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]  # of unrolling, which g++ does not know
EMULATED = ["-DMR_GPU_EMULATION", "-D__HIP_PLATFORM_AMD__", f"-I{EMULATION}"]
ON_TORCH = [
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DTORCH_STABLE_ONLY",
    "-DPy_LIMITED_API=0x030A0000",
    "-DMR_OPS_LIBRARY=monarch_rdma_emulated",
    "-DMR_OPS_KEY=CPU",
    "-DMR_OPS_SCHEMAS",
    *[f"-isystem{path}" for path in (sysconfig.get_paths()["include"], *cpp_extension.include_paths())],
]


def _sources() -> list[Path]:
    folders = [
        (KERNELS, "*"),
        (EMULATION, "**/*"),
        (CHECK, "*.cu"),
        (CHECK, "*.h"),
        (ROOT / "csrc" / "kernels", "*.h"),
        (ROOT / "csrc" / "ops", "*"),
    ]
    return sorted(path for folder, pattern in folders for path in folder.glob(pattern) if path.is_file())


def _build(folder: Path) -> None:
    hipified = folder / "hipified"
    kernels = sorted(KERNELS.glob("*.cu"))
    headers = [*KERNELS.glob("*.cuh"), KERNELS / "kernels.h"]
    results = hipify_files([*kernels, *headers], hipified, root=KERNELS, launch_macro=True)
    checks = [CHECK / "cases.cu", CHECK / "cases.h", CHECK / "memory.h"]
    results += hipify_files(checks, folder / "hipified_check", root=CHECK)
    common = ["g++", "-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", *WARNINGS]
    places = [f"-I{hipified}", f"-I{ROOT / 'csrc'}"]
    units: list[tuple[Path, list[str]]] = [(path, ["-xc++"]) for path in results if path.suffix == ".hip"]
    units += [(EMULATION / "fibers.cc", []), (KERNELS / "boxes.cc", [])]
    units += [(path, ON_TORCH) for path in (*OPS, KERNELS / "module.cc")]
    objects = [folder / f"{path.parent.name}_{path.stem}.o" for path, _ in units]

    def compile_one(unit: tuple[Path, list[str]], target: Path) -> None:
        path, flags = unit
        command = [*common, *EMULATED, *places, *flags, "-c", str(path), "-o", str(target)]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, units, objects))
    core = ROOT / "monarch_rdma"
    libraries = [f"-L{path}" for path in (core, *cpp_extension.library_paths())]
    link = ["g++", "-shared", *map(str, objects), *libraries, f"-Wl,-rpath,{core}", "-lmonarch_rdma", "-lc10"]
    subprocess.run([*link, "-ltorch_cpu", "-o", str(folder / "new.so")], check=True)
    os.replace(folder / "new.so", folder / "emulated.so")


@functools.cache
def library() -> Path:
    """The shared library, built where a source, the torch or the Python is new."""
    key = hashlib.sha256(torch.__version__.encode() + sysconfig.get_paths()["include"].encode())
    for path in _sources():
        key.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "gpu_emulation" / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "emulated.so").exists():
            _build(folder)
    torch.ops.load_library(str(folder / "emulated.so"))
    return folder / "emulated.so"


def ops() -> Any:
    library()
    return torch.ops.monarch_rdma_emulated


@functools.cache
def face() -> tuple[cffi.FFI, Any]:
    """kernels.h and the emulation's controls: the types, and the functions."""
    ffi = cffi.FFI()
    for header in (KERNELS / "kernels.h", EMULATION / "fibers.h", CHECK / "cases.h"):
        ffi.cdef(header.read_text().split("/* cffi: begin */")[1].split("/* cffi: end */")[0])
    return ffi, ffi.dlopen(str(library()))


def set_wave(lanes: int) -> None:
    face()[1].mr_emulation_set_wave(lanes)


def message() -> str:
    ffi, lib = face()
    return bytes(ffi.string(lib.mr_emulation_message())).decode()


@contextmanager
def together(seed: int) -> Iterator[list[int]]:
    """What is launched inside runs at the end, all blocks at once; the result is the runtime's error number, or 0."""
    result: list[int] = []
    face()[1].mr_emulation_hold()
    try:
        yield result
    finally:
        result.append(face()[1].mr_emulation_run(seed))
