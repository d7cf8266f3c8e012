"""torch.distributed.checkpoint on safetensors files: its own code, modules of FSDP2, kills at every step of a save."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import Forked, forked
from safetensors.torch import load_file, save_file
from test_checkpoint import read_so_far
from test_dtensor import make_model, sharded_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from monarch_rdma.sharding.checkpoint import load
from monarch_rdma.sharding.distributed_checkpoint import SafetensorsReader, SafetensorsWriter
from monarch_rdma.sharding.safetensors_files import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=SafetensorsWriter(folder, **options), no_dist=True)


def load_back(state: dict[str, Any], folder: Path, **options: Any) -> SafetensorsReader:
    reader = SafetensorsReader(folder, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


def make_state(value: float = 1.0) -> dict[str, Any]:
    value = float(value)
    return {
        "model": {"w": torch.full((4, 6), value), "scalar": torch.tensor(value), "none": torch.zeros(0, 3)},
        "optim": {"state": [torch.full((3,), value, dtype=torch.bfloat16)], "lr": 0.1 * value},
        "step": int(value),
        "more": OrderedDict(a=[1, "two", None]),
    }


def test_nested_states_and_values_that_are_no_tensors(tmp_path: Path) -> None:
    save(make_state(7), tmp_path)
    state = make_state(0)
    state["more"]["a"] = None
    load_back(state, tmp_path)
    assert torch.equal(state["model"]["w"], torch.full((4, 6), 7.0)) and state["model"]["scalar"] == 7
    assert state["optim"]["state"][0].tolist() == [7, 7, 7] and state["optim"]["lr"] == 0.1 * 7
    assert state["step"] == 7 and state["more"] == OrderedDict(a=[1, "two", None])


def test_anybody_can_read_the_files(tmp_path: Path) -> None:
    save(make_state(3), tmp_path, file_bytes=60, metadata={"made": "here"})
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 106 and len(set(index["weight_map"].values())) == 2
    whole = {
        key: value for file in set(index["weight_map"].values()) for key, value in load_file(tmp_path / file).items()
    }
    assert set(whole) == set(index["weight_map"])
    assert torch.equal(whole["model.w"], torch.full((4, 6), 3.0)) and whole["model.none"].shape == (0, 3)
    mine = {"model.w": torch.zeros(4, 6)}
    assert load(tmp_path, mine) == 96 and (mine["model.w"] == 3).all()


def test_files_of_others_are_loaded(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(6, dtype=torch.float16)}
    assert load_back(state, tmp_path).bytes_read == 24
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_all_of_it_without_knowing_what_there_is(tmp_path: Path) -> None:
    """As torch's converter to a plain file does it."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    save(make_state(5), tmp_path)
    found: dict[str, Any] = {}
    _load_state_dict(found, SafetensorsReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert (found["model"]["w"] == 5).all() and found["step"] == 5 and found["optim"]["lr"] == 0.5


def test_another_save_takes_the_place_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"old": torch.ones(2)}, tmp_path / "model.safetensors")
    save(make_state(1), tmp_path)
    first = set(os.listdir(tmp_path))
    assert len(first) == 4 and "model.safetensors" not in first  # a file of tensors, one of the rest, and the index
    save(make_state(2), tmp_path)
    second = set(os.listdir(tmp_path))
    assert len(second) == 4 and first & second == {INDEX, "tokenizer.json"}
    state = make_state(0)
    load_back(state, tmp_path)
    assert state["step"] == 2
    save({"only": "this"}, tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    load_back(only := {"only": ""}, tmp_path)
    assert only == {"only": "this"}


class Stranger:
    """What only pickle knows."""


def test_what_could_run_code_is_not_loaded_unless_it_is_trusted(tmp_path: Path) -> None:
    save({"x": Stranger(), "w": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointException, match=re.escape("'x' in ") + ".*no plain value; .*trusted=True"):
        load_back({"x": None, "w": torch.zeros(2)}, tmp_path)
    state = {"x": None, "w": torch.zeros(2)}
    load_back(state, tmp_path, trusted=True)
    assert isinstance(state["x"], Stranger)
    load_back(tensors := {"w": torch.zeros(2)}, tmp_path)  # and does not matter where it is not asked for
    assert tensors["w"].tolist() == [1, 1]


# --- processes


def begin(rank: int, port: int, world: int = 4) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def trained(mesh_sizes: tuple[int, int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of FSDP2 over tensor parallelism and an optimizer that has something to remember."""
    model = sharded_model(init_device_mesh("cpu", mesh_sizes, mesh_dim_names=("dp", "tp")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(state: Any) -> Any:
    """With plain tensors, to compare and to send."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor().tolist()
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _save_and_load(rank: int, port: int, folder: Path) -> Any:
    begin(rank, port)
    model, optimizer = trained((2, 2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    expected = whole(saved)
    dcp.save(saved, storage_writer=SafetensorsWriter(folder / "now"))
    dcp.async_save(saved, storage_writer=SafetensorsWriter(folder / "later")).result()
    for name in ("now", "later"):
        for sizes in ((4, 1), (1, 4)):
            other, its = trained(sizes)
            for parameter in other.parameters():
                parameter.detach().to_local().zero_()  # type: ignore[attr-defined]
            state = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
            dcp.load(state, storage_reader=SafetensorsReader(folder / name))
            assert whole(state) == expected
            set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dist.barrier()
    dist.destroy_process_group()
    return expected


def test_fsdp2_over_tensor_parallel_with_its_optimizer(tmp_path: Path) -> None:
    """Saved from 2 x 2 ranks, now and in the background; loaded on 4 x 1 and 1 x 4. All ranks and files agree."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, *others = forked(4, _save_and_load, rendezvous.port, tmp_path)
    assert others == [first] * 3
    index = json.loads((tmp_path / "now" / INDEX).read_text())
    (name,) = set(index["weight_map"].values())
    tensors = load_file(tmp_path / "now" / name)
    assert {key: tensors[f"model.{key}"].tolist() for key in make_model().state_dict()} == first["model"]
    assert tensors["optimizer.state.0.weight.exp_avg"].tolist() == first["optimizer"]["state"]["0.weight"]["exp_avg"]


def _load_columns(rank: int, port: int, folder: Path) -> Any:
    begin(rank, port)
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(torch.zeros(1000, 64), mesh, [Shard(1)], src_data_rank=None)}
    reader = SafetensorsReader(folder)
    before = read_so_far()
    dcp.load(state, storage_reader=reader)
    spent = read_so_far() - before
    local = state["w"].to_local()
    dist.barrier()
    dist.destroy_process_group()
    return reader.bytes_read, spent, bool((local == torch.arange(64.0)[16 * rank : 16 * rank + 16]).all())


def test_a_rank_reads_its_bytes_only(tmp_path: Path) -> None:
    """Counted by the reader, and by the kernel, which counts what ranks say to each other as well."""
    save({"w": torch.arange(64.0).repeat(1000, 1), "other": torch.ones(1 << 20)}, tmp_path)
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for count, spent, right in forked(4, _load_columns, rendezvous.port, tmp_path):
        assert count == 64_000 and right
        assert spent < 64_000 + 60_000


class KilledOnTheWay(SafetensorsWriter):
    """Is killed at one of its steps."""

    def __init__(self, folder: Path, step: str) -> None:
        super().__init__(folder)
        self._step = step

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def _save_and_die(rank: int, folder: Path, step: str) -> None:
    writer: Any = KilledOnTheWay(folder, step)
    if step == "half":
        resolve = DefaultSavePlanner.resolve_data

        def resolve_some(planner: Any, item: Any) -> Any:
            if item.index.fqn.startswith("optim"):
                os.kill(os.getpid(), signal.SIGKILL)
            return resolve(planner, item)

        DefaultSavePlanner.resolve_data = resolve_some  # type: ignore[method-assign]
    dcp.save(make_state(2), storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("step", ["write_data", "half", "finish", "_old_files", "_replace_index"])
@pytest.mark.parametrize("old", ["ours", "another's"])
def test_a_killed_save_leaves_the_old_checkpoint(step: str, old: str, tmp_path: Path) -> None:
    if old == "ours":
        save(make_state(1), tmp_path)
    else:
        save_file({"model.w": torch.ones(4, 6)}, tmp_path / "model.safetensors")
    before = set(os.listdir(tmp_path))
    with Forked(1, _save_and_die, tmp_path, step) as running:
        with pytest.raises(AssertionError, match="has ended without a result"):
            running.result(0)
    left = set(os.listdir(tmp_path)) - before
    assert left
    state: dict[str, Any] = make_state(0) if old == "ours" else {"model": {"w": torch.zeros(4, 6)}}
    load_back(state, tmp_path)
    assert (state["model"]["w"] == 1).all()
    save(make_state(3), tmp_path)
    assert not left & set(os.listdir(tmp_path))
    load_back(state, tmp_path)
    assert (state["model"]["w"] == 3).all()


# --- what is wrong


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    def planned_twice() -> None:
        for value in (1, 2):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(make_state(value), storage_writer=SafetensorsWriter(tmp_path / "c"), planner=planner, no_dist=True)

    (tmp_path / "bad").mkdir()
    damaged = {"weight_map": {}, "metadata": {"monarch_rdma": {"format": 1, "objects": {"x": ["/etc/passwd", 0, 9]}}}}
    (tmp_path / "bad" / INDEX).write_text(json.dumps(damaged))
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a"), "'w' is complex128: safetensors"),
        (planned_twice, "enable_plan_caching is True"),
        (lambda: load_back(make_state(), tmp_path / "nowhere"), "which is no safetensors file"),
        (lambda: load_back({"x": None}, tmp_path / "bad"), "is malformed: 'x' at '/etc/passwd'"),
    ]
    for call, told in calls:
        with pytest.raises((CheckpointException, AssertionError), match=re.escape(told)):
            call()
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="use_collectives is False"):
        SafetensorsWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    assert not SafetensorsWriter.validate_checkpoint_id("s3://bucket/x")


def test_ranks_that_opened_different_saves_are_told(tmp_path: Path) -> None:
    plans = []
    for value in (1, 2):
        save(make_state(value), tmp_path)
        reader = SafetensorsReader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]
    with pytest.raises(ValueError, match="was replaced while it was opened: load again"):
        reader.prepare_global_plan(plans)


def test_bytes_that_nobody_wrote_are_noticed(tmp_path: Path) -> None:
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            return dcp.SavePlan(new_plan.items[1:], new_plan.storage_data, new_plan.planner_data)

    state, writer = {"a": torch.ones(2), "b": torch.ones(2)}, SafetensorsWriter(tmp_path)
    with pytest.raises(CheckpointException, match="'a' has 8 bytes, but the ranks wrote 0 of them"):
        dcp.save(state, storage_writer=writer, planner=Forgetful(), no_dist=True)
    assert not (tmp_path / INDEX).exists()
