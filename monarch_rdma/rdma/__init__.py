"""One-sided reads and writes between the memory of processes. Source compatible with `monarch.rdma`, and more.

buffer = RDMABuffer(tensor)            # in the process that has the tensor; send `buffer` to another one
buffer.read_into(mine).get()           # there: copies the tensor's bytes; its owner's Python is not involved
"""

from .action import RDMAAction
from .backends import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from .block_sums import BlockSums
from .buffer import RDMABuffer
from .engine import Engine, default_engine
from .future import Future, TransferReport
from .listen import Listener, Peer, connect, listen
from .notification import Notifications
from .secret import Secret
from .shared import empty, share, share_, shared_memory, zeros
from .transfer import BULK_BYTES

__all__ = [
    "BULK_BYTES",
    "BlockSums",
    "Engine",
    "Future",
    "Listener",
    "Notifications",
    "Peer",
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "Secret",
    "TransferReport",
    "connect",
    "default_engine",
    "empty",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
    "listen",
    "share",
    "share_",
    "shared_memory",
    "zeros",
]
