"""Rows that Python measures: reads and writes of tensors, beside ctypes, iperf3, gloo and NIXL."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from lines import LineProcess
from owner import OwnerProcess, numbers
from raw import Copy, Memcpy, ProcessVm
from rows import Table, faster_than, limit, rate_of, size_text
from turns import Contender, each, take_turns

from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer, Secret

__all__ = [
    "Lab",
    "gloo_and_nixl",
    "has_nixl",
    "opened",
    "rails_of",
    "read_of",
    "shared_host_copies",
    "small_reads",
    "tcp_read",
]

MIB = 1 << 20


@dataclass
class Lab:
    """What the rows share: one owner process, the table, and how long to measure."""

    secret: Secret
    owner: OwnerProcess
    table: Table
    rounds: int
    seconds: float  # per contender and round
    largest: int  # bytes
    nixl_python: str | None

    def measure(self, contenders: list[Contender]) -> None:
        take_turns(contenders, rounds=self.rounds, seconds=self.seconds)


@contextmanager
def opened(owner: OwnerProcess, engine: Engine, memory: str, size: int) -> Iterator[tuple[RDMABuffer, int, int]]:
    """An owner's memory: the buffer here, and the process and address of the memory there."""
    owned = owner.make(memory, size)
    try:
        yield RDMABuffer.from_bytes(owned.handle, engine=engine), owned.pid, owned.address
    finally:
        owner.drop(owned)


def read_of(name: str, buffer: RDMABuffer, dst: torch.Tensor, lane: str) -> Contender:
    """Blocking reads, after one whose lane and bytes are looked at."""
    first = buffer.read_into(dst)
    first.get()
    if first.explain().lane != lane:
        raise RuntimeError(f"{name} took the lane {first.explain()}")
    if not torch.equal(dst.view(torch.int32), numbers(dst.nbytes).view(torch.int32)):
        raise RuntimeError(f"{name} over {lane} delivered wrong bytes")
    return Contender(name, each(lambda: buffer.read_into(dst).get()))


def shared_host_copies(lab: Lab) -> None:
    """Large reads and writes on one host, with as many threads as the raw copy beside them."""
    for memory, lane in (("shared", "shm-mapped"), ("ordinary", "shm-process_vm")):
        for size in (64 * MIB, 256 * MIB):
            measured: set[int] = set()  # numbers of threads that the engine really used
            for threads in (1, 2):
                if size <= lab.largest:
                    _copies_rows(lab, memory, lane, size, threads, measured)


def _copies_rows(lab: Lab, memory: str, lane: str, size: int, threads: int, measured: set[int]) -> None:
    engine = Engine(secret=lab.secret, copy_threads=threads)
    with engine, opened(lab.owner, engine, memory, size) as (buffer, pid, address):
        here, other = torch.zeros_like(numbers(size)), torch.zeros_like(numbers(size))
        read = read_of("read", buffer, here, lane)
        write = Contender("write", each(lambda: buffer.write_from(here).get()))
        rails = rails_of(buffer, here)
        if rails in measured:
            return
        measured.add(rails)
        raw: list[Copy] = []
        if memory == "shared":
            least = 0.9
            raw.append(Memcpy(here.data_ptr(), other.data_ptr(), size, rails))
        else:
            least = 0.95
            for writes in (False, True):
                raw.append(ProcessVm(pid, other.data_ptr(), address, size, rails, write=writes))
        theirs = [Contender(f"{copy.name} x{rails}", each(copy)) for copy in raw]
        lab.measure([read, write, *theirs])
        for copy in raw:
            copy.close()
        for ours, beside in ((read, theirs[0]), (write, theirs[-1])):
            what = f"{lane} {ours.name} {size_text(size)}, {rails} thread{'s' * (rails > 1)} (Python)"
            lab.table.add(rate_of(what, size, ours.seconds, beside.name, beside.seconds, least))


def rails_of(buffer: RDMABuffer, dst: torch.Tensor) -> int:
    """Threads that copy in a read of this size."""
    future = buffer.read_into(dst)
    future.get()
    return max(1, int(future.explain().rails))


def small_reads(lab: Lab) -> None:
    """Blocking 8-byte reads."""
    dst = torch.zeros(2)
    with Engine(secret=lab.secret) as engine, ExitStack() as stack:
        contenders = []
        for memory, lane in (("shared", "shm-mapped"), ("ordinary", "shm-process_vm")):
            buffer, *_ = stack.enter_context(opened(lab.owner, engine, memory, 8))
            contenders.append(read_of(lane, buffer, dst, lane))
        lab.measure(contenders)
        for contender in contenders:
            lab.table.add(limit(f"{contender.name} read 8 B, blocking (Python), p50", contender.seconds, "s", 10e-6))


def tcp_read(lab: Lab) -> None:
    """A large read over loopback beside iperf3."""
    if shutil.which("iperf3") is None:
        lab.table.note("tcp read beside iperf3: left out, no iperf3 here (apt-get install iperf3)")
        return
    size = min(256 * MIB, lab.largest)
    with Engine(secret=lab.secret, lanes="tcp") as engine, opened(lab.owner, engine, "ordinary", size) as (buffer, *_):
        read = read_of("read", buffer, torch.zeros_like(numbers(size)), "tcp")
        iperf3 = [_iperf3_contender(streams, size) for streams in (1, 2, 4)]
        take_turns([read, *iperf3], rounds=lab.rounds, seconds=1.0)
    best = min(iperf3, key=lambda contender: contender.seconds)
    for contender in iperf3:
        least = 0.9 if contender is best else None
        what = f"tcp read {size_text(size)} over loopback (Python)"
        lab.table.add(rate_of(what, size, read.seconds, contender.name, contender.seconds, least))


def _iperf3_contender(streams: int, size: int) -> Contender:
    return Contender(f"iperf3 -P {streams}", lambda _: [size / _iperf3(streams)], whole_program=True)


def _iperf3(streams: int) -> float:
    """Bytes per second that arrive over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    listen = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"]
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            while "listening" not in (line := server.stdout.readline()):
                if not line:
                    raise RuntimeError("iperf3 -s ended before it listened")
            command = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(streams), "-t", "1", "-J"]
            client = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        finally:
            server.kill()
    return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def gloo_and_nixl(lab: Lab) -> None:
    """Reads of ordinary memory beside gloo (over tcp) and NIXL (over the same kind of lane), at every size."""
    with ExitStack() as stack:
        theirs = {"tcp": {"gloo send/recv": LineProcess("gloo_pair.py", env={"GLOO_SOCKET_IFNAME": "lo"})}}
        if lab.nixl_python:
            for lane, tls in (("shm-process_vm", "default"), ("tcp", "tcp")):
                pair = LineProcess(
                    "nixl_pair.py", "--tls", tls, python=lab.nixl_python, env={"NIXL_LOG_LEVEL": "ERROR"}
                )
                theirs.setdefault(lane, {})[f"NIXL, UCX {tls}"] = pair
        else:
            lab.table.note("NIXL: left out, not installed (pip install --no-deps nixl nixl-cu12, or --nixl-python)")
        for pairs in theirs.values():
            for pair in pairs.values():
                stack.callback(pair.close)
        engines = {
            "tcp": stack.enter_context(Engine(secret=lab.secret, lanes="tcp")),
            "shm-process_vm": stack.enter_context(Engine(secret=lab.secret, lanes="shm")),
        }
        for lane, pairs in theirs.items():
            for size in (8, 4 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB):
                if size <= lab.largest:
                    _peers_rows(lab, lab.owner, engines[lane], lane, size, pairs)
        # NIXL polls at both ends, so that it is quick with small ones. Here the owner may, too.
        if lab.nixl_python:
            polls = OwnerProcess(lab.secret, loop_spin=100e-6)
            stack.callback(polls.close)
            for size in (8, 4 << 10, 64 << 10):
                _peers_rows(lab, polls, engines["tcp"], "tcp", size, theirs["tcp"], " from one with loop_spin")


def _peers_rows(
    lab: Lab,
    owner: OwnerProcess,
    engine: Engine,
    lane: str,
    size: int,
    pairs: dict[str, LineProcess],
    note: str = "",
) -> None:
    with opened(owner, engine, "ordinary", size) as (buffer, *_):
        read = read_of("read", buffer, torch.zeros_like(numbers(size)), lane)
        action = RDMAAction().read_remote(torch.zeros_like(numbers(size)), buffer)
        submits = Contender("submit", each(lambda: action.submit().get()))
        others = [_peer_contender(name, pair, size) for name, pair in pairs.items()]
        lab.measure([read, submits, *others])
    for other in others:
        # NIXL's transfers are prepared once, as an action's are.
        for ours, how in ((read, ""), *([(submits, " of an action")] if "NIXL" in other.name else [])):
            what = f"{lane} read{how}{note} {size_text(size)}, ordinary memory (Python)"
            lab.table.add(faster_than(what, size, ours.seconds, other.name, other.seconds))


def _peer_contender(name: str, pair: LineProcess, size: int) -> Contender:
    return Contender(name, lambda count: list(pair.ask(size=size, count=count)))


def has_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None
