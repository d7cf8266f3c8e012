"""Python stacks of another process on this host, read from outside by py-spy: also while it holds the GIL or hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from typing import Any

from ... import config
from ...errors import ConfigError

__all__ = ["dump"]

_TIMEOUT = 20.0  # seconds


def dump(pid: int) -> list[dict[str, Any]]:
    """Its threads, as `inspection.stacks` has them. ConfigError, one sentence, where py-spy is missing or refused."""
    command = [_find(), "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False)
    except OSError as error:
        raise ConfigError(f"py-spy cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"py-spy did not end within {_TIMEOUT:g} s") from error
    if done.returncode != 0:
        raise ConfigError(f"py-spy failed: {_reason(done.stderr.decode('utf-8', 'replace'))}")
    try:
        return [_thread(thread) for thread in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"py-spy printed something else than stacks: {error}") from error


def _find() -> str:
    """Option pyspy_bin; else the one installed with this Python, or on the path."""
    if wanted := str(config.get("pyspy_bin")):
        return wanted
    beside = os.path.join(sysconfig.get_path("scripts"), "py-spy")
    found = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise ConfigError("py-spy is not installed; pip install monarch-rdma[tools]")
    return found


def _reason(errors: str) -> str:
    """The line that says why: the last of the chain of causes, before any stack of py-spy itself."""
    if "ermission" in errors:
        return "ptrace is refused (permission denied)"
    lines = [line.strip() for line in errors.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return lines[0].removeprefix("Error: ") if lines else "it said nothing"


def _thread(thread: dict[str, Any]) -> dict[str, Any]:
    frames = [
        {"function": frame["name"], "file": frame["filename"], "line": frame["line"]}
        for frame in reversed(thread["frames"])
    ]
    return {
        "thread": thread["os_thread_id"],
        "name": thread["thread_name"],
        "has_gil": bool(thread["owns_gil"]),
        "frames": frames,
    }
