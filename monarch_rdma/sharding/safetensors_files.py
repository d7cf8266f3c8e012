"""The safetensors format: where tensors lie in files; parts of them are read and written run of bytes by run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError
from .reads import Strided

__all__ = ["FILE_BYTES", "INDEX", "OF_A_SAVE", "Entry", "Files", "Kinds", "entries", "in_files", "index_of", "prepare"]

FILE_BYTES = 5 << 30  # after so many the next file begins
INDEX = "model.safetensors.index.json"
# Of a save that names its files in an index; without that they are what was left of one that did not come to its end.
OF_A_SAVE = re.compile(r"(model|objects)-[0-9a-f]{16}-.*")

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
_LETTERS = {name: letters for letters, name in _DTYPES.items()}
_MOST_HEADER = 100 << 20  # bytes, as other readers of the format have it
_BLOCK = 32 << 20  # bytes that are read or written at once

Kinds: TypeAlias = "Mapping[str, tuple[str, tuple[int, ...]]]"  # dtype and shape of tensors by name


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `offset` bytes from the begin of the file, row-major."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def box(self, start: tuple[int, ...], size: tuple[int, ...]) -> Strided:
        """These elements of it, by their place in the tensor."""
        strides = self.strides
        return Strided(size, strides, sum(at * stride for at, stride in zip(start, strides, strict=True)))

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


def entries(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of a safetensors file, of an index file with all files that it names, or of a folder with either.

    ConfigError where it is no such thing, or something is missing in it.
    """
    place = Path(path)
    if place.is_dir():
        files = [file for file in sorted(place.glob("*.safetensors")) if not OF_A_SAVE.fullmatch(file.name)]
        indices = sorted(place.glob("*.safetensors.index.json"), key=lambda file: (file.name != INDEX, file.name))
        index = indices[0] if indices else None
        if index is None and len(files) != 1:
            raise ConfigError(f"path is the folder {str(place)!r} with {len(files)} safetensors files and no index")
        place = index or files[0]
    if place.suffix != ".json":
        return _entries_of(place)
    try:
        where: dict[str, str] = json.loads(place.read_bytes())["weight_map"]
        named = {place.parent / Path(file).name: None for file in where.values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"path is {str(place)!r}, which is no index of safetensors files: {error}") from error
    found = {name: entry for file in named for name, entry in _entries_of(file).items()}
    if missing := sorted(set(where) - set(found)):
        raise ConfigError(f"{str(place)!r} names {missing[:4]}, which are in none of its files")
    return {name: found[name] for name in where}


def _entries_of(file: Path) -> dict[str, Entry]:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
        begin = 8 + length
        return {
            name: _entry(file, begin, size - begin, fields) for name, fields in header.items() if name != "__metadata__"
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"path is {str(file)!r}, which is no safetensors file: {error}") from error


def _entry(file: Path, begin: int, size: int, fields: Mapping[str, Any]) -> Entry:
    low, high = fields["data_offsets"]
    shape, dtype = tuple(fields["shape"]), _DTYPES[fields["dtype"]]
    if not all(type(number) is int and number >= 0 for number in (low, high, *shape)) or high > size:
        raise ValueError(f"bytes {low} to {high} of {size}, shape {shape}")
    if high - low != math.prod(shape) * getattr(torch, dtype).itemsize:
        raise ValueError(f"{high - low} bytes for shape {shape} of {dtype}")
    return Entry(file, begin + low, dtype, shape)


# --- making files


def in_files(kinds: Kinds, file_bytes: int) -> Iterator[dict[str, tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in order: the next file begins with the tensor that would make one too large.

    ConfigError where safetensors files do not know a dtype.
    """
    mine: dict[str, tuple[str, tuple[int, ...]]] = {}
    total = 0
    for name, (dtype, shape) in kinds.items():
        if dtype not in _LETTERS:
            raise ConfigError(f"{name!r} is {dtype}: safetensors files hold no such thing")
        size = _bytes_in(dtype, shape)
        if mine and total + size > file_bytes:
            yield mine
            mine, total = {}, 0
        mine[name] = dtype, shape
        total += size
    yield mine


def prepare(file: Path, kinds: Kinds, metadata: Mapping[str, str]) -> dict[str, Entry]:
    """The file with its header, and room for its tensors. Where several do it, they do it with the same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at, offsets = 0, {}
    in_order = sorted(kinds.items(), key=lambda item: -getattr(torch, item[1][0]).itemsize)  # so that all are aligned
    for name, (dtype, shape) in in_order:
        size = _bytes_in(dtype, shape)
        header[name] = {"dtype": _LETTERS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        offsets[name] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    _write_begin(file, len(text).to_bytes(8, "little") + text, begin + at)
    return {name: Entry(file, begin + offsets[name], dtype, shape) for name, (dtype, shape) in kinds.items()}


def index_of(names: Mapping[str, str], kinds: Kinds, **more: Any) -> bytes:
    """An index file: which file has which tensor. `more`: what else its metadata say."""
    total = sum(_bytes_in(*kinds[name]) for name in names)
    return json.dumps({"metadata": {"total_size": total, **more}, "weight_map": dict(names)}, indent=2).encode()


def _bytes_in(dtype: str, shape: tuple[int, ...]) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * itemsize


def _write_begin(file: Path, data: bytes, size: int) -> None:
    """Writes the begin of a file and gives it its size, without disturbing what others are writing to the rest."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, size)
        _write_all(fd, memoryview(data), 0, file)
    finally:
        os.close(fd)


def _write_all(fd: int, memory: memoryview, at: int, file: Path) -> None:
    """OSError that names the file."""
    while len(memory):
        try:
            done = os.pwrite(fd, memory, at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from None
        memory, at = memory[done:], at + done


# --- parts of files


class Files:
    """Open files, each once; ranges of them are read and written by pread and pwrite."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def sync(self) -> None:
        """Returns when what was written will outlast the machine."""
        for fd in self._open.values():
            os.fsync(fd)

    def _fd(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, self._flags, 0o666)
        return self._open[file]

    def read(self, entry: Entry, part: Strided, target: torch.Tensor) -> int:
        """Reads this part of a tensor into one of the same shape; returns the bytes. Straight into contiguous memory,
        else block by block.
        """
        dtype: torch.dtype = getattr(torch, entry.dtype)
        is_direct = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        if is_direct or target.numel() * entry.itemsize <= _BLOCK or not max(part.shape, default=1) > 1:
            block = target if is_direct else torch.empty(part.shape, dtype=dtype)
            done = self._read_runs(entry, part, block)
            if not is_direct:
                target.copy_(block)
            return done
        dim = next(d for d, n in enumerate(part.shape) if n > 1)
        half = part.shape[dim] // 2
        return sum(
            self.read(entry, part.narrowed(dim, low, n), target.narrow(dim, low, n))
            for low, n in ((0, half), (half, part.shape[dim] - half))
        )

    def _read_runs(self, entry: Entry, part: Strided, block: torch.Tensor) -> int:
        data = _bytes_of(block)
        size, offsets = _runs(part, block.element_size())
        for i, offset in enumerate(offsets.tolist()):
            self._fill(entry.file, data[i * size : (i + 1) * size], entry.offset + offset)
        return size * offsets.size

    def read_bytes(self, file: Path, offset: int, size: int) -> bytes:
        """These bytes of a file."""
        data = bytearray(size)
        self._fill(file, memoryview(data), offset)
        return bytes(data)

    def _fill(self, file: Path, memory: memoryview, at: int) -> None:
        fd = self._fd(file)
        while len(memory):
            got = os.preadv(fd, [memory], at)
            if got == 0:
                raise OSError(f"{str(file)!r} has become shorter while it was read")
            memory, at = memory[got:], at + got

    def write(self, entry: Entry, part: Strided, values: torch.Tensor) -> int:
        """Writes values, of any strides and on any device, as this part of a tensor; returns the bytes."""
        if values.nbytes > _BLOCK and not (values.is_contiguous() and values.device.type == "cpu"):
            dim = next(d for d, n in enumerate(part.shape) if n > 1)
            half = part.shape[dim] // 2
            return sum(
                self.write(entry, part.narrowed(dim, low, n), values.narrow(dim, low, n))
                for low, n in ((0, half), (half, part.shape[dim] - half))
            )
        block = values.cpu().contiguous()
        data = _bytes_of(block)
        size, offsets = _runs(part, block.element_size())
        for i, offset in enumerate(offsets.tolist()):
            self._put(entry.file, data[i * size : (i + 1) * size], entry.offset + offset)
        return data.nbytes

    def append(self, file: Path, data: memoryview) -> int:
        """Writes behind what is in the file; returns the bytes."""
        self._put(file, data, os.fstat(self._fd(file)).st_size)
        return len(data)

    def _put(self, file: Path, memory: memoryview, at: int) -> None:
        _write_all(self._fd(file), memory, at, file)


def _bytes_of(block: torch.Tensor) -> memoryview:
    array: Any = block.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _runs(part: Strided, itemsize: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Bytes of a contiguous run, and where each run begins, in bytes from the tensor's begin, in row-major order."""
    run, dims = 1, list(zip(part.shape, part.strides, strict=True))
    while dims and (dims[-1][1] == run or dims[-1][0] == 1):
        run *= dims.pop()[0]
    offsets = np.array([part.offset], dtype=np.int64)
    for n, stride in dims:
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * stride).ravel()
    return run * itemsize, offsets * itemsize
