"""Who knocks at a host's doors from another one without the job's secret: refused, told once, and nothing is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from actor_client import wait_until
from hosts.network import Host, Network
from programs import Program, make_secret

AGENT = """
import json, os
from monarch_rdma.rdma import Engine, RDMABuffer
engine = Engine(name="agent", connect_timeout=3.0)
data = bytearray(b"untouched")
buffer = RDMABuffer(data, engine=engine)
with open("/proc/net/tcp") as lines: ports = [int(l.split()[1][-4:], 16) for l in lines if l.split()[3] == "0A"]
say(json.dumps([engine.address, buffer.to_bytes().decode(), ports]))
while hear():
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    sockets = sum(os.readlink(fd).startswith("socket:") for fd in fds if os.path.islink(fd))
    say(json.dumps([sockets, engine.counters().get("strangers_refused", 0), data.decode()]))
"""
# Everybody ends when the door is shut on him.
KNOCK = """
import json, socket, ssl, sys
host, ports = sys.argv[1], json.loads(sys.argv[2])
def knock(port, said):
    with socket.create_connection((host, port), 20) as door:
        door.settimeout(20)
        try:
            door.sendall(said)
            while door.recv(4096): pass
        except ConnectionError: pass
for port in ports:
    for _ in range(50): socket.create_connection((host, port), 20).close()  # a scan
    knock(port, b"GET / HTTP/1.1\\r\\nHost: agent\\r\\n\\r\\n")
    knock(port, b"SSH-2.0-x\\r\\n" * 100)
    knock(port, b"")  # it says nothing until it is shown out
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(socket.create_connection((host, port), 20)): say("let in")
    except OSError: pass
say("all shut")
"""
OTHER_JOB = """
from monarch_rdma.errors import AuthenticationError
from monarch_rdma.rdma import Engine, RDMABuffer
with Engine(name="other") as engine:
    try: RDMABuffer.from_bytes(sys.argv[1].encode(), engine=engine).read_into(bytearray(9)).get(20)
    except AuthenticationError: say("refused")
"""
MEMBER = """
from monarch_rdma.rdma import Engine, RDMABuffer
with Engine(name="member") as engine:
    got = bytearray(9)
    RDMABuffer.from_bytes(sys.argv[1].encode(), engine=engine).read_into(got).get(20)
    say(got.decode())
"""
SPEAKER = """
from monarch_rdma.rdma import Engine
from monarch_rdma.rdma.messages import send
with Engine(name="member") as engine: send(engine, sys.argv[1], b"for the agent", 20)
say("sent")
"""
# Stands in the middle of a member's connections, keeps what it hears, and says it again to the same door.
REPLAY = """
import json, socket, sys, threading
host, ports = sys.argv[1], json.loads(sys.argv[2])
heard = {port: [] for port in ports}
def forward(port, near):
    with near, socket.create_connection((host, port)) as far:
        words = bytearray()
        heard[port].append(words)
        def back():
            while data := far.recv(65536): near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)
        thread = threading.Thread(target=back)
        thread.start()
        try:
            while data := near.recv(65536):
                words += data
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
        except OSError: pass
        thread.join()
def serve(port, door):
    while True: threading.Thread(target=forward, args=(port, door.accept()[0]), daemon=True).start()
for port in ports:
    threading.Thread(target=serve, args=(port, socket.create_server((sys.argv[3], port))), daemon=True).start()
say("between")
hear()
for port, all_words in heard.items():
    say(port, sum(map(len, all_words)) > 0)
    for words in list(all_words):
        with socket.create_connection((host, port), 20) as door:
            door.settimeout(20)
            try:
                door.sendall(words)
                while door.recv(65536): pass
            except ConnectionError: pass
say("replayed")
"""


class Agent:
    """An engine on a host, with a buffer and its doors."""

    def __init__(self, host: Host, secret_file: Path) -> None:
        self.program = host.program(AGENT, secret_file=secret_file)
        self.address, self.blob, self.ports = json.loads(self.program.line())
        self.num_sockets = self.state()[0]

    def state(self) -> Any:
        """Its sockets, how many were refused, what is in its buffer."""
        self.program.tell()
        return json.loads(self.program.line())

    def is_as_before(self) -> None:
        wait_until(lambda: self.state()[0] == self.num_sockets, "sockets are kept")
        assert self.state()[2] == "untouched"

    def told(self) -> list[str]:
        """Of whom, and why. Lines have come when the program has ended."""
        self.program.end()
        return re.findall(r"refused a connection from (.*) \(told once\)", self.program.errors)


@pytest.fixture
def hosts(make_network: Callable[[int], Network]) -> list[Host]:
    return make_network(3).hosts


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return make_secret(tmp_path / "secret")


def all_of(program: Program) -> list[str]:
    assert program.wait() == 0, program.errors
    return program.rest()


def test_scans_and_other_protocols(hosts: list[Host], secret_file: Path) -> None:
    agent = Agent(hosts[0], secret_file)
    knocking = hosts[1].program(KNOCK, hosts[0].address, json.dumps(agent.ports))
    assert all_of(knocking) == ["all shut"]
    agent.is_as_before()
    assert len(agent.ports) == 2 and agent.state()[1] > 50
    assert all_of(hosts[2].program(MEMBER, agent.blob, secret_file=secret_file)) == ["untouched"]
    (told,) = agent.told()
    assert told.startswith(f"{hosts[1].address}: ")


def test_another_jobs_secret(hosts: list[Host], secret_file: Path, tmp_path: Path) -> None:
    """And one line for each host, not for each time."""
    agent = Agent(hosts[0], secret_file)
    for host in (hosts[1], hosts[2], hosts[1]):
        program = host.program(OTHER_JOB, agent.blob, secret_file=make_secret(tmp_path / "other"))
        assert all_of(program) == ["refused"]
        (tmp_path / "other").unlink()
    agent.is_as_before()
    assert sorted(line.partition(":")[0] for line in agent.told()) == [hosts[1].address, hosts[2].address]


def test_what_a_member_said_is_of_no_use_to_another(hosts: list[Host], secret_file: Path) -> None:
    """A host between a member and the agent passes everything on, and says it again later: hello, TLS and all."""
    agent = Agent(hosts[0], secret_file)
    port = int(re.search(r":(\d+)/", agent.address)[1])  # type: ignore[index]
    between = hosts[1].program(REPLAY, hosts[0].address, json.dumps([port]), hosts[1].address)
    assert between.line() == "between"
    address = agent.address.replace(hosts[0].address, hosts[1].address)
    assert all_of(hosts[2].program(SPEAKER, address, secret_file=secret_file)) == ["sent"]
    between.tell()
    assert all_of(between) == [f"{port} True", "replayed"]
    agent.is_as_before()
    assert [line.partition(":")[0] for line in agent.told()] == [hosts[1].address]
