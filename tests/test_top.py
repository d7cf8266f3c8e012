"""monarch-rdma top: what processes and actors work on, live, once, and as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import wait_until
from knocks import without_knocks
from running_program import COMMAND, RunningProgram, Terminal, environment

from monarch_rdma.actor.debugging.process_facts import ProcessFacts, descendants, facts_of
from monarch_rdma.rdma import Secret
from monarch_rdma.tools.top import Usage

PROGRAM = """
    class Busy(Actor):
        @endpoint
        def work(self, port):
            port.send("works")
            threading.Event().wait()

        @endpoint
        def idle(self):
            return None

        @endpoint
        def halt(self, port):
            port.send("halts")
            breakpoint()

    class Awaiting(Actor):
        @concurrent_endpoint
        async def wait(self, port):
            port.send("awaits")
            await asyncio.Event().wait()

    if __name__ == "__main__":
        procs = this_host().spawn_procs({"gpus": 2})
        busy, awaiting = procs.spawn("busy", Busy), procs.spawn("awaiting", Awaiting)
        busy.idle.call().get()
        port, receiver = Channel.open()
        calls = [busy.slice(gpus=1).work.call_one(port), *(awaiting.slice(gpus=0).wait.call_one(port) for _ in "123")]
        for call in calls:
            receiver.recv().get(20)
        calls += [busy.slice(gpus=1).idle.call_one() for _ in range(5)]
        calls.append(busy.slice(gpus=0).idle.call_one().get())
        done()
        %s
        done()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProgram]:
    patient = {"MONARCH_RDMA_HEARTBEAT_TIMEOUT": "60"}  # with a process that is stopped while commands start
    with RunningProgram(tmp_path_factory.mktemp("top"), PROGRAM % "", **patient) as running:
        running.line("ready")
        yield running


def document(program: RunningProgram, *arguments: str, silent: int = 0) -> dict[str, Any]:
    """As soon as all but so many answer: each has a second, which is little where others use the processors."""
    seen: dict[str, Any] = {}

    def all_answer() -> bool:
        done = program.command("top", "--json", *arguments)
        assert (done.returncode, without_knocks(done.stderr)) == (0, "")
        seen.update(json.loads(done.stdout))
        return sum(not each["answers"] for each in seen["processes"]) <= silent

    wait_until(all_answer, lambda: f"some do not answer: {seen}")
    return seen


def process(program: RunningProgram, name: str, *, silent: int = 0) -> dict[str, Any]:
    (found,) = [each for each in document(program, silent=silent)["processes"] if each["process"] == name]
    return dict(found)


def actor(process: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in process["actors"] if each["name"] == name]
    return dict(found)


def test_as_json(program: RunningProgram) -> None:
    seen = document(program)
    assert (seen["program"], seen["command"]) == (program.pid, str(program.script))
    main = seen["processes"][0]
    assert (main["facts"]["pid"], main["answers"]) == (program.pid, True)
    one, two = process(program, "procs0/0"), process(program, "procs0/1")
    for each in (one, two):
        assert each["answers"] and each["problem"] == "" and each["cpu_percent"] >= 0
        assert each["facts"]["rss"] > 1 << 20 and each["facts"]["cpu_seconds"] >= 0 and each["facts"]["pid"]
    works = actor(two, "busy")
    assert (works["rank"], works["class"], works["message"]) == (1, "__main__.Busy", "work")
    wait_until(lambda: actor(process(program, "procs0/1"), "busy")["mailbox"] == 5, "five messages should wait")
    assert actor(process(program, "procs0/1"), "busy")["age"] > works["age"] > 0
    assert (actor(one, "busy")["message"], actor(one, "busy")["age"]) == (None, None)
    assert (actor(one, "awaiting")["concurrent"], actor(two, "awaiting")["concurrent"]) == (3, 0)


def test_once(program: RunningProgram) -> None:
    done = program.command("top", "--once", str(program.pid))
    assert (done.returncode, without_knocks(done.stderr)) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "process",
        "/",
        "actor",
        "pid",
        "state",
        "cpu",
        "%",
        "memory",
        "mailbox",
        "message",
        "age",
        "tasks",
    ]
    (busy,) = [line for line in lines if line.startswith("  busy[1] Busy")]
    assert "works" in busy and " work " in busy and busy.endswith(" s")
    (idle,) = [line for line in lines if line.startswith("  busy[0] Busy")]
    assert "idle" in idle
    assert not any("ProcAgent" in line for line in lines)
    assert "ProcAgent" in program.command("top", "--once", "--all").stdout


def test_without_a_terminal_it_is_shown_once(program: RunningProgram) -> None:
    assert program.command("top").stdout.startswith("process / actor")


def test_a_process_that_is_stopped_holds_up_no_other(program: RunningProgram) -> None:
    pid = process(program, "procs0/0")["facts"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: facts_of(pid).state == "stopped", "it is not stopped")
        stopped = process(program, "procs0/0", silent=1)
        assert not stopped["answers"] and stopped["actors"] == []
        assert stopped["problem"] == "no answer in time"
        assert stopped["facts"]["state"] == "stopped"
        assert actor(process(program, "procs0/1", silent=1), "busy")["message"] == "work"
        assert "NO ANSWER (stopped)" in program.command("top", "--once").stdout
    finally:
        os.kill(pid, signal.SIGCONT)
    assert process(program, "procs0/0")["answers"]


def test_a_program_that_is_stopped_is_shown_with_its_workers(tmp_path: Path) -> None:
    with RunningProgram(tmp_path, PROGRAM % "") as running:
        running.line("ready")
        running.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: facts_of(running.pid).state == "stopped", "it is not stopped")
        seen = document(running, silent=1000)["processes"]
        assert (seen[0]["facts"]["pid"], seen[0]["answers"], seen[0]["facts"]["state"]) == (
            running.pid,
            False,
            "stopped",
        )
        assert len(seen) >= 3
        assert all(each["problem"] for each in seen)


def test_an_actor_at_a_breakpoint_is_seen(tmp_path: Path) -> None:
    with RunningProgram(tmp_path, PROGRAM % "busy.slice(gpus=0).halt.broadcast(port)") as running:
        running.line("ready")
        assert running.process.stdin is not None
        running.process.stdin.write("\n")
        running.process.stdin.flush()
        running.line("ready")
        wait_until(lambda: actor(process(running, "procs0/0"), "busy")["at_breakpoint"], "it should wait")
        assert "at a breakpoint" in running.command("top", "--once").stdout


def test_processes_of_other_hosts_are_found(tmp_path: Path) -> None:
    secret, address = tmp_path / "job.secret", f"ipc://{tmp_path}/worker"
    Secret.generate().write_file(secret)
    variables = {"MONARCH_RDMA_SECRET_FILE": str(secret)}
    loop = f"future = start_worker_loop_forever(address={address!r})\ndone()\n"
    client = f"""
        from monarch_rdma.actor import attach_to_workers
        procs = attach_to_workers(workers=[{address!r}]).spawn_procs({{"gpus": 2}}, name="far")
        done()
    """
    with RunningProgram(tmp_path, loop, **variables) as host, RunningProgram(tmp_path, client, **variables) as running:
        host.line("ready"), running.line("ready")
        seen: list[dict[str, Any]] = []

        def all_are_found() -> bool:  # the other host's agent, which tells of the others, has a second too
            seen[:] = document(running, str(running.pid))["processes"]
            return len(seen) == 4

        wait_until(all_are_found, lambda: f"not all are found: {seen}")
        assert [each["facts"]["pid"] for each in seen[:2]] == [running.pid, host.pid]
        assert [each["process"] for each in seen[2:]] == ["far/0", "far/1"]
        stacks = json.loads(running.command("stacks", "--json", str(running.pid)).stdout)["processes"]
        assert [each["problem"] for each in stacks] == [""] * 4


def test_live(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    code = PROGRAM % "awaiting.slice(gpus=1).wait.broadcast(port)"
    with RunningProgram(tmp_path, code) as running:
        running.line("ready")
        terminal = Terminal([*COMMAND, "top", "--interval", "0.1"], environment(tmp_path))
        try:
            shown = terminal.wait_for("procs0/1")
            assert f"program {running.pid}" in shown
            terminal.wait_for("busy[1] Busy")
            assert running.process.stdin is not None
            running.process.stdin.write("\n")
            running.process.stdin.flush()
            running.line("ready")
            while "works" not in terminal.wait_for("\n").partition("awaiting[1] Awaiting")[2]:
                assert running.process.poll() is None
            terminal.type("\x03")
            assert terminal.close() == 0
        finally:
            terminal.process.kill()


def test_live_until_the_program_ends(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    with RunningProgram(tmp_path, PROGRAM % "") as running:
        running.line("ready")
        terminal = Terminal([*COMMAND, "top", "--interval", "0.1"], environment(tmp_path))
        try:
            terminal.wait_for("busy[1] Busy")
            running.close()
            terminal.wait_for(f"program {running.pid} has ended")
            assert terminal.close() == 0
        finally:
            terminal.process.kill()


def test_live_without_rich_says_what_to_do(program: RunningProgram) -> None:
    code = "import sys; sys.modules['rich'] = sys.modules['rich.live'] = None; from monarch_rdma import cli; "
    code += "sys.exit(cli.main(['top']))"
    terminal = Terminal([sys.executable, "-c", code], environment(program.directory))
    try:
        terminal.wait_for("monarch-rdma top: the live view needs rich: pip install monarch-rdma[tools]; or use --once")
        assert terminal.close() == 1
    finally:
        terminal.process.kill()


# --- what the kernel tells


def test_facts_of_this_process() -> None:
    facts = facts_of(os.getpid())
    assert facts is not None
    assert (facts.pid, facts.state) == (os.getpid(), "runs")
    assert facts.cpu_seconds > 0 and facts.rss > 1 << 20 and 0 < facts.age < 1e6
    assert facts.command
    assert facts_of(1 << 30) is None


def test_descendants_are_found(program: RunningProgram) -> None:
    below = list(descendants(program.pid))
    workers = [process(program, f"procs0/{rank}")["facts"]["pid"] for rank in (0, 1)]
    assert set(workers) < set(below)  # and the template, above them
    assert below.index(workers[0]) > 0


def test_usage_is_that_since_the_last_look() -> None:
    usage = Usage()
    look = {"pid": 7, "state": "runs", "rss": 0}
    assert usage.percent(ProcessFacts(cpu_seconds=1.0, age=10.0, **look)) == pytest.approx(10)
    assert usage.percent(ProcessFacts(cpu_seconds=2.0, age=12.0, **look)) == pytest.approx(50)
    assert usage.percent(ProcessFacts(cpu_seconds=0.5, age=0.5, **look)) == pytest.approx(100)  # another, of that pid
