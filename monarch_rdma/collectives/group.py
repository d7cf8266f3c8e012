"""A group of processes, and its collectives on tensors (and whatever else has contiguous memory)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import config
from ..errors import ConfigError, PeerLost, demand_whole
from ..rdma import group as core
from ..rdma.engine import Engine, as_text, default_engine, seconds
from ..rdma.group import DTYPES
from ..rdma.memory import memory_of, note_written
from ..supervision.membership import Epoch
from .algorithms import number_of
from .arguments import as_addresses, as_list, can_reduce
from .hierarchy import Hierarchy, hierarchy_of
from .meeting import MemberLost, digest, meet

if TYPE_CHECKING:
    from .device import DeviceCollectives

__all__ = ["DTYPES", "Group", "default_timeout", "is_on_gpu"]


_REDUCING = (core.ALL_REDUCE, core.REDUCE, core.REDUCE_SCATTER)
Named = dict[str, Any]


def default_timeout() -> float:
    return float(config.get("collective_timeout"))


class Group:
    """Processes with ranks 0 to size-1 that call the same collectives in the same order, and send each other messages.

    Calls wait. `timeout` is in seconds; None takes option collective_timeout. `algorithm` (None: what is best) says how
    the bytes go between members, and with it the order in which sums are made, in fp32 (fp64 for fp64): the same
    arguments in the same group give the same bits, on all members and in all runs. See docs/collectives.md.
    Tensors on GPUs, one a member, all on one host: all_reduce, reduce, reduce_scatter, all_gather and broadcast, of
    contiguous tensors of equal sizes, where the package has kernels for them.

    When a member is lost, stops, or does not come before a deadline, everything pending ends on all members with one
    error that names its rank (PeerLost, TransferTimeout), and so does every later call: `shrink` makes a new group.
    """

    def __init__(
        self, engine: Engine, handle: core.CoreGroup, members: Sequence[str], name: str, *, timeout: float
    ) -> None:
        """All members call it, when `handle` has met; `timeout`: seconds until its levels have met as well.

        A member that is lost meanwhile makes the group fail: the first call raises it, and `shrink` leaves it out.
        """
        self.engine = engine
        self.core = handle
        self._hierarchy: Hierarchy | None = None
        try:
            self._hierarchy = hierarchy_of(engine, handle, members, name, timeout)
        except BaseException as error:
            if not isinstance(error, PeerLost):
                handle.close()
                raise
        self._way = self._hierarchy or handle
        self.members = tuple(members)  # addresses of their engines, by rank
        self.name = name
        self.rank, self.size = handle.rank, handle.size
        self._running = threading.Lock()
        self._devices: DeviceCollectives | None = None

    @classmethod
    def form(
        cls,
        members: Sequence[str],
        *,
        name: str | None = None,
        engine: Engine | None = None,
        timeout: float | None = None,
    ) -> Group:
        """The group of the engines at these addresses, whose order gives the ranks. All members call it alike.

        `name`: where the same engines form several groups at a time. Raises PeerLost, TransferTimeout (naming who did
        not come), ConfigError.
        """
        engine = default_engine() if engine is None else engine
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is {engine!r:.200}, but must be an Engine")
        members = as_addresses("members", members)
        if engine.address not in members:
            raise ConfigError(f"members does not have this engine's address, {engine.address}")
        if len(set(members)) != len(members):
            raise ConfigError("members has an address twice")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name is {name!r:.200}, but must be a string")
        name = digest(members) if name is None else name
        limit = _limit(timeout)
        limit = limit if limit >= 0 else float("inf")
        deadline = time.monotonic() + limit
        handle = meet(engine, members, name, limit)
        return cls(engine, handle, members, name, timeout=deadline - time.monotonic())

    @classmethod
    def of_epoch(cls, epoch: Epoch, *, engine: Engine | None = None, timeout: float | None = None) -> Group:
        """The group of an epoch's members, with their ranks; each gave its engine's address as its metadata.

        With a coordinator of membership this takes the place of `shrink` and `grow`: each epoch has a group, whoever
        comes or goes, and a member that the coordinator has given up finds none. Raises as `form`.
        """
        return cls.form(epoch.metadata, name=f"epoch {epoch.id}", engine=engine, timeout=timeout)

    # --- collectives

    def all_reduce(
        self, tensor: Any, *, op: str = "sum", algorithm: str | None = None, timeout: float | None = None
    ) -> None:
        """Every member's `tensor` becomes the reduction over all of them: op is sum, avg, min, max or product."""
        self._run(core.ALL_REDUCE, {"tensor": tensor}, {"tensor": tensor}, op=op, algorithm=algorithm, timeout=timeout)

    def reduce(
        self, tensor: Any, root: int, *, op: str = "sum", algorithm: str | None = None, timeout: float | None = None
    ) -> None:
        """The same, on member `root` alone."""
        outputs = {"tensor": tensor} if self.rank == root else {}
        self._run(core.REDUCE, {"tensor": tensor}, outputs, root=root, op=op, algorithm=algorithm, timeout=timeout)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        *,
        op: str = "sum",
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """`output` becomes the reduction over all members' inputs[rank]. Sizes may differ from rank to rank."""
        self._run(
            core.REDUCE_SCATTER,
            _numbered("inputs", inputs),
            {"output": output},
            op=op,
            algorithm=algorithm,
            timeout=timeout,
        )

    def all_gather(
        self, outputs: Sequence[Any], tensor: Any, *, algorithm: str | None = None, timeout: float | None = None
    ) -> None:
        """outputs[r] becomes rank r's `tensor`, on all members. Sizes may differ from rank to rank."""
        self._run(
            core.ALL_GATHER, {"tensor": tensor}, _numbered("outputs", outputs), algorithm=algorithm, timeout=timeout
        )

    def broadcast(self, tensor: Any, root: int, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Every member's `tensor` becomes that of member `root`."""
        named: Named = {"tensor": tensor}
        inputs, outputs = (named, {}) if self.rank == root else ({}, named)
        self._run(core.BROADCAST, inputs, outputs, root=root, algorithm=algorithm, timeout=timeout)

    def gather(
        self,
        outputs: Sequence[Any] | None,
        tensor: Any,
        root: int,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """On member `root`, outputs[r] becomes rank r's `tensor`; the others give None for outputs."""
        self._run(
            core.GATHER,
            {"tensor": tensor},
            _numbered("outputs", [] if outputs is None else outputs),
            root=root,
            algorithm=algorithm,
            timeout=timeout,
        )

    def scatter(
        self,
        output: Any,
        inputs: Sequence[Any] | None,
        root: int,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """`output` of rank r becomes inputs[r] of member `root`; the others give None for inputs."""
        self._run(
            core.SCATTER,
            _numbered("inputs", [] if inputs is None else inputs),
            {"output": output},
            root=root,
            algorithm=algorithm,
            timeout=timeout,
        )

    def all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any], *, timeout: float | None = None) -> None:
        """outputs[s] of rank r becomes inputs[r] of rank s. All sizes may differ."""
        self._run(core.ALL_TO_ALL, _numbered("inputs", inputs), _numbered("outputs", outputs), timeout=timeout)

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Returns when all members have called it."""
        self._run(core.BARRIER, {}, {}, algorithm=algorithm, timeout=timeout)

    # --- messages

    def send(self, tensor: Any, to: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """To rank `to`, which receives it by its tag. Returns when `tensor` may be changed, perhaps before that.

        TransferTimeout: nothing was sent.
        """
        self._demand_message("to", to, tag)
        self.core.send(to, tag, self._memory(tensor, "tensor")[0], _limit(timeout))

    def receive(self, tensor: Any, sender: int | None = None, *, tag: int = 0, timeout: float | None = None) -> int:
        """The next message with this tag from rank `sender` (None: from anybody) into `tensor`; returns its sender.

        OutOfBounds where it has another size: it is gone then. TransferTimeout: none came.
        """
        self._demand_message("sender", 0 if sender is None else sender, tag)
        block = self._memory(tensor, "tensor", writes=True)[0]
        came_from = self.core.receive(-1 if sender is None else sender, tag, block, _limit(timeout))
        _note_written(tensor)
        return came_from

    # --- failure

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks on each host, where collectives go in two levels; else all of them, as if on one."""
        return [list(range(self.size))] if self._hierarchy is None else self._hierarchy.hosts

    @property
    def failed_rank(self) -> int | None:
        """The member because of which the group has failed; None where it has not."""
        return self.core.failed_rank

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends everything pending, on all members, with Cancelled; the group has failed then."""
        as_text(reason, "reason")
        self._way.abort(reason)

    def shrink(self, *, timeout: float | None = None) -> Group:
        """A new group of those members that are not lost, with ranks in the old order. All of them call it.

        Members that are lost meanwhile are left out as well. This group has failed, and is closed. Raises
        TransferTimeout naming a member that did not come, PeerLost where the others count this one as lost.
        """
        limit = _limit(timeout)
        deadline = time.monotonic() + limit if limit >= 0 else float("inf")
        self.abort("the group shrinks")
        lost = {rank for rank in range(self.size) if self.core.is_lost(rank)}
        if isinstance(self.core.failure, PeerLost) and self.failed_rank is not None:
            lost.add(self.failed_rank)
        if self.rank in lost:
            raise PeerLost(f"shrink: the others count rank {self.rank}, this one, as lost", operation="shrink")
        alive = [rank for rank in range(self.size) if rank not in lost]
        while True:
            members = [self.members[rank] for rank in alive]
            name = f"{self.name}/{self.size}"
            try:
                handle = meet(self.engine, members, name, deadline - time.monotonic())
            except MemberLost as error:
                del alive[error.rank]
                continue
            smaller = Group(self.engine, handle, members, name, timeout=deadline - time.monotonic())
            self.close()
            is_whole = not isinstance(smaller.core.failure, PeerLost)
            return smaller if is_whole else smaller.shrink(timeout=max(0.0, deadline - time.monotonic()))

    def grow(self, newcomers: Sequence[str], *, timeout: float | None = None) -> Group:
        """A new group of these members and the engines at the addresses of `newcomers`, which get the ranks after.

        The newcomers call `Group.form([*group.members, *newcomers])`. This group stays as it is. Raises as `form`.
        """
        return Group.form([*self.members, *as_addresses("newcomers", newcomers)], engine=self.engine, timeout=timeout)

    def close(self) -> None:
        """Leaves the group. The others still get what this member has given, and go on with each other.

        What needs more of it ends with PeerLost at once, naming it: a message alone, a collective with all later ones.
        `shrink` then makes a group without it.
        """
        for part in (self._devices, self._hierarchy):
            if part is not None:
                part.close()
        self.core.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Group {self.name}: rank {self.rank} of {self.size}>"

    # --- inside

    def run(
        self, kind: int, inputs: Sequence[core.Block] = (), outputs: Sequence[core.Block] = (), **options: Any
    ) -> None:
        """As CoreGroup.run, from any thread."""
        with self._running:
            self._way.run(kind, inputs, outputs, **options)

    def run_on_devices(self, kind: int, inputs: Sequence[Any], outputs: Sequence[Any], **options: Any) -> None:
        """The same of tensors on GPUs."""
        with self._running:
            self.devices.run(kind, inputs, outputs, **options)

    def _run(
        self,
        kind: int,
        inputs: Named,
        outputs: Named,
        *,
        root: int = 0,
        op: str = "sum",
        algorithm: str | None = None,
        timeout: float | None,
    ) -> None:
        """One collective of what messages call so; the outputs are written to."""
        if not isinstance(op, str) or op not in core.REDUCTIONS:
            raise ConfigError(f"op is {op!r}, but must be one of {', '.join(core.REDUCTIONS)}")
        demand_whole("root", root, 0, self.size - 1)
        limit, way = _limit(timeout), number_of(kind, algorithm)
        if any(is_on_gpu(each) for each in (*inputs.values(), *outputs.values())):
            if way is not None:
                raise ConfigError(f"algorithm is {algorithm!r}, but is for tensors in host memory alone")
            given, to = list(inputs.values()), list(outputs.values())
            self.run_on_devices(kind, given, to, root=root, op=op, timeout=limit)
        else:
            written = {name: self._memory(each, name, writes=True) for name, each in outputs.items()}
            read = {name: self._memory(each, name) for name, each in inputs.items()}
            self.run(
                kind,
                [block for block, _ in read.values()],
                [block for block, _ in written.values()],
                root=root,
                dtype=_dtype_of(read | written, op) if kind in _REDUCING else 0,
                reduction=core.REDUCTIONS[op],
                algorithm=way,
                timeout=limit,
            )
        for each in outputs.values():
            _note_written(each)

    @property
    def devices(self) -> DeviceCollectives:
        """For tensors on GPUs."""
        if self._devices is None:
            from .device import DeviceCollectives

            self._devices = DeviceCollectives(self.engine, self.core)
        return self._devices

    def _demand_message(self, argument: str, rank: Any, tag: Any) -> None:
        demand_whole(argument, rank, 0, self.size - 1)
        demand_whole("tag", tag, 0)

    def _memory(self, what: Any, argument: str, *, writes: bool = False) -> tuple[core.Block, str]:
        """The address and size of contiguous memory, and its dtype."""
        memory = memory_of(what, argument)
        if not memory.view.is_contiguous:
            raise ConfigError(f"{argument} is not contiguous: pass {argument}.contiguous()")
        if writes and not memory.writable:
            raise ConfigError(f"{argument} is read-only, but is written to")
        return (memory.address, memory.view.nbytes), memory.view.dtype


def _dtype_of(memory: dict[str, tuple[core.Block, str]], op: str) -> int:
    """Its number, of what is reduced: all of one dtype, for which that is defined."""
    (first, (_, dtype)), *others = memory.items()
    for name, (_, other) in others:
        if other != dtype:
            raise ConfigError(f"{name} has dtype {other}, but {first} has {dtype}")
    if dtype not in DTYPES or not can_reduce(dtype, op):
        raise ConfigError(f"op is {op!r}, which is not defined for {first} of dtype {dtype}")
    return DTYPES[dtype]


def _numbered(argument: str, given: Sequence[Any]) -> Named:
    return {f"{argument}[{i}]": each for i, each in enumerate(as_list(argument, given))}


def is_on_gpu(what: Any) -> bool:
    """Whether it is a tensor on a GPU of AMD or NVIDIA."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(what, torch.Tensor) and bool(what.is_cuda)


def _note_written(what: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(what, torch.Tensor):
        note_written(what)


def _limit(timeout: float | None) -> float:
    return default_timeout() if timeout is None else seconds(timeout)
