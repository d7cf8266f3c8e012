"""A program with actors in a process of its own, and the monarch-rdma command beside it, of one runtime directory."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

LIMIT = 60.0  # seconds for what takes milliseconds; reached only by a failing test
ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "monarch_rdma.cli"]


def environment(directory: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "MONARCH_RDMA_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT), **more}


class RunningProgram:
    """Runs `code` as a script, with `done()` in it: it waits for the end of the test."""

    def __init__(self, directory: Path, code: str, **variables: str) -> None:
        script = directory / f"program{len(list(directory.glob('program*.py')))}.py"
        script.write_text(_PRELUDE + textwrap.dedent(code))
        self.directory = directory
        self.script = script
        self.process = subprocess.Popen(
            [sys.executable, script],
            env=environment(directory, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def line(self, start: str = "") -> str:
        """The next line that it prints, of those that begin so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.rstrip("\n")
        raise AssertionError(f"it ended with {self.process.wait()}, and has not printed {start!r}")

    def command(self, *arguments: str, entered: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs monarch-rdma to its end."""
        return subprocess.run(
            [*COMMAND, *arguments],
            env=environment(self.directory, **variables),
            input=entered,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def close(self) -> int:
        """Lets it end; its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=LIMIT)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.close()
            except subprocess.TimeoutExpired:
                self.kill()


_PRELUDE = """\
import asyncio, ctypes, os, signal, sys, threading, time
from monarch_rdma.actor import *
from monarch_rdma.actor import Actor, endpoint, concurrent_endpoint, this_host, this_proc


def done():
    print("ready", os.getpid(), flush=True)
    sys.stdin.readline()


"""


class Terminal:
    """A command in a pseudo terminal."""

    def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
        master, slave = pty.openpty()
        self._master = master
        try:
            self.process = subprocess.Popen(
                arguments,
                env={**variables, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        finally:
            os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """What is shown up to this text; the next wait begins behind it."""
        deadline = time.monotonic() + LIMIT
        while text not in plain(self.shown):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} is not shown, but {self.shown!r}"
            try:
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"it ended, and has not shown {text!r}, but {self.shown!r}") from None
        shown = plain(self.shown)
        end = shown.index(text) + len(text)
        self.shown = shown[end:]
        return shown[:end]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._master)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes SIGINT


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][0-9A-B]?|\r")


def plain(shown: str) -> str:
    """Without what moves the cursor and colours."""
    return _ESCAPES.sub("", shown)
