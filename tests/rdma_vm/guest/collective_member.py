"""collective_member.py RANK OPTIONS: a member of a group of two, one on each machine, without torch.

OPTIONS (JSON): those of the engine, and `secret` (a file). Prints JSON lines: its address; when /results/members has
the addresses of all, and each collective has given what it must, what went over which lane; then it goes on until the
group fails, and prints how.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from array import array
from typing import Any

import monarch_rdma
from monarch_rdma import config, errors
from monarch_rdma.rdma import Engine, Secret

# The package registers its backend with torch, whose import takes a minute here: its modules do without.
_PACKAGE = types.ModuleType("monarch_rdma.collectives")
_PACKAGE.__path__ = [os.path.join(os.path.dirname(monarch_rdma.__file__), "collectives")]
sys.modules[_PACKAGE.__name__] = _PACKAGE

from monarch_rdma.collectives.group import Group  # noqa: E402

MEMBERS = "/results/members"


def numbers(letter: str, count: int, seed: int) -> array[Any]:
    """Small whole ones, whose sums and products floats have exactly."""
    return array(letter, [(i * 7 + seed * 31) % 61 for i in range(count)])


def empty(letter: str, count: int) -> array[Any]:
    return array(letter, bytes(count * array(letter).itemsize))


def check(group: Group, letter: str, count: int) -> None:
    """Every collective once, of `count` elements or some more."""
    ranks, rank = range(group.size), group.rank
    everyone = [numbers(letter, count, each) for each in ranks]
    reduced = {
        "sum": [sum(column) for column in zip(*everyone, strict=True)],
        "max": [max(column) for column in zip(*everyone, strict=True)],
    }
    for op, expected in reduced.items():
        out = numbers(letter, count, rank)
        group.all_reduce(out, op=op)
        assert out.tolist() == expected, f"all_reduce {op}"
        out = numbers(letter, count, rank)
        group.reduce(out, 1, op=op)
        assert out.tolist() == (expected if rank == 1 else everyone[rank].tolist()), f"reduce {op}"
    shard = empty(letter, count + 3 * rank)
    group.reduce_scatter(shard, [numbers(letter, count + 3 * each, rank) for each in ranks])
    given = [numbers(letter, count + 3 * rank, each) for each in ranks]
    assert shard.tolist() == [sum(column) for column in zip(*given, strict=True)], "reduce_scatter"
    for root in ranks:
        out = numbers(letter, count, rank)
        group.broadcast(out, root)
        assert out == everyone[root], "broadcast"
        gathered = [empty(letter, count) for _ in ranks] if rank == root else None
        group.gather(gathered, everyone[rank], root)
        assert gathered is None or gathered == everyone, "gather"
        out = empty(letter, count)
        group.scatter(out, everyone if rank == root else None, root)
        assert out == everyone[rank], "scatter"
    uneven = [empty(letter, count + each) for each in ranks]
    group.all_gather(uneven, numbers(letter, count + rank, rank))
    assert uneven == [numbers(letter, count + each, each) for each in ranks], "all_gather"
    got = [empty(letter, count + each + 2 * rank) for each in ranks]
    group.all_to_all(got, [numbers(letter, count + rank + 2 * each, rank * 5 + each) for each in ranks])
    assert got == [numbers(letter, count + each + 2 * rank, each * 5 + rank) for each in ranks], "all_to_all"
    group.barrier()
    if rank == 0:
        group.send(everyone[0], to=1, tag=count)
    else:
        out = empty(letter, count)
        assert (group.receive(out, 0, tag=count), out) == (0, everyone[0]), "send"


def go_on(group: Group) -> dict[str, Any]:
    """Until it fails: how."""
    while True:
        out = numbers("i", 50_000, group.rank)
        began = time.monotonic()
        try:
            group.all_reduce(out)
        except errors.RdmaError as error:
            told = {"error": type(error).__name__, "text": str(error), "rank": group.failed_rank}
            return told | {"seconds": time.monotonic() - began}


def main(rank: int, options: dict[str, Any]) -> None:
    config.configure(collective_step_bytes=16 << 10)  # several steps each
    with Engine(secret=Secret.from_file(options.pop("secret")), name=f"member-{rank}", **options) as engine:
        say(address=engine.address)
        deadline = time.monotonic() + 60
        while not os.path.exists(MEMBERS):
            assert time.monotonic() < deadline, "nobody told the members"
            time.sleep(0.05)
        with open(MEMBERS) as file:
            members = json.load(file)
        with Group.form(members, engine=engine, timeout=60) as group:
            assert group.rank == rank
            for letter, count in (("i", 1), ("f", 1000), ("d", 777), ("q", 15_001)):
                check(group, letter, count)
            say(**{name: count for name, count in engine.counters().items() if name.endswith("_write_bytes")})
            say(**go_on(group))


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
