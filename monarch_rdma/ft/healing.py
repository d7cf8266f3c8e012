"""The state of a training, offered by those that train and read by whoever joins: one-sided, from several at a time.

offered = OfferedState({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, version=7)
send(offered.offer)                                    # a value, in any message

state = fetch_state(receive()).state                   # elsewhere: the same tree, from one or several offers

A state is a tree of dicts, lists and tuples. Its tensors are read out of the owners' memory, while these train on: from
a copy that stays as it is, or in place, for as long as that stays as it is. Everything else is pickled: offers are for
processes that trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import ConfigError, ProtocolError, VersionChanged
from ..rdma import Engine, default_engine, empty
from ..sharding import BoxLayout, LayoutError, Reader, publish
from ..sharding.deadline import Deadline
from ..sharding.dtensor import local_tensor
from ..sharding.offer import AnyLayout, Offer, sources_of
from ..sharding.state_dict import Publication
from ..sharding.units import Units
from .healing_check import BLOCK, Checksums, Verification, copied

__all__ = ["FetchedState", "OfferedState", "StateOffer", "fetch_state", "put_together", "taken_apart"]

_UNIT = 8 << 20  # bytes that are read at once
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class StateOffer:
    """A value to send to newcomers. `replica`: which of several replicas offers it; its ranks offer parts of one state.
    `structure`: the tree, with a `_Place` for each tensor, pickled.
    """

    replica: Any
    version: int
    handles: bytes  # an Offer
    structure: bytes
    checksums: Checksums | None


@dataclass(frozen=True)
class _Place:
    """Of a tensor in a state. `spec`: of the DTensor whose local tensor it is."""

    name: str
    spec: Any = None


@dataclass(frozen=True)
class FetchedState:
    """A state that was read. `verified`: of its bytes, those whose checksums were compared. `replaced`: ranks that were
    lost meanwhile, and whose part came from others.
    """

    state: Any
    version: int
    bytes: int
    verified: int
    seconds: float
    sources: tuple[Any, ...]
    replaced: tuple[int, ...]


class OfferedState:
    """What this process offers. `offer` is the value that newcomers need; `renew` makes another one."""

    def __init__(
        self,
        state: Any,
        *,
        version: int = 0,
        memory: str = "copy",
        replica: Any = 0,
        rank: int = 0,
        ranks: int = 1,
        layouts: Mapping[str, AnyLayout] | None = None,
        as_local: bool = False,
        checksums: bool = True,
        engine: Engine | None = None,
    ) -> None:
        """`memory`: "copy", a copy on the CPU that training does not touch; "in_place", where the tensors are, which
        have to stay as they are until `close`. `rank`, `ranks`: of this process in its replica. DTensors say which part
        of a tensor this is, `layouts` does for others, by their path such as "['model']['weight']"; with `as_local`
        each part is a tensor by itself, for the same rank of another replica. Others are the same on all ranks.
        `checksums`: without them readers have to ask for verify=False.

        ConfigError, RegistrationError, before anything is offered.
        """
        if memory not in ("copy", "in_place"):
            raise ConfigError(f"memory is {memory!r}, but must be copy or in_place")
        self._engine = engine or default_engine()
        self._memory, self._as_local, self._replica, self._is_summed = memory, as_local, replica, checksums
        tensors, self._structure = taken_apart(state, as_local)
        room, self._copies = _room_for(tensors, self._engine) if memory == "copy" else (None, {})
        served = {name: _as_before(tensors[name], copy) for name, copy in self._copies.items()} or tensors
        self._checksums = self._copied(tensors, {}) if memory == "in_place" else {}
        placed = {name: layout for name, layout in (layouts or {}).items() if name in tensors}
        if unknown := set(layouts or {}) - set(tensors):
            raise ConfigError(f"layouts names {sorted(unknown)}, but the state has no such tensors")
        self._publication: Publication | None = None
        if tensors:
            options: dict[str, Any] = {"rank": rank, "ranks": ranks, "layouts": placed, "engine": self._engine}
            self._publication = publish(served, "state", version=version, room=room, **options)
        self._version = version
        if memory == "copy":
            self._checksums = self._copied(tensors, self._copies)

    def _copied(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> Checksums | None:
        return copied(tensors, copies, self._engine, with_checksums=self._is_summed)

    @property
    def offer(self) -> StateOffer:
        """ConfigError where the state has no tensor: then there is nothing to read."""
        if self._publication is None:
            raise ConfigError("the state has no tensor, so there is nothing to read: send it as it is")
        handles = self._publication.offer.to_bytes()
        return StateOffer(self._replica, self._version, handles, self._structure, self._checksums)

    def renew(self, state: Any, version: int) -> bool:
        """Copies a state of the same tensors, of a later version: readers of the one before begin again, or fail. False
        where its tensors are others: make another OfferedState.

        ConfigError with memory="in_place".
        """
        if self._memory != "copy":
            raise ConfigError('renew() is for memory="copy": tensors in place are offered as they are')
        tensors, structure = taken_apart(state, self._as_local)
        if _signature(tensors) != _signature(self._copies) or self._publication is None:
            return False
        with self._publication.update(version):
            self._checksums = self._copied(tensors, self._copies)
        self._structure, self._version = structure, version
        return True

    def close(self) -> None:
        """Ends access to the tensors; returns when no reader is in them any more."""
        if self._publication is not None:
            self._publication.close()
            self._publication = None
        self._copies = {}

    def __enter__(self) -> OfferedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch_state(
    offers: StateOffer | Sequence[StateOffer],
    *,
    into: Any = None,
    layouts: Mapping[str, AnyLayout] | None = None,
    rank: int = 0,
    ranks: int = 1,
    verify: bool = True,
    timeout: float | None = 60,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> FetchedState:
    """Reads the newest version on offer, from all that offer it. Whoever is lost meanwhile is replaced by others.

    `into`: a state whose tensors are written in place, DTensors and those in `layouts` in their own layout; else new
    tensors are made, each in whole. What is no tensor comes from the first offer. `rank`, `ranks`: of this process in
    its replica. `progress`: called with the bytes read so far and those of all.

    Raises PeerLost naming what nobody has any more, TransferTimeout, VersionChanged where a newer state is offered by
    now, ConfigError where offers or `into` do not fit, ProtocolError where bytes are not those that were offered. The
    tensors of `into` are then partly written.
    """
    deadline = Deadline(timeout)
    given = [offers] if isinstance(offers, StateOffer) else list(offers)
    if not given:
        raise ConfigError("offers is empty, but somebody has to have the state")
    newest = max(offer.version for offer in given)
    given = [offer for offer in given if offer.version == newest]
    if verify and any(offer.checksums is None for offer in given):
        raise ConfigError("verify is True, but the state is offered without checksums; pass verify=False")
    engine = engine or default_engine()
    sources = _as_one_job(given, engine)
    offered = [offer for offer, _ in sources.values()]
    targets = _new_tensors(offered) if into is None else _leaves(into)
    if into is not None and set(targets) != set(offered[0].tensors):
        differ = sorted(set(targets) ^ set(offered[0].tensors))
        raise ConfigError(f"into and the state that is offered have not the same tensors: they differ in {differ[:5]}")
    local = {name: _local(tensor) for name, tensor in targets.items()}
    options: dict[str, Any] = {"layouts": layouts, "rank": rank, "ranks": ranks, "same_ranks": False}
    sums_of = BLOCK if verify else None
    options |= {"units": Units(local, _UNIT), "sums_of": sums_of, "at_once": True}
    reader = Reader(offered, targets, engine=engine, **options)
    check = Verification(local, sources, engine) if verify else None
    on_read = check.on_read if check is not None else None
    report = reader.reshard.run(version=newest, timeout=deadline.left(), progress=progress, on_read=on_read)
    verified = 0 if check is None else _verified(check, reader, newest, deadline)
    state = put_together(given[0].structure, targets)
    peers = tuple(dict.fromkeys(offer.replica for offer in given))
    return FetchedState(state, newest, report.bytes, verified, deadline.spent(), peers, report.replaced)


def _verified(check: Verification, reader: Reader, version: int, deadline: Deadline) -> int:
    """The bytes that were compared. What was renewed meanwhile is not wrong: VersionChanged; else ProtocolError."""
    wrong: ProtocolError | None = None
    try:
        verified = check.finish(reader.reshard.lost, deadline)
    except ProtocolError as error:
        wrong = error
    if set(reader.versions(deadline.left()).values()) - {version}:
        raise VersionChanged(f"version {version} was renewed before all of it was compared", operation="read")
    if wrong is not None:
        raise wrong
    return verified


def _as_one_job(offers: Sequence[StateOffer], engine: Engine) -> dict[int, tuple[Offer, Checksums]]:
    """The ranks of several replicas as ranks of one job, in which all replicas have the same. Some may be missing."""
    replicas = list(dict.fromkeys(each.replica for each in offers))
    found: dict[int, tuple[Offer, Checksums]] = {}
    for each in offers:
        offer = Offer.from_bytes(each.handles, engine=engine)
        number = replicas.index(each.replica) + len(replicas) * offer.rank
        if number in found:
            raise ConfigError(f"offers has two of replica {each.replica!r} and rank {offer.rank}")
        found[number] = offer, each.checksums or {}
    layouts = _layouts_of(found)
    for number, (offer, sums) in found.items():
        tensors = {
            name: tensor if tensor.layout is layouts.get(name) else replace(tensor, layout=layouts.get(name))
            for name, tensor in offer.tensors.items()
        }
        found[number] = replace(offer, rank=number, ranks=1 + max(found), tensors=tensors), sums
    return found


def _layouts_of(offers: Mapping[int, tuple[Offer, Checksums]]) -> dict[str, BoxLayout]:
    """Of the tensors that are in parts: which part each of these ranks has. ConfigError where some is missing."""
    layouts: dict[str, BoxLayout] = {}
    first, _ = next(iter(offers.values()))
    for name, tensor in first.tensors.items():
        if tensor.layout is None:
            continue
        parts = {}
        for number, (offer, _) in offers.items():
            layout = offer.tensors[name].layout if name in offer.tensors else None
            if layout is None:
                raise ConfigError(f"{name} is in parts in one offer, but not in that of rank {offer.rank}")
            parts[number] = layout.part(offer.rank).boxes
        try:
            layouts[name] = BoxLayout(tensor.shape, parts)
        except LayoutError as error:
            raise ConfigError(f"offers do not have all of {name}: {error}") from error
    return layouts


# --- states as trees


def _leaves(state: Any) -> dict[str, Tensor]:
    """Its tensors by their path."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {_name_of(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}


def _name_of(path: Any) -> str:
    return pytree.keystr(path) or "state"


def taken_apart(state: Any, as_local: bool) -> tuple[dict[str, Tensor], bytes]:
    """Tensors by their path, and the tree with places in their stead, pickled."""
    leaves, spec = pytree.tree_flatten_with_path(state)
    tensors: dict[str, Tensor] = {}
    places: list[Any] = []
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            places.append(leaf)
            continue
        name = _name_of(path)
        is_part = as_local and isinstance(leaf, DTensor)
        tensors[name] = local_tensor(leaf).detach() if is_part else leaf.detach()
        places.append(_Place(name, _spec(leaf) if is_part else None))
    return tensors, pickle.dumps(pytree.tree_unflatten(places, spec))


def put_together(structure: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        tensor = tensors[leaf.name]
        return tensor if leaf.spec is None else _dtensor(tensor, leaf.spec)

    return pytree.tree_map(tensor_of, pickle.loads(structure), is_leaf=lambda leaf: isinstance(leaf, _Place))


def _new_tensors(offers: Sequence[Offer]) -> dict[str, Tensor]:
    specs = sources_of(offers)
    return {name: torch.empty(spec.layout.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}


def _signature(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(_local(tensor).shape), tensor.dtype) for name, tensor in tensors.items()}


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()  # in this order: detached, one of a foreign mesh is empty


def _room_for(tensors: Mapping[str, Tensor], engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
    """One piece of memory that readers can map, and in it a place for each tensor's local part."""
    places: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        places[name] = end
        end += -(-_local(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT
    room: Tensor = empty(end, dtype=torch.uint8, engine=engine)
    return room, {
        name: room[at : at + _local(tensors[name]).nbytes].view(tensors[name].dtype).view(_local(tensors[name]).shape)
        for name, at in places.items()
    }


def _as_before(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy, with the layout that the tensor has."""
    return _dtensor(copy, _spec(tensor)) if isinstance(tensor, DTensor) else copy


def _spec(tensor: Any) -> Any:
    return tensor._spec


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    make: Any = DTensor
    tensor: Tensor = make(local, spec, requires_grad=False)
    return tensor
