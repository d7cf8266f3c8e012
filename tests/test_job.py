"""Jobs on this host: what every job does, whatever its scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import Faults, faults_recorded, traces, wait_until
from programs import LIMIT, Program, is_alive

from monarch_rdma import config
from monarch_rdma.actor import Actor, ActorMesh, HostMesh, SupervisionError, endpoint, this_host
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.errors import ConfigError, JobEnded, PeerLost, TransferTimeout
from monarch_rdma.job import (
    JobState,
    JobStatus,
    LocalJob,
    ProcessJob,
    job_load,
    job_loads,
    load_current_job,
)
from monarch_rdma.rdma import Secret, default_engine
from monarch_rdma.supervision.events import Recording


class Guest(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything that a job keeps is below the test's directory; nothing of it may be left in memory."""
    before = traces()
    monkeypatch.chdir(tmp_path)
    config.configure(job_dir=str(tmp_path / "jobs"))
    yield tmp_path
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


@pytest.fixture
def client(place: Path) -> Iterator[Faults]:
    """This process is the client of a job."""
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    job = ProcessJob({"trainers": 2, "loaders": 1})
    yield job
    job.kill()


def agents_of(job: ProcessJob) -> list[int]:
    running = job._running
    assert running is not None
    return [agent["pid"] for agents in running.facts["agents"].values() for agent in agents]


def on(hosts: HostMesh) -> list[int]:
    return list(hosts.spawn_procs().spawn("guests", Guest).pid.call().get(LIMIT).values())


def fails(guests: ActorMesh[Guest]) -> bool:
    try:
        guests.pid.call().get(LIMIT)
    except SupervisionError:
        return True
    return False


def gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"still there: {[pid for pid in pids if is_alive(pid)]}")


# --- from apply to kill


def test_each_mesh_has_its_hosts_and_nothing_is_left_after_kill(job: ProcessJob, client: Faults, place: Path) -> None:
    state = job.state(cached_path=None)
    assert (list(state), len(state), state.trainers.sizes, state["loaders"].sizes) == (
        ["trainers", "loaders"],
        2,
        {"hosts": 2},
        {"hosts": 1},
    )
    pids = on(state.trainers) + on(state.loaders)
    assert len(set(pids)) == 3
    agents = agents_of(job)
    assert job.active and job.status().phase == "running"
    (folder,) = (place / "jobs").iterdir()
    assert {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {
        folder.name: 0o700,
        "secret": 0o600,
        "state": 0o600,
    }
    job.kill()
    gone(pids + agents)
    assert not folder.exists() and not job.active
    job.kill()  # once more does nothing
    with pytest.raises(ConfigError, match="was not applied"):
        job.status()
    with pytest.raises(AttributeError, match="no mesh 'others'; it has 'trainers', 'loaders'"):
        _ = state.others


def test_the_secret_is_in_no_argument_variable_or_file_but_its_own(
    job: ProcessJob, client: Faults, place: Path
) -> None:
    job.state()
    secret = (place / "jobs" / str(job.apply_id) / "secret").read_bytes()
    for pid in agents_of(job):
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    others = [path for path in place.rglob("*") if path.is_file() and path.name != "secret"]
    assert len(others) >= 4 and not any(secret in path.read_bytes() for path in others)


def test_a_stranger_gets_nowhere(job: ProcessJob, client: Faults, place: Path) -> None:
    job.state()
    address = job.facts["agents"]["loaders"][0]["address"]
    (place / "other").mkdir()
    Secret.generate().write_file(place / "other" / "secret")
    stranger = Program(
        """
        from monarch_rdma.actor import attach_to_workers
        try:
            attach_to_workers(workers=[sys.argv[1]], timeout=2.0)
        except Exception as error:
            say(type(error).__name__)
        """,
        address,
        secret_file=place / "other" / "secret",
    )
    try:
        assert stranger.line() == "AuthenticationError"
    finally:
        stranger.close()


def test_variables_of_hosts_are_the_programs_with_changes(client: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "away")
    job = ProcessJob({"hosts": 1}, env={"GREETING": "hello", "TAKEN": None})
    guest = job.state(cached_path=None).hosts.spawn_procs().spawn("guest", Guest)
    assert [guest.variable.call_one(name).get(LIMIT) for name in ("GREETING", "TAKEN")] == ["hello", None]
    job.kill()


def test_a_job_that_nobody_can_find_ends_with_its_program() -> None:
    program = Program(JOB_OF_PROGRAM)
    agents = [int(pid) for pid in program.line().split()]
    assert all(map(is_alive, agents))
    program.kill()  # it can end nothing itself
    gone(agents)
    program.close()


JOB_OF_PROGRAM = """
from monarch_rdma.job import ProcessJob
job = ProcessJob({"hosts": 2})
job.state(cached_path=None)
say(*[agent["pid"] for agent in job.facts["agents"]["hosts"]])
hear()
"""


def test_hosts_that_no_client_uses_end_after_a_while(client: Faults) -> None:
    job = ProcessJob({"hosts": 1}, idle_timeout=0.5)
    job.apply()
    pids = agents_of(job)
    gone(pids)
    with pytest.raises(JobEnded, match="host 0 of mesh hosts has ended"):
        job.state(cached_path=None)
    job.kill()


def test_two_jobs_of_one_program_have_its_secret(client: Faults) -> None:
    jobs = [ProcessJob({"hosts": 1}), ProcessJob({"hosts": 1})]
    this_host()
    meshes = [job.state(cached_path=None).hosts for job in jobs]
    assert len({pid for mesh in meshes for pid in on(mesh)}) == 2
    for job in jobs:
        job.kill()


# --- the file that tells which job runs


def test_a_job_that_runs_is_used_again_by_another_program(job: ProcessJob, client: Faults, place: Path) -> None:
    code = """
        from monarch_rdma.job import ProcessJob
        job = ProcessJob({"trainers": 2, "loaders": 1})
        state = job.state()
        say(*[agent["pid"] for agents in job._running.facts["agents"].values() for agent in agents])
        """
    first = Program(code, MONARCH_RDMA_JOB_DIR=str(place / "jobs"))
    pids = [int(pid) for pid in first.line().split()]
    assert first.wait() == 0, first.errors
    first.close()
    assert all(map(is_alive, pids))
    assert len(on(job.state().trainers)) == 2
    assert agents_of(job) == pids
    assert (place / ".monarch/job_state.json").stat().st_mode & 0o777 == 0o600
    assert job_load().status().phase == "running"


def test_a_job_that_cannot_do_what_is_wanted_is_ended_and_replaced(job: ProcessJob, client: Faults) -> None:
    other = ProcessJob({"trainers": 1})
    other.state()
    old = agents_of(other)
    job.state()
    gone(old)
    assert not set(agents_of(job)) & set(old)
    assert client.next().kind == "job"  # this program used the old one too


def test_a_job_that_lost_a_host_is_not_used_again(client: Faults) -> None:
    lame = ProcessJob({"trainers": 2})
    lame.state()
    old = agents_of(lame)
    os.kill(old[0], signal.SIGKILL)
    gone(old[:1])
    job = ProcessJob({"trainers": 2})
    assert len(on(job.state().trainers)) == 2
    gone(old)
    assert client.next().kind == "job"  # this program used the other one too
    lame.kill()
    job.kill()


def test_two_programs_at_once_share_one_job(place: Path) -> None:
    code = """
        from monarch_rdma.job import ProcessJob
        job = ProcessJob({"hosts": 1}, idle_timeout=60)
        job.state()
        say(job.apply_id)
        hear()
        if sys.argv[1] == "ends it":
            job.kill()
        """
    programs = [Program(code, end, MONARCH_RDMA_JOB_DIR=str(place / "jobs")) for end in ("ends it", "leaves it")]
    assert programs[0].line() == programs[1].line()
    for each in reversed(programs):
        each.tell()
        assert each.wait() == 0, each.errors
        each.close()


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"nonsense", 0o600, "no description of a job"),
        (b'{"format": 99, "class": "os:path", "spec": {}, "facts": null}', 0o600, "another version"),
        (b'{"format": 1, "class": "os:getcwd", "spec": {}, "facts": null}', 0o600, "os.getcwd is no class of jobs"),
        (b'{"format": 1, "class": "nowhere:X", "spec": {}, "facts": null}', 0o600, "cannot be imported"),
        (ProcessJob({"hosts": 1}).dumps(), 0o666, "only we can write"),
    ],
)
def test_a_file_that_is_no_description_of_a_job_is_refused(
    place: Path, content: bytes, mode: int, problem: str
) -> None:
    path = place / "state.json"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=problem):
        job_load(path)


def test_what_was_not_applied_is_described_too() -> None:
    again = job_loads(ProcessJob({"hosts": 3}, env={"A": "b"}).dumps())
    assert isinstance(again, ProcessJob) and again.spec() == ProcessJob({"hosts": 3}, env={"A": "b"}).spec()
    assert not again.active
    assert json.loads(LocalJob(["a", "b"]).dumps())["spec"] == {"hosts": ["a", "b"]}


# --- losses and ends


def test_a_lost_host_is_an_event_and_a_failure_of_what_ran_there(job: ProcessJob, client: Faults) -> None:
    trainers = job.state(cached_path=None).trainers
    guests = trainers.spawn_procs().spawn("guests", Guest)
    guests.pid.call().get(LIMIT)
    with Recording() as recording:
        os.kill(agents_of(job)[1], signal.SIGKILL)
        lost = recording.wait("job.host_lost", LIMIT, mesh="trainers", rank=1)
        failure = client.next()
    assert failure.kind == "process" and failure.host == lost.fields["address"]
    assert lost.cause in {event.id for event in recording.events if event.kind == "peer.lost"}
    wait_until(lambda: fails(guests), "what ran there lives on")  # it ends with its agent, but not before it
    assert guests.slice(hosts=0).pid.call_one().get(LIMIT)


def test_a_job_that_ends_from_outside_is_told_to_its_owner(job: ProcessJob, client: Faults) -> None:
    job.state(cached_path=None)
    pids = agents_of(job)
    with Recording("job.ended") as recording:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        failures = [client.next(), client.next()]
        assert "has ended" in recording.wait("job.ended", LIMIT).fields["message"]
    assert {(failure.kind, failure.mesh_name) for failure in failures} == {("job", "trainers"), ("job", "loaders")}
    gone(pids)
    with pytest.raises(JobEnded, match="has ended: host 0 of mesh trainers has ended") as caught:
        job.state()
    assert caught.value.peer == job.name and "host 1 of mesh trainers" in str(caught.value.cause)


def test_a_warning_of_the_scheduler_is_an_event(job: ProcessJob, client: Faults) -> None:
    job.state(cached_path=None)
    with Recording("job.warned") as recording:
        for pid in agents_of(job):
            os.kill(pid, signal.SIGUSR1)
        said = recording.wait("job.warned", LIMIT, job=job.name).fields["message"]
    assert "will be ended by its scheduler soon" in said and "SIGUSR1" in said
    assert len(on(job.state().trainers)) == 2


# --- waiting


class Queued(ProcessJob):
    """What the scheduler says is written by the test."""

    said: tuple[JobStatus, ...] = ()
    asked = 0

    def _status(self) -> JobStatus:
        self.asked += 1
        return self.said[min(self.asked, len(self.said)) - 1]

    @property
    def name(self) -> str:
        return "queue job 7"


def test_progress_is_told_while_a_job_waits(client: Faults) -> None:
    waits = JobStatus("queued", "Resources")
    job, seen = Queued({"hosts": 1}), []
    job.said = (waits, waits, JobStatus("queued", "Priority", "ask again"), JobStatus("running", hosts=("n1",)))
    job.on_progress = lambda status: seen.append(status.sentence(job.name))
    job.state(cached_path=None)
    assert seen == [
        "queue job 7 waits in the queue: Resources",
        "queue job 7 waits in the queue: Priority; ask again",
        "queue job 7 runs on 1 host",
    ]
    job.kill()


def test_a_wait_that_is_over_says_what_the_scheduler_says(client: Faults) -> None:
    job = Queued({"hosts": 1})
    job.said = (JobStatus("queued", "QOSMaxCpuPerUserLimit", "ask for fewer hosts"),)
    with pytest.raises(TransferTimeout, match="queue: QOSMaxCpuPerUserLimit; ask for fewer hosts; the wait for it is"):
        job.state(cached_path=None, timeout=0.3)
    assert job.active
    job.kill()


def test_a_job_that_ends_in_the_queue_is_an_error(client: Faults) -> None:
    job = Queued({"hosts": 1})
    job.said = (JobStatus("queued"), JobStatus("ended", "CANCELLED by 0"))
    with pytest.raises(JobEnded, match="queue job 7 has ended: CANCELLED by 0"):
        job.state(cached_path=None)
    job.kill()


# --- batch mode


CLIENT_SCRIPT = """
import os, sys
from monarch_rdma.actor import this_host
from monarch_rdma.job import ProcessJob, load_current_job
hosts = ProcessJob({"hosts": 5}).state().hosts
assert load_current_job().apply_id
print("hosts", hosts.sizes["hosts"], flush=True)
os._exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def test_batch_mode_runs_the_client_inside_the_job_which_ends_with_it(place: Path) -> None:
    Path("client.py").write_text(CLIENT_SCRIPT)
    job = ProcessJob({"hosts": 2})
    job.apply(client_script="client.py")
    pids = agents_of(job)
    gone(pids)
    log = Path(job.facts["log_dir"]) / "client.log"
    assert log.read_text() == "hosts 2\n"
    assert job.status().is_over
    wait_until(lambda: not list((place / "jobs").iterdir()), "the job's folder is left")
    job.kill()


def test_a_command_can_be_the_client_of_a_batch_too(place: Path) -> None:
    job = LocalJob()
    job.apply(client_script=[sys.executable, "-c", "print('here'); raise SystemExit(3)"])
    wait_until(lambda: job.status().is_over, "the client does not end")
    assert "exit code 3" in job.status().message
    assert (Path(job.facts["log_dir"]) / "client.log").read_text() == "here\n"
    job.kill()


def test_a_local_job_is_this_host(client: Faults) -> None:
    state = LocalJob(["trainers", "loaders"]).state()
    assert state.trainers == state.loaders == this_host()
    assert repr(state).startswith("JobState(trainers=")


# --- wrong input


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ProcessJob({}).apply(), "meshes is {}, but must say how many hosts"),
        (lambda: ProcessJob({"a b": 1}), "mesh 'a b' must be named by letters"),
        (lambda: ProcessJob({"a": 0}), r"meshes\['a'\] is 0, but must be a number of hosts from 1 on"),
        (lambda: ProcessJob({"a": True}), "is True"),
        (lambda: ProcessJob({"a": 1}, env={"A=B": "c"}), "a name is a string without '='"),
        (lambda: ProcessJob({"a": 1}, idle_timeout=0), "idle_timeout is 0"),
        (lambda: LocalJob("hosts"), "must be a list of names"),
        (lambda: LocalJob().process, "was not applied with client_script"),
        (lambda: LocalJob().apply(client_script="nowhere.py"), "'nowhere.py' is no file"),
        (lambda: LocalJob().apply(client_script=[]), "must be a file, or a command"),
        (lambda: job_load("nowhere"), "cannot be read: No such file"),
        (lambda: load_current_job("nowhere"), "cannot be read: No such file"),
    ],
)
def test_wrong_input_is_a_sentence(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_an_agent_that_cannot_start_says_why_and_leaves_nothing(client: Faults, place: Path) -> None:
    job = ProcessJob({"hosts": 2}, env={"MONARCH_RDMA_LANES": "carrier-pigeon"})
    with pytest.raises(ConfigError, match=r"agent of host 0 of mesh hosts .* did not start(.|\n)*carrier"):
        job.state(cached_path=None)
    assert not job.active and list((place / "jobs").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(client: Faults, place: Path) -> None:
    (place / "file").write_text("")
    config.configure(job_dir=str(place / "file" / "below"))
    with pytest.raises(ConfigError, match="cannot be made: .*; set option job_dir"):
        ProcessJob({"hosts": 1}).state(cached_path=None)


# --- agents that are found by a file on shared storage


def test_a_file_on_shared_storage_tells_where_and_follows_a_new_agent(client: Faults, place: Path) -> None:
    from monarch_rdma.actor import attach_to_workers

    Secret.generate().write_file(place / "secret")
    address = f"file://{place}/agent.address"
    agent = ["-m", "monarch_rdma.job.agent", "--secret", str(place / "secret"), "--address", address, "--with-parent"]
    first = subprocess.Popen([sys.executable, *agent])
    config.configure(secret_file=str(place / "secret"))
    mesh = attach_to_workers(workers=[address])
    procs = mesh.spawn_procs(restart="always", max_restarts=None)
    guest = procs.spawn("guest", Guest)
    before = guest.pid.call_one().get(LIMIT)
    first.kill()
    first.wait()
    gone([before])
    second = subprocess.Popen([sys.executable, *agent])
    wait_until(lambda: not fails(guest), "the process does not come back on the host's next agent")
    assert guest.pid.call_one().get(LIMIT) != before
    procs.stop().get(LIMIT)
    second.terminate()
    assert second.wait(LIMIT) == 0
    assert not (place / "agent.address").exists()
    with pytest.raises(PeerLost, match="there is no such file"):
        attach_to_workers(workers=[address], timeout=0.2)


def test_an_agent_ends_with_what_started_it(place: Path) -> None:
    Secret.generate().write_file(place / "secret")
    program = Program(
        """
        import subprocess
        command = [sys.executable, "-m", "monarch_rdma.job.agent", *sys.argv[1:]]
        agent = subprocess.Popen(command, stdout=subprocess.PIPE)
        agent.stdout.readline()
        say(agent.pid)
        hear()
        """,
        *("--secret", str(place / "secret"), "--tell", "--local", "--with-parent"),
    )
    pid = int(program.line())
    program.kill()
    gone([pid])
    program.close()


def test_state_of_one_job_by_several_threads(job: ProcessJob, client: Faults) -> None:
    found: list[JobState] = []
    threads = [threading.Thread(target=lambda: found.append(job.state())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [state.trainers.sizes for state in found] == [{"hosts": 2}] * 2
    assert len(set(agents_of(job))) == 3
