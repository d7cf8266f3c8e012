"""A virtual machine with two RDMA devices, rxe0 and rxe1, on rails of 10.9.0.0/24 and 10.9.1.0/24; commands run in it.

It sees this host's files read-only. What is written inside stays in its memory, but for /results, a folder here.
Its processor is emulated: everything is about ten times slower than here, and only ratios of speeds mean something.
Everything ends with the `with` block, with the time limit, and with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rdma_vm.image import Image

_AGENT = Path(__file__).with_name("guest_agent.sh")
_BOOT_SECONDS = 120
_START_SECONDS = 30
RAILS = 2


class MachineError(Exception):
    """The machine did not boot or is gone; the text ends with what its console said last."""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str

    def check(self) -> str:
        """The output; AssertionError with it if the command failed."""
        assert self.code == 0, f"exit status {self.code} in the machine:\n{self.output}"
        return self.output


class Machine:
    """One machine, booted by the constructor. `wires`: a socket for each rail, whose other end another machine has."""

    def __init__(
        self,
        image: Image,
        results: Path,
        *,
        number: int = 1,
        wires: list[socket.socket] | None = None,
        memory_mib: int = 3072,
        cpus: int = 2,
        limit: float = 600,
    ) -> None:
        self.results = results
        self.limit = limit
        self._ids = itertools.count()
        self._running: dict[str, Command] = {}
        self._changed = threading.Condition()
        self._ready = self._ended = False
        results.mkdir(parents=True, exist_ok=True)
        self._console = results / "console.log"
        self._control, control = socket.socketpair()
        self._monitor, monitor = socket.socketpair()
        fds = [control.fileno(), monitor.fileno(), *(wire.fileno() for wire in wires or [])]
        with control, monitor:
            self._qemu = subprocess.Popen(
                self._command_line(image, number, fds, memory_mib, cpus),
                stdin=subprocess.DEVNULL,
                stdout=self._console.with_name("qemu.log").open("wb"),
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # a Ctrl-C is ours to handle, not QEMU's
            )
        self._monitor_lines = self._monitor.makefile("r")
        self._timer = threading.Timer(limit, self._qemu.kill)
        self._timer.start()
        self._reader = threading.Thread(target=self._read_control, name=f"machine {number}")
        self._reader.start()
        try:
            if not self._wait(lambda: self._ready, _BOOT_SECONDS):
                raise MachineError(f"it has not booted after {_BOOT_SECONDS} s; {self._last_words()}")
            self._ask_monitor("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def run(self, command: str, timeout: float = 60, **environment: str) -> Ended:
        """Runs a line of bash in the checkout and waits for its end.

        Raises TimeoutError, after killing what runs, and MachineError.
        """
        return self.start(command, **environment).wait(timeout)

    def start(self, command: str, **environment: str) -> Command:
        """Starts a line of bash in the checkout."""
        started = Command(self, f"command{next(self._ids)}", command, environment)
        with self._changed:
            self._running[started.id] = started
        self._send(f"start {started.id}")
        if not self._wait(lambda: started.pid != 0, _START_SECONDS):
            raise MachineError(f"it has not started {command!r} after {_START_SECONDS} s; {self._last_words()}")
        return started

    def plug(self, rail: int, in_: bool) -> None:
        """Pulls the cable of a rail, or plugs it in again. For machines that are linked."""
        self._ask_monitor("set_link", name=f"card{rail}", up=in_)

    def close(self) -> None:
        """Ends the machine, whatever it is doing."""
        self._timer.cancel()
        self._qemu.kill()
        self._qemu.wait()
        self._reader.join()
        self._control.close()
        self._monitor_lines.close()
        self._monitor.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _command_line(self, image: Image, number: int, fds: list[int], memory_mib: int, cpus: int) -> list[str]:
        told = {"agent": _AGENT, "number": number, "rails": "wire" if fds[2:] else "dummy", "pyverbs": image.pyverbs}
        kernel_line = " ".join(f"vm_{name}={value}" for name, value in told.items())
        line = f"""setpriv --pdeathsig KILL qemu-system-x86_64
            -accel tcg,thread=multi -cpu max -smp {cpus} -m {memory_mib}
            -nodefaults -no-user-config -no-reboot -display none -serial file:{shlex.quote(str(self._console))}
            -kernel {shlex.quote(str(image.kernel))} -initrd {shlex.quote(str(image.initramfs))}
            -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap
            -device virtio-9p-pci,fsdev=host,mount_tag=host
            -fsdev local,id=results,path={shlex.quote(str(self.results))},security_model=none
            -device virtio-9p-pci,fsdev=results,mount_tag=results
            -device virtio-serial-pci -chardev socket,id=control,fd={fds[0]}
            -device virtserialport,chardev=control,name=control
            -chardev socket,id=monitor,fd={fds[1]} -mon chardev=monitor,mode=control"""
        for rail, fd in enumerate(fds[2:]):
            line += f""" -netdev socket,id=rail{rail},fd={fd}
                -device virtio-net-pci,id=card{rail},netdev=rail{rail},mac=52:54:00:00:0{rail}:0{number}"""
        append = f"console=ttyS0 panic=-1 quiet mitigations=off tsc=reliable {kernel_line}"
        return [*shlex.split(line), "-append", append]

    def _ask_monitor(self, command: str, **arguments: object) -> None:
        """A command of QEMU's machine protocol: JSON lines, with events between the answers."""
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        for line in self._monitor_lines:
            answer = json.loads(line)
            if "error" in answer:
                raise MachineError(f"{command} {arguments}: {answer['error']['desc']}")
            if "return" in answer:
                return
        raise MachineError(f"the machine has ended; {self._last_words()}")

    def _send(self, order: str) -> None:
        with contextlib.suppress(OSError):  # the machine is gone: waiting for the answer says so
            self._control.sendall(order.encode() + b"\n")

    def _read_control(self) -> None:
        with self._control.makefile("r") as lines, contextlib.suppress(OSError):
            for line in lines:
                self._on_answer(*line.split())
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _on_answer(self, what: str, command: str = "", number: str = "") -> None:
        with self._changed:
            if what == "ready":
                self._ready = True
            elif what == "started":
                self._running[command].pid = int(number)
            elif what == "ended":
                self._running.pop(command).code = int(number)
            self._changed.notify_all()

    def _wait(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Whether it was reached in time. Raises MachineError if it cannot be any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or reached(), timeout)
            if self._ended and not reached():
                raise MachineError(f"the machine has ended, its time limit is {self.limit:.0f} s; {self._last_words()}")
            return reached()

    def _last_words(self) -> str:
        files = (self._console.with_name("qemu.log"), self._console)
        said = [file.read_text(errors="replace").strip() for file in files]
        return "it said last:\n" + "\n".join("\n".join(said).splitlines()[-15:])


class Command:
    """What runs in a machine."""

    def __init__(self, machine: Machine, command_id: str, command: str, environment: dict[str, str]) -> None:
        self.id = command_id
        self.command = command
        self.pid = 0
        self.code: int | None = None
        self._machine = machine
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        (machine.results / f"{command_id}.sh").write_text(exports + command + "\n")

    def output(self) -> str:
        """What it has written so far."""
        file = self._machine.results / f"{self.id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def line(self, index: int, timeout: float) -> str:
        """A line of its output, as soon as it is written whole. AssertionError if it ends without."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.ended(0.1)
            whole = self.output().split("\n")[:-1]
            if len(whole) > index:
                return whole[index]
            late = f"no line {index} after {timeout:.0f} s" if time.monotonic() > deadline else ""
            assert ended is None and not late, f"{late or ended}; {self.command!r} wrote:\n{self.output()}"

    def ended(self, timeout: float) -> Ended | None:
        """Its end, if that comes within `timeout` seconds. Raises MachineError."""
        if not self._machine._wait(lambda: self.code is not None, timeout):
            return None
        assert self.code is not None
        return Ended(self.code, self.output())

    def wait(self, timeout: float) -> Ended:
        """Its end. Raises TimeoutError, after killing it, and MachineError."""
        ended = self.ended(timeout)
        if ended is None:
            self.signal("KILL")
            raise TimeoutError(f"{self.command!r} took over {timeout:.0f} s in the machine:\n{self.output()}")
        return ended

    def signal(self, name: str) -> None:
        """Signals it and its children, e.g. with "KILL"."""
        self._machine._send(f"signal {self.pid} {name}")


@contextlib.contextmanager
def two_machines(image: Image, results: Path, **options: float) -> Iterator[tuple[Machine, Machine]]:
    """Machines 1 and 2, whose rails are linked: traffic leaves one kernel and enters the other."""
    wires = [socket.socketpair() for _ in range(RAILS)]
    with contextlib.ExitStack() as stack:
        for wire in wires:
            for end in wire:
                stack.enter_context(end)
        machines = []
        for index in range(2):
            ends = [wire[index] for wire in wires]
            folder = results / f"machine{index + 1}"
            machines.append(
                stack.enter_context(
                    Machine(image, folder, number=index + 1, wires=ends, cpus=1, memory_mib=1536, **options)  # type: ignore[arg-type]
                )
            )
        yield machines[0], machines[1]


def empty_folder(folder: Path) -> Path:
    """`folder`, without what an earlier run left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
