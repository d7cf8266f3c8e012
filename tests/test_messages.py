"""Messages between engines: order, turns, stops, back-pressure, watched peers, and every way to end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from child import Child

from monarch_rdma.errors import ConfigError, PeerLost, ResourceExhausted, TransferTimeout, class_of_kind
from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.rdma.messages import Inbox, Incoming, Stop, send

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
WINDOW = 64 << 10
ECHO = """
from monarch_rdma.rdma.messages import Inbox, send
inbox, left = Inbox(engine), count
while left:
    for kind, sender, data in inbox.take(30):
        send(engine, sender, data, 30)
        left -= 1
inbox.done()
"""


def take_all(inbox: Inbox, count: int, timeout: float = 30) -> list[Incoming]:
    got: list[Incoming] = []
    while len(got) < count:
        batch = inbox.take(timeout)
        assert batch, f"{len(got)} of {count} messages came"
        got += batch
    inbox.done()
    return got


def fill_window(engine: Engine, to: Engine) -> int:
    """Sends messages of 1000 bytes until there is no room for another; how many that were."""
    send(engine, to.address, bytes(1000), 10)
    for sent in range(1, WINDOW):
        try:
            send(engine, to.address, bytes(1000), 0)
        except TransferTimeout:
            return sent
    raise AssertionError("the window never was full")


@contextmanager
def slow_way_to(address: str, *, step: int, pause: float) -> Iterator[str]:
    """Another address of the same engine, over which it gets what is large in steps with pauses between."""
    host, port = address.removeprefix("mrdma://").split("/")[0].rsplit(":", 1)
    ended = threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection((host, int(port))) as there,
        contextlib.ExitStack() as open_here,
    ):

        def forward() -> None:
            here = open_here.enter_context(door.accept()[0])
            back = threading.Thread(target=copy, args=(there, here))
            back.start()
            copy(here, there)
            back.join()

        def copy(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(step):
                    target.sendall(data)
                    if len(data) > step // 4:
                        ended.wait(pause)
                target.shutdown(socket.SHUT_WR)

        with threads(forward):
            yield f"mrdma://127.0.0.1:{door.getsockname()[1]}/" + address.removeprefix("mrdma://").split("/", 1)[1]
            ended.set()
            there.shutdown(socket.SHUT_RDWR)


@contextmanager
def threads(*bodies: Callable[[], Any]) -> Iterator[None]:
    """Runs the bodies in threads of their own; raises what they raised."""
    failures: list[BaseException] = []

    def run(body: Callable[[], Any]) -> None:
        try:
            body()
        except BaseException as failure:
            failures.append(failure)

    started = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in started:
        thread.start()
    yield
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def sleeps(inbox_thread: int) -> bool:
    """Whether this thread of ours waits in the kernel."""
    return Path(f"/proc/self/task/{inbox_thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@contextmanager
def ctrl_c_inside(function: Any, delay: float) -> Iterator[None]:
    """Ctrl-C in the main thread, from `delay` seconds on, when it is in this function."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.0001)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- Sending and taking


def test_messages_arrive_in_order_with_their_sender(owner: Engine, reader: Engine) -> None:
    for i in range(1000):
        send(reader, owner.address, b"%d" % i, 10)
    got = take_all(Inbox(owner), 1000)
    assert got == [(0, reader.address, b"%d" % i) for i in range(1000)]


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 100_000, 3 << 20])
def test_a_message_of_two_pieces_of_any_buffer(owner: Engine, reader: Engine, size: int) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    inbox, cut = Inbox(owner), size // 3
    for wrap in (bytes, bytearray, memoryview):
        send(reader, owner.address, wrap(data[:cut]), 10, body=wrap(data[cut:]))
        [(kind, sender, got)] = take_all(inbox, 1)
        assert (kind, sender, bytes(got)) == (0, reader.address, data)


def test_to_ourselves(owner: Engine) -> None:
    inbox = Inbox(owner)
    send(owner, owner.address, b"note", 10)
    assert take_all(inbox, 1) == [(0, owner.address, b"note")]


def test_echo_between_processes(reader: Engine, child_process: Callable[..., Child]) -> None:
    child, inbox, count = child_process(), Inbox(reader), 3000
    child.start(ECHO, count=count)
    for i in range(0, count, 100):
        for k in range(i, i + 100):
            send(reader, child.address, b"%d" % k, 30)
        assert [data for _, _, data in take_all(inbox, 100)] == [b"%d" % k for k in range(i, i + 100)]
    child.finish()


def test_bad_arguments_are_refused(owner: Engine, reader: Engine) -> None:
    inbox = Inbox(owner)
    for call in (
        lambda: send(reader, "nonsense", b"", 1),
        lambda: send(reader, 7, b"", 1),  # type: ignore[arg-type]
        lambda: send(reader, owner.address, 7, 1),
        lambda: send(reader, owner.address, "text", 1),
        lambda: send(reader, owner.address, b"", 1, body=memoryview(b"12345678")[::2]),
        lambda: inbox.watch("nonsense"),
        lambda: inbox.unwatch("nonsense"),
        lambda: inbox.take(-1),
        lambda: inbox.take(float("nan")),
    ):
        with pytest.raises(ConfigError):
            call()
    assert inbox.take(0) == []


def test_what_is_too_large_is_refused(secret: Secret, reader: Engine) -> None:
    with Engine(secret=secret, max_frame_bytes=1 << 20) as small:
        with pytest.raises(ResourceExhausted, match="max_frame_bytes"):
            send(reader, small.address, bytes((1 << 20) + 1), 10)
        send(reader, small.address, bytes(1 << 20), 10)
        take_all(Inbox(small), 1)


def test_a_full_window_makes_the_sender_wait(secret: Secret, reader: Engine) -> None:
    with Engine(secret=secret, message_window_bytes=WINDOW) as slow:
        inbox, sent = Inbox(slow), fill_window(reader, slow)
        assert WINDOW // 2 < sent * 1000 < WINDOW
        begin = time.monotonic()
        with pytest.raises(TransferTimeout):
            send(reader, slow.address, bytes(1000), 0.3)
        assert time.monotonic() - begin >= 0.3
        with threads(lambda: send(reader, slow.address, b"last", None)):
            assert take_all(inbox, sent + 1)[-1][2] == b"last"


def test_two_that_flood_each_other(owner: Engine, secret: Secret) -> None:
    with Engine(secret=secret, message_window_bytes=WINDOW) as left:
        with Engine(secret=secret, message_window_bytes=WINDOW) as right:
            numbers = [b"%0500d" % i for i in range(2000)]

            def flood(engine: Engine, to: Engine) -> None:
                for number in numbers:
                    send(engine, to.address, number, 30)

            def receive(engine: Engine) -> None:
                assert [data for _, _, data in take_all(Inbox(engine), len(numbers))] == numbers

            with threads(
                lambda: flood(left, right), lambda: flood(right, left), lambda: receive(left), lambda: receive(right)
            ):
                pass


# --- Turns and stops


def test_one_receiver_at_a_time(owner: Engine, reader: Engine) -> None:
    count = 5000 if LONG else 1000
    got: list[int] = []
    stop = Stop()

    def receive(background: bool) -> None:
        inbox = Inbox(owner)
        while len(got) < count:
            for _, _, data in inbox.take(30, stop, background=background):
                last = len(got)
                time.sleep(0)  # another thread runs, and must not take meanwhile
                assert last == len(got)
                got.append(int(data))
        inbox.done()
        stop.set()

    with threads(lambda: receive(True), lambda: receive(False), lambda: receive(False)):
        for i in range(count):
            send(reader, owner.address, b"%d" % i, 30)
    assert got == list(range(count))


def test_a_batch_is_kept_until_done(owner: Engine, reader: Engine) -> None:
    inbox, second = Inbox(owner), Inbox(owner)
    send(reader, owner.address, b"1", 10)
    assert len(inbox.take(10)) == 1
    send(reader, owner.address, b"2", 10)
    got: list[Incoming] = []
    with threads(lambda: got.extend(second.take(0.05) or [(1, "none", b"")])):
        pass
    assert got == [(1, "none", b"")]
    inbox.done()
    inbox.done()
    assert take_all(second, 1) == [(0, reader.address, b"2")]


def test_a_take_that_fails_gives_nothing_twice(owner: Engine, reader: Engine) -> None:
    inbox, wrong = Inbox(owner), Stop()
    wrong.cell = object()
    send(reader, owner.address, b"1", 10)
    assert len(inbox.take(10)) == 1
    for arguments in ((-1, None), (0, wrong)):
        with pytest.raises((ConfigError, TypeError)):
            inbox.take(*arguments)
    assert inbox.take(0) == []


def test_a_stop_ends_a_take_from_any_thread(owner: Engine) -> None:
    inbox, stop = Inbox(owner), Stop()
    waiting: list[int] = []

    def wait() -> None:
        waiting.append(threading.get_native_id())
        assert inbox.take(None, stop) == []

    with threads(wait, wait):
        while len(waiting) < 2 or not all(map(sleeps, waiting)):
            time.sleep(0.001)
        stop.set()
    assert inbox.take(None, stop) == []  # sticky
    assert inbox.take(None, stop) == []  # in the main thread, too
    stop.clear()
    begin = time.monotonic()
    assert inbox.take(0.25, stop) == []
    assert time.monotonic() - begin >= 0.25


def test_a_stop_of_the_main_thread(owner: Engine) -> None:
    inbox, stop, main = Inbox(owner), Stop(), threading.main_thread().native_id
    assert main is not None

    def end() -> None:
        while not sleeps(main):
            time.sleep(0.001)
        stop.set()

    with threads(end):
        begin = time.monotonic()
        assert inbox.take(30, stop) == []
        assert time.monotonic() - begin < 10


def test_who_receives_in_the_background_gets_what_no_other_takes(owner: Engine, reader: Engine) -> None:
    behind: list[bytes] = []
    stop, here = Stop(), Inbox(owner)

    def receive() -> None:
        inbox = Inbox(owner)
        while batch := inbox.take(None, stop, background=True):
            behind.extend(bytes(data) for _, _, data in batch)
        inbox.done()

    with threads(receive):
        ahead = 0
        for i in range(200):
            send(reader, owner.address, b"%d" % i, 10)
            ahead += len(here.take(0.02 if i % 2 else 0))
            here.done()
        while len(behind) + ahead < 200:
            ahead += len(here.take(0.02))
            here.done()
        stop.set()
    assert len(behind) + ahead == 200


def test_a_waiting_receiver_does_not_wake(owner: Engine) -> None:
    inbox, stop = Inbox(owner), Stop()
    waiting: list[int] = []

    def wait() -> None:
        waiting.append(threading.get_native_id())
        assert inbox.take(None, stop) == []

    def switches() -> str:
        status = Path(f"/proc/self/task/{waiting[0]}/status").read_text()
        return status[status.index("voluntary_ctxt_switches") :]

    def sleeps_on() -> bool:
        before = switches()
        time.sleep(0.5)
        return before == switches()

    with threads(wait):
        while not waiting or not sleeps(waiting[0]):
            time.sleep(0.001)
        tries = [sleeps_on() for _ in range(3)]  # at first it may have waited for the GIL
        stop.set()
    assert any(tries)


# --- Watched peers


def test_a_killed_peers_notice_comes_after_all_that_it_sent(
    reader: Engine, child_process: Callable[..., Child]
) -> None:
    for _ in range(10 if LONG else 2):
        child, inbox = child_process(), Inbox(reader)
        inbox.watch(child.address)
        inbox.watch(child.address)
        child.start(
            """
            from monarch_rdma.rdma.messages import Inbox, send
            for i in range(100):  # fewer bytes than the socket holds
                send(engine, to, b"%d" % i, 10, body=bytes(300))
            send(engine, engine.address, b"", 10)
            result = len(Inbox(engine).take(10))  # so the ones before have left this process
            """,
            to=reader.address,
        )
        child.finish()
        child.kill()
        got = take_all(inbox, 101)
        assert [bytes(data[:-300]) for _, _, data in got[:100]] == [b"%d" % i for i in range(100)]
        kind, sender, why = got[100]
        assert class_of_kind(kind) is PeerLost and sender == child.address and b"ended" in bytes(why)
        with pytest.raises(PeerLost):
            send(reader, child.address, b"", 10)
        assert inbox.take(0) == []


def test_a_peer_that_leaves_sends_its_last_words(reader: Engine, child_process: Callable[..., Child]) -> None:
    child, inbox = child_process(), Inbox(reader)
    inbox.watch(child.address)
    child.run(
        """
        from monarch_rdma.rdma.messages import send
        for i in range(3000):
            send(engine, to, b"%d" % i, 10)
        engine.close()
        """,
        to=reader.address,
    )
    got = take_all(inbox, 3001)
    assert [data for _, _, data in got[:3000]] == [b"%d" % i for i in range(3000)]
    assert class_of_kind(got[3000][0]) is PeerLost


def test_a_stopped_peer_is_noticed(secret: Secret, child_process: Callable[..., Child]) -> None:
    with Engine(secret=secret, heartbeat_interval=0.05, heartbeat_timeout=1.0) as engine:
        child, inbox = child_process(), Inbox(engine)
        inbox.watch(child.address)
        assert inbox.take(1.2) == []  # it lives
        child.stop()
        [(kind, sender, _)] = take_all(inbox, 1)
        assert class_of_kind(kind) is PeerLost and sender == child.address


def test_without_heartbeats_an_end_is_noticed_and_a_stop_is_not(
    secret: Secret, child_process: Callable[..., Child]
) -> None:
    with Engine(secret=secret, heartbeat_interval=0.05, heartbeat_timeout=0.5, same_host_unix=False) as engine:
        child, other, inbox = child_process(), child_process(), Inbox(engine)
        inbox.watch(child.address, heartbeats=False)
        inbox.watch(other.address)
        inbox.watch(other.address, heartbeats=False)  # the last word counts
        child.stop()
        assert inbox.take(1.5) == []
        inbox.watch(child.address)
        [(kind, sender, _)] = take_all(inbox, 1)
        assert class_of_kind(kind) is PeerLost and sender == child.address
        other.kill()
        [(kind, sender, _)] = take_all(inbox, 1)
        assert class_of_kind(kind) is PeerLost and sender == other.address


def test_a_large_message_on_a_slow_way_is_a_sign_of_life(secret: Secret) -> None:
    """Its sender's answers to heartbeats wait behind it, for longer than the heartbeat timeout."""
    options: dict[str, Any] = {"secret": secret, "same_host_unix": False}
    beat = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.5}
    with Engine(**options, **beat) as receiver, Engine(**options) as sender:
        inbox = Inbox(receiver)
        with slow_way_to(receiver.address, step=128 << 10, pause=0.1) as address:
            send(sender, address, b"first", 10)
            assert [data for _, _, data in take_all(inbox, 1)] == [b"first"]
            inbox.watch(sender.address)
            send(sender, address, bytes(4 << 20), 10)
            ((kind, _, data),) = take_all(inbox, 1)
            assert kind == 0, data
            assert len(data) == 4 << 20
            inbox.unwatch(sender.address)


def test_no_notice_of_who_is_not_watched(reader: Engine, child_process: Callable[..., Child]) -> None:
    watched, other, unknown = child_process(), child_process(), child_process()
    inbox = Inbox(reader)
    for child in (watched, other):
        inbox.watch(child.address)
    send(reader, unknown.address, b"hello", 10)
    inbox.unwatch(other.address)
    inbox.unwatch(other.address)
    for child in (other, unknown, watched):
        child.kill()
    [(_, sender, _)] = take_all(inbox, 1)
    assert sender == watched.address
    with pytest.raises(PeerLost):
        send(reader, unknown.address, b"", 10)
    assert inbox.take(0) == []


# --- Ends


@pytest.mark.parametrize("_", range(50 if LONG else 5))
def test_close_ends_who_waits(secret: Secret, owner: Engine, _: int) -> None:
    with Engine(secret=secret) as engine:
        inbox = Inbox(engine)

        def wait() -> None:
            with pytest.raises(ConfigError, match="closed"):
                inbox.take(None)

        with threads(wait, wait):
            engine.close()
        for call in (
            lambda: inbox.take(0),
            lambda: send(engine, owner.address, b"", 1),
            lambda: inbox.watch(owner.address),
            lambda: inbox.unwatch(owner.address),
            lambda: Inbox(engine),
        ):
            with pytest.raises(ConfigError, match="closed"):
                call()
        inbox.done()


def test_close_ends_a_waiting_sender(secret: Secret) -> None:
    with Engine(secret=secret, message_window_bytes=WINDOW) as slow:
        engine = Engine(secret=secret)
        fill_window(engine, slow)
        waiting: list[int] = []

        def wait() -> None:
            waiting.append(threading.get_native_id())
            with pytest.raises(ConfigError, match="closed"):
                send(engine, slow.address, bytes(1000), None)

        with threads(wait):
            while not waiting or not sleeps(waiting[0]):
                time.sleep(0.001)
            engine.close()


def test_a_forked_child_is_told(owner: Engine, reader: Engine) -> None:
    inbox, stop = Inbox(owner), Stop()
    send(reader, owner.address, b"", 10)
    inbox.watch(reader.address)
    take_all(inbox, 1)
    with threads(lambda: inbox.take(None, stop)):
        pid = os.fork()
        if pid == 0:
            failures = 0
            for call in (
                lambda: inbox.take(0),
                lambda: send(reader, owner.address, b"", 1),
                lambda: inbox.watch(reader.address),
                lambda: inbox.unwatch(reader.address),
                lambda: Inbox(owner),
                lambda: Inbox(Engine()).take(0, stop),
            ):
                try:
                    call()
                    failures += 1
                except ConfigError as error:
                    failures += "fork" not in str(error)
            inbox.done()
            stop.set()
            owner.peers.clear()
            reader.peers.clear()
            del inbox
            gc.collect()
            os._exit(failures)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop.set()
    send(reader, owner.address, b"still", 10)
    assert take_all(Inbox(owner), 1)[0][2] == b"still"


def test_ctrl_c_ends_a_take_and_loses_nothing(owner: Engine, reader: Engine) -> None:
    inbox = Inbox(owner)
    with ctrl_c_inside(Inbox.take, 0.05), pytest.raises(KeyboardInterrupt):
        inbox.take(None)
    got: list[int] = []
    sent = interrupted = 0
    for i in range(500 if LONG else 50):
        try:
            with ctrl_c_inside(Inbox.take, 0.0001 + i % 10 * 0.0001):
                while True:
                    sent += 1
                    send(reader, owner.address, b"%d" % sent, 10)
                    got += [int(data) for _, _, data in inbox.take(10)]
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == i + 1
    while batch := inbox.take(0.05):
        got += [int(data) for _, _, data in batch]
    assert got == list(range(1, sent + 1))


def test_ctrl_c_ends_a_waiting_send(secret: Secret, reader: Engine) -> None:
    with Engine(secret=secret, message_window_bytes=WINDOW) as slow:
        fill_window(reader, slow)
        with ctrl_c_inside(send, 0.05), pytest.raises(KeyboardInterrupt):
            send(reader, slow.address, bytes(1000), None)
