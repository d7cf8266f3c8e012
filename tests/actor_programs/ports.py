"""Ports: replies out of order, one request answered by many, ranked receivers, exceptions through a port.

python ports.py [package root: monarch | monarch_rdma]
"""

import importlib
import os
import sys

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
Actor, endpoint, current_rank, this_host, Channel = (
    actor.Actor,
    actor.endpoint,
    actor.current_rank,
    actor.this_host,
    actor.Channel,
)


class Batcher(Actor):
    """Answers a whole batch once it is full, last come first."""

    def __init__(self, size: int):
        self.size, self.waiting, self.seen = size, [], []

    @endpoint(explicit_response_port=True)
    async def ask(self, port, question: int) -> None:
        self.waiting.append((port, question))
        if len(self.waiting) == self.size:
            while self.waiting:
                waiting, asked = self.waiting.pop()
                self.seen.append(asked)
                waiting.send(asked * asked)

    @endpoint
    async def order(self) -> list:
        return self.seen

    @endpoint(explicit_response_port=True)
    async def refuse(self, port, why: str) -> None:
        port.exception(LookupError(why))


class Source(Actor):
    @endpoint
    async def pour(self, port, n: int) -> str:
        for i in range(n):
            port.send((current_rank().rank, i))
        return "poured"

    @endpoint
    async def fail_through(self, port) -> None:
        port.exception(ValueError("through the port"))

    @endpoint
    async def value(self) -> int:
        return 100 + current_rank().rank


class SyncSource(Actor):
    @endpoint
    def pour(self, port, n: int) -> int:
        for i in range(n):
            port.send(i)
        return n

    @endpoint(explicit_response_port=True)
    def later(self, port, x: int) -> None:
        port.send({"x": x})


def main() -> None:
    batcher = this_host().spawn_procs().spawn("batcher", Batcher, 4)
    futures = [batcher.ask.call_one(i) for i in range(4)]
    print([f.get() for f in futures], batcher.order.call_one().get())
    try:
        batcher.refuse.call_one("not today").get()
    except LookupError as error:
        print(type(error).__name__, error)

    procs = this_host().spawn_procs({"n": 3})
    sources = procs.spawn("sources", Source)
    port, receiver = Channel.open()
    sources.pour.broadcast(port, 2)
    got = [receiver.recv().get(timeout=20) for _ in range(6)]
    print(sorted(got), all([i for r, i in got if r == rank] == [0, 1] for rank in range(3)))
    print(sources.pour.call(port, 0).get().values())
    sources.slice(n=1).fail_through.broadcast(port)
    try:
        receiver.recv().get(timeout=20)
    except ValueError as error:
        print(type(error).__name__, error)

    ranked_port, ranked = Channel.open_ranked()
    actor.send(sources.value, (), {}, port=ranked_port)
    print(sorted(ranked.recv().get(timeout=20) for _ in range(3)))

    once, once_receiver = Channel.open(once=True)
    sources.slice(n=2).pour.broadcast(once, 1)
    print(once_receiver.recv().get(timeout=20))

    sync = procs.spawn("sync", SyncSource)
    port, receiver = Channel.open()
    print(sync.slice(n=0).pour.call_one(port, 3).get(), [receiver.recv().get(timeout=20) for _ in range(3)])
    print(sync.later.call(5).get().values(), sync.slice(n=0).later.call_one(6).get())
    try:
        receiver.recv().get(timeout=0.05)
    except TimeoutError:
        print("nothing there")
    total = actor.Accumulator(sources.value, 0, lambda a, b: a + b)
    print(total.accumulate().get())


if __name__ == "__main__":
    main()
