"""Values through message bodies: what is loaded is what was sent, in memory of its own, and nothing stays behind."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child import Child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_rdma import config
from monarch_rdma.actor.encoding.codec import Incoming, Outgoing, encode, encode_call
from monarch_rdma.actor.encoding.pickling import in_one_stream
from monarch_rdma.errors import AccessDenied, ConfigError, OutOfBounds, PeerLost, ProtocolError
from monarch_rdma.rdma import Engine, RDMABuffer, share
from monarch_rdma.rdma import empty as shared_empty

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


class Way:
    """From the owner's engine to the reader's, which are in one process."""

    def __init__(self, owner: Engine, reader: Engine) -> None:
        self.owner = owner
        self.reader = reader

    def encode(self, value: Any, **options: Any) -> Outgoing:
        return encode(value, engine=self.owner, **options)

    def fetched(self, out: Outgoing, **options: Any) -> Incoming:
        incoming = Incoming(out.body, engine=self.reader, **options)
        incoming.fetch(timeout=20)
        assert incoming.large_bytes == 0
        return incoming

    def __call__(self, value: Any, **options: Any) -> Any:
        out = self.encode(value, **options)
        loaded = self.fetched(out).load()
        out.release()
        return loaded

    @property
    def offered(self) -> int:
        """Regions of the owner that others can reach."""
        self.owner.sweep()
        return len(self.owner.reachable)


@pytest.fixture
def way(owner: Engine, reader: Engine) -> Way:
    return Way(owner, reader)


def same(a: Any, b: Any) -> bool:
    """Equal values of the same types, also within containers, arrays and tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# --- small values ------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.none() | st.integers() | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@given(value=VALUES)
@settings(deadline=None)
def test_plain_values(codec: str, value: Any) -> None:
    out = encode(value, codec=codec)
    assert out.num_large == 0
    for body in (out.body, memoryview(out.body)):
        assert same(Incoming(body).load(), value)


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1,), {}), ((), {"a": 2}), (([1.5, "x"], {"k": (None, b"y")}), {"flag": True})]
)
def test_calls(codec: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert same(Incoming(encode_call(args, kwargs, codec=codec).body).load(), (args, kwargs))


def test_what_was_encoded_is_a_snapshot() -> None:
    value: list[Any] = [1, [2]]
    out = encode(value)
    value[1].append(3)
    assert Incoming(out.body).load() == [1, [2]]


def test_objects_by_reference_and_cycles(way: Way) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    loaded = way(loop)
    assert loaded[1] is loaded
    shared = {"a": 1}
    loaded = way([shared, shared, math.sqrt, datetime(2020, 1, 1), {1, 2}, frozenset({3}), 1j, range(3), ...])
    assert loaded[0] is loaded[1]
    assert loaded[2:] == [math.sqrt, datetime(2020, 1, 1), {1, 2}, frozenset({3}), 1j, range(3), ...]


def test_functions_and_classes_defined_here(way: Way) -> None:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    base = 10
    add: Callable[[int], int] = lambda x: x + base  # noqa: E731
    loaded_add, kind, instance = way((add, Local, Local(5)))
    assert loaded_add(1) == 11
    assert type(instance) is kind
    assert instance.x == 5


def test_a_class_that_comes_home_changes_nothing_there(way: Way) -> None:
    """What comes is a copy of an earlier moment."""

    class Local:
        label = "then"

        def twice(self) -> str:
            return 2 * self.label

    method = Local.twice
    sent, sent_in_one = way.encode([Local, Local()]), in_one_stream(Local)
    Local.label = "now"
    kind, instance = way.fetched(sent).load()
    assert kind is Local and pickle.loads(sent_in_one) is Local
    assert Local.twice is method and instance.twice() == "nownow"


def test_functions_and_classes_of_main_load_in_another_process() -> None:
    program = """
import sys
from monarch_rdma.actor.encoding.codec import encode
class Config:
    def __init__(self, n): self.n = n
    def twice(self): return helper(self.n)
def helper(n): return 2 * n
sys.stdout.buffer.write(encode(Config(21)).body)
"""
    body = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True).stdout
    assert Incoming(body).load().twice() == 42


@pytest.mark.parametrize("make", [threading.Lock, lambda: (x for x in ()), lambda: sys._getframe()])
def test_what_cannot_be_pickled_raises_what_pickle_raises(way: Way, make: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        way.encode([torch.ones(MIB), make()])
    assert way.offered == 0


def test_importing_loads_neither_torch_nor_cloudpickle() -> None:
    program = """
import sys
from monarch_rdma.actor.encoding.codec import Incoming, encode
import monarch_rdma.actor.remote_error
assert Incoming(encode(((1, "a"), {"k": [2.0]})).body).load() == ((1, "a"), {"k": [2.0]})
print([name for name in ("torch", "numpy", "cloudpickle") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- tensors -----------------------------------------------------------------------------------------------------

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@pytest.mark.parametrize("count", [0, 1, 5, 300_000])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(way: Way, dtype: torch.dtype, count: int, codec: str) -> None:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype)
    loaded = way(tensor, codec=codec)
    assert loaded.dtype == dtype and loaded.shape == tensor.shape
    assert torch.equal(loaded.view(torch.uint8), raw)


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@pytest.mark.parametrize("scale", [1, 200])
def test_dense_strides_are_kept_and_others_packed(way: Way, scale: int, codec: str) -> None:
    base = torch.arange(4 * 5 * 6.0 * scale).reshape(4, 5, 6 * scale)
    for view in (base, base.transpose(0, 2), base.permute(1, 0, 2), base[1:3], base[:, ::2], base[2, 3]):
        loaded = way(view, codec=codec)
        assert same(loaded, view)
        assert loaded.stride() == view.stride()
    column = base[:, :, 0]
    loaded = way(column, codec=codec)
    assert same(loaded, column)
    assert loaded.is_contiguous()


def test_channels_last_and_expanded(way: Way) -> None:
    image = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    assert way(image).is_contiguous(memory_format=torch.channels_last)
    expanded = torch.arange(3.0)[:, None].expand(3, 1_000_000)
    out = way.encode(expanded)
    assert out.num_large == 0 and len(out.body) < 1000
    loaded = Incoming(out.body).load()
    assert loaded.stride() == (1, 0)
    assert torch.equal(loaded, expanded)


def test_zero_size_and_zero_dimensions(way: Way) -> None:
    for tensor in (torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), torch.tensor(5.0), torch.ones(8)[8:]):
        assert same(way(tensor), tensor)


@pytest.mark.parametrize("count", [100, 100_000])
def test_views_that_share_share_again(way: Way, count: int) -> None:
    base = torch.arange(count, dtype=torch.int64)
    whole, half, strided, again, pairs = way([base, base[count // 2 :], base[::7], base, base.view(-1, 2)])
    assert again is whole
    whole.fill_(-1)
    assert (half == -1).all() and (strided == -1).all() and (pairs == -1).all()
    assert (base >= 0).all()


def test_a_storage_under_two_dtypes_is_shared_again(way: Way) -> None:
    floats = torch.ones(50_000)
    loaded, as_bytes = way((floats, floats.view(torch.uint8)))
    as_bytes.zero_()
    assert (loaded == 0).all()


def test_overlapping_parts_without_the_whole_are_shared_again(way: Way) -> None:
    base = torch.arange(1000)
    a, b = way((base[100:300], base[200:400]))
    a[150] = -5
    assert b[50] == -5
    assert a.untyped_storage().nbytes() == 300 * 8 + 100 * 8 % 64


def test_a_small_part_of_a_large_storage_travels_alone(way: Way) -> None:
    base = torch.arange(10_000_000)
    out = way.encode([base[5_000_000:5_000_010], base[:10]])
    assert out.num_large == 0 and len(out.body) < 2000
    far, near = Incoming(out.body).load()
    assert torch.equal(far, base[5_000_000:5_000_010]) and torch.equal(near, base[:10])
    assert not shares(far, near)


def test_neighbours_in_one_storage_are_one_buffer(way: Way) -> None:
    flat = torch.randn(300_000)
    parts = list(flat.split(1000))
    out = way.encode(parts)
    assert out.num_large == 1
    assert same(way.fetched(out).load(), parts)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients(way: Way, requires_grad: bool) -> None:
    tensor = torch.ones(3, requires_grad=requires_grad)
    parameter = torch.nn.Parameter(torch.ones(100_000), requires_grad=requires_grad)
    result = tensor * 2
    loaded, loaded_parameter, loaded_result = way((tensor, parameter, result))
    assert loaded.requires_grad == loaded_parameter.requires_grad == loaded_result.requires_grad == requires_grad
    assert type(loaded_parameter) is torch.nn.Parameter
    assert loaded_result.is_leaf


def test_modules_keep_tied_weights(way: Way) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    module[1].weight = module[0].weight
    out = way.encode(module)
    assert out.num_large == 1  # 360 kB, once
    loaded = way.fetched(out).load()
    assert loaded[1].weight is loaded[0].weight
    assert same(list(loaded.state_dict().values()), list(module.state_dict().values()))
    assert loaded(torch.ones(2, 300)).shape == (2, 300)


def test_tensors_with_attributes_keep_them_and_share(way: Way) -> None:
    tensor = torch.arange(50_000)
    tensor.label = "x"  # type: ignore[attr-defined]
    loaded, plain = way((tensor, tensor.view(-1)[10:]))
    assert loaded.label == "x"
    loaded.zero_()
    assert (plain == 0).all()


class Marked(torch.Tensor):
    """A subclass that other processes can import, too."""


def test_subclasses(way: Way) -> None:
    tensor = torch.arange(50_000.0).as_subclass(Marked)
    loaded = way(tensor)
    assert type(loaded) is Marked
    assert torch.equal(loaded.as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_only_torch_knows_to_take_apart(way: Way) -> None:
    dense = torch.randn(300, 300)
    quantised = torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8)
    assert torch.equal(way(quantised).int_repr(), quantised.int_repr())
    assert torch.equal(way(dense.to_sparse()).to_dense(), dense)
    assert torch.equal(way(dense.to_sparse_csr()).to_dense(), dense)
    lazy = torch.randn(5000, dtype=torch.complex64).conj()
    assert torch.equal(way(lazy).resolve_conj(), lazy.resolve_conj())
    meta = way(torch.empty(5, 6, device="meta"))
    assert meta.is_meta and meta.shape == (5, 6)
    storage = way(dense.untyped_storage())
    assert bytes(storage) == bytes(dense.untyped_storage())
    assert way(torch.float16) is torch.float16
    assert way(torch.Size([2, 3])) == torch.Size([2, 3])


def test_a_storage_larger_than_its_tensors_span_keeps_its_place(way: Way) -> None:
    """torch's own reduction sends whole storages: a view with attributes and a plain one still share."""
    base = torch.arange(100_000)
    view = base[500:600]
    view.mark = 1  # type: ignore[attr-defined]
    loaded, plain = way((view, base[550:560]))
    assert torch.equal(loaded, base[500:600]) and torch.equal(plain, base[550:560])
    loaded.zero_()
    assert (plain == 0).all()


def test_a_tensor_whose_storage_was_taken_away_is_refused(way: Way) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(100)
    with pytest.raises(
        ConfigError, match=r"reaches to byte 4000 of its storage, which has only 100 \(it was resized\)"
    ):
        way.encode([torch.ones(MIB), tensor])
    assert way.offered == 0


# --- arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(600_000, dtype=np.int32).reshape(3, -1),
        np.asfortranarray(np.arange(600_000.0).reshape(3, -1)),
        np.arange(600_000.0)[::-3],
        np.arange(600_000.0).reshape(100, -1)[:, ::2],
        np.array(5.5),
        np.zeros((3, 0, 2), np.complex128),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.arange(200_000).astype("m8[ns]"),
        np.array([True, False]),
        np.float16([1, 2]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays(way: Way, array: np.ndarray[Any, Any], codec: str) -> None:
    loaded = way([array], codec=codec)[0]
    assert same(loaded, array)
    assert loaded.flags.writeable
    if array.flags.f_contiguous or array.flags.c_contiguous:
        assert loaded.flags.f_contiguous == array.flags.f_contiguous


def test_arrays_that_only_pickle_takes(way: Way) -> None:
    records = np.zeros(20_000, [("a", "i4"), ("b", "f8")])
    records["a"] = np.arange(20_000)
    assert same(way(records), records)
    objects = np.array([None, "x", 5], dtype=object)
    assert way(objects).tolist() == objects.tolist()
    big_endian = np.arange(100_000, dtype=">i4")
    assert same(way(big_endian), big_endian)
    assert way(np.ma.masked_array([1, 2], [True, False])).mask.tolist() == [True, False]


def test_a_read_only_array_stays_so(way: Way) -> None:
    array = np.arange(100_000)
    array.flags.writeable = False
    loaded = way(array)
    assert not loaded.flags.writeable
    assert same(loaded, array)


def test_memoryviews_and_buffers(way: Way) -> None:
    for count in (10, 100_000):
        view = memoryview(bytearray(8 * count)).cast("d")
        view[3] = 2.5
        loaded = way(view)
        assert (loaded.format, loaded.shape, loaded[3], loaded.readonly) == ("d", (count,), 2.5, False)
        assert way(memoryview(b"x" * count)).readonly
    assert bytes(way(memoryview(b"abcdef")[::2])) == b"ace"
    assert bytes(way(memoryview(b""))) == b""


# --- how bytes travel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["pickle", "safe"])
def test_large_buffers_stay_outside_of_the_body(way: Way, codec: str) -> None:
    tensor, array = torch.randn(MIB), np.arange(MIB)
    out = way.encode([tensor, array, "end"], codec=codec)
    assert out.num_large == 2
    assert len(out.body) < 2000
    incoming = Incoming(out.body, engine=way.reader)
    assert incoming.large_bytes == 12 * MIB
    with pytest.raises(ConfigError, match="12582912 bytes that are still to be fetched"):
        incoming.load()
    incoming.fetch(timeout=20)
    assert incoming.large_bytes == 0
    assert same(incoming.load(), [tensor, array, "end"])


@pytest.mark.parametrize("codec", ["pickle", "safe"])
@pytest.mark.parametrize(
    "value",
    ["x" * 3_000_000, list(range(400_000)), [torch.full((1000,), float(i)) for i in range(1000)]],
    ids=["text", "list", "many tensors"],
)
def test_many_small_things_are_one_large_buffer(way: Way, value: Any, codec: str) -> None:
    out = way.encode(value, codec=codec)
    assert out.num_large == 1
    assert len(out.body) < 100_000
    assert same(way.fetched(out).load(), value)


@pytest.mark.parametrize("count", [1000, MIB], ids=["inline", "large"])
@pytest.mark.parametrize("codec", ["pickle", "safe"])
def test_loaded_memory_is_writable_and_its_own(way: Way, count: int, codec: str) -> None:
    tensor, array = torch.zeros(count), np.zeros(count)
    out = way.encode((tensor, array), codec=codec)
    first, second = (way.fetched(out).load() for _ in range(2))
    first[0].fill_(1)
    first[1].fill(1)
    assert not tensor.any() and not array.any()
    assert not second[0].any() and not second[1].any()
    tensor.fill_(2)
    array.fill(2)
    assert (first[0] == 1).all() and (first[1] == 1).all()
    assert not second[0].any()


def test_alignment(way: Way) -> None:
    base = torch.arange(100, dtype=torch.float64)
    for loaded in way([base, torch.randn(MIB), torch.randn(50_000, dtype=torch.complex128)]):
        assert loaded.data_ptr() % 16 == 0
    assert way(torch.zeros(10, dtype=torch.uint8)[3:]).tolist() == [0] * 7


def test_between_processes(child_process: Callable[..., Child], reader: Engine) -> None:
    sender = child_process(name="sender")
    body = sender.run(
        """
        import torch, numpy
        from monarch_rdma.actor.encoding.codec import encode
        x = torch.arange(3_000_000.0).reshape(1000, 3000)
        out = encode({"x": x, "t": x.t(), "a": numpy.arange(500_000), "n": 5}, engine=engine)
        result = out.body
        """
    )
    incoming = Incoming(body, engine=reader)
    incoming.fetch(timeout=20)
    sender.run("out.release(); x.zero_()")
    loaded = incoming.load()
    assert torch.equal(loaded["x"], torch.arange(3_000_000.0).reshape(1000, 3000))
    assert shares(loaded["x"], loaded["t"])
    assert np.array_equal(loaded["a"], np.arange(500_000))
    with pytest.raises(AccessDenied):
        Incoming(body, engine=reader).fetch(timeout=20)


def test_a_sender_that_died_is_told(child_process: Callable[..., Child], reader: Engine) -> None:
    sender = child_process(name="sender")
    body = sender.run(
        """
        import torch
        from monarch_rdma.actor.encoding.codec import encode
        out = encode([torch.ones(200_000) for _ in range(3)], engine=engine)
        result = out.body
        """
    )
    sender.kill()
    incoming = Incoming(body, engine=reader)
    with pytest.raises(PeerLost):
        incoming.fetch(timeout=20)
    assert incoming.large_bytes == 2_400_000


def test_handles_travel_within_values(way: Way) -> None:
    tensor = torch.arange(10.0)
    buffer = RDMABuffer(tensor, engine=way.owner)
    first, second = Incoming(way.encode([buffer, buffer]).body).load()
    assert first is second
    assert first.shape == (10,)


@pytest.mark.parametrize("inline", [4096, 1 << 20])
def test_the_limit_for_inline_buffers(way: Way, inline: int) -> None:
    value = [torch.ones(2000), np.ones(2000), torch.ones(0), np.ones(0)]
    with config.configured(message_inline_bytes=inline):
        out = encode(value, engine=way.owner)
    assert out.num_large == (2 if inline == 4096 else 0)
    assert same(way.fetched(out).load(), value)


# --- views -------------------------------------------------------------------------------------------------------


def test_a_view_is_the_senders_own_memory(way: Way) -> None:
    tensor = share(torch.arange(100_000.0), engine=way.owner)
    array = share(torch.arange(100_000.0), engine=way.owner).numpy()
    loaded, loaded_array = way((tensor[1000:], array), view=True)
    assert torch.equal(loaded, tensor[1000:])
    assert not loaded_array.flags.writeable
    tensor[1000] = -1
    array[0] = -2
    assert loaded[0] == -1 and loaded_array[0] == -2
    del tensor, array
    gc.collect()
    assert loaded[-1] == 99_999 and loaded_array[-1] == 99_999


def test_what_cannot_be_mapped_is_fetched(way: Way) -> None:
    tensor = torch.arange(100_000.0)
    small = share(torch.arange(10.0), engine=way.owner)
    loaded, loaded_small = way((tensor, small), view=True)
    loaded.zero_()
    loaded_small.zero_()
    assert tensor[5] == 5 and small[5] == 5


def test_without_view_shared_memory_is_copied(way: Way) -> None:
    tensor = share(torch.arange(100_000.0), engine=way.owner)
    loaded = way(tensor)
    tensor.zero_()
    assert loaded[5] == 5
    loaded.zero_()


def test_a_view_between_processes_is_no_copy(child_process: Callable[..., Child], reader: Engine) -> None:
    sender = child_process(name="sender")
    body = sender.run(
        """
        from monarch_rdma.actor.encoding.codec import encode
        x = rdma.zeros(1_000_000, engine=engine)
        out = encode(x, view=True, engine=engine)
        result = out.body
        """
    )
    incoming = Incoming(body, engine=reader)
    incoming.fetch(timeout=20)
    loaded = incoming.load()
    assert not loaded.any()
    sender.run("out.release(); x.fill_(7)")
    assert (loaded == 7).all()


# --- release and relay -------------------------------------------------------------------------------------------


def test_release_ends_access_and_lets_go_of_the_memory(way: Way) -> None:
    out = way.encode([torch.ones(MIB), np.ones(MIB), "x" * 2 * MIB])
    assert out.num_large == way.offered == 3
    assert not out.is_released
    out.release()
    out.release()
    assert out.is_released
    assert way.offered == 0
    gc.collect()
    assert len(way.owner.regions) == 0
    with pytest.raises(AccessDenied):
        Incoming(out.body, engine=way.reader).fetch(timeout=20)


def test_letting_go_releases(way: Way) -> None:
    body = way.encode(torch.ones(MIB)).body
    gc.collect()
    assert way.offered == 0
    with pytest.raises(AccessDenied):
        Incoming(body, engine=way.reader).fetch(timeout=20)


def test_release_after_the_engine_was_closed(secret: Any) -> None:
    engine = Engine(secret=secret)
    out = encode([torch.ones(MIB), torch.ones(MIB)], engine=engine)
    engine.close()
    out.release()
    assert out.is_released


def test_small_messages_have_nothing_to_release() -> None:
    out = encode((1, 2))
    out.release()
    assert not out.is_released
    assert Incoming(out.body).load() == (1, 2)


def test_where_registration_fails_nothing_stays(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RDMABuffer] = []

    def second_fails(*args: Any, **options: Any) -> RDMABuffer:
        if made:
            raise MemoryError("no more")
        made.append(RDMABuffer(*args, **options))
        return made[-1]

    monkeypatch.setattr("monarch_rdma.actor.encoding.frame.RDMABuffer", second_fails)
    with pytest.raises(MemoryError, match="no more"):
        way.encode([torch.ones(MIB), torch.ones(MIB)])
    assert len(made) == 1
    assert way.offered == 0


@pytest.mark.parametrize("codec", ["pickle", "safe"])
def test_relay(way: Way, secret: Any, codec: str) -> None:
    value = [torch.randn(MIB), torch.ones(5), np.arange(MIB), "x" * 2_000_000]
    out = way.encode(value, codec=codec)
    incoming = way.fetched(out)
    relayed = incoming.relay()
    out.release()
    with Engine(secret=secret, name="leaf") as leaf:
        last = Incoming(relayed.body, engine=leaf)
        assert last.large_bytes == Incoming(out.body).large_bytes
        last.fetch(timeout=20)
        relayed.release()
        assert same(last.load(), value)
        assert same(incoming.load(), value)


def test_what_is_relayed_does_not_change_with_what_was_loaded(way: Way) -> None:
    tensor = torch.ones(MIB)
    incoming = way.fetched(way_out := way.encode(tensor))
    relayed = incoming.relay()
    loaded = incoming.load()
    loaded.zero_()
    last = Incoming(relayed.body, engine=way.owner)
    last.fetch(timeout=20)
    assert torch.equal(last.load(), tensor)
    way_out.release()


def test_a_relayed_view_is_still_the_senders_memory(way: Way, secret: Any) -> None:
    tensor = shared_empty(MIB, engine=way.owner).fill_(1)
    out = way.encode(tensor, view=True)
    relayed = way.fetched(out).relay()
    with Engine(secret=secret, name="leaf") as leaf:
        last = Incoming(relayed.body, engine=leaf)
        last.fetch(timeout=20)
        loaded = last.load()
        tensor.fill_(2)
        assert (loaded == 2).all()
        out.release()  # then it cannot be mapped any more, but still be read
        late = Incoming(relayed.body, engine=leaf)
        late.fetch(timeout=20)
        copy = late.load()
        tensor.fill_(3)
        assert (copy == 2).all()
        relayed.release()
        del loaded


def test_relay_of_small_messages_and_out_of_order(way: Way) -> None:
    for value in ((1, 2), torch.ones(3)):
        relayed = Incoming(way.encode(value).body).relay()
        assert relayed.num_large == 0
        assert same(Incoming(relayed.body).load(), value)
    incoming = Incoming(way.encode(torch.ones(MIB)).body, engine=way.reader)
    with pytest.raises(ConfigError, match="still to be fetched"):
        incoming.relay()


def test_a_message_is_loaded_once(way: Way) -> None:
    for value in ((1, 2), torch.ones(3)):
        incoming = Incoming(way.encode(value).body)
        incoming.load()
        with pytest.raises(ConfigError, match="loaded"):
            incoming.load()
        with pytest.raises(ConfigError, match="loaded"):
            incoming.relay()


# --- malformed bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xff" * 10,
        b"\x01",
        b"\x01\x00\x00\x00\x05[]",
        b"\x01\x00\x00\x00\x02[]",
        b"\x03\x00\x00\x00\x02{}",
        b"\x01\xff\xff\xff\xff",
        b"\x03\x00\x00\x00\x03\xff\xff\xff",
        b"\x01\x00\x00\xea\x60" + b"[" * 60_000,
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Incoming(body)


def framed(header: str, payload: bytes = b"") -> bytes:
    return b"\x03" + len(header).to_bytes(4, "big") + header.encode() + payload


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ("[1,1,null,[],[],[0]]", b"N"),
        ("[1,1,null,[],[],[-1]]", b"N"),
        ("[1,2,null,[],[],[]]", b"NN"),
        ("[1,1,null,[],[],[]]", b"NN"),
        ("[-1,1,null,[[2,null,null]],[],[]]", b"N"),
        ("[true,1,null,[],[],[]]", b"N"),
        ("[1.0,1,null,[],[],[]]", b"N"),
        ("[1,1,null,[[0,null]],[],[]]", b"N"),
        ("[1,1,null,[[0,null,null,[],true]],[],[]]", b"N"),
        ("[1,1,null,[[0,5,null]],[],[]]", b"N"),
        ('[1,1,null,[[0,null,"x"]],[],[]]', b"N"),
        ('[1,5,null,[[4,null,null]],[[0,0,"float32",[2],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[0,1,"float32",[1],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[0,0,"float32",[-1],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[1,0,"float32",[1],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[0,0,"save",[1],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[0,0,"float32",[1,1],[1]]],[-1]]', b"Nabcd"),
        ('[1,5,null,[[4,null,null]],[[0,0,"float32",[4000000000,4000000000],[0,0]]],[-1]]', b"Nabcd"),
    ],
)
def test_headers_that_lie_are_refused(header: str, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        Incoming(framed(header, payload)).load()


@pytest.mark.parametrize("handle", ['"x"', '"[1]"', '""', '"[1,\\"AAAA\\",true,[\\"uint8\\",1,[4],[1],0]]"'])
def test_handles_that_lie_are_refused(reader: Engine, handle: str) -> None:
    incoming = Incoming(framed(f"[1,1,null,[[4,{handle},null]],[],[0]]", b"N"), engine=reader)
    with pytest.raises(ProtocolError):
        incoming.fetch(timeout=5)


@pytest.mark.parametrize("says_so", [False, True])
def test_a_region_smaller_than_announced_is_found_before_memory_is_taken(
    way: Way, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 60
    buffer = RDMABuffer(memoryview(bytearray(4)), engine=way.owner)
    fields = json.loads(buffer.to_bytes())
    if not says_so:
        fields[3][2] = [size]
    header = json.dumps([1, 1, None, [[size, json.dumps(fields), True]], [], [0]])
    incoming = Incoming(framed(header, b"N"), engine=way.reader)
    monkeypatch.setattr("monarch_rdma.actor.encoding.frame._new_block", None)
    with pytest.raises((ProtocolError, OutOfBounds)):
        incoming.fetch(timeout=5)


# --- the safe codec ----------------------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (((1, {"x": Custom()}), {}), r"args\[1\]\['x'\] is a test_codec.Custom"),
        (((), {"key": [1, Custom]}), r"kwargs\['key'\]\[1\] is a builtins.type"),
        (Custom(), "value is a test_codec.Custom"),
        ({"a": {1, 2}}, r"value\['a'\] is a builtins.set"),
        ({(1, Custom()): 2}, r"value key .*\[1\] is a test_codec.Custom"),
        ([np.float64(1)], r"is a numpy.float64"),
        ([np.array([None])], r"array of object"),
        ([np.zeros(2, [("a", "i4")])], r"value\[0\] is an array of \[\('a', '<i4'\)\]"),
        ([torch.nn.Parameter(torch.ones(1))], r"is a torch.nn.parameter.Parameter"),
        ([torch.ones(3).to_sparse()], r"value\[0\] is a tensor that codec='safe' does not send"),
        ([torch.empty(3, device="meta")], "on meta"),
        (lambda: None, "is a builtins.function"),
    ],
)
def test_safe_refuses_what_is_not_safe(value: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        encode(value, codec="safe")


def test_safe_refuses_what_is_nested_without_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested deeper than 100, or contains itself"):
        encode(loop, codec="safe")
    deep: list[Any] = []
    for _ in range(99):
        deep = [deep]
    assert same(Incoming(encode(deep, codec="safe").body).load(), deep)


def test_safe_integers_of_any_size() -> None:
    values = [0, 255, -256, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 3**500, -(3**500), 10**5000]
    assert Incoming(encode(values, codec="safe").body).load() == values


def test_safe_keeps_gradients_sharing_and_strides(way: Way) -> None:
    base = torch.arange(60_000.0).reshape(200, 300)
    loaded = way([base, base.t(), base[5], torch.ones(2, requires_grad=True)], codec="safe")
    loaded[0].zero_()
    assert not loaded[1].any() and not loaded[2].any()
    assert loaded[1].stride() == (1, 300)
    assert loaded[3].requires_grad


def test_a_safe_receiver_refuses_pickles() -> None:
    for value in ((1, 2), torch.ones(3)):
        with pytest.raises(ProtocolError, match="is a pickle"):
            Incoming(encode(value).body, accept="safe")
        assert same(Incoming(encode(value, codec="safe").body, accept="safe").load(), value)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="codec is 'json'"):
        encode(1, codec="json")


@given(data=st.binary(max_size=60))
@settings(deadline=None, max_examples=300)
def test_safe_survives_any_bytes(data: bytes) -> None:
    try:
        Incoming(b"\x02" + data).load()
    except ProtocolError:
        return


SAMPLES = [
    encode(value, codec="safe").body
    for value in (
        [None, True, 1, 2**80, 1.5, "text", b"bytes", (1, {"k": [2], 3: ()})],
        {"t": torch.arange(6.0).reshape(2, 3).t(), "g": torch.ones(2, requires_grad=True)},
        [np.arange(6).reshape(2, 3), np.array(["x"]), np.array(["2020-01-01"], "M8[D]"), np.zeros((0, 2))],
    )
]


@given(data=st.data())
@settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
def test_safe_survives_mutations_of_good_messages(data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(1, len(body) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "flip"]))
        if kind == "set":
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "flip":
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut" and at + 1 < len(body) - 1:
            del body[at : data.draw(st.integers(at + 1, len(body) - 1))]
        else:
            body[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        incoming = Incoming(bytes(body), accept="safe")
        if incoming.large_bytes == 0:
            incoming.load()
    except ProtocolError:
        return


@pytest.mark.parametrize("letter", [b"l", b"u", b"d", b"s", b"b", b"I"])
def test_safe_lengths_are_checked_before_memory_is_taken(letter: bytes) -> None:
    with pytest.raises(ProtocolError, match="4294967295 items"):
        Incoming(b"\x02" + letter + b"\xff" * 4 + b"N").load()


def test_safe_never_unpickles(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr("monarch_rdma.actor.encoding.codec._loads", refuse)
    assert same(way([torch.ones(MIB), np.ones(MIB), 5], codec="safe"), [torch.ones(MIB), np.ones(MIB), 5])


# --- processes ---------------------------------------------------------------------------------------------------


def test_a_forked_child_encodes_and_loads_by_itself(way: Way) -> None:
    out = way.encode(torch.ones(MIB))
    child = os.fork()
    if child == 0:
        out.release()  # is the parent's: nothing happens
        good = same(Incoming(encode([1, torch.ones(3)]).body).load(), [1, torch.ones(3)])
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(way.fetched(out).load(), torch.ones(MIB))


def test_several_threads_at_once(way: Way) -> None:
    failures: list[int] = []

    def use(number: int) -> None:
        for turn in range(20):
            value = [torch.full((300_000,), float(number)), np.full(1000, turn), number]
            if not same(way(value), value):
                failures.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert way.offered == 0
