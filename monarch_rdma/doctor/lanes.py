"""Each lane, tried for real: two processes, a mebibyte, every byte compared."""

from __future__ import annotations

import json
import os
import subprocess

from .. import bench, config
from .check import Check

__all__ = ["checks"]

_TIMEOUT = 30.0  # seconds
# lane, the check that it rests on, what it is for
_LANES = (
    ("shm-mapped", "memfd and seals", "memory from empty, zeros, share and share_, of processes on this host"),
    ("shm-process_vm", "process_vm", "ordinary memory of processes on this host"),
    ("tcp", "loopback", "everything else"),
    ("verbs", "rails", "processes on other hosts with RDMA cards"),
)


def checks(found: list[Check]) -> list[Check]:
    """`found`: all other checks. A lane that this host cannot offer is not required."""
    by_name = {check.name: check for check in found}
    built = [row for row in _LANES if row[0].partition("-")[0] in config.LANES]
    return [_lane(lane, by_name[probe], use) for lane, probe, use in built]


def _lane(lane: str, probe: Check, use: str) -> Check:
    if not probe.ok:
        return Check("lanes", lane, False, f"not on this host ({probe.name}: {probe.why}); for {use}", probe.fix)
    why = _try(lane)
    fix = f"monarch-rdma bench --local --lane {lane} --sizes 1M --verify"
    return Check("lanes", lane, not why, why or use, fix if why else "", required=True)


def _try(lane: str) -> str:
    """ "" where it works, else what went wrong."""
    program = bench.binary()
    if not os.access(program, os.X_OK):
        return f"{program} is missing, so it cannot be tried; run: make build"
    command = [str(program), "--local", "--verify", "--json", "--lane", lane, "--op", "read,write", "--sizes", "1M"]
    command += ["--measure", "bandwidth", "--iters", "8", "--rounds", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"two processes did not get a mebibyte across within {_TIMEOUT:g} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"the trial ended with {done.returncode}"])[-1]
    used = {row["lane"] for row in json.loads(done.stdout)["figures"]}
    return "" if used == {lane} else f"the transfer went over {', '.join(sorted(used))} instead"
