"""Checkpoints of TorchFT over one-sided reads: `torchft.Manager(checkpoint_transport=OneSidedTransport(), ...)`.

A replica that is behind reads the state out of a copy that the source keeps, while the source trains on. The copy is
made part by part, and a part is read while the next one is copied. Needs package torchft (extra `ft`); nothing else of
this library imports it.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

from torch import Tensor
from torchft.checkpointing import CheckpointTransport

from ..errors import ConfigError, TransferTimeout, VersionChanged
from ..rdma import Engine, default_engine
from ..rdma.names import look_up, publish, unpublish
from .healing import OfferedState, StateOffer, fetch_state, put_together, taken_apart

__all__ = ["OneSidedTransport", "Received"]

T = TypeVar("T")
_PART = 64 << 20  # bytes of tensors that are offered together
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between looks for what is not offered yet


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
    parts: tuple[StateOffer, ...]


class OneSidedTransport(CheckpointTransport[T]):  # type: ignore[misc, unused-ignore]  # without torchft: Any
    """One for each Manager. All processes of the job share its secret (option secret_file), since states are pickled.

    `last` says how the last checkpoint came.
    """

    def __init__(self, *, engine: Engine | None = None) -> None:
        self._engine = engine or default_engine()
        self._name = f"ft/checkpoint/{uuid.uuid4().hex}"
        self._parts: list[OfferedState] = []
        self._num_sent = 0
        self.last: Received | None = None

    def metadata(self) -> str:
        """Where others find what this process offers: the same at all times."""
        return f"{self._engine.address} {self._name}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copies the state and offers it; returns when all is copied, perhaps before it is read. The copy's memory is
        kept for later.
        """
        tensors, structure = taken_apart(state_dict, as_local=True)
        parts = _parts_of(tensors)
        self._num_sent += 1
        self._publish(_Checkpoint(self._num_sent, step, structure, len(parts), ()))
        offers: list[StateOffer] = []
        for number, part in enumerate(parts):
            offers.append(self._offered(number, part))
            self._publish(_Checkpoint(self._num_sent, step, structure, len(parts), tuple(offers)))
        for left_over in self._parts[len(parts) :]:
            left_over.close()
        del self._parts[len(parts) :]

    def _offered(self, number: int, part: Mapping[str, Tensor]) -> StateOffer:
        if number < len(self._parts) and self._parts[number].renew(part, self._num_sent):
            return self._parts[number].offer
        if number < len(self._parts):
            self._parts[number].close()
            del self._parts[number]
        self._parts.insert(number, OfferedState(part, version=self._num_sent, engine=self._engine))
        return self._parts[number].offer

    def _publish(self, checkpoint: _Checkpoint) -> None:
        publish(self._engine, self._name, pickle.dumps(checkpoint))

    def disallow_checkpoint(self) -> None:
        """Nothing to wait for: readers have the copy, and what the training changes is not that."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Waits until the source offers this step, and reads it. DTensors come as this rank's part, on the CPU.

        Raises TransferTimeout, PeerLost, ProtocolError where what came is not what was offered.
        """
        source = _Source(self._engine, metadata, step, time.monotonic() + timeout.total_seconds(), timeout)
        begin = time.monotonic()
        while True:
            try:
                state, nbytes, verified = source.read()
            except VersionChanged:
                continue  # it was offered anew meanwhile
            self.last = Received(nbytes, verified, time.monotonic() - begin)
            return cast(T, state)

    def shutdown(self, wait: bool = True) -> None:
        """Ends what is offered."""
        if self._num_sent:
            unpublish(self._engine, self._name)
            self._num_sent = 0
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

    def read(self) -> tuple[object, int, int]:
        """The state, its bytes, and how many of them were verified."""
        tensors: dict[str, Tensor] = {}
        verified = have = number = 0
        while True:
            checkpoint = self._wait(have)
            if have and checkpoint.number != number:
                raise VersionChanged("the source has sent another checkpoint of this step", operation="read")
            number = checkpoint.number
            for offer in checkpoint.parts[have:]:
                healed = fetch_state(offer, timeout=self._left(), engine=self.engine)
                tensors |= healed.state
                verified += healed.verified
            have = len(checkpoint.parts)
            if have == checkpoint.count:
                state = put_together(checkpoint.structure, tensors)
                return state, sum(tensor.nbytes for tensor in tensors.values()), verified

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


def _parts_of(tensors: Mapping[str, Tensor]) -> Sequence[dict[str, Tensor]]:
    """In order, each of about _PART bytes."""
    parts: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if room <= 0:
            parts.append({})
            room = _PART
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts
