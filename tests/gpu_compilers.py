"""The compilers for GPU code that this machine has or can put together; a test that wants one it has not is skipped."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNAVAILABLE = 77


@functools.cache
def _toolchain() -> tuple[int, str]:
    script = [str(ROOT / ".ci" / "hip_toolchain.sh")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # this Python has pip
    environment = {**os.environ, "PATH": path}
    result = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600, check=False)
    said = result.stdout if result.returncode == 0 else result.stderr
    return result.returncode, said.strip()


def hipcc() -> Path:
    """A hipcc that compiles for gfx90a, gfx942 and gfx950; fails only where making one broke in an unforeseen way."""
    code, said = _toolchain()
    if code == UNAVAILABLE:
        pytest.skip(said)
    assert code == 0, said
    return Path(said)


def nvcc() -> Path:
    """The CUDA toolkit's compiler, from $CUDA_HOME, the path or its usual folder."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        pytest.skip("no nvcc: neither in $CUDA_HOME, nor in $PATH, nor in /usr/local/cuda")
    return Path(found)


def include_folder(compiler: Path, header: str, folder: Path) -> str:
    """Where `compiler` finds `header`; `folder` is for a file to ask it with."""
    source = folder / f"ask.{'cu' if compiler.name == 'nvcc' else 'hip'}"
    source.write_text(f"#include <{header}>\n")
    only = [] if compiler.name == "nvcc" else ["--offload-host-only"]
    command = [str(compiler), *only, "-E", str(source)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    found = re.search(rf'^# \d+ "(.*)/{re.escape(header)}"', said, flags=re.MULTILINE)
    assert found, f"{compiler} does not find {header}"
    return found[1]
