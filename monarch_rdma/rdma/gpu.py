"""The GPU runtime of this process as the core sees it: which one, its devices, and what it can do.

for device in describe().devices:
    print(device.ordinal, device.pci, device.numa)

The runtime is the one that the process has loaded (torch brings its own), never a second one. Devices that
HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hide are not counted; between processes a device is
known by its PCI address.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .._engine import ffi, lib
from .engine import raise_error, scratch
from .memory import memory_of

__all__ = ["Description", "Device", "describe", "parse", "synchronize"]


@dataclass(frozen=True)
class Device:
    """One visible device."""

    ordinal: int
    pci: str  # "0000:c1:00.0"
    numa: int  # node, -1 = not known
    peers: tuple[int, ...]  # whose memory it can reach


@dataclass(frozen=True)
class Description:
    """`problem`: why device memory cannot be moved, "" where it can. The rest is empty where there is no runtime."""

    problem: str
    runtime: str  # "HIP", "CUDA"
    library: str
    version: int
    chosen: str  # why this one, where there was a choice
    dmabuf: bool  # RDMA cards can be given device memory
    shareable_fds: bool  # memory of expandable segments can be opened by other processes
    stream_waits: bool  # transfers can be put in the order of a stream
    visible: dict[str, str]  # variables that hide devices
    devices: tuple[Device, ...]


def describe(*, load: bool = False) -> Description:
    """What there is. `load`: loads the installed runtime where none is, which may take memory on devices."""
    length = lib.mr_gpu_describe(int(load), ffi.NULL, 0)
    out = ffi.new("char[]", length + 1)
    lib.mr_gpu_describe(int(load), out, length + 1)
    return parse(json.loads(ffi.string(out).decode()))


def parse(document: dict[str, Any]) -> Description:
    """The core's document."""
    devices = [
        Device(entry["device"], entry["pci"], entry["numa"], tuple(entry["peers"])) for entry in document["devices"]
    ]
    return Description(
        document["problem"],
        document.get("runtime", ""),
        document.get("library", ""),
        document.get("version", 0),
        document.get("chosen", ""),
        document.get("dmabuf", False),
        document.get("shareable_fds", False),
        document.get("stream_waits", False),
        document["visible"],
        tuple(devices),
    )


def synchronize(tensor: Any) -> None:
    """Waits until what was queued on the current stream of a tensor's device has ended. ConfigError where it failed."""
    error = scratch.error
    stream = ffi.cast("void *", memory_of(tensor, "tensor", devices=True).current_stream())
    if kind := lib.mr_gpu_synchronize(tensor.device.index or 0, stream, error):
        raise_error(error, kind, operation="synchronize")
