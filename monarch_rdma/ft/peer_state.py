"""State that peers read while this one trains on: a copy, renewed after each round, read one-sided by who joins.

Offers are found at the engine of who makes them, by its address alone. So is how far it is since then.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import ConfigError, PeerLost, RdmaError, TransferTimeout, VersionChanged
from ..rdma import Engine, RDMABuffer, empty
from ..rdma.names import look_up, publish, unpublish
from ..sharding import Reader
from ..sharding import publish as offer_tensors
from ..sharding.offer import Offer

__all__ = ["Fetched", "PeerState", "fetch_state", "progress_of"]

_NAME = "ft/state"
_PROGRESS = "ft/progress"
_SPARE = 64 << 10  # bytes: by how much what is no tensor may grow
_LOOK = 2.0  # seconds that a peer may take to say what it offers
_PAUSE = 0.01


class Fetched(NamedTuple):
    """`version`: of the state. `peers`: how many it was read from."""

    state: dict[str, Any]
    version: int
    bytes: int
    peers: int
    seconds: float


class _NothingYet(PeerLost):
    """They are there, but have no state that counts."""


class PeerState:
    """What this trainer offers. The tensors of its state are the same, of the same shapes, at all times."""

    def __init__(self, state: dict[str, Any], version: int, *, replica: int, replicas: int, engine: Engine) -> None:
        self._engine = engine
        self._held = {
            key: empty(tuple(tensor.shape), dtype=tensor.dtype, engine=engine).copy_(tensor)
            for key, tensor in _packed(state).items()
        }
        self._publication = offer_tensors(
            self._held, _NAME, version=version, rank=replica, ranks=max(replicas, replica + 1), engine=engine
        )
        publish(engine, _NAME, self._publication.offer.to_bytes())
        self._progress = empty((2,), dtype=torch.int64, engine=engine).copy_(torch.tensor([version, 0]))
        self._buffer = RDMABuffer(self._progress, access="read", engine=engine)
        publish(engine, _PROGRESS, self._buffer.to_bytes())

    def set_progress(self, steps: int) -> None:
        """Since the state that is offered."""
        self._progress[1] = steps

    def renew(self, state: dict[str, Any], version: int) -> None:
        """A later version. Readers wait meanwhile, and begin again. ConfigError where the tensors are other ones."""
        spare = self._held[_REST].numel()
        fresh = _packed(state, spare)
        if {key: tensor.shape for key, tensor in fresh.items()} != {key: t.shape for key, t in self._held.items()}:
            raise ConfigError("state has other tensors, or of other shapes, than when it was first offered")
        with self._publication.update(version):
            for key, held in self._held.items():
                held.copy_(fresh[key])
        self._progress.copy_(torch.tensor([version, 0]))

    def close(self) -> None:
        for name in (_NAME, _PROGRESS):
            unpublish(self._engine, name)
        self._publication.close()
        self._buffer.drop().get()


def fetch_state(
    like: dict[str, Any], peers: Sequence[str], engine: Engine, *, at_least: int, waits: bool = False, timeout: float
) -> Fetched:
    """The newest state that the engines at these addresses offer, from all that have it, a part from each.

    `like`: a state of the same structure. Raises PeerLost where none of them offers this version or a later one, unless
    `waits` for it; TransferTimeout.
    """
    begin, problem = time.monotonic(), "no peer is known"
    offers = []
    for address in peers:
        try:
            offers.append(Offer.from_bytes(look_up(engine, address, _NAME, _LOOK), engine=engine))
        except (ConfigError, RdmaError) as error:  # it offers nothing yet, or is gone
            problem = str(error)
    while offers:
        try:
            return _fetched(like, offers, engine, at_least, begin, timeout)
        except _NothingYet as error:
            problem = str(error)
            if not waits:
                raise
        except (PeerLost, VersionChanged) as error:
            problem = str(error)
            offers = [offer for offer in offers if offer.rank in _versions([offer], engine)]
        if time.monotonic() - begin > timeout:
            raise TransferTimeout(f"the state of no peer could be read in {timeout:g} s: {problem}", operation="heal")
        time.sleep(_PAUSE)
    raise PeerLost(f"none of {len(peers)} peers offers its state: {problem}", operation="heal")


def progress_of(peers: Sequence[str], engine: Engine, version: int) -> int:
    """How many steps the furthest of these engines' trainers has done since the state of that version; -1 where one of
    them has a later state already.
    """
    furthest = 0
    for address in peers:
        try:
            buffer = RDMABuffer.from_bytes(look_up(engine, address, _PROGRESS, _LOOK), engine=engine)
            found = torch.empty(2, dtype=torch.int64)
            buffer.read_into(found, timeout=_LOOK).get()
        except (ConfigError, RdmaError):  # it is gone, or has none: it is no measure
            continue
        if found[0] > version:
            return -1
        if found[0] == version:
            furthest = max(furthest, int(found[1]))
    return furthest


def _fetched(
    like: dict[str, Any], offers: Sequence[Offer], engine: Engine, at_least: int, begin: float, timeout: float
) -> Fetched:
    versions = _versions(offers, engine)
    known = [version for version in versions.values() if version is not None]
    if not known:
        raise VersionChanged("all peers are writing a new state", operation="heal")
    if max(known) < at_least and len(known) == len(versions):
        raise _NothingYet(f"none of {len(offers)} peers has version {at_least} or a later one", operation="heal")
    newest = [offer for offer in offers if versions.get(offer.rank) == max(known)]
    into = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in _packed(like, 0).items()}
    into[_REST] = torch.empty(newest[0].tensors[_REST].shape, dtype=torch.uint8)
    reader = _reader(newest, into, engine)
    report = reader.fetch(version=max(known), timeout=timeout)
    seconds = time.monotonic() - begin
    return Fetched(_unpacked(like, into), max(known), report.bytes, len(newest), seconds)


def _reader(offers: Sequence[Offer], into: dict[str, torch.Tensor], engine: Engine) -> Reader:
    return Reader(list(offers), into, rank=0, ranks=1, same_ranks=False, engine=engine)


def _versions(offers: Sequence[Offer], engine: Engine) -> dict[int, int | None]:
    """Of each rank; those that are lost are not in it."""
    rest = {_REST: torch.empty(offers[0].tensors[_REST].shape, dtype=torch.uint8)}
    only = [dataclasses.replace(offer, tensors={_REST: offer.tensors[_REST]}) for offer in offers]
    return _reader(only, rest, engine).versions(_LOOK)


# --- states as named tensors

_REST = "rest"  # what is no tensor, pickled, its length first


def _packed(state: dict[str, Any], spare: int | None = None) -> dict[str, torch.Tensor]:
    """`spare`: size in bytes of what is no tensor, or None for what it needs now and some more."""
    leaves = pytree.tree_leaves(state)
    tensors = {str(i): _local(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    rest = pickle.dumps([None if str(i) in tensors else leaf for i, leaf in enumerate(leaves)])
    data = len(rest).to_bytes(8, "little") + rest
    size = len(data) + _SPARE if spare is None else max(spare, len(data))
    tensors[_REST] = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return tensors


def _unpacked(like: dict[str, Any], packed: dict[str, torch.Tensor]) -> dict[str, Any]:
    leaves, structure = pytree.tree_flatten(like)
    data = packed[_REST].numpy().tobytes()
    rest = pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if len(rest) != len(leaves):
        raise ConfigError(f"the state of a peer has {len(rest)} parts, this one {len(leaves)}")
    found = [_as(leaf, packed[str(i)]) if str(i) in packed else rest[i] for i, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(found, structure)  # type: ignore[no-any-return]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous()


def _as(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """As `like` is: on its device, and a DTensor where that is one."""
    local = local.to(like.device)
    if not isinstance(like, DTensor):
        return local
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
