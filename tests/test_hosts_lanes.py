"""Engines on different hosts: the control stream under TLS, the tcp lane, on networks that are slow, lossy, or cut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from actor_client import wait_until
from child import Child
from hosts.network import Host, Network

from monarch_rdma.rdma import Secret

SIZES = [0, 1, 7, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 1, (9 << 20) + 3]
OWN = """
import random
content = random.Random(size).randbytes(size)
data = bytearray(content)
buffer = RDMABuffer(data, engine=engine)
result = buffer.to_bytes()
"""
READ_AND_WRITE = """
import random, zlib
size = len(got)
buffer = RDMABuffer.from_bytes(blob, engine=engine)
future = buffer.read_into(got)
future.get(100)
right = got == random.Random(size).randbytes(size)
if size > 100:  # a part of it that begins and ends nowhere in particular
    part = bytearray(size - 100)
    buffer[33 : size - 67].read_into(part).get(100)
    right = right and part == got[33 : size - 67]
other = random.Random(size + 1).randbytes(size)
buffer.write_from(bytearray(other)).get(100)
result = right, future.explain().lane, zlib.crc32(other)
"""
# Three threads that read and write on end; what became of each operation is counted.
BEGIN = """
import collections, threading
from monarch_rdma.errors import RdmaError
handle = RDMABuffer.from_bytes(blob, engine=engine)
ends, rounds = collections.Counter(), threading.Semaphore(0)
stop, failed = threading.Event(), threading.Event()
def work(number):
    got, small = bytearray(handle.size()), bytearray(1000)
    mine = handle[number * 1000 : (number + 1) * 1000]
    operations = {
        "read": lambda: handle.read_into(got, timeout=90),
        "part": lambda: mine.read_into(small, timeout=90),
        "write": lambda: mine.write_from(bytes([number]) * 1000, timeout=90),
    }
    while not stop.is_set():
        fine = True
        for what, start in operations.items():
            try:
                start().get(100)
                ends[what] += 1
            except RdmaError as error:
                ends[f"{what}: {type(error).__name__}"] += 1
                fine = False
                failed.set()
        if fine: rounds.release()
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads: thread.start()
result = rounds.acquire(timeout=60)
"""
AGAIN = """
while rounds.acquire(blocking=False): pass
result = all(rounds.acquire(timeout=30) for _ in range(6))
"""
END = """
stop.set()
for thread in threads: thread.join(100)
result = dict(ends)
"""
WATCH = """
from monarch_rdma.rdma.messages import Inbox
inbox = Inbox(engine)
inbox.watch(address)
"""
TOLD = "result = sum(kind != 0 for kind, _, _ in inbox.take(20))"
CONNECTIONS = """
with open("/proc/net/tcp") as lines: result = sum(line.split()[3] == "01" for line in lines)
"""
SHARED = """
data = rdma.shared_memory(5000, engine=engine)
result = RDMABuffer(data, engine=engine).to_bytes()
"""
READ_SHARED = """
from monarch_rdma.errors import RdmaError
try:
    future = RDMABuffer.from_bytes(blob, engine=engine).read_into(bytearray(5000), lanes=lanes)
    future.get(20)
    result = future.explain().lane
except RdmaError as error:
    result = str(error)
"""
OWN_WORDS = """
from monarch_rdma.rdma.messages import Inbox
inbox = Inbox(engine)
data = bytearray(b"bytes-of-a-buffer" * 100)
result = RDMABuffer(data, engine=engine).to_bytes()
"""
SAY_AND_READ = """
import socket
from monarch_rdma.rdma.messages import send
send(engine, to, b"said-in-a-message", 20)
RDMABuffer.from_bytes(blob, engine=engine).read_into(bytearray(1700)).get(20)
socket.socket(type=socket.SOCK_DGRAM).sendto(b"end of what is said", ("10.77.0.2", 9))
"""
LISTEN = """
import socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind(("eth0", 0))
print("listening", flush=True)
words, heard, last = {word.encode() for word in sys.argv[1:]}, set(), False
while not last:
    frame = wire.recv(1 << 17)
    heard |= {word for word in words if word in frame}
    last = b"end of what is said" in frame
print(*(word.decode() for word in heard), flush=True)
"""


@pytest.fixture
def children(hosts: tuple[Host, Host], secret: Secret) -> Iterator[Callable[..., Child]]:
    """Engines on hosts; they end with the test."""
    made: list[Child] = []

    def make(host: Host, **options: Any) -> Child:
        made.append(host.child(secret, **options))
        return made[-1]

    yield make
    for child in made:
        child.close()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({}, {"ip_family": 6}),
        ({"loss": 0.01}, {}),
        ({"delay": 0.01}, {}),
        ({"delay": 0.005, "loss": 0.01}, {"bulk_tls": True}),
    ],
    ids=["plain", "ipv6", "loss", "delay", "tls with both"],
)
def test_right_bytes(
    hosts: tuple[Host, Host], network: Network, children: Any, shape: dict[str, float], options: dict[str, Any]
) -> None:
    at = {"listen_host": hosts[1].address6} if "ip_family" in options else {}
    owner = children(hosts[1], **options, **at)
    reader = children(hosts[0], **options, **({"listen_host": hosts[0].address6} if at else {}))
    network.shape(**shape)
    for size in SIZES:
        blob = owner.run(OWN, size=size)
        right, lane, sum_of_written = reader.run(READ_AND_WRITE, blob=blob, got=bytearray(size))
        assert right and lane == ("tcp" if size > 0 else "")
        assert owner.run("import zlib; result = zlib.crc32(data)") == sum_of_written


def test_memory_of_another_host_is_not_looked_for_on_this_one(hosts: tuple[Host, Host], children: Any) -> None:
    """Its process id and the names of its sockets may be those of somebody else here."""
    owner, reader = children(hosts[1]), children(hosts[0])
    blob = owner.run(SHARED)
    assert reader.run(READ_SHARED, blob=blob, lanes=None) == "tcp"
    assert "not shared with this peer" in reader.run(READ_SHARED, blob=blob, lanes=["shm"])


@pytest.mark.parametrize("bulk_tls", [False, True])
def test_what_is_heard_on_the_wire(hosts: tuple[Host, Host], children: Any, bulk_tls: bool) -> None:
    """Nothing of the control stream; the bytes of buffers only where they are not under TLS."""
    owner, reader = (children(host, bulk_tls=bulk_tls) for host in (hosts[1], hosts[0]))
    blob = owner.run(OWN_WORDS)
    command = [sys.executable, "-c", LISTEN, "said-in-a-message", "bytes-of-a-buffer"]
    with hosts[0].popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout.readline() == "listening\n"
        reader.run(SAY_AND_READ, blob=blob, to=owner.address)
        assert owner.run("result = [bytes(data) for _, _, data in inbox.take(20)]") == [b"said-in-a-message"]
        assert listener.stdout.readline().split() == ([] if bulk_tls else ["bytes-of-a-buffer"])


def test_a_cut_shorter_than_the_timeout_is_no_failure(hosts: tuple[Host, Host], children: Any) -> None:
    """Also where a kernel that doubles its pauses would ask again only after the timeout: 3 s after the last time."""
    owner, reader = (children(host, heartbeat_timeout=6.0) for host in (hosts[1], hosts[0]))
    assert reader.run(BEGIN, blob=owner.run(OWN, size=4 << 20))
    hosts[1].cut()
    time.sleep(3.2)
    hosts[1].mend()
    assert reader.run(AGAIN)
    assert set(reader.run(END)) == {"read", "part", "write"}


def test_a_longer_cut_is_a_lost_peer_until_it_is_over(hosts: tuple[Host, Host], children: Any) -> None:
    """Each operation ends, the loss is told once, and what comes after the cut is done over new connections."""
    owner, reader = (children(host, heartbeat_timeout=1.0, heartbeat_interval=0.2) for host in (hosts[1], hosts[0]))
    reader.run(WATCH, address=owner.address)
    assert reader.run(BEGIN, blob=owner.run(OWN, size=4 << 20))
    hosts[1].cut()
    assert reader.run("result = failed.wait(60)")
    hosts[1].mend()
    assert reader.run(AGAIN)
    ends = reader.run(END)
    assert {"read", "part", "write"} <= set(ends)
    assert {end.partition(": ")[2] for end in ends} == {"", "PeerLost"}
    assert reader.run(TOLD) == 1


def test_who_waits_for_bytes_hears_that_the_other_end_broke(hosts: tuple[Host, Host], children: Any) -> None:
    """The owner gives its data sockets up after a second. The reader, who sends nothing, is not told by its kernel."""
    owner, reader = children(hosts[1], heartbeat_timeout=1.0), children(hosts[0], heartbeat_timeout=30.0)
    assert reader.run(BEGIN, blob=owner.run(OWN, size=32 << 20))
    before = owner.run(CONNECTIONS)
    hosts[1].cut()
    wait_until(lambda: owner.run(CONNECTIONS) < before, "the owner's sockets wait for ever")
    hosts[1].mend()
    assert reader.run(AGAIN)
    assert set(reader.run(END)) == {"read", "part", "write"}
    assert reader.run("result = engine.counters()['tcp_sockets_lost']") > 0
