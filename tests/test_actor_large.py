"""Large arguments, results and values of ports: as they were at the call, on the way, and at the end of a side."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from actor_client import LIMIT, Faults, Stage, hold, wait_until

from monarch_rdma.actor import Actor, Channel, HostMesh, Port, ProcMesh, SupervisionError, endpoint
from monarch_rdma.actor.runtime import message
from monarch_rdma.actor.runtime.message import Frame
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import TransferTimeout

torch = pytest.importorskip("torch")

MIB = 1 << 20


class Holder(Actor):
    def __init__(self, array: Any = None) -> None:
        self.kept: list[Any] = [array]

    @endpoint
    def checksum(self, array: Any) -> int:
        return int(np.asarray(array, dtype=np.uint8).astype(np.int64).sum())

    @endpoint
    def keep(self, value: Any) -> None:
        self.kept.append(value)

    @endpoint
    def get(self, index: int) -> Any:
        return self.kept[index]

    @endpoint
    def double(self, tensor: Any) -> Any:
        tensor *= 2
        return tensor

    @endpoint
    def make(self, size: int, value: int) -> Any:
        return np.full(size, value, np.uint8)

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def wait_with(self, started: Port[Any], value: Any) -> int:
        hold(started)
        return len(value)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def pass_on(self, value: Any, to: Any) -> int:
        return to.checksum.call_one(value).get(LIMIT)

    @endpoint
    def pour(self, port: Port[Any], size: int, count: int) -> None:
        for number in range(count):
            port.send(np.full(size, number, np.uint8))

    @endpoint
    def forget(self) -> None:
        self.kept.clear()
        gc.collect()


@pytest.fixture
def holders(procs: ProcMesh) -> Any:
    return procs.spawn("holders", Holder)


@pytest.fixture
def holder(holders: Any) -> Any:
    return holders.slice(gpus=0)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, MIB, 5 * MIB + 1, 64 * MIB])
def test_bytes_of_any_size_go_and_come_back(holder: Any, size: int) -> None:
    data = np.arange(size, dtype=np.uint64).astype(np.uint8)
    holder.keep.call_one(data).get(LIMIT)
    assert np.array_equal(holder.get.call_one(-1).get(LIMIT), data)


def test_hundreds_of_mebibytes_are_all_right(holders: Any) -> None:
    arrays = [np.full(MIB, number, np.uint8) for number in range(8)]
    futures = [holders.checksum.call(arrays[number % 8]) for number in range(200)]
    for number, future in enumerate(futures):
        assert list(future.get(LIMIT).values()) == [(number % 8) * MIB] * 2


def test_threads_send_large_arguments_at_the_same_time(holders: Any) -> None:
    def send(number: int) -> int:
        mine = holders.slice(gpus=number % 2)
        return sum(mine.checksum.call_one(np.full(MIB, number, np.uint8)).get(LIMIT) for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(send, range(8))) == [10 * number * MIB for number in range(8)]


@pytest.mark.parametrize("size", [100, 200_000, 16 * MIB])
@pytest.mark.parametrize("adverb", ["call_one", "broadcast", "call", "stream", "choose"])
def test_an_argument_may_be_changed_when_the_call_returns(holder: Any, adverb: str, size: int) -> None:
    stage = Stage()
    holder.wait.broadcast(stage.port)
    port = stage.next()
    tensor, array = torch.ones(size, dtype=torch.uint8), np.ones(size, np.uint8)
    future = getattr(holder.keep, adverb)((tensor, array))
    tensor.zero_()
    array[:] = 0
    port.send(None)
    kept_tensor, kept_array = holder.get.call_one(-1).get(LIMIT)
    assert int(kept_tensor.sum()) == int(kept_array.sum()) == size
    del future


def test_a_result_may_be_changed_at_both_ends(holder: Any) -> None:
    holder.keep.call_one(torch.zeros(MIB)).get(LIMIT)
    first = holder.get.call_one(-1).get(LIMIT)
    first += 1
    assert float(holder.get.call_one(-1).get(LIMIT).sum()) == 0.0


def test_an_actor_may_change_its_argument(holder: Any) -> None:
    tensor = torch.ones(MIB)
    assert float(holder.double.call_one(tensor).get(LIMIT).sum()) == 2 * MIB
    assert float(tensor.sum()) == MIB


def test_large_arguments_reach_init(procs: ProcMesh) -> None:
    array = np.full(4 * MIB, 3, np.uint8)
    made = procs.spawn("made", Holder, array)
    array[:] = 0
    assert [int(value.sum()) for value in made.get.call(0).get(LIMIT).values()] == [3 * 4 * MIB] * 2


def test_large_values_are_passed_on(holders: Any) -> None:
    first, second = holders.slice(gpus=0), holders.slice(gpus=1)
    assert first.pass_on.call_one(np.full(8 * MIB, 2, np.uint8), second).get(LIMIT) == 16 * MIB


def test_large_results_of_many_come_together(holders: Any) -> None:
    results = holders.make.call(8 * MIB, 7).get(LIMIT)
    assert [int(value.sum()) for value in results.values()] == [7 * 8 * MIB] * 2
    assert sorted(len(future.get(LIMIT)) for future in holders.make.stream(MIB, 1)) == [MIB, MIB]


def test_large_values_come_through_ports_in_order(holders: Any) -> None:
    port, receiver = Channel.open()
    holders.slice(gpus=0).pour.broadcast(port, MIB, 50)
    for number in range(50):
        value = receiver.recv().get(LIMIT)
        assert value[0] == value[-1] == number


def test_one_tensor_in_many_places_is_one(holder: Any) -> None:
    tensor = torch.ones(MIB)
    holder.keep.call_one({"a": tensor, "b": [tensor, tensor[10:20]]}).get(LIMIT)
    back = holder.get.call_one(-1).get(LIMIT)
    back["a"][10] = 5
    assert back["b"][0] is back["a"]
    assert float(back["b"][1][0]) == 5.0


def test_shared_memory_is_seen_in_place_on_request(holders: Any) -> None:
    from monarch_rdma.rdma import empty

    shared = empty(4 * MIB, dtype=torch.uint8).fill_(2)
    for value in (shared, shared.numpy()):
        holders.keep.options(view=True).call(value).get(LIMIT)
        assert [int(seen[7]) for seen in holders.get.call(-1).get(LIMIT).values()] == [2, 2]
        shared[7] = 9  # users must not; it shows that there is no copy
        assert [int(seen[7]) for seen in holders.get.call(-1).get(LIMIT).values()] == [9, 9]
        shared[7] = 2
    holders.forget.call().get(LIMIT)


def test_a_large_call_to_a_process_that_dies_ends(client: HostMesh, faults: Faults) -> None:
    mortal, stage = client.spawn_procs().spawn("mortal", Holder), Stage()
    pid = mortal.pid.call_one().get(LIMIT)
    held = mortal.wait_with.call_one(stage.port, np.ones(32 * MIB, np.uint8))
    stage.next()
    waiting = [mortal.checksum.call_one(np.ones(8 * MIB, np.uint8)) for _ in range(5)]
    os.kill(pid, signal.SIGKILL)
    for future in [held, *waiting]:
        with pytest.raises(SupervisionError):
            future.get(LIMIT)
    faults.next()


def test_deaths_in_the_midst_of_large_messages_end_all_calls(client: HostMesh, faults: Faults) -> None:
    """Killed while it reads, several times: no call is left waiting, and nothing false arrives."""
    data = np.full(32 * MIB, 1, np.uint8)
    for delay in range(4):
        mortal = client.spawn_procs().spawn("mortal", Holder)
        pid = mortal.pid.call_one().get(LIMIT)
        killer = threading.Timer(0.002 * delay, os.kill, (pid, signal.SIGKILL))
        killer.start()
        outcomes: list[Any] = []
        for _ in range(100):
            try:
                outcomes.append(mortal.checksum.call_one(data).get(LIMIT))
            except SupervisionError as error:
                outcomes.append(error)
                break
        killer.join()
        assert isinstance(outcomes[-1], SupervisionError)
        assert all(total == 32 * MIB for total in outcomes[:-1])
        faults.next()


def test_a_process_that_takes_nothing_holds_up_no_large_message_of_others(client: HostMesh, holder: Any) -> None:
    procs = client.spawn_procs()
    stopped = procs.spawn("holder", Holder)
    pid = stopped.pid.call_one().get(LIMIT)
    os.kill(pid, signal.SIGSTOP)
    waiting = stopped.pid.call_one()
    with pytest.raises(TransferTimeout):
        deque(iter(lambda: stopped.keep.options(timeout=0.1).broadcast("x" * 1_000_000), ...), maxlen=0)
    waiting.cancel()  # tells it, when it takes something again
    assert holder.make.call_one(1 << 20, 1).get(LIMIT).sum() == 1 << 20
    os.kill(pid, signal.SIGCONT)
    assert stopped.pid.call_one().get(LIMIT) == pid
    procs.stop().get(LIMIT)


class Ear:
    """Hears what comes to a number of this process."""

    def __init__(self) -> None:
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.on_frame = self.frames.put

    def on_lost(self, address: str, error: SupervisionError) -> None:
        raise AssertionError(error)


def test_a_large_call_that_cannot_be_looked_at_is_refused(holder: Any) -> None:
    """Its sender, which waits for the buffers to be read, and who waits for the answer are both told."""
    proc, ear, route = current_proc(), Ear(), holder._routes[0]
    number = proc.register(ear)
    head = message.pack(message.CALL, route.number, flags=message.LARGE, reply=number, origin=number, method=b"keep")
    proc.post(route.address, head, b"\x01\xff\xff\xff\xff")
    frames = [ear.frames.get(timeout=LIMIT) for _ in range(2)]
    assert {frame.kind for frame in frames} == {message.TAKEN, message.SEND}
    assert all(frame.flags & message.FAILED for frame in frames)
    proc.forget(number)


def test_memory_of_large_messages_is_given_back(holder: Any) -> None:
    process, own = psutil.Process(holder.pid.call_one().get(LIMIT)), psutil.Process()
    data = np.ones(32 * MIB, np.uint8)
    for _ in range(3):
        holder.checksum.call_one(data).get(LIMIT)
    before = process.memory_info().rss, own.memory_info().rss, own.num_fds(), process.num_fds()
    for _ in range(20):
        holder.checksum.call_one(data).get(LIMIT)
        holder.make.call_one(32 * MIB, 1).get(LIMIT)
    holder.forget.call_one().get(LIMIT)
    after = process.memory_info().rss, own.memory_info().rss, own.num_fds(), process.num_fds()
    assert after[0] - before[0] < 300 * MIB
    assert after[1] - before[1] < 300 * MIB
    wait_until(lambda: own.num_fds() <= before[2] + 2 and process.num_fds() <= before[3] + 2, "descriptors are left")
