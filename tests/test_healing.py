"""States that peers offer and newcomers read: the same tree and bytes, of one version, from several peers, checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from child import Child
from torch.utils._pytree import tree_leaves

from monarch_rdma.errors import ConfigError, PeerLost, ProtocolError, VersionChanged
from monarch_rdma.ft import OfferedState, fetch_state
from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.sharding import Layout, Mesh, Shard


def state_of(seed: int, scale: int = 1) -> dict[str, Any]:
    """Of a model and its AdamW after a step, and whatever else a state may have."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(700, 500 * scale), torch.nn.Linear(500 * scale, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    odd = [torch.arange(12.0).reshape(3, 4).t(), torch.empty(0, 3), torch.tensor(seed), torch.tensor([True, False])]
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": (odd, None, {"name": "x", 3: b"bytes"}),
        "half": torch.full((300, 1001), seed, dtype=torch.bfloat16),
        "step": seed,
    }


def equal(a: Any, b: Any) -> bool:
    mine, theirs = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(theirs) and all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(mine, theirs, strict=True)
    )


def nbytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


@pytest.fixture
def peers(secret: Secret) -> Iterator[list[Engine]]:
    engines = [Engine(secret=secret, name=f"peer{number}") for number in range(4)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("memory", ["copy", "in_place"])
def test_a_state_is_read_from_so_many_peers(peers: list[Engine], reader: Engine, count: int, memory: str) -> None:
    state = state_of(1)
    options: dict[str, Any] = {"memory": memory, "version": 5}
    offered = [OfferedState(state, replica=f"r{n}", engine=engine, **options) for n, engine in enumerate(peers[:count])]
    offers = pickle.loads(pickle.dumps([each.offer for each in offered]))
    seen: list[tuple[int, int]] = []
    healed = fetch_state(offers, progress=lambda done, total: seen.append((done, total)), engine=reader)
    assert equal(healed.state, state)
    assert (healed.version, healed.bytes, healed.verified) == (5, nbytes(state), nbytes(state))
    assert healed.sources == tuple(f"r{n}" for n in range(count)) and healed.replaced == ()
    assert seen[-1] == (healed.bytes, healed.bytes)
    into = state_of(2)
    parameter = into["model"]["0.weight"]
    assert fetch_state(offers, into=into, engine=reader).state["model"]["0.weight"].data_ptr() == parameter.data_ptr()
    assert torch.equal(parameter, state["model"]["0.weight"])
    for each in offered:
        each.close()
    with pytest.raises(PeerLost, match="is lost, and with it"):
        fetch_state(offers, engine=reader)


def test_the_copy_is_of_one_version_while_training_goes_on(owner: Engine, reader: Engine) -> None:
    state = state_of(1)
    with OfferedState(state, version=1, engine=owner) as offered:
        first = offered.offer
        for leaf in tree_leaves(state):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.zero_()
        assert equal(fetch_state(first, engine=reader).state, state_of(1))
        assert offered.renew(state_of(2), 2)
        with pytest.raises(VersionChanged):
            fetch_state(first, engine=reader)
        assert equal(fetch_state([first, offered.offer], engine=reader).state, state_of(2))  # the newest one
        assert not offered.renew(state_of(3, scale=2), 3)  # other shapes
        assert equal(fetch_state(offered.offer, engine=reader).state, state_of(2))


def test_in_another_layout_from_two_replicas(peers: list[Engine], reader: Engine) -> None:
    """Two replicas of two ranks, with rows each; a newcomer of three ranks, with rows, or columns; or one with all."""
    whole = {"w": torch.randn(3000, 700), "norm": torch.randn(9)}
    rows = Layout((3000, 700), Mesh({"dp": 2}), [Shard(0)])
    offered = []
    for number, engine in enumerate(peers):
        replica, rank = divmod(number, 2)
        part = {"w": whole["w"][1500 * rank : 1500 * (rank + 1)].clone(), "norm": whole["norm"]}
        where: dict[str, Any] = {"replica": replica, "rank": rank, "ranks": 2, "layouts": {"['w']": rows}}
        offered.append(OfferedState(part, engine=engine, **where))
    offers = [each.offer for each in offered]
    for given in (offers, offers[:2], offers[1:3]):
        healed = fetch_state(given, engine=reader)
        assert equal(healed.state, whole) and healed.verified == healed.bytes
    for dim, shape in ((0, (1000, 700)), (1, (3000, 234))):
        layout = Layout((3000, 700), Mesh({"dp": 3}), [Shard(dim)])
        into = {"w": torch.zeros(shape), "norm": torch.zeros(9)}
        options: dict[str, Any] = {"rank": 1, "ranks": 3, "layouts": {"['w']": layout}}
        healed = fetch_state(offers, into=into, engine=reader, **options)
        assert torch.equal(into["w"], whole["w"].chunk(3, dim)[1])
        assert healed.verified == healed.bytes == nbytes(into)
    for each in offered:
        each.close()


@pytest.mark.parametrize("memory", ["copy", "in_place"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_blocks_are_compared_as_well(owner: Engine, reader: Engine, dim: int, memory: str) -> None:
    """Into tensors that lie otherwise, out of some that do; and a byte that changes on its way."""
    whole = torch.randint(-9, 9, (300, 90, 70), dtype=torch.int16)
    state = {"w": whole, "odd": whole.permute(2, 0, 1), "bits": torch.arange(2_100_001, dtype=torch.uint8)}
    layouts = {"['w']": Layout((300, 90, 70), Mesh({"x": 3}), [Shard(dim)])}
    layouts["['odd']"] = Layout((70, 300, 90), Mesh({"x": 3}), [Shard(dim)])
    layouts["['bits']"] = Layout((2_100_001,), Mesh({"x": 3}), [Shard(0)])
    with OfferedState(state, memory=memory, engine=owner) as offered:
        wanted = {name: tensor.chunk(3, dim if tensor.ndim > 1 else 0)[1] for name, tensor in state.items()}
        into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        into["w"] = torch.zeros(into["w"].shape[::-1], dtype=torch.int16).permute(2, 1, 0)
        options: dict[str, Any] = {"layouts": layouts, "rank": 1, "ranks": 3, "into": into, "engine": reader}
        healed = fetch_state(offered.offer, **options)
        assert equal(into, wanted) and healed.verified == healed.bytes == nbytes(wanted)

        def spoil(done: int, total: int) -> None:
            if done == total:
                into["odd"][-1, -1, -1] += 1

        with pytest.raises(ProtocolError, match="odd.* (is|are) not what rank 0 has offered"):
            fetch_state(offered.offer, progress=spoil, **options)


def test_a_source_that_is_lost_before_all_is_compared(peers: list[Engine], reader: Engine) -> None:
    whole = {"w": torch.randn(3000, 700)}
    columns = {"['w']": Layout((3000, 700), Mesh({"tp": 2}), [Shard(1)])}
    offered = [OfferedState(whole, replica=number, engine=peers[number]) for number in range(2)]
    into = {"w": torch.zeros(3000, 350)}
    seen: list[int] = []

    def lose_one(done: int, total: int) -> None:
        seen.append(done)
        if done == total:
            offered[0].close()

    options: dict[str, Any] = {"into": into, "layouts": columns, "rank": 0, "ranks": 2, "engine": reader}
    healed = fetch_state([each.offer for each in offered], progress=lose_one, **options)
    assert torch.equal(into["w"], whole["w"][:, :350]) and healed.verified == nbytes(into)
    assert healed.replaced == (0,) and nbytes(into) in seen
    offered[1].close()


def test_bytes_that_are_not_what_was_offered(owner: Engine, reader: Engine) -> None:
    state = state_of(1)
    with OfferedState(state, memory="in_place", engine=owner) as offered:
        state["model"]["0.weight"][300, 5] += 1
        with pytest.raises(ProtocolError, match=r"1 of 2 blocks of \['model'\]\['0.weight'\] are not what rank 0 has"):
            fetch_state(offered.offer, engine=reader)
        assert torch.equal(
            fetch_state(offered.offer, verify=False, engine=reader).state["model"]["0.weight"],
            state["model"]["0.weight"],
        )


def test_a_source_that_is_killed_in_the_middle_is_replaced(child_process: Callable[..., Child], reader: Engine) -> None:
    children = [child_process(lanes="tcp") for _ in range(2)]
    code = """
        import torch
        from monarch_rdma.ft import OfferedState
        offered = OfferedState({"w": [torch.full((1 << 20,), float(i)) for i in range(16)]}, replica=n, engine=engine)
        result = offered.offer
    """
    offers = [child.run(code, n=n) for n, child in enumerate(children)]

    def kill_one(done: int, total: int) -> None:
        if children[0].process.poll() is None:
            children[0].kill()

    healed = fetch_state(offers, progress=kill_one, engine=reader)
    assert equal(healed.state, {"w": [torch.full((1 << 20,), float(i)) for i in range(16)]})
    assert healed.replaced == (0,) and healed.verified == 64 << 20


def test_bad_arguments(owner: Engine, reader: Engine) -> None:
    with pytest.raises(ConfigError, match="memory is 'shared'"):
        OfferedState({"w": torch.ones(3)}, memory="shared", engine=owner)
    with pytest.raises(ConfigError, match="layouts names"):
        OfferedState({"w": torch.ones(3)}, layouts={"v": Layout((3,), Mesh({"x": 1}))}, engine=owner)
    with pytest.raises(ConfigError, match="offers is empty"):
        fetch_state([], engine=reader)
    with OfferedState({"step": 3}, engine=owner) as nothing, pytest.raises(ConfigError, match="has no tensor"):
        _ = nothing.offer
    with OfferedState({"w": torch.ones(3)}, engine=owner) as offered:
        with pytest.raises(ConfigError, match="two of replica 0 and rank 0"):
            fetch_state([offered.offer, offered.offer], engine=reader)
        with pytest.raises(ConfigError, match="have not the same tensors"):
            fetch_state(offered.offer, into={"v": torch.ones(3)}, engine=reader)
