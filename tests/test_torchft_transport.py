"""TorchFT's own test of checkpoint transports over ours, and its Manager with it."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from monarch_rdma.errors import PeerLost
from monarch_rdma.rdma import Engine, Secret

pytest.importorskip("torchft", reason="package torchft is not installed")

from torchft.checkpointing.transport_test import run_multi_recovery_test

from monarch_rdma.ft.torchft_transport import OneSidedTransport

SECONDS = timedelta(seconds=20)


@pytest.fixture
def engines(secret: Secret) -> Iterator[list[Engine]]:
    made = [Engine(secret=secret, name=f"replica{number}") for number in range(3)]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("is_one_engine", [True, False])
def test_torchfts_own_test_of_transports(engines: list[Engine], is_one_engine: bool) -> None:
    def make(rank: int, world_size: int) -> Any:
        return OneSidedTransport(engine=engines[0 if is_one_engine else rank])

    try:
        run_multi_recovery_test(unittest.TestCase(), make, torch.device("cpu"))
    finally:
        if torch.distributed.is_initialized():  # it leaves it behind where it fails
            torch.distributed.destroy_process_group()


def test_a_source_trains_on_and_is_read_again(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_rdma.ft.torchft_transport._PART", 1 << 20)
    source, other = OneSidedTransport[Any](engine=engines[0]), OneSidedTransport[Any](engine=engines[1])
    where = source.metadata()
    weights = torch.randn(1000, 900)
    for step in (3, 4, 9):
        source.send_checkpoint(
            [1], step, {"user": {"w": weights, "v": [weights + 1, weights[:9]], "step": step}}, SECONDS
        )
        source.disallow_checkpoint()
        sent = weights.clone()
        weights.add_(1)  # before anybody has read
        got = other.recv_checkpoint(0, where, step, SECONDS)
        assert torch.equal(got["user"]["w"], sent) and got["user"]["step"] == step
        assert torch.equal(got["user"]["v"][0], sent + 1) and torch.equal(got["user"]["v"][1], sent[:9])
        assert other.last is not None and other.last.verified == other.last.bytes == 2 * weights.nbytes + 32_400
        assert source.metadata() == where
    source.send_checkpoint([1], 10, {"user": {"w": weights, "more": weights[0]}}, SECONDS)  # other tensors
    assert torch.equal(other.recv_checkpoint(0, where, 10, SECONDS)["user"]["more"], weights[0])
    with pytest.raises(TimeoutError, match="timed out: .* has not offered all of step 11"):
        other.recv_checkpoint(0, where, 11, timedelta(seconds=0.05))
    source.shutdown()
    engines[0].close()
    with pytest.raises(PeerLost):
        other.recv_checkpoint(0, where, 10, SECONDS)
    other.shutdown()
