"""A running actor: its thread, its mailbox, and what becomes of a message there.

Each actor has a thread of its own. Where its class has async endpoints, an event loop runs on it. Messages are worked
on one at a time, in order; those of concurrent endpoints start in order and go on side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, TransferTimeout
from ...rdma.region import drop_made_by, made_by
from ...supervision.events import emit
from ..context import Context, running
from ..debugging import breakpoints
from ..encoding.codec import encode
from ..endpoint import EndpointProperty, endpoints_of
from ..failure import ENDED, STUCK, MeshFailure, StateError, SupervisionError, encode_failure
from ..future import Future
from ..port import ResponsePort
from ..shape import Point
from . import message
from .birth import Birth
from .hooks import Unhandled, tell_of_failure
from .mailbox import Mailbox
from .message import Frame
from .overdue import Overdue
from .owned import Owned
from .reduce import Reducer
from .route import CREDIT_BATCH
from .state import SNAPSHOT, Keeping, restored
from .tombstone import Tombstone

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Instance"]

_log = logging.getLogger("monarch_rdma.actor")
_MOST_TASKS = 1024  # messages of concurrent endpoints at work in one actor; the next one waits


class _Ended(BaseException):
    """The actor's life is over. `error`: why, or None for a stop that was asked for. `at_birth`: it never began."""

    def __init__(self, error: BaseException | None, *, at_birth: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.at_birth = at_birth


def _ended_badly(why: BaseException | None, error: BaseException) -> _Ended:
    """The end of an actor whose `__cleanup__` failed, SystemExit included; `why` it ended is told too."""
    if error.__context__ is None:
        error.__context__ = why
    return _Ended(error)


class Instance:
    """One actor in this process. Its public names are what users see as `context().actor_instance`."""

    def __init__(self, proc: Proc, number: int) -> None:
        self._proc = proc
        self._number = number
        self._mailbox = Mailbox(proc, self._about)
        self._popped: Counter[str] = Counter()  # by process, since the last credit
        self._current: Frame | None = None
        self._since = 0.0  # when it began
        self._handled = 0
        self._tasks: dict[asyncio.Task[None], Frame] = {}
        self._asides: set[asyncio.Task[None]] = set()  # snapshots under way
        self._keep_lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: asyncio.Task[Any] | None = None
        self._actor: Any = None
        self._birth: Birth | None = None
        self._rank: Point | None = None
        self._endpoints: dict[str, EndpointProperty] = {}
        self._accept = "pickle"
        self._aborted: BaseException | None = None
        self._last: Frame | None = None  # the stop that waits for its answer
        self._ended: str | None = None
        self._ending = threading.Lock()
        self._keeping: Keeping | None = None
        self._overdue = Overdue(proc)
        self.owned = Owned()
        self._thread = threading.Thread(target=self._live, name=f"actor-{number:x}", daemon=True)
        self._thread.start()

    # --- for users

    @property
    def name(self) -> str:
        return self._birth.name if self._birth else f"{self._number:x}"

    @property
    def class_name(self) -> str:
        return f"{self._birth.cls.__module__}.{self._birth.cls.__qualname__}" if self._birth else "?"

    @property
    def rank(self) -> Point:
        """In the mesh that was spawned."""
        assert self._rank is not None, "known from its first message on"
        return self._rank

    @property
    def actor_id(self) -> str:
        return f"{self._proc.name},{self.name}[{self.rank.rank}]"

    @property
    def proc_id(self) -> str:
        return self._proc.name

    @property
    def creator(self) -> str:
        return self._birth.creator if self._birth else "?"

    @property
    def proc_mesh(self) -> Any:
        """The processes that the actor's mesh was spawned on."""
        return self._birth.proc_mesh if self._birth else None

    @property
    def proc(self) -> Any:
        """The process of this actor, as a mesh of one."""
        from ..mesh import this_proc

        return this_proc()

    @property
    def owner_reference(self) -> tuple[str, int]:
        """Who is told of failures of what this actor spawns: itself."""
        return self._proc.address, self._number

    def stop(self, reason: str = "it stopped itself") -> None:
        """Ends this actor after the messages that wait already."""
        self._put(message.pack(message.CALL, self._number, flags=message.STOP), encode(reason).body)

    def abort(self, reason: str = "it was aborted") -> None:
        """Fails this actor after the message at hand; its owner is told."""
        self._aborted = SupervisionError(reason)
        self._put(message.pack(message.FAILURE, self._number))  # wakes it

    kill = abort

    def snapshot(self) -> Future[None]:
        """Has the state of this actor kept now, by its hook `__snapshot__`; done when its supervisor has it.

        Fails with StateError. ConfigError where its class has no such hook, or nobody starts it again.
        """
        if self._keeping is None:
            raise ConfigError(f"{self.name} has no __snapshot__, or is not supervised: nobody keeps its state")
        kept: Future[None] = Future.pending()
        try:
            state = self._keeping.take(self._actor)
        except StateError as error:
            kept.set_error(error)
            return kept
        if not inspect.iscoroutine(state):
            return self._keeping.send(state)
        if self._loop is None:
            return self._keeping.send(finish_coroutine(state))
        state.close()  # others may be at it: each takes the state when it is its turn
        self._loop.call_soon_threadsafe(self._start_keeping, kept)
        return kept

    def _start_keeping(self, kept: Future[None]) -> None:
        task = asyncio.get_running_loop().create_task(self._keep())
        self._asides.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._asides.discard(task)
            kept.set_loader(task.result)

        task.add_done_callback(done)

    def __repr__(self) -> str:
        return f"{self.creator}.<{self.class_name} {self.name}{self._rank or ''}>"

    # --- for the process

    def join(self, timeout: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def describe(self, now: float) -> dict[str, Any]:
        """What it does: for `monarch-rdma top`."""
        current = self._current
        return {
            "name": self.name,
            "class": self.class_name,
            "rank": self._rank.rank if self._rank is not None else 0,
            "thread": self._thread.native_id,
            "mailbox": len(self._mailbox),
            "message": current.method.decode() if current is not None else None,
            "age": now - self._since if current is not None else None,
            "concurrent": len(self._tasks),
        }

    def _about(self) -> str:
        """It, and what it works on."""
        current, name = self._current, f"actor {self.name}[{self._rank.rank if self._rank is not None else 0}]"
        if current is None:
            return name
        return f"{name}, which has been at {current.method.decode()} for {time.monotonic() - self._since:.3g} s,"

    @property
    def num_handled(self) -> int:
        """Messages, since its birth."""
        return self._handled

    def tasks(self) -> list[tuple[asyncio.Task[Any], str | None]]:
        """Those of its event loop, each with the method of the message that it works on."""
        if self._loop is None:
            return []
        methods = {task: frame.method.decode() for task, frame in self._tasks.copy().items()}
        if self._driver is not None and (current := self._current) is not None:
            methods[self._driver] = current.method.decode()
        return [(task, methods.get(task)) for task in asyncio.all_tasks(self._loop)]

    # --- frames come in, on any thread

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.CANCEL:
            self._on_cancel(frame)
        elif frame.kind == message.END:
            self._give_up(str(frame.load()))
        elif frame.kind == message.FAILURE and self._loop is not None and frame.body:
            self._do_on_loop(self._start_task, frame)  # at once, whatever message it works on
        elif frame.kind in (message.CALL, message.FAILURE):
            self._mailbox.put(frame)
            if self._ended is not None:
                self._refuse_rest()

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody by itself."""

    def _put(self, head: bytes, body: bytes = b"") -> None:
        self.on_frame(message.unpack(memoryview(head + body), self._proc.address))

    def _on_cancel(self, frame: Frame) -> None:
        waiting = self._mailbox.find(frame.address, frame.reply)
        for call in (waiting, self._mailbox.at_hand, *self._tasks.copy().values()):
            if call is not None and call.reply == frame.reply and call.address == frame.address:
                call.is_cancelled = True
                breakpoints.on_cancelled(call)
                self._do_on_loop(self._cancel_running, call)
                return

    def _do_on_loop(self, action: Callable[[Frame], None], frame: Frame) -> None:
        """Nothing where there is none, or none any more."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed: the actor has ended
                self._loop.call_soon_threadsafe(action, frame)

    def _cancel_running(self, call: Frame) -> None:
        if self._current is call and self._driver is not None:
            self._driver.cancel()
        for task, frame in self._tasks.items():
            if frame is call:
                task.cancel()

    def _give_up(self, why: str) -> None:
        """Ends now for everybody else. A thread cannot be killed: when it is done with what it does, it ends too, and
        nobody hears of it.
        """
        if self._birth is None or not self._claim_end(f"it was given up: {why}"):
            return
        error = self._aborted = SupervisionError(why)
        at_hand = [self._current, *self._tasks.copy().values()]
        self._bury()
        self._refuse_rest()
        for frame in at_hand:
            if frame is not None:
                frame.is_cancelled = True
                self._do_on_loop(self._cancel_running, frame)
                self._proc.refuse(frame, f"actor {self.name}: {self._ended}", self._refusal)
        self._put(message.pack(message.FAILURE, self._number))
        self._proc.tell_owner(self._birth.owner, self._failure(error, ()))

    def _claim_end(self, how: str) -> bool:
        """Who ends it says so to all others: True for the first one."""
        with self._ending:
            is_first = self._ended is None
            if is_first:
                self._ended = how
        return is_first

    def _bury(self) -> None:
        """A handle on a buffer of it never leads to its successor: in one process, that has to be seen to."""
        if self._birth is not None and self._birth.is_supervised:
            drop_made_by(self._proc.engine, self._number)
        with self._proc.counting:
            self._proc.bury(self._number, Tombstone(self._proc, self.name, self._ended or "", self._refusal))
            self._proc.handled_by_ended[self.class_name] += self._handled

    @property
    def _refusal(self) -> int:
        """Flags of what is answered after its end."""
        return message.ENDED if self._birth is not None and self._birth.is_supervised else 0

    def _refuse_rest(self) -> None:
        while (frame := self._mailbox.take_rest()) is not None:
            self._proc.refuse(frame, f"actor {self.name}: {self._ended}", self._refusal)

    # --- its life, on its thread

    def _live(self) -> None:
        first = self._mailbox.next()
        end: BaseException | None = None
        at_birth = False
        try:
            self._be_conceived(first)
            if any(prop.is_async for prop in self._endpoints.values()):
                asyncio.run(self._live_async(first))
            else:
                self._live_sync(first)
        except _Ended as ended:
            end, at_birth = ended.error, ended.at_birth
        except BaseException as error:
            _log.exception("actor %s ended unexpectedly", self.name)
            end = error
        try:
            self._end(end, at_birth)
        except ConfigError:
            if self._proc.engine.is_open:
                raise
            _log.debug("actor %s ended after its process's engine: nobody is left to be told", self.name)

    def _be_conceived(self, first: Frame) -> None:
        self._rank = message.point_of(first)
        running.set(Context(self, first))
        try:
            if first.fetched is not None:
                first.fetched.get()
            self._birth = first.load()
        except Exception as error:
            raise self._stillborn(first, error) from error
        self._thread.name = f"{self.name}[{self._rank.rank}]"
        if self._birth.is_supervised:
            made_by.set(self._number)
        self._endpoints = dict(endpoints_of(self._birth.cls))
        self._overdue.declare({name: prop.limit for name, prop in self._endpoints.items() if prop.limit is not None})
        self._accept = self._birth.cls.accept_codec

    def _be_born(self, first: Frame) -> Coroutine[Any, Any, None] | None:
        """None, or what is left to be awaited."""
        birth, rank = self._birth, self.rank.rank
        assert birth is not None, "it is conceived"
        pending = None
        try:
            self._actor = birth.cls(*birth.args, **birth.kwargs)
            if birth.upkeep is not None:
                pending = restored(self._proc, self._actor, birth.name, rank, birth.upkeep)
                self._keeping = Keeping(self._proc, birth.cls, birth.name, rank, self._number, birth.upkeep)
        except BaseException as error:
            raise self._stillborn(first, error) from error
        if pending is not None:
            return self._finish_birth(first, pending)
        self._answer(first, None)
        return None

    async def _finish_birth(self, first: Frame, pending: Coroutine[Any, Any, None]) -> None:
        try:
            await pending
        except BaseException as error:
            raise self._stillborn(first, error) from error
        self._answer(first, None)

    def _stillborn(self, first: Frame, error: BaseException) -> _Ended:
        self._answer_failure(first, error)
        return _Ended(error, at_birth=True)

    def _live_sync(self, first: Frame) -> None:
        finish_coroutine(self._be_born(first))
        try:
            while True:
                frame = self._mailbox.next()
                if self._is_work(frame):
                    self._run(frame)
                del frame  # nothing of it is kept while the next one is waited for
                self._end_if_given_up()
        except _Ended as ended:
            why = ended.error
        try:
            finish_coroutine(self._cleanup(why))
        except BaseException as error:
            raise _ended_badly(why, error) from error
        raise _Ended(why)

    async def _live_async(self, first: Frame) -> None:
        self._loop, self._driver = asyncio.get_running_loop(), asyncio.current_task()
        pending = self._be_born(first)
        if pending is not None:
            await pending
        try:
            while True:
                frame = await self._mailbox.next_async()
                if self._is_work(frame):
                    await self._run_or_start(frame)
                del frame
                self._end_if_given_up()
        except _Ended as ended:
            why = ended.error
        await self._cancel_tasks()
        try:
            cleaned = self._cleanup(why)
            if cleaned is not None:
                await cleaned
        except BaseException as error:
            raise _ended_badly(why, error) from error
        raise _Ended(why)

    def _end_if_given_up(self) -> None:
        if self._ended is not None:
            raise _Ended(self._aborted)

    async def _cancel_tasks(self) -> None:
        """What runs of concurrent endpoints ends with the actor; who waits for an answer is told."""
        frames = list(self._tasks.values())
        for task, frame in self._tasks.items():
            frame.is_cancelled = True
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for frame in frames:  # nothing happens where the answer is out
            self._proc.refuse(frame, f"actor {self.name}: it ended while the message ran")

    def _cleanup(self, error: BaseException | None) -> Coroutine[Any, Any, None] | None:
        hook = getattr(self._actor, "__cleanup__", None)
        value = hook(error) if hook is not None else None
        return value if inspect.iscoroutine(value) else None

    def _end(self, error: BaseException | None, at_birth: bool) -> None:
        """Answers what waits, and whoever comes later; tells the owner of a failure."""
        self._actor = None
        is_first = self._claim_end("it was stopped" if error is None else f"it failed: {_one_line(error)}")
        if is_first:
            self._bury()
        self._refuse_rest()
        if self._last is not None:
            self._answer(self._last, None) if error is None else self._answer_failure(self._last, error)
        if is_first:
            self._tell_of_end(error, at_birth)
        if not self.owned.is_empty:  # last, as the interpreter may be shutting down, and start no thread any more
            reason = f"its owner {self.name} has ended"
            threading.Thread(target=self.owned.stop, args=(reason,), name=f"end of {self.name}", daemon=True).start()

    def _tell_of_end(self, error: BaseException | None, at_birth: bool) -> None:
        birth, rank = self._birth, self._rank.rank if self._rank is not None else None
        if error is not None and birth is not None:
            causes = error.causes if isinstance(error, Unhandled) else ()
            self._proc.tell_owner(birth.owner, replace(self._failure(error, causes), at_birth=at_birth))
        elif error is None:
            event = emit("actor.stopped", mesh=self.name, rank=rank)
            if birth is not None and birth.is_supervised and not self._proc.is_ending:
                ended = MeshFailure(self.name, ENDED, "it has stopped", rank, event=event, number=self._number)
                self._proc.post_quietly(
                    birth.owner[0], message.pack(message.FAILURE, birth.owner[1]), encode(ended).body
                )

    def _failure(self, error: BaseException, causes: tuple[MeshFailure, ...]) -> MeshFailure:
        rank = self._rank.rank if self._rank is not None else None
        report = _report(error)
        cause = error.event if isinstance(error, SupervisionError) else None
        event = emit("actor.failed", cause=cause, mesh=self.name, rank=rank, message=report)
        failure = MeshFailure(self.name, "actor", report, rank, causes=causes, event=event, number=self._number)
        return failure.noted(f"noticed in its process, {self._proc.name}")

    def _on_overdue(self, frame: Frame, limit: float) -> str:
        """On the receiving thread."""
        assert self._birth is not None and self._rank is not None, "it works"
        text = f"{frame.method.decode()} has run for {limit:g} s, which is its limit, and goes on; it is in\n"
        text += self._stack_of(frame)
        event = emit("actor.stuck", mesh=self.name, rank=self._rank.rank, limit=limit, message=text)
        failure = MeshFailure(self.name, STUCK, text, self._rank.rank, event=event, number=self._number)
        self._proc.tell_owner(self._birth.owner, failure.noted(f"noticed in its process, {self._proc.name}"))
        return event

    def _stack_of(self, frame: Frame) -> str:
        task = next((task for task, each in self._tasks.copy().items() if each is frame), self._driver)
        if task is not None:
            stack = traceback.StackSummary.extract((each, each.f_lineno) for each in task.get_stack())
            return "".join(stack.format()).rstrip()
        return "".join(traceback.format_stack(sys._current_frames().get(self._thread.ident or 0))).rstrip()

    # --- one message

    def _is_work(self, frame: Frame) -> bool:
        """Whether the frame is to be run. Ends the life where it is the last one."""
        if self._aborted is not None:
            self._proc.refuse(frame, f"actor {self.name}: {self._aborted}")
            raise _Ended(self._aborted)
        if frame.kind == message.FAILURE:
            return True
        if frame.flags & message.STOP:
            self._last = frame
            raise _Ended(None)
        self._handled += 1
        self._popped[frame.address] += 1
        if self._popped[frame.address] >= CREDIT_BATCH:
            self._proc.credit(frame.address, self._number, self._popped.pop(frame.address))
        if frame.is_cancelled:
            self._proc.leave_uncollected(frame)
            self._mailbox.at_hand = None
        return not frame.is_cancelled

    def _run(self, frame: Frame) -> None:
        self._current, self._since = frame, time.monotonic()
        overdue = self._overdue.begin(frame, self._on_overdue)
        try:
            if frame.fetched is not None:
                frame.fetched.wait(None)
            if frame.is_cancelled:
                return self._proc.leave_uncollected(frame)
            value = self._invoke(frame)
            if inspect.iscoroutine(value):  # a plain method called through as_endpoint, or an async __supervise__
                value = finish_coroutine(value)
            if self._keeping is not None and self._is_counted(frame) and self._keeping.is_due():
                self.snapshot().wait_get()
            taken = self._succeeded(frame, value)
            if taken is not None:
                taken.wait(None)
        except BaseException as error:
            self._failed(frame, error)
        finally:
            self._overdue.end(overdue)
            self._current = self._mailbox.at_hand = None

    async def _run_or_start(self, frame: Frame) -> None:
        prop = self._endpoints.get(frame.method.decode())
        if prop is None or not prop.is_concurrent:
            return await self._run_async(frame)
        while len(self._tasks) >= _MOST_TASKS:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._start_task(frame)
        self._mailbox.at_hand = None

    def _start_task(self, frame: Frame) -> None:
        task = asyncio.get_running_loop().create_task(self._run_async(frame, is_driver=False))
        self._tasks[task] = frame
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        frame = self._tasks.pop(task)
        if frame.is_cancelled:  # it may never have begun
            self._proc.leave_uncollected(frame)

    async def _run_async(self, frame: Frame, is_driver: bool = True) -> None:
        if is_driver:
            self._current, self._since = frame, time.monotonic()
        overdue = self._overdue.begin(frame, self._on_overdue)
        try:
            if frame.fetched is not None and not frame.fetched.done():
                await frame.fetched.waiter(asyncio.get_running_loop())
            if frame.is_cancelled:
                return self._proc.leave_uncollected(frame)
            value = self._invoke(frame)
            if inspect.iscoroutine(value):
                value = await value
            if self._keeping is not None and self._is_counted(frame) and self._keeping.is_due():
                await self._keep()
            taken = self._succeeded(frame, value)
            if taken is not None:
                await taken
        except BaseException as error:
            if frame.is_cancelled and isinstance(error, asyncio.CancelledError):
                self._proc.leave_uncollected(frame)
            elif is_driver:
                self._failed(frame, error)
            else:
                self._failed_aside(frame, error)
        finally:
            self._overdue.end(overdue)
            if is_driver:
                self._current = self._mailbox.at_hand = None
                _uncancel(self._driver)

    def _is_counted(self, frame: Frame) -> bool:
        """Whether a snapshot may be due after it."""
        return frame.kind == message.CALL and frame.method != SNAPSHOT.encode() and self._ended is None

    async def _keep(self) -> None:
        """One after the other, so that the last one kept is the last one taken."""
        assert self._keeping is not None, "its class has the hooks"
        if self._keep_lock is None:
            self._keep_lock = asyncio.Lock()
        async with self._keep_lock:
            state = self._keeping.take(self._actor)
            await self._keeping.send(await state if inspect.iscoroutine(state) else state)

    def _invoke(self, frame: Frame) -> Any:
        """The method's value, or its coroutine."""
        running.set(Context(self, frame))
        if frame.kind == message.FAILURE:
            return tell_of_failure(self._actor, self.name, frame.load(), self.owned)
        if frame.method == SNAPSHOT.encode() and self._keeping is not None:  # a peer asks
            return self._keeping.take(self._actor)
        method = self._method(frame.method.decode())
        frame.accept = self._accept
        args, kwargs = frame.load()
        if frame.flags & message.PORT:
            port: ResponsePort[Any] = ResponsePort(self._proc, frame.address, frame.reply, frame.rank, is_first=True)
            return method(self._actor, port, *args, **kwargs)
        return method(self._actor, *args, **kwargs)

    def _method(self, name: str) -> Any:
        prop = self._endpoints.get(name)
        if prop is not None:
            return prop.method
        method = inspect.getattr_static(type(self._actor), name, None)
        if name.startswith("__") or not inspect.isfunction(method):
            raise AttributeError(f"{self.class_name} has no endpoint {name!r}")
        return method

    def _end_fork(self) -> None:
        """A fork that an endpoint made has come back from it: its parent goes on here, it must not."""
        if os.getpid() != self._proc.pid:
            os.write(2, f"a fork of actor {self.name} has returned from its endpoint; it ends\n".encode())
            os._exit(70)

    def _succeeded(self, frame: Frame, value: Any) -> Future[None] | None:
        self._end_fork()
        return None if frame.kind == message.FAILURE or frame.flags & message.PORT else self._answer(frame, value)

    def _failed(self, frame: Frame, error: BaseException) -> None:
        """Tells the caller; where nobody waits, or it is not an ordinary exception, the actor ends with it."""
        self._end_fork()
        is_told = frame.reply and frame.kind == message.CALL and not frame.flags & message.PORT
        is_end = not is_told or not isinstance(error, Exception | asyncio.CancelledError)
        if frame.reply:
            self._answer_failure(frame, error, self._refusal if is_end else 0)
        if is_end:
            raise _Ended(error) from error

    def _failed_aside(self, frame: Frame, error: BaseException) -> None:
        """The same in a task of its own: the driver finds out at once."""
        try:
            self._failed(frame, error)
        except _Ended as ended:
            self._aborted = ended.error
            self._put(message.pack(message.FAILURE, self._number))

    def _answer(self, frame: Frame, value: Any) -> Future[None] | None:
        """None, or the end of the answer's large parts being read; until then they must not change."""
        if not frame.reply:
            return None
        if isinstance(frame.collector, Reducer):
            self._proc.add_to_sum(frame, frame.collector, value)
            return None
        return self._proc.start_answer(frame, encode(value, codec=frame.codec))

    def _answer_failure(self, frame: Frame, error: BaseException, flags: int = 0) -> None:
        if frame.reply:
            outgoing = encode_failure(error, self.name, frame, frame.codec)
            try:
                taken = self._proc.start_answer(frame, outgoing, message.FAILED | flags)
            except TransferTimeout as late:  # its caller's trouble, not this actor's
                return _log.warning("actor %s: a caller does not take its answer: %s", self.name, late)
            if taken is not None:
                taken.wait(None)


def finish_coroutine(coroutine: Coroutine[Any, Any, Any] | None) -> Any:
    return asyncio.run(coroutine) if coroutine is not None else None


def _uncancel(task: Any) -> None:
    """The next message is not cancelled, whether or not this one's handler let itself be."""
    while hasattr(task, "cancelling") and task.cancelling():  # Python 3.11 counts
        task.uncancel()


def _one_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _report(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
