"""A client that forks: the child is another client of the same workers, which stay when it ends as programs do."""

from __future__ import annotations

import os
import sys

from monarch_rdma.actor import Actor, endpoint, this_host


class Counter(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def next(self) -> int:
        self.count += 1
        return self.count


def counters() -> Counter:
    return this_host().spawn_procs({"n": 2}).spawn("counters", Counter)


def main() -> None:
    mine = counters()
    print("parent", mine.next.call().get(20).values(), flush=True)
    pid = os.fork()
    if pid == 0:
        futures = [mine.next.call() for _ in range(2000)]
        print("an old reference:", [future.get(20) for future in futures][-1].values(), flush=True)
        print("child", counters().next.call().get(20).values(), flush=True)
        sys.exit(5)
    print("child's exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print("parent", mine.next.call().get(20).values())


if __name__ == "__main__":
    main()
