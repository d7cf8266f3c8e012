"""Translation to HIP: every name or none, line by line, the sources untouched."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hipify_rules import HipifyError, Translator, hipify_files, load_rules  # noqa: E402
from hipify_rules.hipify import BREADCRUMB, RULES, cuda_names  # noqa: E402

KERNEL = """\
// Scales n floats.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "scale.cuh"

__global__ void scale(float* x, int n) { /* one thread an element */
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}

int launch(float* x, int n, void* stream) {
  scale<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(x, n);
  return (int)cudaGetLastError();
}
"""
HEADER = "#pragma once\n#include <cuda.h>\n#define FACTOR 2.f\nusing Bits = __nv_fp8_storage_t;\n"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(KERNEL)
    (folder / "scale.cuh").write_text(HEADER)
    return folder


def hipify(sources: Path, out: Path, **options: bool) -> dict[str, str]:
    """Translates the two files of `sources`; returns each result's text by its name."""
    results = hipify_files([sources / "scale.cu", sources / "scale.cuh"], out, **options)
    return {path.name: path.read_text() for path in results}


def body(result: str) -> list[str]:
    """The lines of a result that stand for its source's, which the directive before them says."""
    return result.split("#line 1 ", 1)[1].split("\n")[1:]


def test_names_are_translated_and_sources_stay_as_they_are(sources: Path, tmp_path: Path) -> None:
    results = hipify(sources, tmp_path / "out")
    assert set(results) == {"scale.hip", "scale.cuh"}
    assert sorted(path.name for path in sources.iterdir()) == ["scale.cu", "scale.cuh"]
    assert (sources / "scale.cu").read_text() == KERNEL and (sources / "scale.cuh").read_text() == HEADER
    code = results["scale.hip"]
    for name in ("<hip/hip_fp8.h>", "<hip/hip_runtime.h>", '"scale.cuh"', "hipGetLastError()", "(hipStream_t)stream"):
        assert name in code
    assert "<<<(n + 255) / 256, 256, 0, " in code
    assert "__hip_fp8_storage_t" in results["scale.cuh"]
    assert not cuda_names(code)


def test_every_line_keeps_its_number(sources: Path, tmp_path: Path) -> None:
    for name, text in hipify(sources, tmp_path / "out").items():
        source = (sources / name).with_suffix(".cu" if name.endswith(".hip") else ".cuh")
        assert f'#line 1 "{source}"\n' in text
        pairs = list(zip(source.read_text().split("\n"), body(text), strict=True))
        assert all(before == after for before, after in pairs if not cuda_names(before) and "nv" not in before)


def test_a_compiler_names_the_source_and_its_line(sources: Path, tmp_path: Path) -> None:
    (sources / "wrong.cu").write_text("// a comment\nint fine;\nint* wrong = cudaSuccess;\n")
    (result,) = hipify_files([sources / "wrong.cu"], tmp_path / "out")
    command = ["g++", "-fsyntax-only", "-x", "c++", str(result)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    assert f"{sources / 'wrong.cu'}:3:" in said


def test_torchs_own_build_takes_a_result_as_it_is(sources: Path, tmp_path: Path) -> None:
    for text in hipify(sources, tmp_path / "out").values():
        assert text.startswith(BREADCRUMB)
    assert Translator().hipify.HIPIFY_C_BREADCRUMB == BREADCRUMB


def test_a_second_run_writes_nothing(sources: Path, tmp_path: Path) -> None:
    hipify(sources, tmp_path / "out")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()}
    hipify(sources, tmp_path / "out")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()} == before
    (sources / "scale.cuh").write_text(HEADER.replace("2.f", "3.f"))
    hipify(sources, tmp_path / "out")
    assert {path.name for path, was in before.items() if path.stat().st_ino != was[1]} == {"scale.cuh"}


def test_launches_as_a_macro_on_request(sources: Path, tmp_path: Path) -> None:
    code = hipify(sources, tmp_path / "out", launch_macro=True)["scale.hip"]
    launch = "hipLaunchKernelGGL(( scale), dim3((n + 255) / 256), dim3(256), 0, (hipStream_t)stream, x, n);"
    assert body(code)[12].strip() == launch and "<<<" not in code


def test_launches_over_several_lines_keep_them_or_are_refused(sources: Path, tmp_path: Path) -> None:
    (sources / "scale.cu").write_text(KERNEL.replace("256, 0, (cuda", "256, 0,\n  (cuda").replace("<<<(n", "<<<\n  (n"))
    assert len(body(hipify(sources, tmp_path / "out", launch_macro=True)["scale.hip"])) == KERNEL.count("\n") + 3
    (sources / "scale.cu").write_text(KERNEL.replace("scale<<<", "detail:: \\\n  scale<<<"))
    with pytest.raises(HipifyError, match="scale.cu:1: translating would change the number of lines"):
        hipify(sources, tmp_path / "out", launch_macro=True)


def test_every_name_left_is_listed_and_nothing_is_written(sources: Path, tmp_path: Path) -> None:
    (sources / "scale.cuh").write_text(
        HEADER + "// cudaInAComment\nauto a = cudaNoSuchThing; auto b = cuNoSuchThing();\n"
    )
    (sources / "scale.cu").write_text("#include <cuda_nothing.h>\n" + KERNEL + 'const char* s = "cudaInAString";\n')
    with pytest.raises(HipifyError) as raised:
        hipify(sources, tmp_path / "out")
    assert str(raised.value).splitlines() == [
        f"{sources / 'scale.cu'}:1: cuda_nothing.h has no HIP counterpart here",
        f"{sources / 'scale.cuh'}:6: cudaNoSuchThing has no HIP counterpart here",
        f"{sources / 'scale.cuh'}:6: cuNoSuchThing has no HIP counterpart here",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("/* cudaMalloc\n */ cudaFree(p); // cuInit", [(2, "cudaFree")]),
        ("'\"'; cuInit; '\"'", [(1, "cuInit")]),
        ('R"x(cudaMalloc)x" "\\"cudaFree" CUresult', [(1, "CUresult")]),
        ("1'000'000 + cudaMalloc + 1'0", [(1, "cudaMalloc")]),
        ("c10::cuda::CUDAStream s; ncclSend(x); current; at::cuda; __CUDA_ARCH__; recuTe", []),
        ("__NV_E4M3 __nv_bfloat16 CUDART_VERSION CU_STREAM nvrtcResult", None),
    ],
)
def test_what_counts_as_a_cuda_name(code: str, names: list[tuple[int, str]] | None) -> None:
    assert cuda_names(code) == ([(1, name) for name in code.split()] if names is None else names)


def test_nvccs_implied_header_is_included(tmp_path: Path) -> None:
    (tmp_path / "bare.cu").write_text("__global__ void nothing() {}\n")
    (result,) = hipify_files([tmp_path / "bare.cu"], tmp_path / "out")
    expected = (
        f'{BREADCRUMB}#include <hip/hip_runtime.h>\n#line 1 "{tmp_path}/bare.cu"\n__global__ void nothing() {{}}\n'
    )
    assert result.read_text() == expected


def test_names_at_either_end_of_a_file_and_inside_longer_ones() -> None:
    translate = Translator().translate
    assert translate("cudaFree") == "hipFree"
    assert translate("cudaFreeArray mycudaFree cudaFree_") == "hipFreeArray mycudaFree cudaFree_"
    assert translate("") == ""


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["nothing.cu"], "cannot be read"),
        (["binary.cu"], "cannot be read"),
        (["result.cu"], "is a result of hipify already"),
        (["one/same.cu", "one/same.hip"], "which is a source or another's result"),
    ],
)
def test_bad_sources_are_refused_before_anything_is_written(files: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe")
    (tmp_path / "result.cu").write_text(BREADCRUMB)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "same.cu").write_text("int x;\n")
    (tmp_path / "one" / "same.hip").write_text("int x;\n")
    with pytest.raises(HipifyError, match=f"{re.escape(str(tmp_path / files[-1]))}:1: .*{why}"):
        hipify_files([tmp_path / file for file in files], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_stay_inside_their_root_and_are_never_overwritten(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(HipifyError, match="scale.cuh:1: would be written to .* which is a source"):
        hipify_files([sources / "scale.cuh"], sources)
    with pytest.raises(HipifyError, match="scale.cu:1: is not below"):
        hipify_files([sources / "scale.cu"], tmp_path / "out", root=tmp_path / "elsewhere")
    (placed,) = hipify_files([sources / "scale.cu"], tmp_path / "out", root=tmp_path)
    assert placed == tmp_path / "out" / "kernels" / "scale.hip"


@pytest.mark.parametrize("text", ["", "[]", '{"custom_map": []}', '{"custom_map": {"a": 1}}', "{}"])
def test_a_rules_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(HipifyError, match="custom_map"):
        load_rules(tmp_path / "rules.json")


@functools.cache
def translators() -> tuple[Translator, Translator]:
    """One with torch's tables alone, one with all that is known."""
    return Translator({}), Translator()


# --- the rules ----------------------------------------------------------------------------------------------------


def test_each_rule_has_its_reason_in_the_table() -> None:
    table = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.+?) \|$", RULES.with_suffix(".md").read_text(), flags=re.MULTILINE)
    assert [(cuda, hip) for cuda, hip, _ in table] == list(load_rules().items())
    assert all(len(reason) > 20 for _, _, reason in table)


@pytest.mark.skipif(not metadata.version("torch").startswith("2.13."), reason="rules are for the tables of torch 2.13")
@pytest.mark.parametrize(("cuda", "hip"), load_rules().items())
def test_each_rule_is_one_that_torchs_tables_need(cuda: str, hip: str) -> None:
    without, with_rules = translators()
    assert with_rules.translate(f" {cuda} ") == f" {hip} "
    assert without.translate(f" {cuda} ") != f" {hip} "
    assert not cuda_names(f"#include {hip}\n{hip}")


def test_what_the_headers_say_goes_before_torchs_tables() -> None:
    without, known = translators()
    assert known.translate("cudaMemPrefetchAsync(p, n, to, 0, s)") == "hipMemPrefetchAsync_v2(p, n, to, 0, s)"
    assert known.translate("cuGraphAddEmptyNode") == "hipGraphAddEmptyNode"
    # torch's tables have names for these that are in none of HIP's headers.
    for lacking in ("cuMemcpy", "CU_CTX_FLAGS_MASK", "cudaErrorTooManyPeers"):
        assert without.translate(lacking) != lacking
        assert cuda_names(known.translate(lacking)) == [(1, lacking)]


# --- as a command -------------------------------------------------------------------------------------------------


def command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "hipify_rules", *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_results_and_leaves_torch_alone(sources: Path, tmp_path: Path) -> None:
    result = command("--out", tmp_path / "out", sources / "scale.cu", sources / "scale.cuh")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(tmp_path / "out" / name) for name in ("scale.hip", "scale.cuh")]
    probe = f"import sys; from hipify_rules import Translator; Translator({json.dumps({'a': 'b'})})"
    ran = subprocess.run([sys.executable, "-c", f"{probe}\nassert 'torch' not in sys.modules"], cwd=ROOT, timeout=60)
    assert ran.returncode == 0


def test_the_command_fails_with_sentences(sources: Path, tmp_path: Path) -> None:
    (sources / "odd.cu").write_text("int x = cudaNoSuchThing;\n")
    result = command("--out", tmp_path / "out", sources / "odd.cu")
    assert result.returncode == 1
    assert result.stderr == f"{sources / 'odd.cu'}:1: cudaNoSuchThing has no HIP counterpart here\n"
    assert command().returncode == 2
