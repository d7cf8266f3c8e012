"""Real RDMA verbs without a card: a small virtual machine with the kernel's Soft-RoCE (rdma_rxe), or two, linked.

`image` makes what the machine boots, once; `machine` boots it and runs commands inside; `python tests/rdma_vm` does so
from a shell. `guest/` are the tests that run inside.
"""
