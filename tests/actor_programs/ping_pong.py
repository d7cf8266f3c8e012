"""Two meshes that call each other through references they were given; results come back in order.

python ping_pong.py [package root: monarch | monarch_rdma]
"""

import importlib
import os
import sys

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
Actor, endpoint, current_rank, current_size, this_host = (
    actor.Actor,
    actor.endpoint,
    actor.current_rank,
    actor.current_size,
    actor.this_host,
)


class Player(Actor):
    def __init__(self, name: str):
        self.name = name
        self.heard: list = []
        self.other = None

    @endpoint
    async def meet(self, other) -> str:
        self.other = other
        return f"{self.name}{current_rank().rank} of {current_size()}"

    @endpoint
    async def serve(self, ball: int) -> list:
        replies = []
        for i in range(3):
            replies.append(await self.other.hit.call_one(ball + i))
        return replies

    @endpoint
    async def hit(self, ball: int) -> str:
        self.heard.append(ball)
        return f"{self.name} returns {ball}"

    @endpoint
    async def history(self) -> list:
        return self.heard


def main() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    ping, pong = procs.spawn("ping", Player, "ping"), procs.spawn("pong", Player, "pong")
    for point, text in ping.meet.call(pong.slice(gpus=1)).get().items():
        print(point, text)
    print([v for v in pong.meet.call(ping.slice(gpus=0)).get().values()])
    for point, replies in ping.serve.call(10).get():
        print(point["gpus"], point.rank, point.size("gpus"), replies)
    print(pong.slice(gpus=0).serve.call_one(20).get())
    heard = pong.history.call().get()
    print(sorted(heard.item(gpus=1)), heard.item(gpus=0), ping.slice(gpus=0).history.call_one().get())
    futures = [pong.slice(gpus=0).hit.call_one(i) for i in range(100)]
    print([f.get() for f in futures][-1], pong.slice(gpus=0).history.call_one().get() == list(range(100)))
    pong.hit.broadcast(-1)
    print([h[-1] for h in pong.history.call().get().values()])
    print(sorted(f.get()[-1] for f in pong.history.stream()), pong.history.choose().get()[-1])
    procs.stop().get()


if __name__ == "__main__":
    main()
