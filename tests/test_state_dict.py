"""Weights published and fetched: modules of torch, names in a store, versions, and what is wrong said in a sentence."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from child import Child
from hypothesis import given, settings
from sharded import AnyLayout, any_layouts, parts_of
from test_dtensor import as_rank, make_model, sharded_model
from test_reshard import Operations
from torch.distributed.device_mesh import init_device_mesh

from monarch_rdma.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout, VersionChanged
from monarch_rdma.rdma import Engine, Secret, default_engine
from monarch_rdma.sharding.directory import Addresses
from monarch_rdma.sharding.dtensor import local_tensor, named_tensors
from monarch_rdma.sharding.layout import Layout, LayoutError, Mesh, Shard, from_json, to_json
from monarch_rdma.sharding.offer import Offer
from monarch_rdma.sharding.plan import Source, concatenate
from monarch_rdma.sharding.relay import Relay
from monarch_rdma.sharding.state_dict import Publication, Reader, fetch, publish


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture(autouse=True)
def published() -> Iterator[list[Publication]]:
    """What tests publish; access to it ends with the test."""
    made: list[Publication] = []
    yield made
    for one in made:
        one.close()


def zeroed(module: torch.nn.Module) -> torch.nn.Module:
    for tensor in named_tensors(module).values():
        local_tensor(tensor.detach()).zero_()
    return module


def test_a_module_is_fetched_into_another(store: dist.Store, published: list[Publication]) -> None:
    ours, theirs = make_model(), zeroed(make_model())
    published.append(publish(ours, "policy", directory=store))
    report = Reader("policy", theirs, directory=store).fetch()
    assert report.version == 0
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_fsdp2_over_tensor_parallel_to_another_mesh_and_back(store: dist.Store, published: list[Publication]) -> None:
    """Modules that torch has sharded, 3 x 2 and 2 x 3 ranks: bit for bit, on every rank."""
    for name, sizes, source in (("a", (3, 2), None), ("b", (2, 3), "a"), ("c", (3, 2), "b")):
        for rank in range(6):
            with as_rank(rank, 6):
                model = sharded_model(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")))
                expected = [local_tensor(tensor).clone() for tensor in named_tensors(model).values()]
                if source is not None:
                    Reader(source, zeroed(model), directory=store, same_ranks=False).fetch()
                got = [local_tensor(tensor) for tensor in named_tensors(model).values()]
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
                published.append(publish(model, name, directory=store))
    whole = fetch("c", directory=store)
    assert all(torch.equal(whole[key], value) for key, value in make_model().state_dict().items())


def sharded(published: list[Publication], store: Any, whole: torch.Tensor, ranks: int = 4, **more: Any) -> None:
    """Plain tensors sharded over ranks, all of them in this process."""
    layout = Layout(tuple(whole.shape), Mesh({"dp": ranks}), [Shard(0)])
    for rank, part in parts_of(layout, whole.numpy()).items():
        state = {"w": torch.from_numpy(part), "step": 7}
        published.append(publish(state, "w", directory=store, layouts={"w": layout}, rank=rank, ranks=ranks, **more))


@pytest.mark.parametrize("memory", ["in_place", "shared", "copy"])
def test_plain_tensors_with_layouts(memory: str, store: dist.Store, published: list[Publication]) -> None:
    whole = torch.arange(10 * 6, dtype=torch.float32).reshape(10, 6)
    sharded(published, store, whole, memory=memory)
    columns = Layout((10, 6), Mesh({"tp": 2}), [Shard(1)])
    for rank in range(2):
        state = {"w": torch.zeros(10, 3)}
        Reader("w", state, directory=store, layouts={"w": columns}, rank=rank, ranks=2).fetch()
        assert torch.equal(state["w"], whole[:, 3 * rank : 3 * rank + 3])


def test_casts_transforms_and_keys(store: dist.Store, published: list[Publication]) -> None:
    q, k = torch.randn(8, 4), torch.randn(4, 4)
    published.append(publish({"q": q, "k": k}, "w", directory=store))
    state = {"qk": torch.zeros(12, 4, dtype=torch.bfloat16), "other": torch.zeros(1)}
    fetch("w", state, directory=store, keys=["qk"], cast=True, transforms={"qk": concatenate(Source("q"), Source("k"))})
    assert torch.equal(state["qk"], torch.cat([q, k]).bfloat16())
    halves = fetch("w", directory=store, keys=lambda key: key == "k", dtype=torch.float16)
    assert {key: value.dtype for key, value in halves.items()} == {"k": torch.float16}
    assert torch.equal(halves["k"], k.half())


def test_the_second_fetch_only_reads(store: dist.Store, published: list[Publication]) -> None:
    """No planning, no registration, no allocation, and nothing is asked of the store."""
    whole = torch.arange(40.0).reshape(10, 4)
    sharded(published, store, whole)
    state = {"w": torch.zeros(10, 4, dtype=torch.bfloat16)}
    reader = Reader("w", state, directory=store, cast=True, same_ranks=False)
    plan = reader.plan
    reader.fetch()
    for one in published:
        with one.update(1):
            one._sources["w"].add_(1)
    for key in range(4):
        store.delete_key(f"monarch_rdma/weights/w/{key}")
    regions = default_engine().counters()["regions"]
    with Operations() as operations:
        assert reader.fetch(newer_than=0).version == 1
    assert operations.names == {"aten.copy_.default"}
    assert default_engine().counters()["regions"] == regions and reader.plan is plan
    assert torch.equal(state["w"], (whole + 1).bfloat16())


def test_a_rank_that_has_its_part_reads_only_the_rest(store: dist.Store, published: list[Publication]) -> None:
    """Growing from 4 to 6 ranks of one job without a checkpoint: old ranks keep what they have."""
    whole = torch.arange(12 * 5.0).reshape(12, 5)
    sharded(published, store, whole)
    wider = Layout((12, 5), Mesh({"dp": 6}), [Shard(0)])
    moved = []
    for rank in range(6):
        state = {"w": torch.zeros(2, 5)}
        reader = Reader("w", state, directory=store, layouts={"w": wider}, rank=rank, ranks=6, same_ranks=True)
        reader.fetch()
        assert torch.equal(state["w"], whole[2 * rank : 2 * rank + 2])
        moved.append(reader.plan.bytes_moved)
    assert moved == [0, 20, 40, 40, 40, 40]


def test_versions_are_watched(store: dist.Store, published: list[Publication]) -> None:
    tensor = torch.zeros(100, 100)
    weights = publish({"w": tensor}, "w", version=3, directory=store)
    published.append(weights)
    reader = Reader("w", directory=store)
    assert reader.versions() == {0: 3} and reader.wait(newer_than=2) == 3
    with pytest.raises(TransferTimeout):
        reader.wait(newer_than=3, timeout=0.05)

    entered = threading.Event()

    def train() -> None:
        with weights.update(4):
            tensor.fill_(1)
            entered.set()
            tensor.fill_(4)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert entered.wait(60)
    assert reader.fetch(newer_than=3).version == 4
    trainer.join()
    assert (reader.tensors["w"] == 4).all()
    with pytest.raises(ConfigError, match="version is 4, but must be a number from 5 on"), weights.update(4):
        raise AssertionError
    with pytest.raises(TransferTimeout):
        reader.fetch(version=9, timeout=0.05)
    with pytest.raises(VersionChanged, match="version 3 is past: the publishing ranks have 4"):
        reader.fetch(version=3)


def test_what_is_written_all_the_time_is_not_read(store: dist.Store, published: list[Publication]) -> None:
    published.append(publish({"w": torch.zeros(4)}, "w", directory=store))
    reader = Reader("w", directory=store)
    with published[0].update(1):
        with pytest.raises(VersionChanged, match="rank 0 is writing a new version"):
            reader.fetch(timeout=0.05)


def test_a_copy_keeps_readers_and_training_apart(store: dist.Store, published: list[Publication]) -> None:
    tensor = torch.zeros(4)
    weights = publish({"w": tensor}, "w", directory=store, memory="copy")
    published.append(weights)
    reader = Reader("w", directory=store)
    tensor.fill_(1)
    reader.fetch()
    assert reader.tensors["w"].tolist() == [0] * 4
    weights.publish(version=1)
    assert (weights.version, reader.fetch(newer_than=0).version, reader.tensors["w"].tolist()) == (1, 1, [1] * 4)
    with pytest.raises(ConfigError, match="call publish"), weights.update(2):
        raise AssertionError


def test_several_names_at_once_and_memory_given_back(store: dist.Store) -> None:
    before = default_engine().counters()["regions"]
    with publish({"w": torch.ones(4)}, "a", directory=store), publish({"w": torch.zeros(4)}, "b", directory=store):
        a, b = (Reader(name, directory=store) for name in "ab")
        assert a.fetch() and b.fetch()
        assert (a.tensors["w"].sum(), b.tensors["w"].sum()) == (4, 0)
    assert default_engine().counters()["regions"] == before
    with pytest.raises(PeerLost, match="no other rank has"):
        a.fetch()


def test_several_versions_at_once(store: dist.Store, published: list[Publication]) -> None:
    """Who knows an older publication goes on reading it; who looks for the name now finds the newer one."""
    published.append(publish({"w": torch.ones(4)}, "a", version=1, directory=store))
    old = Reader("a", directory=store)
    published.append(publish({"w": torch.zeros(4)}, "a", version=2, directory=store))
    new = Reader("a", directory=store)
    assert (old.fetch(version=1).version, new.fetch(version=2).version) == (1, 2)
    assert (old.tensors["w"].sum(), new.tensors["w"].sum()) == (4, 0)


def test_progress_of_a_fetch_is_told(store: dist.Store, published: list[Publication]) -> None:
    sharded(published, store, torch.ones(40, 10))
    told: list[tuple[int, int]] = []
    Reader("w", directory=store).fetch(progress=lambda done, total: told.append((done, total)))
    assert told == [(400 * i, 1600) for i in range(1, 5)]


TORCHRUN = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from monarch_rdma.sharding import Reader, publish

dist.init_process_group("gloo")
torch.manual_seed(0)
model, other = (torch.nn.Linear(6, 10, bias=False) for _ in range(2))
for one, sizes in ((model, (2, 1)), (other, (1, 2))):
    fully_shard(one, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("r", "dp")))
weights = publish(model, "w", directory="torch")
Reader("w", other, directory="torch").fetch()
same = torch.equal(model.weight.full_tensor(), other.weight.full_tensor())
dist.barrier()
print(f"rank {dist.get_rank()}: {same}\\n", end="", flush=True)
dist.destroy_process_group()
# A thread of gloo may still be about to drop the tensors of its last operation: it needs the GIL for that, and torch
# 2.13 ends the process with SIGABRT where the interpreter is finalizing.
os._exit(0)
"""


def test_a_plain_program_under_torchrun(tmp_path: Path) -> None:
    """No actors: what its ranks share is the store of torch.distributed, and a secret file."""
    Secret.generate().write_file(tmp_path / "secret")
    (tmp_path / "program.py").write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    environment = {**os.environ, "MONARCH_RDMA_SECRET_FILE": str(tmp_path / "secret"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: True", "rank 1: True"]


class Full:
    """A directory that takes nothing."""

    def put(self, *_: Any) -> None:
        raise TransferTimeout("full")

    def get(self, *_: Any) -> list[bytes]:
        raise TransferTimeout("empty")


def test_what_could_not_be_offered_is_not_held() -> None:
    before = default_engine().counters()["regions"]
    for offer in (
        lambda: publish({"w": torch.ones(4)}, "a", directory=Full()),
        lambda: Relay("a", {"w": torch.ones(4)}, directory=Full()),
    ):
        with pytest.raises(TransferTimeout, match="full"):
            offer()
    assert default_engine().counters()["regions"] == before


def test_offers_travel_without_a_directory(published: list[Publication]) -> None:
    published.append(publish({"w": torch.arange(5)}, "w"))
    offer = pickle.loads(pickle.dumps(published[0].offer))
    assert fetch([offer])["w"].tolist() == [0, 1, 2, 3, 4]


def test_an_empty_part_and_a_scalar(store: dist.Store, published: list[Publication]) -> None:
    sharded(published, store, torch.ones(2, 3))  # ranks 2 and 3 have nothing
    published.append(publish({"s": torch.tensor(7)}, "s", directory=store))
    assert fetch("w", directory=store)["w"].tolist() == [[1] * 3] * 2
    assert fetch("s", directory=store)["s"].item() == 7


@pytest.mark.parametrize(
    "name",
    ["bool", "complex64", "complex128", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16"],
)
def test_any_dtype_and_order_of_axes(name: str, store: dist.Store, published: list[Publication]) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(48 * dtype.itemsize, dtype=torch.uint8)
    source = (raw % 2 == 1) if dtype is torch.bool else raw.view(dtype)
    published.append(publish({"w": source.view(2, 3, 4, 2, 1).permute(3, 1, 4, 0, 2)}, "w", directory=store))
    target = torch.empty(2, 3, 1, 2, 4, dtype=dtype)
    fetch("w", {"w": target}, directory=store)
    back = target.permute(3, 1, 4, 0, 2).contiguous()
    assert torch.equal(back.view(torch.uint8).flatten(), source.view(torch.uint8))


OFFER = """
import torch
from monarch_rdma.sharding.directory import Addresses
from monarch_rdma.sharding.state_dict import publish
weights = publish({"w": torch.full((50, 4), 2.0)}, "w", directory=Addresses(engine=engine), engine=engine)
"""


def test_names_at_addresses(child_process: Callable[..., Child], reader: Engine) -> None:
    """Two jobs that share a secret: all that a reader has to know is an address."""
    child = child_process()
    directory = Addresses([child.address], engine=reader)
    with pytest.raises(TransferTimeout, match="has not offered 'w' in time"):
        Reader("w", directory=directory, engine=reader, timeout=0.05)
    child.run(OFFER)
    found = fetch("w", directory=directory, engine=reader)
    assert torch.equal(found["w"], torch.full((50, 4), 2.0))


@settings(max_examples=50, deadline=None)
@given(any_layouts())
def test_layouts_travel_as_json(layout: AnyLayout) -> None:
    assert from_json(json.loads(json.dumps(to_json(layout)))) == layout


MALFORMED = [
    None,
    {},
    {"shape": [1], "mesh": 3},
    {"shape": [1], "mesh": [[["a", 1 << 40]], 0], "placements": []},
    {"shape": [1], "parts": [[0, [1], [[[0], [1]]]]]},
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_layouts_are_refused(data: Any) -> None:
    with pytest.raises(LayoutError, match="malformed layout"):
        from_json(data)


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"format": 2}', '{"format": 3}'])
def test_malformed_offers_are_refused(damage: str) -> None:
    with pytest.raises(ProtocolError, match="an offer of weights is malformed"):
        Offer.from_bytes(damage.encode())


@pytest.mark.parametrize(("place", "what"), [(1, "layout"), (4, "buffer")])
@pytest.mark.parametrize("number", [-1, 1, True, "0", 0.0, [0]])
def test_offers_name_what_they_have(place: int, what: str, number: Any) -> None:
    layout = Layout((4,), Mesh({"x": 1}), [Shard(0)])
    with publish({"w": torch.ones(4)}, "w", layouts={"w": layout}) as publication:
        fields = json.loads(publication.offer.to_bytes())
        assert fields["tensors"][0][place] == 0
        fields["tensors"][0][place] = number
        with pytest.raises(ProtocolError, match=f"an offer of weights is malformed: {what}"):
            Offer.from_bytes(json.dumps(fields).encode())


def test_what_is_wrong_is_said(store: dist.Store, published: list[Publication]) -> None:
    state = {"w": torch.zeros(4, 4)}
    half = Layout((4, 4), Mesh({"a": 2}), [Shard(0)])
    for call, told in [
        (lambda: publish(state, "w", memory="ssd"), "memory is 'ssd', but must be one of in_place, shared, copy"),
        (lambda: publish(state, "w", rank=3, ranks=2), "rank is 3, but must be from 0 to 1"),
        (lambda: publish(state, "w", layouts={"v": half}), "layouts names ['v']"),
        (
            lambda: publish(state, "w", layouts={"w": half}),
            "'w' has the local shape (4, 4) on rank 0, but by its layout",
        ),
        (lambda: publish(state, "w", directory=3), "directory is a int, but must be a torch.distributed Store"),
        (lambda: publish(state, "w", directory="torch"), "torch.distributed is not in use: call init_process_group"),
        (lambda: Reader("w", state), "source is the name 'w', but there is no directory to find it in"),
        (lambda: Reader([], state), "offers is empty"),
        (lambda: publish({"step": 3}, "w"), "there are no tensors in what is to be published as 'w'"),
        (lambda: Reader("w", state, directory=Addresses()), "addresses is empty"),
        (lambda: publish([torch.ones(1)], "w"), "in a module or a state dict, not in a list"),  # type: ignore[arg-type]
        (lambda: publish({3: torch.ones(1)}, "w"), "a tensor is named 3"),  # type: ignore[dict-item]
        (lambda: publish({"w": torch.ones(2, device="meta")}, "w", memory="copy"), "'w' is a tensor of shape (2,) and"),
        (lambda: Reader(5, state), "source is 5, but must be a name or a list of offers"),  # type: ignore[arg-type]
        (lambda: Reader(["w"], state), "source is ['w'], but must be"),  # type: ignore[list-item]
        (lambda: Reader("w", state, directory=store, timeout="1"), "timeout is '1'"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ConfigError, match=re.escape(told)):
            call()
    with pytest.raises(TransferTimeout, match="nobody has offered 'w' in time"):
        Reader("w", state, directory=store, timeout=0.05)
    published.append(publish(state, "w", rank=0, ranks=2))
    published.append(publish({"w": torch.zeros(4, 5)}, "w", rank=1, ranks=2))
    with pytest.raises(ConfigError, match=re.escape("'w' is ('float32', (4, 5), 'in whole') on rank 1, but")):
        Reader([one.offer for one in published], state)
    with pytest.raises(ConfigError, match="must be of one name, one a rank"):
        Reader([published[0].offer] * 2, state)
    reader = Reader([published[0].offer], state)
    for wanted, told in [({"version": "1"}, "version is '1'"), ({"version": 1, "newer_than": 0}, "one of them says")]:
        with pytest.raises(ConfigError, match=told):
            reader.fetch(**wanted)  # type: ignore[arg-type]
    for target in (torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4, device="meta"), torch.zeros(4).expand(4, 4)):
        with pytest.raises(ConfigError, match=r"into\['w'\] is a tensor|overlapping"):
            Reader([published[0].offer], {"w": target})
    for nothing in ({}, {"step": 3}):
        with pytest.raises(ConfigError, match="there is nothing to fetch"):
            Reader([published[0].offer], nothing)
    with pytest.raises(ConfigError, match="there is nothing to fetch"):
        Reader([published[0].offer], keys=lambda key: key == "x")
    with pytest.raises(ConfigError, match=re.escape("keys names ['x'], but there are no such tensors")):
        Reader([published[0].offer], state, keys=["x"])


def test_secrets_tell_jobs_apart(child_process: Callable[..., Child]) -> None:
    child = child_process()
    child.run(OFFER)
    with Engine(secret=Secret.generate()) as stranger:
        with pytest.raises(PermissionError):
            Reader("w", directory=Addresses([child.address], engine=stranger), engine=stranger)
