"""State that trainers of other replicas read: the newest, from all that have it, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from child import Child
from torch.utils._pytree import tree_leaves

from monarch_rdma.errors import PeerLost, ProtocolError, TransferTimeout
from monarch_rdma.ft.peer_state import PeerState, progress_of, state_of_peers
from monarch_rdma.rdma import Engine, Secret


def state_of(seed: int) -> dict[str, Any]:
    """A model's, and what it has read."""
    values = torch.arange(700_000.0) * (1 + seed)
    return {"model": {"w": values, "b": values[:3].clone()}, "steps": seed, "data": [seed, None, "x" * 5]}


def is_same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


@pytest.fixture
def engines(secret: Secret) -> Iterator[list[Engine]]:
    made = [Engine(secret=secret, name=f"trainer{number}") for number in range(3)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def offered(engines: list[Engine]) -> Iterator[list[PeerState]]:
    made = [PeerState(state_of(1), 5, replica=number, engine=engine) for number, engine in enumerate(engines)]
    yield made
    for each in made:
        each.close()


def test_the_newest_is_read_from_all_that_have_it(
    engines: list[Engine], offered: list[PeerState], reader: Engine
) -> None:
    peers = [engine.address for engine in engines]
    fetched = state_of_peers(state_of(0), peers, reader, at_least=1, timeout=20)
    assert is_same(fetched.state, state_of(1)) and fetched.version == 5
    assert fetched.sources == (0, 1, 2) and fetched.verified == fetched.bytes == 2_800_012
    for number in (0, 2):
        offered[number].renew(state_of(2), 6)
    offered[0].set_progress(7)
    fetched = state_of_peers(state_of(0), peers, reader, at_least=6, timeout=20)
    assert is_same(fetched.state, state_of(2)) and fetched.sources == (0, 2)
    assert progress_of(peers, reader, 6) == 7 and progress_of(peers, reader, 5) == -1


def test_a_state_may_get_other_tensors(engines: list[Engine], offered: list[PeerState], reader: Engine) -> None:
    larger = state_of(3) | {"optimizer": torch.ones(9)}
    offered[1].renew(larger, 6)
    fetched = state_of_peers({}, [engines[1].address], reader, at_least=6, timeout=20)
    assert is_same(fetched.state, larger) and fetched.verified == fetched.bytes


def test_a_peer_with_other_bytes_than_it_offers_is_left_out(
    engines: list[Engine], offered: list[PeerState], reader: Engine
) -> None:
    peers = [engine.address for engine in engines]
    for number in (0, 1):
        (damaged,) = [t for t in offered[number]._offered._copies.values() if t.numel() > 3]
        damaged[: damaged.numel() // 2] += 1
    fetched = state_of_peers({}, peers, reader, at_least=1, timeout=20)
    assert is_same(fetched.state, state_of(1)) and fetched.sources == (2,)
    with pytest.raises(ProtocolError, match="are not what rank"):
        state_of_peers({}, peers[:2], reader, at_least=1, timeout=20)


def test_who_has_nothing_that_counts(engines: list[Engine], offered: list[PeerState], reader: Engine) -> None:
    peers = [engine.address for engine in engines]
    with pytest.raises(PeerLost, match="has version 5, not 6 or a later one"):
        state_of_peers({}, peers, reader, at_least=6, timeout=20)
    with pytest.raises(TransferTimeout, match="has version 5, not 6"):
        state_of_peers({}, peers, reader, at_least=6, waits=True, timeout=0.2)
    with pytest.raises(PeerLost, match="none of 1 peers offers its state"):
        state_of_peers({}, [reader.address], reader, at_least=0, timeout=20)


def test_parts_become_parts_of_the_readers_mesh(child_process: Callable[..., Child]) -> None:
    found = child_process().run(
        """
        import tempfile, torch
        from torch.distributed import FileStore, destroy_process_group, init_process_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from monarch_rdma.ft.peer_state import PeerState, state_of_peers
        with tempfile.NamedTemporaryFile() as file:
            init_process_group("gloo", store=FileStore(file.name, 1), rank=0, world_size=1)
            mesh = init_device_mesh("cpu", (1,))
            here = Engine(secret=secret)
            whole = torch.arange(12.0).view(4, 3)
            part = lambda seed: {"w": distribute_tensor(whole * seed, mesh, [Shard(0)]), "n": seed}
            offered = PeerState(part(2), 1, replica=0, engine=engine)
            fetched = state_of_peers(part(0), [engine.address], here, at_least=1, timeout=20)
            w = fetched.state["w"]
            is_mine = type(w) is DTensor and w.device_mesh is mesh
            result = is_mine, tuple(w.shape), w.to_local().sum().item(), fetched.state["n"]
            offered.close()
            here.close()
            destroy_process_group()
        """
    )
    assert found == (True, (4, 3), 132.0, 2)
