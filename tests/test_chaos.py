"""Faults on purpose: plans are data that a seed makes again, and what each fault does is what it says."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from actor_client import LIMIT, Faults, Stage, hold, wait_until
from hypothesis import given
from hypothesis import strategies as st
from knocks import without_knocks
from running_program import RunningProgram

from monarch_rdma.actor import Actor, ActorError, HostMesh, Port, ProcMesh, SupervisionError, endpoint
from monarch_rdma.actor.chaos import Injected, Injector, targets
from monarch_rdma.actor.debugging.process_facts import facts_of
from monarch_rdma.cli import CHAOS
from monarch_rdma.config import configured
from monarch_rdma.errors import ConfigError, PeerLost, TransferTimeout
from monarch_rdma.rdma import Engine, RDMABuffer, Secret
from monarch_rdma.rdma.faults import put_fault
from monarch_rdma.supervision import events
from monarch_rdma.supervision.chaos import FAULTS, Fault, Plan, moment
from monarch_rdma.supervision.chaos.carry_out import _DEEDS
from monarch_rdma.supervision.events import Recording
from monarch_rdma.tools.chaos import from_arguments

kinds = st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, unique=True)
plans = st.builds(
    lambda seed, kinds, duration, rate: Plan.random(seed, kinds=kinds, duration=duration, rate=rate),
    st.integers(0, 2**64),
    kinds,
    st.floats(0, 20),
    st.floats(0.1, 10),
)


# --- plans


@given(st.integers(0, 2**64), kinds, st.floats(0, 20), st.floats(0.1, 10))
def test_a_seed_makes_one_plan(seed: int, kinds: list[str], duration: float, rate: float) -> None:
    def make(length: float) -> Plan:
        return Plan.random(seed, kinds=kinds, duration=length, rate=rate, target="a/*")

    plan = make(duration)
    assert plan == make(duration)
    assert plan.faults == tuple(fault for fault in make(2 * duration + 1).faults if fault.at < duration)
    assert all(fault.kind in kinds and 0 <= fault.at < duration for fault in plan.faults)


def test_a_seed_makes_the_same_plan_everywhere() -> None:
    """What is written here was made once; another Python, or another machine, makes it again."""
    plan = Plan.random(7, duration=3, rate=1, kinds=["kill", "cut_link"])
    told = [(fault.kind, round(fault.at, 6), round(fault.pick, 6), round(fault.seconds, 6)) for fault in plan.faults]
    assert told == THE_PLAN_OF_SEED_7


THE_PLAN_OF_SEED_7 = [
    ("kill", 0.391315, 0.650934, 0.0),
    ("cut_link", 0.451064, 0.037496, 0.16287),
    ("cut_link", 1.003613, 0.123802, 0.66469),
    ("kill", 1.86424, 0.976255, 0.0),
    ("kill", 2.020023, 0.308482, 0.0),
]


@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_rates_and_weights_are_kept_on_average() -> None:
    plan = Plan.random(1, duration=2000, rate=2.0, kinds={"kill": 3, "stop": 1})
    kills = sum(fault.kind == "kill" for fault in plan.faults)
    assert 3800 < len(plan.faults) < 4200
    assert 0.7 < kills / len(plan.faults) < 0.8


@given(st.lists(st.text("ab/1*", min_size=1, max_size=3), unique=True), st.floats(0, 1, exclude_max=True))
def test_one_of_those_that_match_is_chosen(names: list[str], pick: float) -> None:
    chosen = Fault("kill", pick=pick).choose_target(names)
    assert chosen in names if names else chosen is None
    assert Fault("kill", pick=pick).choose_target(reversed(names)) == chosen
    peer = Fault("break_link", peer_pick=pick).choose_peer(names, names[0] if names else "")
    assert peer in names[1:] if len(names) > 1 else peer is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kind": "explode"}, "kind is 'explode', but must be one of kill, stop"),
        ({"kind": "kill", "at": -1}, "at is -1, but must be a number from 0"),
        ({"kind": "kill", "at": float("nan")}, "at is nan"),
        ({"kind": "kill", "pick": 1.0}, "pick is 1.0, but must be a number from 0 to below 1"),
        ({"kind": "kill", "amount": 3}, "amount is 3, but kill has none"),
        ({"kind": "stop"}, "seconds is 0.0, but stop must last some time"),
        ({"kind": "hold_gil", "seconds": 1e9}, "seconds is 1000000000.0"),
        ({"kind": "exhaust_memory", "seconds": 1, "amount": 1}, "amount is 1, but must be a number from 1.04858e"),
        ({"kind": "corrupt_frame", "amount": 3}, "amount is 3, but must be a number from 0 to 2"),
        ({"kind": "kill", "target": ""}, "target is '', but must be a name"),
        ({"kind": "kill", "when": 1}, "a fault has no 'when'; it has amount, at, kind"),
        ({"target": "a"}, "a fault has no kind"),
        ("kill", "a fault is 'kill', but must be an object"),
    ],
)
def test_what_is_no_fault_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Fault.from_dict(given)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"faults": 1}', '{"faults": [{}]}', "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "wrong", [{"kinds": []}, {"kinds": ["x"]}, {"kinds": {"kill": 0}}, {"rate": 0}, {"duration": -1}]
)
def test_what_makes_no_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan.random(1, **{"duration": 1, "rate": 1, **wrong})


# --- connections


@pytest.fixture
def pair(secret: Secret) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that reach each other over TCP, quick to notice a loss."""
    options = {"same_host_unix": False, "lanes": "tcp", "heartbeat_interval": 0.05, "heartbeat_timeout": 1.0}
    with (
        Engine(secret=secret, name="owner", **options) as owner,
        Engine(secret=secret, name="reader", **options) as reader,
    ):
        yield owner, reader


def reading(pair: tuple[Engine, Engine], tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    owner, reader = pair
    remote = RDMABuffer.from_bytes(RDMABuffer(tensor, engine=owner).to_bytes(), engine=reader)

    def read() -> torch.Tensor:
        target = torch.zeros_like(tensor)
        remote.read_into(target).get(LIMIT)
        return target

    assert torch.equal(read(), tensor)
    return read


def test_a_cut_is_a_loss_after_the_timeout_and_heals(pair: tuple[Engine, Engine]) -> None:
    tensor = torch.arange(1000.0)
    read = reading(pair, tensor)
    put_fault(pair[0].address, "cut", 2.0, engine=pair[1])
    began = time.monotonic()
    with pytest.raises(PeerLost):
        read()
    assert time.monotonic() - began >= 0.8
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            assert torch.equal(read(), tensor)
            return
        except PeerLost:
            continue
    pytest.fail("it does not heal")


@pytest.mark.parametrize("way", [0, 1, 2])
def test_a_corrupt_frame_is_a_typed_error_or_nothing(pair: tuple[Engine, Engine], way: int) -> None:
    tensor = torch.arange(1000.0)
    read = reading(pair, tensor)
    watch = pair[1].watch(pair[0].address)
    put_fault(pair[1].address, "corrupt", amount=way, engine=pair[0])
    with pytest.raises(PeerLost):  # heartbeats of the watch are the next frames
        watch.get(LIMIT)
    for _ in range(100):
        try:
            assert torch.equal(read(), tensor)
            return
        except PeerLost:
            continue
    pytest.fail("there is no new connection")


def test_a_fault_needs_a_connection(pair: tuple[Engine, Engine]) -> None:
    with pytest.raises(PeerLost, match="there is no connection to mrdma://"):
        put_fault(pair[0].address, "break", engine=pair[1])
    with pytest.raises(ConfigError, match="kind is 'burn', but must be one of break, cut, slow, corrupt"):
        put_fault(pair[0].address, "burn", engine=pair[1])


# --- programs


class Victim(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self, name: str) -> str:
        moment(name)
        return "said"

    @endpoint
    def hold(self, started: Port[Any]) -> None:
        hold(started)

    @endpoint
    def take(self, size: int) -> str:
        try:
            return str(len(bytearray(size)))
        except MemoryError:
            return "none left"

    @endpoint
    def reach(self, other: Any) -> int:
        return int(other.pid.call_one().get())

    @endpoint
    def reach_and_hold(self, other: Any, started: Port[Any]) -> None:
        other.hold.call_one(started).get()

    @endpoint
    def join_group(self, rank: int, path: str) -> None:
        import torch.distributed

        torch.distributed.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
        torch.distributed.barrier()

    @endpoint
    def reduce(self) -> str:
        import torch.distributed

        try:
            torch.distributed.all_reduce(torch.ones(3))
        except RuntimeError as error:
            return str(error)
        return "reduced"


@pytest.fixture
def procs(client: HostMesh) -> Iterator[ProcMesh]:
    with client.spawn_procs({"gpus": 2}, name="victims") as procs:
        yield procs


def inject(fault: Fault) -> Injected:
    injected = Injector(Plan(())).inject(fault)
    assert injected.problem == ""
    return injected


def test_a_kill_is_the_cause_of_what_follows(procs: ProcMesh, faults: Faults) -> None:
    victims = procs.spawn("victims", Victim)
    victims.initialized.get()
    with Recording() as recording:
        injected = inject(Fault("kill", target="victims/1"))
        faults.next()
        fault = recording.wait("fault.unhandled", LIMIT)
        chain = [event.kind for event in events.causes(fault, recording.events)]
    assert chain == ["process.failed", "fault.injected"]
    assert (injected.target, injected.peer) == ("victims/1", "")
    with pytest.raises(SupervisionError):
        victims.slice(gpus=1).pid.call_one().get()
    assert victims.slice(gpus=0).pid.call_one().get() > 0


def test_a_stop_ends_by_itself(procs: ProcMesh) -> None:
    victims = procs.spawn("victims", Victim)
    pid = victims.slice(gpus=0).pid.call_one().get()
    inject(Fault("stop", target="victims/0", seconds=1.5))
    wait_until(lambda: facts_of(pid).state == "stopped", "it is not stopped")
    assert victims.slice(gpus=0).pid.call_one().get() == pid
    assert facts_of(pid).state != "stopped"


def test_a_held_gil_delays_and_kills_nobody(procs: ProcMesh) -> None:
    victim = procs.spawn("victims", Victim).slice(gpus=0)
    pid = victim.pid.call_one().get()
    inject(Fault("hold_gil", target="victims/0", seconds=3.0))
    began = time.monotonic()
    wait_until(lambda: asked_in_vain(victim) or time.monotonic() - began > 10, "never")
    assert time.monotonic() - began < 10
    assert victim.pid.call_one().get() == pid


def asked_in_vain(victim: Any) -> bool:
    try:
        victim.pid.options(timeout=0.2).call_one().get()
    except TransferTimeout:
        return True
    return False


def test_memory_is_exhausted_for_a_while(procs: ProcMesh) -> None:
    victim = procs.spawn("victims", Victim).slice(gpus=0)
    size = 256 << 20
    assert victim.take.call_one(size).get() == str(size)
    fault = Fault("exhaust_memory", target="victims/0", seconds=2.0, amount=8 << 20)
    inject(fault)
    wait_until(lambda: victim.take.call_one(size).get() == "none left", "there is memory all the time")
    again = Injector(Plan(())).inject(fault)
    assert "exhausted already" in again.problem
    wait_until(lambda: victim.take.call_one(size).get() == str(size), "the memory does not come back")


def test_an_aborted_group_fails_whoever_waits_in_it(procs: ProcMesh, tmp_path: Path) -> None:
    victims = procs.spawn("victims", Victim)
    refused = Injector(Plan(())).inject(Fault("abort_group", target="victims/0"))
    assert refused.problem == "this process has no process group of torch.distributed"
    joined = [victims.slice(gpus=rank).join_group.call_one(rank, str(tmp_path / "group")) for rank in range(2)]
    for each in joined:
        each.get()
    waits = victims.slice(gpus=1).reduce.call_one()
    inject(Fault("abort_group", target="victims/0"))
    assert re.search("Connection (closed|reset) by peer", waits.get(LIMIT))


@pytest.mark.parametrize("kind", ["break_link", "corrupt_frame"])
def test_a_broken_link_ends_calls_between_two_that_live_and_meet_again(procs: ProcMesh, kind: str) -> None:
    victims = procs.spawn("victims", Victim)
    one, other = victims.slice(gpus=0), victims.slice(gpus=1)
    unconnected = Injector(Plan(())).inject(Fault(kind, target="victims/0", peer="victims/1"))
    assert "there is no connection to mrdma://" in unconnected.problem
    assert one.reach.call_one(other).get() == other.pid.call_one().get()
    for _ in range(2):
        stage = Stage()
        reaching = one.reach_and_hold.call_one(other, stage.port)
        go = stage.next()
        inject(Fault(kind, target="victims/0", peer="victims/1"))
        go.send(None)  # the answer is the frame that is damaged
        with pytest.raises(ActorError, match="process victims/1 is lost"):
            reaching.get(LIMIT)
        wait_until(lambda: one.reach.call_one(other).exception(LIMIT) is None, "they do not meet again")
        assert other.reach.call_one(one).get(LIMIT) == one.pid.call_one().get(LIMIT)


def test_a_fault_waits_for_its_moment(procs: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    victims = procs.spawn("victims", Victim)
    victims.say.call("saved").get()
    plan = Plan((Fault("kill", target="victims/1", moment="saved"), Fault("hold_gil", 0.1, "victims/0", seconds=0.1)))
    injector = Injector(plan)
    injector.run()
    assert [each.problem for each in injector.injected] == ["", ""]
    assert victims.say.call("something else").get().values() == ["said", "said"]
    assert victims.slice(gpus=0).say.call_one("saved").get() == "said"
    with pytest.raises(SupervisionError):
        victims.slice(gpus=1).say.call_one("saved").get()
    faults.next()


def test_a_stop_at_a_moment_ends_by_itself(procs: ProcMesh) -> None:
    victim = procs.spawn("victims", Victim).slice(gpus=0)
    pid = victim.pid.call_one().get()
    inject(Fault("stop", target="victims/0", moment="now", seconds=1.0))
    assert facts_of(pid).state != "stopped"
    said = victim.say.call_one("now")
    wait_until(lambda: facts_of(pid).state == "stopped", "it is not stopped")
    assert said.get(LIMIT) == "said"
    wait_until(lambda: not children(pid), "who made it go on is left")


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def test_every_kind_can_be_carried_out() -> None:
    assert _DEEDS.keys() == FAULTS.keys()


def test_what_was_injected_can_be_injected_again(procs: ProcMesh, tmp_path: Path) -> None:
    plan = Plan.random(3, duration=0.5, rate=20, kinds=["stop"], target="victims/*", seconds=(0.01, 0.02))
    plan = Plan((*plan.faults, Fault("kill", at=0.1, target="nobody")), plan.seed)
    with configured(event_log=tmp_path / "log"), Injector(plan) as injector:
        wait_until(lambda: len(injector.injected) == len(plan.faults), "not all are injected")
    problems = [each.problem for each in injector.injected if each.problem]
    assert problems == ["no process matches 'nobody'; there are victims/0, victims/1"]
    again = Plan.of_events(events.read(tmp_path / "log"))
    assert len(again.faults) == len(plan.faults) - 1
    chosen = sorted((each.target, each.fault.seconds) for each in injector.injected if not each.problem)
    assert sorted((fault.target, fault.seconds) for fault in again.faults) == chosen
    assert {fault.target for fault in again.faults} == {"victims/0", "victims/1"}
    # The clock is that of the machine: times are the plan's, and what a busy machine adds.
    for fault, planned in zip(again.faults, [each for each in plan.faults if each.kind == "stop"], strict=True):
        assert fault.at >= round(planned.at, 6)


def test_only_processes_of_the_program_can_be_named(procs: ProcMesh) -> None:
    assert [each.name for each in targets()] == ["victims/0", "victims/1"]
    own = Injector(Plan(())).inject(Fault("kill", target=f"*{os.getpid()}*"))
    assert own.problem.startswith("no process matches")


# --- the command

PROGRAM = """
from monarch_rdma.actor import Actor, endpoint, this_host
from monarch_rdma import actor
actor.unhandled_fault_hook = lambda failure: print("lost", failure.mesh, failure.rank, flush=True)
procs = this_host().spawn_procs({"gpus": 2}, name="victims")
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProgram]:
    directory = tmp_path_factory.mktemp("chaos")
    with RunningProgram(directory, PROGRAM, MONARCH_RDMA_EVENT_LOG=str(directory / "events")) as running:
        running.line("ready")
        yield running


def test_the_command_lists_and_plans_without_doing(program: RunningProgram, tmp_path: Path) -> None:
    listed = program.command("chaos")
    assert listed.returncode == 0 and "victims/0" in listed.stdout and "victims/1" in listed.stdout
    dry = program.command("chaos", "--rate", "2", "--duration", "5", "--seed", "3", "--kinds", "kill,stop", "--dry-run")
    again = program.command(
        "chaos", "--rate", "2", "--duration", "5", "--seed", "3", "--kinds", "kill,stop", "--dry-run"
    )
    assert dry.stdout == again.stdout and "kill" in dry.stdout
    as_json = program.command(
        "chaos", "--rate", "2", "--duration", "5", "--seed", "3", "--kinds", "kill,stop", "--dry-run", "--json"
    )
    assert Plan.from_json(as_json.stdout) == Plan.random(3, duration=5, rate=2, kinds=["kill", "stop"])


def test_the_command_injects(program: RunningProgram, tmp_path: Path) -> None:
    stopped = program.command("chaos", "--stop", "1", "--seconds", "0.1")
    assert stopped.returncode == 0, stopped.stderr
    assert "stop victims/1 for 0.1 s" in stopped.stdout
    file = tmp_path / "plan.json"
    file.write_text(Plan((Fault("hold_gil", 0.1, "victims/0", seconds=0.1), Fault("kill", 0.2, "victims/1"))).to_json())
    done = program.command("chaos", "--plan", str(file))
    assert done.returncode == 0, done.stderr
    assert program.line("lost") == "lost victims 1"
    log = events.read(program.directory / "events")  # of the program, to which the command has added
    failed = next(event for event in log if event.kind == "process.failed")
    assert [cause.kind for cause in events.causes(failed, log)] == ["fault.injected"]
    assert [fault.kind for fault in Plan.of_events(log).faults] == ["stop", "hold_gil", "kill"]
    assert sorted(kind.replace("-", "_") for kind in CHAOS) == sorted(FAULTS)
    done = program.command("chaos", "--kill", "1")
    assert done.returncode == 1 and "no process matches '*/1'; there are victims/0" in done.stderr


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"faults": [("cut_link", "victims/0")]}, "'victims/0' is not two processes with a comma between"),
    ({"faults": [("kill", "0,1")]}, "'0,1' is not one process"),
    ({"faults": [("stop", "0")]}, "seconds is 0.0, but stop must last some time"),
    ({"rate": 1.0}, "--rate needs --duration"),
    ({"faults": [("kill", "0")], "rate": 1.0}, "one of a fault, --plan and --rate can be given"),
    ({"faults": [("kill", "0"), ("kill", "1")]}, "one of a fault, --plan and --rate can be given"),
    ({"rate": 1.0, "duration": 1.0, "kinds": ["explode"]}, "kind is 'explode'"),
]


@pytest.mark.parametrize(("given", "problem"), REFUSED)
def test_what_the_command_cannot_mean_is_refused(given: dict[str, Any], problem: str) -> None:
    nothing: dict[str, Any] = {"faults": [], "file": None, "rate": None, "duration": None, "seed": 0}
    nothing |= {"kinds": ["kill"], "target": "*", "seconds": 0.0, "amount": None}
    with pytest.raises(ConfigError, match=re.escape(problem)):
        from_arguments(**{**nothing, **given})


def test_a_file_that_is_no_plan_is_refused(program: RunningProgram) -> None:
    done = program.command("chaos", "--plan", "/nowhere/plan")
    assert done.returncode == 1 and "No such file" in done.stderr and "Traceback" not in done.stderr, done.stderr


# --- the page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "chaos.md"


def test_the_page_about_chaos_is_true() -> None:
    done = doctest.testfile(str(PAGE), module_relative=False)
    assert (done.failed, done.attempted > 4) == (0, True)
    text = PAGE.read_text()
    assert [kind for kind, about in FAULTS.items() if f"| `{kind}` | {about.about} |" not in text] == []


def test_the_pages_program_works() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (code,) = [block for block in blocks if ">>>" not in block]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, without_knocks(done.stderr)) == ("[5, 'lost']\n", "")
