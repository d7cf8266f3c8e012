"""Checkpoints of TorchFT over one-sided reads: `torchft.Manager(checkpoint_transport=OneSidedTransport(), ...)`.

A replica that is behind reads the state out of the memory of one that is not: where it is, which the source does not
change until it has been read, or out of a copy, while the source trains on. The copy is made part by part, and one part
is read while the next one is copied. Needs package torchft (extra `ft`); nothing else of this library imports it.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torchft.checkpointing import CheckpointTransport

from ..errors import ConfigError, TransferTimeout, VersionChanged
from ..rdma import Engine, RDMAAction, RDMABuffer, default_engine, shared_memory
from ..rdma.names import look_up, publish, unpublish
from .healing import FetchedState, OfferedState, StateOffer, fetch_state, put_together, taken_apart

__all__ = ["OneSidedTransport", "Received"]

T = TypeVar("T")
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # and dtypes
_FIRST_PART, _PART = 4 << 20, 64 << 20  # bytes of tensors that are offered together: soon, then with less to do
_AT_ONCE = 2  # parts that are read, so that one moves while another one is checked
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.005  # seconds between looks for what is not offered yet


@dataclass(frozen=True)
class Received:
    """How a checkpoint came. `verified`: of its bytes, those whose checksums were compared."""

    bytes: int
    verified: int
    seconds: float


@dataclass(frozen=True)
class _Checkpoint:
    """What is offered of a step so far: `parts` of so many. `number`: of the checkpoints that its source has sent."""

    number: int
    step: int
    structure: bytes
    count: int
    done: bytes  # a word that each reader adds 1 to
    parts: tuple[tuple[Shapes, StateOffer], ...]


class OneSidedTransport(CheckpointTransport[T]):  # type: ignore[misc, unused-ignore]  # without torchft: Any
    """One for each Manager. All processes of the job share its secret (option secret_file), since states are pickled.

    `last` says how the last checkpoint came.
    """

    def __init__(
        self,
        *,
        memory: str = "copy",
        state_dict: Callable[[], T] | None = None,
        verify: bool = True,
        patience: float = 10.0,
        engine: Engine | None = None,
    ) -> None:
        """`memory`: "copy", where the source trains on at once; or "in_place", where it waits before its next update
        until all have read, for at most `patience` seconds: less work, and no memory. `state_dict`: gives a state whose
        tensors are written in place where they are alike, else new ones are made. `verify`: checksums are made and
        compared; the same for all.
        """
        if memory not in ("copy", "in_place"):
            raise ConfigError(f"memory is {memory!r}, but must be copy or in_place")
        self._memory, self._state_dict, self._verify, self._patience = memory, state_dict, verify, patience
        self._engine = engine or default_engine()
        self._done = np.frombuffer(shared_memory(8, engine=self._engine), dtype=np.int64)
        self._done_word = RDMABuffer(self._done, engine=self._engine)
        self._num_readers = 0
        self._is_over = False
        self._name = f"ft/checkpoint/{uuid.uuid4().hex}"
        self._parts: list[OfferedState] = []
        self._num_sent = 0
        self.last: Received | None = None

    def metadata(self) -> str:
        """Where others find what this process offers: the same at all times."""
        return f"{self._engine.address} {self._name}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offers the state; returns before it is read. Of a copy the memory is kept for later."""
        if self._memory == "in_place":
            self._withdraw()
        tensors, structure = taken_apart(state_dict, as_local=True)
        parts = _parts_of(tensors)
        self._num_sent += 1
        self._done[0], self._num_readers = 0, len(dst_ranks)
        checkpoint = _Checkpoint(self._num_sent, step, structure, len(parts), self._done_word.to_bytes(), ())
        self._publish(checkpoint)
        for number, part in enumerate(parts):
            shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()}
            checkpoint = replace(checkpoint, parts=(*checkpoint.parts, (shapes, self._offered(number, part))))
            self._publish(checkpoint)
        for left_over in self._parts[len(parts) :]:
            left_over.close()
        del self._parts[len(parts) :]

    def _offered(self, number: int, part: Mapping[str, Tensor]) -> StateOffer:
        if number < len(self._parts) and self._parts[number].renew(part, self._num_sent):
            return self._parts[number].offer
        if number < len(self._parts):
            self._parts[number].close()
            del self._parts[number]
        options: dict[str, Any] = {"version": self._num_sent, "memory": self._memory, "checksums": self._verify}
        self._parts.insert(number, OfferedState(part, engine=self._engine, **options))
        return self._parts[number].offer

    def _publish(self, checkpoint: _Checkpoint) -> None:
        publish(self._engine, self._name, pickle.dumps(checkpoint))

    def disallow_checkpoint(self) -> None:
        """Returns when the training may change the state: with a copy at once, else when all have read it."""
        if self._memory == "copy" or not self._parts:
            return
        deadline = time.monotonic() + self._patience
        while self._done[0] < self._num_readers and time.monotonic() < deadline:
            time.sleep(_FIRST_PAUSE)
        self._withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Waits until the source offers this step, and reads it. DTensors come as this rank's part, on the CPU.

        Raises TransferTimeout, PeerLost, ProtocolError where what came is not what was offered.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        source = _Source(self._engine, metadata, step, deadline, timeout, self._verify)
        into = taken_apart(self._state_dict(), as_local=True)[0] if self._state_dict is not None else {}
        begin = time.monotonic()
        while True:
            try:
                state, nbytes, verified = source.read(into)
            except VersionChanged:
                continue  # it was offered anew meanwhile
            self.last = Received(nbytes, verified, time.monotonic() - begin)
            return cast(T, state)

    def shutdown(self, wait: bool = True) -> None:
        """Ends what is offered."""
        if self._is_over:
            return
        self._is_over = True
        if self._num_sent:
            unpublish(self._engine, self._name)
        self._withdraw()
        self._done_word.drop().get()

    def _withdraw(self) -> None:
        for part in self._parts:
            part.close()
        self._parts.clear()


@dataclass(frozen=True)
class _Source:
    """A process that offers a step, or is about to."""

    engine: Engine
    metadata: str
    step: int
    deadline: float
    timeout: timedelta
    verify: bool

    def read(self, into: Mapping[str, Tensor]) -> tuple[object, int, int]:
        """The state, its bytes, and how many of them were verified. Parts that are like those of `into` go there."""
        pool = ThreadPoolExecutor(_AT_ONCE, "monarch_rdma-checkpoint")
        try:
            checkpoint, parts = self._parts(into, pool)
            found = [part.result() for part in parts]
        finally:
            pool.shutdown(cancel_futures=True)
        word = RDMABuffer.from_bytes(checkpoint.done, engine=self.engine)
        RDMAAction().fetch_add(word, np.zeros(1, dtype=np.int64), 1).submit().get(self._left())
        tensors = {name: tensor for each in found for name, tensor in each.state.items()}
        state = put_together(checkpoint.structure, tensors)
        return state, sum(tensor.nbytes for tensor in tensors.values()), sum(each.verified for each in found)

    def _parts(self, into: Mapping[str, Tensor], pool: Executor) -> tuple[_Checkpoint, list[Future[FetchedState]]]:
        """All of them, each on its way as soon as it is offered."""
        parts: list[Future[FetchedState]] = []
        number = 0
        while True:
            checkpoint = self._wait(len(parts))
            if parts and checkpoint.number != number:
                raise VersionChanged("the source has sent another checkpoint of this step", operation="read")
            number = checkpoint.number
            parts += [
                pool.submit(self._fetch, offer, _alike(into, shapes))
                for shapes, offer in checkpoint.parts[len(parts) :]
            ]
            if len(parts) == checkpoint.count:
                return checkpoint, parts

    def _fetch(self, offer: StateOffer, into: dict[str, Tensor] | None) -> FetchedState:
        return fetch_state(offer, into=into, verify=self.verify, timeout=self._left(), engine=self.engine)

    def _wait(self, have: int) -> _Checkpoint:
        """Until there are more parts, or all."""
        pause = _FIRST_PAUSE
        while True:
            found = self._look()
            if found is not None and (len(found.parts) > have or found.count == len(found.parts)):
                return found
            self._left()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self) -> _Checkpoint | None:
        address, _, name = self.metadata.partition(" ")
        try:
            checkpoint = cast(_Checkpoint, pickle.loads(look_up(self.engine, address, name, self._left())))
        except (ConfigError, TransferTimeout):
            self._left()
            return None  # nothing is offered yet
        return checkpoint if checkpoint.step == self.step else None

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left > 0:
            return left
        address, seconds = self.metadata.partition(" ")[0], self.timeout.total_seconds()
        raise TransferTimeout(
            f"timed out: {address} has not offered all of step {self.step} in {seconds} s",
            peer=address,
            operation="read",
        )


def _alike(into: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor] | None:
    """Those of `into` with these names, if all of them can take what is offered."""
    wanted = {}
    for name, (shape, dtype) in shapes.items():
        tensor = into.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
            return None
        wanted[name] = tensor
    return wanted


def _parts_of(tensors: Mapping[str, Tensor]) -> Sequence[dict[str, Tensor]]:
    """In order, each of about twice as many bytes as the one before, up to _PART."""
    parts: list[dict[str, Tensor]] = []
    room, size = 0, min(_FIRST_PART, _PART)
    for name, tensor in tensors.items():
        if room <= 0:
            parts.append({})
            room, size = size, min(2 * size, _PART)
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts
