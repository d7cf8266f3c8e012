"""The monarch-rdma command: arguments, exit codes, sentences instead of tracebacks, and progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from knocks import without_knocks

from monarch_rdma import bench, cli, progress
from monarch_rdma.rdma import Secret

COMMAND = [sys.executable, "-m", "monarch_rdma.cli"]


def command(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def failing_doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def install(error: BaseException) -> None:
        def run(**_: object) -> int:
            raise error

        monkeypatch.setattr("monarch_rdma.doctor.run", run)

    return install


def test_help_names_every_command() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert all(
        name in done.stdout for name in ("doctor", "bench", "demo", "worker", "directory", "stacks", "top", "debug")
    )


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert command("--version").stdout.strip() == f"monarch-rdma {version('monarch-rdma')}"


def test_no_command_is_a_usage_error() -> None:
    done = command()
    assert done.returncode == 2
    assert "COMMAND" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "nonsense"),
        (["doctor", "--nonsense"], "--nonsense"),
        (["demo", "stray"], "stray"),
        (["demo", "--owners", "1"], "'1' is not a number from 2 to 64"),
        (["demo", "--readers", "100000"], "'100000' is not a number from 1 to 64"),
        (["demo", "--readers", "-3"], "--readers"),
        (["demo", "--max-size", "big"], "'big' is not a number from 4096 to 68719476736"),
        (["demo", "--sets", "real,other"], "'real,other' is not a comma list of real and generated"),
        (["bench", "--nonsense"], "--nonsense"),
        (["stacks", "one"], "'one' is not a number from 1 on"),
        (["top", "--interval", "0"], "'0' is not a number of seconds from 0.1 to 3600"),
        (["debug", "1", "2"], "unrecognized arguments: 2"),
        (["bench", "--local", "--sizes", "0"], "--sizes"),
    ],
)
def test_wrong_arguments_are_named_and_end_with_2(arguments: list[str], told: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_is_one_sentence(
    failing_doctor: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_doctor(OSError(28, "No space left on device"))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "monarch-rdma doctor: [Errno 28] No space left on device\n"


def test_a_failure_without_a_message_is_named(
    failing_doctor: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_doctor(MemoryError())
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "monarch-rdma doctor: MemoryError\n"


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_where_a_failure_came_from(
    arguments: list[str], failing_doctor: Callable[[BaseException], None]
) -> None:
    failing_doctor(OSError("deep inside"))
    with pytest.raises(OSError, match="deep inside"):
        cli.main(arguments)


def test_ctrl_c_ends_with_130(
    failing_doctor: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_doctor(KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("moment", "code"), [("monarch_rdma.cli", -signal.SIGINT), ("at exit", 0)])
def test_ctrl_c_before_and_after_the_command_shows_no_traceback(moment: str, code: int) -> None:
    """While its modules are imported; and when all is done."""
    program = f"""
import atexit, os, signal, sys
from monarch_rdma import __main__ as start

class Importer:
    def find_spec(self, name, *_):
        if name == {moment!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Importer())
sys.argv[1:] = ["--version"]
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.exit(start.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from monarch_rdma import __main__ as start
import monarch_rdma.cli
monarch_rdma.cli._main = lambda argv: os.kill(os.getpid(), signal.SIGINT) or 7
sys.exit(start.main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 7


def test_closed_standard_streams_are_no_failure() -> None:
    shell = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *COMMAND, "--version"]
    assert subprocess.run(shell, timeout=60, check=False).returncode == 0


def test_a_reader_that_goes_away_is_no_failure_to_report() -> None:
    process = subprocess.Popen([*COMMAND, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (141, "")


def test_the_command_itself_loads_nothing_heavy() -> None:
    code = "import sys, monarch_rdma.cli; print(sorted({'torch', 'numpy', 'cffi', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# --- bench


def test_bench_measures_each_lane_beside_its_raw_mechanism() -> None:
    done = command("bench", "--sizes", "8,64K", "--seconds", "0.02", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    import json

    rows = json.loads(done.stdout)["figures"]
    assert {(row["lane"], row["bytes"]) for row in rows} >= {("tcp", 8), ("tcp", 65536)}
    assert all(row["against"] for row in rows if row["figure"] == "latency")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], bench.DEFAULTS),
        (["--local", "--lane", "tcp"], ["--local", "--lane", "tcp"]),
        (["--help"], ["--help"]),
        (["--connect=ADDRESS"], ["--connect=ADDRESS"]),
        (["--sizes", "1M"], ["--sizes", "1M", "--local", "--baseline", "--seconds", "0.2", "--rounds", "5"]),
        (["--iters=5"], ["--iters=5", "--local", "--baseline", "--sizes", "8,4K,64K,1M,16M,64M", "--rounds", "5"]),
        (["--idle", "1"], ["--idle", "1", "--local"]),
    ],
)
def test_bench_adds_only_what_was_not_asked_for(asked: list[str], expected: list[str]) -> None:
    assert bench.command(asked)[1:] == expected


def test_bench_without_its_program_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "binary", lambda: tmp_path / "transport_bench")
    assert bench.run([]) == 1
    assert (
        capsys.readouterr().err == f"monarch-rdma bench: {tmp_path}/transport_bench is missing; `make build` makes it\n"
    )


def test_interrupting_bench_leaves_nothing_behind() -> None:
    import psutil

    arguments = ["bench", "--lane", "tcp", "--sizes", "1M", "--seconds", "60"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        measured = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while not (children := measured.children(recursive=True)):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        _, alive = psutil.wait_procs(children, 60)
    assert alive == []


# --- progress


def test_progress_is_silent_where_all_is_done_in_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress.track("copying", 10, clock=lambda: now) as advance:
        for second in (0.5, 1.0, 1.9):
            now = second
            advance(3)
    assert capsys.readouterr().out == ""


def test_progress_says_how_far_it_is_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress.track("copying", 100, clock=lambda: now) as advance:
        for second in range(1, 11):
            now = float(second)
            advance(10)
    assert capsys.readouterr().out == "copying: 20 %\ncopying: 70 %\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    pytest.importorskip("rich")
    code = (
        "import os, pty, sys\n"
        "def play():\n"
        "    from monarch_rdma.progress import track\n"
        "    with track('copying', 2) as advance: advance(1); advance(1)\n"
        "    print('done')\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n"
        "    play(); sys.exit(0)\n"
        "seen = b''\n"
        "try:\n"
        "    while piece := os.read(terminal, 4096): seen += piece\n"
        "except OSError as error:\n"
        "    assert error.errno == 5, error\n"
        "sys.stdout.buffer.write(seen)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"100%" in done.stdout
    assert done.stdout.rstrip().endswith(b"done")


# --- worker


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tcp://127.0.0.1:22222"], "there is no job secret"),
        (["tcp//host", "--secret-file", "SECRET"], "has no host and port"),
        (["ipc://@test", "--secret-file", "/nowhere/secret"], "/nowhere/secret"),
    ],
)
def test_a_worker_that_cannot_be_says_why_in_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    Secret.generate().write_file(tmp_path / "secret")
    done = command("worker", *(str(tmp_path / "secret") if each == "SECRET" else each for each in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_a_worker_serves_clients_until_it_is_interrupted(tmp_path: Path) -> None:
    Secret.generate().write_file(tmp_path / "secret")
    address = f"ipc://{tmp_path}/worker"
    worker = [*COMMAND, "worker", address, "--secret-file", str(tmp_path / "secret")]
    client = f"""
import pathlib
from monarch_rdma.actor import attach_to_workers
hosts = attach_to_workers(workers=[{address!r}], private_key=pathlib.Path({str(tmp_path / "secret")!r}))
print(len(hosts.spawn_procs({{"gpus": 2}})))
"""
    with subprocess.Popen(worker, stderr=subprocess.PIPE, text=True) as process:
        try:
            done = subprocess.run(
                [sys.executable, "-c", client], capture_output=True, text=True, timeout=60, check=False
            )
            taken = subprocess.run(worker, capture_output=True, text=True, timeout=60, check=False)
        finally:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
    assert taken.returncode == 1 and "is taken" in taken.stderr and taken.stderr.count("\n") == 1
    assert (process.returncode, without_knocks(errors)) == (0, "")
