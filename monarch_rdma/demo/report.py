"""What the demo found: lines for the terminal, a chart, and a file with all figures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Pull", "Sweep", "chart", "pull_line", "size_text", "sweep_table", "write_json"]


@dataclass(frozen=True)
class Pull:
    """All readers pulled all tensors of one set over one lane, at the same time. `rate`: bytes per second, together."""

    weights: str
    lane: str
    which: str  # "first" or "again"
    readers: int
    bytes: int
    tensors: int
    num_wrong: int
    seconds: float
    rate: float
    of_memcpy: float


@dataclass(frozen=True)
class Sweep:
    """Bytes per second of single reads by size; by lane, and "memcpy" for one thread's memcpy in the same minutes."""

    sizes: list[int]
    rates: dict[str, list[float]]


def size_text(size: float) -> str:
    """1536 -> "1.5K"; powers of 1024."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"


def pull_line(pull: Pull) -> str:
    wrong = f"{pull.num_wrong} of {pull.tensors} tensors WRONG"
    right = wrong if pull.num_wrong else f"all {pull.tensors} tensors right"
    rate = f"{pull.rate / 1e9:6.2f} GB/s, {pull.of_memcpy:.2f} of memcpy"
    return f"  {pull.lane:14}  {pull.which}  {pull.bytes / 1e9:6.3f} GB in {pull.seconds:6.3f} s: {rate}; {right}"


def sweep_table(sweep: Sweep) -> str:
    """One row a size; each lane with its share of memcpy."""
    lanes = [lane for lane in sweep.rates if lane != "memcpy"]
    lines = ["    size    memcpy" + "".join(f"{lane:>22}" for lane in lanes)]
    for number, size in enumerate(sweep.sizes):
        memcpy = sweep.rates["memcpy"][number]
        rates = [sweep.rates[lane][number] for lane in lanes]
        cells = "".join(f"{rate / 1e9:13.3f} ({rate / memcpy:6.3f})" for rate in rates)
        lines.append(f"  {size_text(size):>6}  {memcpy / 1e9:8.3f}{cells}")
    return "\n".join(lines)


def write_json(path: Path, pulls: list[Pull], sweep: Sweep, loss: list[dict[str, Any]]) -> None:
    document = {"pulls": [asdict(pull) for pull in pulls], "sweep": asdict(sweep), "loss": loss}
    path.write_text(json.dumps(document, indent=2) + "\n")


def chart(path: Path, sweep: Sweep) -> bool:
    """GB/s by size, a line a lane, memcpy dashed. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for way, rates in sweep.rates.items():
        style = {"color": "black", "linestyle": "--"} if way == "memcpy" else {"marker": "o", "markersize": 4}
        axes.plot(sweep.sizes, [rate / 1e9 for rate in rates], label=way, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sweep.sizes, [size_text(size) for size in sweep.sizes])
    axes.set_xlabel("bytes of one read")
    axes.set_ylabel("GB/s")
    axes.set_title("One reader, one read at a time, beside memcpy by one thread")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
