"""Processes of one host in namespaces of their own, as in containers, that have nothing in common but a directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from child import Child

from monarch_rdma import config, errors
from monarch_rdma.rdma import Engine, RDMABuffer, Secret, shared_memory

SIZE = 3 << 20
CONTENT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
OWN = """
data = {alloc}
memoryview(data).cast("B")[:] = content
result = RDMABuffer(data, engine=engine).to_bytes()
"""
READ = """
got = bytearray(len(content))
future = RDMABuffer.from_bytes(blob, engine=engine).read_into(got)
future.get(20)
result = got == content, future.explain().lane
"""
SHARED, ORDINARY = f"rdma.shared_memory({SIZE}, engine=engine)", f"bytearray({SIZE})"


def can_unshare(*flags: str) -> bool:
    tried = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    return tried.returncode == 0


def demand(*flags: str) -> None:
    if shutil.which("unshare") is None or not can_unshare(*flags):
        pytest.skip(f"needs `unshare {' '.join(flags)}`: root, or user namespaces")


@pytest.fixture
def directory() -> Iterator[Path]:
    """For sockets, whose paths are short."""
    with tempfile.TemporaryDirectory(prefix="monarch_rdma-test-") as made:
        yield Path(made)


def sockets(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]


@pytest.mark.parametrize(("alloc", "lane"), [(SHARED, "shm-mapped"), (ORDINARY, "shm-process_vm")])
def test_another_network_namespace(alloc: str, lane: str, secret: Secret, directory: Path) -> None:
    """Both ways: who is inside reads what is outside, too."""
    demand("--net")
    with (
        Child(secret, inside=["unshare", "--net"], unix_socket_dir=str(directory)) as inside,
        Engine(secret=secret, unix_socket_dir=directory) as engine,
    ):
        buffer = RDMABuffer.from_bytes(inside.run(OWN.format(alloc=alloc), content=CONTENT), engine=engine)
        got = bytearray(SIZE)
        future = buffer.read_into(got)
        future.get(20)
        assert got == CONTENT
        assert future.explain().lane == lane
        data = shared_memory(SIZE, engine=engine) if alloc is SHARED else bytearray(SIZE)
        memoryview(data)[:] = CONTENT
        blob = RDMABuffer(data, engine=engine).to_bytes()
        assert inside.run(READ, blob=blob, content=CONTENT) == (True, lane)


def test_who_is_inside_may_begin(secret: Secret, directory: Path) -> None:
    demand("--net")
    with (
        Child(secret, inside=["unshare", "--net"], unix_socket_dir=str(directory)) as inside,
        Engine(secret=secret, unix_socket_dir=directory) as engine,
    ):
        blob = RDMABuffer(memoryview(bytearray(CONTENT)), engine=engine).to_bytes()
        assert inside.run(READ, blob=blob, content=CONTENT) == (True, "shm-process_vm")


def test_the_directory_may_have_another_path_inside(secret: Secret, tmp_path: Path) -> None:
    demand("--net", "--mount")
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        path.mkdir(0o700)
    mounted = ["unshare", "--net", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(here)]
    with (
        Child(secret, inside=[*mounted, str(there)], unix_socket_dir=str(there)) as inside,
        Engine(secret=secret, unix_socket_dir=here) as engine,
    ):
        assert len(sockets(here)) == 2 and not sockets(there)
        blob = inside.run(OWN.format(alloc=SHARED), content=CONTENT)
        got = bytearray(SIZE)
        RDMABuffer.from_bytes(blob, engine=engine).read_into(got).get(20)
        assert got == CONTENT


def test_a_pid_namespace_leaves_mapped_memory(secret: Secret, directory: Path) -> None:
    """From inside the process outside has no id: ordinary memory cannot be read by the kernel, shared memory can."""
    demand("--net", "--pid", "--fork")
    container = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
    with (
        Child(secret, inside=container, unix_socket_dir=str(directory)) as inside,
        Engine(secret=secret, unix_socket_dir=directory) as engine,
    ):
        data = shared_memory(SIZE, engine=engine)
        memoryview(data)[:] = CONTENT
        blob = RDMABuffer(data, engine=engine).to_bytes()
        assert inside.run(READ, blob=blob, content=CONTENT) == (True, "shm-mapped")


def test_without_a_directory_there_is_no_way(secret: Secret) -> None:
    demand("--net")
    with (
        Child(secret, inside=["unshare", "--net"], unix_socket_dir="none") as inside,
        Engine(secret=secret, connect_timeout=1) as engine,
    ):
        buffer = RDMABuffer.from_bytes(inside.run(OWN.format(alloc=SHARED), content=CONTENT), engine=engine)
        with pytest.raises(errors.PeerLost):
            buffer.read_into(bytearray(SIZE)).get(20)


def test_the_file_goes_with_its_engine(secret: Secret, directory: Path) -> None:
    engine = Engine(secret=secret, unix_socket_dir=directory)
    assert len(sockets(directory)) == 1
    child = os.fork()
    if child == 0:
        os._exit(0)  # a fork's end removes nothing
    assert os.waitpid(child, 0)[1] == 0
    assert len(sockets(directory)) == 1
    engine.close()
    assert list(directory.iterdir()) == []


def test_what_a_killed_engine_left_goes_with_the_next(secret: Secret, directory: Path) -> None:
    """Never that of a living one, not even of one that is stopped."""
    with Child(secret, unix_socket_dir=str(directory)) as stopped:
        (living,) = sockets(directory)
        stopped.stop()
        with Child(secret, unix_socket_dir=str(directory)) as killed:
            assert len(sockets(directory)) == 2
            killed.kill()
        assert len(sockets(directory)) == 2
        with Engine(secret=secret, unix_socket_dir=directory):
            assert len(sockets(directory)) == 2
            assert living.exists()
        assert sockets(directory) == [living]
        stopped.signal(signal.SIGCONT)
        # It is still found through it.
        blob = stopped.run(OWN.format(alloc=ORDINARY), content=CONTENT)
        with Engine(secret=secret, unix_socket_dir=directory) as engine:
            got = bytearray(SIZE)
            RDMABuffer.from_bytes(blob, engine=engine).read_into(got).get(20)
            assert got == CONTENT


def test_files_of_others_are_left_alone(secret: Secret, directory: Path) -> None:
    foreign = [directory / "notes.sock", directory / f"{'0' * 32}.sock.bak"]
    for path in foreign:
        path.touch()
    half_made = directory / f"{'a' * 32}.sock-new"
    with socket.socket(socket.AF_UNIX) as maker:
        maker.bind(str(half_made))
    with Engine(secret=secret, unix_socket_dir=directory):
        assert half_made.exists()  # somebody may be making it just now
        os.utime(half_made, (0, 0))
    with Engine(secret=secret, unix_socket_dir=directory):
        assert not half_made.exists()
    assert sorted(directory.iterdir()) == sorted(foreign)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_bad_directories_are_refused(secret: Secret, directory: Path, umask: None) -> None:
    def refused(path: object, why: str) -> None:
        with pytest.raises(errors.ConfigError, match=f"(?s)unix_socket_dir.*{why}"):
            Engine(secret=secret, unix_socket_dir=path)

    (directory / "file").touch()
    refused(directory / "file", "cannot be made")
    (directory / "link").symlink_to(directory)
    refused(directory / "link", "mode 0700")
    (directory / "open").mkdir(0o750)
    refused(directory / "open", "mode 0700")
    path = directory / "long" / ("long" * 50)  # more than fits into a socket's address
    with Engine(secret=secret, unix_socket_dir=path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(sockets(path)) == 1
    assert sockets(path) == []


def test_an_engine_does_without_a_directory_that_nobody_asked_for(
    secret: Secret, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only /tmp fails as late as one that is removed at this moment."""
    monkeypatch.setattr("monarch_rdma.rdma.engine.socket_directory", lambda setting: str(directory / "gone"))
    with Engine(secret=secret) as engine:
        assert "unix=" in engine.address
    with pytest.raises(errors.ConfigError, match="no such directory"):
        Engine(secret=secret, unix_socket_dir=directory)


def test_by_default_it_is_the_private_directory(secret: Secret, directory: Path) -> None:
    config.configure(runtime_dir=str(directory))
    with Engine(secret=secret):
        (made,) = directory.iterdir()
        assert made.name == f"monarch_rdma-{os.geteuid()}" and len(sockets(made)) == 1
    config.configure(runtime_dir=str(directory / "there is none"))
    with Engine(secret=secret):  # no must
        assert sockets(made) == []
