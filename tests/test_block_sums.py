"""Checksums that a read makes as its bytes pass: those of kernels.checksum, or none; parts of blocks add up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lanes import LANES, Lane

from monarch_rdma import kernels
from monarch_rdma.errors import ConfigError
from monarch_rdma.rdma import BlockSums, Engine, RDMABuffer, Secret, empty

BLOCK = 1 << 20
MAKES_SUMS = ("shm-mapped", "shm-process_vm", "tcp")  # others leave it to the caller


@pytest.fixture(params=LANES, ids=str)
def ends(request: pytest.FixtureRequest, secret: Secret) -> Iterator[tuple[Lane, Engine, Engine]]:
    lane: Lane = request.param
    with Engine(secret=secret, **lane.options) as owner, Engine(secret=secret, **lane.options) as reader:
        yield lane, owner, reader


def published(lane: Lane, engine: Engine, size: int) -> torch.Tensor:
    torch.manual_seed(size)
    values = torch.randint(256, (size,), dtype=torch.uint8)
    return empty((size,), dtype=torch.uint8, engine=engine).copy_(values) if lane.shared else values


def found(sums: BlockSums) -> list[int]:
    return np.frombuffer(sums.values, np.int64).tolist()


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("shift", [0, 8, 3])  # of the destination, against lines of a cache and words
def test_sums_of_a_whole_tensor(ends: tuple[Lane, Engine, Engine], bulk: bool, shift: int) -> None:
    lane, owner, reader = ends
    for size in (1, 7, 4099, BLOCK, 5 * BLOCK + 12345):
        source = published(lane, owner, size)
        with_handle = RDMABuffer.from_bytes(RDMABuffer(source, engine=owner).to_bytes(), engine=reader)
        target = torch.zeros(size + shift, dtype=torch.uint8)[shift:]
        sums = BlockSums(0, size, size, BLOCK)
        start = with_handle.prepare_read(target, bulk=bulk, sums=sums)
        for _ in range(2):  # they begin anew each time
            start(30.0).get()
            assert torch.equal(target, source)
            assert sums.are_made == (lane.lane in MAKES_SUMS)
            if sums.are_made:
                assert found(sums) == kernels.checksum(source, BLOCK).tolist()


def test_parts_of_a_block_add_up(owner: Engine, reader: Engine) -> None:
    size = 3 * BLOCK + 4
    source = empty((size,), dtype=torch.uint8, engine=owner).copy_(torch.arange(size) % 251)
    buffer = RDMABuffer.from_bytes(RDMABuffer(source, engine=owner).to_bytes(), engine=reader)
    target = torch.zeros_like(source)
    total = np.zeros(4, np.int64)
    for first, end in ((0, BLOCK - 24), (BLOCK - 24, 2 * BLOCK + 8), (2 * BLOCK + 8, size)):
        sums = BlockSums(first, end - first, size, BLOCK)
        buffer[first:end].prepare_read(target[first:end], sums=sums)(30.0).get()
        assert sums.are_made and sums.first_block == first // BLOCK
        values = np.frombuffer(sums.values, np.int64)
        total[sums.first_block :][: len(values)] += values
    assert total.tolist() == kernels.checksum(source, BLOCK).tolist()


def test_memory_of_this_process(owner: Engine) -> None:
    source = torch.arange(300_000)
    target, sums = torch.zeros_like(source), BlockSums(0, source.nbytes, source.nbytes, BLOCK)
    RDMABuffer(source, engine=owner).prepare_read(target, sums=sums)(30.0).get()
    assert sums.are_made and found(sums) == kernels.checksum(source, BLOCK).tolist()


def test_what_cannot_be_summed_is_refused(owner: Engine) -> None:
    with pytest.raises(ConfigError, match="9 bytes from 0 on, of 100"):
        BlockSums(0, 9, 100, BLOCK)
    with pytest.raises(ConfigError, match="8 bytes from 4 on"):
        BlockSums(4, 8, 100, BLOCK)
    with pytest.raises(ConfigError, match="block_bytes is 12"):
        BlockSums(0, 8, 8, 12)
    matrix = torch.zeros(8, 8)
    with pytest.raises(ConfigError, match="contiguous memory"):
        RDMABuffer(matrix, engine=owner)[:, 0].prepare_read(torch.zeros(8), sums=BlockSums(0, 32, 256, BLOCK))


def test_sums_of_a_copy_within_this_process(owner: Engine) -> None:
    for size in (1, 4099, BLOCK, 5 * BLOCK + 12345):
        source, target = torch.randint(256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        sums = BlockSums(0, size, size, BLOCK)
        for into in (None, target):
            sums.make(source, into, engine=owner)
            assert sums.are_made and found(sums) == kernels.checksum(source, BLOCK).tolist()
        assert torch.equal(target, source)
    part = BlockSums(8, BLOCK, size, BLOCK)
    part.make(source[8 : 8 + BLOCK], engine=owner)
    rest = BlockSums(0, 8, size, BLOCK)
    rest.make(source[:8], engine=owner)
    tail = BlockSums(BLOCK + 8, BLOCK - 8, size, BLOCK)
    tail.make(source[BLOCK + 8 : 2 * BLOCK], engine=owner)
    total = np.zeros(2, np.int64)
    total[:1] += np.frombuffer(rest.values, np.int64)
    total += np.frombuffer(part.values, np.int64)
    total[1:] += np.frombuffer(tail.values, np.int64)
    assert total.tolist() == kernels.checksum(source[: 2 * BLOCK], BLOCK).tolist()
    with pytest.raises(ConfigError, match=r"target has 3 bytes of shape \(3,\), but must have 1048576"):
        part.make(source[8 : 8 + BLOCK], target[:3], engine=owner)
    with pytest.raises(ConfigError, match="source has 6 bytes"):
        BlockSums(0, 8, 8, BLOCK).make(source[:12:2], engine=owner)
