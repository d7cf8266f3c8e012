"""Weights published by some processes and fetched by others, each side in its own layout.

# a trainer, on each of its ranks                     # a generator, on each of its ranks
weights = publish(model, "policy", directory=store)   reader = Reader("policy", model, directory=store)
with weights.update(version=1):                       report = reader.fetch(newer_than=0)
    optimizer.step()

The first fetch plans and prepares; later ones only read. Without a directory, offers travel in any message:
`publish(model, "policy").offer`, `Reader(offers, model)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, TransferTimeout, VersionChanged
from ..rdma import Engine, RDMABuffer, default_engine, empty, share_
from ..rdma.memory import memory_of
from .deadline import Deadline
from .directory import Directory, directory_of
from .dtensor import Tensors, dtype_name, layout_of, local_tensor, named_tensors
from .layout import Layout, Mesh
from .offer import AnyLayout, Offer, OfferedTensor, sources_of
from .plan import Plan, Source, TensorSpec, Topology, Transform, make_plan
from .reshard import Report, Reshard
from .units import Units
from .version import VersionWord

__all__ = ["Publication", "Reader", "fetch", "host_of", "position", "publish", "target_layout"]

_MEMORY = ("in_place", "shared", "copy")


def publish(
    what: Tensors,
    name: str,
    *,
    version: int = 0,
    directory: Any = None,
    memory: str = "in_place",
    layouts: Mapping[str, AnyLayout] | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    room: torch.Tensor | None = None,
    engine: Engine | None = None,
) -> Publication:
    """Offers the tensors of a module or state dict to readers, from each rank that has a part of them.

    `directory`: where readers look for `name`: a torch.distributed Store, "torch" for that of the process group, the
    address of a NameServer, or a Directory; None where the offer travels otherwise. `memory`: "in_place", where the
    tensors are; "shared", the same, moved into memory that readers on this host can map (the tensors stay the same
    objects); "copy", in a copy in such memory, which `Publication.publish` renews, so that readers and training are not
    in each other's way. `layouts`: of tensors that are not DTensors; other plain tensors are the same on all ranks.
    `rank`, `ranks`: of torch.distributed where it is in use, else 0 of 1. `room`: memory that all tensors in place lie
    in, which is offered as one region: readers have less to look at.

    Raises ConfigError or RegistrationError, before anything is offered.
    """
    if memory not in _MEMORY:
        raise ConfigError(f"memory is {memory!r}, but must be one of {', '.join(_MEMORY)}")
    where = None if directory is None else directory_of(directory)
    rank, ranks = position(rank, ranks)
    given = layouts or {}
    tensors = named_tensors(what)
    if unknown := set(given) - set(tensors):
        raise ConfigError(f"layouts names {sorted(unknown)}, but these are no tensors of what is published")
    if not tensors:
        raise ConfigError(f"there are no tensors in what is to be published as {name!r}")
    for key, tensor in tensors.items():
        local = local_tensor(tensor.detach())
        memory_of(local.resolve_conj().resolve_neg() if memory == "copy" else local, repr(key), devices=True)
    places = {key: _source_layout(key, tensor, given.get(key), rank) for key, tensor in tensors.items()}
    return Publication(name, version, tensors, places, memory, rank, ranks, where, room, engine or default_engine())


class Publication:
    """What this rank offers under a name. Made by `publish`; `offer` is the value that readers need."""

    def __init__(
        self,
        name: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        layouts: Mapping[str, AnyLayout | None],
        memory: str,
        rank: int,
        ranks: int,
        directory: Directory | None,
        room: torch.Tensor | None,
        engine: Engine,
    ) -> None:
        self._sources = {key: local_tensor(tensor.detach()) for key, tensor in tensors.items()}
        self._copies: dict[str, torch.Tensor] = {}
        self._word = VersionWord(version, engine=engine)
        self._room = RDMABuffer(room, access="read", engine=engine) if room is not None and room.numel() else None
        self._buffers = [self._room] if self._room is not None else []  # to be dropped
        try:
            offered = {
                key: self._offered(key, layouts[key], tuple(tensors[key].shape), memory, engine)
                for key in self._sources
            }
            self.offer = Offer(name, rank, ranks, host_of(engine), engine.incarnation, self._word.buffer, offered)
            if directory is not None:
                directory.put(name, rank, ranks, self.offer.to_bytes())
        except BaseException:
            self.close()
            raise

    def _offered(
        self, key: str, layout: AnyLayout | None, shape: tuple[int, ...], memory: str, engine: Engine
    ) -> OfferedTensor:
        served = self._served(key, self._sources[key], memory, engine)
        buffer = self._buffer(served, engine) if served.numel() else None
        return OfferedTensor(layout, dtype_name(served.dtype), shape if layout is None else layout.shape, buffer)

    def _buffer(self, served: torch.Tensor, engine: Engine) -> RDMABuffer:
        if self._room is not None:
            return self._room.part_at(served)
        self._buffers.append(RDMABuffer(served, access="read", engine=engine))
        return self._buffers[-1]

    def _served(self, key: str, source: torch.Tensor, memory: str, engine: Engine) -> torch.Tensor:
        if memory == "copy":
            copy: torch.Tensor = empty(tuple(source.shape), dtype=source.dtype, engine=engine)
            self._copies[key] = copy.copy_(source)
            return copy
        return share_(source, engine=engine) if memory == "shared" else source

    @property
    def version(self) -> int:
        return self._word.version

    @contextlib.contextmanager
    def update(self, version: int) -> Iterator[None]:
        """While the published tensors are being changed in place; afterwards they are `version`, a later one than
        before. Readers wait meanwhile, and what they were just reading they read again.

        ConfigError for a publication with memory="copy": what readers see is changed by `publish` alone.
        """
        if self._copies:
            raise ConfigError('update() is for tensors in place; with memory="copy" call publish(version)')
        with self._word.writing(version):
            yield

    def publish(self, version: int) -> None:
        """With memory="copy": copies the tensors as they are now, as `version`. Readers wait meanwhile."""
        if not self._copies:
            raise ConfigError('publish() is for memory="copy"; tensors in place are changed within update(version)')
        with self._word.writing(version):
            for key, copy in self._copies.items():
                copy.copy_(self._sources[key])

    def close(self) -> None:
        """Ends access to the tensors; returns when no reader is in them any more. Copies are given back."""
        for future in [buffer.drop() for buffer in self._buffers]:
            future.get()
        self._word.close()
        self._buffers.clear()
        self._room = None
        self._copies.clear()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader:
    """Fetches what is published under a name into tensors of this process, again and again."""

    def __init__(
        self,
        source: str | Sequence[Offer],
        into: Tensors | None = None,
        *,
        directory: Any = None,
        keys: Iterable[str] | Callable[[str], bool] | None = None,
        cast: bool = False,
        dtype: torch.dtype | None = None,
        transforms: Mapping[str, Transform] | None = None,
        layouts: Mapping[str, AnyLayout] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        same_ranks: bool | None = None,
        timeout: float | None = 60,
        units: Units | None = None,
        sums_of: int | None = None,
        at_once: bool = False,
        engine: Engine | None = None,
    ) -> None:
        """`source`: a name in the `directory`, whose offers are waited for up to `timeout` seconds; or the offers.
        `into`: a module or state dict; None for new tensors of all that is offered, each in whole, see `tensors`.
        `keys`: which of the tensors of `into`. `cast`: values may be converted to another dtype; `dtype`: to this one,
        for new tensors. `transforms`: as in make_plan. `layouts`: of tensors of `into` that are not DTensors; others
        are wanted in whole by all readers. `rank`, `ranks`: of this reader among all readers; by default those of
        torch.distributed, or 0 of 1. `same_ranks`: whether readers and publishers are ranks of one job, so that what a
        rank has it need not read from others; by default whether this process is a publisher. `units`, `sums_of`,
        `at_once`: as for Reshard.

        ConfigError, PlanError, TransferTimeout, ProtocolError.
        """
        engine = engine or default_engine()
        offers = _offers(source, directory, timeout, engine)
        specs = sources_of(offers)
        rank, ranks = position(rank, ranks)
        self.tensors: dict[str, torch.Tensor] = _targets(into, specs, keys, dtype)
        if not self.tensors:
            raise ConfigError("there is nothing to fetch: no tensors, or keys that none of them has")
        if same_ranks is None:
            same_ranks = any(offer.incarnation == engine.incarnation for offer in offers)
        shift = 0 if same_ranks else 1 + max(int(spec.layout.ranks.max()) for spec in specs.values())
        wanted = _Wanted(layouts or {}, Mesh({"reader": ranks}), rank, shift)
        targets = {
            key: TensorSpec(wanted.layout_of(key, tensor), dtype_name(tensor.dtype))
            for key, tensor in self.tensors.items()
        }
        made = dict(transforms or {})
        if cast or dtype is not None:
            made = {key: made.get(key, Source(key)) for key in targets}
            made = {key: transform.cast() for key, transform in made.items()}
        hosts = {offer.rank: offer.host for offer in offers} | {rank + shift: host_of(engine)}
        self.plan: Plan = make_plan(specs, targets, rank + shift, transforms=made, topology=Topology.of(hosts))
        self.reshard = Reshard(
            self.plan,
            {offer.rank: _buffers(offer) for offer in offers},
            {key: local_tensor(tensor.detach()) for key, tensor in self.tensors.items()},
            layouts={key: spec.layout for key, spec in specs.items()},
            words={offer.rank: offer.word for offer in offers},
            units=units,
            sums_of=sums_of,
            at_once=at_once,
            called="into",
        )

    def fetch(
        self,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        timeout: float | None = 60,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Reads one version: this one, or one that is newer than that, or whichever there is; waits for it, and begins
        again where it is written meanwhile. `progress`: called with the bytes read so far and those of all.

        Raises VersionChanged where no version stayed long enough, or at once where `version` is past, TransferTimeout
        where there was none in time, and PeerLost naming what is lost. The tensors are then partly written.
        """
        return self.repeated(partial(self.reshard.run, progress=progress), version, newer_than, Deadline(timeout))

    def repeated(
        self, run: Callable[..., Report], version: int | None, newer_than: int | None, deadline: Deadline
    ) -> Report:
        """Calls run(timeout=, version=) when there is such a version, until it is not changed meanwhile."""
        _check_wanted(version, newer_than)
        changed: VersionChanged | None = None
        while True:
            try:
                least = version if newer_than is None else newer_than + 1
                if least is not None:
                    found = self._wait(least, deadline)
                    if version is not None and found > version:
                        break
                return run(timeout=deadline.left(), version=version)
            except VersionChanged as error:
                changed = error
            except TransferTimeout:
                if changed is None:
                    raise
                raise changed from None
            deadline.pause()
        raise VersionChanged(f"version {version} is past: the publishing ranks have {found}", operation="read")

    def versions(self, timeout: float | None = 60) -> dict[int, int | None]:
        """The version that each publishing rank has; None while it is being written. Ranks that are lost have none."""
        return self.reshard.versions(timeout)

    def wait(self, newer_than: int, timeout: float | None = 60) -> int:
        """The version that all publishing ranks have, once it is newer than that. TransferTimeout."""
        return self._wait(newer_than + 1, Deadline(timeout))

    def _wait(self, least: int, deadline: Deadline) -> int:
        """The version that all have, once it is at least that; -1 where all are lost."""
        while True:
            found = set(self.reshard.versions(deadline.left()).values())
            if not found:
                return -1  # all are lost: reading says so
            if len(found) == 1 and (version := found.pop()) is not None and version >= least:
                return version
            if deadline.is_over():
                raise TransferTimeout(f"the version that is waited for was not there in {deadline.timeout} s")
            deadline.pause()


def fetch(source: str | Sequence[Offer], into: Tensors | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Fetches once, and returns the tensors. `options`: those of Reader; and `version`, `newer_than` of its fetch."""
    which = {key: options.pop(key) for key in ("version", "newer_than") if key in options}
    reader = Reader(source, into, **options)
    reader.fetch(**which, timeout=options.get("timeout", 60))
    return reader.tensors


def position(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, or those of torch.distributed, or 0 of 1."""
    in_use = dist.is_available() and dist.is_initialized()
    rank = (dist.get_rank() if in_use else 0) if rank is None else rank
    ranks = (dist.get_world_size() if in_use else rank + 1) if ranks is None else ranks
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, but must be from 0 to {ranks - 1}, below ranks")
    return rank, ranks


def host_of(engine: Engine) -> str:
    """What tells hosts apart: the boot that an engine's address names."""
    return engine.address.partition("boot=")[2].partition("&")[0]


def _check_wanted(version: int | None, newer_than: int | None) -> None:
    for name, value in (("version", version), ("newer_than", newer_than)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name} is {value!r}, but must be a number or None")
    if version is not None and newer_than is not None:
        raise ConfigError(f"version is {version} and newer_than is {newer_than}, but one of them says what is wanted")


def _checked_part(key: str, tensor: torch.Tensor, layout: AnyLayout, rank: int) -> AnyLayout:
    local, part = tuple(local_tensor(tensor).shape), layout.part(rank)
    if local != part.shape:
        raise ConfigError(f"{key!r} has the local shape {local} on rank {rank}, but by its layout it is {part.shape}")
    return layout


def _source_layout(key: str, tensor: torch.Tensor, given: AnyLayout | None, rank: int) -> AnyLayout | None:
    if isinstance(tensor, DTensor) and given is None:
        given = layout_of(tensor)
    return None if given is None else _checked_part(key, tensor, given, rank)


def target_layout(key: str, tensor: torch.Tensor, given: AnyLayout | None, everybody: Mesh, rank: int) -> AnyLayout:
    """As given, or the DTensor's own, or a plain tensor that everybody has in whole. ConfigError unless it fits."""
    if given is None:
        given = layout_of(tensor) if isinstance(tensor, DTensor) else Layout(tuple(tensor.shape), everybody)
    return _checked_part(key, tensor, given, rank)


@dataclass
class _Wanted:
    """Layouts of the tensors of a reader, its ranks `shift` later. Plain tensors of one shape have one."""

    layouts: Mapping[str, AnyLayout]
    everybody: Mesh
    rank: int
    shift: int
    whole: dict[tuple[int, ...], AnyLayout] = field(default_factory=dict)

    def layout_of(self, key: str, tensor: torch.Tensor) -> AnyLayout:
        given, shape = self.layouts.get(key), tuple(tensor.shape)
        is_plain = given is None and not isinstance(tensor, DTensor)
        if is_plain and shape in self.whole:
            return self.whole[shape]
        layout: AnyLayout = target_layout(key, tensor, given, self.everybody, self.rank).renumbered(self.shift)
        if is_plain:
            self.whole[shape] = layout
        return layout


def _targets(
    into: Tensors | None,
    specs: Mapping[str, TensorSpec],
    keys: Iterable[str] | Callable[[str], bool] | None,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    if into is None:
        found = {
            key: torch.empty(spec.layout.shape, dtype=dtype or getattr(torch, spec.dtype))
            for key, spec in specs.items()
            if keys is None or (keys(key) if callable(keys) else key in set(keys))
        }
    else:
        found = named_tensors(into)
    if keys is None or callable(keys):
        return {key: tensor for key, tensor in found.items() if keys is None or keys(key)}
    wanted = list(keys)
    if missing := [key for key in wanted if key not in found]:
        raise ConfigError(f"keys names {missing}, but there are no such tensors")
    return {key: found[key] for key in wanted}


def _offers(source: Any, directory: Any, timeout: float | None, engine: Engine) -> list[Offer]:
    if not isinstance(source, str):
        if not isinstance(source, Sequence) or not all(isinstance(offer, Offer) for offer in source):
            raise ConfigError(f"source is {source!r:.100}, but must be a name or a list of offers")
        return list(source)
    if directory is None:
        raise ConfigError(f"source is the name {source!r}, but there is no directory to find it in")
    return [Offer.from_bytes(data, engine=engine) for data in directory_of(directory).get(source, timeout)]


def _buffers(offer: Offer) -> dict[str, RDMABuffer]:
    return {key: tensor.buffer for key, tensor in offer.tensors.items() if tensor.buffer is not None}
