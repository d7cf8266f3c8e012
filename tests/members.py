"""Processes that make up a group, for tests: the same code runs in all of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from child import Child, ChildError

from monarch_rdma.rdma import Secret


class Members:
    """Children by rank. Their code sees `rank`, `size`, `group`, and what `collective_programs` has."""

    def __init__(self, children: Sequence[Child], make: Callable[[int], Child], setup: str) -> None:
        self.children = list(children)
        self._make = make
        self._setup = setup
        self.run(setup)  # imports torch, in all at the same time

    def replace_ended(self) -> None:
        """New processes in the places of those that have ended."""
        ended = [rank for rank, child in enumerate(self.children) if child.process.poll() is not None]
        for rank in ended:
            self.children[rank] = self._make(rank)
        self.run(self._setup, ended)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A member more, for as long as it is needed."""
        self.children.append(self._make(len(self.children)))
        try:
            self.run(self._setup, [len(self.children) - 1])
            yield
        finally:
            self.children.pop().close()

    def start(self, code: str, ranks: Sequence[int] | None = None, **names: Any) -> None:
        for rank in range(len(self.children)) if ranks is None else ranks:
            self.children[rank].start(code, **names)

    def finish(self, ranks: Sequence[int] | None = None) -> list[Any]:
        return [self.children[rank].finish() for rank in (range(len(self.children)) if ranks is None else ranks)]

    def run(self, code: str, ranks: Sequence[int] | None = None, **names: Any) -> list[Any]:
        self.start(code, ranks, **names)
        return self.finish(ranks)

    def form(self, ranks: Sequence[int] | None = None, **arguments: Any) -> None:
        ranks = range(len(self.children)) if ranks is None else ranks
        self.run(
            "group = Group.form(members, engine=engine, timeout=60, **arguments); rank, size = group.rank, group.size",
            ranks,
            members=[self.children[rank].address for rank in ranks],
            arguments=arguments,
        )


@contextmanager
def members(
    count: int,
    *,
    environment: dict[str, str] | None = None,
    setup: str = "from collective_programs import *",
    **options: Any,
) -> Iterator[Members]:
    """So many processes, as yet without a group. `setup`: the first code they run; `options`: of their engines."""
    secret = Secret.generate()
    with ExitStack() as stack:
        inside = ["env", *(f"{name}={value}" for name, value in (environment or {}).items())]

        def make(_: int) -> Child:
            child = Child(secret, inside=inside, **options)
            stack.callback(child.close)
            return child

        yield Members([make(rank) for rank in range(count)], make, setup)


__all__ = ["ChildError", "Members", "members"]
