"""Plans carried out between engines and processes: right bytes, one version, and what happens when a source dies."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from child import Child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded import LONG, AnyLayout, any_layouts, parts_of, shapes, values
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rdma.errors import ConfigError, OutOfBounds, PeerLost, TransferTimeout, VersionChanged
from monarch_rdma.rdma import Engine, RDMABuffer, Secret
from monarch_rdma.sharding.deadline import Deadline
from monarch_rdma.sharding.layout import BlockCyclic, Layout, Mesh, Shard
from monarch_rdma.sharding.plan import Source, TensorSpec, Topology, make_plan
from monarch_rdma.sharding.reads import reads_of
from monarch_rdma.sharding.reshard import Reshard
from monarch_rdma.sharding.version import VersionWord


def buffers_of(
    layout: AnyLayout, whole: torch.Tensor, owner: Engine, reader: Engine
) -> dict[int, dict[str, RDMABuffer]]:
    """Each rank's local tensor, as the reader gets to know it."""
    parts = parts_of(layout, whole.numpy())
    made = {rank: RDMABuffer(torch.from_numpy(part), engine=owner) for rank, part in parts.items()}
    return {rank: {"w": RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader)} for rank, buffer in made.items()}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    secret = Secret.generate()
    with Engine(secret=secret, name="owner") as owner, Engine(secret=secret, name="reader") as reader:
        yield owner, reader


quick = settings(
    max_examples=300 if LONG else 40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.timeout(600)
@quick
@given(st.data())
def test_any_layout_becomes_any_other(engines: tuple[Engine, Engine], data: st.DataObject) -> None:
    """With other axes and another dtype, in staging memory that holds a few elements only."""
    shape = data.draw(shapes)
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    dtype = data.draw(st.sampled_from([torch.int64, torch.float32]))
    whole = torch.from_numpy(values(shape))
    wanted = whole.permute(axes).to(dtype)
    source, target = data.draw(any_layouts(shape)), data.draw(any_layouts(tuple(wanted.shape)))
    specs = {"w": TensorSpec(source, "int64")}, {"v": TensorSpec(target, str(dtype)[6:])}
    transforms = {"v": Source("w").transpose(*axes).cast()}
    buffers = buffers_of(source, whole, *engines)
    for rank, expected in parts_of(target, wanted.contiguous().numpy()).items():
        mine = torch.full(expected.shape, -1, dtype=dtype)
        plan = make_plan(*specs, rank, transforms=transforms)
        staging, at_once = data.draw(st.integers(64, 2000)), data.draw(st.booleans())
        reshard = Reshard(plan, buffers, {"v": mine}, staging_bytes=staging, at_once=at_once)
        for _ in range(2):
            report = reshard.run()
            assert np.array_equal(mine.numpy(), expected)
            assert report.bytes == plan.bytes_moved + plan.bytes_here
            mine.fill_(-1)


def test_at_once_reads_move_while_others_are_prepared(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = engines
    names, layout = [f"w{number}" for number in range(5)], Layout((64,), Mesh({"x": 1}))
    specs = {name: TensorSpec(layout, "int64") for name in names}
    plan = make_plan(specs, {name: TensorSpec(layout.renumbered(1), "int64") for name in names}, 1)
    offered = {name: torch.full((64,), number) for number, name in enumerate(names)}
    buffers = {0: {name: buffers_of(layout, tensor, owner, reader)[0]["w"] for name, tensor in offered.items()}}
    targets, happened = {name: torch.zeros(64, dtype=torch.int64) for name in names}, []

    def noted(tensor: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for read in reads_of(tensor, *arguments, **options):
            happened.append(f"{tensor.target} prepared")
            start = read.start
            read.start = lambda timeout, tensor=tensor, start=start: (
                happened.append(f"{tensor.target} begun"), start(timeout)
            )[1]  # fmt: skip
            yield read

    monkeypatch.setattr("monarch_rdma.sharding.reshard.reads_of", noted)
    reshard = Reshard(plan, buffers, targets, at_once=True)
    assert happened == []
    assert reshard.run().reads == len(names)
    assert happened == [f"{name} {what}" for name in names for what in ("prepared", "begun")]
    assert all(torch.equal(targets[name], offered[name]) for name in names)


def test_targets_and_sources_may_be_strided(engines: tuple[Engine, Engine]) -> None:
    owner, reader = engines
    whole = torch.arange(240, dtype=torch.int32).reshape(12, 20)
    layout = Layout((12, 20), Mesh({"a": 1}))
    buffer = RDMABuffer(whole.t().contiguous().t(), engine=owner)
    buffers = {0: {"w": RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader)}}
    target = torch.zeros(20, 24, dtype=torch.int32).t()[::2]
    to = Layout((12, 20), Mesh({"b": 1}, [5]), [BlockCyclic(0, 1)])
    plan = make_plan({"w": TensorSpec(layout, "int32")}, {"w": TensorSpec(to, "int32")}, 5)
    Reshard(plan, buffers, {"w": target}).run()
    assert torch.equal(target, whole)


def two_to_one(engines: tuple[Engine, Engine], **more: Any) -> tuple[Reshard, torch.Tensor, torch.Tensor]:
    """FSDP over two ranks to a third one that wants all of it as float32."""
    whole = torch.arange(4000).reshape(100, 40)
    source, target = Layout((100, 40), Mesh({"dp": 2}), [Shard(0)]), Layout((100, 40), Mesh({"x": 1}, [2]))
    mine = torch.zeros(100, 40)
    specs = {"w": TensorSpec(source, "int64")}, {"w": TensorSpec(target, "float32")}
    plan = make_plan(*specs, 2, transforms={"w": Source("w").cast()})
    return Reshard(plan, buffers_of(source, whole, *engines), {"w": mine}, **more), mine, whole


class Operations(TorchDispatchMode):
    """What torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_second_run_registers_and_allocates_nothing(engines: tuple[Engine, Engine]) -> None:
    reshard, mine, whole = two_to_one(engines, staging_bytes=8000)
    reshard.run()
    regions = [engine.counters()["regions"] for engine in engines]
    mine.zero_()
    with Operations() as operations:
        report = reshard.run()
    assert operations.names == {"aten.copy_.default"}
    assert [engine.counters()["regions"] for engine in engines] == regions
    assert torch.equal(mine, whole.float()) and report.bytes == 8 * whole.numel()


def test_progress_is_told(engines: tuple[Engine, Engine]) -> None:
    reshard, _, whole = two_to_one(engines, staging_bytes=8000)
    told: list[tuple[int, int]] = []
    reshard.run(progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and len(told) > 10
    assert told[-1] == (8 * whole.numel(), 8 * whole.numel())


def test_a_run_that_takes_too_long_ends(engines: tuple[Engine, Engine]) -> None:
    reshard, _, _ = two_to_one(engines)
    with pytest.raises(TransferTimeout):
        reshard.run(timeout=0)


# --- versions


class Versioned:
    """Ranks that have the same tensor, each with an engine and a version word of its own."""

    def __init__(self, secret: Secret, ranks: int, reader: Engine) -> None:
        self.engines = [Engine(secret=secret, name=f"rank{rank}") for rank in range(ranks)]
        self.tensors = [torch.zeros(1000, 100) for _ in range(ranks)]
        self.words = [VersionWord(0, engine=engine) for engine in self.engines]
        there = [RDMABuffer(t, engine=e) for t, e in zip(self.tensors, self.engines, strict=True)]
        self.buffers = {rank: {"w": copied(buffer, reader)} for rank, buffer in enumerate(there)}
        self.layout = Layout((1000, 100), Mesh({"r": ranks}))
        target = Layout((1000, 100), Mesh({"x": 1}, [9]))
        specs = {"w": TensorSpec(self.layout, "float32")}, {"w": TensorSpec(target, "float32")}
        self.mine = torch.full((1000, 100), -1.0)
        self.reshard = Reshard(
            make_plan(*specs, 9),
            self.buffers,
            {"w": self.mine},
            layouts={"w": self.layout},
            words={rank: copied(word.buffer, reader) for rank, word in enumerate(self.words)},
        )

    def write(self, rank: int, version: int) -> None:
        with self.words[rank].writing(version):
            self.tensors[rank].fill_(version)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def copied(buffer: RDMABuffer, reader: Engine) -> RDMABuffer:
    return RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader)


@pytest.fixture
def versioned(secret: Secret, reader: Engine) -> Iterator[Callable[[int], Versioned]]:
    made: list[Versioned] = []

    def make(ranks: int) -> Versioned:
        made.append(Versioned(secret, ranks, reader))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_one_version_is_read(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(2)
    assert world.reshard.run().version == 0
    world.write(0, 3)
    assert world.reshard.versions() == {0: 3, 1: 0}
    with pytest.raises(VersionChanged, match="rank 1 has version 0, not 3"):
        world.reshard.run()
    world.write(1, 3)
    assert world.reshard.run(version=3).version == 3 and (world.mine == 3).all()
    with pytest.raises(VersionChanged, match="rank 0 has version 3, not 4"):
        world.reshard.run(version=4)


def test_what_is_being_written_is_not_read(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(1)
    with world.words[0].writing(1):
        assert world.reshard.versions() == {0: None}
        with pytest.raises(VersionChanged, match="rank 0 is writing a new version"):
            world.reshard.run()
    assert world.reshard.run().version == 1


def test_a_write_while_reading_is_noticed(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(1)
    with pytest.raises(VersionChanged, match="rank 0 has version 1, not 0"):
        world.reshard.run(progress=lambda done, total: world.write(0, 1))


def test_a_write_that_failed_leaves_no_version(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(1)
    with pytest.raises(ZeroDivisionError), world.words[0].writing(1):
        _ = 1 / 0
    with pytest.raises(VersionChanged, match="is writing"):
        world.reshard.run()
    with pytest.raises(ConfigError, match="version is 0, but must be a number from 1 on"), world.words[0].writing(0):
        raise AssertionError
    world.write(0, 1)
    assert world.reshard.run().version == 1


# --- sources that die


def test_a_replica_takes_over(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(3)
    for rank in range(3):
        world.write(rank, 7)
    world.engines[1].close()
    report = world.reshard.run()
    assert (report.version, report.replaced) == (7, (1,))
    assert (world.mine == 7).all()
    assert world.reshard.run().replaced == ()  # it is not asked again


def test_a_replica_of_another_version_does_not(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(2)
    world.write(0, 2)
    world.engines[0].close()
    with pytest.raises(VersionChanged, match="rank 1 has version 0, not 2"):
        world.reshard.run(version=2)


def test_what_is_lost_is_named(versioned: Callable[[int], Versioned]) -> None:
    world = versioned(2)
    for engine in world.engines:
        engine.close()
    with pytest.raises(PeerLost, match=r"lost, and with it \d+ bytes that no other rank has: w\[.*\]") as caught:
        world.reshard.run()
    assert caught.value.size == 400_000


def test_without_layouts_there_is_no_other(secret: Secret, reader: Engine) -> None:
    with Engine(secret=secret, name="owner") as owner:
        reshard, _, _ = two_to_one((owner, reader))
    with pytest.raises(PeerLost, match=re.escape("w[0:50, 0:40]")):
        reshard.run()


SERVE = """
import threading, time
import numpy as np
from monarch_rdma.rdma import shared_memory
from monarch_rdma.sharding.version import VersionWord
array = np.frombuffer(shared_memory(rows * 1024 * 4, engine=engine), dtype=np.float32).reshape(rows, 1024)
buffer, word = RDMABuffer(array, engine=engine), VersionWord(0, engine=engine)

def train():
    while True:
        version = int(time.monotonic() / period)  # what all processes come to at the same time
        if version > word.version:
            with word.writing(version):
                array[:] = version % 1000 + shard / 2
        time.sleep(period / 20)

threading.Thread(target=train, daemon=True).start()
result = buffer.to_bytes(), word.buffer.to_bytes()
"""


@pytest.mark.timeout(1800)
def test_killed_sources(child_process: Callable[..., Child], reader: Engine) -> None:
    """Two shards, each held by two processes that write a new version every second. One of them is killed
    at a random moment of a fetch, and then the other that has the same: right bytes of one version from the one that is
    left, or the typed error, and never a hang.
    """
    rows, rounds = 1024, 200 if LONG else 2
    for number in range(rounds):
        moments = random.Random(number)
        children = [child_process() for _ in range(4)]
        served = [
            child.run(SERVE, rows=rows // 2, shard=float(rank % 2), period=1.0) for rank, child in enumerate(children)
        ]
        layout = Layout((rows, 1024), Mesh({"replica": 2, "shard": 2}), {"shard": Shard(0)})
        specs = (
            {"w": TensorSpec(layout, "float32")},
            {"w": TensorSpec(Layout(layout.shape, Mesh({"x": 1}, [4])), "float32")},
        )
        mine = torch.full(layout.shape, -1.0)
        buffers = {rank: {"w": RDMABuffer.from_bytes(data, engine=reader)} for rank, (data, _) in enumerate(served)}
        words = {rank: RDMABuffer.from_bytes(word, engine=reader) for rank, (_, word) in enumerate(served)}
        topology = Topology.of({rank: rank // 2 for rank in range(2)} | {4: 0})
        plan = make_plan(*specs, 4, topology=topology)
        reshard = Reshard(plan, buffers, {"w": mine}, layouts={"w": layout}, words=words)
        for victim in (number % 2, number % 2 + 2):
            timer = threading.Timer(moments.uniform(0, 1.2), children[victim].signal, [signal.SIGKILL])
            timer.start()
            assert _read_until_noticed(reshard, mine, victim) == (victim >= 2)
            timer.join()
        for child in children:
            child.close()


def _read_until_noticed(reshard: Reshard, mine: torch.Tensor, victim: int) -> bool:
    """Whether what is lost is lost for good."""
    deadline = Deadline(120)
    while not deadline.is_over():
        mine.fill_(-1)
        try:
            report = reshard.run(timeout=60)
        except VersionChanged:  # some have the next one already
            if victim in reshard.lost:  # its replica too, by then
                return False
            deadline.pause()
            continue
        except PeerLost as error:
            if "no other rank has" not in str(error):
                raise
            return True
        assert report.version is not None
        upper, lower = mine.chunk(2)
        assert (upper == report.version % 1000).all() and (lower == report.version % 1000 + 0.5).all()
        if report.replaced:
            return False
    raise AssertionError("the death was not noticed")


# --- what does not fit


def test_what_does_not_fit_the_plan_is_said(engines: tuple[Engine, Engine]) -> None:
    owner, reader = engines
    layout, whole = Layout((8, 4), Mesh({"a": 2}), [Shard(0)]), torch.zeros(8, 4)
    plan = make_plan(
        {"w": TensorSpec(layout, "float32")}, {"w": TensorSpec(Layout((8, 4), Mesh({"b": 1})), "float32")}, 0
    )
    good = buffers_of(layout, whole, owner, reader)

    def other(tensor: torch.Tensor) -> dict[int, dict[str, RDMABuffer]]:
        return {**good, 1: {"w": RDMABuffer(tensor, engine=owner)}}

    mine = torch.zeros(8, 4)
    for buffers, targets, more, told in [
        (good, {}, {}, "targets has no 'w', but the plan fills it"),
        (good, {"w": torch.zeros(8, 4, dtype=torch.int32)}, {}, "target 'w' is int32, but was planned as float32"),
        (good, {"w": torch.zeros(8, 3)}, {}, "target 'w' has shape (8, 3), but the plan fills (8, 4)"),
        ({0: good[0]}, {"w": mine}, {}, "rank 1 has published no 'w', but the plan reads it there"),
        (other(torch.zeros(3, 4)), {"w": mine}, {}, "'w' of rank 1 has shape (3, 4), but the plan reads (4, 4)"),
        (other(torch.zeros(4, 4).double()), {"w": mine}, {}, "'w' of rank 1 is float64, but the plan has float32"),
        (good, {"w": mine}, {"words": {}}, "words has none for the ranks [0, 1], but the plan reads from them"),
        (good, {"w": mine}, {"staging_bytes": 1}, "staging_bytes is 1, but must be at least 64"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(told)):
            Reshard(plan, buffers, targets, **more)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no version words were given"):
        Reshard(plan, good, {"w": mine}).versions()


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((4,), (4,), 4), ((2, 2), (1,), 0), ((1,), (1,), 13), ((1,), (1,), -1), ((2,), (-1,), 3)],
)
def test_strided_parts_of_a_buffer_stay_inside(owner: Engine, size: Any, stride: Any, offset: int) -> None:
    buffer = RDMABuffer(torch.arange(13.0), engine=owner)
    assert buffer.as_strided((3, 2), (4, 1), 3).shape == (3, 2) and buffer.strides == (1,)
    with pytest.raises(OutOfBounds, match="reach outside of a buffer of shape"):
        buffer.as_strided(size, stride, offset)
