"""What this process can use, under the names that Monarch gives these questions."""

from __future__ import annotations

import ctypes

from .. import config

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
    """Whether there is a card that this library can drive: one with reliable connections (InfiniBand, RoCE, iWARP), and
    a verbs lane in this build.
    """
    return "verbs" in config.LANES and has_reliable_device()


def is_rdma_available() -> bool:
    """Monarch's older name of is_ibverbs_available."""
    return is_ibverbs_available()


class _Device(ctypes.Structure):
    """The beginning of struct ibv_device (infiniband/verbs.h)."""

    _fields_ = (("ops", ctypes.c_void_p * 2), ("node_type", ctypes.c_int), ("transport_type", ctypes.c_int))


_WITH_RELIABLE_CONNECTIONS = (0, 1)  # IBV_TRANSPORT_IB (also RoCE), IBV_TRANSPORT_IWARP


def has_reliable_device(library: str = "libibverbs.so.1") -> bool:
    """Whether libibverbs is there and lists a device with reliable connections. EFA and usNIC have none."""
    try:
        verbs = ctypes.CDLL(library)
    except OSError:
        return False
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.POINTER(_Device))
    verbs.ibv_free_device_list.argtypes = (ctypes.POINTER(ctypes.POINTER(_Device)),)
    count = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return False  # ENOSYS where the kernel has no RDMA: no devices
    try:
        return any(devices[i].contents.transport_type in _WITH_RELIABLE_CONNECTIONS for i in range(count.value))
    finally:
        verbs.ibv_free_device_list(devices)
