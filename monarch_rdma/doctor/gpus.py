"""The GPU runtime, its devices, and what can be done with their memory."""

from __future__ import annotations

from pathlib import Path

from ..rdma import gpu
from . import isolated
from .check import Check
from .isolated import Failed

__all__ = ["checks", "judge"]

# The core's own look. It loads the runtime and makes contexts on devices: not in this process.
_DESCRIBE = """
import ctypes, json, sys
describe = ctypes.CDLL(sys.argv[1]).mr_gpu_describe
describe.restype = ctypes.c_uint64
describe.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64]
document = ctypes.create_string_buffer(1 << 20)
describe(1, document, len(document))
print(json.dumps(json.loads(document.value)))
"""
_CORE = Path(__file__).resolve().parent.parent / "libmonarch_rdma.so"
_GROUP = "GPUs"


def checks() -> list[Check]:
    """A line for the runtime, one a device, and one for each way that device memory goes."""
    try:
        return judge(gpu.parse(isolated.run(_DESCRIBE, str(_CORE), timeout=30)))
    except Failed as failure:
        fix = "rocminfo, or nvidia-smi: look at the driver first"
        return [Check(_GROUP, "GPU runtime", False, f"it fails when it looks for devices: {failure}", fix)]


def judge(found: gpu.Description) -> list[Check]:
    """What the description means."""
    hidden = ", ".join(f"{name}={value}" for name, value in found.visible.items())
    runtime = _runtime(found, hidden)
    if not found.devices:
        return [runtime]
    return [
        runtime,
        *[_device(device) for device in found.devices],
        _way(
            "device memory to cards",
            found.dmabuf,
            "as dma-bufs: RDMA cards read and write it without copies",
            "the runtime exports no dma-buf: between hosts it goes through host memory",
            "install ROCm 7.1 or newer (or its libhsa-runtime64.so.1), or a driver of CUDA 11.7 or newer",
        ),
        _way(
            "expandable segments",
            found.shareable_fds,
            "processes of this host open them by descriptors",
            "this runtime shares no descriptors of them: they go through host memory",
            "PYTORCH_ALLOC_CONF=expandable_segments:False",
        ),
        _way(
            "stream order",
            found.stream_waits,
            "transfers can wait for a stream and be waited for by it",
            "the runtime has no waits for values: read_into(stream=) is refused",
            "install ROCm 7 or CUDA 12; until then wait for the future",
        ),
    ]


def _runtime(found: gpu.Description, hidden: str) -> Check:
    name = "GPU runtime"
    if not found.library:
        return Check(_GROUP, name, False, found.problem, "install ROCm or the CUDA runtime, if there is a GPU")
    where = f"{found.runtime} {found.version} ({found.library})"
    if found.problem:
        fix = f"unset {next(iter(found.visible))}" if hidden else "rocminfo, or nvidia-smi: look at the driver"
        return Check(_GROUP, name, False, f"{where}: {found.problem}{f' ({hidden})' if hidden else ''}", fix)
    facts = [
        where,
        f"{len(found.devices)} devices",
        *([hidden] if hidden else []),
        *([found.chosen] if found.chosen else []),
    ]
    return Check(_GROUP, name, True, "; ".join(facts))


def _device(device: gpu.Device) -> Check:
    where = f"node {device.numa}" if device.numa >= 0 else "no NUMA node"
    peers = ", ".join(map(str, device.peers))
    why = f"{device.pci or 'no PCI address'}, {where}, reaches {f'devices {peers}' if peers else 'no other device'}"
    return Check(_GROUP, f"device {device.ordinal}", True, why)


def _way(name: str, works: bool, good: str, bad: str, fix: str) -> Check:
    return Check(_GROUP, name, works, good if works else bad, "" if works else fix)
