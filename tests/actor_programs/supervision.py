"""An actor that owns workers, hears of each one's failure, goes on with the survivors and replaces the dead.

python supervision.py [package root: monarch | monarch_rdma]
"""

import asyncio
import importlib
import os
import signal
import sys

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
actor = importlib.import_module(ROOT + ".actor")
Actor, endpoint, current_rank, this_host = actor.Actor, actor.endpoint, actor.current_rank, actor.this_host


class Worker(Actor):
    @endpoint
    async def work(self, x: int) -> int:
        return x * 10 + current_rank().rank

    @endpoint
    async def stumble(self) -> None:
        raise RuntimeError("stumbled")

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Manager(Actor):
    def __init__(self, width: int):
        self.width, self.failures = width, []
        self.heard = asyncio.Event()
        self.start()

    def start(self) -> None:
        self.workers = this_host().spawn_procs({"w": self.width}).spawn("workers", Worker)

    def __supervise__(self, failure) -> bool:
        if failure.mesh_name and failure.mesh_name.startswith("workers"):
            self.failures.append(failure)
            self.heard.set()
        return True

    @endpoint
    async def run(self, x: int) -> list:
        return list((await self.workers.work.call(x)).values())

    @endpoint
    async def raises(self) -> tuple:
        try:
            await self.workers.slice(w=0).stumble.call_one()
        except actor.ActorError as error:
            return type(error).__name__, repr(error.exception), len(self.failures)

    @endpoint
    async def stumble_quietly(self, rank: int) -> tuple:
        self.heard.clear()
        self.workers.slice(w=rank).stumble.broadcast()
        await asyncio.wait_for(self.heard.wait(), 30)
        report = self.failures[-1].report()
        return type(self.failures[-1]).__name__, "stumbled" in report, "workers" in report

    @endpoint
    async def kill(self, rank: int) -> tuple:
        self.heard.clear()
        try:
            await self.workers.slice(w=rank).die.call_one()
            outcome = "answered"
        except Exception as error:
            outcome = isinstance(error, RuntimeError), "workers" in str(error)
        await asyncio.wait_for(self.heard.wait(), 30)
        return outcome, len(self.failures)

    @endpoint
    async def survivors(self, ranks: list) -> list:
        return [await self.workers.slice(w=r).work.call_one(r + 1) for r in ranks]

    @endpoint
    async def restart(self) -> None:
        self.start()


def main() -> None:
    manager = this_host().spawn_procs().spawn("manager", Manager, 3)
    print(manager.run.call_one(1).get())
    print(manager.raises.call_one().get(), manager.run.call_one(2).get())
    print(manager.stumble_quietly.call_one(1).get())
    print(manager.survivors.call_one([0, 2]).get())
    manager.restart.call_one().get()
    print(manager.run.call_one(3).get())
    print(manager.kill.call_one(2).get())
    print(manager.survivors.call_one([0, 1]).get())
    manager.restart.call_one().get()
    print(manager.run.call_one(4).get())


if __name__ == "__main__":
    main()
