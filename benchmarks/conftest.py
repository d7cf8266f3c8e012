"""An owner process for the benchmarks, and this process's engines, one for each set of lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from owner import Owned, OwnerProcess

from monarch_rdma.rdma import Engine, RDMABuffer, Secret


@pytest.fixture(scope="session")
def secret() -> Secret:
    return Secret.generate()


@pytest.fixture(scope="session")
def owner(secret: Secret) -> Iterator[OwnerProcess]:
    process = OwnerProcess(secret)
    yield process
    process.close()


@pytest.fixture(scope="session")
def engines(secret: Secret) -> Iterator[dict[str, Engine]]:
    """One that takes the best lane, and one with nothing but tcp."""
    with Engine(secret=secret) as best, Engine(secret=secret, lanes="tcp") as tcp:
        yield {"shm": best, "tcp": tcp}


@pytest.fixture
def remote(owner: OwnerProcess, engines: dict[str, Engine]) -> Iterator[Callable[..., tuple[RDMABuffer, Owned]]]:
    """Makes memory at the owner, opened here; dropped afterwards."""
    made: list[Owned] = []

    def make(lane: str, memory: str, size: int, every: int = 1) -> tuple[RDMABuffer, Owned]:
        owned = owner.make(memory, size, every=every)
        made.append(owned)
        return RDMABuffer.from_bytes(owned.handle, engine=engines[lane]), owned

    yield make
    for owned in made:
        owner.drop(owned)
