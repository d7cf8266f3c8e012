"""Ranks that tell each other something, all of them at once, over a torch.distributed Store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, TransferTimeout
from .deadline import Deadline, store_wait

__all__ = ["Gathering"]


class Gathering:
    """Something that these ranks do together. All of them make one equally often; nothing stays in the store."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        """ConfigError where `rank` is none of `ranks`, or there is no store."""
        if rank not in ranks:
            raise ConfigError(f"rank is {rank}, which is none of the ranks {list(ranks)[:8]} that take part")
        if store is None:
            raise ConfigError("there is no store: pass store, or begin with torch.distributed.init_process_group")
        self._store = store
        self._ranks = list(ranks)
        self._rank = rank
        group = f"monarch_rdma/gather/{hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        self._prefix = f"{group}/{store.add(f'{group}/begun/{rank}', 1)}"

    def gather(self, what: str, value: bytes, timeout: float | None) -> list[bytes]:
        """What each rank gave, in the order of `ranks`; each `what` once. TransferTimeout naming a rank that has not
        come in time.
        """
        deadline = Deadline(timeout)
        count = f"{self._prefix}/{what}"
        keys = [f"{count}/{rank}" for rank in self._ranks]
        self._store.set(f"{count}/{self._rank}", value)
        for rank, key in zip(self._ranks, keys, strict=True):
            if not store_wait(self._store, key, deadline.left()):
                raise TransferTimeout(f"rank {rank} has not come in {timeout} s", operation="gather")
        values = [self._store.get(key) for key in keys]
        if self._store.add(count, 1) == len(keys):  # the last one to leave
            for key in (*keys, count):
                self._store.delete_key(key)
        return values
