"""Actors that spawn meshes of their own, give references away, use controllers, and look at where they are.

python nested.py [package root: monarch | monarch_rdma]
"""

import importlib
import os
import sys

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
Actor, endpoint, current_rank, current_size, context, this_host, this_proc = (
    actor.Actor,
    actor.endpoint,
    actor.current_rank,
    actor.current_size,
    actor.context,
    actor.this_host,
    actor.this_proc,
)


class Leaf(Actor):
    def __init__(self, base: int = 0):
        self.base, self.born = base, dict(current_rank())

    @endpoint
    def where(self) -> tuple:
        me = context().actor_instance
        return repr(current_rank()), current_size(), repr(me.rank), me.name, self.born

    @endpoint
    def add(self, x: int) -> int:
        return self.base + x + current_rank().rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other, x: int) -> list:
        return list(other.add.call(x).get().values())


class Branch(Actor):
    def __init__(self, width: int):
        self.width = width
        self.leaves = this_host().spawn_procs({"w": width}).spawn("leaves", Leaf, 1000 * (current_rank().rank + 1))

    @endpoint
    async def mesh(self):
        return self.leaves

    @endpoint
    async def total(self, x: int) -> int:
        return sum((await self.leaves.add.call(x)).values())

    @endpoint
    async def beside(self) -> bool:
        local = this_proc().spawn("local", Leaf, 5)
        return await local.pid.call_one() == os.getpid() and local.extent.nelements == 1

    @endpoint
    async def count(self) -> int:
        counter = await actor.get_or_spawn_controller("counter", Counter)
        return await counter.next.call_one()


class Counter(Actor):
    def __init__(self):
        self.n = 0

    @endpoint
    async def next(self) -> int:
        self.n += 1
        return self.n


def main() -> None:
    procs = this_host().spawn_procs({"a": 2, "b": 2})
    leaves = procs.spawn("leaf", Leaf, 1)
    for point, (rank, size, own, name, born) in leaves.where.call().get().items():
        print(point, rank, size, own, name, born)
    print([(dict(p), v) for p, v in leaves.slice(a=1).where.call().get()])
    print(leaves.slice(a=1, b=0).where.call_one().get())
    print(
        leaves.slice(b=slice(1, 2)).where.call().get().extent,
        leaves.extent,
        leaves.sizes,
        len(leaves),
        leaves.size("a"),
    )
    flat = leaves.flatten("rank")
    print(
        flat.extent,
        flat.add.call(0).get().values(),
        leaves.rename(a="x").extent,
        flat.split(rank=("p", "q"), p=2).extent,
    )
    print(leaves.slice(a=0, b=0).ask.call_one(leaves.slice(a=1), 10).get())
    print([(dict(p), v) for p, v in leaves.slice(a=0, b=0).ask.call(leaves.slice(b=1), 10).get()])

    branches = this_host().spawn_procs({"n": 2}).spawn("branch", Branch, 3)
    print(branches.total.call(0).get().values(), branches.beside.call().get().values())
    mesh = branches.slice(n=1).mesh.call_one().get()
    print(mesh.extent, mesh.add.call(7).get().values(), mesh.slice(w=2).add.call_one(7).get())
    print(sorted(branches.count.call().get().values()))
    counter = actor.get_or_spawn_controller("counter", Counter).get()
    print(counter.next.call_one().get(), counter.extent)
    on_two = procs.slice(a=1).spawn("late", Leaf, 0)
    print(
        on_two.extent,
        on_two.add.call(0).get().values(),
        len(set(procs.slice(a=1).spawn("p", Leaf).pid.call().get().values())),
    )
    seen = leaves.add.call(100).get()
    print(
        [(dict(p), v) for p, v in seen],
        seen.slice(a=1).values(),
        seen.item(a=1, b=1),
        [p.rank for p, _ in seen.slice(b=1).items()],
    )


if __name__ == "__main__":
    main()
