"""Imported by every Python process of a program whose PYTHONPATH has this folder. Each file that the process opens is
written down at once, a JSON line each, in the file OPENED_FILES; so is its own number when it starts or is forked.
"""

import json
import os
import sys
import tempfile
from typing import Any

_LOG = os.open(os.environ["OPENED_FILES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _note(path: str | None, writes: bool = False) -> None:
    os.write(_LOG, json.dumps({"pid": os.getpid(), "path": path, "writes": writes}).encode() + b"\n")


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    path, mode, flags = arguments
    if isinstance(path, int):  # a descriptor, opened before
        return
    writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _CHANGES)
    _note(os.path.abspath(os.fsdecode(path)), writes)


tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")  # else each process tries it out with a file
_note(None)
os.register_at_fork(after_in_child=lambda: _note(None))
sys.addaudithook(_see)
