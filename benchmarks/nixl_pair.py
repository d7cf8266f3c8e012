"""NIXL reads of ordinary memory between two processes: the initiator answers questions, it starts the target.

Without NIXL's progress thread, which would take a core from whoever else is being measured. So the target has to poll.
"""

from __future__ import annotations

import argparse
import base64
import os
import select
import time
from typing import Any

import torch
from lines import LineProcess, answer_lines


def agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,unused-ignore]

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class Target:
    """Owns the memory, and polls while a transfer is being measured: all the time over tcp, else each millisecond."""

    def __init__(self, tls: str) -> None:
        self._agent = agent("target")
        self._pause = 0 if tls == "tcp" else 1e-3
        self._tensor: torch.Tensor | None = None
        self._registered: Any = None

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def make(self, size: int) -> dict[str, Any]:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._tensor = torch.full((size,), 7, dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._tensor)
        descriptors = self._agent.get_serialized_descs(self._registered.trim())
        return {"metadata": _text(self._agent.get_agent_metadata()), "descriptors": _text(descriptors)}

    def meet(self, metadata: str) -> None:
        self._agent.add_remote_agent(base64.b64decode(metadata))

    def poll(self) -> None:
        """Returns when the next question is there."""
        while not select.select([0], [], [], self._pause)[0]:
            self._agent.get_new_notifs()

    def rest(self) -> None:
        """The question that ends the polling."""


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Initiator:
    def __init__(self, tls: str) -> None:
        self._target = LineProcess("nixl_pair.py", "--target", "--tls", tls)
        self._agent = agent("initiator")
        self._size = 0
        self._transfer: Any = None
        self._registered: Any = None
        self._name = ""

    def close(self) -> None:
        self._target.close()

    def _open(self, size: int) -> None:
        if self._size:
            self._agent.release_xfer_handle(self._transfer)
            self._agent.deregister_memory(self._registered)
            self._agent.remove_remote_agent(self._name)
        self._tensor = torch.zeros(size, dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._tensor)
        made = self._target.ask(do="make", size=size)
        self._name = self._agent.add_remote_agent(base64.b64decode(made["metadata"]))
        self._target.ask(do="meet", metadata=_text(self._agent.get_agent_metadata()))
        remote = self._agent.deserialize_descs(base64.b64decode(made["descriptors"]))
        self._transfer = self._agent.initialize_xfer("READ", self._registered.trim(), remote, self._name, b"")
        self._size = size

    def _read(self) -> None:
        state = self._agent.transfer(self._transfer)
        deadline = time.monotonic() + 60
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
            if time.monotonic() > deadline:
                raise RuntimeError("NIXL did not finish a read in 60 s")
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a read with {state}")

    def __call__(self, size: int, count: int) -> list[float]:
        if size != self._size:
            self._open(size)
        samples = []
        self._target.send(do="poll")
        for _ in range(count):
            started = time.perf_counter()
            self._read()
            samples.append(time.perf_counter() - started)
        self._target.send(do="rest")
        self._target.receive()
        self._target.receive()
        if not bool((self._tensor == 7).all()):
            raise RuntimeError("NIXL delivered wrong bytes")
        return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tls", choices=["default", "tcp"], default="default")
    parser.add_argument("--target", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.tls == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    side = Target if arguments.target else Initiator
    answer_lines(lambda: side(arguments.tls))
