"""Two virtual machines with Soft-RoCE, linked by two cables: bytes that leave one kernel and enter another, on cables
that lose packets or are pulled. Right bytes, each operation ends, and nothing happens twice."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.machine import Command, Machine, empty_folder, two_machines

from monarch_rdma import config
from monarch_rdma.rdma import Secret

pytestmark = pytest.mark.timeout(3000)
GUEST = "exec python tests/rdma_vm/guest"
LANES = [lane for lane in config.LANES if lane != "shm"]
MiB = 1 << 20
LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"


@pytest.fixture(scope="module")
def machines(rdma_image: Image) -> Iterator[tuple[Machine, Machine]]:
    results = empty_folder(ROOT / "build/rdma_vm/two")
    with two_machines(rdma_image, results, limit=3000 if LONG else 800) as both:
        secret = Secret.generate()
        for machine in both:
            secret.write_file(machine.results / "secret")
            machine.run("install -m 600 /results/secret /run/secret").check()
        yield both


class Traffic:
    """Operations of machine 2 (guest/operations.py) on memory of machine 1 (guest/owner.py), and what came of them."""

    def __init__(self, machines: tuple[Machine, Machine], lane: str, **options: Any) -> None:
        self.options = {"secret": "/run/secret", "lanes": lane, "heartbeat_timeout": 30}
        few = {"rounds": 50, "depth": 4, "bytes": 4096, "timeout": 60, "pause": 0, "stop_at_failure": False, "rails": 0}
        ours = few | options
        owner = {**self.options, "listen_host": "10.9.0.1", "size": ours["depth"] * ours["bytes"]}
        self.owner = machines[0].start(f"{GUEST}/owner.py {shlex.quote(json.dumps(owner))}")
        handles = said(self.owner, 0)
        told = json.dumps({**self.options, **ours})
        self.operations = machines[1].start(f"{GUEST}/operations.py {shlex.quote(handles)} {shlex.quote(told)}")
        said(self.operations, 0)

    def ends(self, timeout: float) -> dict[str, Any]:
        """What operations.py says, with the owner's view of it. Asserts what must hold whatever happened."""
        self.operations.wait(timeout).check()
        outcome = json.loads(said(self.operations, 1))
        self.owner.signal("TERM")
        self.owner.wait(30).check()
        seen = json.loads(said(self.owner, 1))
        assert outcome["wrong"] == []
        assert outcome["left"] == seen["left"] == 0
        assert outcome["added"] <= seen["counter"] <= outcome["added"] + outcome["perhaps_added"]
        assert len(seen["notified"]) == len(set(seen["notified"])), "a notification came twice"
        assert set(outcome["notified"]) <= set(seen["notified"])
        assert set(seen["notified"]) <= set(outcome["notified"]) | set(outcome["perhaps_notified"])
        return outcome


def said(command: Command, index: int) -> str:
    """A line that a guest program says in JSON. What else it says is its failure."""
    line = command.line(index, 60)
    assert line.startswith("{"), command.wait(10).output
    return line


def only_atomics_failed(outcome: dict[str, Any]) -> None:
    """An atomic whose end is not known is not repeated: it fails. All else is carried out after all."""
    assert sum(outcome["failures"].values()) == outcome["perhaps_added"], outcome["failures"]


def packets(machine: Machine, rail: int) -> int:
    """Those that the card of a rail has sent."""
    counter = f"/sys/class/infiniband/rxe{rail}/ports/1/hw_counters/sent_pkts"
    return int(machine.run(f"cat {counter}").check())


@contextmanager
def repeated(*actions: Callable[[], None], every: float) -> Iterator[None]:
    """Carries out the actions in turn, `every` so many seconds, while the block runs, and each once more at its end."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            for action in actions:
                action()
                over.wait(every)
        for action in actions:
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("lane", LANES)
def test_right_bytes_over_the_cable(machines: tuple[Machine, Machine], lane: str) -> None:
    outcome = Traffic(machines, lane, rounds=12, bytes=4 * MiB).ends(120)
    assert outcome["failures"] == {}
    assert set(outcome["lanes"]) - {"control"} == {lane}  # atomics may go over the control stream
    assert outcome["added"] and outcome["notified"]


@pytest.mark.parametrize("lane", LANES)
def test_small_operations_on_a_cable_that_is_pulled_all_the_time(machines: tuple[Machine, Machine], lane: str) -> None:
    """Every 0.2 s the cable of the first rail is out, or in again."""
    count = 10_000 if LONG else 1000
    traffic = Traffic(machines, lane, rounds=count // 4, depth=4)
    with repeated(lambda: machines[1].plug(0, False), lambda: machines[1].plug(0, True), every=0.2):
        outcome = traffic.ends(count * 0.2)
    assert outcome["done"] + sum(outcome["failures"].values()) == count
    only_atomics_failed(outcome)


@pytest.mark.parametrize("lane", LANES)
def test_a_cable_that_loses_packets(machines: tuple[Machine, Machine], lane: str) -> None:
    for machine in machines:
        machine.run(
            "for rail in 0 1; do tc qdisc add dev rail$rail root netem loss 2% reorder 5% delay 1ms; done"
        ).check()
    try:
        outcome = Traffic(machines, lane, rounds=40, bytes=64 << 10).ends(240)
    finally:
        for machine in machines:
            machine.run("for rail in 0 1; do tc qdisc del dev rail$rail root; done").check()
    only_atomics_failed(outcome)


@pytest.mark.skipif("verbs" not in LANES, reason="this version has no verbs lane")
def test_large_transfers_go_over_both_rails(machines: tuple[Machine, Machine]) -> None:
    before = [packets(machines[1], rail) for rail in (0, 1)]  # what is done to connect is reads: a packet a request
    outcome = Traffic(machines, "verbs", rounds=8, depth=1, bytes=8 * MiB, rails=2).ends(120)
    assert outcome["failures"] == {} and outcome["rails"] == 2
    sent = [packets(machines[1], rail) - before[rail] for rail in (0, 1)]
    assert min(sent) > 500, sent


@pytest.mark.skipif("verbs" not in LANES, reason="this version has no verbs lane")
def test_a_cable_that_is_pulled_for_good(machines: tuple[Machine, Machine]) -> None:
    """That of the second rail; the control stream is on the first."""
    traffic = Traffic(machines, "verbs", rounds=20, depth=4, bytes=2 * MiB, rails=2)
    machines[1].plug(1, False)
    try:
        outcome = traffic.ends(200)
    finally:
        machines[1].plug(1, True)
    only_atomics_failed(outcome)


@pytest.mark.parametrize("lane", LANES)
def test_an_owner_that_is_killed(machines: tuple[Machine, Machine], lane: str) -> None:
    """All that was under way fails as PeerLost as soon as the end of the control stream is known."""
    traffic = Traffic(machines, lane, rounds=10_000, depth=4, bytes=MiB, stop_at_failure=True)
    traffic.owner.signal("KILL")
    traffic.operations.wait(60).check()
    outcome = json.loads(said(traffic.operations, 1))
    assert outcome["wrong"] == []
    assert outcome["failures"] and all(text.startswith("PeerLost") for text in outcome["failures"])
    assert outcome["slowest"] < 20  # seconds of a round, of which the failure is a part; heartbeats would take 30


@pytest.mark.skipif("verbs" not in LANES, reason="this version has no verbs lane")
def test_collectives_between_machines(machines: tuple[Machine, Machine]) -> None:
    """Each gives what it must, by cards alone. A member that is killed is named by the other, at once."""
    members = []
    for rank, machine in enumerate(machines):
        options = {"secret": "/run/secret", "lanes": "verbs", "listen_host": f"10.9.0.{rank + 1}"}
        told = f"{rank} {shlex.quote(json.dumps(options))}"
        members.append(machine.start(f"{GUEST}/collective_member.py {told}"))
    addresses = [json.loads(said(member, 0))["address"] for member in members]
    for machine in machines:
        (machine.results / "members.new").write_text(json.dumps(addresses))
        (machine.results / "members.new").rename(machine.results / "members")
    for member in members:
        written = json.loads(said(member, 1))
        assert written["verbs_write_bytes"] > 500_000 and not written.get("tcp_write_bytes")
    members[0].signal("KILL")
    failed = json.loads(said(members[1], 2))
    assert (failed["error"], failed["rank"]) == ("PeerLost", 0) and "rank 0" in failed["text"], failed
    assert failed["seconds"] < 10
    members[1].wait(60).check()
