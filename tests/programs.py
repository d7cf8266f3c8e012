"""Other programs of a job, for tests: worker loops and clients in processes of their own, which end with the test."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from monarch_rdma.rdma import Secret

TESTS = Path(__file__).resolve().parent
LIMIT = 60.0  # seconds for what takes milliseconds; reached only by a failing test


class Program:
    """Runs Python code. `say("...")` in it is `line()` here; `hear()` there waits for `tell()`."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        secret_file: Path | None = None,
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
        **env: str,
    ) -> None:
        """`popen`: what starts it, such as that of a host (tests/hosts)."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MONARCH_RDMA_")} | env
        if secret_file is not None:
            environment["MONARCH_RDMA_SECRET_FILE"] = str(secret_file)
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self.process = popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                "-c",
                _PROLOGUE.format(parent=os.getpid()) + textwrap.dedent(code),
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid = self.process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._lines.put), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self._errors.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], take: Any) -> None:
        for line in pipe:
            take(line.rstrip("\n"))

    def line(self) -> str:
        """The next line that it says."""
        try:
            return self._lines.get(timeout=LIMIT)
        except queue.Empty:
            raise AssertionError(f"the program says nothing; its errors:\n{self.errors}") from None

    def rest(self) -> list[str]:
        """What it has said that nobody has heard; after its end, all of it."""
        return [self._lines.get_nowait() for _ in range(self._lines.qsize())]

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @property
    def errors(self) -> str:
        return "\n".join(self._errors)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler shows where it is
            self.process.wait(LIMIT)
            code = None
        for reader in self._readers:
            reader.join(LIMIT)
        assert code is not None, f"the program does not end:\n{self.errors}"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        for reader in self._readers:  # they end when the last process that has the pipe has ended
            reader.join(LIMIT)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


_PROLOGUE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() not in ({parent}, 0): sys.exit()  # 0: in process ids of its own
def say(*what): print(*what, flush=True)
def hear(): return sys.stdin.readline()
"""

WORKER_LOOP = """
import monarch_rdma.actor
getattr(monarch_rdma.actor, sys.argv[2])(address=sys.argv[1])
say("over")
"""


def make_secret(path: Path) -> Path:
    Secret.generate().write_file(path)
    return path


def is_alive(pid: int) -> bool:
    """Not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
