"""Builds the native pieces of monarch_rdma, and says in one line a piece what is built, or why not and how to get it.

    libmonarch_rdma.so   the core: csrc/, no torch, no Python; loaded once per process by the two below
    bin/transport_bench  the stand-alone benchmark on the core
    _engine              the core's C face (csrc/engine.h) for Python, through cffi; abi3, no torch
    _C                   torch.ops.monarch_rdma, on torch's stable ABI; left out where there is no torch
    _kernels             the same for tensors of a GPU, where torch is for ROCm or CUDA (build_backend/gpu_kernels.py)

`python setup.py build_ext --inplace` builds in the source tree and repeats only what changed.
"""

import contextlib
import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from importlib import metadata
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
import gpu_kernels  # noqa: E402

CORE = ROOT / "build" / "core"
TORCH_MINIMUM = (2, 10)
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]


def say(piece: str, what: str) -> None:
    print(f"monarch_rdma: {piece}: {what}", flush=True)


def stop(piece: str, why: str) -> None:
    raise SystemExit(f"monarch_rdma: {piece}: cannot be built: {why}")


def compiler() -> str:
    return os.environ.get("CXX", "g++").split()[0]


def require_tools() -> None:
    """Stops with one sentence where the core cannot be built: nothing works without it."""
    for command, package in ((compiler(), "g++"), ("make", "make")):
        if shutil.which(command) is None:
            stop("libmonarch_rdma.so", f"no {command}; on Debian or Ubuntu: apt-get install {package}")
    headers = {
        "openssl/ssl.h": ("libmonarch_rdma.so", "libssl-dev", []),
        "Python.h": ("_engine", "python3-dev", [f"-I{sysconfig.get_paths()['include']}"]),
    }
    for header, (piece, package, flags) in headers.items():
        probe = [compiler(), *flags, "-E", "-x", "c++", "-"]
        result = subprocess.run(probe, input=f"#include <{header}>\n", text=True, capture_output=True, check=False)
        if result.returncode != 0:
            stop(piece, f"no header {header}; on Debian or Ubuntu: apt-get install {package}")


def build_core() -> list[tuple[Path, str]]:
    """Runs csrc/Makefile; returns what it built, each with its place inside the package."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment.setdefault("CXX", "g++")
    if not (ROOT / ".git").exists():
        environment.setdefault("WERROR", "")  # a user's newer compiler may know new warnings
    say("libmonarch_rdma.so, bin/transport_bench", f"the core and its benchmark, with {environment['CXX']}")
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    command = ["make", "-C", str(ROOT / "csrc"), "--no-print-directory", f"-j{jobs}", f"OUT={CORE}", "lib", "bench"]
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        stop("libmonarch_rdma.so", "the C++ compiler's messages are above")
    built = [(CORE / "libmonarch_rdma.so", "libmonarch_rdma.so"), (CORE / "transport_bench", "bin/transport_bench")]
    return [(source, place) for source, place in built if source.exists()]


def in_tree(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def native_extension(name: str, sources: list[str], flags: list[str]) -> Extension:
    return Extension(
        name,
        sources,
        include_dirs=["csrc"],
        depends=["setup.py", *in_tree("csrc/*.h"), *in_tree("csrc/kernels/*.h"), *in_tree("csrc/ops/*.h")],
        extra_compile_args=["-O2", "-g1", "-Wall", "-fvisibility=hidden", *flags],
        libraries=["monarch_rdma"],
        library_dirs=[str(CORE)],
        runtime_library_dirs=["$ORIGIN"],
        py_limited_api=True,
    )


ENGINE = native_extension("monarch_rdma._engine", ["build/engine/_engine.c"], [])
OPS = native_extension(
    "monarch_rdma._C", in_tree("csrc/ops/*.cc"), ["-std=c++20", "-DPy_LIMITED_API=0x030A0000", *STABLE_ABI]
)


def generate_engine() -> None:
    """Writes _engine.c from the one description of the core's face, if that changed."""
    import cffi

    say("_engine", "csrc/engine.h for Python, with cffi")
    header = (ROOT / "csrc" / "engine.h").read_text()
    ffi = cffi.FFI()
    ffi.cdef(header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0])
    ffi.cdef('extern "Python" int mr_python_interrupted(void);')  # an mr_interrupted; see rdma/group.py
    ffi.set_source(ENGINE.name, '#include "engine.h"')
    Path(ENGINE.sources[0]).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells where it writes
        ffi.emit_c_code(ENGINE.sources[0])


def find_torch() -> bool:
    """Points the torch ops at the installed torch's headers and libraries; False if there is none to build against."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        say("_C", "left out: no torch here, so no torch.ops.monarch_rdma; pip install torch, then build again")
        return False
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH_MINIMUM:
        say("_C", f"left out: torch {version} is older than 2.10, so no torch.ops.monarch_rdma; pip install -U torch")
        return False
    from torch.utils import cpp_extension

    say("_C", f"torch.ops.monarch_rdma, on the stable ABI of torch >= 2.10 (found {version})")
    OPS.include_dirs += cpp_extension.include_paths()
    OPS.library_dirs += cpp_extension.library_paths()
    OPS.libraries += ["c10", "torch_cpu"]
    return True


class BuildNative(build_ext):
    """build_ext that builds the core first and lays it beside the extensions that load it."""

    def run(self) -> None:
        require_tools()
        (ROOT / "build").mkdir(exist_ok=True)
        with open(ROOT / "build" / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree wait for each other
            self.core = build_core()
            generate_engine()
            if find_torch():
                gpu_kernels.build(self, STABLE_ABI, partial(say, "_kernels"), partial(stop, "_kernels"))
            else:
                self.extensions.remove(OPS)
                say("_kernels", "left out: they are for tensors, and there is no torch")
            super().run()

    def build_extensions(self) -> None:
        # Some Pythons put their own library path into every extension they link.
        linker = self.compiler.linker_so
        self.compiler.set_executables(linker_so=[a for a in linker if not a.startswith(("-Wl,-rpath", "-L"))])
        self.lay_core(Path(self.build_lib) / "monarch_rdma")
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        self.lay_core(ROOT / "monarch_rdma")
        super().copy_extensions_to_source()

    def lay_core(self, package: Path) -> None:
        for source, place in self.core:
            target = package / place
            if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            # Never written in place: a running process may have it mapped.
            shutil.copy2(source, target.with_name(target.name + ".new"))
            os.replace(target.with_name(target.name + ".new"), target)


if int(__version__.split(".")[0]) < 77:
    raise SystemExit(f"monarch_rdma: building needs setuptools >= 77, here is {__version__}; pip install -U setuptools")

setup(
    ext_modules=[ENGINE, OPS],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
