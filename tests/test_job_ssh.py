"""Jobs over ssh, to a real server on loopback with keys of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_client import Faults, faults_recorded, wait_until
from ports import free_port
from programs import LIMIT, is_alive

from monarch_rdma import config
from monarch_rdma.actor import Actor, endpoint
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.errors import ConfigError, JobEnded
from monarch_rdma.job import SSHJob, job_load
from monarch_rdma.rdma import default_engine
from monarch_rdma.supervision.events import Recording

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Server:
    """`ssh_args` are those of who may come in."""

    def __init__(self, directory: Path) -> None:
        if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) or not shutil.which("ssh"):
            done = subprocess.run([ROOT / ".ci/system_packages.sh", "jobs"], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"there is no SSH server, and none can be installed: {done.stderr.strip()[-200:]}")
        port = free_port()
        for name in ("host", "user", "other"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
        public = (directory / "host.pub").read_text().split()[:2]
        known = [f"[{name}]:{port} {' '.join(public)}\n" for name in ("127.0.0.1", "localhost")]
        (directory / "known").write_text("".join(known))
        shutil.copy(directory / "user.pub", directory / "authorized")
        lines = [
            f"ListenAddress 127.0.0.1:{port}",
            f"HostKey {directory}/host",
            f"AuthorizedKeysFile {directory}/authorized",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
        ]
        (directory / "conf").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it drops its privileges, as its package wants it
        self.ssh_args = self.args(directory, port, "user")
        self.wrong_key = self.args(directory, port, "other")
        self.unknown_host = [arg.replace(f"{directory}/known", "/dev/null") for arg in self.ssh_args]
        self.closed_port = self.args(directory, 1, "user")
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        with open(directory / "log", "wb") as log:
            self.process = subprocess.Popen([sshd, "-D", "-e", "-f", directory / "conf"], stderr=log)
        deadline = time.monotonic() + LIMIT
        while subprocess.run(["ssh", *self.ssh_args, "127.0.0.1", "true"], capture_output=True, check=False).returncode:
            assert self.process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.05)

    def args(self, directory: Path, port: int, key: str) -> list[str]:
        options = [f"UserKnownHostsFile={directory}/known", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"]
        return ["-F", "none", "-p", str(port), "-i", f"{directory}/{key}", *(p for o in options for p in ("-o", o))]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ssh"))
    yield server
    server.close()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.chdir(tmp_path)
    config.configure(job_dir=str(tmp_path / "jobs"))
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


@pytest.fixture
def ssh_job(server: Server, client: Faults, tmp_path: Path) -> Iterator[Callable[..., SSHJob]]:
    """Makes jobs whose agents are gone when the test is over."""
    jobs: list[SSHJob] = []

    def make(*hosts: str, ssh_args: list[str] | None = None, **kwargs: Any) -> SSHJob:
        jobs.append(SSHJob(ssh_args=ssh_args or server.ssh_args, remote_log_dir=str(tmp_path / "there"), **kwargs))
        jobs[-1].add_mesh("trainers", hosts or ["127.0.0.1", "localhost"])
        return jobs[-1]

    yield make
    for job in jobs:
        pids = pids_of(job) if job.active else []
        job.kill()
        wait_until(lambda pids=pids: not any(map(is_alive, pids)), f"agents are left: {pids}")


def pids_of(job: SSHJob) -> list[int]:
    return [agent["pid"] for agent in job.facts["agents"]["trainers"]]


class Guest(Actor):
    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class LogsCommand:
    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "monarch_rdma.cli", "logs", *arguments, "--state", "state"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


def append(path: Path, line: str) -> None:
    """As the agent does whose file it is."""
    with open(path, "a") as file:
        file.write(f"{line}\n")


def tails_of(path: Path) -> int:
    commands = [each.info["cmdline"] or [""] for each in psutil.process_iter(["cmdline"])]
    return sum(command[0] == "tail" and str(path) in command for command in commands)


def test_the_command_follows_what_agents_print_on_their_hosts(ssh_job: Any, tmp_path: Path) -> None:
    job = ssh_job()
    job.state()
    job.dump("state")
    files = [tmp_path / "there" / job.apply_id / f"trainers.{rank}.log" for rank in range(2)]
    for rank, file in enumerate(files):
        append(file, f"line of {rank}")
    given_up, following = LogsCommand("-f"), LogsCommand("-f")
    for each in (given_up, following):
        assert {each.line(), each.line()} == {"[trainers.0] line of 0", "[trainers.1] line of 1"}
    given_up.process.send_signal(signal.SIGINT)
    assert given_up.process.wait(LIMIT) == 130
    wait_until(lambda: tails_of(files[0]) == 1, "its tail is left")
    append(files[1], "another line")
    assert following.line() == "[trainers.1] another line"
    append(files[0], "the last line")
    job.kill()
    assert following.process.communicate(timeout=LIMIT)[0] == "[trainers.0] the last line\n"
    wait_until(lambda: not tails_of(files[0]), "tails are left")


def test_the_command_shows_what_agents_printed_where_it_can(ssh_job: Any, tmp_path: Path) -> None:
    job = ssh_job()
    job.state()
    job.dump("state")
    file = tmp_path / "there" / job.apply_id / "trainers.0.log"
    append(file, "a line")
    file.with_name("trainers.1.log").unlink()
    shown = LogsCommand()
    out, errors = shown.process.communicate(timeout=LIMIT)
    assert (shown.process.returncode, out) == (1, "[trainers.0] a line\n")
    assert "a log cannot be read: cat: " in errors and "No such file" in errors and "Traceback" not in errors


def test_hosts_by_ssh_from_apply_to_kill(ssh_job: Any, tmp_path: Path) -> None:
    job = ssh_job()
    trainers = job.state().trainers
    guests = trainers.spawn_procs({"gpus": 2}).spawn("guests", Guest)
    said = guests.variable.call("SSH_CONNECTION").get(LIMIT)
    assert said.sizes == {"hosts": 2, "gpus": 2} and all(each.startswith("127.0.0.1 ") for each in said.values())
    assert job.status().hosts == ("127.0.0.1", "localhost")
    pids = pids_of(job)
    secret = (tmp_path / "jobs" / job.apply_id / "secret").read_bytes()
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert "sshd" not in Path(f"/proc/{pid}/stat").read_text()
    again = job_load()
    assert isinstance(again, SSHJob) and again.can_run(job)
    assert {path.name for path in (tmp_path / "there").rglob("*.log")} == {"trainers.0.log", "trainers.1.log"}


def test_a_host_that_is_lost_is_an_event_and_the_rest_goes_on(ssh_job: Any, client: Faults) -> None:
    job = ssh_job()
    guests = job.state(cached_path=None).trainers.spawn_procs().spawn("guests", Guest)
    guests.variable.call("HOME").get(LIMIT)
    with Recording("job.host_lost") as recording:
        os.kill(pids_of(job)[0], signal.SIGKILL)
        recording.wait("job.host_lost", LIMIT, rank=0)
    assert client.next().kind == "process"
    assert guests.slice(hosts=1).variable.call_one("HOME").get(LIMIT)
    assert job.status().message == "host 0 of mesh trainers (127.0.0.1) does not answer"
    assert not job.can_run(job)


def test_when_all_hosts_are_lost_the_job_has_ended(ssh_job: Any, client: Faults) -> None:
    job = ssh_job("127.0.0.1")
    job.state(cached_path=None)
    with Recording("job.ended") as recording:
        os.kill(pids_of(job)[0], signal.SIGKILL)
        recording.wait("job.ended", timeout=LIMIT)
    assert client.next().kind == "job"
    with pytest.raises(JobEnded, match="has ended: host 0 of mesh trainers .127.0.0.1. does not answer"):
        job.state(cached_path=None)


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ("wrong_key", {}, "Permission denied.*; `ssh 127.0.0.1` has to work without a password: ssh-copy-id"),
        ("unknown_host", {}, "Host key verification failed.*; its key is not known, or has changed"),
        ("closed_port", {}, "Connection refused.*; no ssh server listens there"),
        ("ssh_args", {"python_exe": "/nowhere/python"}, "/nowhere/python.*; pass python_exe"),
        ("ssh_args", {"python_exe": "/bin/false"}, "did not start"),
    ],
)
def test_hosts_that_cannot_be_used_say_why(
    server: Server, ssh_job: Any, args: str, kwargs: dict[str, str], problem: str
) -> None:
    job = ssh_job("127.0.0.1", ssh_args=getattr(server, args), **kwargs)
    with pytest.raises(ConfigError, match=f"(?s)agent of host 0 of mesh trainers .127.0.0.1.*{problem}"):
        job.apply()
    assert not job.active


def test_where_one_host_fails_the_others_are_left_alone(ssh_job: Any) -> None:
    job = ssh_job("127.0.0.1", "nowhere.invalid")
    with pytest.raises(ConfigError, match="(?s)host 1 of mesh trainers .nowhere.invalid.*no host of this name"):
        job.apply()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SSHJob(ssh_args="-p 22"), r"ssh_args is '-p 22', but must be a list"),
        (lambda: SSHJob(meshes={"a": "host"}), "hosts of mesh 'a' are 'host', but must be a list of names"),
        (lambda: SSHJob(meshes={"a": ["-oProxyCommand=x"]}), "is no name that ssh takes"),
        (lambda: SSHJob().apply(), "meshes is {}, but must say how many hosts"),
        (lambda: SSHJob(meshes={"a": ["x"]}).apply(client_script=["true"]), "SSHJob cannot run client_script"),
    ],
)
def test_wrong_input_is_a_sentence(client: Faults, make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
