"""Who does not know the job's secret gets nothing, holds nothing, and disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import pytest

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMABuffer, Secret

HELLO, HELLO_REPLY, HELLO_PROOF, PING, MESSAGE = 1, 2, 3, 5, 11
MAGIC = 0x4D44524D


def unix_name(address: str) -> str:
    found = re.search(r"unix=([^&]+)", address)
    assert found is not None
    return "\0" + unquote(found[1])


def tcp_port(address: str) -> int:
    found = re.search(r"mrdma://[^/]*:(\d+)/", address)
    assert found is not None
    return int(found[1])


def frame(kind: int, payload: bytes, ident: int = 0) -> bytes:
    return struct.pack("<IHHQ", len(payload), kind, 0, ident) + payload


def dial(engine: Engine) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(unix_name(engine.address))
    return sock


def everything(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    got = b""
    while True:
        try:
            more = sock.recv(65536)
        except ConnectionError:
            return got
        if not more:
            return got
        got += more


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(name="member", connect_timeout=2.0) as made:
        yield made


@pytest.fixture
def works(engine: Engine) -> Iterator[None]:
    """After the test, a member is served as if nothing had happened, and no descriptor is left."""
    data = bytearray(b"untouched")
    buffer = RDMABuffer(data, engine=engine)
    blob = buffer.to_bytes()
    before = open_fds()
    yield
    with Engine(secret=engine.secret, name="friend") as friend:
        got = bytearray(9)
        RDMABuffer.from_bytes(blob, engine=friend).read_into(got).get(20)
        assert got == b"untouched"
        friend.close()
    for _ in range(2000):  # closing is the loop's work: it may be a moment behind
        if open_fds() <= before:
            break
        Engine(name="pause").close()
    assert open_fds() <= before


@pytest.mark.parametrize("over_unix", [True, False], ids=["unix", "tcp"])
def test_another_jobs_secret_is_refused(engine: Engine, works: None, over_unix: bool) -> None:
    data = bytearray(b"secret stuff")
    blob = RDMABuffer(data, engine=engine).to_bytes()
    with Engine(secret=Secret.generate(), name="stranger", same_host_unix=over_unix) as stranger:
        got = bytearray(12)
        with pytest.raises(errors.AuthenticationError, match="member"):
            RDMABuffer.from_bytes(blob, engine=stranger).read_into(got).get(20)
        assert got == bytearray(12)


@pytest.mark.parametrize("over_unix", [True, False], ids=["unix", "tcp"])
def test_two_versions_name_each_other(over_unix: bool) -> None:
    secret = Secret.generate()
    with (
        Engine(secret=secret, protocol_version=1, same_host_unix=over_unix) as old,
        Engine(secret=secret, protocol_version=2, same_host_unix=over_unix) as new,
    ):
        for here, there in ((old, new), (new, old)):
            blob = RDMABuffer(bytearray(8), engine=there).to_bytes()
            with pytest.raises(errors.ProtocolError, match=r"version 1.*version 2|version 2.*version 1"):
                RDMABuffer.from_bytes(blob, engine=here).read_into(bytearray(8)).get(20)


GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "endless frame": struct.pack("<IHHQ", 0xFFFFFFFF, HELLO, 0, 0),
    "frame of 2 GiB": struct.pack("<IHHQ", 1 << 31, MESSAGE, 0, 0) + b"x" * 1000,
    "message before the hello": frame(MESSAGE, b"run me"),
    "ping before the hello": frame(PING, b""),
    "proof first": frame(HELLO_PROOF, bytes(32)),
    "truncated hello": frame(HELLO, struct.pack("<IH", MAGIC, 1) + bytes(10)),
    "wrong magic": frame(HELLO, struct.pack("<IH", 0x12345678, 1) + bytes(100)),
    "long name": frame(HELLO, struct.pack("<IH", MAGIC, 1) + bytes(32) + struct.pack("<I", 1 << 30)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_the_connection(engine: Engine, works: None, name: str) -> None:
    with dial(engine) as sock:
        try:
            sock.sendall(GARBAGE[name])
        except ConnectionError:
            return  # closed already
        if name == "frame of 2 GiB":
            sock.shutdown(socket.SHUT_WR)
        everything(sock)  # ends: the other side closed


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_tcp_closes_the_connection(engine: Engine, works: None, name: str) -> None:
    with socket.create_connection(("127.0.0.1", tcp_port(engine.address)), 20) as sock:
        try:
            sock.sendall(GARBAGE[name])
            everything(sock)
        except ConnectionError:
            return


def test_nobody_gets_the_number_of_a_closed_standard_stream() -> None:
    """What is told of a stranger on standard error would go to a peer."""
    program = """
import os
from monarch_rdma.rdma import Engine
os.closerange(0, 3)
engine = Engine()
os._exit(sum(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in range(3)))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 3


def test_a_silent_stranger_is_shown_out(engine: Engine, works: None) -> None:
    with dial(engine) as unix, socket.create_connection(("127.0.0.1", tcp_port(engine.address)), 20) as tcp:
        everything(unix)
        everything(tcp)


def test_a_crowd_at_the_door_is_bounded_and_goes_away(engine: Engine, works: None) -> None:
    crowd = []
    for _ in range(600):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(unix_name(engine.address))
        crowd.append(sock)
    for sock in crowd:
        everything(sock)
        sock.close()


def test_tls_with_certificates_or_an_older_version_is_refused(engine: Engine, works: None) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        with socket.create_connection(("127.0.0.1", tcp_port(engine.address)), 20) as sock:
            with pytest.raises((ssl.SSLError, ConnectionError, OSError)):
                context.wrap_socket(sock)


class Recorder:
    """Stands between two engines, passes everything on, and remembers what the first one said."""

    def __init__(self, to: Engine) -> None:
        self.name = f"monarch_rdma/recorder{random.getrandbits(64):x}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("\0" + self.name)
        self.listener.listen()
        self.to = to
        self.said = b""
        self.answered = b""
        self.address = re.sub(r"unix=[^&]+", f"unix={self.name.replace('/', '%2f')}", to.address)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        near, _ = self.listener.accept()
        far = dial(self.to)

        def forward() -> None:
            try:
                while data := near.recv(65536):
                    self.said += data
                    far.sendall(data)
                far.shutdown(socket.SHUT_WR)
            except OSError:
                return

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        try:
            while data := far.recv(65536):
                self.answered += data
                near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            thread.join(20)
            near.close()
            far.close()
            self.listener.close()


def test_a_replayed_hello_is_refused(engine: Engine, works: None) -> None:
    recorder = Recorder(engine)
    with Engine(secret=engine.secret, name="victim", lanes="tcp") as victim:
        watching = victim.watch(recorder.address)
        victim_knows = victim.counters()
        assert victim_knows["ops_in_flight"] == 1
        # The proof is the second thing that the initiator says.
        while len(recorder.said) < 16 or recorder.said.count(struct.pack("<IHHQ", 32, HELLO_PROOF, 0, 0)) == 0:
            assert not watching.done()
        watching.cancel()
    recorder.thread.join(20)
    known = engine.counters()["peers_known"]
    with dial(engine) as sock:
        with contextlib.suppress(ConnectionError):  # it may have closed already
            sock.sendall(recorder.said + frame(MESSAGE, b"hello again"))
        answer = everything(sock)
    # It answers the hello with a nonce of its own, so the old proof is worth nothing.
    assert answer != recorder.answered
    assert engine.counters()["peers_known"] == known


def test_bits_flipped_on_the_way_end_the_connection(engine: Engine, works: None) -> None:
    """Mutations of a real hello, at every part of it: none gets in."""
    recorder = Recorder(engine)
    with Engine(secret=engine.secret, name="victim", lanes="tcp") as victim:
        watching = victim.watch(recorder.address)
        while recorder.said.count(struct.pack("<IHHQ", 32, HELLO_PROOF, 0, 0)) == 0:
            assert not watching.done()
        watching.cancel()
    recorder.thread.join(20)
    known = engine.counters()["peers_known"]
    seeded = random.Random(1)
    for _ in range(200):
        mutated = bytearray(recorder.said)
        for _ in range(seeded.randint(1, 8)):
            mutated[seeded.randrange(len(mutated))] = seeded.getrandbits(8)
        del mutated[seeded.randrange(len(mutated)) :]
        with dial(engine) as sock:
            try:
                sock.sendall(mutated)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                continue
            everything(sock)
    assert engine.counters()["peers_known"] == known


def _data_port_of(engine: Engine) -> int:
    """The data listener is told to members only; a port scan finds it all the same."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists, or one that a thread closes right now
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    ports = []
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.append(int(fields[1].split(":")[1], 16))
    others = [port for port in ports if port != tcp_port(engine.address)]
    assert others
    return others[0]


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_data_port_closes_the_connection(engine: Engine, works: None, name: str) -> None:
    send: Callable[[socket.socket], None] = lambda sock: sock.sendall(GARBAGE[name])  # noqa: E731
    with socket.create_connection(("127.0.0.1", _data_port_of(engine)), 20) as sock:
        try:
            send(sock)
            everything(sock)
        except ConnectionError:
            return


def test_a_data_hello_without_a_session_is_refused(engine: Engine, works: None) -> None:
    seeded = random.Random(2)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", _data_port_of(engine)), 20) as sock:
            try:
                sock.sendall(b"MRB1" + seeded.randbytes(200))
                assert everything(sock) == b""
            except ConnectionError:
                continue
