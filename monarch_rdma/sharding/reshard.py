"""Carries out a plan: reads what is missing out of the memory of the ranks that have it, one-sided.

reshard = Reshard(plan, buffers, targets)     # checks everything, once
reshard.run()                                 # again and again: nothing is planned, registered or allocated
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import AccessDenied, ConfigError, PeerLost, RdmaError, TransferTimeout, VersionChanged
from ..rdma import BULK_BYTES, Future, RDMABuffer
from .plan import Plan, TensorCopies
from .plan.geometry import Layout
from .plan.replacement import replaced
from .reads import Read, Staging, Target, reads_of
from .units import Units
from .version import RemoteWord

__all__ = ["Follower", "Report", "Reshard"]

_IN_FLIGHT = 2048  # reads that are under way at once
_SLOTS = 4  # of staging memory: some are read into while others are unpacked
_STAGING_BYTES = 64 << 20

Buffers = Mapping[int, Mapping[str, RDMABuffer]]


@dataclass(frozen=True)
class Report:
    """What one run did. `bytes` were read, in `reads`; `replaced` are ranks that were lost, others sent their part."""

    version: int | None
    bytes: int
    reads: int
    seconds: float
    replaced: tuple[int, ...]


class Follower(Protocol):
    """Is told how the units of the targets are filled."""

    def begins(self, units: list[int]) -> None:
        """Of each read, in the order in which they will end, the first unit that it touches: these ascend. When it is
        called again, what has arrived before may be written once more.
        """
        ...

    def ends(self, *, is_good: bool) -> None:
        """The next of these reads has ended."""
        ...


class Reshard:
    """A plan, ready to be carried out again and again into the same tensors."""

    def __init__(
        self,
        plan: Plan,
        buffers: Buffers,
        targets: Mapping[str, torch.Tensor],
        *,
        layouts: Mapping[str, Layout] | None = None,
        words: Mapping[int, RDMABuffer] | None = None,
        staging_bytes: int = _STAGING_BYTES,
        units: Units | None = None,
        sums_of: int | None = None,
        at_once: bool = False,
        called: str = "targets",
    ) -> None:
        """`buffers`: for each rank of the sources its local tensors by name, this rank's too. `targets`: this rank's
        local tensors. `layouts`: of the sources; with them the part of a rank that is lost is read from others that
        have it too. `words`: each rank's `VersionWord.buffer`; with them a run reads one version or fails.
        `staging_bytes`: the most that values of another dtype or order of axes wait in. `units`: in whose order the
        targets are filled, by reads that are no larger; None for the order that is fast. `sums_of`: as in reads_of.
        `at_once`: for what is carried out once: the first run prepares reads, in the plan's order, while others move.
        `called`: the targets, in errors.

        ConfigError where a buffer or target is missing, or is not what was planned.
        """
        if staging_bytes < _SLOTS * 16:
            raise ConfigError(f"staging_bytes is {staging_bytes!r}, but must be at least {_SLOTS * 16}")
        self._plan = plan
        self._buffers = buffers
        self._layouts = layouts or {}
        self._staging = Staging(staging_bytes, _SLOTS)
        self._units = units
        self._sums_of = sums_of
        self._is_bulk = plan.bytes_moved + plan.bytes_here >= BULK_BYTES
        self._targets = {tensor.target: _checked_target(tensor, targets, called) for tensor in plan.tensors}
        self._reads: list[Read] = []
        self._unprepared = deque(plan.tensors)
        if not at_once:
            self._reads = self._in_order(list(self._growing()))
        self._gone: set[int] = set()
        self._last_error: RdmaError | None = None
        self._words: dict[int, RemoteWord] | None = None
        if words is not None:
            if missing := self._ranks() - set(words):
                raise ConfigError(f"words has none for the ranks {sorted(missing)}, but the plan reads from them")
            self._words = {rank: RemoteWord(buffer) for rank, buffer in words.items()}

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that runs have found lost, also ones that failed: they are not asked again."""
        return tuple(sorted(self._gone))

    def _prepared(self, tensor: TensorCopies, copies: Any) -> Iterable[Read]:
        most = None if self._units is None else self._units.unit_bytes
        target = self._targets[tensor.target]
        how: dict[str, Any] = {"bulk": self._is_bulk, "sums_of": self._sums_of}
        return reads_of(tensor, copies, self._buffers, target, self._staging, most, **how)

    def _growing(self) -> Iterator[Read]:
        """All reads; those that are not prepared yet are prepared when they are asked for."""
        yield from tuple(self._reads)
        while self._unprepared:
            fresh = list(self._prepared(self._unprepared[0], self._unprepared[0].copies))
            self._unprepared.popleft()
            self._reads += fresh
            yield from fresh

    def _ranks(self) -> set[int]:
        """That reads are from, prepared or not."""
        planned = (int(rank) for tensor in self._unprepared for rank in tensor.copies.source)
        return {*planned, *(read.rank for read in self._reads)}

    def _in_order(self, reads: list[Read]) -> list[Read]:
        if self._units is None:
            return _in_turns(reads, self._plan.rank)
        return sorted(reads, key=self._first_unit)

    def _first_unit(self, read: Read) -> int:
        assert self._units is not None
        return self._units.first_of(read.tensor.target, read.copies)

    # --- running

    def run(
        self,
        *,
        timeout: float | None = 60,
        version: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        follower: Follower | None = None,
        on_read: Callable[[Read], None] | None = None,
    ) -> Report:
        """Reads everything. `timeout`: seconds for all of it. `version`: the one to read; None for whichever it is, if
        all ranks have the same. `progress`: called with the bytes read so far and those of all. `follower`: is told
        how the units are filled. `on_read`: called with each read when its bytes are there; what was read from a rank
        that cannot vouch for it comes again.

        Raises, when nothing is written any more: TransferTimeout; PeerLost naming what is lost with a rank, where no
        other has it; VersionChanged where ranks have several versions, or one was written meanwhile; and what reads
        raise. The targets are then partly written.
        """
        run = _Run(timeout, version, progress, follower, on_read, self._plan.bytes_moved + self._plan.bytes_here)
        before = set(self._gone)
        pending = self._read_unprepared(run) if self._unprepared else list(self._reads)
        while pending:
            lost = self._verified({read.rank for read in pending}, run)
            if lost:
                mine = [read for read in pending if read.rank in lost]
                pending = [read for read in pending if read.rank not in lost] + self._replaced(mine, lost)
                continue
            if follower is not None:
                pending = self._in_order(pending)
                follower.begins([self._first_unit(read) for read in pending])
            pending = self._left(self._read_all(pending, run), pending, run)
        gone = tuple(sorted(self._gone - before))
        return Report(run.version, run.done, len(self._reads), time.monotonic() - run.begin, gone)

    def _read_unprepared(self, run: _Run) -> list[Read]:
        """Prepares and reads at the same time; what is left to be read then."""
        if run.follower is not None or self._verified(self._ranks(), run):
            return list(self._growing())
        failed = self._read_all(self._growing(), run)
        return self._left(failed, self._reads, run)

    def _left(self, failed: list[Read], reads: list[Read], run: _Run) -> list[Read]:
        """What is read again, from others: of these what has failed, or is from a rank that cannot vouch for it."""
        lost = {read.rank for read in failed}
        if self._words is not None:
            lost |= self._verified({read.rank for read in reads} - lost, run)
            failed = [read for read in reads if read.rank in lost]
        return self._replaced(failed, lost) if failed else []

    def _read_all(self, reads: Iterable[Read], run: _Run) -> list[Read]:
        """Those that failed because their rank is lost. Any other failure is raised when all others have ended."""
        under_way: deque[tuple[Read, Future]] = deque()
        failed: list[Read] = []
        used: dict[int, Read] = {}  # the read that each slot of the staging memory was last used for
        try:
            for read in reads:
                while len(under_way) >= _IN_FLIGHT or read.slot in used:
                    self._finish(under_way, used, failed, run)
                if read.slot >= 0:
                    used[read.slot] = read
                under_way.append((read, read.start(run.left())))
            while under_way:
                self._finish(under_way, used, failed, run)
        except BaseException:
            for _, future in under_way:
                future.cancel()
            for _, future in under_way:
                future.exception()
            raise
        return failed

    def _finish(
        self, under_way: deque[tuple[Read, Future]], used: dict[int, Read], failed: list[Read], run: _Run
    ) -> None:
        read, future = under_way[0]
        error = future.exception()
        under_way.popleft()
        used.pop(read.slot, None)
        if isinstance(error, PeerLost | AccessDenied):
            failed.append(read)
            self._last_error = error
        elif error is not None:
            raise error
        else:
            if read.unpack is not None:
                read.unpack()
            run.add(read)
        if run.follower is not None:
            run.follower.ends(is_good=error is None)

    # --- versions

    def versions(self, timeout: float | None = 60) -> dict[int, int | None]:
        """The version that each rank has now; None while it is being written. Ranks that are lost have none.

        ConfigError without words; TransferTimeout.
        """
        if self._words is None:
            raise ConfigError("no version words were given")
        words = {rank: word for rank, word in self._words.items() if rank not in self._gone}
        futures = {rank: word.start(timeout) for rank, word in words.items()}
        lost = self._lost(futures)
        return {rank: word.version for rank, word in words.items() if rank not in lost}

    def _lost(self, futures: Mapping[int, Future]) -> set[int]:
        """Those of the ranks whose read failed because they are lost. Any other failure is raised."""
        errors = {rank: future.exception() for rank, future in futures.items()}
        lost = {rank for rank, error in errors.items() if isinstance(error, PeerLost | AccessDenied)}
        for rank, error in errors.items():
            if rank in lost:
                self._last_error = error
            elif error is not None:
                raise error
        return lost

    def _verified(self, ranks: Collection[int], run: _Run) -> set[int]:
        """Those of the ranks that are lost. VersionChanged unless all others have the version that this run is about,
        which the first look decides where the caller has not.
        """
        if self._words is None:
            return set()
        lost = self._lost({rank: self._words[rank].start(run.left()) for rank in sorted(ranks)})
        for rank in sorted(set(ranks) - lost):
            version = self._words[rank].version
            if version is None:
                raise VersionChanged(f"rank {rank} is writing a new version", operation="read")
            if run.version is None:
                run.version = version
            if version != run.version:
                raise VersionChanged(f"rank {rank} has version {version}, not {run.version}", operation="read")
        return lost

    # --- ranks that are lost

    def _replaced(self, failed: list[Read], lost: set[int]) -> list[Read]:
        """Reads of the same elements from others; PeerLost that names what nobody else has."""
        self._gone |= lost
        fresh: list[Read] = []
        nowhere: list[Read] = []
        for read in failed:
            layout = self._layouts.get(read.tensor.source)
            if layout is None:
                nowhere.append(read)
                continue
            copies, left = replaced(read.copies, layout, self._gone, self._plan.rank)
            if left.size or any(int(rank) not in self._buffers for rank in copies.source):
                nowhere.append(read)
            else:
                fresh += self._prepared(read.tensor, copies)
        if nowhere:
            raise self._loss(nowhere, lost)
        again = {id(read) for read in failed}
        self._reads = [read for read in self._reads if id(read) not in again] + fresh
        return fresh

    def _loss(self, reads: list[Read], lost: set[int]) -> PeerLost:
        size = sum(read.nbytes for read in reads)
        named = ", ".join(dict.fromkeys(_described(read) for read in reads[:3]))
        more = f" and {len(reads) - 3} more" if len(reads) > 3 else ""
        ranks = ", ".join(map(str, sorted(lost)))
        cause = self._last_error
        return PeerLost(
            f"rank {ranks} is lost, and with it {size} bytes that no other rank has: {named}{more} ({cause})",
            peer=cause.peer if cause else None,
            operation="read",
            size=size,
            cause=str(cause),
        )


@dataclass
class _Run:
    """One run: its deadline, the version it is about, and how far it has come."""

    timeout: float | None
    version: int | None
    progress: Callable[[int, int], None] | None
    follower: Follower | None
    on_read: Callable[[Read], None] | None
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.begin = time.monotonic()

    def left(self) -> float | None:
        """Seconds. TransferTimeout where there are none."""
        if self.timeout is None:
            return None
        left = self.begin + self.timeout - time.monotonic()
        if left <= 0:
            raise TransferTimeout(
                f"{self.done} of {self.total} bytes were read in {self.timeout} s", operation="read", size=self.total
            )
        return left

    def add(self, read: Read) -> None:
        self.done += read.nbytes
        if self.on_read is not None:
            self.on_read(read)
        if self.progress is not None:
            self.progress(self.done, self.total)


def _checked_target(tensor: TensorCopies, targets: Mapping[str, torch.Tensor], called: str) -> Target:
    try:
        target = targets[tensor.target]
    except KeyError:
        raise ConfigError(f"targets has no {tensor.target!r}, but the plan fills it") from None
    name = str(target.dtype).removeprefix("torch.")
    if name != tensor.target_dtype:
        raise ConfigError(f"target {tensor.target!r} is {name}, but was planned as {tensor.target_dtype}")
    needed = tensor.copies.target_extent
    if target.ndim != len(needed) or any(n > have for n, have in zip(needed, target.shape, strict=True)):
        raise ConfigError(f"target {tensor.target!r} has shape {tuple(target.shape)}, but the plan fills {needed}")
    return Target(target.detach(), f"{called}[{tensor.target!r}]")


def _in_turns(reads: list[Read], rank: int) -> list[Read]:
    """One of each rank after another, so that all ranks send at once; each reader begins with another rank. Reads that
    have to be unpacked keep their order: it is that of the slots they wait in.
    """
    of_ranks: dict[int, list[Read]] = {}
    for read in reads:
        if read.unpack is None:
            of_ranks.setdefault(read.rank, []).append(read)
    ranks = sorted(of_ranks)
    begin = rank % max(1, len(ranks))
    queues = [of_ranks[r] for r in ranks[begin:] + ranks[:begin]]
    turns = itertools.zip_longest(*queues)
    return [read for turn in turns for read in turn if read is not None] + [r for r in reads if r.unpack is not None]


def _described(read: Read) -> str:
    extents = zip(read.copies.target_at[0].tolist(), read.copies.target_extent, strict=True)
    return f"{read.tensor.target}[{', '.join(f'{low}:{high}' for low, high in extents)}]"
