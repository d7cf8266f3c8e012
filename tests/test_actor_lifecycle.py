"""How processes and actors come and end: stops, exits, kills of the client; and that nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from actor_client import LIMIT, Faults, Stage, hold, hold_async, wait_until

from monarch_rdma import config
from monarch_rdma.actor import (
    Actor,
    Channel,
    HostMesh,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
    this_proc,
)
from monarch_rdma.errors import ConfigError

PROGRAMS = Path(__file__).parent / "actor_programs"
SOON = 30.0  # seconds: workers are gone within 2, where others do not use the processors


class Mortal(Actor):
    def __init__(self, ending: Port[Any] | None = None) -> None:
        self.ending = ending

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def stop_itself(self) -> str:
        context().actor_instance.stop("enough")
        return "answered"

    @endpoint
    def spawn_below(self, ending: Port[Any]) -> Any:
        self.below = this_proc().spawn("below", Mortal, ending)
        return self.below

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ending is not None:
            self.ending.send(error)


class Parent(Actor):
    @endpoint
    def exit_codes_of_terminated_forks(self) -> list[int | None]:
        children = [multiprocessing.get_context("fork").Process(target=signal.pause) for _ in range(10)]
        for child in children:
            child.start()
            child.terminate()  # at once: it may not have begun
        for child in children:
            child.join(LIMIT / 20)
            child.kill()
        return [child.exitcode for child in children]


class AsyncMortal(Actor):
    def __init__(self, ending: Port[Any]) -> None:
        self.ending = ending

    @concurrent_endpoint
    async def wait(self, started: Port[Any]) -> Any:
        return await hold_async(started)

    async def __cleanup__(self, error: BaseException | None) -> None:
        self.ending.send(error)


class BadEnd(Actor):
    def __init__(self, kind: type[BaseException] = LookupError) -> None:
        self.kind = kind

    def __cleanup__(self, error: BaseException | None) -> None:
        raise self.kind("in cleanup")


class AsyncBadEnd(BadEnd):
    @endpoint
    async def be_async(self) -> None:
        """Gives the actor an event loop."""


def exists(pid: int) -> bool:
    """Whether it runs; who ended it may not have reaped it yet."""
    try:
        return not is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


# --- stops


def test_stopped_processes_are_gone(client: HostMesh) -> None:
    procs = client.spawn_procs({"n": 3})
    mortals = procs.spawn("mortals", Mortal)
    pids = list(mortals.pid.call().get(LIMIT).values())
    procs.stop().get(LIMIT)
    assert not any(exists(pid) for pid in pids)
    procs.stop().get(LIMIT)
    with pytest.raises(SupervisionError):
        mortals.pid.call().get(LIMIT)
    with pytest.raises(RuntimeError):
        procs.spawn("late", Mortal)


def test_a_with_block_ends_its_processes(client: HostMesh) -> None:
    with client.spawn_procs({"n": 2}) as procs:
        pids = list(procs.spawn("mortals", Mortal).pid.call().get(LIMIT).values())
    assert not any(exists(pid) for pid in pids)


def test_stopping_some_processes_leaves_the_others(client: HostMesh) -> None:
    procs = client.spawn_procs({"n": 3})
    mortals = procs.spawn("mortals", Mortal)
    procs.slice(n=1).stop().get(LIMIT)
    assert len(mortals.slice(n=slice(0, 3, 2)).pid.call().get(LIMIT)) == 2
    procs.stop().get(LIMIT)


@pytest.mark.parametrize("cls", [Mortal, AsyncMortal])
@pytest.mark.parametrize("by", ["actor", "process"])
def test_cleanup_runs_when_an_actor_is_stopped(client: HostMesh, cls: Any, by: str) -> None:
    port, receiver = Channel.open()
    procs = client.spawn_procs()
    mesh = procs.spawn("mortal", cls, port)
    mesh.initialized.get(LIMIT)
    (mesh if by == "actor" else procs).stop("enough").get(LIMIT)
    assert receiver.recv().get(LIMIT) is None
    procs.stop().get(LIMIT)


def test_cleanup_is_told_of_a_failure(procs: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel.open()
    mesh = procs.spawn("mortal", Mortal, port).slice(gpus=0)
    mesh.wait.broadcast("not a port")
    assert isinstance(receiver.recv().get(LIMIT), BaseException)
    faults.next()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_gets_a_signal_ends_in_order(client: HostMesh, faults: Faults, number: signal.Signals) -> None:
    port, receiver = Channel.open()
    mortal = client.spawn_procs().spawn("mortal", Mortal, port)
    os.kill(mortal.pid.call_one().get(LIMIT), number)
    assert receiver.recv().get(LIMIT) is None  # its __cleanup__
    failure = faults.next()
    assert (failure.kind, failure.exit_code, failure.lines) == ("process", 0, ())


@pytest.mark.parametrize("cls", [BadEnd, AsyncBadEnd])
@pytest.mark.parametrize("kind", [LookupError, SystemExit, KeyboardInterrupt])
def test_a_failing_cleanup_is_a_failure_of_the_actor(
    procs: ProcMesh, faults: Faults, cls: Any, kind: type[BaseException]
) -> None:
    mesh = procs.slice(gpus=0).spawn("bad end", cls, kind)
    stopping = mesh.stop()
    report = faults.next().report()
    assert f"{kind.__name__}: in cleanup" in report and "_Ended" not in report, report
    stopping.exception(LIMIT)


@pytest.mark.parametrize("name", ["with space", "line\n", "caf\u00e9", "\0", "n" * 201, 5])
def test_names_that_processes_cannot_have_are_refused(client: HostMesh, name: Any) -> None:
    with pytest.raises(ConfigError, match="^name is .* printable ASCII characters without spaces"):
        client.spawn_procs(name=name)


def test_what_an_endpoint_forks_can_be_terminated(procs: ProcMesh) -> None:
    parents = procs.spawn("parents", Parent)
    assert list(parents.exit_codes_of_terminated_forks.call().get(LIMIT).values()) == [[-signal.SIGTERM] * 10] * 2
    parents.stop().get(LIMIT)


def test_messages_before_a_stop_are_worked_on_those_after_it_refused(procs: ProcMesh) -> None:
    mesh, stage = procs.spawn("mortal", Mortal).slice(gpus=0), Stage()
    before = [mesh.wait.call_one(stage.port), mesh.pid.call_one()]
    stopped = mesh.stop()
    after = mesh.pid.call_one()
    stage.next().send("done")
    assert before[0].get(LIMIT) == "done"
    assert before[1].get(LIMIT) > 0
    stopped.get(LIMIT)
    with pytest.raises(SupervisionError, match="mortal.*stopped"):
        after.get(LIMIT)
    mesh.stop().get(LIMIT)


def test_a_stop_ends_concurrent_messages(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    mesh, stage = procs.spawn("mortal", AsyncMortal, port).slice(gpus=1), Stage()
    running = [mesh.wait.call_one(stage.port) for _ in range(5)]
    for _ in running:
        stage.next()
    mesh.stop().get(LIMIT)
    assert all(future.exception(LIMIT) is not None for future in running)
    assert receiver.recv().get(LIMIT) is None


def test_an_actor_may_stop_itself(procs: ProcMesh) -> None:
    mesh = procs.spawn("mortal", Mortal).slice(gpus=0)
    assert mesh.stop_itself.call_one().get(LIMIT) == "answered"
    with pytest.raises(SupervisionError, match="mortal"):
        mesh.pid.call_one().get(LIMIT)


def test_calls_that_run_when_their_process_is_stopped_end(client: HostMesh) -> None:
    with config.configured(cleanup_timeout=0.3):
        procs = client.spawn_procs()
    mesh, stage = procs.spawn("mortal", Mortal), Stage()
    running, waiting = mesh.wait.call_one(stage.port), mesh.pid.call_one()
    stage.next()
    started = time.monotonic()
    procs.stop().get(LIMIT)
    assert running.exception(LIMIT) is not None
    assert waiting.exception(LIMIT) is not None or waiting.get() > 0  # it came before the stop: it may have its turn
    assert time.monotonic() - started < LIMIT / 2


def test_what_an_actor_spawned_ends_with_its_process(client: HostMesh) -> None:
    port, receiver = Channel.open()
    procs = client.spawn_procs()
    below = procs.spawn("mortal", Mortal).spawn_below.call_one(port).get(LIMIT)
    assert below.pid.call_one().get(LIMIT) > 0
    procs.stop().get(LIMIT)
    assert receiver.recv().get(LIMIT) is None
    with pytest.raises(SupervisionError):
        below.pid.call_one().get(LIMIT)


def test_spawning_and_stopping_leaves_nothing_behind(client: HostMesh) -> None:
    def once() -> None:
        with client.spawn_procs({"n": 2}) as procs:
            assert len(procs.spawn("mortals", Mortal).pid.call().get(LIMIT)) == 2

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    once()
    before = descriptors()
    for _ in range(5):
        once()
    wait_until(lambda: descriptors() <= before, lambda: f"{descriptors()} descriptors, {before} before")


def test_many_actors_come_and_go_in_one_process(procs: ProcMesh) -> None:
    one = procs.slice(gpus=0)
    keeper = one.spawn("keeper", Mortal)
    process = psutil.Process(keeper.pid.call_one().get(LIMIT))
    before = process.num_threads(), process.num_fds()
    for _ in range(30):
        mortal = one.spawn("mortal", Mortal)
        mortal.pid.call_one().get(LIMIT)
        mortal.stop().get(LIMIT)
    wait_until(
        lambda: (process.num_threads(), process.num_fds()) <= before,
        lambda: f"{before} threads and descriptors before, {process.num_threads(), process.num_fds()} after",
    )


# --- the end of the client


@contextmanager
def client_program(name: str, *args: str, errors: int | IO[bytes] = subprocess.DEVNULL) -> Iterator[Any]:
    """A program of actor_programs that prints pids and "ready": the process, and its whole family."""
    command = [sys.executable, str(PROGRAMS / name), *args]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        family = [psutil.Process(pid) for pid in pids]
        family += [child for child in psutil.Process(process.pid).children(recursive=True) if child not in family]
        assert process.stdout.readline() == b"ready\n"
        yield process, family
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # since that moment
        return True


def all_gone(family: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: all(is_gone(process) for process in family)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_are_gone_soon_after_a_signal_ended_the_client(number: signal.Signals) -> None:
    with client_program("holds_work.py", "wait") as (process, family):
        process.send_signal(number)
        wait_until(all_gone(family), lambda: f"left: {[p for p in family if not is_gone(p)]}", SOON)
        process.wait(LIMIT)
        assert process.returncode != 0


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("exit", 3), ("abort", 4)])
def test_a_client_that_ends_with_work_in_flight_ends_its_workers(how: str, code: int) -> None:
    with client_program("holds_work.py", how) as (process, family):
        started = time.monotonic()
        process.stdin.close()  # it waits for that: else it may have ended before its family is known
        assert process.wait(LIMIT) == code
        wait_until(all_gone(family), lambda: f"left: {[p for p in family if not is_gone(p)]}", SOON)
        assert time.monotonic() - started < SOON


def test_ctrl_c_in_a_terminal_ends_the_client_quietly() -> None:
    """The whole foreground group gets it; only the client's own traceback is seen."""
    with client_program("holds_work.py", "wait", errors=subprocess.PIPE) as (process, family):
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=LIMIT)[1].decode()
        wait_until(all_gone(family), "workers are left", SOON)
        assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), said


def test_ctrl_c_while_the_client_ends_already_is_no_traceback() -> None:
    with client_program("holds_work.py", "linger", errors=subprocess.PIPE) as (process, family):
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=LIMIT)[1].decode() == ""
        wait_until(all_gone(family), "workers are left", SOON)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_ends_while_processes_come_up_ends_them(number: signal.Signals) -> None:
    with client_program("spawns_slowly.py") as (process, family):
        process.send_signal(number)
        wait_until(all_gone(family), lambda: f"left: {[p for p in family if not is_gone(p)]}", SOON)
        process.wait(LIMIT)


def test_a_program_whose_directory_is_gone_starts_processes(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os; from monarch_rdma.actor import this_host; os.rmdir(os.getcwd()); "
    code += "print(this_host().spawn_procs({'n': 2}).sizes)"
    environment = {**os.environ, "PYTHONPATH": str(PROGRAMS.parent.parent)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=gone, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.stdout == "{'n': 2}\n", ended.stderr


def test_a_call_while_the_interpreter_shuts_down_fails_with_a_sentence() -> None:
    command = [sys.executable, PROGRAMS / "called_too_late.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert "ConfigError: the interpreter is shutting down" in ended.stdout and not ended.stderr


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_a_failure_that_nobody_handles_ends_a_program_that_sleeps(of_sigint: Any) -> None:
    """Also one that ignores SIGINT, as those do that a shell starts in the background."""
    before = signal.signal(signal.SIGINT, of_sigint)
    try:
        command = [sys.executable, PROGRAMS / "sleeps.py"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.returncode not in (0, 3)
    assert "nothing handles this failure" in ended.stderr and "RuntimeError: stumbled" in ended.stderr
    assert "KeyboardInterrupt" not in ended.stderr and "time.sleep" not in ended.stderr
