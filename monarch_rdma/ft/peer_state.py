"""Where newcomers find the state that this trainer offers, and how far it is since then: at its engine, by its address.

The state itself is a copy, renewed after each round and read one-sided, with checksums, from several peers at once:
healing.py. Each rank of a replica reads from the same rank of others: of a tensor in parts the part that it has itself.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import ConfigError, PeerLost, ProtocolError, RdmaError, TransferTimeout, VersionChanged
from ..rdma import Engine, RDMABuffer, empty
from ..rdma.names import look_up, publish, unpublish
from .healing import FetchedState, OfferedState, StateOffer, fetch_state

__all__ = ["PeerState", "progress_of", "state_of_peers"]

_NAME, _PROGRESS = "ft/state", "ft/progress"
_LOOK = 2.0  # seconds that a peer may take to say what it offers
_PAUSE = 0.01


class PeerState:
    """What this trainer offers to those of its rank in other replicas."""

    def __init__(self, state: dict[str, Any], version: int, *, replica: int, engine: Engine) -> None:
        self._engine, self._replica = engine, replica
        self._offered = self._made(state, version)
        self._progress = empty((2,), dtype=torch.int64, engine=engine)
        self._buffer = RDMABuffer(self._progress, access="read", engine=engine)
        self._announce(version)
        publish(engine, _PROGRESS, self._buffer.to_bytes())

    def renew(self, state: dict[str, Any], version: int) -> None:
        """A later version. Who is reading the one before begins again."""
        old = None
        if not self._offered.renew(_as_parts(state), version):  # optimisers make some of it at their first step
            old, self._offered = self._offered, self._made(state, version)
        self._announce(version)
        if old is not None:
            old.close()

    def set_progress(self, steps: int) -> None:
        """Since the state that is offered."""
        self._progress[1] = steps

    def close(self) -> None:
        for name in (_NAME, _PROGRESS):
            unpublish(self._engine, name)
        self._offered.close()
        self._buffer.drop().get()

    def _made(self, state: dict[str, Any], version: int) -> OfferedState:
        return OfferedState(_as_parts(state), version=version, replica=self._replica, engine=self._engine)

    def _announce(self, version: int) -> None:
        publish(self._engine, _NAME, pickle.dumps(self._offered.offer))
        self._progress.copy_(torch.tensor([version, 0]))


def state_of_peers(
    like: Any, peers: Sequence[str], engine: Engine, *, at_least: int, waits: bool = False, timeout: float
) -> FetchedState:
    """The newest state that the engines at these addresses offer, from all that have it, a part from each.

    `like`: this one's, for the devices and meshes of its tensors. Raises PeerLost where none of them offers this
    version or a later one, unless it `waits` for that; TransferTimeout; ProtocolError where what comes is from nobody
    what was offered.
    """
    deadline = time.monotonic() + timeout
    while True:
        offers, problem = _offers(peers, engine)  # anew each time: one that changes its shape is another one
        if not offers:
            raise PeerLost(f"none of {len(peers)} peers offers its state: {problem}", operation="heal")
        newest = max(offer.version for offer in offers)
        if newest >= at_least:
            try:
                offered = [offer for offer in offers if offer.version == newest]
                fetched = _fetched(offered, engine, max(_PAUSE, deadline - time.monotonic()))
                return replace(fetched, state=_as_mine(fetched.state, like))
            except (PeerLost, VersionChanged) as error:  # it is gone, or has renewed its state meanwhile
                problem = str(error)
        else:
            problem = f"the newest state of {len(offers)} peers has version {newest}, not {at_least} or a later one"
            if not waits:
                raise PeerLost(problem, operation="heal")
        if time.monotonic() > deadline:
            raise TransferTimeout(f"the state of no peer could be read in {timeout:g} s: {problem}", operation="heal")
        time.sleep(_PAUSE)


def _fetched(offers: Sequence[StateOffer], engine: Engine, timeout: float) -> FetchedState:
    """From all of them, or from one whose bytes are those that it has offered."""
    wrong: ProtocolError | None = None
    for some in dict.fromkeys([tuple(range(len(offers))), *((number,) for number in range(len(offers)))]):
        try:
            return fetch_state([offers[number] for number in some], timeout=timeout, engine=engine)
        except ProtocolError as error:
            wrong = error
    assert wrong is not None
    raise wrong


def _offers(peers: Sequence[str], engine: Engine) -> tuple[list[StateOffer], str]:
    """Of those that are there, and what the last of the others failed with."""
    offers, problem = [], "there are no others"
    for address in peers:
        try:
            offers.append(pickle.loads(look_up(engine, address, _NAME, _LOOK)))
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


# --- parts of tensors


def _as_parts(state: Any) -> Any:
    """The tree with this rank's part in the place of each DTensor."""
    return pytree.tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, state)


def _as_mine(state: Any, like: Any) -> Any:
    """Each tensor on the device of what is in its place in `like`, and a DTensor where that is one."""
    mine = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(like)[0]}
    return pytree.tree_map_with_path(lambda path, leaf: _as(mine.get(pytree.keystr(path)), leaf), state)


def _as(like: Any, leaf: Any) -> Any:
    if not isinstance(like, torch.Tensor) or not isinstance(leaf, torch.Tensor):
        return leaf
    local = leaf.to(like.device)
    if not isinstance(like, DTensor):
        return local
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
