"""Hosts on one machine, as Linux namespaces, and the network between them. Tests take fixture `make_network`:

    def test_something(make_network, secret):
        network = make_network(2)
        here, there = network.hosts
        owner = there.child(secret)                  # a Child (tests/child.py) with an engine that others can reach
        program = here.program("say('hello')")       # a Program (tests/programs.py)
        here.popen(["sh", "-c", "..."])              # a subprocess.Popen, a direct child of the test
        network.shape(delay=0.01, loss=0.01)         # what any host sends; delay is one way, so twice that to and fro
        there.cut(); there.mend()                    # its cable is pulled out, and put in again
        there.power_off(); there.boot()              # everything that runs there is gone at once; then another boot

A module's tests can share one: `with network_of(2) as network` in a fixture of their own.

Each host has its own network (`address` 10.77.0.N, `address6` fd77::N on eth0, and a loopback), boot id, host name
(hostN; all know all), process ids, /proc and /dev/shm, so the library takes it for another host. Files are the same, as
on a shared file system. Engines listen on the loopback by default: `child` and `program` set option `listen_host`.

The wire is a program (network.cc), not tc: kernels without netem have it, packets are lost by a seeded choice, and
nothing has a name in the system. It, the hosts and all that runs there end with the test's process, however that ends.
While packets may be lost they travel one by one, as on a cable, else up to 64 KiB as one.

Needs root, /dev/net/tun and namespaces; where one is missing tests skip and say which.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from child import Child
from programs import Program

from monarch_rdma.rdma import Secret

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build/core/hosts/network"
_CLONE_NEWPID = 0x20000000


class Unavailable(Exception):
    """This machine cannot have hosts of namespaces; the text says why."""


class Host:
    """Made by `Network`."""

    def __init__(self, network: Network, number: int, first_pid: int) -> None:
        self.number, self.name = number, f"host{number}"
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.first_pid = first_pid  # of the host's process 1, outside
        self._network = network
        self._cable: dict[str, float] = {"plugged": 1, "delay": 0.0, "loss": 0.0, "rate": 0.0}

    def popen(self, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen on this host: a child of this process, its `pid` and signals are as everywhere."""
        with _children_below(self.first_pid):
            return subprocess.Popen([PROGRAM, "become", *map(str, command)], **options)

    def run(self, *command: Any, **options: Any) -> str:
        """What a command on this host says; CalledProcessError if it fails."""
        process = self.popen(command, stdout=subprocess.PIPE, text=True, **options)
        said, _ = process.communicate()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, said)
        return str(said)

    def child(self, secret: Secret, **options: Any) -> Child:
        """A process with an engine on this host; close it, or leave it to the network's end."""
        child = Child(secret, popen=self.popen, **{"listen_host": self.address, "name": self.name, **options})
        return self._network.keep(child)

    def program(self, code: str, *arguments: str, secret_file: Path | None = None, **env: str) -> Program:
        """Python code on this host; `env` are environment variables."""
        env = {"MONARCH_RDMA_LISTEN_HOST": self.address, **env}
        return self._network.keep(Program(code, *arguments, secret_file=secret_file, popen=self.popen, **env))

    def processes(self) -> dict[int, str]:
        """What runs here, but for the host's process 1: command by process id, as seen from outside."""
        if not self.first_pid:
            return {}
        theirs = os.readlink(f"/proc/{self.first_pid}/ns/pid")
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == theirs and pid != self.first_pid:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended, or is not ours to see
                continue
        return found

    def shape(self, *, delay: float = 0.0, loss: float = 0.0, rate: float = 0.0) -> None:
        """How what this host sends gets through: seconds (one way), 0..1 of all packets, bytes a second (0: no limit).

        What waits more than 50 ms at `rate` is lost, as in a switch.
        """
        self._change(delay=delay, loss=loss, rate=rate)

    def cut(self) -> None:
        """Nothing comes or goes, and nobody is told: a cable that somebody pulled out of the switch."""
        self._change(plugged=0)

    def mend(self) -> None:
        self._change(plugged=1)

    def power_off(self) -> None:
        """All its processes are killed, after its cable was pulled: the others hear nothing of it."""
        self.cut()
        self._network.order(f"power_off {self.number}")
        self.first_pid = 0

    def boot(self) -> None:
        """The same host, with another boot id, empty."""
        self.first_pid = int(self._network.order(f"boot {self.number}"))
        self.mend()

    def _change(self, **changed: float) -> None:
        self._cable |= changed
        self._network.order(" ".join(map(str, ("cable", self.number, *self._cable.values()))))


class Network:
    """`hosts`, joined by a wire. Raises Unavailable."""

    def __init__(self, count: int) -> None:
        _build()
        self._kept = ExitStack()
        self._wire = subprocess.Popen(
            [PROGRAM, str(count), str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            pids = self._answer("ready").split()
        except Unavailable:
            self.close()
            raise
        self.hosts = [Host(self, number, int(pid)) for number, pid in enumerate(pids, 1)]

    def shape(self, *, delay: float = 0.0, loss: float = 0.0, rate: float = 0.0) -> None:
        """See `Host.shape`; for each host."""
        for host in self.hosts:
            host.shape(delay=delay, loss=loss, rate=rate)

    def keep(self, closed_at_the_end: Any) -> Any:
        self._kept.callback(closed_at_the_end.close)
        return closed_at_the_end

    def order(self, line: str) -> str:
        assert self._wire.stdin is not None
        self._wire.stdin.write(line + "\n")
        return self._answer("done")

    def _answer(self, expected: str) -> str:
        assert self._wire.stdout is not None
        line = self._wire.stdout.readline()
        word, _, rest = line.strip().partition(" ")
        if word != expected:
            raise Unavailable(f"no hosts of namespaces here: {rest or 'the network program ended'}")
        return rest

    def close(self) -> None:
        """Whatever runs on the hosts is ended."""
        for host in getattr(self, "hosts", ()):
            host.mend()  # what ends gently may want to say so
        try:
            self._kept.close()
        finally:
            self._wire.communicate()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def network_of(count: int) -> Iterator[Network]:
    """A network until the block ends. Skips the test where there can be none."""
    try:
        network = Network(count)
    except Unavailable as why:
        pytest.skip(str(why))
    with network:
        yield network


def _build() -> None:
    with open(ROOT / "build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-C", ROOT / "csrc", "--no-print-directory", "hosts"], check=True, timeout=300)


@contextmanager
def _children_below(first_pid: int) -> Iterator[None]:
    """What this thread starts is in the process ids of another process, but still a child of this one."""
    with open("/proc/self/ns/pid") as ours, open(f"/proc/{first_pid}/ns/pid") as theirs:
        _set_namespace(theirs.fileno())
        try:
            yield
        finally:
            _set_namespace(ours.fileno())


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
