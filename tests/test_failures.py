"""Processes that die, stop, fork or leave in mid-transfer: right bytes or a typed error, in time, and nothing left."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from child import Child
from knocks import without_knocks
from lanes import LANES, Lane
from monarch_rdma._engine import ffi
from ports import free_port

from monarch_rdma import errors, rdma
from monarch_rdma.rdma import Engine, RDMABuffer, Secret, connect

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
KILL_ROUNDS = 100 if LONG else 6
STOP_ROUNDS = 20 if LONG else 2
SIZE = 24 << 20
SILENT = {"heartbeat_timeout": 300.0}  # a connection tells of a death, not how long nothing was heard
LIMIT = 60.0  # seconds for what takes milliseconds; reached only by a failing test
ROOT = Path(__file__).resolve().parent.parent

OWN = """
data = {alloc}
view = memoryview(data).cast("B")
view[:] = (bytes(range(251)) * (len(view) // 251 + 1))[: len(view)]
result = RDMABuffer(data, engine=engine).to_bytes()
"""


def expected(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def allocation(lane: Lane, size: int = SIZE) -> str:
    return f"rdma.shared_memory({size}, engine=engine)" if lane.shared else f"bytearray({size})"


class Resources:
    """What this process holds of the system."""

    def __init__(self) -> None:
        self.fds = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/maps") as maps:
            self.mappings = sum("monarch_rdma" in line for line in maps)
        self.named = {name for name in os.listdir("/dev/shm") if "monarch" in name}
        self.children = [child for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

    def above(self, before: Resources) -> list[str]:
        """What there is more of than before."""
        return [
            f"{name}: {now}, before {then}"
            for name, now, then in (
                ("descriptors", self.fds, before.fds),
                ("mappings", self.mappings, before.mappings),
                ("named shared memory", self.named - before.named, set()),
                ("children", len(self.children), len(before.children)),
            )
            if (now if isinstance(now, set) else now > then)
        ]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = Resources()
    yield
    # The last unmap of a dead owner's memory is the work of a thread of its own: it may be a moment behind.
    until = time.monotonic() + 10
    while Resources().above(before) and time.monotonic() < until:
        gc.collect()
    assert Resources().above(before) == []


@pytest.mark.parametrize("lane", LANES, ids=str)
@pytest.mark.timeout(1800 if LONG else 120)
def test_kill_of_the_owner_in_mid_transfer(lane: Lane, nothing_left: None) -> None:
    seeded = random.Random(f"kill {lane}")
    secret = Secret.generate()
    slowest = 0.0
    failures = 0
    with Engine(secret=secret, **lane.options | SILENT) as engine:
        for _ in range(KILL_ROUNDS):
            with Child(secret, **lane.options) as owner:
                buffer = RDMABuffer.from_bytes(owner.run(OWN.format(alloc=allocation(lane))), engine=engine)
                small = bytearray(8)
                buffer[:8].read_into(small).get(20)
                targets = [bytearray(SIZE) for _ in range(4)]
                writes = seeded.random() < 0.5
                waiting = [buffer.write_from(t) if writes else buffer.read_into(t) for t in targets]
                pause = time.perf_counter() + seeded.random() * 0.02
                while time.perf_counter() < pause and not waiting[-1].done():
                    pass
                killed = time.perf_counter()
                owner.kill()
                for done, target in zip(waiting, targets, strict=True):
                    error = done.exception(60)
                    if error is None:
                        assert writes or target == expected(SIZE)
                    else:
                        failures += 1
                        assert isinstance(error, errors.PeerLost), error
                        assert error.peer or owner.address.split("/")[-1].split("?")[0] in str(error)
                slowest = max(slowest, time.perf_counter() - killed)
                # Mapped memory can be read for the moment until the death is known here.
                while engine.counters()["streams_up"] > 0 and time.perf_counter() - killed < LIMIT:
                    pass
                with pytest.raises(errors.PeerLost):
                    buffer.read_into(bytearray(SIZE), timeout=20).get()
    print(f"{lane}: {failures} operations failed, slowest to end {slowest * 1000:.0f} ms after the kill")
    assert slowest < LIMIT


@pytest.mark.parametrize("lane", LANES, ids=str)
@pytest.mark.timeout(1800 if LONG else 120)
def test_a_death_is_told_in_50_ms(lane: Lane, nothing_left: None) -> None:
    """From the moment that the process has lost its memory to the end of the last of many operations."""
    secret = Secret.generate()
    took = []
    with Engine(secret=secret, **lane.options | SILENT) as engine:
        for _ in range(KILL_ROUNDS):
            with Child(secret, **lane.options) as owner:
                buffer = RDMABuffer.from_bytes(owner.run(OWN.format(alloc=allocation(lane))), engine=engine)
                buffer[:8].read_into(bytearray(8)).get(20)
                targets = [bytearray(SIZE) for _ in range(2)]
                waiting = [buffer.read_into(target) for _ in range(32) for target in targets]
                owner.signal(signal.SIGKILL)
                while has_memory(owner.pid):
                    pass
                died = time.perf_counter()
                errors_told = [done.exception(60) for done in waiting]
                assert all(error is None or isinstance(error, errors.PeerLost) for error in errors_told)
                if errors_told[-1] is not None:  # else all were done before
                    took.append(time.perf_counter() - died)
                owner.kill()
    assert took, "all was done before the death in each round"
    took.sort()
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(f"{lane}: told after {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, load {os.getloadavg()[0]:.1f}")
    quiet = LONG and os.getloadavg()[0] <= (os.cpu_count() or 1)  # else both are those of the scheduler
    assert took[0] < (0.05 if quiet else 5) and p99 < (0.05 if quiet else LIMIT)


def has_memory(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/statm").read_bytes()[:1] != b"0"
    except OSError:
        return False


def test_a_death_is_noticed_while_python_holds_the_gil(nothing_left: None) -> None:
    core = ctypes.PyDLL(str(Path(rdma.__file__).parent.parent / "libmonarch_rdma.so"))  # its calls keep the GIL
    secret = Secret.generate()
    interval = sys.getswitchinterval()
    with Engine(secret=secret) as engine, Child(secret) as owner:
        lost = engine.watch(owner.address)
        connect(owner.address, engine=engine)
        operation = ctypes.c_void_p(int(ffi.cast("uintptr_t", lost.cell[0])))
        sys.setswitchinterval(LIMIT * 2)  # nor does this thread lend it to another one between two calls
        try:
            os.kill(owner.pid, signal.SIGKILL)
            until = time.monotonic() + LIMIT
            while not core.mr_op_done(operation) and time.monotonic() < until:  # nobody waits, it looks
                core.usleep(1000)
            noticed = core.mr_op_done(operation)
        finally:
            sys.setswitchinterval(interval)
        assert noticed
        assert isinstance(lost.exception(0), errors.PeerLost)


@pytest.mark.parametrize("lane", LANES, ids=str)
@pytest.mark.timeout(1800 if LONG else 120)
def test_kill_of_the_reader_in_mid_transfer(lane: Lane, nothing_left: None) -> None:
    """The owner goes on, and a drop of what the dead reader was reading is not held up."""
    seeded = random.Random(f"reader {lane}")
    secret = Secret.generate()
    with Child(secret, **lane.options) as owner:
        before = None
        for _ in range(KILL_ROUNDS):
            blob = owner.run(
                OWN.format(alloc=allocation(lane))
                .replace("result = RDMABuffer", "owned = RDMABuffer")
                .replace(".to_bytes()", "\nresult = owned.to_bytes()")
            )
            with Child(secret, **lane.options) as reader:
                reader.start(
                    "buffer = RDMABuffer.from_bytes(blob, engine=engine)\n"
                    "while True: [b.get(20) for b in [buffer.read_into(bytearray(size)) for _ in range(3)]]",
                    blob=blob,
                    size=SIZE,
                )
                # Until the reader has connected the kill would tell nothing.
                owner.run("while engine.counters()['streams_up'] == 0: pass")
                until = time.perf_counter() + seeded.random() * 0.05
                while time.perf_counter() < until:
                    pass
                reader.kill()
            owner.run("owned.drop().get(20); del view, data")
            owner.run("while engine.counters()['streams_up'] > 0: pass")
            # Sockets are closed by the owner's loop, which may be a moment behind.
            fds = owner.run(
                """
                import time
                until = time.monotonic() + 10
                while (result := len(os.listdir("/proc/self/fd"))) > most and time.monotonic() < until:
                    pass
                """,
                most=before or 10**6,
            )
            before = before or fds
            assert fds <= before


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane.lane == "tcp"], ids=str)
@pytest.mark.timeout(1800 if LONG else 120)
def test_a_stopped_owner_is_lost_within_the_heartbeat_timeout(lane: Lane, nothing_left: None) -> None:
    secret = Secret.generate()
    beat = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.0, "connect_timeout": 2.0}
    with Engine(secret=secret, **lane.options, **beat) as engine:
        for _ in range(STOP_ROUNDS):
            with Child(secret, **lane.options) as owner:
                buffer = RDMABuffer.from_bytes(owner.run(OWN.format(alloc=allocation(lane))), engine=engine)
                buffer[:8].read_into(bytearray(8)).get(20)
                owner.stop()
                began = time.perf_counter()
                target = bytearray(SIZE)
                with pytest.raises(errors.PeerLost, match="no sign of life"):
                    buffer.read_into(target, timeout=30).get()
                assert 0.5 < time.perf_counter() - began < 10
                before = bytes(target)
                owner.signal(signal.SIGCONT)
                # It is the same process still: a new operation finds it again, and nothing old arrives.
                got = bytearray(SIZE)
                buffer.read_into(got, timeout=30).get()
                assert got == expected(SIZE)
                assert bytes(target) == before


def test_a_process_that_is_stopped_takes_one_connect_timeout_whatever_ways_lead_to_it(secret: Secret) -> None:
    with Engine(secret=secret, connect_timeout=4.0) as engine, Child(secret) as owner:
        buffer = RDMABuffer.from_bytes(owner.run(OWN.format(alloc="bytearray(8)")), engine=engine)
        owner.stop()
        began = time.perf_counter()
        with pytest.raises(errors.PeerLost, match="no answer to the hello"):
            buffer.read_into(bytearray(8)).get(30)
        assert 3.9 < time.perf_counter() - began < 7.9  # not twice
        owner.signal(signal.SIGCONT)


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane.lane != "tcp"], ids=str)
def test_a_stopped_owner_can_still_be_read(lane: Lane, nothing_left: None) -> None:
    """One-sided on one host means: without the owner's help."""
    secret = Secret.generate()
    options = lane.options | {"heartbeat_timeout": 300.0}
    with Engine(secret=secret, **options) as engine, Child(secret, **lane.options) as owner:
        buffer = RDMABuffer.from_bytes(owner.run(OWN.format(alloc=allocation(lane))), engine=engine)
        buffer[:8].read_into(bytearray(8)).get(20)
        owner.stop()
        got = bytearray(SIZE)
        buffer.read_into(got).get(60)
        assert got == expected(SIZE)


@pytest.mark.parametrize("lane", LANES, ids=str)
def test_a_stopped_reader_holds_nobody_up_for_long(lane: Lane, nothing_left: None) -> None:
    """A drop while a reader is stopped ends, done or with TransferTimeout, and a second one is no error."""
    secret = Secret.generate()
    with Child(secret, **lane.options, heartbeat_timeout=300.0) as owner, Child(secret, **lane.options) as reader:
        blob = owner.run(
            OWN.format(alloc=allocation(lane))
            .replace("result = RDMABuffer", "owned = RDMABuffer")
            .replace(".to_bytes()", "\nresult = owned.to_bytes()")
        )
        reader.start(
            "buffer = RDMABuffer.from_bytes(blob, engine=engine)\n"
            "try:\n"
            "    while True: buffer.read_into(bytearray(size)).get(20)\n"
            "except Exception as error: result = type(error).__name__",
            blob=blob,
            size=SIZE,
        )
        owner.run("while engine.counters()['streams_up'] == 0: pass")
        reader.stop()
        took, error = owner.run(
            """
            import time
            began = time.perf_counter()
            error = owned.drop().exception(100)
            result = (time.perf_counter() - began, type(error).__name__)
            """
        )
        assert took < 60 and error in ("NoneType", "TransferTimeout")
        reader.signal(signal.SIGCONT)
        assert reader.finish() == "AccessDenied"
        owner.run("owned.drop().get(20)")


def test_a_restarted_process_is_another_peer(nothing_left: None) -> None:
    """Same name, same port: an old handle is refused, not served by the newcomer."""
    secret = Secret.generate()
    port = free_port()
    options = {"name": "phoenix", "same_host_unix": False, "port_min": port, "port_max": port + 40}
    with Engine(secret=secret, same_host_unix=False) as engine:
        with Child(secret, **options) as first:
            old = RDMABuffer.from_bytes(
                first.run("data = bytearray(b'first!'); result = RDMABuffer(data, engine=engine).to_bytes()"),
                engine=engine,
            )
            old.read_into(bytearray(6)).get(20)
            first.kill()
        with Child(secret, **options) as second:
            fresh = RDMABuffer.from_bytes(
                second.run("data = bytearray(b'second'); result = RDMABuffer(data, engine=engine).to_bytes()"),
                engine=engine,
            )
            with pytest.raises(errors.PeerLost):
                old.read_into(bytearray(6), timeout=20).get()
            got = bytearray(6)
            fresh.read_into(got).get(20)
            assert got == b"second"


def test_watch_tells_of_a_death(nothing_left: None) -> None:
    secret = Secret.generate()
    with Engine(secret=secret) as engine, Child(secret) as other:
        watching = engine.watch(other.address)
        RDMABuffer.from_bytes(
            other.run("data = bytearray(4); result = RDMABuffer(data, engine=engine).to_bytes()"), engine=engine
        ).read_into(bytearray(4)).get(20)
        assert not watching.done()
        other.kill()
        assert isinstance(watching.exception(60), errors.PeerLost)


def _program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


def test_fork_in_the_users_program(nothing_left: None) -> None:
    """The child is refused the parent's engine, gets one of its own, and its life does not hide the parent's death."""
    ended = _program(
        """
        import os, sys
        from monarch_rdma import errors
        from monarch_rdma.rdma import Engine, RDMABuffer, Secret, default_engine
        secret = Secret.generate()
        engine, other = Engine(secret=secret), Engine(secret=secret)
        data, got = bytearray(b"abcd"), bytearray(4)
        buffer = RDMABuffer.from_bytes(RDMABuffer(data, engine=other).to_bytes(), engine=engine)
        buffer.read_into(got).get(60)
        pid = os.fork()
        if pid == 0:
            try:
                buffer.read_into(got).get(60)
            except errors.ConfigError as error:
                assert "fork" in str(error), error
            else:
                os._exit(3)
            mine = default_engine()
            copy = bytearray(4)
            RDMABuffer(bytearray(b"efgh"), engine=mine).read_into(copy).get(60)
            os._exit(0 if copy == b"efgh" else 4)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        data[:] = b"wxyz"
        buffer.read_into(got).get(60)
        assert got == b"wxyz"
        print("fine")
        """
    )
    assert ended.returncode == 0 and ended.stdout == "fine\n", ended.stderr


def test_a_forked_childs_life_does_not_hide_its_parents_death(nothing_left: None) -> None:
    secret = Secret.generate()
    for options in ({}, {"same_host_unix": False}):
        with Engine(secret=secret, **options) as engine, Child(secret, **options) as owner:
            buffer = RDMABuffer.from_bytes(
                owner.run("data = bytearray(8); result = RDMABuffer(data, engine=engine).to_bytes()"), engine=engine
            )
            buffer.read_into(bytearray(8)).get(20)
            grandchild = owner.run(
                """
                import signal, ctypes
                result = os.fork()
                if result == 0:
                    for fd in (0, 1, 3, 4, 5):
                        try: os.close(fd)
                        except OSError: pass
                    signal.alarm(30)
                    while True: signal.pause()
                """
            )
            watching = engine.watch(owner.address)
            try:
                owner.kill()
                assert isinstance(watching.exception(60), errors.PeerLost)
            finally:
                os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("way", ["return", "sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_interpreter_exit_with_operations_in_flight(way: str, nothing_left: None) -> None:
    secret = Secret.generate()
    with Child(secret, lanes="tcp") as owner:
        blob = owner.run(OWN.format(alloc=f"bytearray({SIZE})"))
        fd = secret.to_fd()
        code = f"""
        import os, signal, sys
        from monarch_rdma.rdma import Engine, RDMABuffer, Secret
        engine = Engine(secret=Secret.from_fd({fd}), lanes="tcp")
        buffer = RDMABuffer.from_bytes({blob!r}, engine=engine)
        waiting = [buffer.read_into(bytearray({SIZE})) for _ in range(8)]
        def main():
            {way}
        main()
        """
        began = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
        os.close(fd)
        assert time.perf_counter() - began < 20
        assert ended.returncode == (-signal.SIGINT if "SIGINT" in way else 0), ended.stderr
        if "SIGINT" not in way:
            assert without_knocks(ended.stderr) == ""
        assert owner.run("result = 'alive'") == "alive"


def test_closing_an_engine_ends_its_operations(nothing_left: None) -> None:
    secret = Secret.generate()
    with Child(secret, lanes="tcp") as owner:
        blob = owner.run(OWN.format(alloc=f"bytearray({SIZE})"))
        engine = Engine(secret=secret, lanes="tcp")
        buffer = RDMABuffer.from_bytes(blob, engine=engine)
        waiting = [buffer.read_into(bytearray(SIZE)) for _ in range(8)]
        engine.close()
        for done in waiting:
            assert done.done()
            assert done.exception() is None or isinstance(done.exception(), errors.Cancelled)
        with pytest.raises(errors.ConfigError, match="closed"):
            buffer.read_into(bytearray(SIZE))


def test_many_engines_come_and_go(nothing_left: None) -> None:
    secret = Secret.generate()
    with Engine(secret=secret) as engine:
        data = bytearray(b"12345678")
        blob = RDMABuffer(data, engine=engine).to_bytes()
        for _ in range(200 if LONG else 30):
            with Engine(secret=secret) as other:
                got = bytearray(8)
                RDMABuffer.from_bytes(blob, engine=other).read_into(got).get(20)
                assert got == data
