"""Groups of the core: members with ranks call the same collectives in the same order, and send each other messages.

For `monarch_rdma.collectives`, which says what the memory means. All calls wait, without the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .. import config
from .._engine import ffi, lib
from ..errors import ConfigError, class_of_kind
from .engine import Engine, raise_error, scratch, seconds
from .region import RemoteRegion

__all__ = [
    "ALGORITHMS",
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "DTYPES",
    "GATHER",
    "REDUCE",
    "REDUCE_SCATTER",
    "REDUCTIONS",
    "SCATTER",
    "Block",
    "CoreGroup",
    "has_algorithm",
]

BARRIER, BROADCAST = lib.MR_BARRIER, lib.MR_BROADCAST
ALL_REDUCE, REDUCE, REDUCE_SCATTER = lib.MR_ALL_REDUCE, lib.MR_REDUCE, lib.MR_REDUCE_SCATTER
ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL = lib.MR_ALL_GATHER, lib.MR_GATHER, lib.MR_SCATTER, lib.MR_ALL_TO_ALL
REDUCTIONS = {"sum": lib.MR_SUM, "avg": lib.MR_AVG, "min": lib.MR_MIN, "max": lib.MR_MAX, "product": lib.MR_PRODUCT}
_NAMES = {
    BARRIER: "barrier", BROADCAST: "broadcast", ALL_REDUCE: "all_reduce", REDUCE: "reduce",
    REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "all_gather", GATHER: "gather", SCATTER: "scatter",
    ALL_TO_ALL: "all_to_all",
}  # fmt: skip
ALGORITHMS = {
    "direct": lib.MR_DIRECT, "doubling": lib.MR_DOUBLING, "halving": lib.MR_HALVING, "ring": lib.MR_RING,
    "tree": lib.MR_TREE,
}  # fmt: skip
# Numbers of enum mr_dtype, by torch's names.
DTYPES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float32": 5, "float64": 6, "float16": 7, "bfloat16": 8,
    "float8_e4m3fn": 9, "float8_e5m2": 10, "float8_e4m3fnuz": 11, "float8_e5m2fnuz": 12, "bool": 13,
}  # fmt: skip
_SPIN = 125  # looks, about 3 us, where every member has a processor; more costs time slices where others run too

Block = tuple[int, int]  # address and size of contiguous memory that the caller keeps


def has_algorithm(kind: int, algorithm: int) -> bool:
    return bool(lib.mr_collective_has(kind, algorithm))


class CoreGroup:
    """One member's end of a group. Collectives: one at a time, from any thread; messages: from any thread."""

    def __init__(self, engine: Engine, rank: int, size: int, *, step_bytes: int, choices: int = 0) -> None:
        """choices: a digest of whatever else must be the same on all members."""
        self.engine = engine
        self.rank, self.size = rank, size
        # The algorithm for a kind, bytes in all and a dtype, where a call does not say; the same on all members.
        self.choose: Callable[[int, int, int], int] | None = None
        self.names: list[str] = []
        self._arenas: list[RemoteRegion] = []
        options = ffi.new("mr_group_options *")
        options.rank, options.size = rank, size
        options.step_bytes = step_bytes
        options.choices = choices
        options.message_bytes = config.get("collective_message_bytes")
        options.interrupted = lib.mr_python_interrupted
        options.spin = _SPIN if size <= len(os.sched_getaffinity(0)) else 0
        out, error = ffi.new("mr_group **"), scratch.error
        if kind := lib.mr_group_create(engine.handle, options, out, error):
            raise_error(error, kind, operation="create")
        self._handle = ffi.gc(out[0], _release)
        self._call = ffi.new("mr_collective *")
        # Addresses as integers: to make a pointer of each would take longer than a small collective.
        cells = ["uintptr_t[]", "uint64_t[]", "uintptr_t[]", "uint64_t[]"]
        self._cells = [ffi.new(cell, size) for cell in cells]
        inputs, input_bytes, outputs, output_bytes = self._cells
        self._call.inputs, self._call.input_bytes = ffi.cast("void **", inputs), input_bytes
        self._call.outputs, self._call.output_bytes = ffi.cast("void **", outputs), output_bytes

    @property
    def descriptor(self) -> bytes:
        """What the other members need to join."""
        length = lib.mr_group_descriptor(self._handle, ffi.NULL, 0)
        out = ffi.new("uint8_t[]", length)
        lib.mr_group_descriptor(self._handle, out, length)
        return bytes(ffi.buffer(out))

    def join(self, descriptors: Sequence[bytes], names: Sequence[str], timeout: float | None) -> None:
        """Meets the others, given all descriptors by rank. `names` are for messages."""
        self.names = list(names)
        self._arenas = [RemoteRegion(self.engine, descriptor) for descriptor in descriptors]
        if len(descriptors) != self.size:
            raise ConfigError(f"descriptors has {len(descriptors)} entries for a group of {self.size} members")
        kept = [ffi.from_buffer("uint8_t[]", descriptor) for descriptor in descriptors]
        lengths = ffi.new("uint64_t[]", [len(each) for each in descriptors])
        error = scratch.error
        if kind := lib.mr_group_join(self._handle, ffi.new("uint8_t *[]", kept), lengths, seconds(timeout), error):
            self._raise(error, kind, "join")

    def run(
        self,
        kind: int,
        inputs: Sequence[Block] = (),
        outputs: Sequence[Block] = (),
        *,
        root: int = 0,
        dtype: int = 0,
        reduction: int = 0,
        divisor: int = 0,
        algorithm: int | None = None,
        timeout: float = -1.0,
    ) -> None:
        """One collective; `timeout` in seconds, negative: none. One thread at a time.

        divisor: what an average divides the sum by; 0: the number of members.
        """
        call = self._call
        call.kind, call.root, call.dtype, call.reduction, call.divisor = kind, root, dtype, reduction, divisor
        call.num_inputs, call.num_outputs = len(inputs), len(outputs)
        addresses, sizes, to, to_sizes = self._cells
        if len(inputs) > self.size or len(outputs) > self.size:
            raise ConfigError(f"{len(inputs)} inputs and {len(outputs)} outputs for a group of {self.size} members")
        for i, (address, size) in enumerate(inputs):
            addresses[i], sizes[i] = address, size
        for i, (address, size) in enumerate(outputs):
            to[i], to_sizes[i] = address, size
        if algorithm is None:
            algorithm = 0 if self.choose is None else self.choose(kind, self._bytes(kind, inputs, outputs), dtype)
        call.algorithm = algorithm
        error = scratch.error
        if failed := lib.mr_group_run(self._handle, call, timeout, error):
            self._raise(error, failed, _NAMES[kind])

    def _bytes(self, kind: int, inputs: Sequence[Block], outputs: Sequence[Block]) -> int:
        """What a collective is about: a tensor that all have, or all members' parts together."""
        if kind in (GATHER, SCATTER):
            return self.size * max(size for _, size in (*inputs, *outputs))
        return max(sum(size for _, size in blocks) for blocks in (inputs, outputs))

    def send(self, to: int, tag: int, block: Block, timeout: float = -1.0) -> None:
        error = scratch.error
        address = ffi.cast("void *", block[0])
        if kind := lib.mr_group_send(self._handle, to, tag, address, block[1], timeout, error):
            self._raise(error, kind, "send", block[1], to)

    def receive(self, sender: int, tag: int, block: Block, timeout: float = -1.0) -> int:
        """From rank `sender`, or from anybody (-1). Returns whose message it was."""
        error, came_from = scratch.error, ffi.new("uint32_t *")
        address = ffi.cast("void *", block[0])
        if kind := lib.mr_group_receive(self._handle, sender, tag, address, block[1], timeout, came_from, error):
            self._raise(error, kind, "receive", block[1], sender)
        return int(came_from[0])

    def abort(self, reason: str) -> None:
        """Makes the group fail on all members."""
        lib.mr_group_abort(self._handle, reason.encode(), ffi.NULL)

    @property
    def failed_rank(self) -> int | None:
        """Whose fault it is that the group has failed; None where it has not."""
        rank = ffi.new("int64_t *")
        return int(rank[0]) if lib.mr_group_failure(self._handle, rank, ffi.NULL) else None

    @property
    def failure(self) -> Exception | None:
        """What every call raises now, where the group has failed."""
        error = ffi.new("mr_error *")
        kind = lib.mr_group_failure(self._handle, ffi.NULL, error)
        if not kind:
            return None
        rank = self.failed_rank
        peer = self.names[rank] if rank is not None and rank < len(self.names) else None
        return class_of_kind(kind)(ffi.string(error.message).decode("utf-8", "replace"), peer=peer)

    def is_on_this_host(self, rank: int, timeout: float) -> bool:
        """Whether that member's memory is mapped here. PeerLost, TransferTimeout."""
        return self._arenas[rank].lane(timeout) == "shm-mapped"

    def lack(self, rank: int) -> None:
        """Makes all collectives fail, on all members, because this one has left."""
        lib.mr_group_lack(self._handle, rank)

    def is_lost(self, rank: int) -> bool:
        """Or has left."""
        return bool(lib.mr_group_is_lost(self._handle, rank))

    def close(self) -> None:
        """Leaves the group; what is pending here ends with Cancelled. The others get what this member has given."""
        if not self.engine.is_forked:
            lib.mr_group_close(self._handle)

    def _raise(self, error: Any, kind: int, operation: str, size: int | None = None, peer: int = -1) -> None:
        if (raised := _interrupted.__dict__.pop("by", None)) is not None:
            raise raised
        failed = self.failed_rank
        rank = peer if failed is None else failed
        name = self.names[rank] if 0 <= rank < len(self.names) else None
        raise_error(error, kind, operation=operation, peer=name, size=size)


_interrupted = threading.local()  # by: what a signal handler raised while this thread waited in the core


def _keep_interruption(_: Any, raised: BaseException, __: Any) -> None:
    _interrupted.by = raised


@ffi.def_extern(name="mr_python_interrupted", error=1, onerror=_keep_interruption)  # type: ignore[untyped-decorator]
def _let_handlers_run() -> int:
    """Where a signal came, Python runs its handler in here, if this is the main thread: Ctrl-C raises."""
    return 0


def _release(handle: Any) -> None:
    lib.mr_group_close(handle)
    lib.mr_group_free(handle)
