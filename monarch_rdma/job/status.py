"""What is known of a job: what its scheduler says, and its hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..actor import HostMesh
from ..errors import JobEnded

__all__ = ["JobState", "JobStatus", "Phase"]

Phase = Literal["queued", "running", "ending", "ended"]


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of a job; "ending": its hosts are being taken away, and whether it comes back is not known
    yet. `message`: in its own words. `advice`: what to try, or "". `hosts`: their names,
    as far as they are known. `ends_at`: when its time limit passes, as of time.time(), or None.
    """

    phase: Phase
    message: str = ""
    advice: str = ""
    hosts: tuple[str, ...] = ()
    ends_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.phase == "ended"

    def sentence(self, job: str) -> str:
        """For people."""
        said = f": {self.message}" if self.message else ""
        advice = f"; {self.advice}" if self.advice else ""
        if self.phase != "running":
            what = {"queued": "waits in the queue", "ending": "is being ended by its scheduler", "ended": "has ended"}
            return f"{job} {what[self.phase]}{said}{advice}"
        where = f" on {len(self.hosts)} host{'s' * (len(self.hosts) != 1)}" if self.hosts else ""
        left = f", {max(0.0, self.ends_at - time.time()):.0f} s left" if self.ends_at is not None else ""
        return f"{job} runs{where}{left}{said}{advice}"

    def error(self, job: str) -> JobEnded:
        """What a program is told that needs a job which has ended."""
        return JobEnded(self.sentence(job), peer=job, operation="job", cause=self.message or None)


class JobState:
    """The hosts of a job that runs: each mesh is an attribute, as in `state.trainers`, and an item."""

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._find(name, AttributeError)

    def __getitem__(self, name: str) -> HostMesh:
        return self._find(name, KeyError)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __repr__(self) -> str:
        return f"JobState({', '.join(f'{name}={mesh.extent}' for name, mesh in self._hosts.items())})"

    def _find(self, name: str, error: type[Exception]) -> HostMesh:
        try:
            return self._hosts[name]
        except KeyError:
            raise error(f"the job has no mesh {name!r}; it has {', '.join(map(repr, self._hosts))}") from None
