"""Another process of the same job, for tests: `Child(secret).run("code")` runs code there and brings back `result`.

It is this file run as a program. It ends with its parent, however that ends.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monarch_rdma.rdma import Engine, Secret

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """What the code in the child raised, with its traceback as text."""


class Child:
    """Code runs in one namespace, with `engine`, `RDMABuffer` and the names given to `run`; its prints go to stderr."""

    def __init__(
        self,
        secret: Secret,
        *,
        inside: Sequence[str] = (),
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
        **options: Any,
    ) -> None:
        """`inside`: a command that runs another one somewhere else, such as `unshare --net`, word by word.
        `popen`: what starts it, such as that of a host (tests/hosts)."""
        fd = secret.to_fd()
        try:
            self.process = popen(
                [*inside, sys.executable, __file__, str(fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
                cwd=ROOT,
            )
        finally:
            os.close(fd)
        self.pid = self.process.pid
        self.address: str = self.run(
            "engine = Engine(secret=secret, **options); result = engine.address", options=options
        )

    def start(self, code: str, **names: Any) -> None:
        """Begins `code` without waiting for its end; `finish` does."""
        assert self.process.stdin is not None
        self.process.stdin.write(_packed((textwrap.dedent(code), names)))
        self.process.stdin.flush()

    def finish(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(f"the child ended with {self.process.wait()}")
        ok, value = pickle.loads(base64.b64decode(line))
        if not ok:
            raise ChildError(value)
        return value

    def run(self, code: str, **names: Any) -> Any:
        self.start(code, **names)
        return self.finish()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and every thread of it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        states = {"R"}
        while states != {"T"}:
            tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
            states = {state for state in map(_state, tasks) if state}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it, gently if it listens."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def maker_of_children(secret: Secret) -> Iterator[Callable[..., Child]]:
    """Makes them, with these options of their engines; they end with the block."""
    with ExitStack() as children:
        yield lambda **options: children.enter_context(Child(secret, **options))


def _state(stat: Path) -> str:
    """That of a thread; none where it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _packed(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def _main() -> None:
    secret_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: in a pid namespace of its own
        return
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    from monarch_rdma import rdma

    space: dict[str, Any] = {**{name: getattr(rdma, name) for name in rdma.__all__}, "rdma": rdma, "os": os}
    space["secret"] = Secret.from_fd(secret_fd)
    for line in sys.stdin.buffer:
        code, names = pickle.loads(base64.b64decode(line))
        space.update(names, result=None)
        try:
            exec(code, space)
            answer = _packed((True, space["result"]))
        except BaseException:
            answer = _packed((False, traceback.format_exc()))
        answers.write(answer)
    if isinstance(space.get("engine"), Engine):
        space["engine"].close()


if __name__ == "__main__":
    _main()
