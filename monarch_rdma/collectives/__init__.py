"""Collectives between processes, with or without torch.distributed. See docs/collectives.md.

import monarch_rdma.collectives                            # registers the backend
torch.distributed.init_process_group("cpu:monarch_rdma")   # DDP, FSDP2, DTensor and the rest run on it

group = Group.form([address, ...])                         # or without torch.distributed: the members' engines
group.all_reduce(tensor)
group = group.shrink()                                     # when a member was lost: the survivors go on
"""

from .group import Group
from .process_group import ProcessGroup, register

register()

__all__ = ["Group", "ProcessGroup", "register"]
