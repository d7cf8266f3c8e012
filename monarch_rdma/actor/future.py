"""Futures of calls: waited for with `get`, awaited in asyncio, queried, cancelled."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from ..errors import Cancelled, ConfigError
from ..rdma.engine import seconds

__all__ = ["Future", "returns_future"]

A = TypeVar("A")
R = TypeVar("R")

_LONGEST_WAIT = _thread.TIMEOUT_MAX


class Future(Generic[R]):
    """The end of one call. Made by the library only; may be awaited and asked again and again.

    Letting go of it does not stop the call.
    """

    __slots__ = ("__weakref__", "_callbacks", "_cancel", "_claims", "_done", "_error", "_load", "_loading", "_value")

    _claims: list[None]
    _done: bool
    _value: Any
    _error: BaseException | None
    _load: Callable[[], R] | None
    _loading: _thread.LockType
    _callbacks: list[Callable[[], object]]
    _cancel: Callable[[], object] | None

    def __init__(self) -> None:
        raise TypeError("a Future is returned by a call and cannot be made directly")

    @classmethod
    def pending(cls, cancel: Callable[[], object] | None = None) -> Future[R]:
        """For the library. `cancel`: tells the other side that the result is not wanted any more."""
        self = cls.__new__(cls)
        self._claims = [None]
        self._done = False
        self._value = None
        self._error = None
        self._load = None
        self._callbacks = []
        self._cancel = cancel
        return self

    # --- for users

    def get(self, timeout: float | None = None) -> R:
        """Waits for the result, or raises the call's error.

        Where `timeout` seconds pass first, raises the builtin TimeoutError: the call goes on.
        """
        if not self._done or timeout is not None:
            self._wait(timeout)
        return self._outcome()

    def result(self, timeout: float | None = None) -> R:
        """The same as get()."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; the call's error, or None where it succeeded. TimeoutError as in get()."""
        if not self._done or timeout is not None:
            self._wait(timeout)
        try:
            self._outcome()
        except BaseException as error:
            if error is not self._error:
                raise
        return self._error

    def done(self) -> bool:
        """Whether it is over, in success or failure. Never waits."""
        return self._done

    def cancel(self) -> bool:
        """Ends the call for the caller with `Cancelled`; False where it is over already.

        A message that waits in its mailbox is taken out. An async handler that runs is cancelled; a sync one runs on,
        and may look at `context().is_cancelled`. Its result is thrown away.
        """
        if self._done:
            return False
        cancel = self._cancel
        if not self.set_error(Cancelled("the call was cancelled by its caller", operation="call")):
            return False
        if cancel is not None:
            cancel()
        return True

    def as_asyncio(self) -> asyncio.Future[R]:
        """An asyncio future of the running loop with the same end."""
        loop = asyncio.get_running_loop()
        return loop.create_task(self._awaited())

    def __await__(self) -> Generator[Any, None, R]:
        """Waits in asyncio. Cancelling the task that awaits leaves the call running."""
        if not self._done:
            waiter = self.waiter(asyncio.get_running_loop())
            yield from waiter
        return self._outcome()

    def __repr__(self) -> str:
        state = "pending" if not self._done else "done" if self._error is None else f"failed: {self._error}"
        return f"<Future: {state}>"

    def __reduce__(self) -> str:
        raise ConfigError("a Future cannot be sent; send a Port, or the result")

    # --- for the library

    def set_result(self, value: R) -> bool:
        """False where it was over already. So do all setters."""
        if not self._claim():
            return False
        self._value = value
        return self._finish()

    def set_loader(self, load: Callable[[], R]) -> bool:
        """The result is made by whoever asks first: unpickling runs users' code, which has no place on our threads."""
        if not self._claim():
            return False
        self._loading = _thread.allocate_lock()
        self._load = load
        return self._finish()

    def set_error(self, error: BaseException) -> bool:
        if not self._claim():
            return False
        self._error = error
        return self._finish()

    def _claim(self) -> bool:
        try:
            self._claims.pop()  # atomic: one of several setters gets it
        except IndexError:
            return False
        return True

    def then(self, transform: Callable[[R], A]) -> Future[A]:
        """A future with this one's result, transformed by whoever asks for it."""
        follower: Future[A] = Future.pending(self.cancel)
        self.add_callback(lambda: follower.set_loader(lambda: transform(self.get())))
        return follower

    def wait(self, seconds: float | None) -> bool:
        """Whether it was over in time."""
        if self._done:
            return True
        turnstile = _thread.allocate_lock()
        turnstile.acquire()
        self.add_callback(turnstile.release)
        if turnstile.acquire(True, -1 if seconds is None else min(max(seconds, 0.0), _LONGEST_WAIT)):
            return True
        with contextlib.suppress(ValueError):
            self._callbacks.remove(turnstile.release)
        return self._done

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Called once it is done, by the thread that settles it; at once if it is."""
        self._callbacks.append(callback)
        if self._done:
            self._run_callbacks()

    def waiter(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future of this loop that ends, without a value, when this one does."""
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def on_done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(wake)

        self.add_callback(on_done)
        return waiter

    def _finish(self) -> bool:
        self._done = True
        self._cancel = None
        self._run_callbacks()
        return True

    def _run_callbacks(self) -> None:
        while True:  # list.pop is atomic: each callback is run by one thread
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()

    def _outcome(self) -> R:
        if self._load is not None:
            with self._loading:
                if self._load is not None:
                    try:
                        self._value = self._load()
                    except Exception as error:  # also what a peer sent and does not load here is this call's end
                        self._error = error
                    self._load = None
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def wait_get(self) -> R:
        """get() for the library's own waits, which may be on an event loop for a moment."""
        self.wait(None)
        return self._outcome()

    def _wait(self, timeout: float | None) -> None:
        limit = seconds(timeout)
        if self._done:
            return
        if asyncio._get_running_loop() is not None:
            warnings.warn("Future.get() blocks the running event loop; await the future", RuntimeWarning, stacklevel=3)
        if not self.wait(limit if limit >= 0 else None):
            raise TimeoutError(f"no answer after {timeout} s; the call goes on")

    async def _awaited(self) -> R:
        return await self


def done_future(value: R) -> Future[R]:
    """A future that is over."""
    future: Future[R] = Future.pending()
    future.set_result(value)
    return future


def returns_future(function: Callable[..., Coroutine[Any, Any, R]]) -> Callable[..., Future[R]]:
    """Makes a function that returns a Future out of a coroutine function; it runs on a thread of its own."""

    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"returns_future requires an async function, not {function!r}")

    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Future[R]:
        future: Future[R] = Future.pending()

        def run() -> None:
            try:
                future.set_result(asyncio.run(function(*args, **kwargs)))
            except BaseException as error:
                future.set_error(error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), name=function.__name__, daemon=True).start()
        return future

    return start
