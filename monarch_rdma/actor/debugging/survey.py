"""Finds and asks every process of a job, from outside: those that do not answer are told apart and delay no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ... import config
from ...errors import RdmaError, TransferTimeout
from ..failure import SupervisionError
from ..hosting.agent import ProcAgent
from ..hosting.host import HOST, HostAgent
from ..joining.job_secret import engine_of_job
from ..mesh import ActorMesh, ProcMesh
from ..remote_error import ActorError
from ..runtime.proc import AGENT, name_of
from ..shape import Extent
from .process_facts import ProcessFacts, descendants, facts_of
from .registry import Program

__all__ = [
    "Answer",
    "Process",
    "agent_of",
    "ask_all",
    "children_of",
    "host_agent_of",
    "join",
    "survey",
    "survey_program",
]

T = TypeVar("T")

_MOST_AT_ONCE = 32


@dataclass
class Process:
    """`address` is "" where it is not known; `host`: of its host's agent. `facts`: None where nobody could be asked.
    `status`: as inspection.status tells it, or what else was asked; None where it does not answer, and then `problem`
    says why. `is_host`: it is nothing but the agent of its host.
    """

    name: str
    address: str
    host: str
    facts: ProcessFacts | None
    status: dict[str, Any] | None = None
    problem: str = ""
    is_host: bool = False


@dataclass(frozen=True)
class Answer:
    """`value`, or None and the `problem`."""

    value: Any
    problem: str = ""


def join(program: Program) -> None:
    """Makes this process a member of the program's job. Raises ConfigError, RdmaError."""
    # A process that is stopped is no lost one here: it may go on, and then it shall be seen again.
    config.configure(heartbeat_timeout=86400.0)
    engine_of_job(program.read_secret())


def agent_of(address: str) -> ActorMesh[ProcAgent]:
    """The agent of a process."""
    return ActorMesh(ProcAgent, "agent", AGENT, _alone(address))


def host_agent_of(address: str) -> ActorMesh[HostAgent]:
    return ActorMesh(HostAgent, "host", HOST, _alone(address))


def _alone(address: str) -> ProcMesh:
    return ProcMesh(name_of(address), [address], Extent([], []).region)


def ask_all(questions: Sequence[Callable[[], T]]) -> list[Answer]:
    """Runs all at the same time; each has its own answer, or its own problem. An interrupt waits for none of them."""
    answers: list[Answer] = [Answer(None)] * len(questions)
    numbers = iter(range(len(questions)))  # next() is atomic

    def work() -> None:
        for number in numbers:
            answers[number] = _ask(questions[number])

    count = min(_MOST_AT_ONCE, len(questions))
    threads = [threading.Thread(target=work, name="monarch_rdma-ask", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _ask(question: Callable[[], T]) -> Answer:
    try:
        return Answer(question())
    except ActorError as error:
        return Answer(None, str(error.exception))
    except TransferTimeout:
        return Answer(None, "no answer in time")
    except (SupervisionError, RdmaError) as error:
        return Answer(None, str(error))


def survey(address: str, timeout: float, endpoint: str = "status") -> list[Process]:
    """All processes of the job that can be found from the one at `address`, which comes first. Each has `timeout`
    seconds to answer. Where that one does not answer it is the only one that is known. `endpoint`: of the agents, which
    is asked for the status; its answer has "hosts".
    """
    (first,) = _with_status([Process(name_of(address), address, "", None)], timeout, endpoint)
    found, asked = {address: first}, set[str]()
    while new := _hosts(found.values()) - asked:
        asked |= new
        children = {child.address: child for child in children_of(sorted(new), timeout)}
        for known in found.keys() & children.keys():
            found[known].facts, found[known].host = children[known].facts, children[known].host
        unknown = [child for child in children.values() if child.address not in found]
        found |= {child.address: child for child in _with_status(unknown, timeout, endpoint)}
    return list(found.values())


def survey_program(program: Program, timeout: float) -> list[Process]:
    """The same for a program of this host. Where it does not answer, what the kernel tells of it and its children."""
    found = survey(program.address, timeout)
    if found[0].facts is None:
        found[0].facts = facts_of(program.pid)
    if found[0].status is None:
        below = (facts_of(pid) for pid in descendants(program.pid))
        why = "its program does not answer"
        found += [Process(facts.command, "", "", facts, problem=why) for facts in below if facts is not None]
    return found


def _hosts(processes: Iterable[Process]) -> set[str]:
    return {host for process in processes if process.status is not None for host in process.status["hosts"]}


def children_of(hosts: Sequence[str], timeout: float) -> list[Process]:
    """The agents of these hosts, and what they have started."""

    def question(host: str) -> Callable[[], list[dict[str, Any]]]:
        return lambda: list(host_agent_of(host).processes.options(timeout=timeout).call_one().get())

    found = []
    for host, answer in zip(hosts, ask_all([question(host) for host in hosts]), strict=True):
        if answer.problem:
            found.append(Process(name_of(host), host, host, None, problem=answer.problem))
        for child in answer.value or ():
            found.append(Process(child["process"], child["address"], host, child["facts"], is_host=child["is_host"]))
    return found


def _with_status(processes: list[Process], timeout: float, endpoint: str) -> list[Process]:
    def question(address: str) -> Callable[[], dict[str, Any]]:
        ask = getattr(agent_of(address), endpoint).options(timeout=timeout)
        return lambda: dict(ask.call_one().get())

    answers = ask_all([question(process.address) for process in processes])
    for process, answer in zip(processes, answers, strict=True):
        process.status, process.problem = answer.value, answer.problem
    return processes
