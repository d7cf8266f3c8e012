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
    """What this trainer offers."""

    def __init__(self, state: dict[str, Any], version: int, *, replica: int, replicas: int, engine: Engine) -> None:
        self._engine = engine
        self._rank, self._ranks = replica, max(replicas, replica + 1)
        self._offer(_packed(state), version)
        self._progress = empty((2,), dtype=torch.int64, engine=engine).copy_(torch.tensor([version, 0]))
        self._buffer = RDMABuffer(self._progress, access="read", engine=engine)
        publish(engine, _PROGRESS, self._buffer.to_bytes())

    def _offer(self, packed: dict[str, torch.Tensor], version: int) -> None:
        self._held = {
            key: empty(tuple(tensor.shape), dtype=tensor.dtype, engine=self._engine).copy_(tensor)
            for key, tensor in packed.items()
        }
        self._publication = offer_tensors(
            self._held, _NAME, version=version, rank=self._rank, ranks=self._ranks, engine=self._engine
        )
        publish(self._engine, _NAME, self._publication.offer.to_bytes())

    def set_progress(self, steps: int) -> None:
        """Since the state that is offered."""
        self._progress[1] = steps

    def renew(self, state: dict[str, Any], version: int) -> None:
        """A later version. Readers wait meanwhile, and begin again."""
        fresh = _packed(state, self._held[_REST].numel())
        if _shapes(fresh) == _shapes(self._held):
            with self._publication.update(version):
                for key, held in self._held.items():
                    held.copy_(fresh[key])
        else:  # optimisers make some of their state at their first step
            old = self._publication
            self._offer(_packed(state), version)
            old.close()
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

    `like`: this one's, for the devices and layouts of its tensors. Raises PeerLost where none of them offers this
    version or a later one, unless it `waits` for that; TransferTimeout.
    """
    begin = time.monotonic()
    while True:
        offers, problem = _offers(peers, engine)  # anew each time: one that changes its shape is another one
        if not offers:
            raise PeerLost(f"none of {len(peers)} peers offers its state: {problem}", operation="heal")
        try:
            return _fetched(like, offers, engine, at_least, begin, timeout)
        except _NothingYet as error:
            problem = str(error)
            if not waits:
                raise
        except (PeerLost, VersionChanged) as error:
            problem = str(error)
        if time.monotonic() - begin > timeout:
            raise TransferTimeout(f"the state of no peer could be read in {timeout:g} s: {problem}", operation="heal")
        time.sleep(_PAUSE)


def _offers(peers: Sequence[str], engine: Engine) -> tuple[list[Offer], str]:
    """Of those that are there, and what the last of the others failed with."""
    offers, problem = [], "there are no others"
    for address in peers:
        try:
            offers.append(Offer.from_bytes(look_up(engine, address, _NAME, _LOOK), engine=engine))
        except (ConfigError, RdmaError) as error:  # it offers nothing yet, or is gone
            problem = str(error)
    return offers, problem


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
    reader = _reader(newest, engine)
    report = reader.fetch(version=max(known), timeout=timeout)
    seconds = time.monotonic() - begin
    return Fetched(_unpacked(like, reader.tensors), max(known), report.bytes, len(newest), seconds)


def _reader(offers: Sequence[Offer], engine: Engine) -> Reader:
    return Reader(list(offers), rank=0, ranks=1, same_ranks=False, engine=engine)


def _versions(offers: Sequence[Offer], engine: Engine) -> dict[int, int | None]:
    """Of each rank; those that are lost are not in it."""
    found: dict[int, int | None] = {}
    for offer in offers:
        only = dataclasses.replace(offer, tensors={_REST: offer.tensors[_REST]})
        found |= _reader([only], engine).versions(_LOOK)
    return found


# --- states as named tensors

_REST = "rest"  # all but the tensors, pickled, its length first


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a tensor was."""

    key: str


def _packed(state: dict[str, Any], size: int = 0) -> dict[str, torch.Tensor]:
    """`size`: in bytes, of what is no tensor, where that is enough; or else what it needs now, and some more."""
    tensors: dict[str, torch.Tensor] = {}

    def pack(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = pytree.keystr(path)
        tensors[key] = _local(leaf)
        return _Slot(key)

    rest = pickle.dumps(pytree.tree_map_with_path(pack, state))
    data = len(rest).to_bytes(8, "little") + rest
    room = size if len(data) <= size else len(data) + _SPARE
    tensors[_REST] = torch.frombuffer(bytearray(data.ljust(room, b"\0")), dtype=torch.uint8)
    return tensors


def _shapes(packed: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (tensor.dtype, tensor.shape) for key, tensor in packed.items()}


def _unpacked(like: dict[str, Any], packed: dict[str, torch.Tensor]) -> dict[str, Any]:
    data = packed[_REST].numpy().tobytes()
    rest = pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    here = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(like)[0]}

    def unpack(leaf: Any) -> Any:
        return _as(here.get(leaf.key), packed[leaf.key]) if isinstance(leaf, _Slot) else leaf

    return pytree.tree_map(unpack, rest)  # type: ignore[no-any-return]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous()


def _as(like: Any, local: torch.Tensor) -> torch.Tensor:
    """On the device of what is in its place here, and a DTensor where that is one."""
    if not isinstance(like, torch.Tensor):
        return local
    local = local.to(like.device)
    if not isinstance(like, DTensor):
        return local
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
