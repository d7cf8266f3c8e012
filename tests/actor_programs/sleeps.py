"""A client that sleeps while an actor of its fails."""

from __future__ import annotations

import time

from monarch_rdma.actor import Actor, endpoint, this_host


class Clumsy(Actor):
    @endpoint
    def stumble(self) -> None:
        raise RuntimeError("stumbled")


if __name__ == "__main__":
    this_host().spawn_procs().spawn("clumsy", Clumsy).stumble.broadcast()
    time.sleep(600)
