"""The verbs lane over Soft-RoCE: what every lane must do, and what only cards can do to it.

Plain buffers, because importing torch takes a minute here; tests/test_lanes.py has the tensors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from child import Child
from rails import queue_pairs, sent_packets, until

from monarch_rdma import config, errors
from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer, Secret

if "verbs" not in config.LANES:
    pytest.skip("this version has no verbs lane", allow_module_level=True)

MiB = 1 << 20
OWN = """
data = bytearray(size)
data[:] = (bytes(range(251)) * (size // 251 + 1))[:size]
buffer = RDMABuffer(data, engine=engine, access=access)
result = buffer.to_bytes()
"""
Maker = Callable[..., Child]


def pattern(size: int, begin: int = 0) -> bytes:
    first = begin % 251
    return (bytes(range(251)) * (size // 251 + 2))[first : first + size]


def publish(owner: Child, reader: Engine, size: int, access: str = "rw") -> RDMABuffer:
    return RDMABuffer.from_bytes(owner.run(OWN, size=size, access=access), engine=reader)


def read_over_both_rails(buffer: RDMABuffer) -> None:
    """The first transfers go over the rail that is connected first."""

    def read() -> bool:
        done = buffer.read_into(bytearray(buffer.size()))
        done.get(60)
        return done.explain().rails == 2

    until(read)


def read_by_verbs(buffer: RDMABuffer) -> None:
    """Where there is another lane, operations take that until a rail is connected."""

    def read() -> bool:
        done = buffer.read_into(bytearray(buffer.size()))
        done.get(60)
        return done.explain().lane == "verbs"

    until(read)


@pytest.mark.parametrize("size", [0, 1, 7, 4095, 4096, 4097, MiB - 1, MiB, MiB + 1, 4 * MiB - 3])
def test_reads_and_writes_of_every_size(owner: Child, reader: Engine, size: int) -> None:
    buffer = publish(owner, reader, size)
    got = bytearray(size)
    done = buffer.read_into(got, strict=True)
    done.get(60)
    assert got == pattern(size)
    if size:
        assert (done.explain().lane, done.explain().bytes, done.explain().skipped) == ("verbs", size, "")
    fresh = pattern(size, 17)
    buffer.write_from(fresh).get(60)
    assert owner.run("result = bytes(data)") == fresh


def test_unaligned_ends_leave_the_neighbours_alone(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 100_000)
    local = b"\xaa" * 100_000
    expected = bytearray(pattern(100_000))
    for begin, end in [(1, 2), (3, 4096), (4095, 4097), (8191, 70_001)]:
        buffer[begin:end].write_from(local[begin:end]).get(60)
        expected[begin:end] = local[begin:end]
        got = bytearray(b"\xee" * (end - begin + 2))
        buffer[begin - 1 : end + 1].read_into(got).get(60)
        assert got == expected[begin - 1 : end + 1]
    assert owner.run("result = bytes(data)") == expected


def test_strided_memory_on_both_ends(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 30_000)[5:29_000:3]
    into = bytearray(b"\xee" * 2 * buffer.size())
    buffer.read_into(memoryview(into)[::2]).get(60)
    assert into[::2] == pattern(30_000)[5:29_000:3]
    assert into[1::2] == b"\xee" * buffer.size()
    source = pattern(3 * buffer.size(), 99)
    buffer.write_from(memoryview(source)[::3]).get(60)
    expected = bytearray(pattern(30_000))
    expected[5:29_000:3] = source[::3]
    assert owner.run("result = bytes(data)") == expected


def test_many_small_operations_at_a_time(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 64 * 1000)
    targets = [bytearray(64) for _ in range(1000)]
    futures = [buffer[64 * i : 64 * i + 64].read_into(target) for i, target in enumerate(targets)]
    for future in futures:
        future.get(60)
    assert b"".join(targets) == pattern(64 * 1000)


def test_a_notification_comes_after_its_bytes(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 256 << 10)
    for number in range(20):
        buffer.write_from(bytes([number + 1]) * buffer.size(), notify=number).get(60)
        assert owner.run("result = buffer.next_notification(30), set(data)") == (number, {number + 1})


def test_additions_of_several_processes_are_all_counted(owner: Child, reader: Engine, child_process: Maker) -> None:
    counter = publish(owner, reader, 8)
    adder = child_process(name="adder", lanes="verbs")
    adder.start(
        """
        counter, old, seen = RDMABuffer.from_bytes(blob, engine=engine), bytearray(8), set()
        for _ in range(50):
            rdma.RDMAAction().fetch_add(counter, memoryview(old), 3).submit().get(60)
            seen.add(int.from_bytes(old, "little"))
        result = seen
        """,
        blob=counter.to_bytes(),
    )
    seen: list[set[int]] = [set()]
    for _ in range(50):
        old = bytearray(8)
        RDMAAction().fetch_add(counter, memoryview(old), 3).submit().get(60)
        seen[0].add(int.from_bytes(old, "little"))
    seen.append(adder.finish())
    start = int.from_bytes(pattern(8), "little")
    assert seen[0] | seen[1] == {start + 3 * i for i in range(100)}
    assert owner.run("result = int.from_bytes(data, 'little')") == start + 300


def test_compare_and_swap(owner: Child, reader: Engine) -> None:
    buffer, old = publish(owner, reader, 8), bytearray(8)
    start = int.from_bytes(pattern(8), "little")
    RDMAAction().compare_and_swap(buffer, memoryview(old), start + 1, 5).submit().get(60)
    assert int.from_bytes(old, "little") == start
    RDMAAction().compare_and_swap(buffer, memoryview(old), start, 5).submit().get(60)
    assert owner.run("result = int.from_bytes(data, 'little')") == 5


def test_both_rails_carry_a_large_transfer(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 16 * MiB)
    read_over_both_rails(buffer)
    before = [sent_packets(rail) for rail in (0, 1)]
    got = bytearray(16 * MiB)
    done = buffer.read_into(got)
    done.get(60)
    assert got == pattern(16 * MiB)
    sent = [sent_packets(rail) - before[rail] for rail in (0, 1)]
    assert done.explain().rails == 2
    assert min(sent) * 4096 >= 4 * MiB  # an even split would be 8 MiB


def test_after_a_drop_only_operations_on_that_region_fail(owner: Child, reader: Engine) -> None:
    kept, dropped = publish(owner, reader, 4096), publish(owner, reader, 4096)
    dropped.read_into(bytearray(4096)).get(60)
    owner.run("buffer.drop().get(30)")
    content = owner.run("result = bytes(data)")
    others = [kept.read_into(bytearray(4096)) for _ in range(20)]
    with pytest.raises(errors.AccessDenied):
        dropped.read_into(bytearray(4096)).get(60)
    with pytest.raises(errors.AccessDenied):
        dropped.write_from(b"\xbb" * 4096).get(60)
    for other in others:
        other.get(60)
    kept.read_into(bytearray(4096)).get(60)
    assert owner.run("result = bytes(data)") == content


def test_a_drop_during_a_transfer(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 32 * MiB)
    got = bytearray(32 * MiB)
    future = buffer.read_into(got)
    owner.run("buffer.drop().get(30); data[:] = bytes(len(data))")
    error = future.exception(60)
    assert error is None or isinstance(error, errors.AccessDenied)
    if error is None:
        assert got == pattern(32 * MiB)
    after = bytes(got)
    owner.run("import time; time.sleep(0.3)")
    assert got == after, "local memory was written after the end of the operation"


@pytest.mark.parametrize(("access", "denied"), [("read", "write"), ("write", "read")])
def test_only_the_rights_that_were_granted(owner: Child, reader: Engine, access: str, denied: str) -> None:
    buffer = publish(owner, reader, 4096, access=access)
    attempts = {
        "read": lambda: buffer.read_into(bytearray(4096)),
        "write": lambda: buffer.write_from(bytes(4096)),
    }
    attempts[access]().get(60)
    with pytest.raises(errors.AccessDenied):
        attempts[denied]().get(60)
    attempts[access]().get(60)


def test_the_owner_is_killed_in_mid_transfer(secret: Secret, child_process: Maker) -> None:
    """Soft-RoCE would try for ever with these settings, and the heartbeat is patient: the end of the control stream
    tells. Within a second, where the long form has a quiet host."""
    owner = child_process(name="victim", lanes="verbs")
    patience = {"verbs_retries": 7, "verbs_rnr_retries": 7, "heartbeat_timeout": 600.0}
    with Engine(secret=secret, name="patient", lanes="verbs", **patience) as reader:
        buffer = publish(owner, reader, 64 * MiB)
        future = buffer.read_into(bytearray(64 * MiB))
        sent = sent_packets(0) + sent_packets(1)
        until(lambda: sent_packets(0) + sent_packets(1) >= sent + 100)
        owner.signal(signal.SIGKILL)
        began = time.monotonic()
        error = future.exception(60)
        took = time.monotonic() - began
    assert isinstance(error, errors.PeerLost) and "sign of life" not in str(error), error
    assert took < (1 if os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long" else 60), took


def test_an_operation_is_cancelled_and_its_memory_left_alone(owner: Child, reader: Engine) -> None:
    buffer = publish(owner, reader, 32 * MiB)
    got = bytearray(32 * MiB)
    future = buffer.read_into(got)
    future.cancel()
    assert isinstance(future.exception(30), errors.Cancelled | None)
    after = bytes(got)
    buffer[:4096].read_into(bytearray(4096)).get(60)
    assert got == after


def test_nothing_is_left_of_engines(owner: Child, secret: Secret, child_process: Maker) -> None:
    """In a process of its own: engines of other tests may still be making queue pairs."""
    blob = owner.run(OWN, size=MiB, access="rw")
    user = child_process(name="user", lanes="tcp")
    before = queue_pairs()
    descriptors = set()
    for _ in range(3):
        user.run(
            """
            used = Engine(secret=secret, name="reader", lanes="verbs")
            RDMABuffer.from_bytes(blob, engine=used).read_into(bytearray(1 << 20)).get(60)
            """,
            blob=blob,
        )
        assert queue_pairs(user.pid) - before
        user.run("used.close()")
        until(lambda: queue_pairs(user.pid) <= before)  # a slow kernel may outlast close(), which is bounded
        descriptors.add(user.run("import os; result = len(os.listdir('/proc/self/fd'))"))
    assert len(descriptors) == 1
    user.run("tcp, engine = engine, Engine(secret=secret, name='short-lived', lanes='verbs')")  # as an owner
    before = queue_pairs()
    with Engine(secret=secret, name="reader", lanes="verbs") as engine:
        publish(user, engine, MiB).read_into(bytearray(MiB)).get(60)
        assert queue_pairs(user.pid) - before
    user.run("engine.close(); engine = tcp")
    until(lambda: queue_pairs(user.pid) <= before)


def test_memory_that_may_not_be_locked(owner: Child, child_process: Maker) -> None:
    """A process with a small limit: the error says which limit, and the command that raises it."""
    blob = owner.run(OWN, size=16 * MiB, access="rw")
    limited = child_process(name="limited", lanes="verbs")
    said = limited.run(
        """
        import resource
        engine.close()  # the kernel lets nobody use a card who was somebody else when he opened it
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        engine = Engine(secret=secret, name="limited", lanes="verbs", same_host_unix=False)
        error = RDMABuffer.from_bytes(blob, engine=engine).read_into(bytearray(16 << 20), strict=True).exception(60)
        result = type(error).__name__, str(error)
        """,
        blob=blob,
    )
    assert said[0] == "RegistrationError", said
    assert "memlock" in said[1].lower() and "ulimit -l" in said[1]


# What cards do.


def test_the_other_rail_takes_over(owner: Child, reader: Engine, whole_machine: Callable[[str], str]) -> None:
    buffer = publish(owner, reader, 8 * MiB)
    read_over_both_rails(buffer)
    got = bytearray(8 * MiB)
    future = buffer.read_into(got)
    whole_machine("ip link set rail0 down")
    future.get(60)
    assert got == pattern(8 * MiB)
    before = sent_packets(1)
    got = bytearray(8 * MiB)
    buffer.read_into(got).get(60)
    assert got == pattern(8 * MiB)
    assert sent_packets(1) > before


def test_without_any_rail_tcp_takes_over_and_says_why(
    secret: Secret, child_process: Maker, whole_machine: Callable[[str], str]
) -> None:
    lanes = "verbs,tcp"
    owner = child_process(name="falling-back", lanes=lanes)
    with Engine(secret=secret, name="reader", lanes=lanes) as reader:
        buffer = publish(owner, reader, MiB)
        read_by_verbs(buffer)
        whole_machine("ip link set rail0 down; ip link set rail1 down")
        got = bytearray(MiB)
        future = buffer.read_into(got)
        future.get(60)
        assert got == pattern(MiB)
        assert future.explain().lane == "tcp" and "verbs" in future.explain().skipped


def test_a_rail_that_comes_back_is_used_again(
    owner: Child, reader: Engine, whole_machine: Callable[[str], str]
) -> None:
    buffer = publish(owner, reader, 8 * MiB)
    buffer.read_into(bytearray(8 * MiB)).get(60)
    whole_machine("ip link set rail0 down")
    buffer.read_into(bytearray(8 * MiB)).get(60)
    whole_machine("ip link set rail0 up")
    before = sent_packets(0)

    def uses_it() -> bool:
        buffer.read_into(bytearray(8 * MiB)).get(60)
        return sent_packets(0) - before >= 100

    until(uses_it, 60)


def test_links_that_go_up_and_down_all_the_time(
    owner: Child, reader: Engine, whole_machine: Callable[[str], str]
) -> None:
    buffer = publish(owner, reader, 64 * 1000)
    over = threading.Event()

    def flap() -> None:
        while not over.wait(0.2):
            whole_machine("ip link set rail0 down")
            over.wait(0.2)
            whole_machine("ip link set rail0 up")

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        for _ in range(5):
            targets = [bytearray(64) for _ in range(200)]
            for i, target in enumerate(targets):
                buffer[64 * i : 64 * i + 64].read_into(target).get(60)
            assert b"".join(targets) == pattern(64 * 200)
    finally:
        over.set()
        flapping.join()
