"""Collectives of tensors on GPUs, among members on one host: kernels that read the other GPUs' memory.

Each member has a workspace on its GPU, which all others have opened (rdma: `map_on_device`). What is larger goes in
parts. Before the kernels start, the members meet in the group in host memory and compare what they are about to do: so
a member that is lost, late or calls something else is an error there, with its rank, and no kernel waits for it. One
that is lost after that ends the kernels' waits.

Calls wait until the kernels have ended: a result that is not whole goes nowhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import config
from ..errors import ConfigError, RdmaError, TransferTimeout
from ..kernels import Workspaces, peer_collective
from ..kernels.arguments import COMPUTED
from ..kernels.native import native
from ..kernels.peers import MOST_RANKS, SIGNAL_BYTES
from ..rdma import RDMABuffer
from ..rdma import group as core
from ..rdma.engine import Engine
from ..rdma.gpu import synchronize
from ..rdma.memory import memory_of
from .guard import Guard

__all__ = ["INSTEAD", "DeviceCollectives"]

_OFFER_BYTES = 8 << 10  # in which a member tells of its workspace
_CALL_BYTES = 128  # in which it tells what it calls
_ALIGNMENT = 16  # bytes that a kernel takes at once
_NAMES = {
    core.ALL_REDUCE: "all_reduce", core.REDUCE: "reduce", core.REDUCE_SCATTER: "reduce_scatter",
    core.ALL_GATHER: "all_gather", core.BROADCAST: "broadcast",
}  # fmt: skip
INSTEAD = (
    "for it, make a group of torch's own backend for GPUs: torch.distributed.new_group(backend='nccl'), "
    "which is RCCL on AMD's"
)
Tensors = Sequence[torch.Tensor]


class DeviceCollectives:
    """What a Group does with tensors on GPUs. All members call the same, one call at a time, as of the group itself."""

    def __init__(self, engine: Engine, whole: core.CoreGroup) -> None:
        self._engine, self._whole = engine, whole
        self._workspaces: Workspaces | None = None
        self._refusal = ""  # of some member, known to all
        self._one_shot_bytes = 0
        self._buffer: RDMABuffer | None = None
        self._mappings: list[Any] = []
        self._guard = Guard(whole, self._end_waits)
        self._ways: dict[int, Callable[..., None]] = {
            core.ALL_REDUCE: self._all_reduce,
            core.REDUCE: self._reduce,
            core.REDUCE_SCATTER: self._reduce_scatter,
            core.ALL_GATHER: self._all_gather,
            core.BROADCAST: self._broadcast,
        }

    def run(
        self, kind: int, inputs: Tensors, outputs: Tensors, *, root: int = 0, op: str = "sum", timeout: float
    ) -> None:
        """One collective, on the current stream of the tensors' GPU; returns when it has ended there.

        As CoreGroup.run, of contiguous tensors of one size and dtype. Raises ConfigError, on all members and with
        nothing changed, where they do not call the same or some cannot take part; PeerLost, TransferTimeout.
        """
        if kind not in _NAMES:
            raise ConfigError(f"a tensor is on a GPU, which this collective does not take; {INSTEAD}")
        tensors = [*inputs, *outputs]
        first = tensors[0]
        for tensor in tensors:
            if tensor.device != first.device or tensor.dtype != first.dtype or tensor.numel() != first.numel():
                raise ConfigError(
                    f"tensors on a GPU must be alike in a collective, got {first.numel()} of {first.dtype} on "
                    f"{first.device} and {tensor.numel()} of {tensor.dtype} on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pass .contiguous()")
        deadline = time.monotonic() + timeout if timeout >= 0 else float("inf")
        workspaces = self._met(first, deadline)
        self._agree(f"{_NAMES[kind]} {op} {root} of {first.numel()} {first.dtype}", deadline)
        flat = [tensor.detach().view(-1) for tensor in tensors]
        with torch.no_grad(), self._guard.watching(deadline):
            try:
                name = {"product": "prod"}.get(op, op)
                self._ways[kind](workspaces, flat[: len(inputs)], flat[len(inputs) :], root=root, op=name)
                synchronize(first)
            except BaseException:
                self._whole.abort("a call of a member has failed")
                self._end_waits()
                raise
        if int(workspaces.stop):
            raise self._failed(_NAMES[kind])

    def close(self) -> None:
        """When no call runs. Others may still have this member's workspace open: it stays until they have closed it."""
        self._guard.close()
        for mapping in self._mappings:
            mapping.close()
        if self._buffer is not None and self._engine.is_open:
            self._buffer.drop()
        self._mappings, self._buffer, self._workspaces = [], None, None
        self._refusal = "the group is closed"

    # --- how the members meet

    def _met(self, like: torch.Tensor, deadline: float) -> Workspaces:
        """The workspaces, on the GPU of the first tensor that was given."""
        if self._workspaces is None and not self._refusal:
            try:
                self._meet(like, deadline)
            except BaseException:
                self._whole.abort("a member did not finish meeting the others")
                raise
        if self._workspaces is None:
            raise ConfigError(f"tensors on GPUs cannot be used in this group: {self._refusal}; {INSTEAD}")
        if self._workspaces.own.device != like.device:
            raise ConfigError(
                f"a tensor is on {like.device}, but this member's workspace for the group on "
                f"{self._workspaces.own.device}: use one GPU a member"
            )
        return self._workspaces

    def _meet(self, like: torch.Tensor, deadline: float) -> None:
        """All members together: each offers its workspace, each opens those of the others, and all go by the result."""
        own, offer = self._offer(like)
        offers = self._exchange(offer, deadline)
        why = self._first_refusal(offers)
        addresses: tuple[int, ...] = ()
        if not why:
            addresses, problem = self._opened(own, [each["handle"] for each in offers], like, deadline)
            why = self._first_refusal(self._exchange({"why": problem}, deadline))
        if why or own is None:
            self._refusal = why
            return
        stop = like.new_zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        room = min(each["room"] for each in offers)
        self._one_shot_bytes = offers[0]["one_shot"]
        self._workspaces = Workspaces(self._whole.rank, own[: SIGNAL_BYTES + room], addresses, stop)

    def _offer(self, like: torch.Tensor) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """This member's workspace, and what the others need of it; or why there is none."""
        if self._whole.size > MOST_RANKS:
            return None, {"why": f"the group has {self._whole.size} members, and kernels take {MOST_RANKS}"}
        if native("peer_collective", like.device) is None:
            return None, {"why": "the package was built without kernels for its GPU"}
        room = int(config.get("collective_device_bytes")) // _ALIGNMENT * _ALIGNMENT
        try:
            own = like.new_zeros(SIGNAL_BYTES + room, dtype=torch.uint8)
            self._buffer = RDMABuffer(own, engine=self._engine)
        except Exception as error:  # whatever it is, the others wait to hear of it
            return None, {"why": str(error) or type(error).__name__}
        handle = self._buffer.to_bytes().decode()
        one_shot = int(config.get("collective_one_shot_bytes"))
        return own, {"why": "", "handle": handle, "room": room, "one_shot": one_shot}

    def _opened(
        self, own: torch.Tensor | None, handles: Sequence[str], like: torch.Tensor, deadline: float
    ) -> tuple[tuple[int, ...], str]:
        """The addresses of all workspaces; or why one cannot be opened here."""
        assert own is not None
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._whole.rank:
                addresses.append(own.data_ptr())
                continue
            try:
                buffer = RDMABuffer.from_bytes(handle.encode(), engine=self._engine)
                left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
                mapping = buffer.map_on_device(like.device.index or 0, timeout=left)
            except RdmaError as error:
                return (), f"the memory of rank {rank}: {error}"
            self._mappings.append(mapping)
            addresses.append(mapping.address)
        return tuple(addresses), ""

    def _first_refusal(self, told: Sequence[dict[str, Any]]) -> str:
        return next((f"rank {rank}: {each['why']}" for rank, each in enumerate(told) if each["why"]), "")

    def _exchange(self, document: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Everybody's, by rank."""
        document["why"] = document["why"][:500]
        told = self._told(json.dumps(document).encode(), _OFFER_BYTES, deadline)
        return [json.loads(each) for each in told]

    def _agree(self, call: str, deadline: float) -> None:
        """ConfigError, on all members, where not all are about to do the same."""
        told = [each.decode().rstrip() for each in self._told(call.encode(), _CALL_BYTES, deadline)]
        for rank, other in enumerate(told):
            if other != told[0]:
                raise ConfigError(f"rank 0 calls {told[0]}, but rank {rank} {other}: all members must call the same")

    def _told(self, text: bytes, size: int, deadline: float) -> list[bytes]:
        if len(text) > size:
            raise ConfigError(f"a member tells of {len(text)} bytes, where {size} are the most: {text[:200]!r}")
        mine, rows = bytearray(text.ljust(size)), [bytearray(size) for _ in range(self._whole.size)]
        left = -1.0 if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        self._whole.run(core.ALL_GATHER, [_block(mine)], [_block(row) for row in rows], timeout=left)
        return [bytes(row) for row in rows]

    # --- how it ends early

    def _end_waits(self) -> None:
        """Ends the waits of this member's kernels: on the guard's thread, or in a call that has failed."""
        if self._workspaces is not None:
            self._workspaces.stop.fill_(1)

    def _failed(self, name: str) -> Exception:
        """Why the waits were ended: a member was lost, or the deadline has passed, which all learn of."""
        if (failure := self._whole.failure) is None:
            self._whole.abort(f"{name} of tensors on GPUs did not end in time")
            return TransferTimeout(f"{name}: the kernels on the members' GPUs did not end in time", operation=name)
        return failure

    # --- the ways: parts that the workspaces have room for

    def _all_reduce(self, workspaces: Workspaces, inputs: Tensors, outputs: Tensors, *, root: int, op: str) -> None:
        given, out = inputs[0], outputs[0]
        for begin, end in _parts(given, workspaces.room):
            count = end - begin
            workspaces.data(given.dtype, count).copy_(given[begin:end])
            small = count * given.element_size() <= self._one_shot_bytes or self._whole.size <= 2
            with _aligned(out[begin:end]) as to:
                peer_collective("one_shot" if small else "two_shot", to, workspaces, op)

    def _reduce(self, workspaces: Workspaces, inputs: Tensors, outputs: Tensors, *, root: int, op: str) -> None:
        to = outputs or [torch.empty_like(inputs[0])]
        self._all_reduce(workspaces, inputs, to, root=root, op=op)

    def _reduce_scatter(self, workspaces: Workspaces, inputs: Tensors, outputs: Tensors, *, root: int, op: str) -> None:
        out, size = outputs[0], self._whole.size
        for begin, end in _parts(out, workspaces.room // size):
            data = workspaces.data(out.dtype, size * (end - begin)).view(size, -1)
            for rank, given in enumerate(inputs):
                data[rank].copy_(given[begin:end])
            with _aligned(out[begin:end]) as to:
                peer_collective("reduce_scatter", to, workspaces, op)

    def _all_gather(self, workspaces: Workspaces, inputs: Tensors, outputs: Tensors, *, root: int, op: str) -> None:
        given, *outs = (_as_computed(each) for each in (inputs[0], *outputs))
        for begin, end in _parts(given, workspaces.room):
            workspaces.data(given.dtype, end - begin).copy_(given[begin:end])
            gathered = given.new_empty(len(outs) * (end - begin))
            peer_collective("all_gather", gathered, workspaces)
            for out, part in zip(outs, gathered.view(len(outs), -1), strict=True):
                out[begin:end].copy_(part)

    def _broadcast(self, workspaces: Workspaces, inputs: Tensors, outputs: Tensors, *, root: int, op: str) -> None:
        """By an all_gather, of which only the root's part is kept: for what happens once."""
        given, size = _as_computed((*inputs, *outputs)[0]), self._whole.size
        for begin, end in _parts(given, workspaces.room):
            workspaces.data(given.dtype, end - begin).copy_(given[begin:end])
            gathered = given.new_empty(size * (end - begin))
            peer_collective("all_gather", gathered, workspaces)
            if outputs:
                given[begin:end].copy_(gathered.view(size, -1)[root])


class _aligned:
    """A place that kernels can write to: the tensor itself, or one whose values become the tensor's."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out
        self._place = out if out.data_ptr() % _ALIGNMENT == 0 else torch.empty_like(out)

    def __enter__(self) -> torch.Tensor:
        return self._place

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._place is not self._out:
            self._out.copy_(self._place)


def _parts(flat: torch.Tensor, room: int) -> Iterator[tuple[int, int]]:
    """Begins and ends of parts of at most `room` bytes; each begins as aligned as the first."""
    most = max(1, room // _ALIGNMENT * _ALIGNMENT // flat.element_size())
    for begin in range(0, flat.numel(), most):
        yield begin, min(flat.numel(), begin + most)


def _as_computed(flat: torch.Tensor) -> torch.Tensor:
    """The same bytes as a dtype that kernels know."""
    return flat if flat.dtype in COMPUTED else flat.view(torch.uint8)


def _block(memory: bytearray) -> core.Block:
    described = memory_of(memory, "memory")
    return described.address, described.view.nbytes
