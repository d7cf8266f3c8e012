"""The demo's processes: started, asked with a deadline, killed, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..rdma.secret import Secret

__all__ = ["Job", "Process", "ProcessFailed"]


class ProcessFailed(Exception):
    """A process of the demo ended, gave no answer in time, or answered with an error (its traceback is the cause)."""

    @classmethod
    def of(cls, who: str, error: Mapping[str, str]) -> ProcessFailed:
        failed = cls(f"{who}: {error['type']}: {error['message']}")
        failed.__cause__ = Exception(error["trace"])
        return failed


class Process:
    """An owner or a reader."""

    def __init__(self, role: str, name: str, secret: Secret) -> None:
        self.role, self.name = role, name
        fd = secret.to_fd()
        try:
            # A session of its own: Ctrl-C is for the parent alone, which then ends all.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "monarch_rdma.demo.worker", role, name, str(fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,
            )
        finally:
            os.close(fd)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.answers = self._process.stdin, self._process.stdout
        self._unread = b""
        self.pid = self._process.pid

    def order(self, do: str, **arguments: Any) -> None:
        try:
            self._orders.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            raise ProcessFailed(f"{self.name} has ended ({self._how_it_ended()})") from None

    def read(self) -> list[dict[str, Any]]:
        """The answers that have come, after the pipe became readable. Raises ProcessFailed at its end."""
        data = os.read(self.answers.fileno(), 1 << 20)
        if not data:
            raise ProcessFailed(f"{self.name} ended unasked ({self._how_it_ended()})")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _how_it_ended(self) -> str:
        code = self._process.wait(5)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self.answers.close()


class Job:
    """All processes of one run. A context manager: none outlives it."""

    def __init__(self) -> None:
        self._secret = Secret.generate()
        self._processes: list[Process] = []

    def start(self, role: str, name: str) -> Process:
        process = Process(role, name, self._secret)
        self._processes.append(process)
        return process

    def ask(
        self,
        orders: Mapping[Process, Mapping[str, Any]],
        do: str,
        timeout: float,
        *,
        advance: Callable[[int], None] = lambda amount: None,
        on_event: Callable[[Process, str], None] = lambda process, event: None,
    ) -> dict[Process, Any]:
        """Gives all of them the order `do` with their arguments, and collects the results.

        Raises ProcessFailed for the first that fails, or where `timeout` seconds pass.
        """
        for process, arguments in orders.items():
            process.order(do, **arguments)
        results: dict[Process, Any] = {}
        for process, answer in self._answers(list(orders), timeout, do):
            if "progress" in answer:
                advance(answer["progress"])
            elif "event" in answer:
                on_event(process, answer["event"])
            elif "error" in answer:
                raise ProcessFailed.of(f"{process.name}, asked to {do}", answer["error"])
            else:
                results[process] = answer["result"]
                if len(results) == len(orders):
                    return results
        return results

    def await_ready(self, timeout: float) -> None:
        waiting = set(self._processes)
        for process, answer in self._answers(list(waiting), timeout, "start"):
            if "error" in answer:
                raise ProcessFailed.of(f"{process.name} cannot start", answer["error"])
            waiting.discard(process)
            if not waiting:
                return

    def _answers(self, processes: list[Process], timeout: float, what: str) -> Iterator[tuple[Process, dict[str, Any]]]:
        """What these processes say, as it comes, until nobody wants more of it."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for process in processes:
                selector.register(process.answers, selectors.EVENT_READ, process)
            while True:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    names = ", ".join(process.name for process in processes)
                    raise ProcessFailed(f"no answer from {names} within {timeout:g} s, asked to {what}")
                for key, _ in ready:
                    for answer in key.data.read():
                        yield key.data, answer

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
