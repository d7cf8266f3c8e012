"""Programs that a launcher starts once for each rank."""

from __future__ import annotations

WORLD = """
import os
from monarch_rdma.job import from_env
world = from_env(timeout=float(os.environ.get("PATIENCE", "60")))
sizes = dict(world.procs.extent)
print("rank", world.rank, world.size, world.local_rank, world.local_size, sizes, world.launcher, flush=True)
"""
HOLDERS = """
from monarch_rdma.actor import Actor, current_rank, endpoint
from monarch_rdma.rdma import RDMABuffer

class Holder(Actor):
    def __init__(self):
        self.bytes = bytearray([current_rank().rank] * 4)
    @endpoint
    def buffer(self):
        return RDMABuffer(memoryview(self.bytes))
    @endpoint
    def pid(self):
        return os.getpid()

if world.rank == 0:
    holders = world.procs.spawn("holders", Holder)
    pids = list(holders.pid.call().get().values())
    sums = []
    for buffer in holders.buffer.call().get().values():
        out = bytearray(4)
        buffer.read_into(memoryview(out)).get()
        sums.append(sum(out))
    more = world.hosts.spawn_procs().spawn("more", Holder).pid.call().get().values()
    print("sums", *sums, len(set(pids)), os.getpid() in pids, len(more), flush=True)
"""
TOGETHER = """
import pathlib, sys, time
over = pathlib.Path(sys.argv[1])
if world.rank == 0:
    over.touch()
while not over.exists():
    time.sleep(0.01)
"""


def lines_of(ranks: int, shape: str, launcher: str) -> list[str]:
    """What WORLD and HOLDERS print on one host, in order."""
    sums = " ".join(str(4 * rank) for rank in range(ranks))
    worlds = [f"rank {rank} {ranks} {rank} {ranks} {shape} {launcher}" for rank in range(ranks)]
    return [*worlds, f"sums {sums} {ranks} True 1"]
