"""One version from few publishers to many readers: readers that want the same pass it on to each other, in a tree.

relay = Relay("policy", model, directory=store)      # on each of many ranks
relay.fetch(version=7)

Readers whose parts are equal form a tree in the order of their ranks. Its first one reads from the publishers, the
others each from the one above them, unit by unit as these arrive there: however many readers there are, the publishers
send each different part once. Where a relay dies or stays behind, those below it read from the next one above.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..errors import AccessDenied, ConfigError, PeerLost, TransferTimeout, VersionChanged
from ..rdma import Engine, Future, RDMABuffer, default_engine, share_
from .deadline import Deadline
from .directory import Directory, directory_of
from .dtensor import Tensors, dtype_name, local_tensor, named_tensors
from .layout import Mesh
from .offer import AnyLayout, Offer, OfferedTensor
from .progress_word import MOST_UNITS, Progress, ProgressWord, RemoteProgress
from .reshard import Report
from .state_dict import Reader, host_of, position, target_layout
from .units import Units

__all__ = ["Relay", "RelayReport"]

_UNIT_BYTES = 4 << 20
_AT_ONCE = 4  # units that are read between two looks
_MEMORY = ("in_place", "shared")

_LOST = 60.0  # seconds for which a relay that is lost is not tried again

Wanted: TypeAlias = Callable[[int], bool]
Reads: TypeAlias = "list[Callable[[float | None], Future]]"


@dataclass(frozen=True)
class RelayReport:
    """What one fetch did. `source`: the rank of the relay that the version came from; None: the publishers."""

    version: int
    bytes: int
    source: int | None
    seconds: float


class Relay:
    """Fetches what is published under a name into tensors of this process, and passes it on.

    The tensors belong to the relay: others read them at any time, so nobody but it writes to them.
    """

    def __init__(
        self,
        name: str,
        into: Tensors,
        *,
        directory: Any,
        layouts: Mapping[str, AnyLayout] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        fanout: int = 2,
        patience: float = 2.0,
        unit_bytes: int = _UNIT_BYTES,
        memory: str = "in_place",
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """`name`, `into`, `directory`, `layouts`: as for a Reader; `rank`, `ranks`: of this relay among all of this
        name, which have the same layouts. `fanout`: how many read from one. `patience`: seconds after which a relay
        that does not move is passed over, where somebody above has more. `unit_bytes`: what is passed on at once.
        `memory`: "in_place", or "shared" for tensors that others on this host can map. `options`: of the Reader that
        the publishers are read with: keys, cast, transforms, timeout.

        ConfigError for arguments that are wrong, before anything is offered.
        """
        if memory not in _MEMORY:
            raise ConfigError(f"memory is {memory!r}, but must be one of {', '.join(_MEMORY)}")
        for argument, value, least in (("fanout", fanout, 1), ("unit_bytes", unit_bytes, 1), ("patience", patience, 0)):
            if not value >= least:
                raise ConfigError(f"{argument} is {value!r}, but must be {least} or more")
        self.rank, ranks = position(rank, ranks)
        self._engine = engine or default_engine()
        self._name, self._directory, self._patience = name, _with_names(directory), patience
        self.tensors = _wanted(into, options.pop("keys", None))
        everybody = Mesh({"reader": ranks})
        places = {
            key: target_layout(key, tensor, (layouts or {}).get(key), everybody, self.rank)
            for key, tensor in self.tensors.items()
        }
        self._local = {key: local_tensor(tensor.detach()) for key, tensor in self.tensors.items()}
        if memory == "shared":
            for tensor in self._local.values():
                share_(tensor, engine=self._engine)
        self._units = Units(self._local, max(unit_bytes, -(-sum(t.nbytes for t in self._local.values()) // MOST_UNITS)))
        self._make_reader: Callable[[], Reader] = lambda: Reader(
            name,
            self.tensors,
            directory=self._directory,
            layouts=layouts,
            rank=self.rank,
            ranks=ranks,
            same_ranks=False,
            units=self._units,
            engine=self._engine,
            **options,
        )
        self._reader: Reader | None = None
        above = _above(self.rank, _group(list(dict.fromkeys(places.values())), self.rank, ranks), fanout)
        self._parents = [_Parent(self, parent) for parent in above]
        self._word = ProgressWord(self._engine)
        self._buffers: dict[str, RDMABuffer] = {}
        try:
            for key, tensor in self._local.items():
                if tensor.numel():
                    self._buffers[key] = RDMABuffer(tensor, access="read", engine=self._engine)
            self._directory.put(self.name_of(self.rank), 0, 1, self._offer(ranks).to_bytes())
        except BaseException:
            self.close()
            raise

    def name_of(self, rank: int) -> str:
        """Under which the relay of a rank offers its tensors."""
        return f"{self._name}/relay/{rank}"

    def _offer(self, ranks: int) -> Offer:
        tensors = {
            key: OfferedTensor(None, dtype_name(tensor.dtype), tuple(tensor.shape), self._buffers.get(key))
            for key, tensor in self._local.items()
        }
        engine = self._engine
        return Offer(self._name, self.rank, ranks, host_of(engine), engine.incarnation, self._word.buffer, tensors)

    def close(self) -> None:
        """Ends access to the tensors; returns when nobody is in them any more."""
        for future in [buffer.drop() for buffer in self._buffers.values()]:
            future.get()
        self._word.close()
        self._buffers.clear()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- fetching

    def fetch(
        self, *, version: int | None = None, newer_than: int | None = None, timeout: float | None = 60
    ) -> RelayReport:
        """Gets one version: this one, or one that is newer than that, or whichever comes first; waits for it.

        Raises as Reader.fetch does. The tensors are then partly written, and nobody is told that they are a version.
        """
        deadline = Deadline(timeout)

        def wanted(found: int) -> bool:
            return found == version if version is not None else newer_than is None or found > newer_than

        at = 0
        while at < len(self._parents):
            try:
                return self._from_relay(at, wanted, deadline)
            except (PeerLost, AccessDenied):
                self._parents[at].lose()
                at += 1
            except _Passed as passed:
                at = passed.to
            except VersionChanged:
                deadline.pause()
        return self._from_publishers(version, newer_than, deadline)

    def _from_publishers(self, version: int | None, newer_than: int | None, deadline: Deadline) -> RelayReport:
        report = self._publishers().repeated(self._run, version, newer_than, deadline)
        assert report.version is not None
        return RelayReport(report.version, report.bytes, None, deadline.spent())

    def _publishers(self) -> Reader:
        if self._reader is None:
            self._reader = self._make_reader()
        return self._reader

    def _run(self, *, timeout: float | None, version: int | None) -> Report:
        """One attempt at one version. Units are announced as they arrive, and at the end that they are right."""
        reader = self._publishers()
        if version is None:
            found = set(reader.versions(timeout).values())
            version = found.pop() if len(found) == 1 else None
            if version is None and found != set():
                raise VersionChanged("a new version is being written", operation="read")
        self._word.begin(version or 0)
        report = reader.reshard.run(timeout=timeout, version=version, follower=_Announcing(self._word, version or 0))
        self._word.advance(self._units.count + 1)
        return report

    def _from_relay(self, at: int, wanted: Wanted, deadline: Deadline) -> RelayReport:
        """VersionChanged where the relay begins anew meanwhile, _Passed where it stays behind."""
        parent, count = self._parents[at], self._units.count
        first = now = self._awaited(at, wanted, deadline)
        self._word.begin(first.version)
        done = 0
        while True:
            upto = min(now.units, count, done + _AT_ONCE)
            parent.read(done, upto, deadline)
            seen = parent.look(deadline)
            if seen is None or seen.epoch != first.epoch:
                break
            done = upto
            if done == count and now.units > count:  # the publishers had confirmed them before they were read
                self._word.advance(count + 1)
                return RelayReport(first.version, self._units.nbytes, parent.rank, deadline.spent())
            self._word.advance(done)
            now = seen
            if now.units <= done:
                now = self._awaited(at, wanted, deadline, first.epoch, done)
                if now.epoch != first.epoch:
                    break
        raise VersionChanged(f"relay {parent.rank} has begun anew", operation="read")

    def _awaited(
        self, at: int, wanted: Wanted, deadline: Deadline, epoch: int | None = None, done: int = -1
    ) -> Progress:
        """What a parent says, once it has a wanted version; or more than so many units, or another epoch than this one.

        _Passed where that takes long, and somebody above has more.
        """
        parent, patience = self._parents[at], Deadline(self._patience)
        deadline.hurry()
        while True:
            found = parent.look(deadline)
            if found is not None:
                is_enough = wanted(found.version) if epoch is None else found.units > done or found.epoch != epoch
                if is_enough:
                    return found
            if patience.is_over():
                if (ahead := self._ahead_of(at, wanted, done, deadline)) is not None:
                    raise _Passed(ahead)
                patience = Deadline(self._patience)
            if deadline.is_over():
                raise TransferTimeout(f"relay {parent.rank} did not have the version in {deadline.timeout} s")
            deadline.pause()

    def _ahead_of(self, at: int, wanted: Wanted, done: int, deadline: Deadline) -> int | None:
        """Who of those above has more than so many units of a wanted version."""
        for higher in range(at + 1, len(self._parents)):
            try:
                found = self._parents[higher].look(deadline)
            except (PeerLost, AccessDenied):
                self._parents[higher].lose()
                continue
            if found is not None and wanted(found.version) and found.units > done:
                return higher
        versions = set(self._publishers().versions(deadline.left()).values())
        version = versions.pop() if len(versions) == 1 else None
        return len(self._parents) if version is not None and wanted(version) else None

    # --- what parents need

    def found_offer(self, rank: int) -> bytes | None:
        """What the relay of a rank offers; None where it has not yet."""
        try:
            (data,) = self._directory.get(self.name_of(rank), 0)
        except TransferTimeout:
            return None
        return data

    def opened(self, data: bytes) -> tuple[RemoteProgress, list[Reads]]:
        """An offer's progress word, and the reads of each unit. ConfigError where it has other tensors than this."""
        offer = Offer.from_bytes(data, engine=self._engine)
        have = {key: (tensor.dtype, tensor.shape) for key, tensor in offer.tensors.items()}
        want = {key: (dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in self._local.items()}
        if have != want:
            wrong = next(key for key in {**want, **have} if have.get(key) != want.get(key))
            raise ConfigError(f"{wrong!r} is {have.get(wrong)} at relay {offer.rank}, but {want.get(wrong)} here")
        reads: list[Reads] = [[] for _ in range(self._units.count)]
        for unit, key, low, high in self._units.rows():
            theirs, ours = offer.tensors[key].buffer, self._local[key]
            if theirs is None:
                raise ConfigError(f"relay {offer.rank} offers no memory for {key!r}")
            part = (theirs[low:high], ours[low:high]) if ours.ndim else (theirs, ours)
            reads[unit].append(part[0].prepare_read(part[1]))
        return RemoteProgress(offer.word), reads


class _Passed(Exception):
    """A parent is passed over, for the one of this number; the number of parents: the publishers."""

    def __init__(self, to: int) -> None:
        super().__init__(to)
        self.to = to


class _Parent:
    """A relay above: found when it is needed, forgotten when it is lost."""

    def __init__(self, relay: Relay, rank: int) -> None:
        self.rank = rank
        self._relay = relay
        self._word: RemoteProgress | None = None
        self._reads: list[Reads] = []
        self._offer = b""
        self._lost_offer, self._lost_until = b"", 0.0

    def lose(self) -> None:
        """What it has offered is left alone for a while; it may offer anew."""
        self._word, self._reads = None, []
        self._lost_offer, self._lost_until = self._offer, time.monotonic() + _LOST

    def look(self, deadline: Deadline) -> Progress | None:
        """What it says; None where it says nothing, or has not offered yet. PeerLost, AccessDenied."""
        if self._word is None and not self._open():
            return None
        assert self._word is not None
        return self._word.look(deadline.left())

    def _open(self) -> bool:
        data = self._relay.found_offer(self.rank)
        if data is None:
            return False
        if data == self._lost_offer and time.monotonic() < self._lost_until:
            raise PeerLost(f"relay {self.rank} is lost", operation="read")
        self._offer = data
        self._word, self._reads = self._relay.opened(data)
        return True

    def read(self, low: int, high: int, deadline: Deadline) -> None:
        """The units from one to another. Whatever comes of it, nothing is written any more when it returns."""
        under_way: list[Future] = []
        try:
            for reads in self._reads[low:high]:
                under_way += [start(deadline.left()) for start in reads]
        finally:
            errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


class _Announcing:
    """Tells those below what has arrived from the publishers, while it arrives in order."""

    def __init__(self, word: ProgressWord, version: int) -> None:
        self._word = word
        self._version = version
        self._waiting: deque[int] | None = None  # of each read that has not ended the first unit that it touches
        self._told = 0
        self._is_in_order = True

    def begins(self, units: list[int]) -> None:
        """As Follower.begins. What was announced is taken back, and the rest is announced when all of it is right."""
        if self._waiting is not None:
            self._is_in_order = False
            self._word.begin(self._version)
        self._waiting = deque(units)

    def ends(self, *, is_good: bool) -> None:
        """As Follower.ends: all units before the first that any other read touches are complete."""
        assert self._waiting is not None
        last = self._waiting.popleft()
        self._is_in_order &= is_good
        units = self._waiting[0] if self._waiting else last
        if self._is_in_order and units > self._told:
            self._told = units
            self._word.advance(units)


def _with_names(directory: Any) -> Directory:
    found = directory_of(directory)
    if not getattr(found, "is_shared", True):
        raise ConfigError("directory is Addresses, but relays have to find each other: use a Store or a NameServer")
    return found


def _wanted(into: Tensors, keys: Any) -> dict[str, torch.Tensor]:
    tensors = named_tensors(into)
    wanted = [key for key in tensors if keys is None or (keys(key) if callable(keys) else key in set(keys))]
    if not callable(keys) and (missing := [key for key in keys or () if key not in tensors]):
        raise ConfigError(f"keys names {missing}, but there are no such tensors")
    return {key: tensors[key] for key in wanted}


def _group(layouts: list[AnyLayout], rank: int, ranks: int) -> list[int]:
    """Those that have the same part as this rank of every layout, in order."""
    mine = [layout.part(rank) for layout in layouts]
    return [
        one
        for one in range(ranks)
        if one == rank or all(layout.part(one) == part for layout, part in zip(layouts, mine, strict=True))
    ]


def _above(rank: int, group: list[int], fanout: int) -> Iterator[int]:
    """The parent, its parent, and so on."""
    at = group.index(rank)
    while at:
        at = (at - 1) // fanout
        yield group[at]
