"""Jobs on SkyPilot: a stand-in for it launches nodes that are processes of this host; agents and calls are real.

Where skypilot itself is installed, it builds and checks the tasks; that needs no network.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import Faults, faults_recorded, traces, wait_until
from fake_sky import FakeSky
from programs import LIMIT

from monarch_rdma import config
from monarch_rdma.actor import Actor, endpoint
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.errors import ConfigError, JobEnded, TransferTimeout
from monarch_rdma.job.skypilot import SkyPilotJob
from monarch_rdma.rdma import default_engine

RESOURCES = {"infra": "kubernetes", "accelerators": "MI300X:8"}


class Guest(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSky]:
    before = traces()
    config.configure(job_dir=str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    sky = FakeSky(tmp_path)
    monkeypatch.setitem(sys.modules, "sky", sky)
    yield sky
    sky.close()
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


@pytest.fixture
def client(sky: FakeSky) -> Iterator[Faults]:
    """This process is the client of a job."""
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


def test_nodes_attach_answer_and_are_given_back(sky: FakeSky, client: Faults) -> None:
    job = SkyPilotJob({"trainers": 2, "loaders": 1}, RESOURCES, "exp", setup_commands="pip install monarch-rdma")
    state = job.state()
    assert [(name, len(state[name])) for name in state] == [("trainers", 2), ("loaders", 1)]
    pids = [pid for name in state for pid in state[name].spawn_procs().spawn("g", Guest).pid.call().get(LIMIT).values()]
    assert len(set(pids)) == 3 and job.status().phase == "running"
    task = sky.launched
    assert task is not None and task.num_nodes == 3 and task.resources == RESOURCES
    ((there, here),) = task.file_mounts.items()
    secret = Path(here).read_bytes()
    assert there.startswith("~/.monarch_rdma/jobs/") and secret not in task.run.encode()
    job.kill()
    assert not sky.clusters and not job.active and not Path(here).exists()


def test_a_node_whose_agent_ends_gets_another_one(sky: FakeSky, client: Faults) -> None:
    import psutil

    job = SkyPilotJob({"trainers": 1}, cluster_name="exp")
    procs = job.state().trainers.spawn_procs(restart="always", max_restarts=None)
    guests = procs.spawn("guests", Guest)
    before = guests.pid.call_one().get(LIMIT)
    (node,) = sky.clusters["exp"].processes
    (agent,) = psutil.Process(node.pid).children()
    agent.kill()
    wait_until(lambda: guests.pid.call_living().get(LIMIT).values() not in ([None], [before]), "nothing came back")
    job.kill()


def test_a_cluster_that_somebody_ends(sky: FakeSky, client: Faults) -> None:
    job = SkyPilotJob({"trainers": 1}, cluster_name="exp")
    job.state(cached_path=None).trainers.spawn_procs()
    sky.down("exp")
    failures = {failure.kind: failure for failure in (client.next(), client.next())}
    assert failures.keys() == {"process", "job"} and "exp is not there any more" in failures["job"].message
    with pytest.raises(JobEnded, match="not there any more"):
        job.state()
    job.kill()


def test_a_launch_that_takes_its_time(sky: FakeSky) -> None:
    sky.launching = "Launching (0 pods ready)"
    job = SkyPilotJob({"trainers": 1}, cluster_name="exp")
    with pytest.raises(TransferTimeout, match=r"waits in the queue: Launching \(0 pods ready\)"):
        job.state(timeout=0.3)
    job.kill()
    assert not sky.clusters and sky.launching is None, "the launch goes on"


class ResourcesUnavailableError(Exception):
    pass


class ApiServerConnectionError(Exception):
    pass


def test_what_there_is_no_room_for(sky: FakeSky) -> None:
    sky.problem = ResourcesUnavailableError("Catalog does not contain any instances satisfying MI300X:8")
    job = SkyPilotJob({"trainers": 1}, RESOURCES)
    with pytest.raises(JobEnded, match="Catalog does not contain") as caught:
        job.state()
    assert "sky show-gpus" in str(caught.value)
    job.kill()


def test_a_server_that_is_not_there(sky: FakeSky, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any, **__: Any) -> str:
        raise ApiServerConnectionError("could not connect")

    monkeypatch.setattr(sky, "launch", launch)
    with pytest.raises(ConfigError, match=r"does not launch cluster .*could not connect; start .*sky api start"):
        SkyPilotJob({"trainers": 1}).state()


@pytest.mark.parametrize(
    ("states", "phase", "words"),
    [
        (("UP", "SETTING_UP"), "queued", "SETTING_UP"),
        (("UP", "FAILED_SETUP"), "ended", "FAILED_SETUP"),
        (("INIT", "RUNNING"), "running", "cluster exp is INIT"),
        (("STOPPED", "RUNNING"), "ended", "cluster exp is STOPPED"),
    ],
)
def test_what_sky_says_of_a_cluster_and_its_job(sky: FakeSky, states: Any, phase: str, words: str) -> None:
    job = SkyPilotJob({"trainers": 1}, cluster_name="exp")
    job.apply()
    cluster = sky.clusters["exp"]
    cluster.record["status"], cluster.job["status"] = states
    status = job.status()
    assert status.phase == phase and words in status.message
    job.kill()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SkyPilotJob({}), "meshes is {}"),
        (lambda: SkyPilotJob({"a": 1}, resources=8), "resources is a int"),
        (lambda: SkyPilotJob({"a": 1}, monarch_port=0), "monarch_port is 0"),
        (lambda: SkyPilotJob({"a": 1}).apply(["python", "client.py"]), "runs no client_script"),
    ],
)
def test_wrong_input_is_a_sentence(sky: FakeSky, make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        make()


def test_skypilot_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config.configure(job_dir=str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'monarch-rdma[skypilot]'")):
        SkyPilotJob({"trainers": 1}).apply()


def test_a_job_is_described_by_json_and_made_from_it() -> None:
    job = SkyPilotJob({"a": 2}, RESOURCES, idle_minutes_to_autostop=10, envs={"A": "1"}, idle_timeout=math.inf)
    assert SkyPilotJob(**json.loads(json.dumps(job.spec()))).spec() == job.spec()


REAL = """
import inspect, json, sys
from pathlib import Path
import sky
from monarch_rdma.job import JobFolder, Launch
from monarch_rdma.job.skypilot import SkyPilotJob
folder = Path(sys.argv[1]) / "abc123"
folder.mkdir()
(folder / "secret").write_bytes(b"s" * 32)
launch = Launch(JobFolder(folder), Path(sys.argv[1]), (), 60.0, 5.0)
meshes = {"trainers": 2, "loaders": 1}
job = SkyPilotJob(meshes, {"infra": "kubernetes", "accelerators": "MI300X:8"}, setup_commands="true")
task = job.task(launch)
task.validate_name()
task.validate_run()
task.expand_and_validate_file_mounts()
again = sky.Task.from_yaml_config(task.to_yaml_config())
same = SkyPilotJob(meshes, sky.Resources(infra="kubernetes", accelerators="MI300X:8"))
binds = lambda function, *given, **named: inspect.signature(function).bind(*given, **named)
binds(sky.launch, task, cluster_name="a", idle_minutes_to_autostop=1, down=True)  # as the job calls them
binds(sky.api_status, request_ids=["a"])
binds(sky.api_cancel, "a", silent=True)
binds(sky.status, cluster_names=["a"])
[binds(function, "a") for function in (sky.get, sky.queue, sky.down)]
try:
    SkyPilotJob(meshes, {"acelerators": "MI300X:8"}).task(launch)
except Exception as error:
    refused = str(error)
print(json.dumps({"task": again.to_yaml_config(), "resources": same.spec()["resources"], "refused": refused}))
"""


def test_skypilot_itself_builds_the_tasks_and_checks_them(tmp_path: Path) -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip(
            "skypilot is not installed (extra `skypilot`, 100 packages): its own checks of the tasks are not run"
        )
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    task = said["task"]
    assert task["num_nodes"] == 3 and task["resources"]["accelerators"] == {"MI300X": 8}
    command = "monarch_rdma.job.agent --secret - --job abc123 --address 'tcp://*:22222' --idle 60 --linger 5"
    assert command in task["run"]
    assert list(task["file_mounts"]) == ["~/.monarch_rdma/jobs/abc123/secret"]
    assert said["resources"]["accelerators"] == {"MI300X": 8}
    assert "did you mean 'accelerators'" in said["refused"]
