"""TorchTitan's own trainer in replicas that come and go: FSDP inside a replica, DiLoCo between them.

`pip install 'monarch-rdma[titan]'`, and `python -m examples.torchtitan`.
"""
