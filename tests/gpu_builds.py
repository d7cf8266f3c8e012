"""Compiles every GPU kernel, for AMD's GPUs and for NVIDIA's, and reads from the results what they use.

`python tests/gpu_builds.py` writes the table "Resource use" of docs/kernels.md anew.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gpu_compilers

from hipify_rules import hipify_files

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "hip_kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
OUT = ROOT / "build" / "gpu_builds"
AMD = ("gfx90a", "gfx942", "gfx950")
NVIDIA = ("sm_80", "sm_90")
INCLUDES = [f"-I{ROOT / 'csrc'}"]
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- resource use: begin -->\n", "<!-- resource use: end -->\n"


@dataclass(frozen=True)
class Kernel:
    """One kernel for one GPU."""

    gpu: str
    name: str  # with its template arguments, "reduce<Half>"
    registers: int
    scalar_registers: int  # AMD only
    spills: int  # registers or bytes; what lies in memory instead of a register also counts
    shared_bytes: int
    code: str

    @property
    def family(self) -> str:
        return self.name.split("<")[0]

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))


def run(command: list[str]) -> str:
    """Its stderr. Compilers are told to fail on warnings."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stderr


def plain_names(mangled: list[str]) -> dict[str, str]:
    """reduce<PlainElement<float>> for each mangled name."""
    done = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        name: re.sub(r"^void |\([^()]*\)$|mr::", "", plain.replace("(anonymous namespace)::", "").replace("(bool)", ""))
        for name, plain in zip(mangled, done, strict=True)
    }


def hipified() -> list[Path]:
    headers = [*KERNELS.glob("*.cuh"), KERNELS / "kernels.h"]
    results = hipify_files([*SOURCES, *headers], OUT / "hipified", root=KERNELS)
    return [path for path in results if path.suffix == ".hip"]


# --- AMD ---------------------------------------------------------------------------------------------------------


def read_amd(gpu: str, assembly: str) -> list[Kernel]:
    """The kernels of one file of AMD assembly: code between label and .end_amdhsa_kernel, numbers in its metadata."""
    entries = re.findall(
        r"^  - \.agpr_count.*?(?=^  - \.agpr_count|^amdhsa\.target)", assembly, re.DOTALL | re.MULTILINE
    )
    names = plain_names(re.findall(r"^\s+\.amdhsa_kernel (\S+)", assembly, re.MULTILINE))
    assert len(entries) == len(names), "the assembly's metadata is not as expected"

    def number(entry: str, key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", entry)
        assert found, key
        return int(found[1])

    kernels = []
    for entry in entries:
        mangled = re.search(r"\.name:\s+(\S+)", entry)
        assert mangled
        code = re.search(rf"^{re.escape(mangled[1])}:.*?^\s+\.end_amdhsa_kernel", assembly, re.DOTALL | re.MULTILINE)
        assert code
        spills = sum(
            number(entry, key) for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        )
        kernels.append(
            Kernel(
                gpu,
                names[mangled[1]],
                number(entry, "vgpr_count"),
                number(entry, "sgpr_count"),
                spills,
                number(entry, "group_segment_fixed_size"),
                code[0],
            )
        )
    return kernels


def for_amd() -> list[Kernel]:
    """Every kernel for each of AMD's GPUs, and a shared library of them all. Skips where there is no compiler."""
    compiler = gpu_compilers.hipcc()
    folder = OUT / "amd"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-fPIC", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", *INCLUDES, f"-I{OUT / 'hipified'}"]
    gpus = [f"--offload-arch={gpu}" for gpu in AMD]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        # The files in between are AMD's assembly for each GPU, and they land beside the object.
        run([str(compiler), *gpus, *flags, "-save-temps=obj", "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, hipified()))
    run(["g++", "-shared", *map(str, objects), "-o", str(folder / "kernels.so")])
    kernels = []
    for source in SOURCES:
        for gpu in AMD:
            (assembly,) = folder.glob(f"{source.stem}-hip-*{gpu}.s")
            kernels += read_amd(gpu, assembly.read_text())
    return kernels


# --- NVIDIA ------------------------------------------------------------------------------------------------------


def read_nvidia(said: str, intermediate: dict[str, str]) -> list[Kernel]:
    """The kernels that ptxas spoke of, with their PTX (the assembler neither splits nor joins accesses)."""
    pattern = (
        r"Compiling entry function '(\S+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
    )
    found = re.findall(pattern, said, re.DOTALL)
    names = plain_names([entry[0] for entry in found])
    kernels = []
    for mangled, gpu, stack, stores, loads, registers, rest in found:
        shared = re.search(r"(\d+) bytes smem", rest)
        code = re.search(rf"\.entry {re.escape(mangled)}\(.*?^}}", intermediate[gpu], re.DOTALL | re.MULTILINE)
        assert code
        spills = int(stack) + int(stores) + int(loads)
        kernels.append(Kernel(gpu, names[mangled], int(registers), 0, spills, int(shared[1]) if shared else 0, code[0]))
    return kernels


def for_nvidia(sources: list[Path], folder: Path, gpus: tuple[str, ...], includes: list[str]) -> list[Kernel]:
    """Every kernel of `sources` for each of NVIDIA's GPUs, and a shared library. Skips where there is no compiler."""
    compiler = gpu_compilers.nvcc()
    flags = ["-std=c++17", "-O3", "-Xptxas=-v", "-Xcompiler=-fPIC,-Wall,-Wextra", "-Werror=all-warnings"]

    def compile_one(source: Path, gpu: str) -> list[Kernel]:
        kept = folder / f"{source.stem}_{gpu}"
        kept.mkdir(parents=True, exist_ok=True)
        keep = ["--keep", f"--keep-dir={kept}", f"-arch={gpu}", "-x", "cu", "-c"]
        said = run([str(compiler), *flags, *INCLUDES, *includes, *keep, str(source), "-o", f"{kept}.o"])
        (kept / "ptxas.log").write_text(said)
        (ptx,) = kept.glob("*.ptx")
        return read_nvidia(said, {gpu: ptx.read_text()})

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = [(source, gpu) for source in sources for gpu in gpus]
        results = list(pool.map(compile_one, *zip(*pairs, strict=True)))
    objects = [str(folder / f"{source.stem}_{gpus[-1]}.o") for source in sources]
    boxes = str(KERNELS / "boxes.cc")
    run(
        [
            str(compiler),
            "-shared",
            "-std=c++17",
            "-Xcompiler=-fPIC",
            *INCLUDES,
            *objects,
            boxes,
            "-o",
            str(folder / "kernels.so"),
        ]
    )
    return [kernel for kernels in results for kernel in kernels]


def for_nvidia_as_written() -> list[Kernel]:
    return for_nvidia(SOURCES, OUT / "nvidia", NVIDIA, [])


def for_nvidia_hipified() -> list[Kernel]:
    includes = [f"-I{ROOT / 'tests' / 'hip_on_nvidia'}", f"-I{OUT / 'hipified'}"]
    return for_nvidia(hipified(), OUT / "nvidia_hipified", NVIDIA[-1:], includes)


# --- the table ---------------------------------------------------------------------------------------------------


def table(kernels: list[Kernel]) -> str:
    """A row for each kernel, with the most that any of its instances for dtypes uses."""
    gpus = [gpu for gpu in (*AMD, *NVIDIA) if any(kernel.gpu == gpu for kernel in kernels)]
    lines = [f"| kernel | instances | {' | '.join(gpus)} | spills | shared memory |", f"|{' --- |' * (len(gpus) + 4)}"]
    for family in sorted({kernel.family for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.family == family]
        cells = []
        for gpu in gpus:
            here = [kernel for kernel in mine if kernel.gpu == gpu]
            registers = str(max(kernel.registers for kernel in here))
            cells.append(
                f"{registers} + {max(kernel.scalar_registers for kernel in here)}" if gpu in AMD else registers
            )
        spills, shared = (max(getattr(kernel, field) for kernel in mine) for field in ("spills", "shared_bytes"))
        instances = len({kernel.name for kernel in mine})
        lines.append(f"| `{family}` | {instances} | {' | '.join(cells)} | {spills} | {shared} B |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{table([*for_amd(), *for_nvidia_as_written()])}{END}{after}")
