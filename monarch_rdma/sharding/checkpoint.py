"""Checkpoints in the safetensors format, straight into any layout and out of it: each rank reads and writes its bytes.

load("model-folder", model)      # on every rank; one file, or several with an index
save(model, "model-folder")      # on every rank; complete when all ranks have returned
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError
from .dtensor import Tensors, dtype_name, local_tensor, named_tensors
from .layout import Layout, Mesh
from .offer import AnyLayout
from .plan import Source, TensorSpec, Transform, make_plan
from .reads import Strided, ends_of, part_of, rows_of
from .state_dict import position, target_layout

__all__ = ["Entry", "entries", "load", "save"]

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
_LETTERS = {name: letters for letters, name in _DTYPES.items()}
_MOST_HEADER = 100 << 20  # bytes, as other readers of the format have it
_BLOCK = 32 << 20  # bytes that are read or written at once
_INDEX = "model.safetensors.index.json"
_FILE_BYTES = 5 << 30


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `offset` bytes from the begin of the file, row-major."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def entries(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of a safetensors file, of an index file with all files that it names, or of a folder with either.

    ConfigError where it is no such thing, or something is missing in it.
    """
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("*.safetensors"))
        index = next(iter(sorted(place.glob("*.safetensors.index.json"))), None)
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


# --- reading


def load(
    path: str | os.PathLike[str],
    into: Tensors,
    *,
    keys: Iterable[str] | None = None,
    cast: bool = False,
    transforms: Mapping[str, Transform] | None = None,
    layouts: Mapping[str, AnyLayout] | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> int:
    """Reads this rank's part of the tensors of a module or state dict; returns the bytes that were read.

    `keys`, `cast`, `transforms`, `layouts`, `rank`, `ranks`: as for a Reader. Raises ConfigError and PlanError, and
    OSError where a file cannot be read any more; the tensors are then partly written.
    """
    found = entries(path)
    rank, ranks = position(rank, ranks)
    tensors = named_tensors(into)
    wanted = list(tensors) if keys is None else list(keys)
    if missing := [key for key in wanted if key not in tensors]:
        raise ConfigError(f"keys names {missing}, but there are no such tensors")
    everybody, one_file = Mesh({"reader": ranks}), Mesh({"file": 1})
    sources = {name: TensorSpec(Layout(entry.shape, one_file), entry.dtype) for name, entry in found.items()}
    targets = {
        key: TensorSpec(
            target_layout(key, tensors[key], (layouts or {}).get(key), everybody, rank), dtype_name(tensors[key].dtype)
        )
        for key in wanted
    }
    made = dict(transforms or {})
    if cast:
        made = {key: made.get(key, Source(key)).cast() for key in wanted}
    plan = make_plan(sources, targets, rank, transforms=made)
    total = 0
    with _Files(os.O_RDONLY) as files:
        for tensor in plan.tensors:
            entry = found[tensor.source]
            dtype: torch.dtype = getattr(torch, entry.dtype)
            target = local_tensor(tensors[tensor.target].detach())
            for one in rows_of(tensor.copies, _BLOCK // dtype.itemsize):
                there, here = ends_of(one, _row_major(entry.shape), target.stride())
                block = torch.empty(there.shape, dtype=dtype)
                total += files.read(entry, there, block)
                part_of(target, here).copy_(block)
    return total


# --- writing


def save(
    what: Tensors,
    folder: str | os.PathLike[str],
    *,
    layouts: Mapping[str, AnyLayout] | None = None,
    metadata: Mapping[str, str] | None = None,
    file_bytes: int = _FILE_BYTES,
    rank: int | None = None,
    ranks: int | None = None,
) -> int:
    """Writes this rank's part of the tensors; returns the bytes that were written. Of replicas the first one writes.

    All ranks call it with the same names; the checkpoint is complete when all have returned. `file_bytes`: begin
    another file after so many; several files get an index. `layouts`, `rank`, `ranks`: as for `publish`. Raises
    ConfigError before anything is written, and OSError.
    """
    rank, ranks = position(rank, ranks)
    everybody = Mesh({"replica": ranks})
    tensors = named_tensors(what)
    places = {key: target_layout(key, t, (layouts or {}).get(key), everybody, rank) for key, t in tensors.items()}
    for key, tensor in tensors.items():
        if dtype_name(tensor.dtype) not in _LETTERS or places[key].is_partial:
            raise ConfigError(
                f"{key!r} is {dtype_name(tensor.dtype)} {places[key]}: safetensors files hold no such thing"
            )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_in_files(tensors, places, file_bytes))
    names = ["model.safetensors"] if len(files) == 1 else [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]  # fmt: skip
    where: dict[str, Entry] = {}
    for name, keys in zip(names, files, strict=True):
        where |= _prepare(folder / name, {key: (tensors[key].dtype, places[key].shape) for key in keys}, metadata or {})
    if len(files) > 1:
        weight_map = {key: entry.file.name for key, entry in where.items()}
        total = sum(math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize for entry in where.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        _written(folder / _INDEX, text.encode())
    written = 0
    with _Files(os.O_WRONLY) as opened:
        for key, entry in where.items():
            for there, part in _own_parts(places[key], local_tensor(tensors[key].detach()), rank):
                written += opened.write(entry, there, part)
    return written


def _in_files(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, AnyLayout], file_bytes: int
) -> Iterator[list[str]]:
    """The tensors of each file, in order: the next file begins with the tensor that would make one too large."""
    keys: list[str] = []
    size = 0
    for key, tensor in tensors.items():
        nbytes = math.prod(places[key].shape) * tensor.dtype.itemsize
        if keys and size + nbytes > file_bytes:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += nbytes
    yield keys


def _prepare(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, Entry]:
    """The file with its header, and room for its tensors. Every rank does this, all with the same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at, offsets = 0, {}
    for key, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: -item[1][0].itemsize
    ):  # so that all are aligned
        size = math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _LETTERS[dtype_name(dtype)], "shape": list(shape), "data_offsets": [at, at + size]}
        offsets[key] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    _written(file, len(text).to_bytes(8, "little") + text, begin + at)
    return {key: Entry(file, begin + offsets[key], dtype_name(dtype), shape) for key, (dtype, shape) in tensors.items()}


def _written(file: Path, data: bytes, size: int | None = None) -> None:
    """Writes the begin of a file and gives it its size, without disturbing what others are writing to the rest."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, len(data) if size is None else size)
        os.pwrite(fd, data, 0)
    finally:
        os.close(fd)


def _own_parts(layout: AnyLayout, local: torch.Tensor, rank: int) -> Iterator[tuple[Strided, torch.Tensor]]:
    """Where in the whole tensor the boxes lie that this rank is the first to have, and their elements."""
    strides = _row_major(layout.shape)
    for box in layout.own_boxes(rank):
        offset = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
        part = local[tuple(slice(at, at + n) for at, n in zip(box.at, box.size, strict=True))]
        yield Strided(box.size, strides, offset), part


# --- files


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class _Files:
    """Open files, each once; ranges of them are read and written by pread and pwrite."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def _fd(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, self._flags)
        return self._open[file]

    def read(self, entry: Entry, part: Strided, block: torch.Tensor) -> int:
        """Reads the part of the tensor into the contiguous block, run by run; returns the bytes."""
        fd, data = self._fd(entry.file), _bytes_of(block)
        size, offsets = _runs(part, block.element_size())
        for i, offset in enumerate(offsets.tolist()):
            mine, at = data[i * size : (i + 1) * size], entry.offset + offset
            while len(mine):
                got = os.preadv(fd, [mine], at)
                if got == 0:
                    raise OSError(f"{str(entry.file)!r} has become shorter while it was read")
                mine, at = mine[got:], at + got
        return size * offsets.size

    def write(self, entry: Entry, part: Strided, values: torch.Tensor) -> int:
        """Writes values, of any strides, as this part of the tensor; returns the bytes."""
        written = 0
        per_row = max(1, values[0].nbytes) if values.ndim and len(values) else 1
        rows = max(1, _BLOCK // per_row)
        fd = self._fd(entry.file)
        for low in range(0, len(values) if values.ndim else 1, rows):
            block = (values[low : low + rows] if values.ndim else values).cpu().contiguous()
            offset = part.offset + (low * part.strides[0] if values.ndim else 0)
            size, offsets = _runs(Strided(tuple(block.shape), part.strides, offset), block.element_size())
            data = _bytes_of(block)
            for i, at in enumerate(offsets.tolist()):
                mine, at = data[i * size : (i + 1) * size], entry.offset + at
                while len(mine):
                    done = os.pwrite(fd, mine, at)
                    mine, at = mine[done:], at + done
            written += data.nbytes
        return written


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
