"""DiLoCo and LocalSGD: the same bits as one process in plain torch, for any order of members, and with losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from diloco_reference import Reference, Trainer, flat, in_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from monarch_rdma import kernels
from monarch_rdma.collectives import Group
from monarch_rdma.errors import ConfigError, PeerLost
from monarch_rdma.ft import DiLoCo, FixedCohort, GroupCohort, LocalSGD
from monarch_rdma.ft.contribution import Contribution, wire_of
from monarch_rdma.ft.exchange import mean_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of this thread; those of members have one as well: then they compute the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole(trainer: Trainer) -> list[nn.Module]:
    return [trainer.model]


def trained(
    member: int, group: Group, steps: int, kind: Any = DiLoCo, in_fragments: bool = False, **options: Any
) -> Any:
    trainer = Trainer(member)
    model = trainer.fragments() if in_fragments else trainer.model
    with kind(model, GroupCohort(group), **options) as training:
        for _ in range(steps):
            trainer.step()
            training.step()
        return flat(trainer.model), training.state_dict()


def equal(results: list[Any], reference: Reference) -> None:
    for (weights, state), trainer in zip(results, reference.trainers.values(), strict=True):
        assert torch.equal(weights, flat(trainer.model))
        for ours, theirs in zip(state["shared"], reference.shared, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


OPTIONS = [
    {},
    {"delay": 2},
    {"delay": 3, "mix": 0.5},
    {"in_fragments": True},
    {"in_fragments": True, "delay": 1, "mix": 0.25},
    {"quantize": "int8"},
    {"quantize": "fp8", "in_fragments": True},
    {"kind": LocalSGD},
    {"kind": LocalSGD, "in_fragments": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_one_process_in_plain_torch(options: dict[str, Any]) -> None:
    results = in_threads(3, lambda member, group: trained(member, group, 26, every=6, **options))
    options = dict(options)
    kind, in_fragments = options.pop("kind", DiLoCo), options.pop("in_fragments", False)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, None: None}[options.pop("quantize", None)]

    def quantized(values: Tensor, error: Tensor) -> Tensor:
        q, scales, lost = kernels.quantize_reference(values, dtype, 128, error)
        error.copy_(lost)
        return kernels.dequantize_reference(q, scales, block=128)

    reference = Reference(
        {member: Trainer(member) for member in range(3)},
        Trainer.fragments if in_fragments else whole,
        every=6,
        quantize=quantized if dtype is not None else None,
        is_local_sgd=kind is LocalSGD,
        **options,
    )
    reference.run(26)
    equal(results, reference)


class Noting:
    """A cohort of one, which has come `ahead` steps into an interval, and notes what it is offered."""

    rounds, names = 0, ("me",)

    def __init__(self, ahead: int) -> None:
        self.ahead, self.offered, self.load = ahead, [], None

    def serve(self, state: Any, load: Any) -> None:
        self.state, self.load = state, load

    def join(self) -> bool:
        return True

    def average(self, offering: Any) -> Tensor:
        self.offered.append((offering.steps, offering.span))
        return torch.zeros(offering.contribution.numel)

    def attend(self) -> None:
        """Nobody is left behind."""

    def boundary(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """It has nothing."""


@pytest.mark.parametrize(
    ("delay", "offered"),
    [(0, [(1, 1), (4, 5), (4, 8), (4, 8), (4, 8)]), (2, [(1, 1), (4, 5), (4, 6), (4, 6), (4, 6)])],
)
def test_what_a_newcomer_offers_says_how_many_steps_are_in_it(delay: int, offered: list[Any]) -> None:
    """Of a fragment all steps since it was the shared one, however many rounds of other fragments they are in."""
    trainer, cohort = Trainer(0), Noting(ahead=3)
    fragments = trainer.fragments()[:2]
    with DiLoCo(fragments, cohort, every=8, delay=delay) as diloco:
        assert diloco.join()
        for _ in range(1 + 4 * 4 + delay):
            trainer.step()
            diloco.step()
        assert cohort.offered == offered
        cohort.load(cohort.state())  # it had fallen behind
        for _ in range(4):
            diloco.step()
        assert cohort.offered[-1] == (4 - delay, 4 - delay)


class OfRows:
    """An exchange of one process, which stands for all members one after the other."""

    def __init__(self, names: Sequence[Any], rank: int, rows: list[Tensor], means: list[Tensor | None]) -> None:
        self.names, self.rank = tuple(names), rank
        self._rows, self._means = rows, means

    def all_to_all(self, rows: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._rows])

    def all_gather(self, row: Tensor) -> Tensor:
        self._means[self.rank] = row
        return torch.stack([row if each is None else each for each in self._means])


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 700),
    order=st.integers(1, 5).flatmap(lambda k: st.permutations(range(k))),
    quantize=st.sampled_from([None, "int8", "fp8"]),
)
def test_the_mean_does_not_depend_on_who_has_which_rank(numel: int, order: list[int], quantize: str | None) -> None:
    wire, size = wire_of(quantize), len(order)
    generator = torch.Generator().manual_seed(numel)
    values = [torch.randn(numel, generator=generator) * 10.0 ** (3 * name) for name in range(size)]

    def mean(names: Sequence[int]) -> Tensor:
        given = [wire.contribution(values[name].clone(), torch.zeros(numel) if quantize else None) for name in names]
        rows, means = [each.cut(size) for each in given], [None] * size
        for rank in range(size):
            mean_of(OfRows(names, rank, rows, means), wire, given[rank])
        return mean_of(OfRows(names, 0, rows, means), wire, given[0])

    expected = mean(range(size))
    assert torch.equal(mean(order), expected)
    if quantize is None:
        assert torch.equal(expected, kernels.reduce_reference(values, "avg"))
    assert wire.contribution(values[0], None).numel == numel
    assert isinstance(wire.contribution(values[0], None), Contribution)


def test_ranks_in_another_order_give_the_same_bits() -> None:
    def run(order: list[int]) -> list[Any]:
        def member(number: int, group: Group) -> Any:
            names = [order.index(rank) for rank in range(group.size)]
            trainer = Trainer(number)
            with DiLoCo(trainer.model, GroupCohort(group, names), every=3) as diloco:
                for _ in range(6):
                    trainer.step()
                    diloco.step()
            return flat(trainer.model)

        return in_threads(3, member, order=order)

    assert all(torch.equal(a, b) for a, b in zip(run([0, 1, 2]), run([2, 0, 1]), strict=True))


def test_over_a_process_group_of_torch(tmp_path: Any) -> None:
    """Gloo's groups, in threads; the same bits as over ours."""

    def member(number: int, group: Group) -> Any:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        gloo = torch.distributed.ProcessGroupGloo(store, number, 2)
        trainer = Trainer(number)
        with DiLoCo(trainer.model, FixedCohort(gloo), every=4, quantize="int8") as diloco:
            for _ in range(8):
                trainer.step()
                diloco.step()
        return flat(trainer.model), trained(number, group, 8, every=4, quantize="int8")[0]

    for over_gloo, over_ours in in_threads(2, member):
        assert torch.equal(over_gloo, over_ours)


def test_what_is_not_alike_is_said() -> None:
    def member(number: int, group: Group) -> Any:
        trainer = Trainer(number)
        if number == 1:
            with torch.no_grad():
                trainer.model[0].weight[0, 0] += 1
        diloco = DiLoCo(trainer.model, GroupCohort(group), every=1)
        with pytest.raises(ConfigError, match="members differ in the parameters before of an averaging") as caught:
            diloco.step()
        return str(caught.value)

    assert len(set(in_threads(2, member))) == 1


def test_with_fewer_members_than_the_minimum_it_ends() -> None:
    def member(number: int, group: Group) -> Any:
        diloco = DiLoCo(Trainer(number).model, GroupCohort(group, minimum=2), every=1)
        diloco.step()
        if number == 0:
            group.engine.close()  # it is gone
            with pytest.raises(ConfigError, match="names is"):
                GroupCohort(group, ["a", "a"])
            return None
        with pytest.raises(PeerLost, match="1 members are left, but minimum is 2"):
            diloco.step()

    in_threads(2, member)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 4, "delay": 4}, "delay is 4, but must be an integer from 0 to 3"),
        ({"every": 4, "mix": 1.0}, "mix is 1.0"),
        ({"every": 4, "quantize": "int4"}, "quantize is 'int4'"),
        ({"every": "4"}, "every is '4', but must be an integer"),
        ({"every": 4, "delay": 1.5}, "delay is 1.5"),
        ({"every": 4, "mix": "a"}, "mix is 'a'"),
        ({"every": 4, "quantize": ["int8"]}, r"quantize is \['int8'\]"),
        ({"every": 4, "outer": 5}, "outer is 5, but must make an optimiser"),
        ({"every": 4, "outer": lambda parameters: None}, "outer has made None"),
        ({"every": 4, "heals": [1]}, r"heals is \[1\]"),
        ({"every": 4, "heals": {"a": 5}}, r"heals\['a'\] is 5, but must have state_dict"),
        ({"every": 4, "model": None}, "model is None"),
        ({"every": 4, "model": [1]}, r"model\[0\] is 1"),
        ({"every": 4, "model": [["a"]]}, "fragment 0 has 'a', which is no parameter"),
        (
            {"every": 4, "model": [[nn.Parameter(torch.ones(3, dtype=torch.complex64))]]},
            "a parameter of complex64 on cpu",
        ),
        ({"every": 4, "model": nn.Linear(2, 2, device="meta")}, "a parameter of float32 on meta"),
        ({"every": 4, "cohort": None}, "cohort is None"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    class Alone:
        names, rank = ("me",), 0

        def all_to_all(self, rows: Tensor) -> Tensor:
            return rows

        def all_gather(self, row: Tensor) -> Tensor:
            return row[None]

    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**{"model": model, "cohort": FixedCohort(Alone()), **options})
    with pytest.raises(ConfigError, match="members is None"):
        FixedCohort(None)
    with pytest.raises(ConfigError, match="regroup is 5"):
        FixedCohort(Alone(), regroup=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group is None"):
        GroupCohort(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every is 3, but must be a multiple of the number of fragments, 2"):
        DiLoCo([nn.Linear(2, 2), nn.Linear(2, 2)], FixedCohort(Alone()), every=3)
    with pytest.raises(ConfigError, match="fragment 1 has a parameter that an earlier fragment has too"):
        DiLoCo([model, model], FixedCohort(Alone()), every=2)
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        DiLoCo(nn.Tanh(), FixedCohort(Alone()), every=2)


def test_over_process_groups_of_torchft() -> None:
    """Which are configured anew when members change: one leaves in its third round, which the others make again."""
    pytest.importorskip("torchft", reason="package torchft is not installed")
    from torchft.process_group import ProcessGroupGloo

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def member(number: int, group: Group) -> Any:
        gloo, trainer, sizes = ProcessGroupGloo(timeout=timedelta(seconds=20)), Trainer(number), []

        def configured(name: str, size: int) -> Any:
            gloo.configure(f"127.0.0.1:{store.port}/{name}", f"replica {number}", number, size)
            sizes.append(size)
            return gloo

        cohort = FixedCohort(configured("all", 3), regroup=lambda error: configured("rest", 2))
        with DiLoCo(trainer.model, cohort, every=2) as diloco:
            for step in range(8):
                if (number, step) == (2, 5):
                    gloo.abort()
                    return None
                trainer.step()
                diloco.step()
        gloo.shutdown()
        assert sizes == [3, 2]
        return flat(trainer.model)

    reference = Reference({number: Trainer(number) for number in range(3)}, whole, every=2)
    reference.run(8, lambda number: range(3) if number < 2 else range(2))
    for number, weights in enumerate(in_threads(3, member)[:2]):
        assert torch.equal(weights, flat(reference.trainers[number].model))
