"""A client that waits for processes which do not come up: their bootstrap waits for ever. Prints "ready" then."""

from __future__ import annotations

import os
import threading

from monarch_rdma.actor import this_host

READING, WRITING = os.pipe()
os.set_inheritable(WRITING, True)


def wait_forever() -> None:
    with open(f"/proc/{CLIENT}/fd/{WRITING}", "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    threading.Event().wait()


def say_ready() -> None:
    with open(READING) as pipe:
        print(*[int(pipe.readline()) for _ in range(2)], flush=True)
        print("ready", flush=True)


CLIENT = os.getpid()

if __name__ == "__main__":
    threading.Thread(target=say_ready, daemon=True).start()
    this_host().spawn_procs({"n": 2}, bootstrap=wait_forever)
