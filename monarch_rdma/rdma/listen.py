"""For programs without actors: one address string, copied from one process to another, is all they need.

# owner                                             # reader
listener = listen()                                 peer = connect(address)
listener.publish("weights", RDMABuffer(tensor))     peer.lookup("weights").read_into(mine).get()
print(listener.address)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from .. import config
from .._engine import lib
from ..errors import ConfigError, ProtocolError
from . import names
from .buffer import RDMABuffer
from .engine import Engine, adopt_secret, default_engine, raise_error, scratch, seconds
from .future import Future
from .secret import Secret

__all__ = ["Listener", "Peer", "connect", "listen"]

_SUFFIX = ".secret"
_IN_ADDRESS = re.compile(r"[?&]secret_file=([^&]*)")


def listen(*, secret_file: str | os.PathLike[str] | None = None, engine: Engine | None = None) -> Listener:
    """Makes buffers of this process findable by name.

    `secret_file`: of the job; None takes the configured secret. Where there is none at all, a random one is written to
    a private file, whose path becomes part of the address: then only processes of this user that see the file can
    connect.
    """
    if engine is None:
        engine = adopt_secret(Secret.from_file(secret_file)) if secret_file is not None else default_engine()
    elif secret_file is not None:
        raise ConfigError("both engine and secret_file are given, but an engine has its own secret")
    return Listener(engine)


def connect(
    address: str,
    *,
    secret_file: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    timeout: float | None = 60,
) -> Peer:
    """Connects to the listener at `address`; both sides prove that they know the secret.

    Raises PeerLost, TransferTimeout, AuthenticationError, ProtocolError (another version) or ConfigError.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address is a {type(address).__name__}, but must be a string")
    match = _IN_ADDRESS.search(address)
    if match is not None:
        address = address[: match.start()] + address[match.end() :]
        if secret_file is None:
            secret_file = _named_by_address(unquote(match[1]))
    if engine is None:
        engine = adopt_secret(Secret.from_file(secret_file)) if secret_file is not None else default_engine()
    future, error = Future(engine, "connect", address, 0, None), scratch.error
    if kind := lib.mr_connect(engine.handle, address.encode(), seconds(timeout), future.cell, error):
        raise_error(error, kind, operation="connect", peer=address)
    future.get()
    return Peer(engine, address)


def _named_by_address(path: str) -> str:
    """Whoever wrote the address gets a proof made from the file's bytes, so no file but one of ours may be named."""
    if not path.endswith(_SUFFIX):
        raise ConfigError(f"the address names the secret file {path!r}, which listen() has not made; pass secret_file=")
    return path


class Listener:
    """Publishes buffers under names. Closing takes them back; what readers looked up stays usable until dropped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._published: dict[str, Any] = {}  # keeps the buffers
        self.address = engine.address
        self._remove_secret: Any = None
        if engine.secret_is_random:
            path, lock = _write_private(engine.secret)
            self._remove_secret = weakref.finalize(self, _remove, path, lock, os.getpid())
            self.address += f"{'&' if '?' in self.address else '?'}secret_file={quote(path)}"

    def publish(self, name: str, buffers: RDMABuffer | Mapping[str, RDMABuffer]) -> None:
        """Makes a buffer, or several by their names in a mapping, findable as `name`; replaces what was there."""
        one = isinstance(buffers, RDMABuffer)
        named = {"": buffers} if isinstance(buffers, RDMABuffer) else dict(buffers)
        for key, buffer in named.items():
            if not isinstance(key, str) or not isinstance(buffer, RDMABuffer):
                raise ConfigError(
                    f"buffers[{key!r}] is a {type(buffer).__name__}, but must be an RDMABuffer under a string"
                )
        blob = json.dumps({"one": one, "buffers": {key: buffer.to_bytes().decode() for key, buffer in named.items()}})
        names.publish(self.engine, name, blob.encode())
        self._published[name] = named

    def unpublish(self, name: str) -> None:
        """Takes a name back; drops nothing. ConfigError where it is not published."""
        names.unpublish(self.engine, name)
        self._published.pop(name, None)

    def close(self) -> None:
        """Takes all names back and removes the secret's file. The engine stays open."""
        if self.engine.is_open:
            for name in list(self._published):
                self.unpublish(name)
        self._published.clear()
        if self._remove_secret is not None:
            self._remove_secret()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Peer:
    """A process that listens, connected."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine = engine
        self.address = address

    def lookup(self, name: str, *, timeout: float | None = 60) -> Any:
        """The RDMABuffer published under `name`, or a dict of them where a mapping was published.

        ConfigError where there is no such name; PeerLost, TransferTimeout, ProtocolError.
        """
        data = names.look_up(self.engine, self.address, name, timeout)
        try:
            blob = json.loads(data)
            one, named = blob["one"], blob["buffers"]
            buffers = {key: RDMABuffer.from_bytes(value.encode(), engine=self.engine) for key, value in named.items()}
            return buffers[""] if one else buffers
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"what is published as {name!r} at {self.address} is malformed: {error}") from error

    def watch(self) -> Future:
        """A future that fails with PeerLost when the process is lost. Cancel it to stop watching."""
        return self.engine.watch(self.address)


def _write_private(secret: Secret) -> tuple[str, int]:
    """Writes the secret to a new file in a private directory; its path, and the lock that says it is in use.

    Files of processes that ended without removing theirs are removed here: their locks are free.
    """
    directory = _private_directory()
    guard = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for entry in os.scandir(directory):
            if entry.name.endswith(_SUFFIX):
                _remove_if_stale(entry.path)
        path = os.path.join(directory, f"{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}")
        secret.write_file(path)
        return path, _lock(path, fcntl.LOCK_SH)
    finally:
        os.close(guard)


def _private_directory() -> str:
    path = os.path.join(config.runtime_directory(), f"monarch_rdma-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise ConfigError(
            f"directory {path!r} for secrets cannot be made: {error.strerror}; set runtime_dir"
        ) from error
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(f"{path!r} is not a directory of ours with mode 0700; remove it, or set runtime_dir")
    return path


def _lock(path: str, how: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_if_stale(path: str) -> None:
    try:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # in use, or gone
    os.unlink(path)
    os.close(lock)


def _remove(path: str, lock: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the listener's process ends
    with contextlib.suppress(FileNotFoundError):  # somebody cleaned up the whole directory
        os.unlink(path)
    os.close(lock)
