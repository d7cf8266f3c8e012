"""Checkpoints in the safetensors format, straight into any layout and out of it: each rank reads and writes its bytes.

load("model-folder", model)      # on every rank; one file, or several with an index
save(model, "model-folder")      # on every rank; complete when all ranks have returned
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from ..errors import ConfigError
from .dtensor import Tensors, dtype_name, local_tensor, named_tensors
from .layout import Layout, Mesh
from .offer import AnyLayout
from .plan import Source, TensorSpec, Transform, make_plan
from .reads import Strided, ends_of, part_of, rows_of
from .safetensors_files import FILE_BYTES, INDEX, Entry, Files, entries, in_files, index_of, prepare
from .state_dict import position, target_layout

__all__ = ["entries", "load", "save"]

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
    with Files(os.O_RDONLY) as files:
        for tensor in plan.tensors:
            entry = found[tensor.source]
            target = local_tensor(tensors[tensor.target].detach())
            for one in rows_of(tensor.copies, None):
                there, here = ends_of(one, entry.strides, target.stride())
                total += files.read(entry, there, part_of(target, here))
    return total


# --- writing


def save(
    what: Tensors,
    folder: str | os.PathLike[str],
    *,
    layouts: Mapping[str, AnyLayout] | None = None,
    metadata: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
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
    if partial := [key for key, layout in places.items() if layout.is_partial]:
        raise ConfigError(f"{partial[0]!r} is {places[partial[0]]}: safetensors files hold no such thing")
    kinds = {key: (dtype_name(tensor.dtype), places[key].shape) for key, tensor in tensors.items()}
    files = list(in_files(kinds, file_bytes))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.safetensors"] if len(files) == 1 else [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]  # fmt: skip
    where: dict[str, Entry] = {}
    for name, mine in zip(names, files, strict=True):
        where |= prepare(folder / name, mine, metadata or {})
    if len(files) > 1:
        index = index_of({key: entry.file.name for key, entry in where.items()}, kinds)
        (folder / INDEX).write_bytes(index)
    written = 0
    with Files(os.O_WRONLY) as opened:
        for key, entry in where.items():
            for there, part in _own_parts(places[key], entry, local_tensor(tensors[key].detach()), rank):
                written += opened.write(entry, there, part)
    return written


def _own_parts(
    layout: AnyLayout, entry: Entry, local: torch.Tensor, rank: int
) -> Iterator[tuple[Strided, torch.Tensor]]:
    """Where in the whole tensor the boxes lie that this rank is the first to have, and their elements."""
    for box in layout.own_boxes(rank):
        yield (
            entry.box(box.start, box.size),
            local[tuple(slice(at, at + n) for at, n in zip(box.at, box.size, strict=True))],
        )
