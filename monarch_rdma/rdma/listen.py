"""For programs without actors: one address string, copied from one process to another, is all they need.

# owner                                             # reader
listener = listen()                                 peer = connect(address)
listener.publish("weights", RDMABuffer(tensor))     peer.lookup("weights").read_into(mine).get()
print(listener.address)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from .._engine import lib
from ..errors import ConfigError, ProtocolError
from . import names
from .buffer import RDMABuffer
from .engine import Engine, adopt_secret, as_text, default_engine, raise_error, scratch, seconds
from .future import Future, Started
from .private_files import PrivateFile
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
    as_text(address, "address")
    match = _IN_ADDRESS.search(address)
    if match is not None:
        address = address[: match.start()] + address[match.end() :]
        if secret_file is None:
            secret_file = _named_by_address(unquote(match[1]))
    if engine is None:
        engine = adopt_secret(Secret.from_file(secret_file)) if secret_file is not None else default_engine()
    future, error = Started(engine, "connect", address, 0, None), scratch.error
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
        self._secret_file: PrivateFile | None = None
        if engine.secret_is_random:
            self._secret_file = PrivateFile(_SUFFIX, engine.secret.write_file)
            self.address += f"{'&' if '?' in self.address else '?'}secret_file={quote(self._secret_file.path)}"

    def publish(self, name: str, buffers: RDMABuffer | Mapping[str, RDMABuffer]) -> None:
        """Makes a buffer, or several by their names in a mapping, findable as `name`; replaces what was there."""
        one = isinstance(buffers, RDMABuffer)
        if not isinstance(buffers, RDMABuffer | Mapping):
            raise ConfigError(f"buffers is a {type(buffers).__name__}, but must be an RDMABuffer, or several by name")
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
        if self._secret_file is not None:
            self._secret_file.close()

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
