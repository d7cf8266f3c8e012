"""`make demo`'s second part: a training under faults beside the same without, as a program, and Ctrl-C in it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from actor_client import wait_until
from knocks import without_knocks
from opened_files import OpenedFiles

from monarch_rdma.ft import Decided, Stepped, Struck, TrainersStarted
from monarch_rdma.ft.simulate.measured import read, replay
from monarch_rdma.supervision.chaos import FAULTS

TOLERANCE = 0.35  # nats: what six rounds of three replicas may differ by, when some of them are away for a while
LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("-m", "examples.llama_diloco.story")
ONLY_FAULTED = """
import sys
from examples.llama_diloco import comparison, story
comparison.play = lambda setting: comparison.run(setting, setting.rounds, "with faults", setting.fault_every)
sys.exit(story.main())
"""  # not the run without faults before it, which has as many rounds
FAULTED = ("-c", ONLY_FAULTED)
ENDLESS = ("--rounds", "100000")


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(*arguments: str, program: Sequence[str] = WHOLE, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", *program, *arguments, "--output", str(tmp_path)]
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.timeout(420)
def test_the_loss_under_faults_is_that_without(story: Any, tmp_path: Path) -> None:
    """And no file has anything of the training: none is written but by the program at its end, none that is read is
    younger than the program.
    """
    opened, began = OpenedFiles(tmp_path / "opened"), time.time()
    arguments = ("--rounds", "12", "--replicas", "3", "--trainers", "1", "--fault-every", "1.5", "--seed", "3")
    process = story(*arguments, **opened.environment)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    calm, faulted = json.loads((tmp_path / "story.json").read_text()).values()
    assert calm["steps"] == 12 * 3 * 20 <= faulted["steps"] and calm["steps_lost"] == 0
    assert faulted["faults"] and calm["faults"] == []
    ends = [history["held_out"][max(history["held_out"], key=int)] for history in (calm, faulted)]
    assert ends[0] < math.log(256) - 2, "it has learnt something"
    assert abs(ends[0] - ends[1]) < TOLERANCE, out
    assert "no checkpoint was written or read" in out and "goodput" in out
    assert (tmp_path / "story.png").read_bytes().startswith(b"\x89PNG")
    assert {int(pid) for pid in re.findall(r"pid (\d+)\) has ended", out)} < opened.processes
    assert len(opened.processes) > 2 * 3
    assert opened.written() == opened.written(by=process.pid)
    assert {path for path in opened.written() if not is_of_the_program(path)} == set()
    # Other programs of this user, whose entries in the list of programs are looked at, may begin meanwhile.
    younger = {path for path in opened.read_since(began) if path.parent != tmp_path and path.suffix != ".program"}
    assert younger == set()
    run = read(tmp_path / "measured.json")
    assert run.group_rounds == faulted["steps"] / 20 and len(run.failures) == len(faulted["recoveries"])
    assert "The model of goodput, given the same faults" in out and 0.5 < replay(run).ratio < 2, out


def is_of_the_program(path: Path) -> bool:
    """What it says of itself and of the training when that is over, and what matplotlib knows of fonts."""
    outputs = {"story.json", "story.png", "measured.json"}
    return path.name in outputs or path.suffix in (".program", ".matplotlib-lock") or path.name.startswith("fontlist")


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for that signal; before that, it is Python that starts."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def interrupted(process: Any) -> float:
    """Ctrl-C; the seconds until the program has ended, with all that it has started."""
    family = psutil.Process(process.pid).children(recursive=True)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - begin
    assert process.returncode == 130, out
    assert without_knocks(out).splitlines()[-1] == "stopped" and "Traceback" not in out, out
    assert psutil.wait_procs(family, 60)[1] == []
    return seconds


@pytest.mark.parametrize(
    ("moment", "program"),
    [("twice.", WHOLE), ("replicas train", WHOLE), ("FAULT", FAULTED)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ctrl_c_leaves_no_process(moment: str, program: Sequence[str], story: Any) -> None:
    process = story("--replicas", "2", "--trainers", "1", "--fault-every", "0.2", *ENDLESS, program=program)
    assert any(moment in line for line in process.stdout), "it has ended by itself"
    interrupted(process)


def test_ctrl_c_at_any_time(story: Any) -> None:
    """Also while everything is imported, started, or killed by faults. How fast is asserted where nothing else runs."""
    chance = Random(LONG)
    for _ in range(25 if LONG else 3):
        process = story("--replicas", "2", "--trainers", "2", "--fault-every", "0.5", *ENDLESS)
        wait_until(lambda: catches(process.pid, signal.SIGTERM), "the program does not begin")  # noqa: B023
        time.sleep(chance.uniform(0.0, 15.0 if LONG else 7.0))
        seconds = interrupted(process)
        assert not LONG or seconds < 3.0, seconds


def test_faults_are_a_function_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.llama_diloco.faults import KINDS, faults

    plan = faults(7, duration=120, every=4, replicas=4, trainers=2)
    assert plan == faults(7, duration=120, every=4, replicas=4, trainers=2)
    assert {name for name, _ in plan} == set(KINDS) and {fault.kind for _, fault in plan} <= set(FAULTS)
    assert 20 <= len(plan) <= 50 and all(fault.at < 120 for _, fault in plan)
    assert all(fault.target != fault.peer for _, fault in plan)


def test_the_live_view_says_who_trains_who_is_down_and_who_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console")
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.llama_diloco.live import Live

    live, screen = Live("under faults", 4, 100), console.Console(width=120, file=io.StringIO())
    live.show(Stepped(1.0, 0, 1, 2, 7, 2.5))
    live.show(Decided(1.0, 1, "replica", 0.0, "process replica1/0 is lost"))
    live.show(TrainersStarted(1.0, 2, 1001))
    live.struck(Struck(1.0, 3, "cut a link", "trainers3/0"))
    screen.print(live._table())
    rows = [line.split() for line in screen.file.getvalue().splitlines()]
    said = {row[1]: " ".join(row) for row in rows if len(row) > 2 and row[1].isdigit()}
    assert "trains" in said["0"] and "round 3, step 7" in said["0"] and "2.500" in said["0"]
    assert "is down" in said["1"] and "heals" in said["2"] and "starts" in said["3"]
    text = screen.file.getvalue()
    assert "FAULT: cut a link (trainers3/0)" in text
    assert "replica 1 failed, it is started again where it was: process replica1/0 is lost" in text
