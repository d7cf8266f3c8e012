"""What opened_files tells of a program: its processes, forked ones too, what they write, and what is new of what they
read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from opened_files import OpenedFiles

PROGRAM = """
import os, sys
folder = sys.argv[1]
open(folder + "/old").read()
if os.fork() == 0:
    open(folder + "/checkpoint", "wb").write(b"weights")
    os._exit(0)
os.wait()
open(folder + "/checkpoint", "rb").read()
os.close(os.open(folder + "/appended", os.O_WRONLY | os.O_CREAT))
"""


def test_files_that_processes_write_and_read(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    opened, began = OpenedFiles(tmp_path / "opened"), time.time() + 0.001
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(program, env=os.environ | opened.environment)
    assert process.wait(60) == 0
    assert len(opened.processes) == 2 and process.pid in opened.processes
    assert opened.written() == {tmp_path / "checkpoint", tmp_path / "appended"}
    assert opened.written(by=process.pid) == {tmp_path / "appended"}
    assert opened.read_since(began) == {tmp_path / "checkpoint"}
    assert tmp_path / "old" in opened.read_since(0.0)
