"""Safetensors files in any layout, beside the reference implementation of the format."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sharded import LONG, any_layouts, parts_of, shapes, values
from test_dtensor import as_rank, make_model, sharded_model
from torch.distributed.device_mesh import init_device_mesh

from monarch_rdma.errors import ConfigError
from monarch_rdma.sharding.checkpoint import entries, load, save
from monarch_rdma.sharding.dtensor import local_tensor, named_tensors
from monarch_rdma.sharding.layout import Layout, Mesh, Partial, Shard
from monarch_rdma.sharding.plan import PlanError, Source, concatenate

quick = settings(
    max_examples=300 if LONG else 40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EVERY_DTYPE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


@pytest.mark.timeout(600)
@quick
@given(st.data())
def test_any_layout_is_saved_and_loaded_in_any_other(tmp_path: Path, data: st.DataObject) -> None:
    """Over files that another checkpoint is in already."""
    shape = data.draw(shapes)
    whole = torch.from_numpy(values(shape))
    source, target = data.draw(any_layouts(shape)), data.draw(any_layouts(shape))
    assume(source.ranks.size)
    written = 0
    for rank, part in parts_of(source, whole.numpy()).items():
        written += save({"w": torch.from_numpy(part)}, tmp_path, layouts={"w": source}, rank=rank, ranks=100)
    assert written == whole.nbytes
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], whole)
    for rank, expected in parts_of(target, whole.numpy()).items():
        mine = torch.full(expected.shape, -1)
        count = load(tmp_path, {"w": mine}, layouts={"w": target}, rank=rank, ranks=100)
        assert np.array_equal(mine.numpy(), expected)
        assert count == 8 * target.part(rank).numel


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    save_file({"w": tensor, "odd": torch.ones(3, dtype=torch.int8)}, tmp_path / "a.safetensors")
    mine = {"w": torch.zeros(4, 6, dtype=dtype)}
    load(tmp_path, mine, keys=["w"])
    assert torch.equal(mine["w"].view(torch.uint8), tensor.view(torch.uint8))
    save({"odd": torch.ones(3, dtype=torch.int8), **mine}, tmp_path / "new", metadata={"step": "7"})
    again = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(again["w"].view(torch.uint8), tensor.view(torch.uint8))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.full((10, 10), float(i)) for i in range(5)}
    save(state, tmp_path, file_bytes=900)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000 and index["weight_map"]["layer.4"] == files[2]
    again = {key: torch.zeros(10, 10) for key in state}
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert load(path, again) == 2000
        assert all(torch.equal(again[key], state[key]) for key in state)


def test_modules_of_torch(tmp_path: Path) -> None:
    """Saved by FSDP2 over tensor parallelism, loaded into another mesh, and by anybody who reads safetensors."""
    for rank in range(6):
        with as_rank(rank, 6):
            save(sharded_model(init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(whole[key], value) for key, value in make_model().state_dict().items())
    for rank in range(6):
        with as_rank(rank, 6):
            model = sharded_model(init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")))
            tensors = [local_tensor(tensor.detach()) for tensor in named_tensors(model).values()]
            expected = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()
            load(tmp_path, model)
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_transforms_and_casts(tmp_path: Path) -> None:
    q, k = torch.randn(6, 4), torch.randn(2, 4)
    save_file({"q": q, "k": k}, tmp_path / "a.safetensors")
    mine = {"qk": torch.zeros(4, 8, dtype=torch.bfloat16)}
    made = {"qk": concatenate(Source("q").transpose(1, 0), Source("k").transpose(1, 0), dim=1)}
    load(tmp_path / "a.safetensors", mine, transforms=made, cast=True)
    assert torch.equal(mine["qk"], torch.cat([q, k]).t().bfloat16())


def test_only_the_bytes_of_a_rank_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000, 64), "other": torch.ones(1 << 20)}, tmp_path / "a.safetensors")
    layout = Layout((1000, 64), Mesh({"tp": 4}), [Shard(1)])
    before = read_so_far()
    assert load(tmp_path, {"w": torch.zeros(1000, 16)}, layouts={"w": layout}, rank=2, ranks=4) == 64_000
    assert read_so_far() - before < 64_000 + 20_000


def read_so_far() -> int:
    """Bytes that this process has read by system calls."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


GOOD = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_with(folder: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", {"w": 3}, {"w": {**GOOD["w"], "dtype": "F3"}}, {"w": {**GOOD["w"], "shape": [3]}},
        {"w": {**GOOD["w"], "data_offsets": [8, 16]}}, {"w": {**GOOD["w"], "shape": [-2]}},
        {"w": {**GOOD["w"], "data_offsets": [-8, 0]}}, {"w": {**GOOD["w"], "data_offsets": [0]}},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_files_are_refused(header: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is no safetensors file: "):
        entries(file_with(tmp_path, header))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    index = tmp_path / "x.index.json"
    index.write_text('{"weight_map": {"v": "bad.safetensors"}}')
    bad_index = tmp_path / "y.json"
    bad_index.write_text("[]")
    file_with(tmp_path, GOOD)
    empty = tmp_path / "empty"
    empty.mkdir()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: load(empty, state), "with 0 safetensors files and no index"),
        (lambda: load(tmp_path / "nowhere", state), "which is no safetensors file: [Errno 2]"),
        (lambda: load(index, state), "names ['v'], which are in none of its files"),
        (lambda: load(bad_index, state), "which is no index of safetensors files"),
        (lambda: load(tmp_path / "bad.safetensors", state, keys=["x"]), "keys names ['x'], but there are no such"),
        (lambda: save({"w": torch.zeros(2, dtype=torch.complex128)}, empty), "'w' is complex128"),
        (
            lambda: save(state, empty, layouts={"w": Layout((2,), Mesh({"a": 1}), [Partial()])}),
            "safetensors files hold no such thing",
        ),
    ]
    for call, told in calls:
        with pytest.raises(ConfigError, match=re.escape(told)):
            call()
    assert os.listdir(empty) == []
    with pytest.raises(PlanError, match="target 'v': there is no source 'v'"):
        load(tmp_path / "bad.safetensors", {"v": torch.zeros(2)})


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match=r"No space left on device: '.*/model.safetensors'"):
        save({"w": torch.zeros(2)}, tmp_path)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    found = entries(path)
    os.truncate(path, 500)
    monkeypatch.setattr("monarch_rdma.sharding.checkpoint.entries", lambda _: found)
    with pytest.raises(OSError, match="has become shorter while it was read"):
        load(path, {"w": torch.zeros(1000)})
