"""Real text without a download: Python's own documentation and the sources of its standard library."""

from __future__ import annotations

import pydoc_data.topics
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT_BYTES, HELD_OUT_BYTES = 4_000_000, 200_000


class Text:
    """Bytes as tokens. The same on every host with the same version of Python."""

    def __init__(self, data: bytes, held_out_bytes: int = HELD_OUT_BYTES) -> None:
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.training, self.held_out = tokens[:-held_out_bytes], tokens[-held_out_bytes:]

    @classmethod
    @cache
    def of_python(cls) -> Text:
        topics = pydoc_data.topics.topics
        data = bytearray("\n".join(topics[name] for name in sorted(topics)).encode())
        for path in _sources(Path(sysconfig.get_paths()["stdlib"])):
            data += path.read_bytes()
            if len(data) >= TEXT_BYTES:
                break
        return cls(bytes(data[:TEXT_BYTES]))


def _sources(library: Path) -> list[Path]:
    """The library's modules, without tests, tables and what was installed later, in an order that mixes all kinds."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
    found = sorted(path for path in library.rglob("*.py") if not left_out & set(path.relative_to(library).parts))
    random.Random(0).shuffle(found)
    return found


class Batches:
    """An endless sequence of batches. Each is a function of the seed, the shard and its number in the sequence, so that
    the position is all there is to save.
    """

    def __init__(self, tokens: Tensor, *, size: int, length: int, seed: int, shard: int = 0) -> None:
        """`size` passages of `length` tokens each. `shard`: who takes part in a training, each reading passages of its
        own.
        """
        self._tokens = tokens
        self._size, self._length = size, length
        self._name = f"{seed}/{shard}"
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens, and for each of them the token that follows: two tensors of (size, length), int64."""
        chance = random.Random(f"{self._name}/{self.position}")
        starts = [chance.randrange(len(self._tokens) - self._length) for _ in range(self._size)]
        passages = torch.stack([self._tokens[start : start + self._length + 1] for start in starts]).long()
        self.position += 1
        return passages[:, :-1], passages[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
