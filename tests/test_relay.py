"""Relays: what publishers send however many read, right bytes of one version, and relays that die or stay behind."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Forked, forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded import LONG, any_layouts, parts_of, shapes, values

from monarch_rdma.errors import ConfigError, PeerLost, TransferTimeout
from monarch_rdma.rdma import Engine, Secret, default_engine
from monarch_rdma.sharding import Layout, Mesh, Shard, publish
from monarch_rdma.sharding.directory import Addresses
from monarch_rdma.sharding.progress_word import ProgressWord, RemoteProgress
from monarch_rdma.sharding.relay import Relay, RelayReport
from monarch_rdma.sharding.state_dict import Publication
from monarch_rdma.sharding.units import Units

ROWS, COLUMNS = 64, 1024  # of the tensor that most tests pass on: 256 KiB
UNIT = 16 << 10  # bytes; four rows


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given when the test ends."""
    made: list[Any] = []

    def add(one: Any) -> Any:
        made.append(one)
        return one

    yield add
    for one in reversed(made):
        one.close()


def all_at_once(relays: list[Relay], **options: Any) -> list[RelayReport]:
    """Each fetches in a thread of its own."""
    with ThreadPoolExecutor(len(relays)) as pool:
        return list(pool.map(lambda relay: relay.fetch(**options), relays))


def chain(closing: Callable[[Any], Any], store: dist.Store, ranks: int, **options: Any) -> list[Relay]:
    """Relays of a tensor "w", all in this process."""
    given: dict[str, Any] = {"directory": store, "ranks": ranks, "unit_bytes": UNIT, **options}
    return [closing(Relay("p", {"w": torch.full((ROWS, COLUMNS), -1.0)}, rank=rank, **given)) for rank in range(ranks)]


def published(closing: Callable[[Any], Any], store: dist.Store, value: float = 0.0, **options: Any) -> Publication:
    weights: Publication = closing(publish({"w": torch.full((ROWS, COLUMNS), value)}, "p", directory=store, **options))
    return weights


def renew(weights: Publication, version: int) -> None:
    with weights.update(version):
        weights._sources["w"].fill_(version)


@pytest.mark.timeout(600)
@settings(max_examples=200 if LONG else 25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_everybody_gets_its_part_and_each_part_is_sent_once(data: st.DataObject) -> None:
    """Several tensors in any layouts, sharded and the same on several ranks, in units of a few bytes."""
    store, opened = dist.HashStore(), []
    names = ("a", "b", "scalar")
    shape_of = {"a": data.draw(shapes), "b": data.draw(shapes), "scalar": ()}
    layouts = {name: data.draw(any_layouts(shape_of[name])) for name in names}
    whole = {name: torch.from_numpy(values(shape_of[name])) for name in names}
    unit_bytes = data.draw(st.integers(1, 300))
    opened.append(publish(whole, "p", version=3, directory=store))
    ranks = 1 + max(max(layout.ranks.tolist(), default=0) for layout in layouts.values())
    parts = {name: parts_of(layouts[name], whole[name].numpy()) for name in names}
    relays: list[Any] = []
    for rank in range(ranks):
        into = {name: torch.full(layouts[name].part(rank).shape, -1) for name in names}
        options: dict[str, Any] = {"rank": rank, "ranks": ranks, "unit_bytes": unit_bytes, "fanout": 1 + rank % 3}
        relays.append(Relay("p", into, directory=store, layouts=layouts, patience=30, **options))
    try:
        reports = all_at_once(relays, version=3)
        direct: dict[Any, int] = {}
        for rank, (relay, report) in enumerate(zip(relays, reports, strict=True)):
            for name in names:
                for box in layouts[name].part(rank).boxes:
                    at = tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))
                    assert torch.equal(relay.tensors[name][at], torch.from_numpy(parts[name][rank])[at])
            key = tuple(layouts[name].part(rank) for name in names)
            direct[key] = direct.get(key, 0) + (report.source is None)
        assert set(direct.values()) == {1}
    finally:
        for one in (*relays, *opened):
            one.close()


def test_the_tree(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    published(closing, store, 5.0)
    relays = chain(closing, store, 7, fanout=2, patience=30)
    assert [report.source for report in all_at_once(relays)] == [None, 0, 0, 1, 1, 2, 2]
    assert all((relay.tensors["w"] == 5).all() for relay in relays)
    sharded = Layout((ROWS, COLUMNS), Mesh({"r": 2, "tp": 2}), {"tp": Shard(1)})
    given: dict[str, Any] = {"layouts": {"w": sharded}, "ranks": 4, "patience": 30, "fanout": 1, "memory": "shared"}
    halves = [
        closing(Relay("p", {"w": torch.zeros(ROWS, COLUMNS // 2)}, directory=store, rank=rank, **given))
        for rank in range(4)
    ]
    reports = all_at_once(halves)
    assert [report.source for report in reports] == [None, None, 0, 1]
    assert sum(report.bytes for report in reports if report.source is None) == 4 * ROWS * COLUMNS


def test_units_arrive_below_while_the_rest_is_still_on_its_way(closing: Callable[[Any], Any]) -> None:
    """The one below has all but the last unit before the one above has come to its end."""
    store = dist.HashStore()
    published(closing, store, 5.0)
    above, below = chain(closing, store, 2)
    above._word.begin(0)
    above.tensors["w"].fill_(5)
    above._word.advance(15)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(below.fetch)
        look = RemoteProgress(below._word.buffer)
        while (seen := look.look(10)) is None or seen.units < 15:
            assert not fetching.done()
        assert (below.tensors["w"][:60] == 5).all() and (below.tensors["w"][60:] == -1).all()
        above._word.advance(17)
        assert fetching.result(30).source == 0
    assert (below.tensors["w"] == 5).all()


def test_what_the_publisher_changed_meanwhile_is_passed_on_by_nobody(closing: Callable[[Any], Any]) -> None:
    """Versions follow each other in quick succession; each of four relays in a row gets whole ones, ever newer."""
    store = dist.HashStore()
    weights = published(closing, store)
    relays = chain(closing, store, 4, fanout=1)
    over = threading.Event()

    def train() -> None:
        version = 0
        while not over.wait(0.02):
            version += 1
            renew(weights, version)

    def follow(relay: Relay) -> list[int]:
        seen = [-1]
        for _ in range(60 if LONG else 5):
            report = relay.fetch(newer_than=seen[-1], timeout=90)
            assert (relay.tensors["w"] == report.version).all()
            seen.append(report.version)
        return seen

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for seen in pool.map(follow, relays):
                assert seen == sorted(set(seen))
    finally:
        over.set()
        trainer.join()


def test_one_that_stays_behind_is_passed_over(closing: Callable[[Any], Any]) -> None:
    """Relay 1 never asks. Those below it wait for a while, and take it from above; it is asked again next time."""
    store = dist.HashStore()
    weights = published(closing, store, 1.0, version=1)
    relays = chain(closing, store, 3, fanout=1, patience=0.5)
    assert relays[0].fetch(version=1).source is None
    assert relays[2].fetch(version=1).source == 0
    renew(weights, 2)
    assert relays[2].fetch(version=2).source is None  # nobody has it but the publisher
    renew(weights, 3)
    assert [relay.fetch(version=3).source for relay in relays] == [None, 0, 1]


def test_one_that_was_never_there_is_passed_over(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    published(closing, store, 1.0)
    late = closing(Relay("p", {"w": torch.zeros(ROWS, COLUMNS)}, directory=store, rank=3, ranks=4, patience=0.1))
    assert late.fetch().source is None and (late.tensors["w"] == 1).all()


def test_nobody_waits_for_ever(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    published(closing, store, version=1)
    first, second = chain(closing, store, 2, patience=0.05)
    for relay in (second, first):
        with pytest.raises(TransferTimeout):
            relay.fetch(version=2, timeout=0.3)
    assert second.fetch(version=1).version == 1


def test_one_that_comes_back_is_found_again(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    published(closing, store, 1.0)
    options: dict[str, Any] = {"directory": store, "ranks": 2, "unit_bytes": UNIT}
    first = Relay("p", {"w": torch.zeros(ROWS, COLUMNS)}, rank=0, **options)
    second = closing(Relay("p", {"w": torch.zeros(ROWS, COLUMNS)}, rank=1, **options))
    assert all_at_once([first, second])[1].source == 0
    first.close()
    assert second.fetch().source is None
    third = closing(Relay("p", {"w": torch.zeros(ROWS, COLUMNS)}, rank=0, **options))
    third.fetch()
    assert second.fetch().source == 0
    assert default_engine().counters()["regions"] == 6


# --- processes

MODEL = {"embed": (400, 64), "up": (256, 128), "down": (128, 256), "norm": (64,)}


def model(version: int) -> dict[str, torch.Tensor]:
    return {
        name: (torch.arange(torch.Size(shape).numel()) % 251 + version).float().reshape(shape)
        for name, shape in MODEL.items()
    }


def _member(rank: int, port: int, readers: int, victim: int, versions: int) -> Any:
    """Ranks 0 and 1 train, the others relay: 2 is first in their tree. The victim is killed half-way in version 2."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank < 2:
        layouts = {name: Layout(shape, Mesh({"dp": 2}), [Shard(0)]) for name, shape in MODEL.items()}
        mine = {name: t.chunk(2)[rank].contiguous() for name, t in model(1).items()}
        weights = publish(mine, "p", version=1, directory=store, layouts=layouts, rank=rank, ranks=2)
        for version in range(2, versions + 1):
            store.wait([f"fetched/{version - 1}"])
            with weights.update(version):
                for name, tensor in model(version).items():
                    mine[name].copy_(tensor.chunk(2)[rank])
        store.wait([f"fetched/{versions}"])
        return 0
    into = {name: torch.zeros(shape) for name, shape in MODEL.items()}
    relay = Relay("p", into, directory=store, rank=rank - 2, ranks=readers, unit_bytes=8 << 10, patience=20)
    if rank == victim:
        _die_half_way(relay)
    direct = 0
    for version in range(1, versions + 1):
        report = relay.fetch(version=version)
        assert report.version == version
        assert all(torch.equal(into[name], tensor) for name, tensor in model(version).items())
        direct += report.bytes if report.source is None else 0
        survivors = readers - (victim >= 0 and version > 1)
        if store.add(f"count/{version}", 1) == survivors:
            store.set(f"fetched/{version}", "")
        store.wait([f"fetched/{version}"])
    return direct


def _die_half_way(relay: Relay) -> None:
    word = relay._word
    advance = word.advance

    def advance_or_die(units: int) -> None:
        if word._version == 2 and units > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(units)

    word.advance = advance_or_die  # type: ignore[method-assign]


TOTAL = sum(tensor.nbytes for tensor in model(0).values())


def test_eight_readers_cost_the_trainers_as_much_as_one() -> None:
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    direct = forked(10, _member, rendezvous.port, 8, -1, 3)
    assert direct == [0, 0, 3 * TOTAL, *[0] * 7]


@pytest.mark.parametrize("victim", [2, 3, 4] if LONG else [2, 3])
def test_a_relay_that_is_killed_half_way_is_replaced(victim: int) -> None:
    """The first of the tree, and one that has two others below it. Nobody gets anything but whole versions."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Forked(10, _member, rendezvous.port, 8, victim, 3) as running:
        direct = [running.result(rank) for rank in range(2, 10) if rank != victim]
        with pytest.raises(AssertionError, match="has ended without a result"):
            running.result(victim)
    if victim == 2:  # its two children go to the trainers in its place
        assert TOTAL * 2 <= sum(direct) <= TOTAL * 4 and sum(one > 0 for one in direct) <= 2
    else:
        assert direct == [3 * TOTAL, *[0] * 6]


# --- words, units, and what is wrong


def test_a_version_is_believed_once_its_epoch_has_been_seen(secret: Secret) -> None:
    with Engine(secret=secret) as engine:
        word = ProgressWord(engine)
        remote = RemoteProgress(word.buffer)
        assert remote.look(10) is None
        word.begin(7)
        first = remote.look(10)
        assert first is not None and (first.version, first.units) == (7, 0)
        word.advance(3)
        second = remote.look(10)
        assert second is not None and (second.epoch, second.units) == (first.epoch, 3)
        word.begin(2)
        third = remote.look(10)
        assert third is not None and (third.version, third.units) == (2, 0) and third.epoch != first.epoch
        word.close()


@given(st.lists(shapes, max_size=4), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_units_have_every_row_once(many: list[tuple[int, ...]], unit_bytes: int) -> None:
    tensors = {str(i): torch.zeros(shape, dtype=torch.int16) for i, shape in enumerate(many)}
    units = Units(tensors, unit_bytes)
    rows = list(units.rows())
    assert [unit for unit, *_ in rows] == sorted(unit for unit, *_ in rows)
    assert all(0 <= unit < units.count and low < high for unit, _, low, high in rows)
    seen = [(name, row) for _, name, low, high in rows for row in range(low, high)]
    expected = [(n, r) for n, t in tensors.items() if t.numel() for r in range(t.shape[0] if t.ndim else 1)]
    assert seen == expected
    assert all(units.of(name, row) == unit for unit, name, low, high in rows for row in range(low, high))


def test_what_is_wrong_is_said(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    state = {"w": torch.zeros(4)}
    for more, told in [
        ({"memory": "copy"}, "memory is 'copy', but must be one of in_place, shared"),
        ({"fanout": 0}, "fanout is 0, but must be 1 or more"),
        ({"unit_bytes": 0}, "unit_bytes is 0, but must be 1 or more"),
        ({"patience": -1}, "patience is -1, but must be 0 or more"),
        ({"directory": Addresses(["x"])}, "directory is Addresses, but relays have to find each other"),
        ({"keys": ["x"]}, "keys names ['x'], but there are no such tensors"),
        ({"rank": 2}, "rank is 2, but must be from 0 to 1"),
    ]:
        options = {"directory": store, "rank": 1, "ranks": 2, **more}
        with pytest.raises(ConfigError, match=re.escape(told)):
            Relay("p", state, **options)
    closing(Relay("p", {"w": torch.zeros(5)}, directory=store, rank=0, ranks=2))
    other = closing(Relay("p", state, directory=store, rank=1, ranks=2))
    with pytest.raises(ConfigError, match=re.escape("'w' is ('float32', (5,)) at relay 0, but ('float32', (4,)) here")):
        other.fetch()


def test_publishers_that_are_lost_are_named(closing: Callable[[Any], Any]) -> None:
    store = dist.HashStore()
    weights = publish({"w": torch.zeros(ROWS, COLUMNS)}, "p", directory=store)
    (first,) = chain(closing, store, 1)
    first.fetch()
    weights.close()
    with pytest.raises(PeerLost, match="no other rank has"):
        first.fetch()
