"""Values to the bodies of messages and back: small ones as bytes, large tensors and arrays by one-sided reads.

out = encode(value)                    # the sender; holds `out` until the receivers have fetched
incoming = Incoming(out.body)          # each receiver
incoming.fetch(timeout=60)
value = incoming.load()
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from ... import config
from ...errors import ConfigError, ProtocolError
from ...rdma.buffer import RDMABuffer
from ...rdma.engine import Engine
from .content import Content
from .frame import FRAMED_PICKLE, FRAMED_SAFE, MAX_PAYLOAD, Frame, write_frame

__all__ = ["CODECS", "Incoming", "Outgoing", "encode", "encode_call", "is_pickled"]

CODECS = ("pickle", "safe")
_PICKLE, _SAFE = 0x80, 0x02  # first bytes of bodies that are one stream
_SCALARS = frozenset({NoneType, bool, int, float, str, bytes})
_MOST_ITEMS = 64  # of a container that is looked through; a pickler is quicker for more
_DEPTH = 3
_dumps, _loads = pickle.dumps, pickle.loads


class Outgoing:
    """An encoded value. `body` is all that travels in the message; `num_large` regions of this process go with it.

    Hold it until every receiver has fetched them, and leave their tensors as they are until then: the bytes are read in
    place. Letting go of it releases them.
    """

    __slots__ = ("_held", "body", "num_large", "passengers")

    def __init__(self, body: bytes, held: Sequence[RDMABuffer] = (), passengers: Sequence[Any] = ()) -> None:
        """`passengers`: what is in it whose owner wants to know its way; see content.note_passenger."""
        self.body = body
        self.passengers = passengers
        self.num_large = len(held)
        self._held = held

    @property
    def is_released(self) -> bool:
        """Whether nothing of it can be fetched any more. False where everything is in the body."""
        return self.num_large > 0 and not self._held

    def release(self) -> None:
        """Ends access to the large buffers. Their memory stays until nobody is in it; again is no error."""
        held, self._held = self._held, ()
        for buffer in held:
            try:
                buffer.drop()
            except ConfigError:  # its engine was closed, or is our parent's: there is nothing to end
                return

    def __del__(self) -> None:
        if self._held:
            self.release()

    def __repr__(self) -> str:
        return f"<Outgoing of {len(self.body)} bytes and {self.num_large} large buffers>"


class Incoming:
    """A message's value before it is loaded. Parsing touches nothing but the body, and asks nobody."""

    __slots__ = ("_body", "_frame", "_loaded", "_relayed")

    def __init__(self, body: bytes | memoryview, *, accept: str = "pickle", engine: Engine | None = None) -> None:
        """`accept`: "safe" refuses pickles. `engine`: reads through it; None takes the default one.

        Raises ProtocolError where the body is malformed or refused.
        """
        self._body: bytes | memoryview = body
        self._frame: Frame | None = None
        self._relayed: tuple[Outgoing, ...] = ()
        self._loaded = False
        if not body:
            raise ProtocolError("a message's body is empty")
        first = body[0]
        if first in (_PICKLE, FRAMED_PICKLE):
            if accept != "pickle":
                raise ProtocolError("the message is a pickle, but only codec='safe' is accepted here")
            if first == _PICKLE:
                return
        elif first not in (_SAFE, FRAMED_SAFE):
            raise ProtocolError(f"a message's body begins with {first:#x}, which is none of the known codecs")
        if first != _SAFE:
            self._frame = Frame(memoryview(body).cast("B"), engine)

    @property
    def large_bytes(self) -> int:
        """Bytes still to be fetched; 0 for most messages."""
        return 0 if self._frame is None else self._frame.large_bytes

    def fetch(self, *, timeout: float | None) -> None:
        """Reads all large buffers into memory of this process, all at once; maps those sent as views where it can.

        `timeout`: seconds for all, None for no limit. Raises what reads raise: PeerLost, TransferTimeout, AccessDenied
        (the sender has released them), ...; ProtocolError; MemoryError. Then it may be called again.
        """
        if self._frame is not None and not self._loaded:
            self._frame.fetch(timeout)

    def relay(self) -> Outgoing:
        """The same value for others, who read what was fetched from the memory of this process.

        Between `fetch` and `load`; else ConfigError. As long as it is not released, `load` makes copies, so that what
        others read stays as it was sent.
        """
        if self._loaded:
            raise ConfigError("the message was loaded; relay it before that")
        if self._frame is None:
            return Outgoing(bytes(self._body))
        out = Outgoing(*self._frame.relay())
        if out.num_large:
            self._relayed = (*self._relayed, out)
        return out

    def load(self) -> Any:
        """The value; once, after `fetch`. Its tensors and arrays are in memory of their own, except for mapped views.

        Raises ConfigError before `fetch` and at a second call; what unpickling raises; ProtocolError.
        """
        if self._loaded:
            raise ConfigError("the message was loaded already; its value exists once")
        frame, body = self._frame, self._body
        if frame is None:
            self._loaded, self._body = True, b""
            if body[0] == _PICKLE:
                return _loads(body)
            return _decode_safe(memoryview(body)[1:], [])
        copy = not all([out.is_released for out in self._relayed])
        stream, taken = frame.take(copy=copy)
        self._loaded, self._body, self._frame, self._relayed = True, b"", None, ()
        if frame.tag == FRAMED_PICKLE:
            return _loads(stream, buffers=taken)
        return _decode_safe(stream, taken)


def encode(value: Any, *, codec: str = "pickle", view: bool = False, engine: Engine | None = None) -> Outgoing:
    """Encodes any value that can be pickled; with codec="safe" the types of `safe_codec` alone.

    `view`: receivers on this host map large tensors and arrays that are in memory of `monarch_rdma.rdma.empty`,
    `zeros`, `share` or `share_`, and see it without a copy: read-only (writing to such a tensor ends the process), and
    with all changes that are made to it. `engine`: the one that has the memory; None takes the default one.

    Raises what pickling raises (TypeError, PicklingError); ConfigError; RegistrationError, ResourceExhausted.
    """
    if codec == "pickle":
        if _is_plain(value, _DEPTH):
            body = _dumps(value, 5)
            if len(body) <= MAX_PAYLOAD:
                return Outgoing(body)
            content = Content(body, [], [], [])
        else:
            from .pickling import pickled

            content = pickled(value, _inline_bytes())
        return _outgoing(FRAMED_PICKLE, b"", content, view, engine)
    if codec == "safe":
        from .safe_codec import encode_safe

        return _outgoing(FRAMED_SAFE, bytes((_SAFE,)), encode_safe(value), view, engine)
    raise ConfigError(f"codec is {codec!r}, but must be one of {', '.join(map(repr, CODECS))}")


def is_pickled(body: bytes | memoryview) -> bool:
    """Whether loading this body would unpickle."""
    return bool(body) and body[0] in (_PICKLE, FRAMED_PICKLE)


_NO_ARGUMENTS = Outgoing(_dumps(((), {}), 5))


def encode_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    codec: str = "pickle",
    view: bool = False,
    engine: Engine | None = None,
) -> Outgoing:
    """Like encode((args, kwargs)), quicker where there are none."""
    if not args and not kwargs and codec == "pickle":
        return _NO_ARGUMENTS
    return encode((args, kwargs), codec=codec, view=view, engine=engine)


def _outgoing(tag: int, prefix: bytes, content: Content, view: bool, engine: Engine | None) -> Outgoing:
    if not content.slots and len(content.stream) <= MAX_PAYLOAD:
        return Outgoing(prefix + content.stream if prefix else content.stream, passengers=content.passengers)
    return Outgoing(*write_frame(tag, content, _inline_bytes(), view, engine), content.passengers)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether it is small and of builtin types alone, so that the quickest pickler will do."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        if not _SCALARS.issuperset(map(type, value)):
            return False
        items: Any = value.values()
    elif kind is tuple or kind is list:
        items = value
    else:
        return False
    if len(items) > _MOST_ITEMS:
        return False
    if _SCALARS.issuperset(map(type, items)):
        return True
    return depth > 0 and all([_is_plain(item, depth - 1) for item in items])


def _decode_safe(stream: memoryview, taken: list[Any]) -> Any:
    from .safe_codec import decode_safe

    return decode_safe(stream, taken)


_inline_bytes = config.Kept("message_inline_bytes", int)
