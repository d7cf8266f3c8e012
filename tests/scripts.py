"""Programs that a test writes and runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["put_script"]


def put_script(path: Path, body: str) -> Path:
    """A program of /bin/sh; folders are made. It is written by a process of its own: were it open for writing here
    while another thread forks, to run it would fail, as "Text file busy".
    """
    command = ["install", "-D", "-m", "755", "/dev/stdin", str(path)]
    subprocess.run(command, input=f"#!/bin/sh\n{body}\n", text=True, check=True)
    return path
