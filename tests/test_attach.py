"""Worker loops and clients in processes of their own: attaching, several clients, and the death of each."""

from __future__ import annotations

import importlib
import operator
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_client import Faults, faults_recorded, traces, wait_until
from knocks import without_knocks
from ports import free_port
from programs import LIMIT, WORKER_LOOP, Program, is_alive, make_secret

from monarch_rdma import config
from monarch_rdma.actor import (
    Actor,
    Channel,
    ChannelTransport,
    HostMesh,
    Port,
    SupervisionError,
    attach,
    attach_to_workers,
    context,
    current_rank,
    enable_transport,
    endpoint,
    run_worker_loop_forever,
    shutdown_context,
    start_worker_loop_forever,
    this_host,
)
from monarch_rdma.actor.joining import job_secret, transport
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.errors import AuthenticationError, ConfigError, PeerLost, ResourceExhausted, TransferTimeout
from monarch_rdma.rdma import Engine, Secret, default_engine

attaching = importlib.import_module("monarch_rdma.actor.joining.attach")  # the package has a function of that name

SOON = 30.0  # seconds: nothing of a dead client or host is left after 2, where others do not use the processors


class Guest(Actor):
    def __init__(self, traces_at: str = "") -> None:
        self.traces_at = traces_at

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def address(self) -> str:
        return default_engine().address

    @endpoint
    def spawn_one(self) -> int:
        """A process of the actor's own, on its host; its pid."""
        self.procs = this_host().spawn_procs()
        return self.procs.spawn("own", Guest).pid.call_one().get()

    @endpoint
    def attach_and_spawn(self, address: str) -> int:
        """The actor's process as a client of another host; the pid of what it starts there."""
        self.procs = attach_to_workers(workers=[address]).spawn_procs()
        return self.procs.spawn("own", Guest).pid.call_one().get()

    @endpoint
    def hold(self, started: Port[None]) -> None:
        started.send(None)
        threading.Event().wait()

    @endpoint
    def show(self) -> None:
        print("here is", current_rank().rank)

    @endpoint
    def spin(self) -> None:
        while True:
            pass

    @endpoint
    def greeting(self) -> str | None:
        return os.environ.get("GREETING")

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.traces_at:
            Path(self.traces_at, str(os.getpid())).write_text(repr(error))


CLIENT = """
from test_attach import Guest
from monarch_rdma.actor import attach_to_workers, this_host
hosts = attach_to_workers(workers=sys.argv[1:])
guests = hosts.spawn_procs({"gpus": 2}).spawn("guests", Guest)
say(*guests.pid.call().get().values())
while hear() == "print\\n":
    guests.show.call().get()
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = traces()
    yield
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return make_secret(tmp_path / "job.secret")


@pytest.fixture
def program(secret_file: Path) -> Iterator[Callable[..., Program]]:
    """Makes programs of the job."""
    programs: list[Program] = []

    def make(code: str, *arguments: str, **env: Any) -> Program:
        programs.append(Program(code, *arguments, **{"secret_file": secret_file, **env}))
        return programs[-1]

    yield make
    for each in programs:
        each.close()


@pytest.fixture
def worker_loop(program: Callable[..., Program]) -> Callable[..., Program]:
    """Starts a worker loop at an address."""

    def make(address: str, function: str = "run_worker_loop_forever", **env: Any) -> Program:
        return program(WORKER_LOOP, address, function, **env)

    return make


@pytest.fixture
def client(secret_file: Path) -> Iterator[Faults]:
    """This process is a client of the job. What it has to handle are its faults."""
    config.configure(secret_file=str(secret_file))
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


def in_directory(path: Path, name: str) -> str:
    return f"ipc://{path}/{name}"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone_soon(*pids: int) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"still there: {[pid for pid in pids if is_alive(pid)]}", SOON)


# --- what attaching gives


def test_hosts_form_a_mesh_in_the_order_given(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [f"tcp://127.0.0.1:{free_port()}", in_directory(tmp_path, "one")]
    loops = [worker_loop(address) for address in addresses]
    hosts = attach_to_workers(workers=addresses)
    assert (hosts.sizes, hosts.initialized.get()) == ({"hosts": 2}, True)
    procs = hosts.spawn_procs({"gpus": 2})
    assert procs.sizes == {"hosts": 2, "gpus": 2}
    guests = procs.spawn("guests", Guest)
    assert list(guests.rank.call().get().values()) == [0, 1, 2, 3]
    pids = list(guests.pid.call().get().values())
    assert [parent_of(parent_of(pid)) for pid in pids] == [loops[0].pid] * 2 + [loops[1].pid] * 2
    one = hosts.slice(hosts=1).spawn_procs()
    assert one.sizes == {}
    assert parent_of(parent_of(one.spawn("guest", Guest).pid.call_one().get())) == loops[1].pid
    with pytest.raises(ConfigError, match="'hosts', which the host mesh has already"):
        hosts.spawn_procs({"hosts": 2})
    procs.stop().get()
    gone_soon(*pids)


def test_where_one_host_fails_what_the_others_started_ends(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [in_directory(tmp_path, "one"), in_directory(tmp_path, "two")]
    loops = [worker_loop(address) for address in addresses]
    hosts = attach_to_workers(workers=addresses)
    os.kill(loops[0].pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        hosts.spawn_procs({"gpus": 2})
    template = psutil.Process(loops[1].pid).children()
    wait_until(lambda: not any(each.children() for each in template), "processes of the other host are left", SOON)
    assert hosts.slice(hosts=1).spawn_procs().spawn("guest", Guest).rank.call_one().get(LIMIT) == 0


def test_a_single_host_has_the_dimension_too(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    worker_loop(in_directory(tmp_path, "one"))
    assert attach_to_workers(workers=[in_directory(tmp_path, "one")], name="mine").sizes == {"hosts": 1}


def test_an_actor_starts_processes_on_its_own_host(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    loop = worker_loop(in_directory(tmp_path, "one"))
    procs = attach_to_workers(workers=[in_directory(tmp_path, "one")]).spawn_procs()
    guest = procs.spawn("guest", Guest)
    pid, own = guest.pid.call_one().get(), guest.spawn_one.call_one().get()
    assert parent_of(parent_of(own)) == loop.pid
    os.kill(pid, signal.SIGKILL)  # what it owned goes with it
    gone_soon(own)
    assert "SIGKILL" in client.next().message


def test_an_actor_attaches_to_another_host(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [in_directory(tmp_path, name) for name in ("one", "two")]
    loops = [worker_loop(address) for address in addresses]
    procs = attach_to_workers(workers=addresses[:1]).spawn_procs()
    guest = procs.spawn("guest", Guest)
    pid, own = guest.pid.call_one().get(), guest.attach_and_spawn.call_one(addresses[1]).get()
    assert parent_of(parent_of(own)) == loops[1].pid
    os.kill(pid, signal.SIGKILL)
    gone_soon(own)
    wait_until(lambda: not psutil.Process(loops[1].pid).children(), "the host keeps something of the actor", SOON)
    assert "SIGKILL" in client.next().message


def test_controllers_of_a_client_serve_all_its_hosts_and_no_other_client(
    tmp_path: Path, worker_loop: Any, program: Any, client: Faults
) -> None:
    from test_controller import Worker

    addresses = [in_directory(tmp_path, name) for name in ("one", "two")]
    for address in addresses:
        worker_loop(address)
    program(JOB, addresses[0]).line()  # has a counter of the same name
    workers = attach_to_workers(workers=addresses).spawn_procs({"gpus": 2}).spawn("workers", Worker)
    assert sorted(workers.count.call("counter", 0).get().values()) == [1, 2, 3, 4]


def test_environment_is_that_of_the_host_then_what_the_client_says(
    tmp_path: Path, worker_loop: Any, client: Faults
) -> None:
    worker_loop(in_directory(tmp_path, "one"), GREETING="hello")
    hosts = attach_to_workers(workers=[in_directory(tmp_path, "one")])
    assert hosts.spawn_procs().spawn("guest", Guest).greeting.call_one().get() == "hello"
    assert hosts.spawn_procs(env={"GREETING": "hi"}).spawn("guest", Guest).greeting.call_one().get() == "hi"


def test_workers_may_come_later_than_their_client(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [f"tcp://127.0.0.1:{free_port()}", in_directory(tmp_path, "one")]
    found: list[HostMesh] = []
    waiting = threading.Thread(target=lambda: found.append(attach_to_workers(workers=addresses)))
    waiting.start()
    for address in addresses:
        worker_loop(address)
    waiting.join(LIMIT)
    assert found[0].sizes == {"hosts": 2}


def test_a_program_can_be_worker_and_client_at_once(tmp_path: Path, program: Any, client: Faults) -> None:
    address = in_directory(tmp_path, "here")
    ended = start_worker_loop_forever(address=address)
    mine = attach_to_workers(workers=[address]).spawn_procs().spawn("guest", Guest)
    assert parent_of(parent_of(mine.pid.call_one().get())) == os.getpid()
    other = program(CLIENT, address)
    pids = [int(pid) for pid in other.line().split()]
    assert {parent_of(parent_of(pid)) for pid in pids} == {os.getpid()}
    other.kill()
    gone_soon(*pids)
    assert not ended.done() and mine.rank.call_one().get() == 0
    shutdown_context().get(LIMIT)
    assert ended.done() and not Path(tmp_path, "here").exists()


# --- several clients, and their ends


def test_what_a_killed_client_started_ends_and_nothing_else(tmp_path: Path, worker_loop: Any, program: Any) -> None:
    address = in_directory(tmp_path, "one")
    loop = worker_loop(address)
    first, second = program(CLIENT, address), program(CLIENT, address)
    of_first, of_second = ([int(pid) for pid in each.line().split()] for each in (first, second))
    os.kill(of_first[0], signal.SIGSTOP)  # one that cannot end by itself
    first.kill()
    gone_soon(*of_first)
    assert all(map(is_alive, of_second)) and loop.process.poll() is None
    second.tell()  # it ends in order
    assert second.wait() == 0, second.errors
    gone_soon(*of_second)
    wait_until(lambda: not psutil.Process(loop.pid).children(), "the worker loop keeps something of its clients", SOON)
    third = program(CLIENT, address)
    assert len(third.line().split()) == 2


def test_a_busy_actor_ends_with_its_client(tmp_path: Path, worker_loop: Any, program: Any) -> None:
    worker_loop(in_directory(tmp_path, "one"))
    busy = program(CLIENT.replace("while", "guests.spin.broadcast()\nwhile"), in_directory(tmp_path, "one"))
    pids = [int(pid) for pid in busy.line().split()]
    busy.kill()
    gone_soon(*pids)


def test_a_slow_spawn_of_one_client_does_not_hold_up_another(
    tmp_path: Path, worker_loop: Any, program: Any, client: Faults
) -> None:
    address = in_directory(tmp_path, "one")
    worker_loop(address)
    slow = program(
        """
        from monarch_rdma.actor import attach_to_workers
        hosts = attach_to_workers(workers=[sys.argv[1]])
        def begin(gate=sys.argv[2]):
            import pathlib, threading
            pathlib.Path(gate).touch()
            threading.Event().wait()
        hosts.spawn_procs(bootstrap=begin)
        """,
        address,
        str(tmp_path / "begun"),
    )
    wait_until((tmp_path / "begun").exists, lambda: slow.errors)
    guest = attach_to_workers(workers=[address]).spawn_procs().spawn("guest", Guest)
    assert guest.rank.call_one().get(LIMIT) == 0


def test_what_processes_print_is_seen_by_the_client_that_started_them(
    tmp_path: Path, worker_loop: Any, program: Any
) -> None:
    loop = worker_loop(in_directory(tmp_path, "one"))
    clients = [program(CLIENT, in_directory(tmp_path, "one")) for _ in range(2)]
    for each in clients:
        each.line()
    clients[0].tell("print")
    assert sorted(clients[0].line() for _ in range(2)) == ["[procs0/0] here is 0", "[procs0/1] here is 1"]
    for each in clients:
        each.tell()
        assert (each.wait(), without_knocks(each.errors)) == (0, "")
    assert (loop.end(), loop.line(), without_knocks(loop.errors)) == (0, "over", "")


def test_shutdown_context_ends_what_this_client_started(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    address = in_directory(tmp_path, "one")
    worker_loop(address)
    assert shutdown_context().get(LIMIT) is None  # nothing to end
    guests = attach_to_workers(workers=[address]).spawn_procs({"gpus": 2}).spawn("guests", Guest, str(tmp_path))
    pids = list(guests.pid.call().get().values())
    assert shutdown_context().get(LIMIT) is None
    gone_soon(*pids)
    assert {Path(tmp_path, str(pid)).read_text() for pid in pids} == {"None"}  # in order, with their __cleanup__
    with pytest.raises(SupervisionError):
        guests.pid.call().get(LIMIT)
    again = attach_to_workers(workers=[address]).spawn_procs().spawn("guest", Guest)
    assert again.rank.call_one().get(LIMIT) == 0


# --- the end of a worker loop


def test_the_death_of_a_host_is_told_to_all_who_have_something_there(
    tmp_path: Path, worker_loop: Any, client: Faults
) -> None:
    addresses = [in_directory(tmp_path, name) for name in ("one", "two")]
    loops = [worker_loop(address) for address in addresses]
    hosts = attach_to_workers(workers=addresses)
    guests = hosts.spawn_procs({"gpus": 2}).spawn("guests", Guest)
    pids = list(guests.pid.call().get().values())
    port, started = Channel.open()
    held = guests.slice(hosts=1, gpus=0).hold.call_one(port)
    started.recv().get(LIMIT)
    loops[1].kill()
    with pytest.raises(SupervisionError, match="lost"):
        held.get(SOON)
    gone_soon(*pids[2:])
    failures = [client.next() for _ in range(2)]
    assert sorted((failure.mesh_name, failure.rank) for failure in failures) == [("guests", 2), ("guests", 3)]
    assert "its host's agent is lost" in failures[0].message
    assert list(guests.slice(hosts=0).rank.call().get().values()) == [0, 1]
    with pytest.raises(SupervisionError):
        hosts.slice(hosts=1).spawn_procs()


def test_processes_that_were_stopped_are_no_failure_when_their_host_dies(
    tmp_path: Path, worker_loop: Any, client: Faults
) -> None:
    loop = worker_loop(in_directory(tmp_path, "one"))
    hosts = attach_to_workers(workers=[in_directory(tmp_path, "one")])
    hosts.spawn_procs().stop().get()
    hosts.spawn_procs()
    hosts.stop().get()
    loop.kill()
    with pytest.raises(SupervisionError):
        hosts.spawn_procs()  # the loss is known


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_loop_in_order(tmp_path: Path, number: int, worker_loop: Any, client: Faults) -> None:
    loop = worker_loop(in_directory(tmp_path, "one"))
    guest = attach_to_workers(workers=[in_directory(tmp_path, "one")]).spawn_procs().spawn("g", Guest, str(tmp_path))
    pid = guest.pid.call_one().get()
    assert (loop.end(number), loop.line(), without_knocks(loop.errors)) == (0, "over", "")
    assert not is_alive(pid)
    assert Path(tmp_path, str(pid)).read_text() == "None"
    assert not Path(tmp_path, "one").exists()
    assert client.next().mesh_name == "g"


def test_shutdown_ends_loops_that_run_until_then(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [in_directory(tmp_path, name) for name in ("forever", "until")]
    forever, until = (
        worker_loop(address, function)
        for address, function in zip(
            addresses, ("run_worker_loop_forever", "run_worker_loop_until_shutdown"), strict=True
        )
    )
    hosts = attach_to_workers(workers=addresses)
    pids = list(hosts.spawn_procs().spawn("guests", Guest).pid.call().get().values())
    hosts.shutdown().get(LIMIT)
    gone_soon(*pids)
    assert (until.wait(), until.line()) == (0, "over")
    assert forever.process.poll() is None
    guest = attach_to_workers(workers=addresses[:1]).spawn_procs().spawn("guest", Guest)
    assert guest.rank.call_one().get(LIMIT) == 0


def test_where_one_host_fails_the_others_keep_nothing(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    addresses = [in_directory(tmp_path, name) for name in ("one", "two")]
    worker_loop(addresses[0])
    worker_loop(addresses[1], GREETING="fail")
    hosts, place = attach_to_workers(workers=addresses), str(tmp_path)

    def begin() -> None:
        if os.environ.get("GREETING"):
            raise ValueError("not here")
        Path(place, f"pid-{os.getpid()}").touch()

    with pytest.raises(SupervisionError, match="ValueError: not here"):
        hosts.spawn_procs({"gpus": 2}, bootstrap=begin)
    pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    gone_soon(*pids)


# --- joining a running job


JOB = """
from test_attach import Guest
from test_controller import Counter
from monarch_rdma.actor import attach_to_workers, get_or_spawn_controller
hosts = attach_to_workers(workers=sys.argv[1:])
guest = hosts.spawn_procs().spawn("guest", Guest)
get_or_spawn_controller("counter", Counter, 10).get().count.call_one().get()
say(guest.address.call_one().get())
say(guest.pid.call_one().get())
hear()
"""


def test_a_client_joins_through_any_process(tmp_path: Path, worker_loop: Any, program: Any, client: Faults) -> None:
    from test_controller import Counter

    from monarch_rdma.actor import get_or_spawn_controller

    loop = worker_loop(in_directory(tmp_path, "one"))
    job = program(JOB, in_directory(tmp_path, "one"))
    address, theirs = job.line(), int(job.line())
    attach(address)
    mine = this_host().spawn_procs().spawn("guest", Guest)
    pid = mine.pid.call_one().get()
    assert parent_of(parent_of(pid)) == loop.pid
    counter = get_or_spawn_controller("counter", Counter, 0).get()
    assert counter.count.call_one().get() == 12
    assert counter.pid.call_one().get() == job.pid
    with pytest.raises(ConfigError, match="part of a job already"):
        attach(address)
    shutdown_context().get(LIMIT)
    gone_soon(pid)
    assert is_alive(theirs)


def test_joining_through_a_worker_loop_makes_a_client_of_its_own(
    tmp_path: Path, worker_loop: Any, client: Faults
) -> None:
    loop = worker_loop(in_directory(tmp_path, "one"))
    attach(in_directory(tmp_path, "one"))
    assert this_host().sizes == {}
    assert parent_of(parent_of(this_host().spawn_procs().spawn("g", Guest).pid.call_one().get())) == loop.pid
    assert repr(context().actor_instance) == "<root>"


# --- who is refused


def test_another_secret_is_refused(tmp_path: Path, worker_loop: Any, program: Any, client: Faults) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    loop = worker_loop(address, secret_file=make_secret(tmp_path / "other.secret"))
    begin = time.monotonic()
    with pytest.raises(AuthenticationError, match="no member of this job"):
        attach_to_workers(workers=[address])
    with pytest.raises(AuthenticationError):
        attach(address)
    assert time.monotonic() - begin < LIMIT and loop.process.poll() is None


def test_without_a_secret_nobody_listens_or_attaches() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: run_worker_loop_forever(address="tcp://127.0.0.1:22222"),
        lambda: start_worker_loop_forever(address="ipc://@name"),
        lambda: attach_to_workers(workers=["tcp://127.0.0.1:22222"]),
        lambda: attach("tcp://127.0.0.1:22222"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"no job secret.*secret_file.*Secret\.generate\(\)\.write_file"):
            call()


def test_private_key_is_the_secret(tmp_path: Path, secret_file: Path, program: Any) -> None:
    address = in_directory(tmp_path, "one")
    loop = program(
        "import pathlib, monarch_rdma.actor\n"
        "monarch_rdma.actor.run_worker_loop_forever(address=sys.argv[1], private_key=pathlib.Path(sys.argv[2]))",
        address,
        str(secret_file),
        secret_file=None,
    )
    try:
        hosts = attach_to_workers(workers=[address], private_key=secret_file.read_bytes())
        assert hosts.spawn_procs().spawn("guest", Guest).rank.call_one().get(LIMIT) == 0
        with pytest.raises(ConfigError, match="not the job secret that this process has"):
            attach_to_workers(workers=[address], private_key=Secret.generate().reveal())
        assert attach_to_workers(workers=[address]) == hosts  # it is known by now
    finally:
        close_current()
        default_engine().close()
    assert loop.end() == 0, loop.errors


@pytest.mark.parametrize("key", [b"short", "job.secret", 5])
def test_private_key_that_is_none(key: Any) -> None:
    with pytest.raises(ConfigError, match="16 to 4096 bytes|private_key is a"):
        attach_to_workers(workers=["tcp://127.0.0.1:22222"], private_key=key)


def test_private_key_beside_another_secret(secret_file: Path) -> None:
    config.configure(secret_file=str(secret_file))
    with pytest.raises(ConfigError, match="not the job secret that this process has"):
        run_worker_loop_forever(address="tcp://127.0.0.1:22222", private_key=b"0123456789abcdef")


def test_certificates_are_refused_and_trust_is_not_taken(
    tmp_path: Path, worker_loop: Any, client: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_secret, "_has_warned", False)
    worker_loop(in_directory(tmp_path, "one"))
    with pytest.warns(UserWarning, match="ignored: the job secret decides") as caught:
        attach_to_workers(workers=[in_directory(tmp_path, "one")], ca="trust_all_connections")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        attach_to_workers(workers=[in_directory(tmp_path, "one")], ca="trust_all_connections")
    with pytest.raises(ConfigError, match="certificates are not used"):
        attach_to_workers(workers=[in_directory(tmp_path, "one")], ca=b"pem")


# --- addresses that do not work


def test_a_port_that_is_taken(client: Faults) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        before = config.get_runtime_config()
        with pytest.raises(ResourceExhausted, match=f"address '{address}' is taken"):
            start_worker_loop_forever(address=address)
        with pytest.raises(ResourceExhausted, match="is taken") as caught:  # as ever, where it is caught
            run_worker_loop_forever(address=address)
        assert caught.typename == "ResourceExhausted" and caught.value.operation == "listen"
        assert config.get_runtime_config() == before
    start_worker_loop_forever(address=address)
    assert f"//127.0.0.1:{server_port(address)}/" in default_engine().address


def server_port(address: str) -> str:
    return address.rpartition(":")[2]


def test_a_file_that_is_taken_or_left_behind(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    address = in_directory(tmp_path, "one")
    loop = worker_loop(address)
    attach_to_workers(workers=[address])
    second = worker_loop(address)
    assert second.wait() == 1
    assert re.fullmatch("monarch_rdma: .* is taken.*", second.errors.strip())  # a sentence, no traceback
    loop.kill()
    assert Path(tmp_path, "one").exists()
    with pytest.raises(PeerLost, match="its process has ended"):
        attach_to_workers(workers=[address], timeout=0.1)
    worker_loop(address)
    attach_to_workers(workers=[address])


def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, client: Faults) -> None:
    Path(tmp_path, "notes").write_text("mine")
    with pytest.raises(ConfigError, match="something else in it"):
        start_worker_loop_forever(address=in_directory(tmp_path, "notes"))
    assert Path(tmp_path, "notes").read_text() == "mine"
    os.symlink(tmp_path / "notes", tmp_path / "link")
    with pytest.raises(ConfigError, match="cannot be made"):
        start_worker_loop_forever(address=in_directory(tmp_path, "link"))


def test_workers_that_are_not_there(tmp_path: Path, client: Faults) -> None:
    for address in (f"tcp://127.0.0.1:{free_port()}", in_directory(tmp_path, "nothing")):
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="no process of the job was reached at .* within 0.3 s"):
            attach_to_workers(workers=[address], timeout=0.3)
        assert time.monotonic() - begin < SOON


def test_something_that_says_nothing(client: Faults) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin = time.monotonic()
        with pytest.raises((TransferTimeout, PeerLost)):
            attach_to_workers(workers=[f"127.0.0.1:{server.getsockname()[1]}"], timeout=0.3)
        assert time.monotonic() - begin < SOON


def test_a_member_that_is_no_worker(tmp_path: Path, secret_file: Path, worker_loop: Any, client: Faults) -> None:
    with (
        Engine(secret=Secret.from_file(secret_file)) as engine,
        pytest.raises(ConfigError, match="is no worker loop, nor a client"),
    ):
        attach_to_workers(workers=[engine.address], timeout=LIMIT)
    worker_loop(in_directory(tmp_path, "one"))
    hosts = attach_to_workers(workers=[in_directory(tmp_path, "one")])
    address = hosts.spawn_procs().spawn("guest", Guest).address.call_one().get()
    with pytest.raises(ConfigError, match="is no worker loop: it was started by one"):
        attach_to_workers(workers=[address])
    with pytest.raises(ConfigError, match="are the same process"):
        attach_to_workers(
            workers=[in_directory(tmp_path, "one"), in_directory(tmp_path, "../" + tmp_path.name + "/one")]
        )


def test_arguments(client: Faults) -> None:
    with pytest.raises(ConfigError, match="workers is empty"):
        attach_to_workers(workers=[])
    with pytest.raises(ConfigError, match=r"workers\[1\] is a int"):
        attach_to_workers(workers=["a:1", 5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="timeout is -1"):
        attach_to_workers(workers=["a:1"], timeout=-1)
    with pytest.raises(ConfigError, match="address is a int"):
        attach(5)  # type: ignore[arg-type]


def test_a_process_that_has_begun_otherwise(secret_file: Path) -> None:
    try:
        this_host()  # with a secret of its own
        config.configure(secret_file=str(secret_file))
        with pytest.raises(ConfigError, match="begun with another job secret, or with none"):
            attach_to_workers(workers=["127.0.0.1:22222"])
        with pytest.raises(ConfigError, match="option .* now, but this process's engine was created with"):
            start_worker_loop_forever(address=f"tcp://127.0.0.1:{free_port()}")
    finally:
        close_current()
        default_engine().close()


def test_a_client_that_others_cannot_reach_is_told(
    tmp_path: Path, worker_loop: Any, client: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_loop(in_directory(tmp_path, "one"))
    monkeypatch.setattr(attaching, "is_same_host", operator.eq)  # as if on different hosts
    with pytest.warns(UserWarning, match=r"this client listens on its own host only.*enable_transport\('tcp'\)"):
        attach_to_workers(workers=[in_directory(tmp_path, "one")])


# --- transports


@pytest.fixture
def no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_enabled", None)


@pytest.mark.usefixtures("no_transport")
def test_transport_says_from_where_we_can_be_reached() -> None:
    enable_transport("tcp")
    enable_transport(ChannelTransport.TcpWithHostname)  # the same again
    assert config.get("listen_host") == "0.0.0.0"
    with pytest.raises(ConfigError, match="only one transport can be enabled"):
        enable_transport("ipc")


@pytest.mark.usefixtures("no_transport")
@pytest.mark.parametrize("name", ["ipc", "unix", "Unix", "local", ChannelTransport.TcpWithLocalhost])
def test_transports_within_a_host(name: Any) -> None:
    enable_transport(name)
    assert config.get("listen_host") == "127.0.0.1"


@pytest.mark.usefixtures("no_transport")
def test_transport_by_address() -> None:
    enable_transport("tcp://127.0.0.1:23456")
    assert (config.get("listen_host"), config.get("port_min")) == ("127.0.0.1", 23456)


@pytest.mark.usefixtures("no_transport")
@pytest.mark.parametrize(
    ("name", "problem"),
    [("ipcc", "did you mean 'ipc'"), ("quic", "does not exist here"), (5, "transport is a int"), ("foo://x", "foo")],
)
def test_transports_that_there_are_not(name: Any, problem: str) -> None:
    before = config.get_runtime_config()
    with pytest.raises(ConfigError, match=problem):
        enable_transport(name)
    assert config.get_runtime_config() == before


@pytest.mark.usefixtures("no_transport")
def test_transport_comes_first(client: Faults) -> None:
    this_host()
    with pytest.raises(ConfigError, match="option listen_host is '0.0.0.0' now"):
        enable_transport("tcp")
    enable_transport("ipc")  # what it has anyway
