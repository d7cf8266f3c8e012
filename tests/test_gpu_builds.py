"""Every GPU kernel compiles without a warning, and what comes out is as fast code is. Takes minutes: `make kernels`."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import gpu_builds
import pytest
from gpu_builds import Kernel

pytestmark = pytest.mark.timeout(900)  # compilers run for a minute of processor time each
LAUNCHES = ["pack", "reduce", "quantize", "dequantize", "checksum", "collective"]
FAMILIES = {
    "checksum": 1,
    "collective": 14,
    "dequantize": 3,
    "pack_bytes": 2,
    "pack_cast": 1,
    "quantize_narrow": 3,
    "quantize_wide": 3,
    "reduce": 14,
}
BUILDS: dict[str, tuple[Callable[[], list[Kernel]], tuple[str, ...]]] = {
    "amd": (gpu_builds.for_amd, gpu_builds.AMD),
    "nvidia": (gpu_builds.for_nvidia_as_written, gpu_builds.NVIDIA),
    "nvidia_hipified": (gpu_builds.for_nvidia_hipified, gpu_builds.NVIDIA[-1:]),
}


@pytest.fixture(scope="module", params=list(BUILDS))
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernels(build: str) -> list[Kernel]:
    return BUILDS[build][0]()


def test_all_are_there(build: str, kernels: list[Kernel]) -> None:
    """That they compiled without a warning, the fixture has found."""
    for gpu in BUILDS[build][1]:
        of_gpu = [kernel.family for kernel in kernels if kernel.gpu == gpu]
        assert {family: of_gpu.count(family) for family in of_gpu} == FAMILIES, gpu


def test_nothing_is_kept_in_memory_for_want_of_registers(kernels: list[Kernel]) -> None:
    assert [(kernel.gpu, kernel.name) for kernel in kernels if kernel.spills] == []


def test_nothing_traps(kernels: list[Kernel]) -> None:
    assert [(kernel.gpu, kernel.name) for kernel in kernels if kernel.count(r"\bs_trap\b|\btrap;")] == []


WIDE = {
    "load": r"(?:global|flat)_load_dwordx4|\bld(?:\.global)?\.(?:v4\.[bfu]32|v2\.[bfu]64)",
    "store": r"(?:global|flat)_store_dwordx4|\bst(?:\.global)?\.(?:v4\.[bfu]32|v2\.[bfu]64)",
}


@pytest.mark.parametrize("access", list(WIDE))
def test_accesses_of_16_bytes(kernels: list[Kernel], access: str) -> None:
    """Of all that move data; collectives of one-byte elements take 8, checksum stores nothing."""
    moving = [kernel for kernel in kernels if kernel.family not in ("checksum", "collective")]
    assert [(kernel.gpu, kernel.name) for kernel in moving if not kernel.count(WIDE[access])] == []


def test_nothing_is_contracted(kernels: list[Kernel]) -> None:
    """Sums of products are rounded twice. Other kernels divide, which takes fused operations that are exact."""
    fused = r"v_(?:pk_)?fma(?:c|_mix\w*)?_|v_mad_f|\bfma\.rn"
    dequantize = [kernel for kernel in kernels if kernel.family == "dequantize"]
    assert [(kernel.gpu, kernel.name) for kernel in dequantize if kernel.count(fused)] == []


def test_flags_cross_the_system(build: str, kernels: list[Kernel]) -> None:
    pattern = r"buffer_wbl2" if build == "amd" else r"st\.release\.sys\.global"
    collectives = [kernel for kernel in kernels if kernel.family == "collective"]
    assert [(kernel.gpu, kernel.name) for kernel in collectives if not kernel.count(pattern)] == []


def test_the_shared_library_needs_no_torch(build: str, kernels: list[Kernel]) -> None:
    path = gpu_builds.OUT / build / "kernels.so"
    if build == "amd":  # its runtime's functions are there only where that is
        found = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
        assert all(f"mr_launch_{name}\n" in found.stdout for name in LAUNCHES)
        return
    library = ctypes.CDLL(str(path))
    assert all(hasattr(library, f"mr_launch_{name}") for name in LAUNCHES)
    nothing = ctypes.create_string_buffer(4096)  # no shards: refused before the GPU is asked
    assert library.mr_launch_reduce(nothing, None) == 1


def test_the_page_has_the_table() -> None:
    page = gpu_builds.PAGE.read_text()
    rows = page.split(gpu_builds.BEGIN)[1].split(gpu_builds.END)[0].splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == sorted(FAMILIES)
