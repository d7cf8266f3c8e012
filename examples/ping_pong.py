"""Two actors in two processes play ping-pong: they call each other, and this program only starts the game.

python examples/ping_pong.py
"""

from __future__ import annotations

import sys
import time

from monarch_rdma.actor import Actor, ActorMesh, endpoint, this_host

ROUNDS = 2000


class Player(Actor):
    def __init__(self) -> None:
        self.hits = 0

    @endpoint
    def hit(self, ball: int) -> int:
        self.hits += 1
        return ball + 1

    @endpoint
    def play(self, opponent: ActorMesh[Player], rounds: int) -> int:
        ball = 0
        for _ in range(rounds):
            ball = opponent.hit.call_one(ball).get()  # from process to process
        return ball

    @endpoint
    def score(self) -> int:
        return self.hits


def main() -> int:
    with this_host().spawn_procs({"side": 2}) as procs:  # the processes end with the block
        ping = procs.slice(side=0).spawn("ping", Player)
        pong = procs.slice(side=1).spawn("pong", Player)
        began = time.perf_counter()
        ball = ping.play.call_one(pong, ROUNDS).get()  # a mesh is an argument like any other
        seconds = time.perf_counter() - began
        print(f"the ball came back {ball} times, after {seconds / ROUNDS * 1e6:.0f} us each")
        hits = pong.score.call_one().get()
    return int(hits != ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
