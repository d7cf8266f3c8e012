"""Memory that peers on the host can map: new, copied into, and moved into in place."""

from __future__ import annotations

import errno
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMABuffer, empty, share, share_, shared, shared_memory, zeros


def lane(tensor: torch.Tensor, owner: Engine, reader: Engine) -> str:
    """How a peer reads it; checks that it reads the right values."""
    buffer = RDMABuffer(tensor, engine=owner)
    target = torch.empty_like(tensor, requires_grad=False)
    done = RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader).read_into(target)
    done.get(30)
    assert torch.equal(target, tensor)
    buffer.drop().get(30)
    return done.explain().lane


def num_mapped() -> int:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:monarch_rdma (deleted)" in line for line in maps)


@pytest.mark.parametrize("make", [zeros, empty])
def test_new_tensors(owner: Engine, reader: Engine, make: Callable[..., torch.Tensor]) -> None:
    tensor = make(3, 5, dtype=torch.bfloat16, engine=owner)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    assert lane(tensor, owner, reader) == "shm-mapped"
    assert make((2, 3), engine=owner).shape == (2, 3)
    assert make(torch.Size([2]), engine=owner).dtype == torch.float32
    assert make(engine=owner).shape == ()
    assert make(0, 4, engine=owner).shape == (0, 4)
    assert make(4, requires_grad=True, engine=owner).requires_grad
    assert not zeros(1 << 20, engine=owner).any()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int8, torch.uint64, torch.float64]
)
def test_dtypes(owner: Engine, dtype: torch.dtype) -> None:
    tensor = zeros(7, dtype=dtype, engine=owner)
    assert tensor.dtype == dtype
    assert tensor.untyped_storage().nbytes() >= 7 * dtype.itemsize


@pytest.mark.parametrize("size", [(-1,), (2.0,), ("2",), (2, None), ([2, "x"],)])
def test_a_size_that_is_none_is_named(owner: Engine, size: tuple[Any, ...]) -> None:
    with pytest.raises(errors.ConfigError, match="size is"):
        zeros(*size, engine=owner)


def test_what_is_no_dtype_or_size_is_named(owner: Engine) -> None:
    with pytest.raises(errors.ConfigError, match="dtype is 'float'"):
        zeros(2, dtype="float", engine=owner)  # type: ignore[arg-type]
    for size in (-1, 1.5, True, "8"):
        with pytest.raises(errors.ConfigError, match="size is"):
            shared_memory(size, engine=owner)  # type: ignore[arg-type]


def test_more_memory_than_there_is(owner: Engine) -> None:
    with pytest.raises(errors.RdmaError) as caught:
        zeros(1 << 58, dtype=torch.uint8, engine=owner)
    assert isinstance(caught.value, errors.RegistrationError | errors.ResourceExhausted)
    assert caught.value.size == 1 << 58
    with pytest.raises(errors.RegistrationError, match="more than a process can have"):
        zeros(1 << 40, 1 << 40, engine=owner)


def test_memory_that_a_limit_forbids_names_the_limit() -> None:
    program = """
import resource
from monarch_rdma import errors, rdma
engine = rdma.default_engine()
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
try:
    rdma.shared_memory(1 << 40, engine=engine)
except errors.RegistrationError as error:
    print(error.sys_errno, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{errno.ENOMEM} can't map {1 << 40} bytes of shared memory")
    assert f"address space: {1 << 30} KiB, see `ulimit -v`" in done.stdout


def test_shared_memory_without_torch_tensors(owner: Engine, reader: Engine) -> None:
    data = shared_memory(1000, engine=owner)
    assert (data.nbytes, data.format, data.readonly, bytes(data[:4])) == (1000, "B", False, bytes(4))
    target = bytearray(1000)
    data[:3] = b"abc"
    done = RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader).read_into(target)
    done.get(30)
    assert target[:4] == b"abc\0" and done.explain().lane == "shm-mapped"
    assert shared_memory(0, engine=owner).nbytes == 0


def test_share_copies(owner: Engine, reader: Engine) -> None:
    tensor = torch.randn(6, 4, requires_grad=True)
    copy = share(tensor[:, ::2], engine=owner)
    assert torch.equal(copy, tensor[:, ::2]) and copy.is_contiguous()
    assert copy.requires_grad and copy.is_leaf
    assert lane(copy.detach(), owner, reader) == "shm-mapped"
    with pytest.raises(errors.ConfigError, match="tensor is a bytearray"):
        share(bytearray(4), engine=owner)  # type: ignore[arg-type]


def test_memory_is_freed_with_its_last_tensor(owner: Engine) -> None:
    before = num_mapped()
    tensor = zeros(1 << 20, engine=owner)
    part = tensor[4:].view(-1, 3)
    assert num_mapped() == before + 1
    del tensor
    gc.collect()
    assert num_mapped() == before + 1
    del part
    gc.collect()
    assert num_mapped() == before
    assert not owner.shared_blocks


def test_memory_lives_while_a_region_is_on_it(owner: Engine, reader: Engine) -> None:
    blob = RDMABuffer(zeros(100, engine=owner).fill_(3), engine=owner).to_bytes()
    gc.collect()
    theirs, target = RDMABuffer.from_bytes(blob, engine=reader), torch.zeros(100)
    theirs.read_into(target).get(30)
    assert bool((target == 3).all())
    theirs.drop().get(30)
    owner.sweep()
    gc.collect()
    assert not owner.shared_blocks


def test_torchs_own_share_memory_takes_nothing_from_a_region(owner: Engine, reader: Engine) -> None:
    """It exchanges the storage's memory: the region keeps the one it was made on, until it is dropped."""
    tensor = zeros(100, engine=owner).fill_(3)
    buffer = RDMABuffer(tensor, engine=owner)
    theirs, target = RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader), torch.zeros(100)
    tensor.share_memory_()
    gc.collect()
    theirs.read_into(target).get(30)
    assert bool((target == 3).all())
    buffer.drop().get(30)
    del buffer
    gc.collect()
    owner.sweep()
    owner.sweep()
    assert num_mapped() == 0 or not owner.orphans


def test_memory_stays_when_its_engine_is_closed(owner: Engine) -> None:
    tensor = zeros(1 << 16, engine=owner).fill_(3)
    before = num_mapped()
    owner.close()
    assert bool((tensor == 3).all())
    tensor.fill_(4)
    assert num_mapped() == before
    del tensor
    gc.collect()
    assert num_mapped() == before - 1


# --- in place


class Tied(torch.nn.Module):
    """Shared weights, a buffer, a view of a parameter's storage, a frozen and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Parameter(torch.randn(3, 4).T, requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.zeros(0))
        self.register_buffer("row", self.first.weight.data[2])
        self.rnn = torch.nn.LSTM(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x)))).sum() + self.row.sum() + self.rnn(x)[0].sum()


@pytest.fixture(params=["swap", "set"])
def torchs_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's exchange of storages, and as it is with a torch that has none."""
    if request.param == "set":
        monkeypatch.setattr(shared, "_SWAP", "no_such_method")
    return str(request.param)


def test_share_in_place_keeps_a_module_what_it_is(owner: Engine, reader: Engine, torchs_way: str) -> None:
    torch.manual_seed(1)
    model, x = Tied().eval(), torch.randn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identity = {
        name: (id(p), p.requires_grad, p.stride()) for name, p in model.named_parameters(remove_duplicate=False)
    }
    assert share_(model, engine=owner) is model
    assert len(owner.shared_blocks) == 1  # one piece for all
    assert {
        name: (id(p), p.requires_grad, p.stride()) for name, p in model.named_parameters(remove_duplicate=False)
    } == identity
    assert model.first.weight is model.second.weight
    assert model.row.data_ptr() == model.first.weight[2].data_ptr()
    assert torch.equal(model(x), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
        if tensor.numel():
            assert lane(tensor, owner, reader) == "shm-mapped"
    model(x).backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, state["first.weight"])
    assert torch.equal(model.row, model.first.weight.detach()[2])
    share_(model, engine=owner)  # what is there stays
    assert len(owner.shared_blocks) == 1


def test_share_in_place_moves_views_along(owner: Engine, reader: Engine) -> None:
    tensor = torch.arange(20.0)
    view = tensor[5:15].view(2, 5)
    assert share_(tensor, engine=owner) is tensor
    tensor[7] = -1
    assert view[0, 2] == -1
    assert lane(view, owner, reader) == "shm-mapped"
    assert tensor.tolist() == [*map(float, range(7)), -1.0, *map(float, range(8, 20))]


def test_share_in_place_gives_the_old_memory_back(owner: Engine) -> None:
    array = numpy.ones(1 << 20, dtype=numpy.float32)
    tensor = torch.from_numpy(array)  # whose storage holds the array
    old = weakref.ref(array)
    del array
    share_(tensor, engine=owner)
    gc.collect()
    assert old() is None
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("what", ["text", None, bytearray(4), [torch.zeros(2)]])
def test_what_cannot_be_shared_is_named(owner: Engine, what: Any) -> None:
    with pytest.raises(errors.ConfigError, match="tensor is a"):
        share_(what, engine=owner)


def test_nothing_is_moved_where_one_tensor_cannot_be(owner: Engine) -> None:
    model = Tied()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    before = model.first.weight.data_ptr()
    with pytest.raises(errors.ConfigError, match="sparse is a tensor .* layout"):
        share_(model, engine=owner)
    assert model.first.weight.data_ptr() == before


def test_a_storage_that_a_buffer_holds_is_not_moved(owner: Engine) -> None:
    model = Tied()
    buffer = RDMABuffer(model.row, engine=owner)
    with pytest.raises(errors.ConfigError, match=r"first.weight is held by an RDMABuffer"):
        share_(model, engine=owner)
    buffer.drop().get(30)
    share_(model, engine=owner)


def test_shared_tensors_pickle_as_any_other(owner: Engine) -> None:
    tensor = zeros(4, engine=owner).fill_(2)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
