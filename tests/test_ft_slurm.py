"""The example of a training under faults as jobs of a real SLURM: a killed step costs its replica the allocation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from actor_client import wait_until
from slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent
Story = "subprocess.Popen[str]"


@pytest.fixture
def story(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Story]:
    command = [sys.executable, "-u", "-m", "examples.llama_diloco.story", "--job", "slurm", "--replicas", "2"]
    command += ["--trainers", "1", "--rounds", "100000", "--fault-every", "3600", "--output", str(tmp_path / "out")]
    command += ["--sbatch=--time=10", *getattr(request, "param", ())]
    environment = os.environ | cluster.environment | {"MONARCH_RDMA_JOB_DIR": str(tmp_path / "jobs")}
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=err, env=environment)
    yield process
    process.kill()
    process.communicate()
    wait_until(lambda: not cluster.processes(), lambda: f"left in the cluster: {cluster.processes()}", 60)


def until(story: Story, *wanted: str) -> list[str]:
    """Its lines up to the first one with all of these words."""
    lines: list[str] = []
    for line in story.stdout:
        lines.append(line)
        if all(word in line for word in wanted):
            return lines
    pytest.fail("".join(lines))


def test_a_killed_step_costs_a_replica_its_allocation_and_it_heals_on_another(cluster: Cluster, story: Story) -> None:
    until(story, "Without failures")
    until(story, "2 of 2 replicas train")
    first = cluster.ask("squeue", "-h", "-o", "%i %j %N").splitlines()
    assert sorted(line.split()[1] for line in first) == ["llama-replica0", "llama-replica1"]
    agents = cluster.agents()
    (victim,) = [line.split() for line in first if "replica1" in line]
    os.kill(cluster.daemon_of_step(agents[victim[2]]), signal.SIGKILL)
    until(story, "replica 1 failed", "it is started again on another allocation")
    until(story, "replica 1 read its state from 1 peers")
    second = cluster.ask("squeue", "-h", "-o", "%i %j %N").splitlines()
    (successor,) = [line.split() for line in second if "replica1" in line]
    assert successor[0] != victim[0] and len(second) == 2, "its first job was ended"
    story.send_signal(signal.SIGINT)
    family = psutil.Process(story.pid).children(recursive=True)
    out, _ = story.communicate(timeout=60)
    assert story.returncode == 130 and psutil.wait_procs(family, 60)[1] == [], out
    wait_until(lambda: not cluster.ask("squeue", "-h"), lambda: cluster.ask("squeue"), 60)


@pytest.mark.parametrize("story", [["--sbatch=--hold"]], indirect=True)
def test_ctrl_c_cancels_what_waits_in_the_queue(cluster: Cluster, story: Story) -> None:
    wait_until(lambda: len(cluster.ask("squeue", "-h").splitlines()) == 2, "nothing is in the queue", 60)
    story.send_signal(signal.SIGINT)
    out, _ = story.communicate(timeout=60)
    assert story.returncode == 130, out
    wait_until(lambda: not cluster.ask("squeue", "-h"), lambda: cluster.ask("squeue"), 60)
