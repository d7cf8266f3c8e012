"""The virtual machine of the RDMA tests itself: what is in it, that it ends in every case, and that it is made once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rdma_vm.image import ROOT, Image, Unavailable, prepare
from rdma_vm.machine import Machine, MachineError, empty_folder
from scripts import put_script

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def machine(rdma_image: Image) -> Iterator[Machine]:
    with Machine(rdma_image, empty_folder(ROOT / "build/rdma_vm/one"), limit=300) as booted:
        yield booted


def machines_of(results: Path) -> list[int]:
    """Processes of machines whose results are below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        told = " ".join(process.info["cmdline"] or [])
        if "qemu-system" in told and str(results) in told and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_two_devices_with_reliable_connections(machine: Machine) -> None:
    described = machine.run("ibv_devinfo -v").check()
    assert described.count("state:\t\t\tPORT_ACTIVE") == 2
    assert described.count("active_mtu:\t\t4096") == 2
    for rail in (0, 1):
        assert f"::ffff:10.9.{rail}.1, RoCE v2" in described


def test_a_file_moves_through_the_card(machine: Machine) -> None:
    """perftest's own programs, one end each, over queue pairs of one device."""
    figures = machine.run(
        "read='ib_read_bw -d rxe1 -F -s 4096 -n 50'; $read > /dev/null &"
        "for try in $(seq 100); do $read 10.9.1.1 && exit; sleep 0.2; done; exit 1"  # until the other end listens
    )
    assert "4096       50" in figures.check()


def test_what_is_written_inside_stays_there_but_results(machine: Machine) -> None:
    mark = f"written-inside-{os.getpid()}"
    machine.run(f"touch {mark} /tmp/{mark} /results/{mark}").check()
    assert machine.run(f"ls {mark} /tmp/{mark}").code == 0
    assert not (ROOT / mark).exists() and not (Path("/tmp") / mark).exists()
    assert (machine.results / mark).exists()


def test_status_output_and_environment_come_back(machine: Machine) -> None:
    ended = machine.run('echo "$word"; echo problem >&2; exit 7', word="two words; 'and more'")
    assert (ended.code, ended.output) == (7, "two words; 'and more'\nproblem\n")
    with pytest.raises(AssertionError, match="exit status 7.*\n.*\nproblem"):
        ended.check()


def test_a_command_that_takes_too_long_is_killed_with_its_children(machine: Machine) -> None:
    with pytest.raises(TimeoutError, match="(?s)took over 5 s.*first words"):
        machine.run("echo first words; sleep 1000 & sleep 1000", timeout=5)
    assert machine.run("for i in $(seq 50); do pgrep sleep || exit 0; sleep 0.1; done; exit 1").code == 0


def test_the_time_limit_ends_the_machine(rdma_image: Image, tmp_path: Path) -> None:
    over = pytest.raises(MachineError, match="the machine has ended, its time limit is 10 s")  # maybe before it is up
    with over, Machine(rdma_image, tmp_path, limit=10) as machine:
        machine.run("sleep 100", timeout=60)
    assert machines_of(tmp_path) == []


def test_it_ends_with_the_program_that_booted_it(rdma_image: Image, tmp_path: Path) -> None:
    """Booted at the same time, one for each way to end."""
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    with contextlib.ExitStack() as stack:
        programs = {}
        for how in codes:
            command = [sys.executable, "tests/rdma_vm", "--results", str(tmp_path / how.name), "echo up; sleep 100"]
            program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(program.kill)
            programs[how] = stack.enter_context(program)
        for how, program in programs.items():
            assert program.stdout is not None and program.stderr is not None
            assert program.stdout.readline() == "up\n"
            assert len(machines_of(tmp_path / how.name)) == 1
            program.send_signal(how)
            assert program.wait(20) == codes[how]
            assert "Traceback" not in program.stderr.read()
    gone = [psutil.Process(pid) for pid in machines_of(tmp_path)]
    assert psutil.wait_procs(gone, timeout=20)[1] == []


def test_the_shell_command_returns_status_and_output(rdma_image: Image, tmp_path: Path) -> None:
    command = [sys.executable, "tests/rdma_vm", "--results", str(tmp_path), "rdma link; ls /results; exit 3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert "link rxe1/1 state ACTIVE physical_state LINK_UP netdev rail1" in done.stdout
    wrong = subprocess.run([*command, "another"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2 and "--two needs two commands, otherwise one; 2 given" in wrong.stderr


@pytest.fixture
def program_first_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Puts a script before the program of the same name."""

    def put(name: str, script: str) -> None:
        folder = tmp_path / "first"
        put_script(folder / name, script)
        monkeypatch.setenv("PATH", os.pathsep.join((str(folder), os.environ["PATH"])))

    return put


def test_what_was_made_once_needs_no_network(
    rdma_image: Image, program_first_on_path: Callable[[str, str], None]
) -> None:
    for program in ("apt-get", "apt-cache", "sudo"):
        program_first_on_path(program, "exit 100")
    told: list[str] = []
    assert prepare(told.append) == rdma_image
    assert told == []


def test_a_package_that_cannot_be_fetched_is_named(
    rdma_image: Image,
    program_first_on_path: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    program_first_on_path("apt-get", "echo 'E: no network' >&2; exit 100")
    monkeypatch.setenv("MONARCH_RDMA_TEST_VM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Unavailable, match="^the RDMA machine cannot be had here: package .*: E: no network$"):
        prepare()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_missing_programs_that_we_may_not_install_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("bash", "env", "id"):
        (tmp_path / program).symlink_to(f"/usr/bin/{program}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable) as why:
        prepare()
    assert "\n" not in str(why.value)
    assert "please run: sudo apt-get install" in str(why.value) and "qemu-system-x86" in str(why.value)
