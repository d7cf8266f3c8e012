"""What `monarch_rdma.rdma.gpu` and the doctor say of GPU runtimes, each looked at in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_gpus import fake_gpu_folder

from monarch_rdma.doctor import gpus
from monarch_rdma.rdma import gpu

_DESCRIBE = """
import dataclasses, json, sys
from monarch_rdma.rdma import gpu
print(json.dumps(dataclasses.asdict(gpu.describe(load=sys.argv[1] == "load"))))
"""


def described(*, load: bool = True, **environment: str) -> gpu.Description:
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, "load" if load else "look"],
        env={**os.environ, "LD_LIBRARY_PATH": str(fake_gpu_folder()), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return gpu.parse({**(document := json.loads(done.stdout)), "devices": _entries(document["devices"])})


def _entries(devices: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**device, "device": device["ordinal"]} for device in devices]


def test_a_process_without_a_runtime_has_none() -> None:
    found = described(load=False)
    assert found.devices == ()
    assert "no GPU runtime is loaded" in found.problem


def test_devices_are_told_by_their_pci_addresses() -> None:
    found = described()
    assert (found.runtime, found.problem, found.dmabuf, found.shareable_fds, found.stream_waits) == (
        "HIP", "", True, True, True,
    )  # fmt: skip
    assert [device.pci for device in found.devices] == ["0000:c0:00.0", "0000:c1:00.0"]
    assert found.devices[1].peers == (0,)


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_variables_that_hide_devices_are_honoured(variable: str) -> None:
    found = described(**{variable: "1"})
    assert found.visible == {variable: "1"}
    assert [(device.ordinal, device.pci) for device in found.devices] == [(0, "0000:c1:00.0")]


def test_the_doctor_tells_runtime_devices_and_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_gpu_folder()))
    found = {check.name: check for check in gpus.checks()}
    assert all(check.ok and not check.fix for check in found.values())
    assert "HIP 70253211" in found["GPU runtime"].why
    assert "0000:c1:00.0" in found["device 1"].why
    assert "reaches devices 0" in found["device 1"].why
    assert {"device memory to cards", "expandable segments", "stream order"} <= found.keys()


def test_the_doctor_tells_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_gpu_folder()))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    (runtime,) = gpus.checks()
    assert not runtime.ok
    assert "finds no device (HIP_VISIBLE_DEVICES=)" in runtime.why
    assert runtime.fix == "unset HIP_VISIBLE_DEVICES"


def test_the_doctor_tells_what_a_runtime_lacks() -> None:
    found = described(load=True)
    lacking = gpu.Description(**{**vars(found), "dmabuf": False, "shareable_fds": False, "stream_waits": False})
    bad = [check for check in gpus.judge(lacking) if not check.ok]
    assert [check.name for check in bad] == ["device memory to cards", "expandable segments", "stream order"]
    assert all(check.fix for check in bad)


def test_a_runtime_that_crashes_is_no_end_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DESCRIBE", "import os; os.abort()")
    (runtime,) = gpus.checks()
    assert not runtime.ok
    assert "signal 6" in runtime.why
