"""torch.distributed.checkpoint in safetensors files that anybody can read.

dcp.save(state, storage_writer=SafetensorsWriter("folder"))      # async_save too
dcp.load(state, storage_reader=SafetensorsReader("folder"))      # in any layout; a rank reads only its bytes

Whole tensors lie in ordinary files with an index; each rank writes and reads its own ranges of them. Other values lie
in files beside them. The index names all files of a checkpoint, and takes its place by one rename at the very end:
until then, whatever happens, the checkpoint that was there before is there.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..errors import ConfigError
from .dtensor import dtype_name
from .safetensors_files import FILE_BYTES, INDEX, OF_A_SAVE, Entry, Files, Kinds, entries, in_files, index_of, prepare

__all__ = ["SafetensorsReader", "SafetensorsWriter"]

_PARTIAL = ".partial"  # behind the names of files that are being written
_OURS, _FORMAT = "monarch_rdma", 1  # where in the index's metadata our part is


@dataclasses.dataclass(frozen=True)
class _Share:
    """What the coordinator tells a rank: where tensors go, and which file its other values."""

    tensors: dict[str, Entry]
    objects: Path


class SafetensorsWriter(StorageWriter):
    """Saves into a folder, which replaces the checkpoint that is there. One save at a time into one folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        file_bytes: int = FILE_BYTES,
        metadata: Mapping[str, str] | None = None,
        sync: bool = True,
    ) -> None:
        """`file_bytes`: begin another file after so many. `metadata`: strings for the files' headers. `sync`: a save
        that has returned outlasts the machine.
        """
        self.path = Path(path)
        self._file_bytes = file_bytes
        self._metadata = dict(metadata or {})
        self._sync = sync
        self.reset()

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another save."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._save = secrets.token_hex(8)
        self._kinds: Kinds = {}
        self._places: dict[str, Entry] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """ConfigError where ranks are not to talk to each other: somebody has to say where each tensor goes."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives is False, but whole tensors in files need a coordinator")

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: makes the files, with room for all tensors. ConfigError before that for tensors that
        these cannot hold, and for plans that are kept from an earlier save.
        """
        if not all(plan.usable for plan in plans):
            raise ConfigError("enable_plan_caching is True, but each save has files of its own: pass another planner")
        self._kinds = _kinds_of(item for plan in plans for item in plan.items)
        files = list(in_files(self._kinds, self._file_bytes)) if self._kinds else []
        self.path.mkdir(parents=True, exist_ok=True)
        for i, kinds in enumerate(files):
            name = f"model-{self._save}-{i + 1:05}-of-{len(files):05}.safetensors"
            self._places |= prepare(self.path / (name + _PARTIAL), kinds, self._metadata)
        return [
            dataclasses.replace(plan, storage_data=_Share(self._needed(plan), self._objects_file(rank)))
            for rank, plan in enumerate(plans)
        ]

    def _needed(self, plan: SavePlan) -> dict[str, Entry]:
        return {item.index.fqn: self._places[item.index.fqn] for item in plan.items if item.tensor_data is not None}

    def _objects_file(self, rank: int) -> Path:
        return self.path / f"objects-{self._save}-{rank:05}.bin{_PARTIAL}"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part."""
        share: _Share = plan.storage_data
        results, at = [], 0
        with Files(os.O_WRONLY | os.O_CREAT) as files:
            for item in plan.items:
                data = planner.resolve_data(item)
                place: Any = None
                if isinstance(data, io.BytesIO):
                    size = files.append(share.objects, data.getbuffer())
                    place, at = [_final(share.objects).name, at, size], at + size
                else:
                    entry = share.tensors[item.index.fqn]
                    size = files.write(entry, entry.box(*_box(item)), data.detach())
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))
            if self._sync:
                files.sync()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: makes what was written the checkpoint of the folder, and removes what was there before.

        ConfigError where some bytes of a tensor were written by nobody.
        """
        objects: dict[str, Any] = {}
        for result in (result for of_rank in results for result in of_rank):
            if result.storage_data is not None:
                objects[result.index.fqn] = result.storage_data
        self._check_complete(results)
        names = {name: _final(entry.file).name for name, entry in self._places.items()}
        flattened = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        paths = {name: list(path) for name, path in flattened.items()}
        ours = {"format": _FORMAT, "save": self._save, "objects": objects, "paths": paths}
        index = index_of(names, self._kinds, **{_OURS: ours})
        old = self._old_files()
        kept = {*names.values(), *(place[0] for place in objects.values())}
        for name in kept:
            os.replace(self.path / (name + _PARTIAL), self.path / name)
        self._replace_index(index)
        for file in old:
            if file.name not in kept:
                file.unlink(missing_ok=True)
        metadata.storage_data = names

    def _check_complete(self, results: list[list[WriteResult]]) -> None:
        written = dict.fromkeys(self._places, 0)
        for result in (result for of_rank in results for result in of_rank):
            if result.index.fqn in written:
                written[result.index.fqn] += result.size_in_bytes
        for name, entry in self._places.items():
            if written[name] != entry.nbytes:
                raise ConfigError(f"{name!r} has {entry.nbytes} bytes, but the ranks wrote {written[name]} of them")

    def _old_files(self) -> list[Path]:
        """Of the checkpoint that is there, and of saves that did not come to their end."""
        left = [file for file in self.path.iterdir() if OF_A_SAVE.fullmatch(file.name) and self._save not in file.name]
        try:
            return left + [entry.file for entry in entries(self.path).values()]
        except ConfigError:  # there is none
            return left

    def _replace_index(self, index: bytes) -> None:
        fresh = self.path / (INDEX + _PARTIAL)
        with fresh.open("wb") as file:
            file.write(index)
            if self._sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, self.path / INDEX)
        if self._sync:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _final(file: Path) -> Path:
    return file.with_name(file.name.removesuffix(_PARTIAL))


def _box(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _kinds_of(items: Iterable[WriteItem]) -> Kinds:
    """Dtype and shape of each tensor. ConfigError where ranks say several."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for item in items:
        if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
            continue
        kind = dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.size)
        if kinds.setdefault(item.index.fqn, kind) != kind:
            raise ConfigError(f"{item.index.fqn!r} is {kind} on one rank, but {kinds[item.index.fqn]} on another")
    return kinds


class SafetensorsReader(StorageReader):
    """Loads from a folder that a SafetensorsWriter wrote, or from any safetensors files, single or with an index.

    `bytes_read`: those of tensors and other values that this rank has read so far.
    """

    def __init__(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """`trusted`: values that are no tensors may be anything that pickle knows, which can run code; otherwise they
        are what torch.load with weights_only=True allows.
        """
        self.path = Path(path)
        self._trusted = trusted
        self.bytes_read = 0
        self.reset()

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._tensors: dict[str, Entry] = {}
        self._objects: dict[str, Any] = {}
        self._save = ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What is in the folder. ConfigError where it is no checkpoint."""
        self._tensors = entries(self.path)
        ours = self._ours()
        self._save, self._objects = ours.get("save", ""), ours.get("objects", {})
        found: dict[str, Any] = {name: _storage_metadata(entry) for name, entry in self._tensors.items()}
        found |= {name: BytesStorageMetadata() for name in self._objects}
        paths = {name: tuple(path) for name, path in ours.get("paths", {}).items()}
        return Metadata(found, planner_data=paths or {name: (name,) for name in found}, storage_data=self._tensors)

    def _ours(self) -> dict[str, Any]:
        """What the writer put into the index; nothing where others made it, or there is none."""
        index = self.path / INDEX
        if not index.is_file():
            return {}
        try:
            ours: dict[str, Any] = (json.loads(index.read_bytes()).get("metadata") or {}).get(_OURS, {})
            if ours and ours["format"] != _FORMAT:
                raise ValueError(f"format {ours['format']!r:.20}; this library reads {_FORMAT}")
            for name, (file, offset, size) in ours.get("objects", {}).items():
                if not OF_A_SAVE.fullmatch(file) or Path(file).name != file or min(offset, size) < 0:
                    raise ValueError(f"{name!r:.40} at {file!r:.80} {offset!r:.20} {size!r:.20}")
            return ours
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{str(index)!r} is malformed: {error}") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing has to be."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._save)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """ConfigError where a save has replaced the checkpoint after some ranks had opened it."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise ConfigError(f"the checkpoint in {str(self.path)!r} was replaced while it was opened: load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's part. ConfigError for a value that is not allowed; OSError where files cannot be read."""
        with Files(os.O_RDONLY) as files:
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._plain(name, self._read_object(files, name)))
                    continue
                entry, target = self._tensors[name], planner.resolve_tensor(item).detach()
                part = entry.box(tuple(item.storage_offsets), tuple(item.lengths))
                self.bytes_read += files.read(entry, part, target)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_object(self, files: Files, name: str) -> bytes:
        file, offset, size = self._objects[name]
        data = files.read_bytes(self.path / file, offset, size)
        self.bytes_read += size
        return data

    def _plain(self, name: str, data: bytes) -> io.BytesIO:
        """What the planner is to load, which it does without looking: so we looked, and hand on only what we saw."""
        if self._trusted:
            return io.BytesIO(data)
        try:
            value = torch.load(io.BytesIO(data), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ConfigError(
                f"{name!r} in {str(self.path)!r} is no plain value; SafetensorsReader(path, trusted=True) loads it all "
                f"the same, which can run code: {str(error).splitlines()[0]}"
            ) from error
        seen = io.BytesIO()
        torch.save(value, seen)
        seen.seek(0)
        return seen


def _storage_metadata(entry: Entry) -> TensorStorageMetadata:
    """One chunk, which is all of it: parts of it are asked for by their place in the whole."""
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(entry.shape)), sizes=torch.Size(entry.shape))
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=[chunk])
