"""`monarch-rdma chaos`: faults on the processes of a running program, one or many, by name or from a seed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import config
from ..actor.chaos import Injected, Injector, targets
from ..actor.debugging.registry import Program, choose
from ..actor.debugging.survey import agent_of, join
from ..errors import ConfigError
from ..supervision.chaos.plan import FAULTS, Fault, Plan

__all__ = ["from_arguments", "run"]

_TIMEOUT = 5.0  # seconds that the program has to answer


def run(*, pid: int | None, plan: Plan | None, as_json: bool, dry_run: bool) -> int:
    """Carries the plan out and prints each fault; without a plan, prints what there is to be hit. Exit code 1 where a
    fault could not be done.
    """
    if plan is not None and dry_run:
        print(plan.to_json() if as_json else "\n".join(fault.describe() for fault in plan.faults))
        return 0
    program = choose(pid)
    hosts = _hosts(program)
    if plan is None:
        for process in targets(hosts):
            print(process.name, process.facts.pid if process.facts is not None else "", sep="\t")
        return 0
    injector = Injector(plan, hosts=hosts, program=program.address)
    try:
        injector.run(_tell)
    except KeyboardInterrupt:
        injector.stop()
        raise
    return 1 if any(injected.problem for injected in injector.injected) else 0


def _hosts(program: Program) -> list[str]:
    """Its hosts' agents, as it tells them. What is done to it is written to its own log of events."""
    join(program)
    status = agent_of(program.address).status.options(timeout=_TIMEOUT).call_one().get()
    config.configure(event_log=status["event_log"])
    return list(status["hosts"])


def _tell(injected: Injected) -> None:
    if injected.problem:
        print(f"{injected.fault.kind}: {injected.problem}", file=sys.stderr, flush=True)
    else:
        chosen = replace(injected.fault, target=injected.target, peer=injected.peer or "*")
        print(chosen.describe(), flush=True)


def _single(kind: str, target: str, seconds: float, amount: float | None) -> Plan:
    """One fault now. `target`: a process, or for links two with a comma between; a number means that rank."""
    names = [f"*/{name}" if name.isdecimal() else name for name in target.split(",")]
    if FAULTS[kind].has_peer and len(names) != 2:
        raise ConfigError(f"{target!r} is not two processes with a comma between")
    if not FAULTS[kind].has_peer and len(names) != 1:
        raise ConfigError(f"{target!r} is not one process")
    peer = names[1] if FAULTS[kind].has_peer else "*"
    return Plan((Fault(kind, 0.0, names[0], seconds=seconds, amount=amount, peer=peer),))


def from_arguments(
    faults: Sequence[tuple[str, str]],
    *,
    file: Path | None,
    rate: float | None,
    duration: float | None,
    seed: int,
    kinds: Sequence[str],
    target: str,
    seconds: float,
    amount: float | None,
) -> Plan | None:
    """The plan that the command line names; None where it names none. ConfigError where it names several."""
    if sum((bool(faults), file is not None, rate is not None)) > 1 or len(faults) > 1:
        raise ConfigError("one of a fault, --plan and --rate can be given")
    if faults:
        ((kind, whom),) = faults
        return _single(kind, whom, seconds, amount)
    if file is not None:
        return Plan.from_json(file.read_text())
    if rate is None:
        return None
    if duration is None:
        raise ConfigError("--rate needs --duration")
    return Plan.random(seed, duration=duration, rate=rate, kinds=kinds, target=target)
