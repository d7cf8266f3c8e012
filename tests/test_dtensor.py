"""Layouts of real DTensors: what torch gave each rank is what the layout says. Ranks take turns in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import parts_of, values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from monarch_rdma.sharding import layout as ours
from monarch_rdma.sharding.dtensor import (
    box_layouts,
    device_mesh,
    layout_of,
    local_tensor,
    mesh_of,
    named_tensors,
    storage_metadata,
    torch_placements,
)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process is one rank of a world whose other members do not exist: enough to place tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"),
    [
        ((8, 3), (4,), [Shard(0)]),
        ((10, 3), (4,), [Shard(0)]),  # uneven
        ((2, 3), (4,), [Shard(0)]),  # some have nothing
        ((7, 9), (2, 3), [Shard(0), Shard(1)]),
        ((13, 2), (2, 3), [Shard(0), Shard(0)]),  # nested
        ((16, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),  # FSDP over tensor parallel
        ((11, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((4, 9, 2), (2, 3), [_StridedShard(1, split_factor=3), Shard(1)]),
        ((6, 4), (2, 2), [Replicate(), Shard(1)]),  # HSDP
        ((8, 4, 6), (2, 2, 2), [Shard(2), Replicate(), Shard(0)]),
        ((9,), (3,), [Partial("sum")]),
    ],
    ids=str,
)
def test_a_layout_says_what_torch_does(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> None:
    whole = torch.from_numpy(values(shape))
    world = math.prod(sizes)
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y", "z")[: len(sizes)])
            dealt = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
            local = distribute_tensor(whole, mesh, dealt, src_data_rank=None).to_local()
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            layout = layout_of(tensor)
            assert layout_of(tensor._spec) == layout
            assert torch_placements(layout) == tuple(placements)
            again = device_mesh(layout.mesh)
            assert (again.mesh.tolist(), again.mesh_dim_names) == (mesh.mesh.tolist(), mesh.mesh_dim_names)
        assert torch.equal(torch.from_numpy(parts_of(layout, whole.numpy())[rank]), local)
    assert layout.is_partial == isinstance(placements[0], Partial)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 12), torch.nn.ReLU(), torch.nn.Linear(12, 7))


def sharded_model(mesh: DeviceMesh) -> torch.nn.Module:
    """FSDP2 over tensor parallelism, made by torch itself."""
    model = make_model()
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def test_modules_of_fsdp2_over_tensor_parallel() -> None:
    expected = {name: value.numpy() for name, value in make_model().state_dict().items()}
    placed = set()
    for rank in range(6):
        with as_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            tensors = named_tensors(sharded_model(mesh))
            assert list(tensors) == list(expected)
            for name, tensor in tensors.items():
                layout = layout_of(tensor)
                mine = torch.from_numpy(parts_of(layout, expected[name])[rank])
                assert torch.equal(mine, local_tensor(tensor.detach()))
                placed.update(map(type, layout.placements))
    assert {ours.StridedShard, ours.Shard} <= placed


def test_plain_tensors_are_the_same_everywhere() -> None:
    mesh = ours.Mesh({"dp": 3})
    layout = layout_of(torch.ones(4), mesh)
    assert [layout.part(rank).numel for rank in range(3)] == [4, 4, 4]
    with pytest.raises(ours.LayoutError, match="does not say who else has it: pass mesh"):
        layout_of(torch.ones(4))


def test_dimensions_of_a_mesh_without_names_are_numbered() -> None:
    with as_rank(0, 4):
        assert mesh_of(DeviceMesh("cpu", torch.arange(4).reshape(2, 2))) == ours.Mesh({"dim0": 2, "dim1": 2})


@pytest.mark.parametrize("placement", [ours.GroupedShard(0, (1, 3)), ours.BlockCyclic(0, 1), ours.Shard(0, (1, 3))])
def test_placements_that_torch_does_not_have(placement: ours.Placement) -> None:
    layout = ours.Layout((4,), ours.Mesh({"a": 2}), [placement])
    with pytest.raises(ours.LayoutError, match="has no counterpart among a DTensor's placements"):
        torch_placements(layout)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_metadata_of_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that torch wrote says where its chunks are; ours of the same layout says the same."""
    state = {"w": torch.arange(24.0).reshape(6, 4), "scalar": torch.tensor(3), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    layouts = box_layouts(metadata)
    assert set(layouts) == {"w", "scalar"}
    layout, dtype = layouts["w"]
    assert (layout.shape, dtype) == ((6, 4), "float32")
    assert layout.part(0).numel == 24
    assert storage_metadata(layout, torch.float32).chunks == metadata.state_dict_metadata["w"].chunks

    sharded = ours.Layout((6, 4), ours.Mesh({"dp": 2, "fsdp": 4}), [ours.Replicate(), ours.Shard(0)])
    entry = storage_metadata(sharded, torch.bfloat16)
    assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(0, 0), (2, 0), (4, 0)]
    metadata.state_dict_metadata["w"] = entry
    again, dtype = box_layouts(metadata)["w"]
    assert dtype == "bfloat16"
    assert [again.part(rank).shape for rank in again.ranks.tolist()] == [(2, 4)] * 3
