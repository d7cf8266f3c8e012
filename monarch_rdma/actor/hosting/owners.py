"""The processes that own what a host agent has started: what they own ends with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..runtime.message import Frame
    from ..runtime.proc import Proc

__all__ = ["Owners"]


class Owners:
    """Watched while they own something here, by heartbeats and by the end of their connection."""

    def __init__(self, proc: Proc, on_lost: Callable[[str, str], object]) -> None:
        """`on_lost(address, why)` is called on a thread of its own."""
        self._proc = proc
        self._on_lost = on_lost
        self._number = proc.register(self)

    def watch(self, address: str) -> None:
        """Idempotent."""
        self._proc.expect(self._number, address, standing=True)

    def unwatch(self, address: str) -> None:
        self._proc.fulfil(self._number, address)

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        if address != self._proc.address:  # ours: we end ourselves
            threading.Thread(
                target=self._on_lost, args=(address, str(error)), name="monarch_rdma-owner-lost", daemon=True
            ).start()
