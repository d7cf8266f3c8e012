"""Where a worker runs and what it sees: environment, working directory, CPUs, memory nodes, threads, devices.

The client checks everything and makes plain values of it; `enter` puts them in force in the worker, before its own
code runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError

__all__ = [
    "BIND_KEYS",
    "absolute",
    "bound",
    "enter",
    "environment",
    "set_title",
    "set_variables",
    "threads_changes",
    "visible_devices",
]

BIND_KEYS = ("cpunodebind", "membind", "physcpubind", "cpus")
_NODES = "/sys/devices/system/node"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "s390x": 269, "riscv64": 237}


def environment(changes: Mapping[str, str | None], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: this process's environment) with `changes`; None removes a variable. Raises ConfigError."""
    for name, value in changes.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"env names a variable {name!r}; a name is a string without '=' and NUL")
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise ConfigError(f"env[{name!r}] is {value!r}, but must be a string without NUL, or None to remove it")
    merged: dict[str, str | None] = {**(os.environ if base is None else base), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def threads_changes(threads: int | None) -> dict[str, str]:
    """The variables that libraries read their thread count from."""
    if threads is None:
        return {}
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ConfigError(f"threads is {threads!r}, but must be an integer of at least 1")
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def visible_devices(devices: Sequence[int] | None, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that show only these devices, counted among those that `base` shows.

    HIP counts within what ROCR_VISIBLE_DEVICES leaves, so that one stays as it is. HIP takes an empty list for no
    list at all: no devices are written as -1.
    """
    if devices is None:
        return {}
    numbers = list(devices)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"visible_devices is {devices!r}, but must be different integers from 0")
    _check_shown(numbers, "ROCR_VISIBLE_DEVICES", list(filter(None, base.get("ROCR_VISIBLE_DEVICES", "").split(","))))
    changes = {}
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        shown = base.get(name) or base.get("CUDA_VISIBLE_DEVICES") or ""
        names = [part.strip() for part in shown.split(",") if part.strip()]
        _check_shown(numbers, name, names)
        changes[name] = ",".join(names[n] if names else str(n) for n in numbers) or "-1"
    return changes


def _check_shown(numbers: Sequence[int], variable: str, shown: Sequence[str]) -> None:
    if shown and numbers and max(numbers) >= len(shown):
        raise ConfigError(f"visible_devices is {list(numbers)!r}, but {variable} shows only {len(shown)} devices")


def _numbers(text: str, where: str, all_of: Sequence[int]) -> list[int]:
    """The numbers of "0-3,8", "all" or "!1" (all but) as numactl writes them, each one of `all_of`; sorted."""
    body = text.removeprefix("!")
    chosen: set[int] = set()
    for part in body.split(","):
        first, dash, last = part.strip().partition("-")
        if part.strip() == "all":
            chosen |= set(all_of)
        elif first.isdecimal() and (not dash or (last.isdecimal() and int(first) <= int(last) < 1 << 16)):
            chosen |= set(range(int(first), int(last if dash else first) + 1))
        else:
            raise ConfigError(f"{where} is {text!r}, but must be like '0-3,8', 'all' or '!1'")
    if unknown := sorted(chosen - set(all_of)):
        raise ConfigError(f"{where} is {text!r}, but {unknown} are not among {sorted(all_of)} of this host")
    return sorted(set(all_of) - chosen if text.startswith("!") else chosen)


def bound(bind: Mapping[str, str]) -> tuple[list[int], list[int]]:
    """The CPUs and the memory nodes that `bind` leaves; empty means unrestricted. Raises ConfigError.

    `cpunodebind` and `membind` take node numbers; `physcpubind` and `cpus` CPU numbers. Where several restrict the
    CPUs, those in all of them are left.
    """
    for key, value in bind.items():
        if key not in BIND_KEYS:
            raise ConfigError(f"bind has the key {key!r}, but knows only {', '.join(BIND_KEYS)}")
        if not isinstance(value, str):
            raise ConfigError(f"bind[{key!r}] is {value!r}, but must be a string such as '0-3,8'")
    if not bind:
        return [], []
    allowed = os.sched_getaffinity(0)
    cpus = set(allowed)
    for key in ("physcpubind", "cpus"):
        if key in bind:
            cpus &= set(_numbers(bind[key], f"bind[{key!r}]", sorted(_online_cpus() | allowed)))
    if "cpunodebind" in bind:
        nodes = _numbers(bind["cpunodebind"], "bind['cpunodebind']", _nodes())
        cpus &= {cpu for node in nodes for cpu in _cpus_of_node(node)}
    if not cpus:
        raise ConfigError(f"bind is {dict(bind)!r}, which leaves no CPU of those allowed here ({sorted(allowed)})")
    memory = _numbers(bind["membind"], "bind['membind']", _nodes()) if "membind" in bind else []
    if "membind" in bind and not memory:
        raise ConfigError(f"bind['membind'] is {bind['membind']!r}, which leaves no memory node")
    return (sorted(cpus) if cpus != allowed else []), memory


def set_variables(changes: Mapping[str, str | None]) -> None:
    """In this process's environment; None removes one."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def enter(order: Mapping[str, Any]) -> None:
    """Puts an order in force in this process. Raises OSError where the system refuses."""
    set_variables(order["env"])
    if order["cwd"] is not None:
        os.chdir(order["cwd"])
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    if order["memory"]:
        _bind_memory(order["memory"])
    if order["threads"] is not None:
        _limit_loaded_libraries(order["threads"])
    _reseed()
    set_title(order["name"])


def _bind_memory(nodes: Sequence[int]) -> None:
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise OSError(f"membind is not known on {os.uname().machine}")
    mask = sum(1 << node for node in nodes)
    words = max(nodes) // 64 + 1
    array = (ctypes.c_ulong * words)(*[mask >> (64 * i) & (1 << 64) - 1 for i in range(words)])
    if ctypes.CDLL(None, use_errno=True).syscall(number, _MPOL_BIND, array, words * 64 + 1) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"set_mempolicy for nodes {list(nodes)}: {os.strerror(error)}")


def _limit_loaded_libraries(threads: int) -> None:
    """Libraries that the template has loaded read the environment long ago."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    if "numpy" not in sys.modules:
        return
    import ctypes

    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for prefix in ("scipy_", ""):
            for suffix in ("", "64_"):
                if setter := getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None):
                    setter(threads)


def _reseed() -> None:
    """numpy's global generator was seeded in the template; without this all workers would draw the same numbers."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def set_title(name: str) -> None:
    """What ps and top show: the thread's name (15 bytes), and the command line as far as the old one gives room."""
    import ctypes

    library = ctypes.CDLL(None)
    library.prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
    if end > start > 0:
        ctypes.memset(start, 0, end - start)
        title = name.encode()[: end - start - 1]
        ctypes.memmove(start, title, len(title))


def _online_cpus() -> set[int]:
    with open("/sys/devices/system/cpu/online") as online:
        return _ranges(online.read())


def _nodes() -> list[int]:
    """The memory nodes; [0] where the kernel has no notion of them."""
    try:
        with open(f"{_NODES}/online") as online:
            return sorted(_ranges(online.read()))
    except FileNotFoundError:
        return [0]


def _cpus_of_node(node: int) -> set[int]:
    try:
        with open(f"{_NODES}/node{node}/cpulist") as cpulist:
            return _ranges(cpulist.read())
    except FileNotFoundError:
        return _online_cpus()


def _ranges(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def absolute(path: str) -> str:
    """The same, for processes with another working directory."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # ours is gone, and with it what was relative to it
        return path
