"""monarch-rdma doctor: what it finds here, what it would find elsewhere, and how it says so."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import put_script

from monarch_rdma import bench, config, doctor
from monarch_rdma.doctor import Check, devices, isolated, kernel, lanes, software

OFFERED = [Check("", name, True, "") for name in ("memfd and seals", "process_vm", "loopback", "rails")]
LANES = ["shm-mapped", "shm-process_vm", "tcp", *(["verbs"] if "verbs" in config.LANES else [])]


@pytest.fixture(scope="module")
def here() -> list[Check]:
    """Everything about this host; looked at once."""
    return doctor.examine()


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def host(root: Path, **files: str) -> Path:
    """A host as the kernel shows it in files: `/` in their names is written `__`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- this host


def test_every_lane_that_this_host_offers_works(here: list[Check]) -> None:
    assert [check.name for check in here if check.group == "lanes"] == LANES
    assert [check for check in here if check.required and not check.ok] == []
    assert named(here, "tcp").ok


def test_what_is_not_there_comes_with_a_reason_and_a_remedy(here: list[Check]) -> None:
    assert [check.name for check in here if not check.why] == []
    assert [check.name for check in here if not check.ok and not check.fix] == []


def test_json_and_exit_code() -> None:
    command = [sys.executable, "-m", "monarch_rdma.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"], done.stderr) == (0, True, "")
    assert {check["name"] for check in document["checks"]} >= {*LANES, "C++ core", "libibverbs", "memfd and seals"}
    assert all({"group", "name", "ok", "why", "fix", "required"} == set(check) for check in document["checks"])


def test_looking_does_not_import_torch() -> None:
    code = "import sys; from monarch_rdma import doctor; doctor.examine(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"


# --- the exit code


def test_a_missing_card_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Check("lanes", "tcp", True, "works", required=True),
        Check("cards", "RDMA cards", False, "none", "buy one"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert doctor.run() == 0
    assert "Healthy: tcp" in capsys.readouterr().out


def test_a_lane_that_should_work_and_does_not_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Check("lanes", "tcp", False, "broken", "mend it", required=True)])
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "FAIL tcp" in out
    assert "fix: mend it" in out
    assert "Not healthy: tcp" in out


def test_json_of_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Check("lanes", "tcp", False, "broken", required=True)])
    assert doctor.run(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_remedies_are_shown_only_where_they_are_needed() -> None:
    text = doctor.table([Check("a", "good", True, "fine", "nothing"), Check("a", "bad", False, "not so", "this")], 80)
    assert "fix: this" in text
    assert "nothing" not in text


def test_long_lines_are_wrapped() -> None:
    text = doctor.table([Check("a", "name", True, "word " * 60)], 80)
    assert max(map(len, text.splitlines())) <= 80


# --- lanes


def test_a_lane_that_this_host_cannot_offer_is_not_required() -> None:
    refused = Check("same host", "process_vm", False, "refused", "sysctl something")
    lane = named(lanes.checks([*OFFERED, refused]), "shm-process_vm")
    assert (lane.ok, lane.required, lane.fix) == (False, False, "sysctl something")
    assert "process_vm: refused" in lane.why


def test_the_verbs_lane_is_tried_where_it_is_built_and_there_are_rails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = 'echo "{\\"figures\\": [{\\"lane\\": \\"$5\\"}]}"'  # the lane that was asked for
    program = put_script(tmp_path / "transport_bench", asked)
    monkeypatch.setattr(bench, "binary", lambda: program)
    monkeypatch.setattr(config, "LANES", ("shm", "tcp"))
    assert "verbs" not in {check.name for check in lanes.checks(OFFERED)}
    monkeypatch.setattr(config, "LANES", ("shm", "verbs", "tcp"))
    assert named(lanes.checks(OFFERED), "verbs").ok
    none = Check("cards", "rails", False, "none", "rdma link add something")
    without = named(lanes.checks([*OFFERED, none]), "verbs")
    assert (without.ok, without.required, without.fix) == (False, False, "rdma link add something")


def test_loopback_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert named(devices.checks(tmp_path), "loopback").ok

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(devices.socket, "create_connection", unreachable)
    check = named(devices.checks(tmp_path), "loopback")
    assert (check.ok, check.fix) == (False, "ip link set lo up")


def test_a_missing_benchmark_program_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "binary", lambda: tmp_path / "transport_bench")
    tcp = named(lanes.checks(OFFERED), "tcp")
    assert (tcp.ok, tcp.required) == (False, True)
    assert "is missing" in tcp.why


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'transport_bench: the peer was lost' >&2; exit 1", "the peer was lost"),
        ('echo \'{"figures": [{"lane": "local"}]}\'', "went over local instead"),
        ("exit 3", "ended with 3"),
    ],
)
def test_a_lane_that_fails_says_how(script: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = put_script(tmp_path / "transport_bench", script)
    monkeypatch.setattr(bench, "binary", lambda: program)
    tcp = named(lanes.checks(OFFERED), "tcp")
    assert not tcp.ok
    assert told in tcp.why


# --- the kernel, here and elsewhere


def test_process_vm_is_tried_between_siblings() -> None:
    assert kernel.can_read_processes() in (0, errno.EPERM, errno.ENOSYS)


def test_refused_process_vm_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "can_read_processes", lambda: errno.EPERM)
    check = named(kernel.checks(tmp_path), "process_vm")
    assert not check.ok
    assert "Operation not permitted" in check.why
    assert "ptrace_scope=0" in check.fix


@pytest.mark.parametrize(("scope", "ok"), [("0", True), ("1", False), ("2", False), ("3", False), (None, True)])
def test_ptrace_scope(scope: str | None, ok: bool, tmp_path: Path) -> None:
    root = host(tmp_path, **({"proc__sys__kernel__yama__ptrace_scope": scope + "\n"} if scope else {}))
    check = named(kernel.checks(root), "ptrace scope")
    assert check.ok is ok
    assert (check.fix == "") is (scope is None)


@pytest.mark.parametrize("allowed", ["no", "job", "any"])
def test_ptrace_scope_1_names_the_option_that_helps(allowed: str, tmp_path: Path) -> None:
    config.configure(allow_ptrace=allowed)
    check = named(kernel.checks(host(tmp_path, proc__sys__kernel__yama__ptrace_scope="1\n")), "ptrace scope")
    assert check.ok is (allowed != "no")
    assert "allow_ptrace" in check.why and "MONARCH_RDMA_ALLOW_PTRACE=job" in check.fix


def test_the_socket_directory(tmp_path: Path) -> None:
    config.configure(unix_socket_dir=tmp_path / "not yet")
    assert named(kernel.checks(), "socket directory").ok
    config.configure(unix_socket_dir="none")
    assert "over tcp alone" in named(kernel.checks(), "socket directory").why
    tmp_path.chmod(0o755)
    config.configure(unix_socket_dir=tmp_path)
    check = named(kernel.checks(), "socket directory")
    assert not check.ok and "mode 0700" in check.why and "MONARCH_RDMA_UNIX_SOCKET_DIR" in check.fix


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_huge_pages_for_shared_memory(text: str, ok: bool, tmp_path: Path) -> None:
    root = host(tmp_path, sys__kernel__mm__transparent_hugepage__shmem_enabled=text)
    assert named(kernel.checks(root), "huge pages, shared memory").ok is ok


def test_reserved_huge_pages_memory_and_nodes(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        proc__meminfo="MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"
        "HugePages_Total: 100\nHugePages_Free: 60\nHugepagesize: 2048 kB\n",
        sys__devices__system__node__node0__cpulist="0-31\n",
        sys__devices__system__node__node1__cpulist="32-63\n",
    )
    found = kernel.checks(root)
    assert named(found, "huge pages, reserved").why == "60 of 100 free, 2 MiB each"
    assert named(found, "memory").why == "32.0 of 64.0 GiB available"
    assert "node0: CPUs 0-31, node1: CPUs 32-63" in named(found, "cores and NUMA nodes").why


@pytest.mark.parametrize(
    ("limits", "ok", "fix"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), True, ""),
        ((64 << 20, 64 << 20), True, "sudo prlimit"),
        ((8 << 20, resource.RLIM_INFINITY), False, "ulimit -l unlimited"),
        ((8 << 20, 8 << 20), False, "sudo prlimit"),
    ],
)
def test_locked_memory(limits: tuple[int, int], ok: bool, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: limits)
    check = named(kernel.checks(), "locked memory")
    assert check.ok is ok and check.fix.startswith(fix)


def test_a_host_that_shows_nothing_is_looked_at_too(tmp_path: Path) -> None:
    found = [*kernel.checks(tmp_path), *devices.checks(tmp_path)]
    assert not named(found, "memory").ok
    assert not named(found, "/dev/shm").ok
    assert not named(found, "RDMA cards").ok


def test_cards_are_shown_with_driver_and_ports(tmp_path: Path) -> None:
    card = "sys__class__infiniband__mlx5_0__ports__1__"
    root = host(
        tmp_path,
        **{card + "state": "4: ACTIVE\n", card + "rate": "400 Gb/sec (4X NDR)\n", card + "link_layer": "Ethernet\n"},
    )
    driver = tmp_path / "drivers" / "mlx5_core"
    driver.mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").mkdir()
    (tmp_path / "sys/class/infiniband/mlx5_0/device/driver").symlink_to(driver)
    check = named(devices.checks(root), "RDMA cards")
    assert check.ok
    assert "mlx5_0 (mlx5_core; port 1 ACTIVE, Ethernet, 400 Gb/sec (4X NDR))" in check.why


def test_an_old_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.metadata, "version", lambda name: "2.9.1+cu128")
    check = named(software.checks(), "torch")
    assert (check.ok, check.fix) == (False, "pip install 'torch>=2.10'")


def test_an_option_that_no_engine_would_start_with_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(software.checks(), "options").ok
    monkeypatch.setenv("MONARCH_RDMA_TCP_SOKETS", "4")
    check = named(software.checks(), "options")
    assert (check.ok, check.required) == (False, True)
    assert "MONARCH_RDMA_TCP_SOKETS names no option; did you mean MONARCH_RDMA_TCP_SOCKETS?" in check.why


# --- code that may crash


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise ValueError('not like this')", "ValueError: not like this"),
        ("raise SystemExit(4)", "exit code 4"),
    ],
)
def test_a_probe_that_fails_is_told_and_does_no_harm(code: str, told: str) -> None:
    with pytest.raises(isolated.Failed, match=told):
        isolated.run(code, timeout=1 if "sleep" in code else 30)


def test_a_probe_gives_what_it_printed() -> None:
    assert isolated.run("import json, sys; print(json.dumps(sys.argv[1:]))", "a", "b") == ["a", "b"]
