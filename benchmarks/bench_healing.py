"""A replica heals from a live one on this host: ours beside TorchFT's transports, and beside the bare lane.

python benchmarks/bench_healing.py [--mib 1024] [--rounds 5] [--lanes shm,tcp]

The state is of `--mib` MiB, in tensors of 8 MiB; source and newcomer are processes of one thread each. Contenders take
turns in an order that turns too; a ratio is taken in each round by itself, and the median of these is told, with the
smallest and the largest.

- lane: reads of the same bytes into the same tensors, nothing else
- heal: `fetch_state` into existing tensors, checksums included; the goal is 0.8 of the lane
- transports: send and receive of a checkpoint, from the call of one to the end of the other. Ours makes checksums
  and compares them, of a copy or in place, and does neither where it says "unchecked": in place, without checksums,
  as HTTP and PG (over gloo) do. PG and ours write into existing tensors

"cpu" is what both processes have computed together, which other load on the machine changes less; "first" is that of
the first time, when memory is new.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from monarch_rdma.ft import OfferedState, fetch_state
from monarch_rdma.ft.torchft_transport import OneSidedTransport
from monarch_rdma.rdma import Engine, RDMABuffer, Secret, share

TENSOR = 8 << 20  # bytes
LIMIT = timedelta(seconds=120)
OURS = ("ours, copied", "ours, in place", "ours, unchecked")


def state_of(mib: int, fill: Callable[[int], float]) -> dict[str, Any]:
    count = max(1, (mib << 20) // TENSOR)
    return {"user": {f"w{n}": torch.full((TENSOR // 4096, 1024), fill(n)) for n in range(count)}, "step": 1}


def cpu_seconds() -> float:
    """Of all threads of this process so far."""
    spent = os.times()
    return spent.user + spent.system


class Side:
    """What source and newcomer have in common. Rank 0 is the source."""

    def __init__(self, rank: int, mib: int, lanes: str, secret: Secret, port: int) -> None:
        from torchft.checkpointing import HTTPTransport
        from torchft.checkpointing.pg_transport import PGTransport
        from torchft.process_group import ProcessGroupGloo

        torch.set_num_threads(1)
        self.rank = rank
        self.engine = Engine(secret=secret, lanes=lanes, name=f"side{rank}")
        self.state = state_of(mib, float if rank == 0 else lambda n: -1.0)
        gloo = ProcessGroupGloo(timeout=LIMIT)
        gloo.configure(f"127.0.0.1:{port}/bench", str(rank), rank, 2)
        in_place: Any = lambda: self.state  # noqa: E731
        self.transports: dict[str, Any] = {
            "ours, copied": OneSidedTransport[Any](engine=self.engine, state_dict=in_place),
            "ours, in place": OneSidedTransport[Any](engine=self.engine, state_dict=in_place, memory="in_place"),
            "ours, unchecked": OneSidedTransport[Any](
                engine=self.engine, state_dict=in_place, memory="in_place", verify=False
            ),
            "HTTP": HTTPTransport(timeout=LIMIT, num_chunks=0),
            "PG over gloo": PGTransport(gloo, LIMIT, torch.device("cpu"), state_dict=in_place),
        }
        self.offered: OfferedState | None = None

    def offer(self) -> Any:
        self.offered = OfferedState(self.state, version=1, engine=self.engine)
        shared = [share(tensor, engine=self.engine) for tensor in self.state["user"].values()]
        buffers = [RDMABuffer(tensor, access="read", engine=self.engine) for tensor in shared]
        return self.offered.offer, [buffer.to_bytes() for buffer in buffers]

    def is_right(self, state: dict[str, Any]) -> bool:
        tensors = state["user"].values()
        return all(tensor[0, 0] == n and tensor[-1, -1] == n for n, tensor in enumerate(tensors))

    def clear(self) -> None:
        for tensor in self.state["user"].values():
            tensor.fill_(-1)


def source_process(port: int, fd: int, mib: int, lanes: str) -> None:
    """Answers the newcomer's questions, a line each."""
    from multiprocessing.connection import Connection

    side = Side(0, mib, lanes, Secret.from_fd(int(os.environ["SECRET_FD"])), port)
    line = Connection(fd)
    line.send({name: transport.metadata() for name, transport in side.transports.items()})
    while (question := line.recv()) is not None:
        what, step = question
        if what == "offer":
            line.send(side.offer())
            continue
        line.send("begun")
        begin = cpu_seconds()
        side.transports[what].send_checkpoint([1], step, side.state, LIMIT)
        line.recv()
        side.transports[what].disallow_checkpoint()
        line.send(cpu_seconds() - begin)
    for transport in side.transports.values():
        transport.shutdown(wait=False)
    os._exit(0)  # TorchFT's threads may not end


class Newcomer:
    def __init__(self, mib: int, lanes: str) -> None:
        from multiprocessing import Pipe

        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        secret = Secret.generate()
        secret_fd = secret.to_fd()
        self.line, other = Pipe()
        command = [sys.executable, __file__, "--source", str(store.port), str(other.fileno())]
        self.process = subprocess.Popen(
            [*command, "--mib", str(mib), "--lanes", lanes],
            pass_fds=[secret_fd, other.fileno()],
            env={**os.environ, "SECRET_FD": str(secret_fd), "RUST_LOG": "warn"},
        )
        os.close(secret_fd)
        other.close()
        self._store = store
        self.side = Side(1, mib, lanes, secret, store.port)
        self.where = self.line.recv()
        self.line.send(("offer", 0))
        self.offer, handles = self.line.recv()
        self.step = 0
        buffers = [RDMABuffer.from_bytes(handle, engine=self.side.engine) for handle in handles]
        targets = [leaf for leaf in self.side.state["user"].values()]
        self._reads = [buffer.prepare_read(target, bulk=True) for buffer, target in zip(buffers, targets, strict=True)]
        self.nbytes = sum(target.nbytes for target in targets)

    def lane(self) -> float:
        begin = time.perf_counter()
        for future in [start(120.0) for start in self._reads]:
            future.get()
        return self._checked(begin, self.side.state)

    def heal(self) -> float:
        begin = time.perf_counter()
        fetch_state(self.offer, into=self.side.state, engine=self.side.engine)
        return self._checked(begin, self.side.state)

    def heal_unverified(self) -> float:
        begin = time.perf_counter()
        fetch_state(self.offer, into=self.side.state, verify=False, engine=self.side.engine)
        return self._checked(begin, self.side.state)

    def transport(self, name: str) -> float:
        """From the moment that the source is told to send until the newcomer has everything."""
        self.step += 1
        self.line.send((name, self.step))
        self.line.recv()
        begin = time.perf_counter()
        got = self.side.transports[name].recv_checkpoint(0, self.where[name], self.step, LIMIT)
        seconds = self._checked(begin, got)
        self.line.send("done")
        self.source_cpu = self.line.recv()
        return seconds

    def _checked(self, begin: float, state: Any) -> float:
        seconds = time.perf_counter() - begin
        if not self.side.is_right(state):
            raise SystemExit("the state that came is wrong")
        self.side.clear()
        return seconds

    def close(self) -> None:
        self.line.send(None)
        self.process.wait(60)


def measure(mib: int, lanes: str, rounds: int) -> dict[str, list[float]]:
    newcomer = Newcomer(mib, lanes)
    contenders: dict[str, Callable[[], float]] = {
        "lane": newcomer.lane,
        "heal": newcomer.heal,
        "heal, unchecked": newcomer.heal_unverified,
        **{name: partial(newcomer.transport, name) for name in (*OURS, "HTTP", "PG over gloo")},
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        names = list(contenders)
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            newcomer.source_cpu = 0.0
            before = cpu_seconds()
            took = contenders[name]()
            cpu.setdefault(name, []).append(cpu_seconds() - before + newcomer.source_cpu)
            if round_:  # the first one warms up
                seconds[name].append(took)
    newcomer.close()
    rate = newcomer.nbytes / 1e9
    for name, each in seconds.items():
        usual, (first, *later) = statistics.median(each), cpu[name]
        spent = f"cpu {statistics.median(later):.3f} s, first {first:.3f} s"
        print(f"  {name:16} {usual:7.3f} s  {rate / usual:6.2f} GB/s, {spent}")
    for what, a, b in (
        ("heal against the lane (goal 0.8)", "lane", "heal"),
        ("heal, unchecked, against the lane", "lane", "heal, unchecked"),
        *((f"{ours} against {theirs}", theirs, ours) for ours in OURS for theirs in ("HTTP", "PG over gloo")),
    ):
        ratios = sorted(x / y for x, y in zip(seconds[a], seconds[b], strict=True))
        print(f"  {what:34} {statistics.median(ratios):6.2f} x  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", default="shm,tcp", help="measured one after the other")
    parser.add_argument("--json", help="a file for the seconds of all rounds")
    parser.add_argument("--source", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        return source_process(*arguments.source, arguments.mib, arguments.lanes)
    found = {}
    for lane in arguments.lanes.split(","):
        print(f"{arguments.mib} MiB over {lane}")
        found[lane] = measure(arguments.mib, lane, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
