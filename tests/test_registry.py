"""How commands find running programs, and what of a program others can see."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import wait_until
from running_program import RunningProgram

from monarch_rdma import config
from monarch_rdma.actor.debugging import registry
from monarch_rdma.errors import ConfigError
from monarch_rdma.rdma import Secret

CODE = "this_host()\ndone()\n"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where programs of this test are found, by us too."""
    with config.configured(runtime_dir=str(tmp_path)):
        yield tmp_path


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("monarch_rdma-*/*.program"))


def test_a_program_is_found_while_it_runs(directory: Path) -> None:
    with RunningProgram(directory, CODE) as program:
        program.line("ready")
        found = registry.choose(None)
        assert (found.pid, str(program.script) in found.command) == (program.pid, True)
        assert registry.choose(program.pid) == found
        assert program.close() == 0
        assert files(directory) == []
        assert registry.programs() == []


def test_its_file_is_private_and_holds_no_secret(directory: Path) -> None:
    with RunningProgram(directory, CODE) as program:
        program.line("ready")
        (path,) = files(directory)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        secret = registry.choose(None).read_secret()
        proc = Path(f"/proc/{program.pid}")
        for seen in (path.read_bytes(), (proc / "cmdline").read_bytes(), (proc / "environ").read_bytes()):
            assert secret.reveal() not in seen
            assert secret.reveal().hex().encode() not in seen
        assert [each for each in path.parent.iterdir() if not each.is_socket()] == [path]


def test_the_secret_is_the_jobs(directory: Path) -> None:
    job = directory / "job.secret"
    Secret.generate().write_file(job)
    with RunningProgram(directory, CODE, MONARCH_RDMA_SECRET_FILE=str(job)) as program:
        program.line("ready")
        assert registry.choose(None).read_secret() == Secret.from_file(job)


def test_the_secret_is_not_left_open_in_what_the_program_starts(directory: Path) -> None:
    code = """
        import subprocess
        this_host()
        seen = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True).stdout
        print("secret" in seen, flush=True)
        done()
    """
    with RunningProgram(directory, code) as program:
        assert program.line() == "False"


def test_the_file_of_a_killed_program_goes_with_the_next(directory: Path) -> None:
    with RunningProgram(directory, CODE) as killed:
        killed.line("ready")
        killed.kill()
        assert len(files(directory)) == 1
        assert registry.programs() == []
        with pytest.raises(ConfigError, match="no program of this user with actors runs on this host"):
            registry.choose(None)
        with RunningProgram(directory, CODE) as program:
            program.line("ready")
            assert [path.name.partition("-")[0] for path in files(directory)] == [str(program.pid)]


def test_of_several_one_must_be_named(directory: Path) -> None:
    with RunningProgram(directory, CODE) as first, RunningProgram(directory, CODE) as second:
        first.line("ready"), second.line("ready")
        with pytest.raises(ConfigError, match="2 programs run: name one by its pid") as caught:
            registry.choose(None)
        assert str(first.pid) in str(caught.value) and str(second.pid) in str(caught.value)
        assert registry.choose(second.pid).pid == second.pid
        with pytest.raises(ConfigError, match="no program has pid 1; there are"):
            registry.choose(1)
        told = first.command("top", "--once")
        assert told.returncode == 1 and "name one by its pid" in told.stderr and "Traceback" not in told.stderr


def test_a_program_of_local_actors_alone_is_found_too(directory: Path) -> None:
    code = """
        class Local(Actor):
            @endpoint
            def add(self, x):
                return x + 1

        assert this_proc().spawn("local", Local).add.call_one(1).get() == 2
        done()
    """
    with RunningProgram(directory, code) as program:
        program.line("ready")
        process: dict[str, Any] = {}

        def answers() -> bool:  # it has a second each time
            (seen,) = json.loads(program.command("top", "--json").stdout)["processes"]
            process.update(seen)
            return bool(process["answers"])

        wait_until(answers, lambda: f"it does not answer: {process}")
        assert process["facts"]["pid"] == program.pid
        assert "local" in [actor["name"] for actor in process["actors"]]


def test_workers_are_no_programs(directory: Path) -> None:
    with RunningProgram(directory, "this_host().spawn_procs({'gpus': 2})\ndone()\n") as program:
        program.line("ready")
        assert [each.pid for each in registry.programs()] == [program.pid]


def test_a_program_runs_where_it_cannot_be_announced(directory: Path) -> None:
    (directory / f"monarch_rdma-{os.geteuid()}").write_text("in the way")
    with RunningProgram(directory, CODE) as program:
        program.line("ready")
        assert program.close() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_get_at_it() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        with config.configured(runtime_dir=name), RunningProgram(directory, CODE) as program:
            program.line("ready")
            assert "secret" in as_nobody(
                f"print(open({str(program.script)!r}) and 'secret')"
            )  # as far as that one gets
            (path,) = files(directory)
            for wanted in (str(path), registry.choose(None).secret):
                assert "PermissionError" in as_nobody(f"open({wanted!r}).read()")


def as_nobody(code: str) -> str:
    code = f"import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
