"""Calls that are carried out one after the other, and torch's handles of them.

A sequence has a thread that carries out what nobody waits for yet. Who waits for a call that is next carries it out
himself: a change of threads takes longer than a small collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

__all__ = ["Sequence", "Work"]


class Work(TorchWork):
    """The end of one call in a sequence. `tensors` are those that it writes: what torch expects its future to have."""

    def __init__(self, sequence: Sequence, call: Callable[[], Any], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._sequence = sequence
        self._call: Callable[[], Any] | None = call
        self._tensors = tensors
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # made by who waits
        self._future: Any = None
        self._is_done = False
        self._error: BaseException | None = None
        self._sender = -1

    def carry_out(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            sender = call()
            self._sender = -1 if sender is None else sender
        except BaseException as error:  # whoever waits gets it, in his own thread
            self._error = error
        with self._lock:
            self._is_done = True
            done, future = self._done, self._future
        if done is not None:
            done.set()
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what the call raised; TimeoutError where it has not ended within `timeout`, if that is positive."""
        limit = timeout.total_seconds() if timeout is not None else 0
        if not self._is_done and (limit > 0 or not self._sequence.carry_out_now(self)):
            with self._lock:
                done = self._done = self._done or threading.Event()
                is_done = self._is_done
            if not is_done and not done.wait(limit if limit > 0 else None):
                raise TimeoutError(f"the call has not ended within {limit} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._sender

    def _source_rank(self) -> int:
        return self._sender

    def get_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            is_done = self._is_done
        if is_done:
            self._settle(future)
        return future

    def _settle(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)


class Sequence:
    """Carries out calls in the order in which they are given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._pending: deque[Work] = deque()
        self._is_busy = False  # some thread carries one out
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, work: Work, *, is_awaited: bool = False) -> Work:
        """`is_awaited`: its caller waits for it at once."""
        with self._lock:
            self._pending.append(work)
            if not is_awaited or self._is_busy or len(self._pending) > 1:
                self._call_thread()
        return work

    def carry_out_now(self, work: Work) -> bool:
        """In this thread, if it is next. False: it is done, or another thread carries it out, or one before it."""
        with self._lock:
            if self._is_busy or not self._pending or self._pending[0] is not work:
                return False
            self._pending.popleft()
            self._is_busy = True
        try:
            work.carry_out()
        finally:
            with self._lock:
                self._is_busy = False
                if self._pending:
                    self._call_thread()
        return True

    def close(self) -> None:
        """The thread ends when nothing is left."""
        with self._lock:
            self._is_closed = True
            self._came.notify()

    def _call_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._came.notify()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while self._is_busy or not self._pending:
                    if self._is_closed and not self._pending:
                        return
                    self._came.wait()
                work = self._pending.popleft()
                self._is_busy = True
            work.carry_out()
            with self._lock:
                self._is_busy = False
