"""The fake GPU runtime (tests/fake_gpu) from Python: what is loaded, device memory as arrays, streams."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def fake_gpu_folder() -> Path:
    """Where its libraries are; made the first time."""
    subprocess.run(["make", "-C", ROOT / "csrc", "--no-print-directory", "fake_gpu"], check=True, timeout=300)
    return ROOT / "build/core/fake_gpu"
