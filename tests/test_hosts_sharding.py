"""Weights that lie on two hosts, fetched by a third: in another layout, over a bad network, and after a cut from whom
is left."""

from __future__ import annotations

from collections.abc import Callable

from hosts.network import Network

from monarch_rdma.rdma import Secret

ROWS = 3000
SERVE = """
from monarch_rdma.sharding import NameServer
server = NameServer(secret=secret, listen_host="eth0")
result = server.address
"""
# Two shards of rows; a host has one of each pair of replicas.
PUBLISH = """
import torch
from monarch_rdma.sharding import Layout, Mesh, NameDirectory, Shard, publish
layout = Layout((rows, 96), Mesh({"replica": 2, "shard": 2}), {"shard": Shard(0)})
whole = torch.arange(rows * 96, dtype=torch.float32).reshape(rows, 96)
kept = []
for shard in range(2):
    part, rank = whole.chunk(2)[shard].clone(), 2 * replica + shard
    more = {"layouts": {"w": layout}, "rank": rank, "ranks": 4, "engine": engine}
    kept.append(publish({"w": part}, "w", directory=NameDirectory(names, engine=engine), **more))
"""
# Three ranks of columns: strided reads from each shard.
PREPARE = """
import torch
from monarch_rdma.sharding import Layout, Mesh, NameDirectory, Reader, Shard
whole = torch.arange(rows * 96, dtype=torch.float32).reshape(rows, 96)
columns = Layout((rows, 96), Mesh({"tp": 3}), {"tp": Shard(1)})
parts = [torch.zeros(rows, 32) for _ in range(3)]
def reader(rank):
    more = {"layouts": {"w": columns}, "rank": rank, "ranks": 3, "engine": engine}
    return Reader("w", {"w": parts[rank]}, directory=NameDirectory(names, engine=engine), **more)
readers = [reader(rank) for rank in range(3)]
def fetch_all():
    for part in parts: part.zero_()
    reports = [each.fetch() for each in readers]
    return all(torch.equal(part, whole[:, 32 * i : 32 * i + 32]) for i, part in enumerate(parts))
"""


def test_other_layouts_and_what_is_left_after_a_cut(make_network: Callable[[int], Network], secret: Secret) -> None:
    network = make_network(3)
    here, *there = network.hosts
    impatient = {"heartbeat_timeout": 2.0, "heartbeat_interval": 0.3}
    reader, *owners = (host.child(secret, **impatient) for host in (here, *there))
    names = reader.run(SERVE)
    for replica, owner in enumerate(owners):
        owner.run(PUBLISH, names=names, replica=replica, rows=ROWS)
    reader.run(PREPARE, names=names, rows=ROWS)
    network.shape(delay=0.002, loss=0.01)
    assert reader.run("result = fetch_all()")
    served = [owner.run("result = engine.counters()['tcp_bytes_served']") for owner in owners]
    assert all(each > 0 for each in served), "the replicas share the work"
    there[0].cut()
    assert reader.run("result = fetch_all()"), "the other replica has everything"
