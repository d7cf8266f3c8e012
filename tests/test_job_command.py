"""`monarch-rdma run`, `apply`, `exec`, `status`, `kill` and `logs`, on hosts that processes play."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import wait_until
from programs import LIMIT, TESTS, is_alive

from monarch_rdma.job import job_load

JOB = """
from monarch_rdma.job import ProcessJob
job = ProcessJob({"trainers": 2, "loaders": 1}, idle_timeout=60)
small = ProcessJob({"hosts": 1}, idle_timeout=60)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs the command in the test's directory; the job of the default file is ended afterwards."""
    (tmp_path / "jobs.py").write_text(JOB)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line(*arguments),
            cwd=tmp_path,
            env=variables(tmp_path),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    yield run
    if (tmp_path / "state").exists():
        assert run("kill", "--state", "state").returncode == 0


def line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "monarch_rdma.cli", *arguments]


def variables(directory: Path) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MONARCH_RDMA_")}
    return mine | {"MONARCH_RDMA_JOB_DIR": str(directory / "jobs"), "PYTHONPATH": str(TESTS.parent)}


def pids(directory: Path) -> list[int]:
    agents = job_load(directory / "state").facts["agents"]
    return [agent["pid"] for each in agents.values() for agent in each]


def test_a_job_from_apply_to_kill(command: Any, tmp_path: Path) -> None:
    state = ("--state", "state")
    applied = command("apply", "jobs.py", *state)
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout.startswith("ProcessJob ") and applied.stdout.endswith(" was applied\n")
    assert "runs on 1 host" in applied.stderr
    agents = pids(tmp_path)
    assert "runs on 1 host" in command("apply", "jobs.py", *state).stdout and pids(tmp_path) == agents
    other = command("apply", "jobs.py:small", *state)
    assert other.returncode == 1 and "state has another job" in other.stderr and "monarch-rdma kill" in other.stderr
    said = command("status", "--json", *state)
    assert said.returncode == 0 and json.loads(said.stdout)["phase"] == "running"

    both = command("exec", *state, "--mesh", "trainers", "sh", "-c", "echo here is $$; exit 3")
    assert both.returncode == 3 and both.stdout.count("here is ") == 2, both.stderr
    one = command("exec", *state, "--mesh", "trainers", "--point", "hosts=1", "--per-host", "2", "--", "true")
    assert one.returncode == 0, one.stderr
    missing = command("exec", *state, "--all", "/nowhere/command")
    assert missing.returncode == 127 and "No such file" in missing.stdout + missing.stderr
    for arguments, problem in (
        (("true",), "several meshes: name one of trainers, loaders by --mesh, or use --all"),
        (("--mesh", "others", "true"), "no mesh 'others'"),
    ):
        wrong = command("exec", *state, *arguments)
        assert wrong.returncode == 1 and problem in wrong.stderr and "Traceback" not in wrong.stderr

    killed = command("kill", *state)
    assert killed.returncode == 0 and killed.stdout.endswith(" was ended\n")
    wait_until(lambda: not any(map(is_alive, agents)), "agents are left")
    assert "cannot be read" in command("status", *state).stderr


def test_a_client_in_a_job_and_its_logs(command: Any, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(
        "import sys\nfrom monarch_rdma.job import load_current_job\n"
        "print('hosts', load_current_job().state().hosts.sizes['hosts'], sys.argv[1], flush=True)\n"
    )
    python = ["--client", sys.executable, "client.py", "--steps=5"]
    applied = command("apply", "jobs.py:small", "--state", "state", *python)
    assert applied.returncode == 0, applied.stderr
    shown = command("logs", "-f", "--state", "state")
    assert shown.returncode == 0 and "[client] hosts 1 --steps=5" in shown.stdout, shown.stderr
    over = command("status", "--state", "state")
    assert over.returncode == 1 and "has ended" in over.stdout
    assert command("logs", "--state", "state").stdout == shown.stdout


def test_run_gives_a_program_hosts_that_end_with_it(command: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nfrom monarch_rdma.job import LocalJob\n"
        "print(LocalJob().state().hosts.sizes, sys.argv[1:], flush=True)\nsys.exit(7)\n"
    )
    done = command("run", "--processes", "2", "program.py", "--steps", "5")
    assert (done.returncode, done.stdout) == (7, "{'hosts': 2} ['--steps', '5']\n"), done.stderr
    assert list((tmp_path / "jobs").iterdir()) == []
    nothing = command("run", "--processes", "1", "/nowhere/program")
    assert nothing.returncode == 1 and "the program cannot be run" in nothing.stderr
    assert list((tmp_path / "jobs").iterdir()) == []


def test_run_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, threading\nfrom monarch_rdma.job import load_current_job\n"
        "job = load_current_job()\njob.state()\n"
        "print(os.getpid(), *[a['pid'] for a in job.facts['agents']['hosts']], flush=True)\nthreading.Event().wait()\n"
    )
    program = subprocess.Popen(
        line("run", "--processes", "1", "program.py"),
        cwd=tmp_path,
        env=variables(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    running = [int(pid) for pid in program.stdout.readline().split()]
    assert len(running) == 2
    program.send_signal(signal.SIGTERM)
    assert program.wait(LIMIT) == 143
    wait_until(lambda: not any(map(is_alive, running)), f"left: {running}")
    program.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("apply", "nowhere.py"), "nowhere.py cannot be loaded"),
        (("apply", "jobs.py:none"), "jobs.py has no job called 'none'"),
        (("logs", "--state", "nowhere"), "cannot be read"),
        (("run", "program.py"), "one of the arguments"),
        (("exec", "--point", "hosts", "true"), "'hosts' is not LABEL=NUMBER"),
    ],
)
def test_wrong_arguments_are_a_sentence(command: Any, arguments: tuple[str, ...], problem: str) -> None:
    done = command(*arguments)
    assert done.returncode in (1, 2) and problem in done.stderr and "Traceback" not in done.stderr
