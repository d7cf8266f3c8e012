"""Heartbeats between two hosts where nothing is awaited: once per pair of hosts, however many processes watch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from actor_client import wait_until
from hosts.network import Network
from programs import Program
from test_hosts_actors import Cluster

from monarch_rdma.actor import Actor, endpoint

# Connections over which anything was sent, and packets, while so many seconds went by.
LISTENER = """
import select, socket, time
wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
wire.bind(("eth0", 0))
wire.settimeout(0.05)
while True:
    connections, packets, until = set(), 0, float(hear()) + time.monotonic()
    while select.select([wire], [], [], 0)[0]: wire.recv(65536)  # what came before
    while time.monotonic() < until:
        try: packet = wire.recv(65536)
        except TimeoutError: continue
        ip = (packet[0] & 15) * 4
        tcp = packet[ip:]
        if packet[0] >> 4 != 4 or packet[9] != 6: continue
        packets += 1
        if int.from_bytes(packet[2:4]) > ip + (tcp[12] >> 4) * 4:
            connections.add(frozenset([(packet[12:16], tcp[:2]), (packet[16:20], tcp[2:4])]))
    say(len(connections), packets)
"""
CLIENT = """
from monarch_rdma import actor
from monarch_rdma.actor import attach_to_workers, this_host
from test_hosts_heartbeats import Guest, Patron
actor.unhandled_fault_hook = lambda failure: print(f"lost {failure.mesh_name}\\n", end="", flush=True)
count = int(sys.argv[2])
hosts = attach_to_workers(workers=[sys.argv[1]])
procs = hosts.spawn_procs({"n": count})
guests = procs.supervised("transient", max_restarts=0).spawn("guests", Guest)
patrons = this_host().spawn_procs({"n": count}).spawn("patrons", Patron, hosts, count)
say(*guests.pid.call().get(60).values(), *patrons.guests.call().get(60).values())
say(*patrons.pid.call().get(60).values())
hear()
"""
OPTIONS = {"MONARCH_RDMA_HEARTBEAT_TIMEOUT": "5.0", "MONARCH_RDMA_HEARTBEAT_INTERVAL": "0.1"}
WINDOW = 1.0  # seconds: ten heartbeats


class Guest(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Patron(Actor):
    """Owns guests on the other host, as the client does."""

    def __init__(self, hosts: object, count: int) -> None:
        self.procs = hosts.spawn_procs({"n": count})  # type: ignore[attr-defined]
        self.mine = self.procs.supervised("transient", max_restarts=0).spawn("mine", Guest)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def guests(self) -> list[int]:
        return list(self.mine.pid.call().get(60).values())


class Watched:
    """A client and its patrons on one host, their guests on another, and who hears what goes over the wire."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.cluster = Cluster(network, folder, **OPTIONS)
        self.here, self.there = network.hosts
        self.listener = self.here.program(LISTENER)

    def client(self, count: int) -> Program:
        arguments = (f"tcp://{self.there.address}:26000", str(count))
        return self.here.program(CLIENT, *arguments, secret_file=self.cluster.secret_file, **OPTIONS)

    def heard(self) -> tuple[int, int]:
        self.listener.tell(str(WINDOW))
        connections, packets = map(int, self.listener.line().split())
        return connections, packets

    def there_run(self) -> set[int]:
        """Process ids, as that host sees them."""
        found = set()
        for pid in self.there.processes():
            with contextlib.suppress(OSError):  # it has ended
                status = Path(f"/proc/{pid}/status").read_text()
                found.add(int(status.partition("NSpid:")[2].split("\n")[0].split()[-1]))
        return found

    def ends(self) -> None:
        self.listener.kill()
        self.cluster.ends()


def pids_in(line: str) -> list[int]:
    return [int(pid) for pid in line.translate({ord(sign): " " for sign in "[],"}).split()]


@pytest.fixture
def watched(make_network: Callable[[int], Network], tmp_path: Path) -> Watched:
    return Watched(make_network(2), tmp_path)


def test_heartbeats_go_once_per_pair_of_hosts(watched: Watched) -> None:
    """With 2 processes on the other host, and with 20, owned by the client and by workers of its host."""
    packets = []
    for count in (1, 4):
        client = watched.client(count)
        client.line()
        wait_until(lambda: watched.heard()[0] == 1, lambda: f"connections, packets: {watched.heard()}")
        connections, heard = watched.heard()
        assert connections == 1
        packets.append(heard)
        client.tell()
        assert client.wait() == 0
    assert 0 < packets[1] < 2 * packets[0]
    watched.ends()


@pytest.mark.parametrize("what", ["KILL", "STOP", "the agent", "the cable"])
def test_who_watches_is_told_of_what_happens_on_another_host(watched: Watched, what: str) -> None:
    client = watched.client(2)
    theirs = pids_in(client.line())
    wait_until(lambda: watched.heard()[0] == 1, "heartbeats go on between more than the agents")
    if what == "the cable":
        watched.there.cut()
    elif what == "the agent":
        watched.cluster.loops[0].kill()
    else:
        for pid in (theirs[0], theirs[2]):  # one of the client, one of a patron
            watched.there.run("kill", f"-{what}", str(pid))
    client.line()
    told: set[str] = set()
    while not told >= {"lost guests", "lost patrons"}:
        told.add(client.line())
    client.kill()
    watched.there.mend()
    watched.ends()


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_what_a_lost_process_owns_on_another_host_ends(watched: Watched, signal: str) -> None:
    client = watched.client(2)
    guests = pids_in(client.line())
    wait_until(lambda: watched.heard()[0] == 1, "heartbeats go on between more than the agents")
    watched.here.run("kill", f"-{signal}", str(pids_in(client.line())[0]))
    of_the_lost = set(guests[2:4])
    wait_until(
        lambda: not of_the_lost & watched.there_run(),
        lambda: f"its guests {of_the_lost} are left: {watched.there.processes()}; {client.errors}",
    )
    assert set(guests) - of_the_lost <= watched.there_run()
    client.kill()
    watched.ends()
