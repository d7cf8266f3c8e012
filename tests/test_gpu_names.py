"""HIP under CUDA's names: every alias against both sides' headers, and the facts against both sides' compilers."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from gpu_compilers import ROOT, hipcc, include_folder, nvcc

sys.path.insert(0, str(ROOT))

from hipify_rules import gpu_names, headers, load_rules
from hipify_rules.compare import Sides

RELEASES = {side: headers.load(side)[0] for side in ("cuda", "hip")}
FACTS = {side: headers.load(side)[1] for side in ("cuda", "hip")}
SAID = {name: how for group in gpu_names.load_differences()["differences"] for name, how in group["aliases"].items()}
DEFINED = dict(re.findall(r"^#define (\w+) (\w+)$", gpu_names.HEADER.read_text(), flags=re.MULTILINE))
SAME = {name: name for name in FACTS["cuda"] if name in FACTS["hip"]}  # NCCL's
ALIASES = {**DEFINED, **SAME}
SIDES = Sides(FACTS["cuda"], FACTS["hip"])
SIDES.types = {cuda: hip for cuda, hip in ALIASES.items() if SIDES.is_type(cuda)}
tables_of_torch_2_13 = pytest.mark.skipif(
    not metadata.version("torch").startswith("2.13."), reason="the header was made with the tables of torch 2.13"
)


@pytest.mark.parametrize("name", ALIASES)
def test_alias(name: str) -> None:
    """Both names exist and are the same kind of thing, and every difference is a known one."""
    differences = SIDES.differ(name, ALIASES[name])
    assert differences is not None
    assert list(differences) == SAID.get(name, [])


INTEGER = {"is": "integer", "size": 4, "align": 4, "signed": True}
RECORD = {"is": "record", "size": 8, "align": 4, "fields": {"a": [0, "int"], "b": [4, "int"]}}
CALL = {"is": "call", "result": "int", "parameters": ["int", "void *"]}
CHANGES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]] = [
    (INTEGER, {}, ()),
    (INTEGER, {"size": 8}, ("size 4 on CUDA, 8 on HIP",)),
    (INTEGER, {"align": 2}, ("align 4 on CUDA, 2 on HIP",)),
    (INTEGER, {"signed": False}, ("signed True on CUDA, False on HIP",)),
    (INTEGER, {"is": "constant", "value": 1}, None),
    ({"is": "constant", "value": 1}, {"value": 2}, ("value 1 on CUDA, 2 on HIP",)),
    (RECORD, {"fields": {"a": [4, "int"], "b": [4, "int"]}}, ("fields elsewhere in HIP: a",)),
    (RECORD, {"fields": {"a": [0, "int"], "b": [4, "float"]}}, ("field b is int on CUDA, float on HIP",)),
    (RECORD, {"fields": {"a": [0, "int"]}}, ("fields not in HIP: b",)),
    (RECORD, {"fields": {}}, None),
    (CALL, {}, ()),
    (CALL, {"parameters": ["long", "void *"]}, ("parameter 1 int on CUDA, long on HIP",)),
    (CALL, {"parameters": ["int", "float *"]}, None),
    (CALL, {"parameters": ["int"]}, None),
    (CALL, {"result": "void *"}, None),
]


@pytest.mark.parametrize(("ours", "change", "told"), CHANGES)
def test_each_kind_of_difference_is_told(
    ours: dict[str, Any], change: dict[str, Any], told: tuple[str, ...] | None
) -> None:
    assert Sides({"x": ours}, {"x": {**ours, **change}}).differ("x", "x") == told


def test_what_is_known_to_differ_says_what_to_do() -> None:
    groups = gpu_names.load_differences()
    listed = [name for group in groups["differences"] for name in group["aliases"]]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= set(ALIASES)
    assert all(len(group["what"]) > 10 and len(group["do"]) > 40 for group in groups["differences"])
    assert all(len(group["why"]) > 40 for group in groups["no_alias"])
    assert not {name for group in groups["no_alias"] for name in group["names"]} & set(ALIASES)


def test_a_type_and_its_tag_are_the_same_type_of_hip() -> None:
    """`CUlimit` and `enum CUlimit_enum`, say: else a value of one would not be one of the other."""
    for name, hip in ALIASES.items():
        tag = FACTS["cuda"][name].get("to", "")
        if tag in ALIASES and SIDES.is_type(tag):
            assert SIDES.resolved(hip, FACTS["hip"]) == SIDES.resolved(ALIASES[tag], FACTS["hip"]), name


def test_no_alias_depends_on_another() -> None:
    assert not set(DEFINED) & set(DEFINED.values())


@tables_of_torch_2_13
def test_generated_files_are_what_the_facts_make_them() -> None:
    for path, text in gpu_names.outputs().items():
        assert path.read_text() == text, f"{path}: run python -m hipify_rules.gpu_names"


def test_every_rule_for_a_name_is_what_the_headers_say() -> None:
    """A rule of hipify and the alias of the same name agree, and HIP has what it names."""
    for cuda, hip in load_rules().items():
        if cuda in FACTS["cuda"]:
            assert ALIASES[cuda] == hip
        elif cuda.isidentifier():
            assert hip in FACTS["hip"]


# --- what the compilers make of the facts ---------------------------------------------------------------------------


def spelled(type_: str) -> str:
    """A type of the facts as C++ has it."""
    if "(" not in type_:
        return type_
    function, stars = re.fullmatch(r"(.*\))([ *]*)", type_).groups()  # type: ignore[union-attr]
    for _ in range(stars.count("*")):
        function = f"std::add_pointer_t<{function}>"
    return function


def checks(name: str, fact: dict[str, Any]) -> str:
    """C++ that compiles only if `name` is what the fact says; constants are for the program to check when it runs."""
    kind = fact["is"]
    if kind == "constant":
        return f'  if ((long long)({name}) != {fact["value"]}LL) std::puts("{name}");'
    if kind == "call":
        pointer = f"{spelled(fact['result'])} (*)({', '.join(map(spelled, fact['parameters']))})"
        return f"  static_assert(sizeof(static_cast<{pointer}>(&{name})) > 0);"
    if kind == "template":
        return f"  using ::{name};"
    if kind in ("opaque", "function"):
        return f"  static_assert(sizeof({name}*) == sizeof(void*));"
    said = [f"sizeof({name}) == {fact['size']}", f"alignof({name}) == {fact['align']}"]
    said += [f"offsetof({name}, {field}) == {at}" for field, (at, _) in fact.get("fields", {}).items()]
    if kind == "enum":
        said.append(f"std::is_signed_v<std::underlying_type_t<{name}>> == {fact['signed']:d}")
    if kind == "integer":
        said.append(f"std::is_signed_v<{name}> == {fact['signed']:d}")
    trait = {"record": "class", "integer": "integral", "float": "floating_point"}.get(kind, kind)
    said.append(f"std::is_{trait}_v<{name}>")
    return f"  static_assert({' && '.join(said)});"


def program(side: str, include: str, names: dict[str, str]) -> str:
    """Checks of `names` (what to write -> whose facts) by a compiler of `side`, a line each."""
    lines = [f"#include {include}", "#include <cstddef>", "#include <cstdio>", "#include <type_traits>", "int main() {"]
    for name, of in names.items():
        fact = SIDES.fact(FACTS[side], of)
        assert fact is not None
        lines.append(checks(name, fact))
    return "\n".join([*lines, "}", ""])


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=110, check=False)


def disagreements(text: str, made: subprocess.CompletedProcess[str], source: str) -> list[str]:
    """The checks that a compiler rejected."""
    lines = {int(found) for found in re.findall(rf"{source}[:(](\d+)", made.stderr + made.stdout)}
    return [text.split("\n")[line - 1] for line in sorted(lines)]


def test_hipcc_finds_every_fact_of_hip_under_cudas_name(tmp_path: Path) -> None:
    compiler = hipcc()
    skip_unless_release("hip", include_folder(compiler, "hip/hip_version.h", tmp_path))
    text = program("hip", '"gpu_names.h"', ALIASES)
    (tmp_path / "facts.hip").write_text(text)
    options = ["--offload-host-only", "-std=c++17", "-ferror-limit=0", "-Wno-deprecated-declarations"]
    options += ["-Wno-invalid-offsetof", f"-I{gpu_names.HEADER.parent}"]
    made = run(compiler, *options, "-c", tmp_path / "facts.hip", "-o", tmp_path / "facts.o")
    assert made.returncode == 0, disagreements(text, made, "facts.hip") or made.stderr
    linked = run("g++", tmp_path / "facts.o", "-o", tmp_path / "facts")
    assert linked.returncode == 0, linked.stderr
    assert run(tmp_path / "facts").stdout == ""


def test_nvcc_finds_every_fact_of_cuda(tmp_path: Path) -> None:
    compiler = nvcc()
    skip_unless_release("cuda", include_folder(compiler, "cuda.h", tmp_path))
    names = {name: name for name in ALIASES if not re.match("p?nccl|NCCL", name) or nccl_folder()}
    text = program("cuda", '"gpu_names.h"', names)
    (tmp_path / "facts.cu").write_text(text)
    options = ["-std=c++17", "-Wno-deprecated-declarations", "-Xcompiler", "-Wno-invalid-offsetof"]
    options += [
        "-Xcudafe",
        "--error_limit=9999",
        *(f"-I{folder}" for folder in [gpu_names.HEADER.parent, *nccl_folder()]),
    ]
    made = run(compiler, *options, tmp_path / "facts.cu", "-o", tmp_path / "facts")
    assert made.returncode == 0, disagreements(text, made, "facts.cu") or made.stderr
    assert run(tmp_path / "facts").stdout == ""


@functools.cache
def nccl_folder() -> list[str]:
    """Where nccl.h is, if the Python package that has it is installed."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(folder, "nccl", "include") for folder in (found.submodule_search_locations or [])] if found else []
    return [str(place) for place in places if (place / "nccl.h").exists()]


def skip_unless_release(side: str, folder: str) -> None:
    here = headers.release(side, [folder])
    if here != RELEASES[side]:
        pytest.skip(f"the facts are those of {side} {RELEASES[side]}; here is {here}")


@pytest.mark.parametrize("side", ["cuda", "hip"])
def test_reading_the_headers_again_gives_the_same_facts(side: str, tmp_path: Path) -> None:
    pytest.importorskip("clang.cindex", reason="no libclang; pip install libclang")
    compiler, header = (nvcc(), "cuda.h") if side == "cuda" else (hipcc(), "hip/hip_version.h")
    folder = include_folder(compiler, header, tmp_path)
    skip_unless_release(side, folder)
    found = headers.dump(side, [folder, *(nccl_folder() if side == "cuda" else [])])
    ours = re.compile("" if any(name.startswith("nccl") for name in found) else r"(?!p?nccl|NCCL)")
    assert found == {name: fact for name, fact in FACTS[side].items() if ours.match(name)}


# --- a source in CUDA spelling, as it is ----------------------------------------------------------------------------

SOURCE = """\
#include <cuda.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

__global__ void scale(float* x, int n, float by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}

cudaError_t run(float* host, int n, cudaStream_t stream) {
  struct cudaDeviceProp properties = {};
  if (cudaError_t error = cudaGetDeviceProperties(&properties, 0)) return error;
  float* x = nullptr;
  if (cudaMalloc(&x, n * sizeof(float)) != cudaSuccess) return cudaGetLastError();
  cudaMemcpyAsync(x, host, n * sizeof(float), cudaMemcpyHostToDevice, stream);
  scale<<<(n + 255) / 256, 256, 0, stream>>>(x, n, 2.f);
  cudaStreamSynchronize(stream);
  return cudaFree(x);
}

CUresult share(CUdeviceptr address, size_t size, int* fd) {
  return cuMemGetHandleForAddressRange(fd, address, size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

__device__ __nv_fp8_storage_t bits(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
"""


@pytest.mark.parametrize("gpu", ["gfx90a", "gfx942", "gfx950"])
def test_a_source_in_cuda_spelling_compiles_for_amd(gpu: str, tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SOURCE)
    options = [f"--offload-arch={gpu}", "-std=c++17", "-O2", "-Wall", "-Werror", "-Wno-unused-value"]
    options += ["-Wno-unused-result", f"-I{gpu_names.SPELLING}"]
    made = run(hipcc(), *options, "-c", tmp_path / "scale.cu", "-o", tmp_path / "scale.o")
    assert made.returncode == 0, made.stderr


def test_the_same_source_compiles_for_nvidia(tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SOURCE)
    made = run(nvcc(), "-arch=sm_80", "-std=c++17", "-c", tmp_path / "scale.cu", "-o", tmp_path / "scale.o")
    assert made.returncode == 0, made.stderr
