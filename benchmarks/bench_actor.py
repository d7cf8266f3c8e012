"""How fast actors are: beside bare sockets and copies, and beside torchmonarch where that is installed.

    python benchmarks/bench_actor.py                  about four minutes with torchmonarch, two without
    python benchmarks/bench_actor.py --quick
    python benchmarks/bench_actor.py --only calls,tensors --monarch-python /path/to/venv/bin/python

Contenders take turns and medians are compared. Nothing fails because it is slow. For torchmonarch's rows,
`pip install torchmonarch==0.7.0` here, or in an environment whose interpreter --monarch-python or the environment
variable MONARCH_RDMA_TEST_MONARCH_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from lines import LineProcess
from owner import OwnerProcess, numbers
from python_rows import opened, rails_of, read_of
from raw import Copy, Memcpy, ProcessVm
from rows import Row, Table, at_least, limit, rate_of, size_text, time_of
from sections import table_parser, tabulate
from socket_pair import SocketPair
from turns import Contender, each, take_turns

from monarch_rdma.rdma import Engine, Secret

PLACES = {"one processor": 1, "two processors": 2}
KIB, MIB = 1 << 10, 1 << 20
FANOUT = 10  # of a tree in which answers are combined


@dataclass(frozen=True)
class Clients:
    """A client process of ours, and one of torchmonarch's where it is installed."""

    ours: LineProcess
    monarch: LineProcess | None
    monarch_name: str = ""

    def contenders(self, *, whole_program: bool = False, **question: object) -> list[Contender]:
        """Both asked the same; ours first."""
        asked = [("actors", self.ours)]
        if self.monarch is not None:
            asked.append((self.monarch_name, self.monarch))
        make = _burst if whole_program else _one_by_one
        return [make(name, client, question) for name, client in asked]


def _one_by_one(name: str, client: LineProcess, question: dict[str, object]) -> Contender:
    return Contender(name, lambda count: list(client.ask(count=count, **question)))


def _burst(name: str, client: LineProcess, question: dict[str, object]) -> Contender:
    return Contender(name, lambda _: [float(client.ask(**question))], whole_program=True)


@dataclass
class Bench:
    """What the sections share: the table, how long to measure, and with what."""

    table: Table
    rounds: int
    seconds: float  # per contender and round
    largest: int  # bytes
    burst: int  # messages in flight
    processes: int  # where there are many
    monarch_python: str | None
    secret: Secret
    owner: OwnerProcess

    def measure(self, contenders: list[Contender]) -> None:
        take_turns(contenders, rounds=self.rounds, seconds=self.seconds)

    @contextmanager
    def clients(self) -> Iterator[Clients]:
        """Fresh ones."""
        with ExitStack() as stack:
            ours = stack.enter_context(closing(LineProcess("actor_pair.py")))
            ours.ask(do="name")  # it is ready
            if self.monarch_python is None:
                yield Clients(ours, None)
                return
            monarch = LineProcess("actor_pair.py", "--package", "monarch", python=self.monarch_python, quiet=True)
            stack.enter_context(closing(monarch))
            yield Clients(ours, monarch, monarch.ask(do="name"))

    def beside_monarch(self, what: str, contenders: list[Contender], size: int = 0) -> None:
        """A row against torchmonarch, where there is one: the rate of `size` bytes, or else the time."""
        ours, *monarch = contenders
        for theirs in monarch:
            if size:
                self.table.add(rate_of(what, size, ours.seconds, theirs.name, theirs.seconds))
            else:
                self.table.add(time_of(what, ours.seconds, theirs.name, theirs.seconds))


def calls(bench: Bench) -> None:
    """Small messages: one at a time, many in flight, and without an answer."""
    with bench.clients() as clients:
        for kind in ("sync", "async"):
            what = f"call_one of nothing, {kind} endpoint, p50"
            contenders = clients.contenders(do="round_trips", kind=kind)
            bench.measure(contenders)
            bench.table.add(limit(what, contenders[0].seconds, "s", 100e-6))
            bench.beside_monarch(what, contenders)
        for do, what, least in (
            ("pipelined", f"call_one, {bench.burst} in flight", 30_000),
            ("broadcasts", f"broadcast, {bench.burst} until all are carried out", 50_000),
        ):
            contenders = clients.contenders(do=do, number=bench.burst, whole_program=True)
            bench.measure(contenders)
            bench.table.add(at_least(what, 1 / contenders[0].seconds, "/s", least))
            for theirs in contenders[1:]:
                bench.table.add(Row(what, 1 / contenders[0].seconds, "/s", 1 / theirs.seconds, theirs.name))


def calls_beside_sockets(bench: Bench) -> None:
    """Pinned, both ways: a round trip depends on whether both ends share a processor."""
    processors = sorted(os.sched_getaffinity(0))
    with closing(LineProcess("actor_pair.py")) as client, closing(SocketPair()) as pair:
        actor = client.ask(do="pid_of_actor")
        for place, ends in PLACES.items():
            if len(processors) < ends:
                bench.table.note(f"call_one beside a socket, {place}: left out, there is one")
                continue
            first, last = processors[0], processors[ends - 1]
            call_one = _one_by_one("call_one", client, {"do": "round_trips", "kind": "sync"})
            bare = Contender("Unix-socket ping-pong", each(pair))
            with pinned({client.pid: first, os.getpid(): first, actor: last, pair.pid: last}):
                bench.measure([bare, call_one])
            what = f"call_one of nothing, {place}, p50"
            bench.table.add(time_of(what, call_one.seconds, bare.name, bare.seconds, 4))


@contextmanager
def pinned(processors: dict[int, int]) -> Iterator[None]:
    """Every thread of these processes, and those that they start, stays on the processor given."""
    everywhere = os.sched_getaffinity(0)
    try:
        for pid, processor in processors.items():
            pin(pid, {processor})
        yield
    finally:
        for pid in processors:
            pin(pid, everywhere)


def pin(pid: int, processors: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(thread), processors)


def tensors(bench: Bench) -> None:
    """A tensor as an argument, beside raw copies into memory that was touched before."""
    with bench.clients() as clients, Engine(secret=bench.secret) as engine:
        for memory, least in (("ordinary", 0.85), ("shared", 0.7)):
            for size in (MIB, min(256 * MIB, bench.largest)):
                what = f"call_one with {size_text(size)}, {memory} memory"
                contenders = clients.contenders(do="send_tensor", size=size, shared=memory == "shared")
                with raw_copy(bench.owner, engine, memory, size) as copy:
                    bench.measure([copy, *contenders])
                seconds = contenders[0].seconds
                if size == MIB:
                    bench.table.add(at_least(what, size / seconds, "B/s", 2e9))
                goal = None if size == MIB else least
                bench.table.add(rate_of(what, size, seconds, copy.name, copy.seconds, goal))
                bench.beside_monarch(what, contenders, size)


@contextmanager
def raw_copy(owner: OwnerProcess, engine: Engine, memory: str, size: int) -> Iterator[Contender]:
    """memcpy where the memory is shared, else process_vm_readv, with as many threads as a read of this size has."""
    here, source = torch.zeros_like(numbers(size)), numbers(size)
    with opened(owner, engine, memory, size) as (buffer, pid, address):
        threads = rails_of(buffer, here)
        copy: Copy
        if memory == "shared":
            copy = Memcpy(here.data_ptr(), source.data_ptr(), size, threads)
        else:
            copy = ProcessVm(pid, here.data_ptr(), address, size, threads)
        with closing(copy):
            yield Contender(f"{copy.name} x{threads}", each(copy))


def reads(bench: Bench) -> None:
    """Reads of an RDMABuffer that an actor awaits, beside blocking ones outside of actors."""
    with bench.clients() as clients, Engine(secret=bench.secret) as engine:
        for memory, lane in (("ordinary", "shm-process_vm"), ("shared", "shm-mapped")):
            for size in (4 * KIB, 64 * MIB):
                what = f"RDMABuffer read {size_text(size)} in an actor, {memory} memory"
                contenders = clients.contenders(do="read_buffer", size=size, shared=memory == "shared")
                with opened(bench.owner, engine, memory, size) as (buffer, *_):
                    outside = read_of("outside", buffer, torch.zeros_like(numbers(size)), lane)
                    bench.measure([outside, *contenders])
                seconds = contenders[0].seconds
                if size < MIB:
                    bench.table.add(limit(what, seconds, "s", 40e-6))
                    bench.table.add(time_of(what, seconds, outside.name, outside.seconds))
                    bench.beside_monarch(what, contenders)
                else:
                    bench.table.add(rate_of(what, size, seconds, outside.name, outside.seconds, 0.9))
                    bench.beside_monarch(what, contenders, size)


def spawn(bench: Bench) -> None:
    """Processes, and a first call of each: by a client that has done nothing yet, then by the same client again."""
    for processes, use_torch, most in ((2, False, 0.3), (8, True, 1.5)):
        fresh: dict[str, Contender] = {}
        again: dict[str, Contender] = {}
        for _ in range(max(1, bench.rounds // 2)):
            with bench.clients() as clients:
                question = {"do": "spawn", "processes": processes, "use_torch": use_torch}
                for contender in clients.contenders(whole_program=True, **question):
                    for kept in (fresh, again):
                        kept.setdefault(contender.name, contender_like(contender)).samples += contender.run(1)
        for label, kept in (("fresh client", fresh), ("again", again)):
            what = f"spawn {processes} processes{' with torch' if use_torch else ''} and call, {label}"
            contenders = list(kept.values())
            bench.table.add(limit(what, contenders[0].seconds, "s", most))
            bench.beside_monarch(what, contenders)


def contender_like(contender: Contender) -> Contender:
    return Contender(contender.name, contender.run, whole_program=True)


def many(bench: Bench) -> None:
    """A call of the actors of many processes. One client after the other: their processes would meet in memory."""
    what = f"call on {bench.processes} processes' actors, p50"
    contenders = []
    with bench.clients() as clients:
        for contender in clients.contenders(do="call_all", processes=bench.processes):
            bench.measure([contender])
            contenders.append(contender)
        question = {"do": "sum_bytes", "processes": bench.processes}
        single = clients.ours.ask(fanout=bench.processes, merged=False, **question)
        merged = clients.ours.ask(fanout=FANOUT, merged=True, **question)
    bench.table.add(limit(what, contenders[0].seconds, "s", 15e-3))
    bench.beside_monarch(what, contenders)
    what = f"accumulate with merge, {bench.processes} processes, fan-out {FANOUT}"
    bench.table.add(Row(what, merged, "bytes received", single, "one answer from each"))


SECTIONS: dict[str, list[Callable[[Bench], None]]] = {
    "calls": [calls, calls_beside_sockets],
    "tensors": [tensors],
    "reads": [reads],
    "spawn": [spawn],
    "many": [many],
}


def monarch_python(given: str | None) -> str | None:
    """An interpreter that has torchmonarch, if any."""
    if given:
        return given
    return sys.executable if importlib.util.find_spec("monarch") else None


def main() -> int:
    parser = table_parser(__doc__, tuple(SECTIONS))
    parser.add_argument(
        "--monarch-python",
        metavar="PYTHON",
        default=os.environ.get("MONARCH_RDMA_TEST_MONARCH_PYTHON"),
        help="an interpreter that has torchmonarch [this one, where it has]",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(lambda text: print(text, flush=True))
    monarch = monarch_python(arguments.monarch_python)
    if monarch is None:
        table.note("torchmonarch: left out, not installed (pip install torchmonarch==0.7.0, or --monarch-python)")
    secret = Secret.generate()
    with closing(OwnerProcess(secret)) as owner:
        bench = Bench(
            table=table,
            rounds=3 if arguments.quick else 7,
            seconds=0.1 if arguments.quick else 0.3,
            largest=(64 if arguments.quick else 256) * MIB,
            burst=1000 if arguments.quick else 5000,
            processes=20 if arguments.quick else 100,
            monarch_python=monarch,
            secret=secret,
            owner=owner,
        )
        return tabulate(
            table, {name: [partial(step, bench) for step in steps] for name, steps in SECTIONS.items()}, arguments
        )


if __name__ == "__main__":
    sys.exit(main())
