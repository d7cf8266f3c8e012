"""TorchFT's Manager on our process group: a replica is killed, the others commit on, and a new one comes in."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator

import programs
import pytest
from programs import Program

torchft_coordination = pytest.importorskip("torchft.coordination")

REPLICA = """
import os, sys, logging
from datetime import timedelta
import torch, torch.distributed as dist
from torchft import Manager
from monarch_rdma.collectives.torchft import ReconfigurableProcessGroup
logging.disable(logging.WARNING)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
weight = torch.zeros(1000)
group = ReconfigurableProcessGroup(timeout=timedelta(seconds=20))
manager = Manager(
    pg=group, load_state_dict=lambda state: weight.copy_(state["weight"]), state_dict=lambda: {"weight": weight},
    min_replica_size=1, use_async_quorum=False, replica_id=sys.argv[2], lighthouse_addr=sys.argv[1],
    timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=30), hostname="127.0.0.1",
)
print("ready", flush=True)
for line in sys.stdin:
    manager.start_quorum()
    gradient = torch.full((1000,), 1.0 + manager.current_step())
    manager.allreduce(gradient).wait()
    if committed := manager.should_commit():
        weight += gradient
    print(committed, manager.num_participants(), manager.current_step(), float(weight.sum()), flush=True)
manager.shutdown(wait=False)
"""


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = torchft_coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import torch, and a quorum waits for who may still come."""
    monkeypatch.setattr(programs, "LIMIT", 60.0)


Start = Callable[[str], Program]


@pytest.fixture
def replica(lighthouse: str) -> Iterator[Start]:
    running: list[Program] = []

    def start(name: str) -> Program:
        running.append(Program(textwrap.dedent(REPLICA), lighthouse, name, RUST_LOG="error"))
        return running[-1]

    yield start
    for each in running:
        each.close()


def step(*replicas: Program) -> list[tuple[str, int, int, float]]:
    """One step on all of them: whether it was committed, of how many, which step comes next, and their weights."""
    for each in replicas:
        each.tell("step")
    lines = [each.line().split() for each in replicas]
    return [(line[0], int(line[1]), int(line[2]), float(line[3])) for line in lines]


def test_a_replica_is_killed_and_another_one_comes(replica: Start) -> None:
    first, second = replica("a"), replica("b")
    assert first.line() == second.line() == "ready"
    assert step(first, second) == [("True", 2, 1, 1000.0)] * 2
    assert step(first, second) == [("True", 2, 2, 3000.0)] * 2
    first.tell("step")
    second.kill()
    outcome = first.line().split()  # the step may fail, for its group has lost one; the next is made alone
    committed = 3 if outcome[0] == "True" else 2
    alone = step(first)[0]
    assert alone[:3] == ("True", 1, committed + 1)
    third = replica("b")
    assert third.line() == "ready"
    third.tell("step")
    outcomes = iter(lambda: step(first)[0], None)  # alone, until it is let in
    together = next(outcome for outcome in itertools.islice(outcomes, 50) if outcome[1] == 2)
    newcomer = third.line().split()
    assert (newcomer[0], int(newcomer[1]), int(newcomer[2]), float(newcomer[3])) == together  # it has caught up
