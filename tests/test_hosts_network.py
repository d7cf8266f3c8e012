"""The hosts that other tests run on: apart from each other, on a wire that does as it is told, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_client import wait_until
from hosts.network import Host, Network

ECHO = """
import socket, sys
door = socket.create_server((sys.argv[1], 7000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("open", flush=True)
while True:
    with door.accept()[0] as peer:
        while data := peer.recv(65536):
            peer.sendall(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as peer:
    for _ in range(int(sys.argv[2])):
        began = time.monotonic()
        peer.sendall(b"x" * int(sys.argv[3]))
        left = int(sys.argv[3])
        while left: left -= len(peer.recv(65536))
        print(time.monotonic() - began, flush=True)
"""
COUNT = """
import socket, sys
inbox = socket.socket(type=socket.SOCK_DGRAM)
inbox.bind((sys.argv[1], 7001))
inbox.settimeout(20)
print("open", flush=True)
count = 0
while inbox.recv(64) != b"last": count += 1
print(count)
"""
SEND = """
import socket, sys, time
out = socket.socket(type=socket.SOCK_DGRAM)
for i in range(int(sys.argv[2])):
    out.sendto(b"packet", (sys.argv[1], 7001))
    if i % 100 == 0: time.sleep(0.001)
while True:
    out.sendto(b"last", (sys.argv[1], 7001))
    time.sleep(0.05)
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Python code on a host; it ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(host: Host, code: str, *arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        running.append(host.popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_they_have_nothing_in_common_but_files(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script = "cat /proc/sys/kernel/random/boot_id; hostname; echo /dev/shm/*; touch /dev/shm/$1; echo $$; cat $2"
    (tmp_path / "shared").write_text("for both")
    seen = [host.run("sh", "-c", script, "sh", host.name, tmp_path / "shared").split("\n") for host in hosts]
    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len({here, seen[0][0], seen[1][0]}) == 3
    for host, (_, name, shm, pid, text) in zip(hosts, seen, strict=True):
        assert name == host.name
        assert shm == "/dev/shm/*", "something of another host is there"
        assert int(pid) < 1000, "of the process ids of this host"
        assert text == "for both"
        assert not Path("/dev/shm", host.name).exists()


@pytest.mark.parametrize("how", ["address", "address6", "name"])
def test_they_reach_each_other(hosts: tuple[Host, Host], started: Any, how: str) -> None:
    server = started(hosts[1], ECHO, getattr(hosts[1], how))
    assert said(server) == "open"
    assert float(said(started(hosts[0], ASK, getattr(hosts[1], how), 1, 100_000))) < 60


def test_a_process_is_a_child_of_the_test(hosts: tuple[Host, Host]) -> None:
    process = hosts[0].popen(["sleep", "100"])
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it was not stopped")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert subprocess.run(["true"], check=False).returncode == 0, "what is started next is outside again"


def test_delay(hosts: tuple[Host, Host], network: Network, started: Any) -> None:
    server = started(hosts[1], ECHO, hosts[1].address)
    assert said(server) == "open"
    network.shape(delay=0.05)
    asking = started(hosts[0], ASK, hosts[1].address, 3, 100)
    assert all(float(said(asking)) >= 0.1 for _ in range(3))


def test_rate(hosts: tuple[Host, Host], network: Network, started: Any) -> None:
    server = started(hosts[1], ECHO, hosts[1].address)
    assert said(server) == "open"
    hosts[0].shape(rate=4e6)
    took = float(said(started(hosts[0], ASK, hosts[1].address, 1, 1_000_000)))
    assert took >= 0.2  # 0.25 s less what is still on the cable at the end


def test_loss(hosts: tuple[Host, Host], network: Network, started: Any) -> None:
    counter = started(hosts[1], COUNT, hosts[1].address)
    assert said(counter) == "open"
    hosts[0].shape(loss=0.2)
    started(hosts[0], SEND, hosts[1].address, 5000)
    assert int(said(counter)) < 4500, "too few were lost"


def test_a_cut_and_its_end(hosts: tuple[Host, Host], started: Any) -> None:
    server = started(hosts[1], ECHO, hosts[1].address)
    assert said(server) == "open"
    asking = started(hosts[0], ASK, hosts[1].address, 1_000_000, 10)
    said(asking)
    hosts[1].cut()
    os.set_blocking(asking.stdout.fileno(), False)
    last = time.monotonic()

    def silent_for(seconds: float) -> bool:
        nonlocal last
        if asking.stdout.read(1 << 20):
            last = time.monotonic()
        return time.monotonic() - last > seconds

    wait_until(lambda: silent_for(0.3), "the cable is still in")
    hosts[1].mend()
    wait_until(lambda: not silent_for(0.3), "nothing came through after the cut")
    assert server.poll() is None


def test_power_off_and_on(make_network: Callable[[int], Network], started: Any) -> None:
    network = make_network(2)
    here, there = network.hosts
    server = started(there, ECHO, there.address)
    assert said(server) == "open"
    boot = there.run("cat", "/proc/sys/kernel/random/boot_id")
    there.power_off()
    assert server.wait(20) == -signal.SIGKILL
    there.boot()
    assert there.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    again = started(there, ECHO, there.address)
    assert said(again) == "open"
    assert float(said(started(here, ASK, there.name, 1, 10))) < 60


def test_nothing_is_left_after_a_killed_test() -> None:
    """Also not of what had left its parent and its session."""
    code = """
        import sys, time
        sys.path.insert(0, "tests")
        from hosts.network import Network
        network = Network(2)
        script = "setsid sleep 1000 & echo started; exec sleep 1001"
        network.hosts[0].popen(["sh", "-c", script], stdout=-1).stdout.readline()
        print(network._wire.pid, *[host.first_pid for host in network.hosts], flush=True)
        time.sleep(1000)
    """
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as maker:
        assert maker.stdout is not None
        try:
            pids = [int(pid) for pid in maker.stdout.readline().split()]
            of_hosts = [each for pid in pids[1:] for each in in_process_ids_of(pid)]
        finally:
            maker.kill()
    assert len(of_hosts) >= 4
    wait_until(lambda: not any(map(psutil.pid_exists, [*pids, *of_hosts])), "processes are left")


def in_process_ids_of(first: int) -> list[int]:
    theirs = os.readlink(f"/proc/{first}/ns/pid")

    def is_there(pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid") == theirs
        except OSError:
            return False

    return [pid for pid in psutil.pids() if is_there(pid)]
