"""The GPU kernels, the extension monarch_rdma._kernels, where torch is for ROCm or CUDA and the compiler is there.

For CUDA, hip_kernels/ is compiled as it is. For ROCm it is translated into build/hipified first, with everything of
csrc/ that it includes: torch's build would else translate what it is given, inside the source tree.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

NAME = "monarch_rdma._kernels"
HIPIFIED = Path("build", "hipified")
INCLUDE = (Path("csrc"), Path("hip_kernels"))
FLAGS = ["-O3", "-std=c++20"]
ROCM_GPUS, CUDA_GPUS = "gfx90a;gfx942;gfx950", "8.0;9.0+PTX"
OPS = ("checksum", "pack", "peers", "quantize", "reduce", "tensor_bytes")  # checks of csrc/ops, for this key too

Say = Callable[[str], None]


def sources() -> list[str]:
    """What is compiled, relative to the tree that is built in."""
    kernels = sorted(str(path) for kind in ("*.cu", "*.cc") for path in Path("hip_kernels").glob(kind))
    return [*kernels, *(f"csrc/ops/{name}.cc" for name in OPS)]


def with_headers(files: list[str]) -> list[str]:
    """`files`, and what they and their headers include of this project."""
    found = list(files)
    for file in found:  # grows as it goes
        for name in re.findall(r'^ *# *include "(.+)"', Path(file).read_text(), flags=re.MULTILINE):
            places = (os.path.relpath(folder / name) for folder in (Path(file).parent, *INCLUDE))
            found += [place for place in places if os.path.exists(place) and place not in found][:1]
    return found


def hipify() -> list[str]:
    """Translates everything; returns the translated sources."""
    sys.path.insert(0, os.getcwd())
    from hipify_rules import hipify_files

    results = hipify_files(with_headers(sources()), HIPIFIED, root=".")
    return [str(path) for path in results[: len(sources())]]


def gpu_of(torch: Any, cpp_extension: Any, say: Say) -> str | None:
    """ "ROCm" or "CUDA" if kernels for it can be built here; else None, after saying why not."""
    version = torch.__version__
    if os.environ.get("MONARCH_RDMA_BUILD_KERNELS", "1") == "0":
        say("left out: MONARCH_RDMA_BUILD_KERNELS=0")
    elif torch.version.hip:
        if cpp_extension.IS_HIP_EXTENSION:
            return "ROCm"
        say(f"left out: torch {version} is for ROCm, but there is no hipcc; install ROCm, or set ROCM_HOME")
    elif torch.version.cuda:
        if cpp_extension.CUDA_HOME:
            return "CUDA"
        say(f"left out: torch {version} is for CUDA, but there is no nvcc; install the toolkit, or set CUDA_HOME")
    else:
        say(f"left out: torch {version} is for CPUs alone; GPU kernels take a torch for ROCm or CUDA")
    return None


def extension(torch: Any, cpp_extension: Any, gpu: str, stable_abi: list[str], say: Say) -> Extension:
    """The extension for `gpu`, whose sources are ready to compile."""
    if gpu == "ROCm":
        architectures = os.environ.setdefault("PYTORCH_ROCM_ARCH", ROCM_GPUS)
        home, top, ready = cpp_extension.ROCM_HOME, HIPIFIED, hipify()
    else:
        architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_GPUS)
        home, top, ready = cpp_extension.CUDA_HOME, Path(), sources()
    say(f"the GPU kernels, for {gpu} {torch.version.hip or torch.version.cuda} ({architectures}), with {home}")
    # USE_CUDA shows the functions of torch's stable ABI that give a GPU's stream; they have one name for both.
    defined = ["-DMR_OPS_KEY=CUDA", "-DUSE_CUDA", "-fvisibility=hidden", *stable_abi]
    return cpp_extension.CUDAExtension(
        NAME,
        ready,
        include_dirs=[str((top / folder).resolve()) for folder in INCLUDE],
        extra_compile_args={"cxx": [*FLAGS, *defined], "nvcc": FLAGS},
        py_limited_api=True,
    )


def build(command: build_ext, stable_abi: list[str], say: Say, stop: Say) -> None:
    """Builds the kernels, as `command` builds the other extensions; where they cannot be, says why in one line."""
    import torch
    from torch.utils import cpp_extension

    gpu = gpu_of(torch, cpp_extension, say)
    if gpu is None:
        return
    others = command.distribution.ext_modules
    try:
        command.distribution.ext_modules = [extension(torch, cpp_extension, gpu, stable_abi, say)]
        torchs = cpp_extension.BuildExtension(command.distribution)
        for option in ("build_lib", "build_temp", "inplace", "force", "debug", "verbose"):
            setattr(torchs, option, getattr(command, option))
        torchs.ensure_finalized()
        torchs.run()
    except (RuntimeError, OSError, ValueError) as error:
        stop(f"{error}; MONARCH_RDMA_BUILD_KERNELS=0 builds without")
    finally:
        command.distribution.ext_modules = others
