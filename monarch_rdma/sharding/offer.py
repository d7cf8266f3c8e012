"""What one rank publishes: which tensors it has, their layouts, and handles on its part of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from ..errors import ConfigError, ProtocolError
from ..rdma import Engine, RDMABuffer
from .layout import BoxLayout, Layout, Mesh, from_json, to_json
from .plan import TensorSpec, itemsize

__all__ = ["AnyLayout", "Offer", "OfferedTensor", "sources_of"]

AnyLayout = Layout | BoxLayout

_FORMAT = 2
T = TypeVar("T")


@dataclass(frozen=True)
class OfferedTensor:
    """`layout` None: every rank that offers a tensor of this name has all of it. `buffer` None: a part of nothing."""

    layout: AnyLayout | None
    dtype: str
    shape: tuple[int, ...]  # of the whole
    buffer: RDMABuffer | None

    @property
    def what(self) -> tuple[str, tuple[int, ...], AnyLayout | str]:
        """What all ranks have to agree on."""
        return self.dtype, self.shape, self.layout or "in whole"


@dataclass(frozen=True)
class Offer:
    """A value to send to readers, in a message, a store or a file; `word` is the rank's version word."""

    name: str
    rank: int
    ranks: int  # how many make an offer of this name
    host: str
    incarnation: int  # of the engine that serves it
    word: RDMABuffer
    tensors: dict[str, OfferedTensor]

    def to_bytes(self) -> bytes:
        """In a form that is safe to load from anybody. What it names stays alive until it is dropped."""
        layouts: dict[AnyLayout, int] = {}
        buffers: list[RDMABuffer] = []
        rows = []
        for name, tensor in self.tensors.items():
            which = None if tensor.layout is None else layouts.setdefault(tensor.layout, len(layouts))
            buffer = None if tensor.buffer is None else len(buffers)
            buffers += [] if tensor.buffer is None else [tensor.buffer]
            rows.append([name, which, tensor.dtype, tensor.shape, buffer])
        header = {"format": _FORMAT, "name": self.name, "rank": self.rank, "ranks": self.ranks, "host": self.host}
        header |= {"incarnation": self.incarnation, "word": self.word.to_bytes().decode()}
        header |= {"layouts": [to_json(layout) for layout in layouts], "tensors": rows}
        header |= {"buffers": RDMABuffer.many_to_json(buffers)}
        return json.dumps(header, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, engine: Engine | None = None) -> Offer:
        """The offer; its memory is reached through `engine` or the default one. ProtocolError where it is malformed."""
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r:.20}; this library reads {_FORMAT}")
            layouts = [from_json(layout) for layout in fields["layouts"]]
            buffers = RDMABuffer.many_from_json(fields["buffers"], engine=engine)
            tensors = {row[0]: _tensor(row, layouts, buffers) for row in fields["tensors"]}
            numbers = [fields[key] for key in ("rank", "ranks", "incarnation")]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"numbers {numbers!r:.80}")
            word = RDMABuffer.from_bytes(fields["word"].encode(), engine=engine)
            rank, ranks, incarnation = numbers
            return cls(str(fields["name"]), rank, ranks, str(fields["host"]), incarnation, word, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise ProtocolError(f"an offer of weights is malformed: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Offer.from_bytes, (self.to_bytes(),)


def _tensor(row: Any, layouts: Sequence[AnyLayout], buffers: Sequence[RDMABuffer]) -> OfferedTensor:
    name, which, dtype, shape, buffer = row
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise ValueError(f"tensor {name!r:.80}")
    itemsize(dtype)
    layout = _numbered("layout", which, layouts)
    whole = tuple(shape)
    if not all(type(n) is int and n >= 0 for n in whole) or (layout is not None and layout.shape != whole):
        raise ValueError(f"shape {shape!r:.80} of {name!r:.80}")
    return OfferedTensor(layout, dtype, whole, _numbered("buffer", buffer, buffers))


def _numbered(what: str, number: Any, things: Sequence[T]) -> T | None:
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(things):
        raise ValueError(f"{what} {number!r:.80}")
    return things[number]


def sources_of(offers: Sequence[Offer]) -> dict[str, TensorSpec]:
    """Layout and dtype of each tensor in these offers together. ConfigError where they do not fit together."""
    if not offers:
        raise ConfigError("offers is empty, but somebody has to have the weights")
    ranks, named = [offer.rank for offer in offers], sorted({offer.name for offer in offers})
    if len(set(ranks)) != len(ranks) or len(named) != 1:
        raise ConfigError(f"offers are of the ranks {ranks} and names {named}, but must be of one name, one a rank")
    found: dict[str, OfferedTensor] = {}
    holders: dict[str, list[int]] = {}
    for offer in offers:
        for name, tensor in offer.tensors.items():
            first = found.setdefault(name, tensor)
            if first.what != tensor.what:
                raise ConfigError(
                    f"{name!r} is {tensor.what} on rank {offer.rank}, but {first.what} on rank {holders[name][0]}"
                )
            holders.setdefault(name, []).append(offer.rank)
    return {name: TensorSpec(_layout(tensor, tuple(holders[name])), tensor.dtype) for name, tensor in found.items()}


def _layout(tensor: OfferedTensor, holders: tuple[int, ...]) -> AnyLayout:
    return tensor.layout or _whole(tensor.shape, holders)


@lru_cache(1024)  # many tensors of a model are alike
def _whole(shape: tuple[int, ...], holders: tuple[int, ...]) -> Layout:
    return Layout(shape, Mesh({"replica": len(holders)}, holders))
