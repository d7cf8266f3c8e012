"""The GPU kernels, hipified and executed on the CPU, against the references of monarch_rdma.kernels, bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import emulated_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import put_script

from monarch_rdma.errors import ConfigError
from monarch_rdma.kernels import Workspaces, peer_collective, peer_collective_reference, peers
from monarch_rdma.kernels.checksum import checksum_reference
from monarch_rdma.kernels.pack import pack_reference
from monarch_rdma.kernels.quantize import dequantize_reduce_reference, dequantize_reference, quantize_reference
from monarch_rdma.kernels.reduce import reduce_reference

pytestmark = pytest.mark.timeout(400)  # the first test compiles the kernels
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]
OPS = ["sum", "avg", "min", "max", "prod"]
CODES = {  # mr_dtype
    dtype: code
    for code, dtype in enumerate(
        [*INTEGERS, torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8, torch.bool]
    )
}
ONE_SHOT, TWO_SHOT, REDUCE_SCATTER, ALL_GATHER = range(4)


@pytest.fixture(params=[32, 64], autouse=True)
def wave(request: pytest.FixtureRequest) -> int:
    lanes: int = request.param
    emulated_kernels.set_wave(lanes)
    return lanes


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numel() == b.numel() and torch.equal(bits(a), bits(b))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(count: int, dtype: torch.dtype, random: torch.Generator, specials: bool = True) -> torch.Tensor:
    """Any numbers, NaN and Inf among them; the elements begin `offset` elements into an allocation of their own."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=random).to(torch.bool)
    if dtype in INTEGERS:
        most = torch.iinfo(dtype)
        return torch.randint(most.min, most.max, (count,), generator=random, dtype=torch.int64).to(dtype)
    x = torch.randn(count, generator=random, dtype=torch.float64) * torch.randint(1, 1000, (count,), generator=random)
    x[torch.rand(count, generator=random) < 0.1] = 0
    if specials and count:
        for special in (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40):
            x[int(torch.randint(0, count, (1,), generator=random))] = special
    return x.to(torch.float32).to(dtype) if dtype != torch.float64 else x


def misaligned(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements after an address that is a multiple of 64."""
    place = torch.empty(x.numel() + offset, dtype=x.dtype)
    place[offset:] = x
    return place[offset:]


# --- pack, unpack ------------------------------------------------------------------------------------------------


@st.composite
def strided(draw: st.DrawFn) -> Callable[[torch.dtype, torch.Generator], torch.Tensor]:
    """A tensor of 0 to 5 dimensions, cut, stepped, transposed or expanded."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=5))
    cuts = [(draw(st.integers(0, 2)), draw(st.integers(1, 3))) for _ in sizes]
    order = draw(st.permutations(range(len(sizes))))
    expanded = draw(st.integers(0, 4)) if draw(st.integers(0, 4)) == 0 else None

    def make(dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
        whole = [size * step + begin for size, (begin, step) in zip(sizes, cuts, strict=True)]
        x = values(int(torch.Size(whole).numel()), dtype, random).reshape(whole)
        for dim, (begin, step) in enumerate(cuts):
            x = x[(slice(None),) * dim + (slice(begin, None, step),)]
        x = x.permute(order) if order else x
        return x if expanded is None else x[None].expand(expanded, *x.shape)

    return make


@settings(max_examples=40)
@given(st.data(), st.lists(strided(), max_size=5), st.integers(0, 2**31))
def test_pack_copies_bytes(data: st.DataObject, makers: list[Callable[..., torch.Tensor]], seed: int) -> None:
    random = seeded(seed)
    dtype = data.draw(st.sampled_from([*DTYPES, torch.complex128]))
    parts = [
        torch.view_as_complex(torch.randn(*make(torch.uint8, random).shape, 2, dtype=torch.float64, generator=random))
        if dtype == torch.complex128
        else make(dtype, random)
        for make in makers
    ]
    count = sum(part.numel() for part in parts)
    out = misaligned(torch.zeros(count, dtype=dtype), data.draw(st.sampled_from([0, 0, 1, 3])))
    emulated_kernels.ops().pack(parts, out)
    assert same(out, torch.cat([torch.zeros(0, dtype=dtype), *[part.reshape(-1) for part in parts]]))

    outs = [torch.zeros_like(part.contiguous()).transpose(0, -1) if part.dim() else part.clone() for part in parts]
    emulated_kernels.ops().unpack(out, outs)
    expected = torch.split(out, [part.numel() for part in parts])
    assert all(same(got, want) for got, want in zip(outs, expected, strict=False))


@pytest.mark.parametrize(("shape", "offset"), [((5000,), 0), ((64, 1030), 0), ((64, 1030), 1), ((300, 33), 2)])
def test_pack_of_whole_tiles(shape: tuple[int, ...], offset: int) -> None:
    x = misaligned(torch.arange(int(torch.Size(shape).numel()) * 2, dtype=torch.int32), offset)
    part = x.reshape(*shape[:-1], shape[-1] * 2)[..., 1 : 1 + shape[-1]]
    out = torch.zeros(part.numel(), dtype=torch.int32)
    emulated_kernels.ops().pack([part], out)
    assert same(out, part.reshape(-1))
    back = torch.zeros_like(x).reshape(*shape[:-1], shape[-1] * 2)[..., 1 : 1 + shape[-1]]
    emulated_kernels.ops().unpack(out, [back])
    assert same(back, part)


def on_cpu(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(sum(part.numel() for part in parts), dtype=dtype)
    torch.ops.monarch_rdma.pack_cast(parts, out)
    return out


@settings(max_examples=30)
@given(st.data(), st.lists(strided(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_pack_with_a_cast(data: st.DataObject, makers: list[Callable[..., torch.Tensor]], seed: int) -> None:
    random = seeded(seed)
    parts = [make(data.draw(st.sampled_from(DTYPES)), random) for make in makers]
    dtype = data.draw(st.sampled_from(DTYPES))
    count = sum(part.numel() for part in parts)
    out = misaligned(torch.zeros(count, dtype=dtype), data.draw(st.sampled_from([0, 0, 1])))
    emulated_kernels.ops().pack_cast(parts, out)
    assert same(out, on_cpu(parts, dtype))

    outs = [torch.zeros(part.shape, dtype=data.draw(st.sampled_from(DTYPES))) for part in parts]
    emulated_kernels.ops().unpack_cast(out, outs)
    pieces = torch.split(out, [part.numel() for part in parts])
    for got, piece in zip(outs, pieces, strict=True):
        assert same(got, on_cpu([piece], got.dtype))


@pytest.mark.parametrize("source", DTYPES)
def test_a_cast_of_contiguous_elements(source: torch.dtype, wave: int) -> None:
    x = values(8 * 11, source, seeded(wave))
    for target in DTYPES:
        out = torch.zeros(x.numel(), dtype=target)
        emulated_kernels.ops().pack_cast([x], out)
        assert same(out, on_cpu([x], target)), target
        # torch leaves open what becomes of Inf and NaN as an integer, and which NaN comes of a NaN.
        wide = x.to(torch.float64)
        defined = wide.isfinite() if target in INTEGERS else ~wide.isnan()
        assert same(out[defined], pack_reference([x], target)[defined]), target
        assert target not in FLOATS or bool(out[~defined].isnan().all())


# --- reduce ------------------------------------------------------------------------------------------------------


def allowed(dtype: torch.dtype, op: str) -> bool:
    return dtype in FLOATS if op == "avg" else dtype != torch.bool or op in ("min", "max")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(dtype: torch.dtype, op: str, wave: int) -> None:
    if not allowed(dtype, op):
        with pytest.raises(RuntimeError, match=f"op {op} is not for"):
            emulated_kernels.ops().reduce([torch.zeros(3, dtype=dtype)], torch.zeros(3, dtype=dtype), op)
        return
    random = seeded(OPS.index(op) * 2 + wave)
    for count, shards, offset in [(0, 2, 0), (1, 1, 0), (17, 2, 0), (1000, 4, 0), (333, 8, 1), (4099, 3, 0)]:
        inputs = [misaligned(values(count, dtype, random), offset) for _ in range(shards)]
        out = torch.zeros(count, dtype=dtype)
        emulated_kernels.ops().reduce(inputs, out, op)
        want = reduce_reference(inputs, op)
        assert same(out, want), (count, shards)
        emulated_kernels.ops().reduce(inputs, inputs[-1], op)  # in place
        assert same(inputs[-1], want), (count, shards)


def test_reduce_takes_at_most_128_shards() -> None:
    x = torch.ones(5)
    out = torch.zeros(5)
    emulated_kernels.ops().reduce([x] * 128, out, "sum")
    assert out.tolist() == [128.0] * 5
    with pytest.raises(RuntimeError, match="shards must be at most 128 tensors on a GPU, got 129"):
        emulated_kernels.ops().reduce([x] * 129, out, "sum")


# --- quantize, dequantize ----------------------------------------------------------------------------------------


def blocks_of(count: int, block: int) -> int:
    return (count + block - 1) // block


@pytest.mark.parametrize("target", [torch.int8, *FLOAT8])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 48, 128, 512, 528, 4112])
def test_quantize_and_back(source: torch.dtype, target: torch.dtype, block: int, wave: int) -> None:
    random = seeded(block + wave)
    for count, offset, with_error in [(0, 0, True), (5, 0, False), (block * 3 + 7, 0, True), (block + 33, 1, True)]:
        x = misaligned(values(count, source, random, specials=block <= 48), offset)
        error = values(count, torch.float32, random, specials=False) / 100 if with_error else None
        q, scales = torch.zeros(count, dtype=target), torch.zeros(blocks_of(count, block))
        want_q, want_scales, want_error = quantize_reference(x, target, block, error)
        emulated_kernels.ops().quantize(x, q, scales, block, error)
        assert same(q, want_q) and same(scales, want_scales)
        assert error is None or same(error, want_error)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            out = torch.zeros(count, dtype=dtype)
            emulated_kernels.ops().dequantize(q, scales, out, block)
            assert torch.equal(out.isnan(), dequantize_reference(q, scales, dtype, block).isnan())
            assert same(out.nan_to_num(), dequantize_reference(q, scales, dtype, block).nan_to_num())


def test_a_block_of_nothing_and_one_of_denormals() -> None:
    x = torch.cat([torch.zeros(32), torch.full((32,), 1e-45), torch.full((16,), 1e-38)])
    q, scales, error = torch.zeros(80, dtype=torch.float8_e4m3fn), torch.zeros(3), torch.zeros(80)
    want = quantize_reference(x, q.dtype, 32, error.clone())
    emulated_kernels.ops().quantize(x, q, scales, 32, error)
    assert all(same(got, expected) for got, expected in zip((q, scales, error), want, strict=True))


@pytest.mark.parametrize("target", [torch.int8, *FLOAT8])
def test_sum_of_quantized_shards(target: torch.dtype, wave: int) -> None:
    random = seeded(wave)
    for count, block, shards in [(0, 16, 1), (100, 32, 3), (5000, 528, 8)]:
        qs, scales = [], []
        for _ in range(shards):
            q, factors, _ = quantize_reference(values(count, torch.float32, random), target, block)
            qs.append(q)
            scales.append(factors)
        out = torch.zeros(count)
        emulated_kernels.ops().dequantize_sum(qs, scales, out, block)
        assert same(out, dequantize_reduce_reference(qs, scales, block))


# --- checksum ----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 40000), st.sampled_from([8, 16, 24, 512, 4096, 8200, 1 << 20, 1 << 40]), st.integers(0, 9))
def test_checksum(size: int, block_bytes: int, offset: int) -> None:
    size = min(size, 99 * block_bytes)  # each block takes a warp
    x = misaligned(torch.randint(0, 256, (size,), generator=seeded(size)).to(torch.uint8), offset)
    assert same(emulated_kernels.ops().checksum(x, block_bytes), checksum_reference(x, block_bytes))


def test_the_cases_that_run_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """benchmarks/gpu_check.sh's: right here, and noticing what is wrong."""
    lib = emulated_kernels.face()[1]
    assert lib.gpu_check_cases(1, 1) == 0
    assert "WRONG" not in capfd.readouterr().out


def test_the_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    """It fails, in one sentence."""
    put_script(tmp_path / "nvidia-smi", "exit 9")
    script = emulated_kernels.ROOT / "benchmarks" / "gpu_check.sh"
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "gpu_check: there is no NVIDIA GPU here (nvidia-smi finds none)\n"


def test_the_gpu_check_says_what_it_would_run() -> None:
    script = emulated_kernels.ROOT / "benchmarks" / "gpu_check.sh"
    done = subprocess.run([script, "--dry-run"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    stages = [line.split(",")[0] for line in done.stdout.splitlines() if ", at most " in line]
    assert stages == [
        "cases", "processes", "memcheck", "racecheck", "speed", "module", "collectives",
        "hipified_cases", "hipified_processes", "hipified_speed",
    ]  # fmt: skip
    assert sum(int(seconds) for seconds in re.findall(r", at most (\d+) s", done.stdout)) <= 720
    assert done.stdout.endswith("gpu_check: nothing was run\n")
    wrong = subprocess.run([script, "--dry"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 1 and wrong.stderr == "gpu_check: unknown argument --dry; there is --dry-run\n"


# --- collectives -------------------------------------------------------------------------------------------------


class Ranks:
    """Signals and a stop word for each rank, as hosts keep them between launches."""

    def __init__(self, ranks: int) -> None:
        self.ffi, self.lib = emulated_kernels.face()
        self.ranks = ranks
        self.signals = self.ffi.new("mr_gpu_signals[]", ranks)  # zeroed
        self.stops = self.ffi.new("uint32_t[]", ranks)

    def launch(
        self,
        kind: int,
        data: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        count: int,
        op: str = "sum",
        *,
        seed: int = 0,
        blocks: int = 0,
        patience: int = 0,
        only: Sequence[int] | None = None,
    ) -> int:
        """Launches on all ranks (or `only` these); returns the error of the run."""
        with emulated_kernels.together(seed) as result:
            for rank in range(self.ranks) if only is None else only:
                args = self.ffi.new("mr_collective_args*")
                for other in range(self.ranks):
                    args.data[other] = self.ffi.cast("void*", data[other].data_ptr())
                    args.signals[other] = self.signals + other
                args.out = self.ffi.cast("void*", outs[rank].data_ptr())
                args.stop = self.stops + rank
                args.count, args.patience, args.blocks = count, patience, blocks
                args.kind, args.rank, args.ranks = kind, rank, self.ranks
                args.dtype, args.op = CODES[data[0].dtype], OPS.index(op)
                code: int = self.lib.mr_launch_collective(args, self.ffi.NULL)
                if code != 0:
                    return code
        return result[0]


def aligned(x: torch.Tensor) -> torch.Tensor:
    assert x.data_ptr() % 16 == 0  # as torch allocates
    return x


@pytest.mark.parametrize("kind", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_all_reduce(kind: int, ranks: int, wave: int) -> None:
    """Again and again over the same signals, in other orders of blocks, with what the last round left behind."""
    group = Ranks(ranks)
    random = seeded(ranks + wave)
    cases = [(torch.float32, "sum", 1000, 2), (torch.bfloat16, "avg", 37, 1), (torch.float8_e4m3fnuz, "sum", 600, 3)]
    for seed, (dtype, op, count, blocks) in enumerate([*cases, (torch.int16, "max", 1, 2)]):
        data = [aligned(values(count, dtype, random)) for _ in range(ranks)]
        outs = [aligned(torch.zeros(count, dtype=dtype)) for _ in range(ranks)]
        want = reduce_reference(data, op)
        assert group.launch(kind, data, outs, count, op, seed=seed, blocks=blocks) == 0, emulated_kernels.message()
        assert all(same(out, want) for out in outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_of_every_dtype(dtype: torch.dtype) -> None:
    group = Ranks(3)
    op = "max" if dtype == torch.bool else "sum"
    for kind in (ONE_SHOT, TWO_SHOT):
        data = [values(100, dtype, seeded(rank)) for rank in range(3)]
        outs = [torch.zeros(100, dtype=dtype) for _ in range(3)]
        want = reduce_reference(data, op)
        assert group.launch(kind, data, outs, 100, op, blocks=1) == 0, emulated_kernels.message()
        assert all(same(out, want) for out in outs)


def test_two_shot_in_place_and_no_elements() -> None:
    group = Ranks(4)
    data = [values(999, torch.float32, seeded(rank)) for rank in range(4)]
    want = reduce_reference(data, "sum")
    assert group.launch(TWO_SHOT, data, data, 999, blocks=2) == 0, emulated_kernels.message()
    assert all(same(out, want) for out in data)
    for kind in (ONE_SHOT, TWO_SHOT, REDUCE_SCATTER, ALL_GATHER):
        apart = [torch.zeros(4) for _ in range(4)]
        assert group.launch(kind, data, apart, 0) == 0, emulated_kernels.message()
        assert all(same(out, torch.zeros(4)) for out in apart)


@pytest.mark.parametrize("count", [1, 64, 333])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_reduce_scatter_then_all_gather(ranks: int, count: int) -> None:
    group = Ranks(ranks)
    data = [values(ranks * count, torch.float16, seeded(rank)) for rank in range(ranks)]
    slices = [torch.zeros(count, dtype=torch.float16) for _ in range(ranks)]
    assert group.launch(REDUCE_SCATTER, data, slices, count, blocks=2) == 0, emulated_kernels.message()
    want = reduce_reference(data, "sum")
    assert same(torch.cat(slices), want)
    outs = [torch.zeros(ranks * count, dtype=torch.float16) for _ in range(ranks)]
    assert group.launch(ALL_GATHER, slices, outs, count, seed=1, blocks=2) == 0, emulated_kernels.message()
    assert all(same(out, want) for out in outs)


def test_round_numbers_wrap_around() -> None:
    group = Ranks(2)
    for rank in range(2):
        group.signals[rank].round[0] = 2**32 - 2
        for other in range(2):
            group.signals[rank].arrived[0][other] = 2**32 - 2
    data = [torch.full((8,), float(rank + 1)) for rank in range(2)]
    for seed in range(3):
        outs = [torch.zeros(8) for _ in range(2)]
        assert group.launch(ONE_SHOT, data, outs, 8, seed=seed, blocks=1) == 0, emulated_kernels.message()
        assert all(out.tolist() == [3.0] * 8 for out in outs)


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    group = Ranks(3)
    data = [torch.ones(8) for _ in range(3)]
    outs = [torch.zeros(8) for _ in range(3)]
    assert group.launch(ONE_SHOT, data, outs, 8, blocks=2, patience=50, only=[0, 2]) == 0
    assert list(group.stops) == [1, 0, 1]
    assert all(same(out, torch.zeros(8)) for out in outs)
    group = Ranks(3)
    group.stops[0] = group.stops[2] = 1  # as a host does that knows of the death
    assert group.launch(TWO_SHOT, data, outs, 8, blocks=2, only=[0, 2]) == 0
    assert all(same(out, torch.zeros(8)) for out in outs)


def test_the_emulation_says_who_waits_for_ever() -> None:
    group = Ranks(3)
    tensors = [torch.ones(8) for _ in range(3)]
    outs = [torch.zeros(8) for _ in range(3)]
    assert group.launch(ONE_SHOT, tensors, outs, 8, blocks=1, only=[0, 1]) == 719
    assert "deadlock" in emulated_kernels.message() and "2 waiting for memory" in emulated_kernels.message()


@pytest.mark.parametrize(
    "wrong", ["ranks", "rank", "kind", "op", "dtype", "blocks", "misaligned", "in place", "signals"]
)
def test_arguments_that_a_launch_refuses(wrong: str) -> None:
    ffi, lib = emulated_kernels.face()
    data = [torch.ones(8) for _ in range(2)]
    out = torch.zeros(8)
    signals, stop = ffi.new("mr_gpu_signals[2]"), ffi.new("uint32_t*")
    args = ffi.new("mr_collective_args*")
    for rank in range(2):
        args.data[rank] = ffi.cast("void*", data[rank].data_ptr())
        args.signals[rank] = signals + rank
    args.out, args.stop, args.count, args.ranks = ffi.cast("void*", out.data_ptr()), stop, 8, 2
    args.dtype = CODES[torch.float32]
    if wrong == "in place":
        args.out = args.data[0]
    elif wrong == "misaligned":
        args.data[1] = ffi.cast("void*", data[1].data_ptr() + 4)
    elif wrong == "signals":
        args.signals[1] = ffi.NULL
    else:
        setattr(args, wrong, {"ranks": 17, "rank": 2, "kind": 4, "op": 5, "dtype": 14, "blocks": 65}[wrong])
    assert lib.mr_launch_collective(args, ffi.NULL) == 1
    assert same(out, torch.zeros(8))


# --- the op ------------------------------------------------------------------------------------------------------


class Peers:
    """Ranks of one process, each with a workspace, and the op's arguments."""

    def __init__(self, ranks: int, room: int) -> None:
        own = [torch.zeros(peers.SIGNAL_BYTES + room, dtype=torch.uint8) for _ in range(ranks)]
        addresses = tuple(each.data_ptr() for each in own)
        stops = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]
        self.ranks = [Workspaces(rank, own[rank], addresses, stops[rank]) for rank in range(ranks)]

    def run(self, kind: str, data: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], op: str) -> None:
        with emulated_kernels.together(0) as result:
            for each, mine, out in zip(self.ranks, data, outs, strict=True):
                each.data(mine.dtype, mine.numel()).copy_(mine)
                peer_collective(kind, out, each, op)
        assert result == [0], emulated_kernels.message()


@pytest.fixture
def on_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are the GPU's for peer_collective."""
    emulated = emulated_kernels.ops()
    monkeypatch.setattr(peers, "native", lambda name, device: getattr(emulated, name))


@pytest.mark.usefixtures("on_emulated")
@pytest.mark.parametrize("kind", peers.KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_peer_collective(kind: str, ranks: int, wave: int) -> None:
    """Again and again over the same workspaces, beside its reference."""
    group = Peers(ranks, 4096)
    random = seeded(ranks + wave)
    for dtype, op, count in ((torch.float32, "sum", 300), (torch.bfloat16, "avg", 37), (torch.int16, "max", 1)):
        data = [values(count * (ranks if kind == "reduce_scatter" else 1), dtype, random) for _ in range(ranks)]
        outs = [torch.zeros(count * (ranks if kind == "all_gather" else 1), dtype=dtype) for _ in range(ranks)]
        group.run(kind, data, outs, op)
        for rank, out in enumerate(outs):
            assert same(out, peer_collective_reference(kind, data, rank, op))


@pytest.mark.usefixtures("on_emulated")
def test_arguments_that_peer_collective_refuses() -> None:
    good = Peers(2, 400).ranks[0]
    out = torch.zeros(100)
    for workspaces, kind, target, op, says in (
        (good, "three_shot", out, "sum", "kind must be one of one_shot, two_shot"),
        (good, "one_shot", out, "xor", "op must be one of sum"),
        (good, "one_shot", out[::2], "sum", "out must be contiguous"),
        (good, "one_shot", torch.zeros(101), "sum", "count must be at most 100"),
        (good, "reduce_scatter", torch.zeros(51), "sum", "count must be at most 100"),
        (good, "all_gather", torch.zeros(101), "sum", "an equal share of elements for each of 2 ranks, got 101"),
        (good, "one_shot", torch.zeros(9, dtype=torch.complex64), "sum", "the dtype of out must be one of"),
        (good, "one_shot", out.clone().requires_grad_(), "sum", "not differentiable"),
        (replace(good, rank=2), "one_shot", out, "sum", "workspaces.rank must be from 0 to 1, got 2"),
        (replace(good, addresses=()), "one_shot", out, "sum", "workspaces must be of 1 to 16 ranks, got 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            peer_collective(kind, target, workspaces, op)
    op_itself = emulated_kernels.ops().peer_collective
    addresses = list(good.addresses)
    for arguments, says in (
        ((good.own, torch.zeros(101)[1:], good.stop, addresses, 0), "multiple of 16 bytes"),
        ((good.own, good.own[4352:4368], good.stop, addresses, 0), "shares memory"),
        ((good.own[:4400], out, good.stop, addresses, 0), "4352 bytes of signals and 400 of data"),
        ((good.own, out, good.stop, addresses[::-1], 0), "the address of workspace"),
        ((good.own, out, good.stop, [addresses[0], 8], 0), "multiples of 16"),
        ((good.own, out, out, addresses, 0), "stop must be one int32"),
        ((good.own, out, good.stop, [addresses[0]] * 17, 0), "1 to 16 addresses"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(says)):
            op_itself(*arguments, "two_shot", "sum")


def test_peer_collective_for_torch_compile_and_without_a_gpu() -> None:
    workspace, out = (torch.empty(8192, dtype=torch.uint8, device="meta"), torch.empty(64, device="meta"))
    stop = torch.empty(1, dtype=torch.int32, device="meta")
    assert torch.ops.monarch_rdma.peer_collective(workspace, out, stop, [16, 32], 0, "one_shot", "sum") is None
    group = Peers(2, 400)
    with pytest.raises(ConfigError, match="out is on cpu, for which peer_collective has no kernel here"):
        peer_collective("one_shot", torch.zeros(4), group.ranks[0])
    first = group.ranks[0]
    with pytest.raises(RuntimeError, match="for tensors of a GPU"):
        torch.ops.monarch_rdma.peer_collective(
            first.own, torch.zeros(4), first.stop, list(first.addresses), 0, "one_shot", "sum"
        )
