"""listen and connect: one address string is enough, and no stranger gets in by it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from knocks import without_knocks

from monarch_rdma import config, errors
from monarch_rdma.rdma import Engine, RDMABuffer, Secret, connect, default_engine, listen, zeros
from monarch_rdma.rdma.private_files import PrivateFile


@pytest.fixture(autouse=True)
def private_directory(tmp_path: Path) -> Iterator[Path]:
    """Secrets are kept here, and the default engine begins and ends with the test."""
    default_engine().close()
    config.configure(runtime_dir=tmp_path)
    yield tmp_path / f"monarch_rdma-{os.geteuid()}"
    default_engine().close()


def secret_path(address: str) -> Path:
    return Path(unquote(address.partition("&secret_file=")[2]))


def run(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert without_knocks(done.stderr) == ""
    return done.stdout


READ = """
import sys
from monarch_rdma.rdma import connect
peer = connect(sys.argv[1])
buffer, target = peer.lookup("weights"), bytearray(8)
buffer.read_into(target).get(30)
buffer[:2].write_from(b"ok", notify=5).get(30)
print(target.decode())
"""


def test_an_address_is_all_another_process_needs(private_directory: Path) -> None:
    data = bytearray(b"12345678")
    with listen() as listener:
        buffer = RDMABuffer(data)
        listener.publish("weights", buffer)
        path = secret_path(listener.address)
        assert path.parent == private_directory
        assert (path.stat().st_mode & 0o777, private_directory.stat().st_mode & 0o777) == (0o600, 0o700)
        assert path.read_bytes() not in listener.address.encode()
        assert run(READ, listener.address) == "12345678\n"
        assert buffer.next_notification(30) == 5
        assert data == b"ok345678"
    assert not path.exists()
    assert default_engine().is_open  # the listener's end is not the engine's


def test_with_a_secret_of_the_job_the_address_names_no_file(tmp_path: Path, secret: Secret) -> None:
    secret.write_file(tmp_path / "job")
    config.configure(secret_file=tmp_path / "job")
    with listen() as listener:
        assert "secret_file" not in listener.address
        listener.publish("weights", RDMABuffer(bytearray(8)))
        run(READ, listener.address, MONARCH_RDMA_SECRET_FILE=str(tmp_path / "job"))


def test_secret_files_as_arguments(tmp_path: Path, secret: Secret) -> None:
    secret.write_file(tmp_path / "job")
    with listen(secret_file=tmp_path / "job") as listener:
        assert "secret_file" not in listener.address
        assert default_engine().secret == secret  # it could still be that of the whole process
        listener.publish("weights", RDMABuffer(bytearray(8)))
        code = READ.replace("connect(sys.argv[1])", "connect(sys.argv[1], secret_file=sys.argv[2])")
        run(code, listener.address, str(tmp_path / "job"))


def test_several_jobs_at_once(tmp_path: Path) -> None:
    """A process with a secret of its own reaches another job through an engine of that job."""
    with Engine(secret=Secret.generate()) as one, Engine(secret=Secret.generate()) as two:
        mine = default_engine()
        for number, engine in enumerate((one, two)):
            engine.secret.write_file(tmp_path / f"job{number}")
            with listen(engine=engine) as listener:
                listener.publish("x", RDMABuffer(torch.full((3,), float(number)), engine=engine))
                peers = [connect(listener.address, secret_file=tmp_path / f"job{number}") for _ in range(2)]
                assert peers[0].engine is peers[1].engine is not mine
                target = torch.zeros(3)
                peers[0].lookup("x").read_into(target).get(30)
                assert target.tolist() == [number] * 3
                peers[0].engine.close()


def test_a_whole_set_under_one_name(owner: Engine, reader: Engine) -> None:
    tensors = {f"layer.{number}": torch.full((number + 1,), float(number)) for number in range(300)}
    with listen(engine=owner) as listener:
        listener.publish("all", {name: RDMABuffer(tensor, engine=owner) for name, tensor in tensors.items()})
        found = connect(owner.address, engine=reader).lookup("all")
        assert list(found) == list(tensors)
        for name, buffer in found.items():
            target = torch.zeros(buffer.shape)
            buffer.read_into(target).get(30)
            assert torch.equal(target, tensors[name])


def test_names_come_and_go(owner: Engine, reader: Engine) -> None:
    with listen(engine=owner) as listener:
        peer = connect(listener.address, engine=reader)
        with pytest.raises(errors.ConfigError, match="first"):
            peer.lookup("first")
        listener.publish("first", RDMABuffer(torch.zeros(1), engine=owner))
        listener.publish("first", RDMABuffer(torch.zeros(2), engine=owner))
        assert peer.lookup("first").shape == (2,)
        listener.unpublish("first")
        for use in (lambda: peer.lookup("first"), lambda: listener.unpublish("first")):
            with pytest.raises(errors.ConfigError, match="first"):
                use()
        listener.publish("second", RDMABuffer(torch.zeros(1), engine=owner))
        kept = peer.lookup("second")
    with pytest.raises(errors.ConfigError, match="second"):
        peer.lookup("second")
    kept.read_into(torch.ones(1)).get(30)  # what was found stays usable


@pytest.mark.parametrize(
    ("name", "buffers", "why"),
    [
        (5, {}, "name is 5"),
        ("a\0b", {}, "name is"),
        ("", {}, "name"),
        ("x", {"a": 5}, r"buffers\['a'\] is a int"),
        ("x", {5: None}, r"buffers\[5\]"),
        ("\ud800", {}, "name is"),
        ("x", None, "buffers is a NoneType"),
    ],
)
def test_what_cannot_be_published_is_named(owner: Engine, name: Any, buffers: Any, why: str) -> None:
    with listen(engine=owner) as listener, pytest.raises(errors.ConfigError, match=why):
        listener.publish(name, buffers)


def test_watch_tells_of_the_end(owner: Engine, reader: Engine) -> None:
    with listen(engine=owner) as listener:
        lost = connect(listener.address, engine=reader).watch()
        owner.close()
        assert isinstance(lost.exception(30), errors.PeerLost)


# --- strangers and mistakes


def test_another_secret_does_not_get_in(owner: Engine) -> None:
    with Engine(secret=Secret.generate()) as stranger, pytest.raises(errors.AuthenticationError) as caught:
        connect(owner.address, engine=stranger, timeout=30)
    assert caught.value.operation == "connect"


def test_an_address_may_not_name_a_file_of_ones_own(tmp_path: Path, owner: Engine) -> None:
    (tmp_path / "id_rsa").write_bytes(b"a private key of mine, long enough")
    (tmp_path / "id_rsa").chmod(0o600)
    with pytest.raises(errors.ConfigError, match="names the secret file"):
        connect(f"{owner.address}&secret_file={tmp_path}/id_rsa")


def test_a_secret_that_is_gone_is_named(owner: Engine) -> None:
    with pytest.raises(errors.ConfigError, match="/nowhere.secret' cannot be read: No such file"):
        connect(f"{owner.address}&secret_file=/nowhere.secret")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "http://127.0.0.1:1/", "127.0.0.1:notaport", "127.0.0.1:1\0", "\ud800", 5, None]
)
def test_what_is_no_address_is_refused(address: Any, reader: Engine) -> None:
    for use in (lambda: connect(address, timeout=5), lambda: reader.watch(address)):
        with pytest.raises(errors.ConfigError):
            use()


def test_nobody_there(reader: Engine) -> None:
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(errors.PeerLost) as caught:
            connect(f"127.0.0.1:{unused.getsockname()[1]}", engine=reader, timeout=30)
    assert caught.value.operation == "connect"


def test_a_published_blob_of_a_stranger_program_is_refused(owner: Engine, reader: Engine) -> None:
    from monarch_rdma._engine import ffi, lib

    peer = connect(owner.address, engine=reader)
    for blob in (
        b"",
        b"nonsense",
        b"[]",
        b'{"one":true}',
        b'{"one":true,"buffers":{}}',
        b'{"one":false,"buffers":{"a":5}}',
        b'{"one":false,"buffers":{"a":"[]"}}',
    ):
        assert lib.mr_publish(owner.handle, b"x", blob, len(blob), ffi.NULL) == 0
        with pytest.raises(errors.ProtocolError, match="malformed"):
            peer.lookup("x")


def test_a_directory_that_is_not_ours_is_refused(private_directory: Path) -> None:
    private_directory.mkdir(mode=0o755)
    private_directory.chmod(0o755)
    with pytest.raises(errors.ConfigError, match="mode 0700"):
        listen()
    private_directory.rmdir()
    private_directory.symlink_to("/tmp")
    with pytest.raises(errors.ConfigError, match="mode 0700"):
        listen()
    private_directory.unlink()
    config.configure(runtime_dir="/proc/1/nothing")
    with pytest.raises(errors.ConfigError, match="set runtime_dir"):
        listen()


def test_a_secret_that_the_disk_has_no_room_for_leaves_no_file(private_directory: Path) -> None:
    def write(path: str) -> None:
        Path(path).touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(errors.ConfigError, match="No space left on device; set runtime_dir"):
        PrivateFile(".secret", write)
    assert list(private_directory.glob("*.secret")) == []


def test_engine_and_secret_file_are_one_too_many(owner: Engine) -> None:
    with pytest.raises(errors.ConfigError, match="both engine and secret_file"):
        listen(engine=owner, secret_file="/x")


# --- what is left behind


def test_secrets_of_dead_processes_are_removed(private_directory: Path) -> None:
    code = "import os; from monarch_rdma.rdma import listen; l = listen(); print(l.address, flush=True); os.abort()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "MONARCH_RDMA_RUNTIME_DIR": str(private_directory.parent)}
    crashed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    left = secret_path(crashed.stdout.strip())
    assert left.exists()
    with listen() as listener:
        assert not left.exists()
        with listen():
            assert secret_path(listener.address).exists()  # it is in use


def test_the_secret_goes_with_the_program_but_not_with_its_forks(private_directory: Path) -> None:
    code = """
    import os, sys
    from monarch_rdma.rdma import listen
    listener = listen()
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print(listener.address, *[name for name in os.listdir(sys.argv[1]) if not name.endswith(".sock")])
    """
    address, name = run(code, str(private_directory), MONARCH_RDMA_RUNTIME_DIR=str(private_directory.parent)).split()
    assert secret_path(address).name == name
    assert os.listdir(private_directory) == []


def test_published_shared_memory_is_mapped_by_the_reader() -> None:
    weights = zeros(1000).fill_(2)
    with listen() as listener:
        listener.publish("weights", RDMABuffer(weights, access="read"))
        code = """
        import sys, torch
        from monarch_rdma.rdma import connect
        view = connect(sys.argv[1]).lookup("weights").read_view()
        print(view.dtype, view.sum().item())
        """
        assert run(code, listener.address) == "torch.float32 2000.0\n"
