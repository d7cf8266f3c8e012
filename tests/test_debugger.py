"""breakpoint() in actors: who waits, who attaches, and how each wait ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from actor_client import LIMIT, Faults, wait_until
from knocks import without_knocks
from running_program import COMMAND, RunningProgram, Terminal, environment

from monarch_rdma import config
from monarch_rdma.actor import (
    Actor,
    ActorError,
    ActorMesh,
    HostMesh,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    debug_controller,
    endpoint,
    this_proc,
)
from monarch_rdma.actor.debugging.breakpoint_client import Attachment, Waiting, find_waiting
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import Cancelled, ConfigError


class Buggy(Actor):
    """Sync and async endpoints that stop."""

    @endpoint
    def halt(self, x: int) -> int:
        breakpoint()
        y = x + 1
        return y

    @endpoint
    async def halt_async(self, x: int) -> int:
        breakpoint()
        await asyncio.sleep(0)
        y = x + 1
        return y

    @concurrent_endpoint
    async def halt_beside(self, x: int) -> int:
        breakpoint()
        return x + 1

    @endpoint
    def loop(self, count: int) -> int:
        total = 0
        breakpoint()
        for step in range(count):
            total += step
        return total

    @endpoint
    def twice(self) -> int:
        breakpoint()
        x = 1
        breakpoint()
        return x + 1

    @endpoint
    def fail(self) -> None:
        breakpoint()
        raise KeyError("gone")

    @endpoint
    async def fail_async(self) -> None:
        breakpoint()
        raise KeyError("gone")

    @endpoint
    async def in_thread(self) -> int:
        return await asyncio.to_thread(_halt_in_thread)

    @endpoint
    def plain(self) -> str:
        return "fine"


def _halt_in_thread() -> int:
    breakpoint()
    x = 5
    return x


class Sync(Actor):
    """Without an event loop."""

    @endpoint
    def halt(self, x: int) -> int:
        breakpoint()
        y = x + 1
        return y

    @endpoint
    def plain(self) -> str:
        return "fine"


@pytest.fixture(scope="module")
def buggy(procs: ProcMesh) -> ActorMesh[Buggy]:
    return procs.spawn("buggy", Buggy)


@pytest.fixture(scope="module")
def sync(procs: ProcMesh) -> ActorMesh[Sync]:
    return procs.spawn("sync", Sync)


@pytest.fixture(autouse=True)
def nothing_waits_in_the_end(client: HostMesh, faults: Faults) -> Iterator[None]:
    yield
    assert find_waiting(current_proc().address) == []


def waiting(count: int = 1) -> list[Waiting]:
    """These, once so many wait."""
    found: list[Waiting] = []

    def look() -> bool:
        found[:] = find_waiting(current_proc().address)
        return len(found) == count and all(each.facts["waits"] for each in found)

    wait_until(look, lambda: f"{count} should wait, but {found}")
    return found


def entered(attached: Attachment, *lines: str) -> str:
    """What pdb answers to the last of the lines."""
    text = ""
    for line in lines:
        attached.enter(line)
        text = attached.next_text(LIMIT)
    return text


def behind(attached: Attachment) -> str:
    """What pdb shows at the line behind breakpoint(); from Python 3.13 on it stops at breakpoint() itself first."""
    return entered(attached, "n") if sys.version_info >= (3, 13) else attached.text


@pytest.mark.parametrize("name", ["halt", "halt_async", "halt_beside"])
def test_pdb_is_at_the_line_behind_and_the_call_goes_on(buggy: ActorMesh[Buggy], name: str) -> None:
    result = getattr(buggy.slice(gpus=1), name).call_one(4)
    (found,) = waiting()
    assert (found.actor, found.rank, found.coords) == ("buggy", 1, {"gpus": 1})
    assert found.process.endswith("/1")
    assert (found.facts["endpoint"], found.facts["function"]) == (name, name)
    with Attachment(found) as attached:
        assert f"{name}()" in attached.text and attached.waits
        assert entered(attached, "p x").startswith("4\n")
        assert entered(attached, "x = 10", "p x").startswith("10\n")
        assert "it goes on" in entered(attached, "c")
        assert attached.is_over
    assert result.get(LIMIT) == 11


def test_sync_actors_wait_too(sync: ActorMesh[Sync]) -> None:
    result = sync.halt.call(1)
    for found in waiting(2):
        with Attachment(found) as attached:
            assert "y = x + 1" in behind(attached)
            entered(attached, "c")
    assert result.get(LIMIT).values() == [2, 2]


def test_steps_lead_over_an_await(buggy: ActorMesh[Buggy]) -> None:
    result = buggy.slice(gpus=0).halt_async.call_one(4)
    with Attachment(waiting()[0]) as attached:
        assert "await asyncio.sleep(0)" in behind(attached)
        assert "y = x + 1" in entered(attached, "n")
        assert entered(attached, "n", "p y").startswith("5\n")
        assert "it goes on" in entered(attached, "c")
    assert result.get(LIMIT) == 5


@pytest.mark.parametrize("name", ["halt", "halt_async"])
def test_a_step_out_of_the_endpoint_continues(buggy: ActorMesh[Buggy], name: str) -> None:
    one = buggy.slice(gpus=0)
    result = getattr(one, name).call_one(4)
    with Attachment(waiting()[0]) as attached:
        while not attached.is_over:
            text = entered(attached, "n")
            assert "instance.py" not in text
    assert result.get(LIMIT) == 5
    assert one.plain.call_one().get(LIMIT) == "fine"


def test_a_breakpoint_set_in_pdb_stops_again_until_all_are_cleared(buggy: ActorMesh[Buggy]) -> None:
    result = buggy.slice(gpus=0).loop.call_one(5)
    with Attachment(waiting()[0]) as attached:
        assert "Breakpoint" in entered(attached, f"b {__file__}:{_line_of('total += step')}")
        for step in range(3):
            assert "total += step" in entered(attached, "c")
            assert entered(attached, "p step").startswith(f"{step}\n")
        assert "it goes on" in entered(attached, "clear", "c")
    assert result.get(LIMIT) == 10


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def test_two_breakpoints_on_the_way(buggy: ActorMesh[Buggy]) -> None:
    result = buggy.slice(gpus=0).twice.call_one()
    for text in ("x = 1", "return x + 1"):
        with Attachment(waiting()[0]) as attached:
            assert text in behind(attached)
            entered(attached, "c")
    assert result.get(LIMIT) == 2


def test_a_thread_of_an_endpoint_waits_under_its_actor(buggy: ActorMesh[Buggy]) -> None:
    one = buggy.slice(gpus=0)
    result = one.in_thread.call_one()
    (found,) = waiting()
    assert (found.actor, found.facts["function"]) == ("buggy", "_halt_in_thread")
    with Attachment(found) as attached:
        entered(attached, "c")
    assert result.get(LIMIT) == 5


@pytest.mark.parametrize("name", ["fail", "fail_async"])
def test_an_exception_leaves_pdb_and_reaches_the_caller(buggy: ActorMesh[Buggy], name: str) -> None:
    one = buggy.slice(gpus=0)
    result = getattr(one, name).call_one()
    with Attachment(waiting()[0]) as attached:
        assert "KeyError" in entered(attached, "n")
        while not attached.is_over:
            assert "instance.py" not in entered(attached, "n")
    with pytest.raises(ActorError, match="KeyError: 'gone'"):
        result.get(LIMIT)
    assert one.plain.call_one().get(LIMIT) == "fine"


def test_quit_fails_the_call_and_the_actor_lives_on(buggy: ActorMesh[Buggy]) -> None:
    one = buggy.slice(gpus=0)
    result = one.halt.call_one(1)
    with Attachment(waiting()[0]) as attached:
        assert "it was quit" in entered(attached, "q")
    with pytest.raises(ActorError, match="BdbQuit"):
        result.get(LIMIT)
    assert one.plain.call_one().get(LIMIT) == "fine"


@pytest.mark.parametrize("line", ["interact", "run", "restart"])
def test_commands_that_cannot_work_here_say_so(buggy: ActorMesh[Buggy], line: str) -> None:
    result = buggy.slice(gpus=0).halt.call_one(1)
    with Attachment(waiting()[0]) as attached:
        assert entered(attached, line).startswith("*** ")
        entered(attached, "c")
    assert result.get(LIMIT) == 2


def test_an_actor_of_the_client_waits_too(client: HostMesh) -> None:
    local = this_proc().spawn("local", Sync)
    result = local.halt.call_one(1)
    with Attachment(waiting()[0]) as attached:
        entered(attached, "c")
    assert result.get(LIMIT) == 2
    local.stop().get(LIMIT)


# --- who attaches


def test_what_was_printed_waits_for_who_comes(buggy: ActorMesh[Buggy]) -> None:
    result = buggy.slice(gpus=0).halt.call_one(1)
    (found,) = waiting()
    with Attachment(found) as attached:
        entered(attached, "p 'first'")
    with Attachment(found) as attached:
        assert attached.text.startswith("'first'\n") and attached.waits
        entered(attached, "c")
    assert result.get(LIMIT) == 2


def test_only_one_at_a_time(buggy: ActorMesh[Buggy]) -> None:
    result = buggy.slice(gpus=0).halt.call_one(1)
    (found,) = waiting()
    with Attachment(found) as attached:
        with pytest.raises(ConfigError, match=f"buggy 0 is being debugged by process {os.getpid()}"):
            Attachment(found)
        (seen,) = find_waiting(current_proc().address)
        assert seen.facts["attached"] == f"process {os.getpid()}"
        entered(attached, "c")
    with pytest.raises(ConfigError, match="does not wait at a breakpoint any more"):
        Attachment(found)
    assert result.get(LIMIT) == 2


def test_no_input_while_it_runs(client: HostMesh) -> None:
    _gate.clear()
    local = this_proc().spawn("gated", Gated)
    result = local.halt.call_one()
    with Attachment(waiting()[0]) as attached:
        assert "_gate.wait()" in behind(attached)
        attached.enter("n")
        with pytest.raises(ConfigError, match="gated 0 runs: it takes no input now"):
            attached.enter("n")
        with pytest.raises(TimeoutError):
            attached.next_text(0.0)
        _gate.set()
        assert "return 1" in attached.next_text(LIMIT)
        entered(attached, "c")
    assert result.get(LIMIT) == 1
    local.stop().get(LIMIT)


_gate = threading.Event()


class Gated(Actor):
    """In the client's process, held by the test."""

    @endpoint
    def halt(self) -> int:
        breakpoint()
        _gate.wait()
        return 1


# --- how waits end


@pytest.mark.parametrize("name", ["halt", "halt_async"])
def test_a_cancelled_call_waits_no_longer(buggy: ActorMesh[Buggy], name: str) -> None:
    one = buggy.slice(gpus=0)
    result = getattr(one, name).call_one(1)
    waiting()
    assert result.cancel()
    with pytest.raises(Cancelled):
        result.get()
    assert one.plain.call_one().get(LIMIT) == "fine"


def test_who_is_attached_may_look_on_at_a_cancelled_call(buggy: ActorMesh[Buggy]) -> None:
    one = buggy.slice(gpus=0)
    result = one.halt.call_one(1)
    (found,) = waiting()
    with Attachment(found) as attached:
        result.cancel()
        wait_until(lambda: find_waiting(current_proc().address)[0].facts["cancelled"], "it is not seen as cancelled")
        assert entered(attached, "p x").startswith("1\n")
    assert one.plain.call_one().get(LIMIT) == "fine"  # leaving it ended it


def test_a_call_that_was_cancelled_before_does_not_stop_at_all(buggy: ActorMesh[Buggy]) -> None:
    one = buggy.slice(gpus=0)
    first, second = one.twice.call_one(), one.twice.call_one()
    with Attachment(waiting()[0]) as attached:
        first.cancel(), second.cancel()
        wait_until(lambda: find_waiting(current_proc().address)[0].facts["cancelled"], "it is not seen as cancelled")
        entered(attached, "c")  # past the second breakpoint too
    assert one.plain.call_one().get(LIMIT) == "fine"


def test_processes_end_while_something_waits(client: HostMesh) -> None:
    with config.configured(cleanup_timeout=120.0, process_exit_timeout=120.0):
        procs = client.spawn_procs({"gpus": 2})
    sync, buggy = procs.spawn("sync", Sync), procs.spawn("buggy", Buggy)
    results = [sync.halt.call(1), buggy.halt_async.call(1)]
    waiting(4)
    procs.stop().get(LIMIT)
    for result in results:
        assert isinstance(result.exception(LIMIT), ActorError | SupervisionError)


def test_a_killed_process_ends_the_session_of_who_is_attached(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs()
    sync = procs.spawn("victim", Sync)
    result = sync.halt.call_one(1)
    (found,) = waiting()
    with Attachment(found) as attached:
        os.kill(found.pid, signal.SIGKILL)
        assert "lost" in attached.next_text(LIMIT)
        assert attached.is_over
    assert result.exception(LIMIT) is not None
    assert "SIGKILL" in faults.next().report()
    procs.stop().get(LIMIT)


def test_the_controller_tells_what_waits(buggy: ActorMesh[Buggy], capfd: pytest.CaptureFixture[str]) -> None:
    controller = debug_controller()
    assert controller.list.call_one(print_output=False).get(LIMIT) == []
    pending = controller.wait_pending_session.call_one()
    result = buggy.halt.call(1)
    pending.get(LIMIT)
    waiting(2)
    listed = controller.list.call_one().get(LIMIT)
    assert [(each.actor_name, each.rank, each.coords, each.function) for each in listed] == [
        ("buggy", 0, {"gpus": 0}, "halt"),
        ("buggy", 1, {"gpus": 1}, "halt"),
    ]
    for found in waiting(2):
        with Attachment(found) as attached:
            entered(attached, "c")
    assert result.get(LIMIT).values() == [2, 2]
    assert "buggy 0 {'gpus': 0}" in capfd.readouterr().out


def test_the_clients_own_code_keeps_its_hook(client: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("monarch_rdma.actor.debugging.breakpoints._others_hook", lambda: calls.append("own"))
    breakpoint()
    assert calls == ["own"]


# --- the command

PROGRAM = """
    class Buggy(Actor):
        @endpoint
        def halt(self, x):
            breakpoint()
            y = x + 1
            return y

        @endpoint
        def wait(self):
            breakpoint()
            while not os.path.exists(sys.argv[0] + ".go"):
                time.sleep(0.001)
            return 7

    if __name__ == "__main__":
        procs = this_host().spawn_procs({"gpus": 3})
        buggy = procs.spawn("buggy", Buggy)
        %s
        done()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., RunningProgram]]:
    """Starts a program whose actors stop, and that prints `values` in the end."""
    started: list[RunningProgram] = []

    def start(calls: str = "future = buggy.halt.call(1)", **variables: str) -> RunningProgram:
        started.append(RunningProgram(tmp_path, PROGRAM % calls, **variables))
        started[-1].line("ready")
        return started[-1]

    yield start
    for each in started:
        each.__exit__()


def told(program: RunningProgram, *lines: str) -> str:
    """What the debugger says to these lines."""
    done = program.command("debug", entered="".join(f"{line}\n" for line in lines))
    assert (done.returncode, without_knocks(done.stderr)) == (0, "")
    return done.stdout


def seen(program: RunningProgram) -> list[bool]:
    """Of each session whether it waits for input."""
    done = program.command("debug", "--json")
    assert done.returncode == 0, done.stderr
    return [each["waits"] for each in json.loads(done.stdout)]


def listed(program: RunningProgram, count: int) -> None:
    """Until so many wait."""
    wait_until(lambda: seen(program) == [True] * count, f"{count} should wait")


def test_the_command_lists_attaches_casts_and_continues(program: Callable[..., RunningProgram]) -> None:
    running = program()
    listed(running, 3)
    steps = ["n"] * (2 if sys.version_info >= (3, 13) else 1)  # see behind()
    said = told(running, "attach buggy 1", *steps, "p y", "c", "list", "cast buggy ranks(gpus=(0,2)) p x + 40")
    assert "attached to buggy 1 in procs0/1" in said
    assert "-> return y" in said and "(Pdb) 2\n" in said and "it goes on" in said
    assert said.count("buggy  1") == 1  # of the first list alone
    assert "[buggy 0, buggy 2]\n  41\n" in said
    said = told(running, "continue", "list", "quit")
    assert "[buggy 0, buggy 2]\n  it goes on\n" in said and "nothing waits at a breakpoint" in said


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("attach buggy 7", "buggy 7 does not wait at a breakpoint"),
        ("attach nobody 0", "nobody 0 does not wait at a breakpoint"),
        ("attach buggy", "attach takes ACTOR RANK [PID], not 'buggy'"),
        ("cast buggy ranks(9) c", "none of them waits at a breakpoint"),
        ("frobnicate", "there is no command 'frobnicate'; help lists them"),
        ("help", "cast ACTOR ranks(...) COMMAND"),
    ],
)
def test_the_command_says_what_is_wrong(shared: RunningProgram, line: str, answer: str) -> None:
    assert answer in told(shared, line)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProgram]:
    with RunningProgram(tmp_path_factory.mktemp("shared"), PROGRAM % "future = buggy.halt.call(1)") as running:
        running.line("ready")
        yield running


def test_at_a_terminal(program: Callable[..., RunningProgram]) -> None:
    running = program("future = buggy.slice(gpus=0).wait.call_one()")
    listed(running, 1)
    terminal = Terminal([*COMMAND, "debug"], environment(running.directory))
    try:
        terminal.wait_for("debug> ")
        terminal.type("attach buggy 0\n")
        terminal.wait_for("(Pdb) ")
        terminal.type("p 6 * 7\n")
        terminal.wait_for("42")
        terminal.wait_for("(Pdb) ")
        terminal.type("\x04")  # Ctrl-D leaves the actor
        terminal.wait_for("detached from buggy 0")
        terminal.wait_for("debug> ")
        terminal.type("attach buggy 0\n")
        terminal.wait_for("(Pdb) ")
        terminal.type(f"unt {8 + _line_in(running.script, 'breakpoint()', 2)}\n")
        wait_until(lambda: seen(running) == [False], "it should run")
        terminal.type("\x03")
        terminal.wait_for("detached from buggy 0")
        terminal.wait_for("debug> ")
        Path(f"{running.script}.go").touch()
        terminal.type("quit\n")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()


def _line_in(script: Path, text: str, which: int) -> int:
    found = [number for number, line in enumerate(script.read_text().splitlines(), 1) if line.strip() == text]
    return found[which - 1]


def test_a_debugger_that_is_killed_lets_others_attach(program: Callable[..., RunningProgram]) -> None:
    running = program("future = buggy.slice(gpus=0).halt.call_one(1)")
    listed(running, 1)
    killed = subprocess.Popen(
        [*COMMAND, "debug"],
        env=environment(running.directory),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdin is not None and killed.stdout is not None
    killed.stdin.write("attach buggy 0\np 'here'\n")
    killed.stdin.flush()
    for line in killed.stdout:
        if "here" in line:
            break
    assert "is being debugged by process" in told(running, "attach buggy 0")
    killed.kill()
    killed.communicate()
    wait_until(lambda: "attached to buggy 0" in told(running, "attach buggy 0"), "it stays attached to the dead")


def test_the_program_ends_while_actors_wait(program: Callable[..., RunningProgram]) -> None:
    running = program()
    listed(running, 3)
    assert running.close() == 0


def test_a_killed_program_leaves_no_actor_that_waits(program: Callable[..., RunningProgram]) -> None:
    running = program()
    listed(running, 3)
    below = psutil.Process(running.pid).children(recursive=True)
    assert len(below) >= 3
    running.kill()
    wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in below), "processes are left")


def test_pythonbreakpoint_is_obeyed(tmp_path: Path) -> None:
    code = PROGRAM % "print(buggy.halt.call(1).get(20).values(), flush=True)"
    with RunningProgram(tmp_path, code, PYTHONBREAKPOINT="0") as running:
        assert running.line() == "[2, 2, 2]"


def test_without_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "debug"], env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "monarch-rdma debug: no program of this user with actors runs on this host\n"
