"""The backend of torch.distributed: what its users call, for every dtype, against what must come and against gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from members import Members, members


class Ranks:
    """Processes under torch.distributed, with a store in this one, which outlives them."""

    def __init__(self, processes: Members) -> None:
        self.processes = processes
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def begin(self, backend: str, **arguments: Any) -> None:
        size = len(self.processes.children)
        for rank, child in enumerate(self.processes.children):
            child.start(
                "begin(backend, port, rank, size, **arguments)",
                backend=backend, port=self.store.port, rank=rank, size=size, arguments=arguments,
            )  # fmt: skip
        self.processes.finish()

    def run(self, name: str, *arguments: Any) -> list[Any]:
        return self.processes.run("result = run(name, *arguments)", name=name, arguments=arguments)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size}ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    steps = {"MONARCH_RDMA_COLLECTIVE_STEP_BYTES": "4096"}
    with members(request.param, environment=steps, setup="from process_group_programs import *") as processes:
        all_of_them = Ranks(processes)
        all_of_them.begin("cpu:monarch_rdma")
        yield all_of_them


@pytest.mark.parametrize(
    "name",
    ["collectives", "layouts", "without_waiting", "objects", "messages", "subgroups", "dtensors"],
)
def test_what_torch_calls(ranks: Ranks, name: str) -> None:
    ranks.run(name)


@pytest.mark.parametrize(
    "name",
    ["every_dtype_is_reduced", "every_dtype_is_moved", "scaled", "bitwise", "conjugates", "in_place", "overlapping",
     "with_gradients", "coalesced", "more_objects", "with_its_group"],
)  # fmt: skip
def test_what_is_seldom_given(ranks: Ranks, name: str) -> None:
    ranks.run(name)


def test_a_rank_that_is_late_is_named_to_who_waits(ranks: Ranks) -> None:
    *waited, last = ranks.run("late")
    assert last == ("", "")
    for kind, message in waited:
        assert kind == "TransferTimeout" and f"rank {len(waited)}" in message, message


def test_an_aborted_group_ends_its_calls_alone(ranks: Ranks) -> None:
    first, *others = ranks.run("aborted")
    assert first == "" and set(others) == {"Cancelled"}


def test_devices_that_another_backend_has(ranks: Ranks) -> None:
    assert ranks.run("other_devices") == [["fake"]] * len(ranks.processes.children)


def test_trainings_are_as_with_gloo(ranks: Ranks) -> None:
    """Of two ranks a sum has one order only, so every bit must be the same; of more, gloo's order is another one."""
    trainings = ["ddp", "fsdp", "tensor_parallel", "pipeline", "checkpointed"]
    ours = {name: ranks.run(name) for name in trainings}
    ranks.processes.run("end()")
    ranks.begin("gloo")
    theirs = {name: ranks.run(name) for name in trainings}
    ranks.processes.run("end()")
    ranks.begin("cpu:monarch_rdma")
    exact = len(ranks.processes.children) == 2
    for name in trainings:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert mine == (other if exact else pytest.approx(other, rel=1e-5)), name
            assert mine[-1] < mine[0], name


def test_a_killed_rank_is_named_and_the_others_go_on(ranks: Ranks) -> None:
    """The last test: it leaves a rank fewer."""
    children = ranks.processes.children
    survivors = list(range(len(children) - 1))
    ranks.processes.start("result = run('failing', 30)", survivors)
    children[-1].kill()
    for kind, message, seconds in ranks.processes.finish(survivors):
        # Its connection told it, and not heartbeats.
        assert kind == "PeerLost" and f"rank {len(survivors)}" in message and "no sign of life" not in message, message
        assert seconds < 30
    results = ranks.processes.run("result = run('going_on')", survivors)
    assert results == [(len(survivors), 3.0 * len(survivors))] * len(survivors)
