"""The event log: what is written, what survives, and that a failure can be followed from its cause to its end."""

from __future__ import annotations

import ast
import doctest
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import Faults, client_of_its_own, wait_until

from monarch_rdma import config
from monarch_rdma.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint
from monarch_rdma.config import ConfigError, configured
from monarch_rdma.supervision import events
from monarch_rdma.supervision.events import KINDS, Event, Recording, causes, emit, read, subscribe

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    with configured(event_log=path):
        yield path


# --- emitting


def test_nothing_is_made_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "Event", None)  # making one would fail
    monkeypatch.setattr(events, "_deliver", None)
    first, second = emit("a.b", x=1), emit("a.b", x=1)
    assert first != second


def test_an_event_has_its_facts(log: Path) -> None:
    cause = emit("disk.failed", disk="sda")
    emit("disk.replaced", cause=cause, disk="sdb", kind="ssd", host="n2")
    first, second = read(log)
    assert (first.kind, first.cause, first.fields) == ("disk.failed", None, {"disk": "sda"})
    assert (second.id != first.id, second.cause) == (True, first.id == cause and cause)
    assert second.fields == {"disk": "sdb", "kind_": "ssd", "host_": "n2"}  # what would hide a fact is renamed
    assert (second.pid, second.host) == (os.getpid(), os.uname().nodename)
    assert second.monotonic >= first.monotonic and second.time > 1e9
    assert log.stat().st_mode & 0o777 == 0o600


def test_subscribers_hear_what_they_want_until_they_close() -> None:
    heard: list[str] = []
    with subscribe(lambda event: heard.append(event.kind), ["a", "c"]) as subscription:
        for kind in "abc":
            emit(kind)
        subscription.close()
        emit("a")
        subscription.close()
    emit("c")
    assert heard == ["a", "c"]


def test_a_subscriber_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no")

    with subscribe(fail), Recording() as recording:
        emit("a", x=1)
    assert [event.fields for event in recording.events] == [{"x": 1}]
    assert "who listens to events has failed at a" in caplog.text


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with configured(event_log=tmp_path / "missing" / "log"), Recording() as recording:
        for _ in range(3):
            emit("a")
    assert len(recording.events) == 3
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.name for record in warnings] == ["monarch_rdma.supervision"]
    assert "missing" in warnings[0].getMessage()


def test_any_value_can_be_a_field(log: Path) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd"

    loop: list[Any] = []
    loop.append(loop)
    emit("a", odd=Odd(), long="x" * 100_000, bad="\ud800\n", numbers=(1, 2), table={1: "one"})
    emit("b", loop=loop)  # cannot be written
    emit("c")
    written = read(log)
    assert [event.kind for event in written] == ["a", "c"]
    fields = written[0].fields
    assert fields["odd"] == "odd" and fields["numbers"] == [1, 2] and fields["table"] == {"1": "one"}
    assert fields["bad"] == "\ud800\n" and fields["long"].endswith("(91808 more characters)")
    assert len(log.read_bytes().splitlines()) == 2


def test_a_relative_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"option event_log is 'log', but must be an absolute path"):
        config.configure(event_log="log")
    monkeypatch.setenv("MONARCH_RDMA_EVENT_LOG", "log")
    monkeypatch.setattr(events._log_of_process, "file", config.Kept("event_log", str))
    with Recording() as recording:
        emit("a")  # as anything else that is wrong with the log, it hurts nobody
    assert [event.kind for event in recording.events] == ["a"]


def test_lines_of_threads_and_processes_do_not_mix(log: Path) -> None:
    def emit_many() -> None:
        for number in range(200):
            emit("many", number=number, text="x" * 3000)

    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            emit_many()
            os._exit(0)
        children.append(pid)
    threads = [threading.Thread(target=emit_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    written = read(log)
    assert len(written) == len(log.read_bytes().splitlines()) == 1200
    assert len({event.id for event in written}) == 1200
    assert {event.pid for event in written} == {os.getpid(), *children}


def test_what_a_killed_process_emitted_is_there(log: Path) -> None:
    pid = os.fork()
    if pid == 0:
        emit("last.words")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [event.kind for event in read(log)] == ["last.words"]


# --- reading


def test_lines_that_are_no_events_are_left_out(log: Path) -> None:
    emit("a")
    whole = log.read_bytes()
    record = json.loads(whole)
    with log.open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n3\n"x"\n{}\n\n')
        file.write(json.dumps(record | {"time": "now"}).encode() + b"\n")
        file.write(b"[" * 100_000 + b"\n")
    emit("b")
    with log.open("ab") as file:
        file.write(whole[: len(whole) // 2])  # the machine went down
    assert [event.kind for event in read(log)] == ["a", "b"]


def test_every_prefix_of_a_log_can_be_read(log: Path, tmp_path: Path) -> None:
    for number in range(3):
        emit("a", number=number)
    whole, part = log.read_bytes(), tmp_path / "part"
    for length in range(len(whole) + 1):
        part.write_bytes(whole[:length])
        complete = whole[: length + 1].count(b"\n")  # a line needs no end
        assert [event.fields["number"] for event in read(part)] == list(range(complete))


def test_causes_end_where_they_are_not_known_and_never_go_round() -> None:
    with Recording() as recording:
        first = emit("a", x=1)
        second = emit("b", cause=first)
        emit("c", cause=second)
        emit("d", cause="elsewhere.1")
    a, b, c, d = recording.events
    assert list(causes(c, recording.events)) == [b, a]
    assert list(causes(c, [c, a])) == list(causes(d, recording.events)) == list(causes(a, recording.events)) == []
    ring = [Event("1", "x", 0, 0, "", 0, "", "2"), Event("2", "x", 0, 0, "", 0, "", "1")]
    assert list(causes(ring[0], ring)) == [ring[1]]


def test_a_recording_waits_and_gives_up() -> None:
    with Recording("a") as recording:
        timer = threading.Timer(0.05, emit, ["a"], {"x": [2]})
        timer.start()
        assert recording.wait("a", x=[2], timeout=20.0).fields == {"x": [2]}
        timer.join()
        with pytest.raises(TimeoutError, match=r"no event a \{'x': 3\} within 0.01 s"):
            recording.wait("a", x=3, timeout=0.01)


# --- what the library emits


class Victim(Actor):
    @endpoint
    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")


class Owner(Actor):
    """Takes care of the failures of what it spawned where `handles` says so."""

    def __init__(self, handles: bool, host: HostMesh) -> None:
        self.handles = handles
        self.procs = host.spawn_procs({"gpus": 2}, name="below")
        self.victims = self.procs.spawn("victims", Victim)
        self.victims.initialized.get()

    def __supervise__(self, failure: MeshFailure) -> bool:
        return self.handles

    @endpoint
    def lose_one(self) -> str:
        with pytest.raises(SupervisionError) as lost:
            self.victims.slice(gpus=1).die.call_one(signal.SIGKILL).get()
        return str(lost.value.event)


def wait_for(log: Path, kind: str, **fields: Any) -> Event:
    found: list[Event] = []

    def is_there() -> bool:
        found[:] = [event for event in read(log) if event.kind == kind and event.has(fields)]
        return bool(found)

    wait_until(is_there, lambda: f"no {kind} {fields} in {[event.kind for event in read(log)]}")
    return found[0]


def chain(event: Event, log: Path) -> list[str]:
    return [event.kind, *(cause.kind for cause in causes(event, read(log)))]


def test_a_failure_that_is_handled_can_be_followed(log: Path) -> None:
    with client_of_its_own() as host:
        owner = host.spawn_procs(name="above").spawn("owner", Owner, True, host)
        lost = owner.lose_one.call_one().get()
        handled = wait_for(log, "failure.handled", actor="owner", mesh="victims", rank=1)
        assert chain(handled, log) == ["failure.handled", "process.failed"]
        failed = wait_for(log, "process.failed", mesh="below", rank=1)
        assert (failed.fields["returncode"], handled.cause) == (-signal.SIGKILL, failed.id)
        told = wait_for(log, "failure.told", mesh="below", rank=1)
        assert (told.cause, told.fields["owner"]) == (failed.id, "above/0")
        ended = next(event for event in read(log) if event.id == lost)
        assert chain(ended, log) == ["call.lost", "peer.lost"]
        assert (ended.process, ended.fields["endpoint"]) == ("above/0", "victims.die")
        started = [event.fields["name"] for event in read(log) if event.kind == "process.started"]
        assert started == ["above/0", "below/0", "below/1"]
    stopped = {event.fields["name"]: event.fields for event in read(log) if event.kind == "process.stopped"}
    assert sorted(stopped) == ["above/0", "below/0"]
    assert all(fields["returncode"] is not None for fields in stopped.values())


def test_a_failure_that_nobody_handles_reaches_the_client(log: Path, faults_of_its_own: Faults) -> None:
    with client_of_its_own() as host, Recording("fault.unhandled") as recording:
        owner = host.spawn_procs(name="above").spawn("owner", Owner, False, host)
        owner.lose_one.call_one().get()
        failure = faults_of_its_own.next()
        fault = recording.wait("fault.unhandled", 60.0, mesh="owner", rank=0)
        assert fault.cause == failure.event
        assert chain(fault, log) == ["fault.unhandled", "actor.failed", "failure.unhandled", "process.failed"]
        assert "killed by SIGKILL" in fault.fields["report"]


def test_an_actor_that_fails_and_one_that_is_stopped(log: Path, faults_of_its_own: Faults) -> None:
    with client_of_its_own() as host:
        procs = host.spawn_procs(name="procs")
        victim = procs.spawn("victim", Victim)
        victim.fail.broadcast()
        failure = faults_of_its_own.next()
        assert chain(wait_for(log, "fault.unhandled"), log) == ["fault.unhandled", "actor.failed"]
        failed = wait_for(log, "actor.failed", mesh="victim", rank=0)
        assert (failed.id, failed.process) == (failure.event, "procs/0")
        assert failed.fields["message"].endswith("ValueError: on purpose")
        other = procs.spawn("other", Victim)
        other.stop("it has done enough").get()
        wait_for(log, "actor.stopped", mesh="other", rank=0)
        assert wait_for(log, "mesh.stopped", mesh="other").fields["reason"] == "it has done enough"
        assert wait_for(log, "mesh.spawned", mesh="other").fields["ranks"] == 1


@pytest.fixture
def faults_of_its_own() -> Iterator[Faults]:
    from actor_client import faults_recorded

    with faults_recorded() as recorded:
        yield recorded


def test_every_kind_is_in_the_table_and_in_the_docs() -> None:
    emitted: set[str] = set()
    for path in (ROOT / "monarch_rdma").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "emit":
                parts = [part for kind in node.args[:1] for part in ast.walk(kind)]
                emitted |= {part.value for part in parts if isinstance(part, ast.Constant)}
    assert emitted == set(KINDS)
    page = (ROOT / "docs" / "events-and-metrics.md").read_text()
    assert [f"| `{kind}` | {said} |" for kind, said in KINDS.items() if f"| `{kind}` | {said} |" not in page] == []


def test_the_page_about_events_is_true() -> None:
    done = doctest.testfile(str(ROOT / "docs" / "events-and-metrics.md"), module_relative=False)
    assert (done.failed, done.attempted > 5) == (0, True)
