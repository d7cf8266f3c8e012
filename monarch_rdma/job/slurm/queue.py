"""What SLURM says of a job, as JSON where it offers that (scontrol --json, from 23.02 on), else as text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..status import JobStatus
from .commands import NoAnswer, advice_for_refusal, run

__all__ = ["Record", "from_json", "from_text", "hostnames", "look", "status_of"]

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
_COMPLETING = "COMPLETING"
_UNLIMITED = 360 * 86400.0  # seconds; a job without a limit is said to end in a year
_ENDS = {  # states that say more than that it is over, and what to try
    "TIMEOUT": "its time limit has passed; raise time_limit",
    "NODE_FAIL": "a node has failed; requeue=True has such jobs begin anew",
    "OUT_OF_MEMORY": "it took more memory than it had asked for; raise mem",
    "PREEMPTED": "a job with more priority took its nodes; requeue=True has such jobs begin anew",
    "CANCELLED": "somebody has cancelled it, or its program ended",
    "BOOT_FAIL": "its nodes did not come up; ask the administrators",
    "DEADLINE": "it could not be done by its deadline",
    "FAILED": "its log says why",
}
_UNKNOWN = "SLURM does not know the job any more: it ended a while ago"
_has_json = True  # until scontrol refuses it


@dataclass(frozen=True)
class Record:
    """One job, or one component of a heterogeneous job. `states`: the state first, then what goes with it."""

    job: int
    offset: int
    states: tuple[str, ...]
    reason: str
    nodes: str
    num_nodes: int
    ends_at: float | None
    restarts: int
    exit_code: str

    @property
    def state(self) -> str:
        return self.states[0]


def look(job: int) -> list[Record]:
    """The components of a job, in order; empty where SLURM does not know it any more. NoAnswer where it cannot say."""
    global _has_json
    if _has_json:
        done = run("scontrol", "show", "job", "--json", str(job))
        if done.returncode == 0 and done.stdout.lstrip().startswith("{"):
            return from_json(done.stdout)
        _has_json = "invalid job id" in (done.stdout + done.stderr).lower()
    done = run("scontrol", "show", "job", "-o", str(job))
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        if "invalid job id" in said.lower():
            return []
        raise NoAnswer(f"SLURM cannot be asked for job {job}: {said}", operation="job")
    return from_text(done.stdout)


def from_json(text: str) -> list[Record]:
    """What `scontrol --json` prints; fields differ between versions in their form."""
    return _in_order(
        Record(
            job=_number(each.get("job_id")) or 0,
            offset=_number(each.get("het_job_offset")) or 0,
            states=_states(each.get("job_state")),
            reason=str(each.get("state_reason") or ""),
            nodes=str(each.get("nodes") or ""),
            num_nodes=_number(each.get("node_count")) or 0,
            ends_at=float(_number(each.get("end_time")) or 0) or None,
            restarts=_number(each.get("restart_cnt")) or 0,
            exit_code=_exit_code(each.get("exit_code")),
        )
        for each in json.loads(text).get("jobs", ())
    )


def from_text(text: str) -> list[Record]:
    """What `scontrol show job -o` prints: a line for each component, of fields `Name=value`."""
    return _in_order(_from_line(line) for line in text.splitlines() if line.startswith("JobId="))


def status_of(records: Sequence[Record], now: float) -> JobStatus:
    """All components together: what waits, what has ended, until when. `now`: time.time()."""
    if not records:
        return JobStatus("ended", _UNKNOWN, "sacct -j JOB may say more")
    over = [each for each in records if each.state not in (*_WAITING, *_RUNNING)]
    if any(each.state == _COMPLETING for each in over):  # text does not say what will be left of it
        return JobStatus("ending", _why(over[0]))
    if over:
        worst = next((each for each in over if each.state != "COMPLETED"), over[0])
        return JobStatus("ended", _why(worst), _ENDS.get(worst.state, ""))
    waiting = [each for each in records if each.state in _WAITING]
    if waiting:
        reason = "" if waiting[0].reason in ("None", "") else waiting[0].reason
        again = " again, after a requeue" if waiting[0].restarts else ""
        said = f"{waiting[0].state}{again}{f' ({reason})' if reason else ''}"
        return JobStatus("queued", said, advice_for_refusal(reason))
    ends = [each.ends_at for each in records if each.ends_at is not None and each.ends_at < now + _UNLIMITED]
    hosts = tuple(name for each in records for name in hostnames(each.nodes))
    restarts = max(each.restarts for each in records)
    return JobStatus("running", f"restart {restarts}" if restarts else "", "", hosts, min(ends, default=None))


_expanded: dict[str, tuple[str, ...]] = {}


def hostnames(nodes: str) -> tuple[str, ...]:
    """`n[1-2],n4` -> n1, n2, n4."""
    if not nodes:
        return ()
    if nodes not in _expanded:
        _expanded.clear()
        _expanded[nodes] = tuple(run("scontrol", "show", "hostnames", nodes).stdout.split())
    return _expanded[nodes]


def _why(record: Record) -> str:
    reason = "" if record.reason in ("None", "") else f" ({record.reason})"
    code = "" if record.exit_code in ("0:0", "") else f", exit code {record.exit_code}"
    return f"{record.state}{reason}{code}"


def _in_order(records: Any) -> list[Record]:
    return sorted(records, key=lambda record: record.offset)


def _from_line(line: str) -> Record:
    fields: dict[str, str] = {}
    for part in line.split():
        name, equals, value = part.partition("=")
        if equals:
            fields.setdefault(name, value)
    nodes = fields.get("NodeList", "")
    return Record(
        job=int(fields["JobId"]),
        offset=int(fields.get("HetJobOffset", "0")),
        states=_states(fields.get("JobState", "").split(",")),
        reason=fields.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        num_nodes=int(fields.get("NumNodes", "0").partition("-")[0] or 0),
        ends_at=_clock(fields.get("EndTime", "")),
        restarts=int(fields.get("Restarts", "0")),
        exit_code=fields.get("ExitCode", ""),
    )


def _states(said: Any) -> tuple[str, ...]:
    """ "COMPLETING" and the like say how far the end is, not what it was: they go last."""
    states = [str(each).strip() for each in ([said] if isinstance(said, str) else said or []) if str(each).strip()]
    flags = (_COMPLETING, "RECONFIG_FAIL", "UPDATE_DB", "LAUNCH_FAILED", "POWER_UP_NODE")
    return tuple(sorted(states, key=lambda state: state in flags)) or ("UNKNOWN",)


def _number(said: Any) -> int | None:
    """Newer versions write a number as `{"set": true, "infinite": false, "number": 5}`."""
    if isinstance(said, Mapping):
        return int(said.get("number") or 0) if said.get("set") and not said.get("infinite") else None
    return int(said) if isinstance(said, int | float) else None


def _exit_code(said: Any) -> str:
    """As in text: the code and the signal."""
    if isinstance(said, Mapping):
        signal = said.get("signal")
        number = signal.get("id", signal.get("signal_id")) if isinstance(signal, Mapping) else 0
        return f"{_number(said.get('return_code')) or 0}:{_number(number) or 0}"
    code = _number(said) or 0
    return f"{code >> 8}:{code & 127}"


def _clock(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
