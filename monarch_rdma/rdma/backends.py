"""What this process can use, under the names that Monarch gives these questions."""

from __future__ import annotations

from .. import config
from . import verbs

__all__ = [
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]


class RDMATcpFallbackWarning(UserWarning):
    """A transfer went over tcp although a better lane was allowed, and why. Given once an engine."""


class RDMAReadTransferWarning(RDMATcpFallbackWarning):
    """It was a read."""


class RDMAWriteTransferWarning(RDMATcpFallbackWarning):
    """It was a write."""


def get_rdma_backend() -> str:
    """What reaches processes on other hosts: "ibverbs", "tcp", or "none" where the option lanes allows neither.

    Processes on one host use shared memory whatever this says; `RDMABuffer.backend` tells the lane of one buffer.
    """
    lanes = str(config.get("lanes")).split(",")
    if "verbs" in lanes and is_ibverbs_available():
        return "ibverbs"
    return "tcp" if "tcp" in lanes else "none"


def is_ibverbs_available() -> bool:
    """Whether transfers can go over an RDMA card: this build has the verbs lane, and a port of a card with reliable
    connections (InfiniBand or RoCE) is up and has an address. `monarch_rdma.rdma.verbs.describe` and `monarch-rdma
    doctor` say why not. Opens each card for a moment.
    """
    return "verbs" in config.LANES and bool(verbs.describe().rails)


def is_rdma_available() -> bool:
    """Monarch's older name of is_ibverbs_available."""
    return is_ibverbs_available()
