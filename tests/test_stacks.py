"""monarch-rdma stacks: who does what, seen from outside by py-spy and from inside without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from knocks import without_knocks
from running_program import RunningProgram
from scripts import put_script

HAS_PY_SPY = os.path.exists(os.path.join(sysconfig.get_path("scripts"), "py-spy")) or shutil.which("py-spy") is not None
with_py_spy = pytest.mark.skipif(not HAS_PY_SPY, reason="py-spy is not installed")

PROGRAM = """
    class Busy(Actor):
        @endpoint
        def work(self, port):
            self.deeper(port)

        def deeper(self, port):
            port.send("works")
            threading.Event().wait()

        @endpoint
        def hold_the_gil(self, port):
            port.send("holds")
            ctypes.PyDLL(None).sleep(1000)

        @endpoint
        def idle(self):
            return None

    class Awaiting(Actor):
        @concurrent_endpoint
        async def wait(self, port):
            await self.inner(port)

        async def inner(self, port):
            port.send("awaits")
            await asyncio.Event().wait()

    if __name__ == "__main__":
        procs = this_host().spawn_procs({"gpus": 2})
        busy, awaiting = procs.spawn("busy", Busy), procs.spawn("awaiting", Awaiting)
        busy.idle.call().get()
        port, receiver = Channel.open()
        calls = [%s]
        for call in calls:
            receiver.recv().get(20)
        done()
"""
WORKS = "busy.slice(gpus=1).work.call_one(port), awaiting.slice(gpus=0).wait.call_one(port)"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProgram]:
    with RunningProgram(tmp_path_factory.mktemp("stacks"), PROGRAM % WORKS) as running:
        running.line("ready")
        yield running


def processes(program: RunningProgram, **variables: str) -> dict[str, Any]:
    """By name."""
    done = program.command("stacks", "--json", **variables)
    assert without_knocks(done.stderr) == ""
    found = {each["process"]: each for each in json.loads(done.stdout)["processes"]}
    assert done.returncode == (1 if any(each["problem"] for each in found.values()) else 0)
    return found


def thread_of(process: dict[str, Any], actor: str) -> dict[str, Any]:
    (found,) = [thread for thread in process["threads"] if thread["actor"] == actor]
    return dict(found)


def functions(thread: dict[str, Any]) -> list[str]:
    return [str(frame["function"]).rpartition(".")[2] for frame in thread["frames"]]


def check_works(found: dict[str, Any], program: RunningProgram) -> None:
    """As every way of looking must see it."""
    thread = thread_of(found["procs0/1"], "busy")
    assert (thread["rank"], thread["class"], thread["endpoint"]) == (1, "__main__.Busy", "work")
    assert thread["age"] >= 0
    seen = functions(thread)
    assert seen[seen.index("work") :][:2] == ["work", "deeper"]
    assert thread["frames"][seen.index("work")]["file"] == str(program.script)
    assert thread_of(found["procs0/0"], "busy")["endpoint"] is None
    (task,) = [task for task in found["procs0/0"]["tasks"] if task["endpoint"]]
    assert (task["actor"], task["rank"], task["endpoint"]) == ("awaiting", 0, "wait")
    assert functions(task)[1:3] == ["wait", "inner"]
    (main,) = [each for name, each in found.items() if not name.startswith("procs0/")]
    assert main["pid"] == program.pid
    assert any("<module>" in functions(thread) for thread in main["threads"])


@with_py_spy
def test_by_py_spy(program: RunningProgram) -> None:
    found = processes(program)
    assert {each["how"] for each in found.values()} == {"by py-spy"}
    check_works(found, program)


def test_without_py_spy_each_process_tells_itself(tmp_path: Path) -> None:
    with RunningProgram(tmp_path, PROGRAM % WORKS, MONARCH_RDMA_PYSPY_BIN="/nowhere/py-spy") as running:
        running.line("ready")
        found = processes(running)
        reason = "py-spy cannot be run: No such file or directory"
        assert {each["how"] for each in found.values()} == {f"by the process itself ({reason})"}
        check_works(found, running)


def test_where_ptrace_is_refused(tmp_path: Path) -> None:
    said = "Error: Permission Denied: Try running again with sudo"
    refusing = put_script(tmp_path / "py-spy", f"echo '{said}' >&2\nexit 1")
    with RunningProgram(tmp_path, PROGRAM % WORKS, MONARCH_RDMA_PYSPY_BIN=str(refusing)) as running:
        running.line("ready")
        found = processes(running)
        reason = "py-spy failed: ptrace is refused (permission denied)"
        assert {each["how"] for each in found.values()} == {f"by the process itself ({reason})"}
        check_works(found, running)


@with_py_spy
def test_a_process_whose_gil_is_held(tmp_path: Path) -> None:
    with RunningProgram(tmp_path, PROGRAM % "busy.slice(gpus=0).hold_the_gil.call_one(port)") as running:
        running.line("ready")
        held = processes(running)["procs0/0"]
        assert held["how"] == "by py-spy"
        thread = thread_of(held, "busy")
        assert (thread["rank"], thread["endpoint"], thread["has_gil"]) == (0, "hold_the_gil", True)


def test_a_process_whose_gil_is_held_without_py_spy(tmp_path: Path) -> None:
    call = "busy.slice(gpus=0).hold_the_gil.call_one(port)"
    with RunningProgram(tmp_path, PROGRAM % call, MONARCH_RDMA_PYSPY_BIN="/nowhere/py-spy") as running:
        running.line("ready")
        found = processes(running)
        assert found["procs0/0"]["threads"] == []
        assert "it does not answer" in found["procs0/0"]["problem"]
        assert "py-spy cannot be run" in found["procs0/0"]["problem"]
        assert found["procs0/1"]["problem"] == ""


@with_py_spy
def test_a_program_that_hangs_itself(tmp_path: Path) -> None:
    code = (PROGRAM % WORKS).replace("done()", "print('ready', flush=True)\n        ctypes.PyDLL(None).sleep(1000)")
    running = RunningProgram(tmp_path, code)
    try:
        running.line("ready")
        done = running.command("stacks")
        assert f"{running.script}:" in done.stdout
        assert "busy[1] in work\n" in done.stdout  # its workers are looked at all the same
        assert re.search(r"      (Busy\.)?work \(", done.stdout)
    finally:
        running.kill()


def test_for_people(program: RunningProgram) -> None:
    done = program.command("stacks", str(program.pid))
    assert (done.returncode, without_knocks(done.stderr)) == (0, "")
    assert f"program {program.pid}: {program.script}" in done.stdout
    assert "process procs0/1 (pid " in done.stdout
    assert "busy[1] in work for " in done.stdout and f"deeper ({program.script}:" in done.stdout
    assert "busy[0]: waits for messages" in done.stdout
    assert "awaiting[0] in wait, awaits in task" in done.stdout and f"inner ({program.script}:" in done.stdout
    assert "instance.py" not in done.stdout
    assert "instance.py" in program.command("stacks", "--all").stdout


def test_a_program_that_has_ended(program: RunningProgram) -> None:
    done = program.command("stacks", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("monarch-rdma stacks: no program has pid 1; there are\n")
