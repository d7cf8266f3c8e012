"""Actors on several hosts: a client here, worker loops there, on a bad network, cut off, switched off, and back."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actor_client import wait_until
from hosts.network import Host, Network
from programs import WORKER_LOOP, Program, make_secret

from monarch_rdma.actor import Actor, endpoint

PORT = 26000
CLIENT = """
import numpy as np
from monarch_rdma.actor import SupervisionError, attach_to_workers
from monarch_rdma.supervision.policy import Backoff
from test_hosts_actors import Guest
LIMIT = 60.0
again = {"restart": "always", "max_restarts": None, "backoff": Backoff(0.2, factor=1.0)}
procs = attach_to_workers(workers=sys.argv[1:]).spawn_procs(**again)
guests = procs.spawn("guests", Guest)
def add(mesh, amount):
    return mesh.add.options(timeout=LIMIT).call(amount).get(LIMIT).values()
def parted():
    procs.stop().get(LIMIT)
    say("parted")
"""


class Guest(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def where(self) -> str:
        return os.uname().nodename

    @endpoint
    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    @endpoint
    def twice(self, array: Any) -> Any:
        return array * 2

    @endpoint
    def ask(self, others: Any, array: Any) -> list[float]:
        return [float(each.sum()) for each in others.twice.call(array).get(60).values()]


class Cluster:
    """A client on the first host, worker loops on the others."""

    def __init__(self, network: Network, folder: Path, **options: str) -> None:
        self.network, self.options = network, options
        self.secret_file = make_secret(folder / "job.secret")
        self.here, *self.there = network.hosts
        self.loops = [self.worker_loop(host) for host in self.there]

    def worker_loop(self, host: Host) -> Program:
        code = "say('here')\n" + WORKER_LOOP
        arguments = (f"tcp://{host.address}:{PORT}", "run_worker_loop_forever")
        loop = host.program(code, *arguments, secret_file=self.secret_file, **self.options)
        assert loop.line() == "here"
        return loop

    def client(self, code: str) -> Program:
        addresses = [f"tcp://{host.address}:{PORT}" for host in self.there]
        return self.here.program(
            CLIENT + textwrap.dedent(code), *addresses, secret_file=self.secret_file, **self.options
        )

    def ends(self) -> None:
        """When the client has ended and the loops are told to, nothing is left on any host."""
        for loop in self.loops:
            if loop.process.poll() is None:
                loop.end()
        wait_until(lambda: not self._left(), lambda: f"processes are left: {self._left()}")

    def _left(self) -> list[str]:
        return [f"{host.name}: {command}" for host in self.network.hosts for command in host.processes().values()]


def impatient() -> dict[str, str]:
    return {"MONARCH_RDMA_HEARTBEAT_TIMEOUT": "2.0", "MONARCH_RDMA_HEARTBEAT_INTERVAL": "0.3"}


def test_calls_and_arrays_on_a_bad_network(make_network: Callable[[int], Network], tmp_path: Path) -> None:
    cluster = Cluster(make_network(3), tmp_path)
    cluster.network.shape(delay=0.002, loss=0.01)
    client = cluster.client("""
        say(*guests.where.call().get(LIMIT).values())
        large = np.arange(1 << 19, dtype=np.float32)
        say(all(np.array_equal(each, large * 2) for each in guests.twice.call(large).get(LIMIT).values()))
        # From one host to the other, without us.
        sums = guests.slice(hosts=0).ask.call_one(guests.slice(hosts=1), large).get(LIMIT)
        say(sums == [float((large * 2).sum())])
        for _ in range(20): total = list(add(guests, 1))
        say(total)
        parted()
        """)
    assert client.line() == "host2 host3"
    assert [client.line() for _ in range(4)] == ["True", "True", "[20, 20]", "parted"]
    assert (client.wait(), client.errors) == (0, "")
    cluster.ends()


def test_a_host_that_is_cut_off_and_comes_back(make_network: Callable[[int], Network], tmp_path: Path) -> None:
    """For a moment: nobody notices. For longer: it is lost, once, with all that runs there, and then there again."""
    cluster = Cluster(make_network(3), tmp_path, **impatient())
    client = cluster.client("""
        say(list(add(guests, 100)))
        hear()  # it is cut off for a moment, and was
        say(list(add(guests, 1)))
        hear()  # it is cut off
        part, other = guests.slice(hosts=1), guests.slice(hosts=0)
        before = part.add.options(timeout=LIMIT).call_one(1)
        try: before.get(LIMIT); say("answered")
        except SupervisionError as error: say("lost")
        say(list(add(other, 1)))
        say("mend")
        say(list(add(guests, 1)))
        parted()
        """)
    there = cluster.there[1]
    assert client.line() == "[100, 100]"
    there.cut()
    client.tell()
    there.mend()
    assert client.line() == "[101, 101]"
    old = set(there.processes())
    there.cut()
    client.tell()
    assert [client.line() for _ in range(3)] == ["lost", "[102]", "mend"]
    # Its owner is lost to the host as well: what it has started there ends, the loop stays.
    loop = cluster.loops[1].pid
    wait_until(lambda: set(there.processes()) == {loop}, "it goes on without an owner")
    there.mend()
    assert [client.line() for _ in range(2)] == ["[103, 1]", "parted"]
    assert len(old) > 1
    assert client.wait() == 0
    cluster.ends()


def test_a_host_that_is_switched_off_and_boots(make_network: Callable[[int], Network], tmp_path: Path) -> None:
    cluster = Cluster(make_network(2), tmp_path, **impatient())
    client = cluster.client("""
        say(list(add(guests, 1)))
        hear()
        try: guests.add.options(timeout=LIMIT).call_one(1).get(LIMIT); say("answered")
        except SupervisionError: say("lost")
        say(list(add(guests, 1)))
        parted()
        """)
    (there,) = cluster.there
    assert client.line() == "[1]"
    there.power_off()
    client.tell()
    assert client.line() == "lost"
    there.boot()
    cluster.loops = [cluster.worker_loop(there)]
    assert [client.line() for _ in range(2)] == ["[1]", "parted"]
    assert client.wait() == 0
    cluster.ends()
