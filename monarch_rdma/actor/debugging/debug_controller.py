"""The actor that Monarch's programs ask what waits at a breakpoint; people use `monarch-rdma debug`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ..actor import Actor
from ..endpoint import concurrent_endpoint
from ..joining.controller import get_or_spawn_controller
from ..runtime.proc import current_proc
from .breakpoint_client import Waiting, find_waiting

__all__ = ["DebugController", "DebugSessionInfo", "debug_controller"]

_PAUSE = 0.25  # seconds between two looks


@dataclass(frozen=True)
class DebugSessionInfo:
    """An actor that waits at a breakpoint."""

    actor_name: str
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    lineno: int | None


_Infos = list[DebugSessionInfo]


class DebugController(Actor):
    """Lives in the client's process, one for a job."""

    @concurrent_endpoint
    async def list(self, print_output: bool = True) -> _Infos:
        """By actor and rank; also printed by the client, where that is wanted."""
        found = [_info(waiting) for waiting in await _find()]
        if print_output:
            for each in found:
                print(f"{each.actor_name} {each.rank} {each.coords} {each.hostname} {each.function}:{each.lineno}")
        return found

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Returns when something waits at a breakpoint."""
        while not await _find():
            await asyncio.sleep(_PAUSE)


def debug_controller() -> Any:
    """The job's DebugController, as a mesh of one."""
    return get_or_spawn_controller("debug_controller", DebugController).wait_get()


async def _find() -> list[Waiting]:
    return await asyncio.to_thread(find_waiting, current_proc().address)


def _info(waiting: Waiting) -> DebugSessionInfo:
    facts = waiting.facts
    return DebugSessionInfo(
        waiting.actor, waiting.rank, waiting.coords, facts["hostname"], facts["function"], facts["line"]
    )
