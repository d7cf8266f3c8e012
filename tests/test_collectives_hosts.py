"""Groups over several hosts: two levels, right results with delay and loss, and one error where a host is cut off."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from child import Child
from hosts.network import Network, network_of
from members import Members

from monarch_rdma.rdma import Secret

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
ROUNDS = 100 if LONG else 2
OPTIONS = {"heartbeat_interval": 0.1, "heartbeat_timeout": 2.0}
SETUP = """
from collective_programs import *
from monarch_rdma import config
config.configure(collective_step_bytes=4096)
"""


@pytest.fixture(scope="module")
def pool(network: Network) -> Members:
    """Two members on each of two hosts: ranks 0 and 2 on the first, 1 and 3 on the second."""
    secret = Secret.generate()

    def make(rank: int) -> Child:
        return network.hosts[rank % 2].child(secret, **OPTIONS)

    return Members([make(rank) for rank in range(4)], make, SETUP)


@pytest.fixture
def processes(network: Network, pool: Members) -> Members:
    for host in network.hosts:
        host.mend()
    network.shape()
    pool.replace_ended()
    pool.run("config.configure(collective_hierarchy=True)")
    return pool


def test_two_levels_give_what_one_gives(processes: Members, network: Network) -> None:
    processes.form()
    assert processes.run("result = group.hosts") == [[[0, 2], [1, 3]]] * 4
    network.shape(delay=0.002, loss=0.01)
    for dtype, count in ((torch.int32, 1), (torch.int64, 30_001), (torch.float64, 7000)):
        processes.run("check(group, dtype, count, 'max', 3, 1)", dtype=dtype, count=count)
    processes.run("check(group, torch.int32, 30_001, 'sum', 3, 2)")
    # Sums on each host come first: another order than that of ranks, but one.
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e5m2):
        processes.run("check(group, dtype, 30_001, 'avg', 3, 2)", dtype=dtype)


@pytest.mark.parametrize(
    ("ranks", "hosts"), [([0, 2, 1], [[0, 1], [2]]), ([1, 0, 2, 3, 4], [[0, 3], [1, 2, 4]])], ids=["2+1", "2+3"]
)
def test_hosts_with_different_numbers_of_members(processes: Members, ranks: list[int], hosts: list[list[int]]) -> None:
    with processes.one_more():
        processes.form(ranks)
        assert processes.run("result = group.hosts", ranks) == [hosts] * len(ranks)
        for root in range(len(ranks)):
            processes.run("check(group, torch.int32, 20_001, 'sum', 3, root)", ranks, root=root)
        averages = processes.run(
            """
            tensor = torch.arange(20_000.0) * (rank + 1)
            group.all_reduce(tensor, op="avg")
            assert torch.allclose(tensor, torch.arange(20_000.0) * (size + 1) / 2)
            result = tensor
            """,
            ranks,
        )
        assert all(torch.equal(each, averages[0]) for each in averages)


def test_a_member_that_leaves_is_named_by_all(processes: Members) -> None:
    processes.form()
    processes.start("result = attempt(lambda: group.all_reduce(torch.ones(100_000), timeout=300))", [0, 1, 2])
    processes.run("group.close()", [3])
    for kind, message, seconds in processes.finish([0, 1, 2]):
        assert kind == "PeerLost" and "rank 3" in message and seconds < 60
    assert processes.run("result = group.shrink(timeout=30).size", [0, 1, 2]) == [3] * 3


def test_what_crosses_the_network_crosses_it_once_for_each_host(processes: Members) -> None:
    sent = {}
    for name, is_on in (("two", True), ("one", False)):
        processes.run("config.configure(collective_hierarchy=is_on)", is_on=is_on)
        processes.form(name=name)
        counted = "result = engine.counters().get('tcp_write_bytes', 0)"
        before = processes.run(counted)
        processes.run("group.all_reduce(torch.ones(1_000_000))")
        sent[name] = sum(processes.run(counted)) - sum(before)
    assert sent["two"] < 0.6 * sent["one"]


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[tuple[Members, Network]]:
    """Ranks 0 and 3 on the first host."""
    secret = Secret.generate()
    with network_of(3) as network:

        def make(rank: int) -> Child:
            return network.hosts[rank % 3].child(secret, **OPTIONS)

        yield Members([make(rank) for rank in range(4)], make, SETUP), network


def test_a_broadcast_leaves_its_root_once_for_any_number_of_hosts(three_hosts: tuple[Members, Network]) -> None:
    processes, _ = three_hosts
    processes.form()
    assert processes.run("result = group.hosts") == [[[0, 3], [1], [2]]] * 4
    counted = "result = engine.counters().get('tcp_write_bytes', 0)"
    for root in range(4):
        before = processes.run(counted)
        processes.run(
            """
            tensor = torch.arange(100_001) if rank == root else torch.zeros(100_001, dtype=torch.int64)
            group.broadcast(tensor, root)
            assert torch.equal(tensor, torch.arange(100_001))
            """,
            root=root,
        )
        sent = [after - then for after, then in zip(processes.run(counted), before, strict=True)]
        assert max(sent) < 1.2 * 800_008, sent


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1, 2, 3]], ids=["one on each", "two on one"])
def test_every_algorithm_with_delay_and_loss(three_hosts: tuple[Members, Network], ranks: list[int]) -> None:
    processes, network = three_hosts
    processes.form(ranks, name="algorithms")
    network.shape(delay=0.001, loss=0.01)
    processes.run(
        """
        for number, (op, algorithm) in enumerate(zip(("sum", "max", "min", "product"), ALGORITHMS[2:])):
            for count in (1, 6001):
                check(group, torch.int32, count, op, number, number % size, algorithm=algorithm)
        """,
        ranks,
    )
    network.shape()


def test_what_each_algorithm_sends(three_hosts: tuple[Members, Network]) -> None:
    """Messages and bytes of each of three members on as many hosts, which do not depend on the machine."""
    processes, _ = three_hosts
    processes.run("config.configure(collective_step_bytes=1 << 20)", [0, 1, 2])
    processes.form([0, 1, 2], name="counted")
    processes.run("config.configure(collective_step_bytes=4096)", [0, 1, 2])
    sent = processes.run(
        """
        def pieces(count, algorithm):
            names = ["collective_pieces", "collective_piece_bytes"]
            before = [engine.counters().get(name, 0) for name in names]
            group.all_reduce(torch.ones(count), algorithm=algorithm)
            return [engine.counters()[name] - then for name, then in zip(names, before)]
        result = [pieces(30_000, "ring"), pieces(2, "doubling"), pieces(2, "direct"), pieces(30_000, "halving")]
        """,
        [0, 1, 2],
    )
    for rank, (ring, doubling, direct, halving) in enumerate(sent):
        assert ring[0] == 4 and ring[1] < 4 / 3 * 120_000 + 5 * 64 + 4 * 64
        assert doubling[0] == (2, 1, 1)[rank]  # rank 1 gives to rank 0 first, and gets the result from it
        assert direct[0] == 2
        assert halving[1] < 2 * 120_000 + 1000


def test_a_late_member_is_named(processes: Members) -> None:
    processes.form()
    processes.start("result = attempt(lambda: group.all_reduce(torch.ones(100_000), timeout=60))", [1, 2])
    kind, message, _ = processes.run("result = attempt(lambda: group.all_reduce(torch.ones(100_000), timeout=3))", [0])[
        0
    ]
    # Rank 2 is ready on this host; rank 3 keeps rank 1 waiting, whom rank 0 waits for.
    assert (kind, "rank 1" in message) == ("TransferTimeout", True)
    for kind, message, seconds in processes.finish([1, 2]):
        assert kind in ("Cancelled", "TransferTimeout") and "rank" in message and seconds < 30
    assert processes.run("result = group.shrink(timeout=30).size") == [4] * 4


@pytest.mark.parametrize(("how", "levels"), [("kill", 2), ("stop", 2), ("cut", 2), ("cut", 1)])
def test_members_are_lost_at_random_moments(processes: Members, network: Network, how: str, levels: int) -> None:
    """Right results until then; then one error that names who is lost, and the survivors go on."""
    for number in range(ROUNDS):
        processes.replace_ended()
        processes.run("config.configure(collective_hierarchy=levels == 2)", levels=levels)
        processes.form(name=f"{how}{levels}-{number}")
        processes.start("result = hammer(group, seed)", seed=number)
        time.sleep(0.05 + 0.1 * (number % 5))  # any moment is right
        victims = [1, 3] if how == "cut" else [number % 4]
        survivors = [rank for rank in range(4) if rank not in victims]
        if how == "cut":
            network.hosts[1].cut()
        elif how == "stop":
            processes.children[victims[0]].stop()
        else:
            processes.children[victims[0]].kill()
        for kind, message, rank in processes.finish(survivors):
            assert kind == "PeerLost" and rank in victims, (kind, message, rank)
        sizes = processes.run(
            """
            smaller = group.shrink(timeout=60)
            check(smaller, torch.int64, 20_000, "sum", 1, 0)
            result = smaller.size
            smaller.close()
            """,
            survivors,
        )
        assert sizes == [len(survivors)] * len(survivors)
        for rank in victims:
            processes.children[rank].close()
        network.hosts[1].mend()
