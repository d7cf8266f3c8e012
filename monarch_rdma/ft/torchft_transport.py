"""Checkpoints of TorchFT over one-sided reads: `torchft.Manager(checkpoint_transport=OneSidedTransport(), ...)`.

A replica that is behind reads the state out of a copy that the source keeps, while the source trains on. Needs package
torchft (extra `ft`); nothing else of this library imports it.
"""

from __future__ import annotations

import pickle
import time
import uuid
from datetime import timedelta
from typing import TypeVar, cast

from torchft.checkpointing import CheckpointTransport

from ..errors import ConfigError, TransferTimeout, VersionChanged
from ..rdma import Engine, default_engine
from ..rdma.names import look_up, publish, unpublish
from .healing import FetchedState, OfferedState, StateOffer, fetch_state

__all__ = ["OneSidedTransport"]

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between looks for a state that is not offered yet


class OneSidedTransport(CheckpointTransport[T]):  # type: ignore[misc, unused-ignore]  # without torchft: Any
    """One for each Manager. All processes of the job share its secret (option secret_file), since states are pickled.

    `last` says how the last state came: bytes, seconds, how much was verified.
    """

    def __init__(self, *, engine: Engine | None = None) -> None:
        self._engine = engine or default_engine()
        self._name = f"ft/checkpoint/{uuid.uuid4().hex}"
        self._offered: OfferedState | None = None
        self._is_published = False
        self._num_sent = 0
        self.last: FetchedState | None = None

    def metadata(self) -> str:
        """Where others find what this process offers: the same at all times."""
        return f"{self._engine.address} {self._name}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copies the state and offers it; returns before anybody has read it. The copy's memory is kept for later."""
        self._num_sent += 1
        if self._offered is None or not self._offered.renew(state_dict, self._num_sent):
            self._withdraw()
            self._offered = OfferedState(state_dict, version=self._num_sent, as_local=True, engine=self._engine)
        publish(self._engine, self._name, pickle.dumps((step, self._offered.offer)))
        self._is_published = True

    def disallow_checkpoint(self) -> None:
        """Nothing to wait for: readers have the copy, and what the training changes is not that."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Waits until the source offers this step, and reads it. DTensors come as this rank's part, on the CPU.

        Raises TransferTimeout, PeerLost, ProtocolError where what came is not what was offered.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        address, _, name = metadata.partition(" ")
        pause = _FIRST_PAUSE
        while True:
            offer = self._offer_of(address, name, step, deadline)
            if offer is not None:
                try:
                    left = max(0.001, deadline - time.monotonic())
                    self.last = fetch_state(offer, timeout=left, engine=self._engine)
                    return cast(T, self.last.state)
                except VersionChanged:
                    offer = None  # it was renewed meanwhile, perhaps for the same step
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"timed out: {address} has not offered step {step} in {timeout.total_seconds()} s",
                    peer=address,
                    operation="read",
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _offer_of(self, address: str, name: str, step: int, deadline: float) -> StateOffer | None:
        try:
            found = look_up(self._engine, address, name, max(0.001, deadline - time.monotonic()))
        except (ConfigError, TransferTimeout):
            return None  # nothing is offered yet
        offered_step, offer = pickle.loads(found)
        return cast(StateOffer, offer) if offered_step == step else None

    def shutdown(self, wait: bool = True) -> None:
        """Ends what is offered."""
        self._withdraw()

    def _withdraw(self) -> None:
        if self._is_published:
            unpublish(self._engine, self._name)
            self._is_published = False
        if self._offered is not None:
            self._offered.close()
            self._offered = None
