"""The lanes that the conformance suite runs over, each as the engine options that leave nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch_rdma.rdma import is_ibverbs_available


@dataclass(frozen=True)
class Lane:
    id: str
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = False  # regions live in memory from zeros()/share()
    lane: str = ""  # what explain() must say

    def __str__(self) -> str:
        return self.id


LANES = [
    Lane("shm-mapped", {"lanes": "shm", "shm_process_vm": False}, shared=True, lane="shm-mapped"),
    Lane("shm-process_vm", {"lanes": "shm", "shm_mapped": False}, lane="shm-process_vm"),
    Lane("tcp", {"lanes": "tcp"}, lane="tcp"),
    Lane("tcp-across-hosts", {"lanes": "tcp", "same_host_unix": False}, lane="tcp"),
    Lane("tcp-bulk-tls", {"lanes": "tcp", "same_host_unix": False, "bulk_tls": True}, lane="tcp"),
]
if is_ibverbs_available():  # on hosts with a card, and in the virtual machine of the RDMA tests
    LANES.append(Lane("verbs", {"lanes": "verbs"}, lane="verbs"))
