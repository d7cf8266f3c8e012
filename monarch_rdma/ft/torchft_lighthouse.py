"""TorchFT's lighthouse as an actor: its server runs in the actor's process. Needs package torchft (extra `ft`)."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from ..actor import Actor, endpoint
from ..rdma import default_engine
from ..supervision.membership import MembershipOptions

__all__ = ["TorchFTCoordination", "TorchFTLighthouse"]

_TICK = 50  # milliseconds between two looks whether a quorum can be formed


class TorchFTCoordination(NamedTuple):
    """`lighthouse`: its address, http://host:port. `minimum`: of replicas in a quorum."""

    lighthouse: str
    minimum: int


class TorchFTLighthouse(Actor):
    """Takes the place of a Lighthouse. `join_timeout`: seconds that a quorum waits for a replica that lives and has not
    asked for it: longer than a round. `address`: of a lighthouse that runs already; None starts one.
    """

    def __init__(self, options: MembershipOptions, join_timeout: float, address: str | None = None) -> None:
        self._minimum, self._address, self._server = options.minimum, address, None
        if address is None:
            from torchft.coordination import LighthouseServer

            host = urlsplit(default_engine().address).hostname or "127.0.0.1"
            host = f"[{host}]" if ":" in host else host
            self._server = LighthouseServer(
                bind=f"{host}:0", min_replicas=options.minimum, join_timeout_ms=round(join_timeout * 1e3),
                quorum_tick_ms=_TICK, heartbeat_timeout_ms=round(options.timeout * 1e3),
            )  # fmt: skip
            self._address = f"http://{host}:{self._server.address().rpartition(':')[2]}"

    @endpoint
    def coordination(self) -> TorchFTCoordination:
        assert self._address is not None
        return TorchFTCoordination(self._address, self._minimum)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self._server is not None:
            self._server.shutdown()
