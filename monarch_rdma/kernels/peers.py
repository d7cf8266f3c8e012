"""Collectives of GPUs over memory that all of them have mapped: each rank's kernel reads the others' data itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .arguments import COMPUTED, check_contiguous, check_device, check_dtype, check_no_gradient, check_tensor, refuse
from .native import native
from .reduce import check_op, reduce_reference

KINDS = ("one_shot", "two_shot", "reduce_scatter", "all_gather")
MOST_RANKS = 16
SIGNAL_BYTES = 4352  # at the begin of a workspace; hip_kernels/kernels.h: mr_gpu_signals


@dataclass(frozen=True)
class Workspaces:
    """The ranks' workspaces as this rank knows them. All ranks call the same collectives in the same order, on one
    stream each; a workspace is used by one at a time.
    """

    rank: int
    own: torch.Tensor  # uint8, contiguous: SIGNAL_BYTES of zeros, then room for data
    addresses: tuple[int, ...]  # of every rank's, as this rank's GPU reaches it; own.data_ptr() at `rank`
    stop: torch.Tensor  # one int32, 0, in pinned memory; set to 1 it ends this rank's waits, and out is undefined

    @property
    def room(self) -> int:
        """Bytes of data."""
        return self.own.numel() - SIGNAL_BYTES

    def data(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """This rank's data, `count` elements: what peer_collective takes."""
        size = count * dtype.itemsize
        if size > self.room:
            refuse(f"count must be at most {self.room // dtype.itemsize} of {dtype}, the workspace's room, got {count}")
        return self.own[SIGNAL_BYTES : SIGNAL_BYTES + size].view(dtype)


def peer_collective_reference(kind: str, data: Sequence[torch.Tensor], rank: int, op: str = "sum") -> torch.Tensor:
    """`out` of this rank, from all ranks' data."""
    if kind == "all_gather":
        return torch.cat([each.view(torch.uint8) for each in data]).view(data[0].dtype)
    total = reduce_reference(data, op)
    return total.chunk(len(data))[rank] if kind == "reduce_scatter" and total.numel() else total


def peer_collective(kind: str, out: torch.Tensor, workspaces: Workspaces, op: str = "sum") -> None:
    """`out` becomes what `kind` says of the data in all ranks' workspaces, when this rank's current stream comes to it.

    The same bits on all ranks: folded from rank 0 up, as `reduce` does. When the stream has gone past it, all ranks
    have read this one's data. Nothing checks that the ranks mean the same: see monarch_rdma.collectives.

    Args:
        kind: "one_shot" or "two_shot" all-reduce of as many elements as out has; "reduce_scatter" of as many for each
            rank; "all_gather" of out's elements, an equal share from each rank.
        out: contiguous, on the GPU of the workspace, begins at a multiple of 16 bytes.
        op: as of `reduce`; not used by all_gather.

    Raises ConfigError; also where there is no kernel for out's device.
    """
    ranks, own = len(workspaces.addresses), workspaces.own
    if kind not in KINDS:
        refuse(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 1 <= ranks <= MOST_RANKS:
        refuse(f"workspaces must be of 1 to {MOST_RANKS} ranks, got {ranks}")
    if not 0 <= workspaces.rank < ranks:
        refuse(f"workspaces.rank must be from 0 to {ranks - 1}, got {workspaces.rank}")
    check_tensor(out, "out")
    check_contiguous(out, "out")
    check_device([out], "out and the workspace", own.device)
    check_no_gradient([out], "peer_collective", "torch.distributed")
    check_dtype(out.dtype, COMPUTED, "the dtype of out")
    share = out.numel()
    if kind == "all_gather":
        if share % ranks:
            refuse(f"out must have an equal share of elements for each of {ranks} ranks, got {share}")
        share //= ranks
    else:
        check_op(op, out.dtype)
        share *= ranks if kind == "reduce_scatter" else 1
    workspaces.data(out.dtype, share)
    kernel = native("peer_collective", out.device)
    if kernel is None:
        refuse(f"out is on {out.device}, for which peer_collective has no kernel here: see monarch-rdma doctor")
    kernel(own, out, workspaces.stop, list(workspaces.addresses), workspaces.rank, kind, op)
