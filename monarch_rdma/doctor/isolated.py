"""Code that may crash, hang or be refused by the kernel, tried in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["Failed", "run"]


class Failed(Exception):
    """The process did not give a result; says why."""


def run(code: str, *arguments: str, timeout: float = 10) -> Any:
    """The JSON that `code` printed. Raises Failed."""
    command = [sys.executable, "-I", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {timeout:g} s") from None
    if done.returncode < 0:
        raise Failed(f"it ended with signal {-done.returncode}")
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout)
