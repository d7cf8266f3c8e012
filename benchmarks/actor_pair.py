"""A client of actors that answers questions about their speed: the same program on monarch_rdma and on torchmonarch."""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from lines import answer_lines

DISTRIBUTIONS = {"monarch_rdma": "monarch-rdma", "monarch": "torchmonarch"}


def actor_classes(package: str) -> dict[str, Any]:
    """The actors, on the package's base class. Only those that use torch import it."""
    actor = importlib.import_module(f"{package}.actor")

    class Sync(actor.Actor):  # type: ignore[misc, name-defined]
        @actor.endpoint
        def nothing(self) -> None:
            return None

        @actor.endpoint
        def pid(self) -> int:
            return os.getpid()

        @actor.endpoint
        def use_torch(self) -> float:
            import torch

            return float(torch.ones(2).sum())

        @actor.endpoint
        def take(self, tensor: Any) -> int:
            return int(tensor.numel())

        @actor.endpoint
        def total(self, tensor: Any) -> int:
            return int(tensor.sum())

    class Async(actor.Actor):  # type: ignore[misc, name-defined]
        @actor.endpoint
        async def nothing(self) -> None:
            return None

    class Owner(actor.Actor):  # type: ignore[misc, name-defined]
        @actor.endpoint
        async def buffer(self, size: int, shared: bool) -> Any:
            self.tensor = numbers(package, size, shared)
            self.handle = importlib.import_module(f"{package}.rdma").RDMABuffer(raw(self.tensor))
            return self.handle

    class Reader(actor.Actor):  # type: ignore[misc, name-defined]
        @actor.endpoint
        async def read(self, buffer: Any, size: int, count: int) -> tuple[list[float], int]:
            """Seconds of each read, and the sum of what was read last."""
            tensor = self.__dict__.setdefault(f"into_{size}", numbers(package, size, False))
            tensor.zero_()
            samples = []
            for _ in range(count):
                started = time.perf_counter()
                await buffer.read_into(raw(tensor))
                samples.append(time.perf_counter() - started)
            return samples, int(tensor.sum())

    return {"sync": Sync, "async": Async, "owner": Owner, "reader": Reader}


def numbers(package: str, size: int, shared: bool) -> Any:
    """int32 0, 1, 2, ... in `size` bytes: in shared memory, where it is wanted and the package has any."""
    import torch

    tensor = torch.arange(size // 4, dtype=torch.int32)
    share = getattr(importlib.import_module(f"{package}.rdma"), "share", None)
    return share(tensor) if shared and share else tensor


def raw(tensor: Any) -> Any:
    """Its bytes, as torchmonarch wants them."""
    import torch

    return tensor.view(torch.uint8).flatten()


class Client:
    """Calls what the question names. Seconds are measured here, or in the actor where it says so."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._actor = importlib.import_module(f"{package}.actor")
        self._classes = actor_classes(package)
        self._procs: list[Any] = []
        self._meshes: dict[tuple[str, int], Any] = {}
        self._tensor: tuple[tuple[int, bool], Any] = ((0, False), None)
        self._buffer: tuple[tuple[int, bool], Any] = ((0, False), None)

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def close(self) -> None:
        for procs in self._procs:
            procs.stop().get(timeout=15)

    def _mesh(self, kind: str, processes: int = 1) -> Any:
        """Actors in processes of their own; made when first asked for."""
        key = kind, processes
        if key not in self._meshes:
            procs = self._actor.this_host().spawn_procs({"ranks": processes} if processes > 1 else None)
            self._procs.append(procs)
            self._meshes[key] = procs.spawn(kind, self._classes[kind])
        return self._meshes[key]

    def name(self) -> str:
        distribution = DISTRIBUTIONS[self._package]
        return f"{distribution} {version(distribution)}"

    def pid_of_actor(self) -> int:
        return int(self._mesh("sync").pid.call_one().get())

    def round_trips(self, kind: str, count: int) -> list[float]:
        call_one = self._mesh(kind).nothing.call_one
        return timed(lambda: call_one().get(), count)

    def pipelined(self, number: int) -> float:
        """Seconds for each of `number` calls that are in flight together."""
        call_one = self._mesh("sync").nothing.call_one
        return timed(lambda: [future.get() for future in [call_one() for _ in range(number)]], 1)[0] / number

    def broadcasts(self, number: int) -> float:
        """Seconds for each, until the last has been carried out."""
        nothing = self._mesh("sync").nothing

        def burst() -> None:
            for _ in range(number):
                nothing.broadcast()
            nothing.call_one().get()

        return timed(burst, 1)[0] / number

    def send_tensor(self, size: int, shared: bool, count: int) -> list[float]:
        """Seconds of each call with a tensor as its argument."""
        mesh = self._mesh("sync")
        if self._tensor[0] != (size, shared):
            self._tensor = (size, shared), numbers(self._package, size, shared)
            if mesh.total.call_one(self._tensor[1]).get() != sum_of_numbers(size):
                raise RuntimeError(f"{self._package} delivered wrong bytes")
        tensor = self._tensor[1]
        return timed(lambda: mesh.take.call_one(tensor).get(), count)

    def read_buffer(self, size: int, shared: bool, count: int) -> list[float]:
        """Seconds of each read of one actor's RDMABuffer, measured inside another actor."""
        if self._buffer[0] != (size, shared):
            self._buffer = (size, shared), self._mesh("owner").buffer.call_one(size, shared).get()
        buffer = self._buffer[1]
        samples, total = self._mesh("reader").read.call_one(buffer, size, count).get()
        if total != sum_of_numbers(size):
            raise RuntimeError(f"{self._package} read wrong bytes")
        return list(samples)

    def call_all(self, processes: int, count: int) -> list[float]:
        """Seconds of each call of the actors of all processes."""
        nothing = self._mesh("sync", processes).nothing
        return timed(lambda: nothing.call().get(), count)

    def sum_bytes(self, processes: int, fanout: int, merged: bool) -> int:
        """Of monarch_rdma: bytes of all answers that reach the client for one sum of a number of each process."""
        from monarch_rdma import config
        from monarch_rdma.actor.runtime import message
        from monarch_rdma.actor.runtime.proc import Proc

        pids = self._mesh("sync", processes).pid
        total = self._actor.Accumulator(pids, 0, operator.add, merge=operator.add if merged else None)
        on_frame, sizes = Proc.on_frame, []

        def counting(proc: Any, frame: Any) -> None:
            if frame.kind == message.SEND:
                sizes.append(len(frame.body))
            on_frame(proc, frame)

        with config.configured(cast_fanout=fanout):
            total.accumulate().get()
            Proc.on_frame = counting  # type: ignore[method-assign]
            try:
                total.accumulate().get()
            finally:
                Proc.on_frame = on_frame  # type: ignore[method-assign]
        return sum(sizes)

    def spawn(self, processes: int, use_torch: bool) -> float:
        """Seconds from nothing to every process's answer to a first call. The processes are stopped afterwards."""
        if use_torch:
            importlib.import_module("torch")
        started = time.perf_counter()
        procs = self._actor.this_host().spawn_procs({"ranks": processes})
        mesh = procs.spawn("first", self._classes["sync"])
        answers = (mesh.use_torch if use_torch else mesh.nothing).call().get()
        elapsed = time.perf_counter() - started
        if len(answers) != processes:
            raise RuntimeError(f"{len(answers)} of {processes} processes answered")
        procs.stop().get(timeout=30)
        return elapsed


def sum_of_numbers(size: int) -> int:
    count = size // 4
    return count * (count - 1) // 2


def timed(step: Callable[[], object], count: int) -> list[float]:
    """Seconds of each time."""
    clock, samples = time.perf_counter, []
    for _ in range(count):
        started = clock()
        step()
        samples.append(clock() - started)
    return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=list(DISTRIBUTIONS), default="monarch_rdma")
    package = parser.parse_args().package
    answer_lines(lambda: Client(package))
