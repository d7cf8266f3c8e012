"""The engine: this process's end of every connection, and the memory that others may reach through it.

A process has one default engine, made when it is first needed. More may be made, each with a name, an address and
options of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import config
from .._engine import ffi, lib
from ..errors import ConfigError, class_of_kind
from .living import living
from .private_files import socket_directory
from .secret import Secret, configured_secret

if TYPE_CHECKING:
    from .future import Future
    from .region import Region

__all__ = ["NEVER", "Engine", "as_text", "default_engine", "open_engines", "raise_error", "scratch", "seconds"]

_OPEN, _CLOSED, _FORKED = "open", "closed", "forked"
NO_DEADLINE = -1.0
NEVER = 1e9  # seconds from which on a timeout is none
_NUMBERS = (int, float)


class _Scratch(threading.local):
    """Where the core describes failures, one a thread: making one for each call would cost as much as the call."""

    def __init__(self) -> None:
        self.error = ffi.new("mr_error *")


scratch = _Scratch()


def raise_error(error: Any, kind: int, **facts: Any) -> None:
    """Raises what an mr_error says."""
    message = ffi.string(error.message).decode("utf-8", "replace")
    raise class_of_kind(kind)(message, sys_errno=error.sys_errno, **facts)


def seconds(timeout: float | None, argument: str = "timeout") -> float:
    """A timeout as the core takes it. None means no deadline; ConfigError for negative numbers, NaN and non-numbers."""
    if timeout.__class__ in _NUMBERS and 0 <= timeout < NEVER:
        return timeout
    if timeout is None:
        return NO_DEADLINE
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ConfigError(
            f"{argument} is {timeout!r}, but must be a number of seconds from 0 on, or None for no deadline"
        )
    return float(timeout) if timeout < NEVER else NO_DEADLINE


def as_text(value: object, argument: str) -> bytes:
    """A string as the core takes it; ConfigError for anything else, and for characters that it cannot be told."""
    if not config.is_plain(value):
        raise ConfigError(f"{argument} is {value!r:.200}, but must be a string without NUL or lone surrogates")
    return str(value).encode()


# Something of the core that nobody waits for: whether it is over, how to free it, its handle, what it holds until then.
Orphan = tuple[Callable[[Any], int], Callable[[Any], None], Any, Any]


class Engine:
    """One engine of the C++ core.

    Usable as a context manager. Closed at the end of the program at the latest, with operations in flight if need be:
    these end with `Cancelled`.
    """

    def __init__(self, *, secret: Secret | None = None, **options: Any) -> None:
        """`secret`: the job's; None takes the configured one (see `monarch_rdma.config`), else this process's own
        random one, with which only processes forked from this one can join. `options`: as in `monarch_rdma.config`.

        Raises ConfigError, RegistrationError or ResourceExhausted.
        """
        self._state = _CLOSED
        settings = config.engine_options(**options)
        if secret is not None and not isinstance(secret, Secret):
            raise ConfigError(f"secret is a {type(secret).__name__}, but must be a Secret")
        given = secret or configured_secret()
        self.secret = given or _own_secret()
        self.secret_is_random = given is None  # then only we and our forks know it
        self.options = settings
        raw = ffi.new("mr_options *")
        lib.mr_options_default(raw)
        kept = []  # cffi does not keep what a field points to
        directory = socket_directory(str(settings["unix_socket_dir"]))
        for name, value in {**settings, "unix_socket_dir": directory}.items():
            if isinstance(value, str):
                kept.append(value := ffi.new("char[]", value.encode()))
            setattr(raw, name, value)
        kept.append(data := ffi.from_buffer(self.secret.reveal()))
        raw.secret, raw.secret_len = data, len(data)
        out, error = ffi.new("mr_engine **"), ffi.new("mr_error *")
        kind = lib.mr_engine_create(raw, out, error)
        if kind and directory and not settings["unix_socket_dir"]:
            raw.unix_socket_dir = ffi.NULL  # nobody asked for it, and it may be full or read-only
            kind = lib.mr_engine_create(raw, out, error)
        if kind:
            raise_error(error, kind, operation="create")
        self._handle = out[0]
        self._lock = threading.Lock()
        self.regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # all, by id
        self.reachable: dict[int, Region] = {}  # regions whose handle went out: they live until they are dropped
        self.orphans: deque[Orphan] = deque()
        self._sweeping = threading.Lock()
        self.queues: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # event loop -> Completions
        self.queues_lock = threading.Lock()
        self.peers: dict[str | bytes, Any] = {}  # by address, those that messages were sent to; see messages.py
        self.shared_blocks: dict[int, int] = {}  # size by address, of memory from shared.py
        self.anchor: Any = None  # what keeps that memory when we are closed
        self.warned_of_tcp = False
        self._next_sweep = 0.0
        self._state = _OPEN
        self.is_open = True  # the same, quick to look up
        self.address: str = ffi.string(lib.mr_engine_address(self._handle)).decode()
        self.name: str = ffi.string(lib.mr_engine_name(self._handle)).decode()
        _engines[id(self)] = self

    is_open = False

    @property
    def handle(self) -> Any:
        """The core's engine; ConfigError where it cannot be used any more."""
        if not self.is_open:
            self.raise_unusable()
        return self._handle

    def raise_unusable(self) -> None:
        if self._state == _FORKED:
            raise ConfigError(
                f"engine {self.name} belongs to the parent of this process ({os.getpid()}): after a fork, "
                "create a new engine; default_engine() makes it"
            )
        raise ConfigError("the engine is closed")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that the engine belongs to."""
        return self._state == _FORKED

    @property
    def incarnation(self) -> int:
        """A number that tells this engine from every other one, also from a later one at the same address."""
        return int(lib.mr_engine_incarnation(self.handle))

    def close(self) -> None:
        """Ends every pending operation with `Cancelled`, says goodbye to peers, and ends access to all regions.

        Does nothing where it is closed already, or belongs to the parent process.
        """
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            self._state = _CLOSED
        lib.mr_engine_close(self._handle)
        self.reachable.clear()
        self.anchor = None
        self.sweep()

    def counters(self) -> dict[str, Any]:
        """What this engine did since it was created: operations by lane, bytes, retries, peers, regions, wake-ups."""
        self.sweep()
        return dict(json.loads(_text(lambda out, size: lib.mr_engine_counters(self.handle, out, size))))

    def watch(self, address: str) -> Future:
        """A future that fails with `PeerLost` when the engine at `address` is lost. Cancel it to stop watching."""
        from .future import Started

        future, error = Started(self, "watch", address, 0, None), scratch.error
        if kind := lib.mr_watch(self.handle, as_text(address, "address"), future.cell, error):
            raise_error(error, kind, operation="watch")
        return future

    def sweep(self) -> None:
        """Lets go of what ended unattended: operations nobody waits for, and regions that peers dropped."""
        if self.is_forked or not self._sweeping.acquire(blocking=False):
            return  # another thread does it
        try:
            for _ in range(len(self.orphans)):
                is_over, release, handle, _held = self.orphans[0]
                if self.is_open and not is_over(handle):
                    self.orphans.rotate(-1)
                else:
                    self.orphans.popleft()
                    release(handle)
        finally:
            self._sweeping.release()
        for region in list(self.reachable.values()):
            if region.is_dropped:
                self.reachable.pop(region.id, None)

    def region_within(self, address: int, size: int) -> Region | None:
        """A region of ours that peers may still be in, and that has bytes in this range."""
        for region in living(self.regions):
            start, end = region.memory.address, region.memory.address + region.memory.view.extent
            if start < address + size and address < end and not region.is_quiet:
                return region
        return None

    def sweep_sometimes(self) -> None:
        """Like sweep, but so seldom that it takes little of the time."""
        begin = time.monotonic()
        if begin >= self._next_sweep:
            self.sweep()
            end = time.monotonic()
            self._next_sweep = end + max(0.005, 20 * (end - begin))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.is_open:
            warnings.warn(f"engine {self.name} was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        return f"<Engine {getattr(self, 'name', '')} {self._state}>"

    def __reduce__(self) -> str:
        raise ConfigError("an Engine cannot be pickled; its address can be sent instead")


def _text(fill: Any) -> str:
    """The text that a function of the core writes, however long it is."""
    size = 4096
    while True:
        out = ffi.new("char[]", size)
        length = fill(out, size)
        if length < size:
            return str(ffi.string(out, length).decode())
        size = length + 1


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()  # by id()
_default: Engine | None = None
_default_lock = threading.Lock()
_checked_generation = -1
_random: Secret | None = None


def _own_secret() -> Secret:
    """This process's and its forks' secret, where the job has none."""
    global _random
    if _random is None:
        _random = Secret.generate()
    return _random


def open_engines() -> list[Engine]:
    """All of this process."""
    return [engine for engine in living(_engines) if engine.is_open]


def default_engine() -> Engine:
    """This process's engine; made at the first call, and again after a close or a fork.

    ConfigError where engine options were changed after it was made: they could not be honoured.
    """
    engine = _default
    if engine is not None and engine.is_open and _checked_generation == config.generation():
        return engine
    return _make_default(None)


def default_engine_with(secret: Secret) -> Engine | None:
    """The default engine if it has this secret or can still be made with it, else None."""
    with _default_lock:
        undecided = (_default is None or not _default.is_open) and configured_secret() is None
    engine = _make_default(secret if undecided else None)
    return engine if engine.secret == secret else None


def adopt_secret(secret: Secret) -> Engine:
    """The default engine if it has this secret or can still be made with it; else another engine, with it."""
    engine = default_engine_with(secret)
    if engine is not None:
        return engine
    with _default_lock:
        joined = _joined.get(secret)
        if joined is None or not joined.is_open:
            joined = _joined[secret] = Engine(secret=secret)
        return joined


_joined: dict[Secret, Engine] = {}  # engines made to reach other jobs


def _make_default(secret: Secret | None) -> Engine:
    global _default, _checked_generation
    with _default_lock:
        if _default is None or not _default.is_open:
            _default = Engine(secret=secret)
        else:
            check_options()
        _checked_generation = config.generation()
        return _default


def check_options() -> None:
    """ConfigError where the default engine was made with other options than those that are set now."""
    engine = _default
    if engine is None or not engine.is_open:
        return
    for name, value in config.engine_options().items():
        if value != engine.options[name]:
            raise ConfigError(
                f"option {name} is {value!r} now, but this process's engine was created with "
                f"{engine.options[name]!r}; set it earlier, or close default_engine() first"
            )


def _after_fork_in_child() -> None:
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()
    _joined.clear()
    for engine in living(_engines):
        engine.is_open = False
        engine._state = _FORKED  # closed ones too: nothing of the core may be freed here


def _close_all() -> None:
    for engine in living(_engines):
        engine.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_all)
