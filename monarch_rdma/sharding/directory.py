"""Where readers find the offers of a name: a torch.distributed Store, a NameServer, or the ranks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from ..errors import ConfigError, TransferTimeout
from ..rdma import Engine, default_engine, names
from .deadline import Deadline, store_wait
from .name_server import NameDirectory

__all__ = ["Addresses", "Directory", "StoreDirectory", "directory_of"]

_PREFIX = "monarch_rdma/weights/"


class Directory(Protocol):
    """Keeps the offer of each rank of a name."""

    def put(self, name: str, rank: int, ranks: int, offer: bytes) -> None:
        """Replaces what this rank has offered before. `ranks`: how many offer this name."""
        ...

    def get(self, name: str, timeout: float | None) -> list[bytes]:
        """The offers of all ranks. TransferTimeout where some have not been made in time."""
        ...


class StoreDirectory:
    """In a torch.distributed Store: that of the job, or one that several jobs share."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, rank: int, ranks: int, offer: bytes) -> None:
        """As Directory.put."""
        self._store.set(f"{_PREFIX}{name}/{rank}", offer)
        self._store.set(f"{_PREFIX}{name}/ranks", str(ranks))

    def get(self, name: str, timeout: float | None) -> list[bytes]:
        """As Directory.get."""
        deadline = Deadline(timeout)
        ranks = int(self._wait(f"{_PREFIX}{name}/ranks", deadline, name))
        return [self._wait(f"{_PREFIX}{name}/{rank}", deadline, name) for rank in range(ranks)]

    def _wait(self, key: str, deadline: Deadline, name: str) -> bytes:
        if not store_wait(self._store, key, deadline.left()):
            raise TransferTimeout(f"nobody has offered {name!r} in time ({key} is not set)", operation="fetch")
        value: bytes = self._store.get(key)
        return value


class Addresses:
    """At the engines of those who offer: rank r's offers are looked up at addresses[r]. For jobs that share a secret.

    A publishing rank needs no addresses; its own is `Addresses.own()`.
    """

    is_shared = False  # what one process puts there another does not find

    def __init__(self, addresses: Sequence[str] = (), *, engine: Engine | None = None) -> None:
        self._addresses = list(addresses)
        self._engine = engine

    def own(self) -> str:
        """The address that readers have to know of this process."""
        return (self._engine or default_engine()).address

    def put(self, name: str, rank: int, ranks: int, offer: bytes) -> None:
        """As Directory.put."""
        names.publish(self._engine or default_engine(), _PREFIX + name, offer)

    def get(self, name: str, timeout: float | None) -> list[bytes]:
        """As Directory.get. PeerLost where one of the processes is not there any more."""
        if not self._addresses:
            raise ConfigError("addresses is empty, but a reader has to know those of all ranks that offer")
        deadline = Deadline(timeout)
        return [self._look_up(address, name, deadline) for address in self._addresses]

    def _look_up(self, address: str, name: str, deadline: Deadline) -> bytes:
        while True:
            try:
                return names.look_up(self._engine or default_engine(), address, _PREFIX + name, deadline.left())
            except (ConfigError, TransferTimeout) as error:
                if deadline.is_over():
                    raise TransferTimeout(f"{address} has not offered {name!r} in time", operation="fetch") from error
            deadline.pause()


def directory_of(given: Any) -> Directory:
    """A Store is wrapped, "torch" is that of torch.distributed, another string the address of a NameServer; anything
    with `put` and `get` is one already.

    ConfigError for anything else, and for "torch" before init_process_group.
    """
    if given == "torch":
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                'directory is "torch", but torch.distributed is not in use: call init_process_group first'
            )
        return StoreDirectory(dist.distributed_c10d._get_default_store())
    if isinstance(given, str):
        return NameDirectory(given)
    if hasattr(given, "put") and hasattr(given, "get"):
        directory: Directory = given
        return directory
    if hasattr(given, "set") and hasattr(given, "wait"):
        return StoreDirectory(given)
    raise ConfigError(
        f"directory is a {type(given).__name__}, but must be a torch.distributed Store, "
        "the address of a NameServer, or a Directory"
    )
