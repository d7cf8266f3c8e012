"""TorchFT's own test of checkpoint transports over ours, and its Manager with it."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from monarch_rdma.errors import ConfigError, PeerLost
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


@pytest.mark.parametrize("options", [{}, {"memory": "in_place"}], ids=str)
def test_torchfts_own_test_of_transports(engines: list[Engine], options: dict[str, Any]) -> None:
    def make(rank: int, world_size: int) -> Any:
        return OneSidedTransport(engine=engines[0 if options else rank], **options)

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


def test_in_place_the_source_waits_for_its_readers(engines: list[Engine]) -> None:
    weights = torch.randn(1000, 900)
    mine = {"w": torch.zeros(1000, 900), "other": torch.zeros(3)}
    source = OneSidedTransport[Any](memory="in_place", engine=engines[0])
    other = OneSidedTransport[Any](state_dict=lambda: mine, engine=engines[1])
    sent = weights.clone()
    source.send_checkpoint([1], 5, {"w": weights, "other": torch.ones(4)}, SECONDS)

    def trains_on() -> None:
        source.disallow_checkpoint()
        weights.zero_()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trains_on)
        got = other.recv_checkpoint(0, source.metadata(), 5, SECONDS)
        waiting.result(20)
    assert torch.equal(got["w"], sent) and torch.equal(got["other"], torch.ones(4))  # of another shape: all anew
    assert got["w"] is not mine["w"]
    source.send_checkpoint([1], 6, {"w": sent, "other": torch.ones(3)}, SECONDS)
    assert other.recv_checkpoint(0, source.metadata(), 6, SECONDS)["w"].data_ptr() == mine["w"].data_ptr()
    assert torch.equal(mine["w"], sent)
    source.disallow_checkpoint()
    with pytest.raises(PeerLost):  # it may change by now
        other.recv_checkpoint(0, source.metadata(), 6, SECONDS)
    for transport in (source, other):
        transport.shutdown()
        transport.shutdown()


@pytest.mark.parametrize("memory", ["copy", "in_place"])
def test_without_checksums(engines: list[Engine], memory: str) -> None:
    source = OneSidedTransport[Any](memory=memory, verify=False, engine=engines[0])
    plain, checking = (OneSidedTransport[Any](verify=verify, engine=engines[1]) for verify in (False, True))
    weights = torch.randn(1000, 900)
    for step in (1, 2):
        source.send_checkpoint([1], step, {"w": weights}, SECONDS)
        assert torch.equal(plain.recv_checkpoint(0, source.metadata(), step, SECONDS)["w"], weights)
        assert plain.last is not None and (plain.last.bytes, plain.last.verified) == (weights.nbytes, 0)
        with pytest.raises(ConfigError, match="offered without checksums"):
            checking.recv_checkpoint(0, source.metadata(), step, SECONDS)
        source.disallow_checkpoint()
        weights.add_(1)
    for transport in (source, plain, checking):
        transport.shutdown()


def test_in_place_a_reader_that_does_not_come_is_not_waited_for_for_ever(engines: list[Engine]) -> None:
    source = OneSidedTransport[Any](memory="in_place", patience=0.05, engine=engines[0])
    source.disallow_checkpoint()  # nothing was sent
    source.send_checkpoint([1, 2], 5, {"w": torch.ones(4)}, SECONDS)
    source.disallow_checkpoint()
    source.shutdown()
    with pytest.raises(ConfigError, match="memory is 'shared'"):
        OneSidedTransport[Any](memory="shared", engine=engines[0])
