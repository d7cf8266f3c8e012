"""How commands of the same user find running programs: each program leaves a small private file while it runs.

The file says who the program is, where it listens, and where its job secret can be read: through a descriptor of the
program itself, which the kernel shows to processes of the same user only. The secret is in no file, no argument and no
variable, and goes with the program.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...rdma.private_files import PrivateFile, living
from ...rdma.secret import Secret
from ..runtime.on_demand import offer
from . import breakpoints

if TYPE_CHECKING:
    from ..runtime.proc import Proc

__all__ = ["Entry", "Program", "announce", "choose", "programs"]

_log = logging.getLogger("monarch_rdma.actor")
_SUFFIX = ".program"


@dataclass(frozen=True)
class Program:
    """A program that runs. `secret`: the path at which its secret can be read. `started`: by time.time()."""

    pid: int
    address: str
    secret: str
    command: str
    started: float

    def read_secret(self) -> Secret:
        """Raises ConfigError where it cannot be read: the program has ended, or may not be looked into."""
        try:
            return Secret.from_file(self.secret)
        except ConfigError as error:
            raise ConfigError(f"the secret of program {self.pid} cannot be read: {error}") from error


class Entry:
    """This program's file; there until `close`, and at the end of the process at the latest."""

    def __init__(self, address: str, secret: Secret) -> None:
        self._secret_fd = _private_copy(secret)
        try:
            path = f"/proc/{os.getpid()}/fd/{self._secret_fd}"
            command = " ".join(sys.argv) or sys.executable
            self.program = Program(os.getpid(), address, path, command, time.time())
            self._file = PrivateFile(_SUFFIX, self._write)
        except BaseException:
            os.close(self._secret_fd)
            raise
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.close()
            os.close(self._secret_fd)

    def _write(self, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(asdict(self.program), file)


def _private_copy(secret: Secret) -> int:
    """A descriptor of memory that holds the secret, readable for this user alone, not inherited by other programs."""
    fd = secret.to_fd()
    os.set_inheritable(fd, False)
    os.fchmod(fd, 0o600)
    return fd


def announce(proc: Proc) -> None:
    """Lets commands of this user find the program, and ask it. Does nothing in a worker, which is found through its
    host, nor the second time.
    """
    from ..hosting.agent import ProcAgent
    from ..metrics import start_export
    from ..runtime.proc import AGENT

    if not offer(proc, AGENT, ProcAgent, "agent"):
        return
    breakpoints.install(proc)
    try:
        start_export(proc)
    except ConfigError:
        proc.forget(AGENT)  # the next one who asks is told too
        raise
    try:
        proc.at_close(Entry(proc.address, proc.engine.secret).close)
    except (ConfigError, OSError) as error:
        _log.warning("the monarch-rdma command will not find this program: %s", error)


def programs() -> list[Program]:
    """Those of this user that run on this host and have actors, oldest first."""
    found = (_read(path) for path in living(_SUFFIX))
    return sorted((program for program in found if program is not None), key=lambda program: program.started)


def _read(path: str) -> Program | None:
    try:
        with open(path, encoding="utf-8") as file:
            program = Program(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None  # it is being written or removed
    return program if os.path.exists(f"/proc/{program.pid}") else None


def choose(pid: int | None) -> Program:
    """The program with this pid; None: the only one. Raises ConfigError, listing those that run, where that is no
    choice.
    """
    running = programs()
    wanted = [program for program in running if pid in (None, program.pid)]
    if len(wanted) == 1:
        return wanted[0]
    if not running:
        raise ConfigError("no program of this user with actors runs on this host")
    now = time.time()
    lines = [f"  {each.pid:>8}  {now - each.started:8.0f} s  {each.command:.100}" for each in running]
    said = f"no program has pid {pid}" if pid is not None else f"{len(running)} programs run: name one by its pid"
    raise ConfigError("\n".join([f"{said}; there are", *lines]))
