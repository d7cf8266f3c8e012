"""torch.distributed's backend "monarch_rdma": a process group for tensors in host memory and on GPUs of one host.

torch calls the methods here by their names, from Python and from C++ (DDP, functional collectives). Each describes its
memory to the core at once, and is carried out in the order of calls: by who waits for it, or by the group's thread.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from ..errors import ConfigError
from ..rdma import group as core
from ..rdma.engine import Engine, adopt_secret, default_engine
from ..rdma.secret import Secret, configured_secret
from .arguments import can_reduce
from .device import INSTEAD
from .group import DTYPES, Group
from .meeting import member
from .other_devices import OtherDevices, by_device
from .work import Sequence, Work

__all__ = ["BACKEND", "ProcessGroup", "meet_in_store", "register"]

BACKEND = "monarch_rdma"
_RedOp: Any = ReduceOp.RedOpType
_NUMBERS = {getattr(torch, name): number for name, number in DTYPES.items() if hasattr(torch, name)}
_REDUCTIONS = {
    _RedOp.SUM: "sum", _RedOp.AVG: "avg", _RedOp.MIN: "min", _RedOp.MAX: "max", _RedOp.PRODUCT: "product",
}  # fmt: skip
_BOOLEAN = {_RedOp.SUM: "max", _RedOp.PRODUCT: "min", _RedOp.MAX: "max", _RedOp.MIN: "min"}  # any, all
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    _RedOp.BAND: torch.bitwise_and, _RedOp.BOR: torch.bitwise_or, _RedOp.BXOR: torch.bitwise_xor,
}  # fmt: skip
Call = Callable[[], Any]
_Base: Any = dist.ProcessGroup  # whose declared signatures differ from version to version


def register() -> None:
    """Makes the backend known to torch.distributed. Again is no error."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, meet_in_store, devices=["cpu", "cuda"])


def meet_in_store(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """The process group of those that call this with one store, in which they find each other. torch calls it."""
    seconds = timeout.total_seconds()
    engine = _engine(store, rank)
    store.set(f"address/{rank}", engine.address)
    members = [bytes(store.get(f"address/{each}")).decode() for each in range(size)]
    handle = member(engine, rank, size)
    store.set(f"member/{rank}", base64.b64encode(handle.descriptor))
    descriptors = [base64.b64decode(store.get(f"member/{each}")) for each in range(size)]
    try:
        handle.join(descriptors, members, seconds)
    except BaseException:
        handle.close()
        raise
    # The descriptor of the first member tells this group from any other one of the same engines.
    name = base64.b64encode(descriptors[0][-24:]).decode()
    group = Group(engine, handle, members, name, timeout=seconds)
    return ProcessGroup(group, timeout, store)


def _engine(store: Any, rank: int) -> Engine:
    """With the job's secret. Where none is configured the store, which all members trust, hands one out."""
    if configured_secret() is not None:
        return default_engine()
    if rank == 0:
        engine = default_engine()
        store.set("secret", base64.b64encode(engine.secret.reveal()))
        return engine
    return adopt_secret(Secret(base64.b64decode(store.get("secret"))))


def _block(tensor: torch.Tensor) -> core.Block:
    return tensor.data_ptr(), tensor.nbytes


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group on a `Group`, which is its attribute `group`. Made by `init_process_group` and `new_group`.

    `others` has the devices that the program has given to another backend.
    """

    def __init__(self, group: Group, timeout: timedelta, store: Any = None) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._timeout = timeout.total_seconds()
        self.others = OtherDevices(self, BACKEND, store, timeout)
        self._collectives = Sequence("monarch_rdma-collectives")
        self._messages: dict[tuple[str, int], Sequence] = {}
        self._coalesced: list[Work] | None = None
        self._name = self._description = ""  # which torch gives it

    # --- reductions

    @by_device
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        calls = [self._all_reduce(tensor, opts.reduceOp, self._limit(opts)) for tensor in tensors]
        return self._start(calls, tensors, opts)

    @by_device
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    @by_device
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        root, limit = opts.rootRank, self._limit(opts)
        calls = []
        for tensor in tensors:
            op = _reduction(opts.reduceOp, tensor)
            if op is None:  # on all members: it is rare
                scratch = tensor.clone()
                reduced = self._all_reduce(scratch, opts.reduceOp, limit)
                calls.append(_then(reduced, _copy(tensor, scratch) if self.group.rank == root else None))
                continue
            block, after = self._in_place(tensor, is_written=self.group.rank == root)
            outputs = [block] if self.group.rank == root else []
            name, number = op
            run = self._core(
                core.REDUCE,
                [_scaled(block, opts.reduceOp)],
                outputs,
                root=root,
                dtype=number,
                reduction=name,
                timeout=limit,
            )
            calls.append(_then(run, after))
        return self._start(calls, tensors, opts)

    @by_device
    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        limit = self._limit(opts)
        calls = [
            self._reduce_scatter(output, shards, opts.reduceOp, limit)
            for output, shards in zip(outputs, inputs, strict=True)
        ]
        return self._start(calls, outputs, opts)

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        shards = [list(self._split(tensor, "input")) for tensor in inputs]
        return self.reduce_scatter(outputs, shards, opts)

    # --- moving

    @by_device
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        is_root = opts.rootRank == self.group.rank
        calls = []
        for tensor in tensors:
            block, after = self._in_place(tensor, is_written=not is_root)
            blocks = ([block], []) if is_root else ([], [block])
            run = self._core(core.BROADCAST, *blocks, root=opts.rootRank, timeout=self._limit(opts))
            calls.append(_then(run, after))
        return self._start(calls, tensors, opts)

    @by_device
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        limit = self._limit(opts)
        calls = [self._all_gather(to, tensor, limit) for to, tensor in zip(outputs, inputs, strict=True)]
        return self._start(calls, [tensor for each in outputs for tensor in each], opts)

    @by_device
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        by_input = [[outputs[rank][i] for rank in range(self.group.size)] for i in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    @by_device
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @by_device
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        limit = self._limit(opts)
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            whole, after = self._in_place(output, is_written=True)
            gathered = self._all_gather(list(self._split(whole, "output")), tensor, limit)
            calls.append(_then(gathered, after))
        return self._start(calls, outputs, opts)

    @by_device
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        to, finish = self._destinations(outputs[0] if outputs else [])
        run = self._core(core.GATHER, [inputs[0]], to, root=opts.rootRank, timeout=self._limit(opts))
        return self._start([_then(run, finish)], outputs[0] if outputs else [], opts)

    @by_device
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        to, finish = self._destinations(outputs)
        run = self._core(
            core.SCATTER, inputs[0] if inputs else [], to[:1], root=opts.rootRank, timeout=self._limit(opts)
        )
        return self._start([_then(run, finish)], outputs, opts)

    @by_device
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllToAllOptions()
        to, finish = self._destinations(outputs)
        run = self._core(core.ALL_TO_ALL, inputs, to, timeout=self._limit(opts))
        return self._start([_then(run, finish)], outputs, opts)

    @by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        opts = opts or dist.AllToAllOptions()
        whole, after = self._in_place(output, is_written=True)
        to = self._split(whole, "output", output_splits)
        blocks = list(self._split(_plain(input), "input", input_splits))
        run = self._core(core.ALL_TO_ALL, blocks, to, timeout=self._limit(opts))
        return self._start([_then(run, after)], [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._start([self._core(core.BARRIER, [], [], timeout=self._limit(opts))], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names a rank that did not come."""
        limit = timeout.total_seconds() if timeout is not None else self._timeout
        work = Work(self._collectives, self._core(core.BARRIER, [], [], timeout=limit), [])
        self._collectives.add(work, is_awaited=True).wait()

    # torch before 2.12 calls them so
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages

    @by_device
    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        tensor = _plain(tensors[0].detach())
        block, limit = _message_block(tensor), self._timeout

        def call() -> None:
            self.group.core.send(to, tag, block, limit)
            kept.clear()

        kept = [tensor]
        return self._message("send", to, call, tensors)

    @by_device
    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Work:
        tensor = tensors[0]
        to, after = self._in_place(tensor, is_written=True)
        block, limit = _message_block(to), self._timeout

        def call() -> int:
            came_from = self.group.core.receive(sender, tag, block, limit)
            if after is not None:
                after()
            return came_from

        return self._message("receive", sender, call, tensors)

    @by_device
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        return self.recv(tensors, -1, tag)

    # --- life

    def name(self) -> str:
        return BACKEND

    # torch's C++ asks by these names; its own answers are for groups with a backend in C++.

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self.others.each(lambda other: other.set_timeout(timeout))

    def _get_backend(self, device: torch.device) -> Any:
        """torch's own code asks for that of NCCL."""
        other = self.others.group_of(torch.device(device).type)
        return super()._get_backend(device) if other is None else other._get_backend(device)

    def abort(self) -> None:
        """Ends everything pending, on all members, with `Cancelled`. `shrink` makes a new group."""
        self.group.abort()
        self.others.each(lambda other: other.abort())

    def shutdown(self) -> None:
        self.others.each(lambda other: other.shutdown())
        self.group.close()
        for sequence in [self._collectives, *self._messages.values()]:
            sequence.close()

    def shrink(self, timeout: timedelta | None = None) -> ProcessGroup:
        """A process group of the members that are not lost, in the old order. All of them call it.

        It is not known to torch.distributed under a name: pass it as `group`. Raises as `Group.shrink`.
        """
        limit = timeout.total_seconds() if timeout is not None else self._timeout
        smaller = self.group.shrink(timeout=limit)
        self.shutdown()
        return ProcessGroup(smaller, timedelta(seconds=self._timeout))

    def _start_coalescing(self, device: Any) -> None:
        if (other := self.others.group_of(torch.device(device).type)) is not None:
            other._start_coalescing(device)
            return
        if self._coalesced is not None:
            raise ConfigError("calls are being coalesced already")
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        if (other := self.others.group_of(torch.device(device).type)) is not None:
            return other._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        tensors = [tensor for work in works for tensor in work.result()]
        return self._collectives.add(Work(self._collectives, wait_for_all, tensors))

    # --- inside

    def _limit(self, opts: Any) -> float:
        """Seconds; options that nobody has set say -1 ms."""
        timeout = getattr(opts, "timeout", None)
        given = timeout.total_seconds() if timeout is not None else -1.0
        return given if given > 0 else self._timeout

    def _start(self, calls: list[Call], tensors: list[torch.Tensor], opts: Any) -> Work:
        call = calls[0] if len(calls) == 1 else _one_after_the_other(calls)
        if (on_gpu := next((tensor for tensor in tensors if tensor.is_cuda), None)) is not None:
            call = _on_stream(torch.cuda.current_stream(on_gpu.device), call)
        work = Work(self._collectives, call, tensors)
        is_awaited = not getattr(opts, "asyncOp", True) and self._coalesced is None
        self._collectives.add(work, is_awaited=is_awaited)
        if is_awaited:
            work.wait()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _message(self, direction: str, peer: int, call: Call, tensors: list[torch.Tensor]) -> Work:
        key = (direction, peer)
        sequence = self._messages.get(key)
        if sequence is None:
            sequence = self._messages[key] = Sequence(f"monarch_rdma-{direction}-{peer}")
        work = sequence.add(Work(sequence, call, tensors))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _core(
        self,
        kind: int,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        *,
        root: int = 0,
        dtype: int = 0,
        reduction: str = "sum",
        timeout: float,
    ) -> Call:
        """A collective of the core. The inputs are kept until it has ended."""
        kept, outputs = [_plain(_dense(tensor).detach()) for tensor in inputs], list(outputs)
        if any(tensor.is_cuda for tensor in (*kept, *outputs)):
            return self._on_devices(kind, kept, outputs, root=root, op=reduction, timeout=timeout)
        blocks, to = [_block(tensor) for tensor in kept], [_block(tensor) for tensor in outputs]
        number, run = core.REDUCTIONS[reduction], self.group.run

        def call() -> None:
            run(kind, blocks, to, root=root, dtype=dtype, reduction=number, timeout=timeout)
            kept.clear()

        return call

    def _on_devices(self, kind: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **options: Any) -> Call:
        """The same of tensors on a GPU."""

        def call() -> None:
            self.group.run_on_devices(kind, inputs, outputs, **options)
            inputs.clear()

        return call

    def _in_place(self, tensor: torch.Tensor, *, is_written: bool) -> tuple[torch.Tensor, Call | None]:
        """Contiguous memory with the tensor's values, and what brings the new ones back if it is not its own."""
        given = _dense(tensor).detach()
        plain = _plain(given)
        return plain, _copy(given, plain) if is_written and plain.data_ptr() != given.data_ptr() else None

    def _destinations(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Call | None]:
        to, after = [], []
        for tensor in tensors:
            block, copy_back = self._in_place(tensor, is_written=True)
            to.append(block)
            if copy_back is not None:
                after.append(copy_back)
        return to, _one_after_the_other(after) if after else None

    def _all_reduce(self, tensor: torch.Tensor, op: Any, limit: float) -> Call:
        named = _reduction(op, tensor)
        if named is None:
            return self._bitwise(tensor, op, limit)
        name, number = named
        block, after = self._in_place(tensor, is_written=True)
        run = self._core(core.ALL_REDUCE, [_scaled(block, op)], [block], dtype=number, reduction=name, timeout=limit)
        return _then(run, after)

    def _bitwise(self, tensor: torch.Tensor, op: Any, limit: float) -> Call:
        combine = _BITWISE[op_type(op)]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.group.size)]
        gather = self._all_gather(parts, tensor, limit)

        def call() -> None:
            gather()
            out = parts[0]
            for part in parts[1:]:
                out = combine(out, part)
            tensor.detach().copy_(out)

        return call

    def _reduce_scatter(self, output: torch.Tensor, shards: list[torch.Tensor], op: Any, limit: float) -> Call:
        named = _reduction(op, output)
        if named is None:
            flat = [shard.clone() for shard in shards]
            calls = [self._bitwise(shard, op, limit) for shard in flat]
            return _then(_one_after_the_other(calls), _copy(output.detach(), flat[self.group.rank]))
        name, number = named
        block, after = self._in_place(output, is_written=True)
        shards = [_scaled(shard, op) for shard in shards]
        run = self._core(core.REDUCE_SCATTER, shards, [block], dtype=number, reduction=name, timeout=limit)
        return _then(run, after)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, limit: float) -> Call:
        to, finish = self._destinations(outputs)
        run = self._core(core.ALL_GATHER, [tensor], to, timeout=limit)
        return _then(run, finish)

    def _split(self, tensor: torch.Tensor, argument: str, rows: list[int] | None = None) -> Iterable[torch.Tensor]:
        """One part a rank: of `rows` rows each, or equal ones."""
        size = self.group.size
        if rows:
            if len(rows) != size or sum(rows) != tensor.size(0):
                raise ConfigError(f"the splits of {argument}, {rows}, do not fit {tensor.size(0)} rows, {size} ranks")
            return list(torch.split(tensor, list(rows)))
        flat = _plain(tensor).view(-1)
        if flat.numel() % size:
            raise ConfigError(f"{argument} has {flat.numel()} elements, which {size} ranks cannot share equally")
        return list(torch.split(flat, flat.numel() // size)) if flat.numel() else [flat] * size


def op_type(op: Any) -> Any:
    """The kind of a ReduceOp, which torch also passes as its kind alone."""
    return op if isinstance(op, _RedOp) else op.op


def _reduction(op: Any, tensor: torch.Tensor) -> tuple[str, int] | None:
    """The core's reduction and dtype; None for the bitwise ones, which torch does."""
    kind = op_type(op)
    number = _NUMBERS.get(tensor.dtype)
    if kind in _BITWISE:
        if tensor.is_floating_point():
            raise ConfigError(f"op {kind} is not defined for {tensor.dtype}")
        return None
    if number is None:
        raise ConfigError(f"tensors of dtype {tensor.dtype} cannot be reduced")
    if kind == _RedOp.PREMUL_SUM and tensor.is_floating_point():
        return "sum", number
    names = _BOOLEAN if tensor.dtype is torch.bool else _REDUCTIONS
    if kind not in names or not can_reduce(str(tensor.dtype)[6:], names[kind]):  # without "torch."
        raise ConfigError(f"op {kind} is not defined for {tensor.dtype}")
    return names[kind], number


def _factor(op: Any) -> Any:
    """Of PREMUL_SUM: a number, or a tensor of one element."""
    return op.__getstate__()[1]


def _scaled(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """What PREMUL_SUM sums: a copy, rounded to the dtype; as it is for all others."""
    if op_type(op) != _RedOp.PREMUL_SUM:
        return tensor
    wide = tensor if tensor.dtype is torch.float64 else tensor.float()
    scaled: torch.Tensor = wide * _factor(op)
    return scaled.to(tensor.dtype).view(tensor.shape)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
        raise ConfigError(
            f"a tensor on {tensor.device} with layout {tensor.layout}: backend {BACKEND} takes dense ones, on the CPU "
            "or a GPU of AMD or NVIDIA"
        )
    return tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as bytes that lie together."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _message_block(tensor: torch.Tensor) -> core.Block:
    if not tensor.is_cpu:
        raise ConfigError(
            f"a tensor on {tensor.device}: backend {BACKEND} sends and receives those on the CPU; {INSTEAD}"
        )
    return _block(tensor)


def _copy(to: torch.Tensor, source: torch.Tensor) -> Call:
    return lambda: to.detach().copy_(source.view(to.shape))


def _on_stream(stream: Any, first: Call) -> Call:
    """Whoever carries it out: what is done on a GPU comes after what its caller had queued there."""

    def call() -> None:
        with torch.cuda.stream(stream):
            first()

    return call


def _then(first: Call, second: Call | None) -> Call:
    if second is None:
        return first

    def call() -> None:
        first()
        second()

    return call


def _one_after_the_other(calls: list[Call]) -> Call:
    def call() -> None:
        for each in calls:
            each()

    return call
