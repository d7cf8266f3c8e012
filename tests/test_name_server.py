"""Names of weights in a process of their own: jobs that share a secret, actors, strangers, a server that is gone."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from child import Child
from knocks import without_knocks
from ports import free_port

from monarch_rdma.actor import Actor, current_rank, endpoint, this_host
from monarch_rdma.errors import ConfigError, PeerLost, TransferTimeout
from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.rdma.messages import send
from monarch_rdma.sharding import Layout, Mesh, NameDirectory, NameServer, Reader, Relay, Shard, fetch, publish
from monarch_rdma.sharding.directory import directory_of

COMMAND = [sys.executable, "-m", "monarch_rdma.cli", "directory"]


@pytest.fixture
def server(secret: Secret) -> Iterator[NameServer]:
    with NameServer(secret=secret) as server:
        yield server


def test_offers_are_found_and_replaced(server: NameServer, reader: Engine) -> None:
    directory = pickle.loads(pickle.dumps(server.directory))
    assert isinstance(directory, NameDirectory) and directory.address == server.address
    directory = NameDirectory(server.address, engine=reader)
    with pytest.raises(TransferTimeout, match="nobody has offered 'w' in time"):
        directory.get("w", 0.02)
    directory.put("w", 1, 2, b"one")
    with pytest.raises(TransferTimeout, match="nobody has offered 'w' in time"):
        directory.get("w", 0)
    directory.put("w", 0, 2, b"x" * (20 << 20))
    directory.put("v", 0, 1, b"")
    assert directory.get("w", 0) == [b"x" * (20 << 20), b"one"]
    directory.put("w", 0, 1, b"new")
    assert directory.get("w", 0) == [b"new"] and directory.get("v", 0) == [b""]


def test_what_is_no_offer_is_left_alone(server: NameServer, reader: Engine, caplog: pytest.LogCaptureFixture) -> None:
    directory = NameDirectory(server.address, engine=reader)
    for data in (b"", b"{", b"[1]\n", b'["w", 0, null]\nx', b"\xff\n"):
        send(reader, server.address, data)
    directory.put("w", 0, 1, b"good")
    assert directory.get("w", 1) == [b"good"]
    assert len([line for line in caplog.messages if "is no offer of a name" in line]) == 5


def test_a_server_that_is_gone_is_an_error(server: NameServer, reader: Engine) -> None:
    directory = NameDirectory(server.address, engine=reader)
    server.close()
    with pytest.raises(PeerLost):
        directory.get("w", 10)
    with pytest.raises(PeerLost):
        directory.put("w", 0, 1, b"")


def test_one_that_lives_as_long_as_its_program_ends_quietly() -> None:
    code = "from monarch_rdma.sharding import NameServer; server = NameServer(); print(server.address != '')"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, without_knocks(done.stderr)) == (0, "True\n", "")


def test_strangers_are_refused(server: NameServer) -> None:
    with Engine(secret=Secret.generate()) as stranger:
        directory = NameDirectory(server.address, engine=stranger)
        for call in (lambda: directory.get("w", 1), lambda: directory.put("w", 0, 1, b"")):
            with pytest.raises(PermissionError):
                call()


@pytest.mark.parametrize("address", ["", "host", "host:", "h ost:1", "ipc://x", 3, "http://host:1"])
def test_what_is_no_address_is_said(address: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"address is {address!r}, but must be that of a directory")):
        NameDirectory(address)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        directory_of(address)


# --- two jobs and the command


OFFER = """
import torch
from monarch_rdma.sharding import Layout, Mesh, NameDirectory, Shard, publish
layout = Layout((6, 4), Mesh({"dp": 2}), [Shard(0)])
part = torch.arange(24.0).reshape(6, 4).chunk(2)[rank].contiguous()
where = NameDirectory(address, engine=engine)
publish({"w": part}, "policy", directory=where, layouts={"w": layout}, rank=rank, ranks=2, engine=engine)
"""


def test_two_jobs_meet_at_the_command(
    tmp_path: Path, secret: Secret, child_process: Callable[..., Child], reader: Engine
) -> None:
    """It is found at host:port; a second one there is refused; after SIGTERM it ends in order."""
    secret.write_file(tmp_path / "secret")
    address = f"127.0.0.1:{free_port()}"
    command = [*COMMAND, address, "--secret-file", str(tmp_path / "secret")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"names are kept at {address}\n"
            for rank in range(2):
                child_process().run(OFFER, rank=rank, address=address)
            found = fetch("policy", directory=NameDirectory(f"tcp://{address}", engine=reader), engine=reader)
            assert torch.equal(found["w"], torch.arange(24.0).reshape(6, 4))
            taken = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, without_knocks(errors)) == (0, "")
    assert taken.returncode == 1 and "is taken" in taken.stderr and taken.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["127.0.0.1:22322"], "there is no job secret"),
        (["host", "--secret-file", "SECRET"], "has no host and port"),
        (["ipc://x", "--secret-file", "SECRET"], "is a file, but a directory listens at tcp://host:port"),
    ],
)
def test_a_command_that_cannot_be_says_why(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    Secret.generate().write_file(tmp_path / "secret")
    given = [str(tmp_path / "secret") if one == "SECRET" else one for one in arguments]
    done = subprocess.run([*COMMAND, *given], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr and done.stderr.count("\n") == 1


# --- actors, without torch.distributed


class Trainer(Actor):
    def __init__(self, names: NameDirectory) -> None:
        rank, layout = current_rank().rank, Layout((6, 4), Mesh({"dp": 2}), [Shard(0)])
        self.part = torch.arange(24.0).reshape(6, 4).chunk(2)[rank].clone()
        self.weights = publish({"w": self.part}, "p", directory=names, layouts={"w": layout}, rank=rank, ranks=2)

    @endpoint
    def train(self, version: int) -> None:
        with self.weights.update(version):
            self.part.add_(1)


class Generator(Actor):
    """Odd ranks read by themselves, even ones pass on."""

    def __init__(self, names: NameDirectory) -> None:
        self.mine = {"w": torch.zeros(6, 4)}
        rank = current_rank().rank
        self.reader: Reader | Relay = (
            Reader("p", self.mine, directory=names)
            if rank % 2
            else Relay("p", self.mine, directory=names, rank=rank // 2, ranks=2, patience=30)
        )

    @endpoint
    def sync(self, version: int) -> tuple[list[list[float]], int | None]:
        report = self.reader.fetch(version=version)
        return self.mine["w"].tolist(), getattr(report, "source", None)


def test_actors_of_a_mesh_find_each_other() -> None:
    host = this_host()
    with host.spawn_procs({"dp": 2}, threads=1) as some, host.spawn_procs({"n": 4}, threads=1) as others:
        with NameServer() as server:
            trainers = some.spawn("trainers", Trainer, server.directory)
            generators = others.spawn("generators", Generator, server.directory)
            for version in (1, 2):
                trainers.train.call(version).get()
                synced = generators.sync.call(version).get().values()
                expected = (torch.arange(24.0).reshape(6, 4) + version).tolist()
                assert [part for part, _ in synced] == [expected] * 4
                assert [source for _, source in synced] == [None, None, 0, None]
