"""A helper process that answers JSON lines: each benchmark's second process is driven this way."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["LineProcess", "answer_lines"]

_PR_SET_PDEATHSIG = 1
_HERE = Path(__file__).resolve().parent


class LineProcess:
    """Runs a script of this directory. It ends with this process, however that ends."""

    def __init__(
        self,
        script: str,
        *arguments: str,
        python: str = sys.executable,
        pass_fds: tuple[int, ...] = (),
        env: dict[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [python, str(_HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            pass_fds=pass_fds,
            env={**os.environ, **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: Any) -> Any:
        """Sends one question and waits for its answer. RuntimeError with what the process says where it failed."""
        self.send(**question)
        return self.receive()

    def send(self, **question: Any) -> None:
        """Sends a question; its answer has to be received later."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"{self._script} has ended") from error

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._script} ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._script}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        """Lets the process end; kills it when it takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def answer_lines(make: Callable[[], Callable[..., Any]]) -> None:
    """The other side: calls what `make` returns, as answer(**question), for each line of standard input until it ends.

    Reads no further than the line's end, so that an answer may look whether the next question is there. What libraries
    print to standard output, from `make` on, goes to standard error.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = make()
    with open(0, "rb", buffering=0, closefd=False) as questions:
        for line in questions:
            try:
                reply = {"answer": answer(**json.loads(line))}
            except Exception as error:  # told to the asking side, which raises it
                reply = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    if hasattr(answer, "close"):
        answer.close()
