"""The model of training under failures: against theory, runs worked out by hand, and what must hold of any run."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from monarch_rdma.ft import simulate
from monarch_rdma.ft.simulate import (
    Failure,
    Failures,
    InputError,
    Job,
    Network,
    Outcome,
    Workload,
    closed_form,
    measured,
    simulate_checkpointing,
    simulate_healing,
)
from monarch_rdma.ft.simulate.run import run
from monarch_rdma.ft.simulate.scaling import slowest_of
from monarch_rdma.ft.simulate.settings import FROZEN, job_of

# Three standard errors: a wrong model is much further off, and the seeds are fixed, so that it holds always or never.
SIGMAS = 3.0


def assert_mean(values: list[float], expected: float) -> None:
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert statistics.fmean(values) == pytest.approx(expected, abs=SIGMAS * error)
    assert error < 0.05 * expected  # so that this says something


# --- theory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [60.0, closed_form.best_interval(3600, 20), 2000.0])
@pytest.mark.parametrize("restart", [0.0, 300.0])
def test_checkpointing_takes_the_time_that_daly_says(interval: float, restart: float) -> None:
    job = Job(groups=2, step_s=1, checkpoint_interval_s=interval, checkpoint_stall_s=20, job_restart_s=restart)
    horizon = 1e6
    runs = [simulate_checkpointing(job, Failures(3600).draw(job.nodes, horizon, seed), horizon) for seed in range(20)]
    expected = closed_form.checkpointing_goodput(3600, interval, 20, restart)
    assert_mean([outcome.goodput for outcome in runs], expected)


@given(mtbf=st.floats(10, 1e7), cost=st.floats(0.01, 1e4), factor=st.floats(0.05, 20))
def test_no_interval_beats_the_best_one(mtbf: float, cost: float, factor: float) -> None:
    best = closed_form.best_interval(mtbf, cost)
    at_best = closed_form.checkpointing_goodput(mtbf, best, cost, 60)
    assert closed_form.checkpointing_goodput(mtbf, factor * best, cost, 60) <= at_best * (1 + 1e-6)


def test_youngs_interval_is_the_best_one_where_checkpoints_cost_little() -> None:
    assert closed_form.best_interval(1e6, 1) == pytest.approx(closed_form.young_interval(1e6, 1), rel=2e-3)
    assert closed_form.young_interval(5000, 4) == 200


def down_shares(job: Job, failures: Failures, horizon: float = 50_000.0) -> list[float]:
    hits = [failures.draw(job.nodes, horizon, seed) for seed in range(6)]
    return [simulate_healing(job, failing, horizon).share("down") for failing in hits]


def test_a_group_is_up_as_much_as_renewals_say() -> None:
    found = down_shares(Job(groups=8, step_s=50), Failures(100 / 8, restart_s=30))
    assert_mean(found, 1 - closed_form.availability(100, 30))


@pytest.mark.parametrize("repairs_at_once", [0, 1, 2])
def test_repairs_queue_as_machine_repair_theory_says(repairs_at_once: int) -> None:
    job = Job(groups=4, step_s=50, replacements_at_once=repairs_at_once)
    found = down_shares(job, Failures(100 / 4, replace_s=40, machine_share=1, exponential=True))
    up = closed_form.machines_up(4, 100, 40, repairs_at_once)
    assert_mean(found, sum((4 - count) / 4 * chance for count, chance in enumerate(up)))


def test_machine_repair_of_one_machine_is_its_availability() -> None:
    assert closed_form.machines_up(1, 90, 10) == pytest.approx([0.1, 0.9])
    assert sum(closed_form.machines_up(7, 10, 50, 2)) == pytest.approx(1)


# --- by hand -----------------------------------------------------------------------------------------------------

HAND = Job(groups=3, step_s=1, steps_per_round=10, sync_s=2, detect_s=0.5, reconfigure_s=1, job_restart_s=20)


def seconds(outcome: Outcome) -> dict[str, float]:
    return {name: amount for name, amount in outcome.seconds.items() if amount}


def test_without_failures_all_but_the_synchronisation_is_useful() -> None:
    outcome = simulate_healing(HAND, [], 120)
    assert seconds(outcome) == {"useful": 300, "sync": 60}
    assert outcome.group_rounds == 30 and outcome.goodput == pytest.approx(HAND.failure_free_goodput)
    assert simulate_checkpointing(HAND, [], 120).seconds["unfinished"] == 360  # no checkpoint was ever asked for


def test_a_group_that_fails_loses_its_round_and_joins_the_next_but_one() -> None:
    # Round 1 ends at 12. In round 2 group 1 fails at 16, is back at 21; the others commit at 25.
    outcome = simulate_healing(HAND, [Failure(16, 1, 5)], 25)
    assert seconds(outcome) == pytest.approx(
        {"useful": 30 + 20, "sync": 6 + 4, "lost": 4, "down": 5, "stalled": 2 + 4}, abs=1e-9
    )
    assert outcome.active_s == {3: 16, 2: 9}
    # It joined at 25, so that the next quorum forms anew once more.
    assert simulate_healing(HAND, [Failure(16, 1, 5)], 38).group_rounds == 3 + 2 + 3


def test_a_failure_during_a_synchronisation_makes_the_others_do_it_again() -> None:
    # At 11 it is half done; noticed at 11.5, a quorum at 12.5, done at 14.5.
    outcome = simulate_healing(HAND, [Failure(11, 0, 100)], 14.5)
    assert seconds(outcome) == pytest.approx({"useful": 20, "sync": 4, "stalled": 5, "lost": 11, "down": 3.5})


def test_below_the_quorum_all_wait() -> None:
    job = dataclasses.replace(HAND, min_groups=3)
    # Steps end at 10, the third group is back at 30: a quorum and a synchronisation later the two others commit.
    outcome = simulate_healing(job, [Failure(4, 2, 26)], 33)
    assert seconds(outcome) == pytest.approx({"useful": 20, "sync": 4, "stalled": 2 * 21 + 3, "lost": 4, "down": 26})


def test_where_nobody_is_left_the_job_falls_back_to_its_checkpoint() -> None:
    job = dataclasses.replace(HAND, groups=1, checkpoint_interval_s=20)
    # Rounds end at 12 and 24 (a checkpoint) and 36, which is lost with the failure at 40.
    outcome = simulate_healing(job, [Failure(40, 0, 3)], 60)
    assert outcome.group_rounds == 2
    assert seconds(outcome) == pytest.approx({"useful": 20, "lost": 10 + 4, "sync": 6, "down": 3, "stalled": 17})


def test_machines_are_replaced_in_turn() -> None:
    job = dataclasses.replace(HAND, replacements_at_once=1)
    both = [Failure(1, 0, 30, needs_machine=True), Failure(2, 1, 30, needs_machine=True)]
    assert simulate_healing(job, both, 100).seconds["down"] == 30 + 59
    assert simulate_healing(HAND, both, 100).seconds["down"] == 30 + 30
    processes = [dataclasses.replace(failure, needs_machine=False) for failure in both]
    assert simulate_healing(job, processes, 100).seconds["down"] == 30 + 30


def test_a_failure_while_recovering_starts_that_anew() -> None:
    twice = [Failure(1, 0, 30), Failure(11, 0, 30)]
    assert simulate_healing(HAND, twice, 100).seconds["down"] == 10 + 30


def test_one_failure_costs_a_checkpointing_job_what_came_since_and_the_restart() -> None:
    job = Job(groups=2, step_s=1, checkpoint_interval_s=10, checkpoint_stall_s=1, job_restart_s=7, detect_s=0.5)
    outcome = simulate_checkpointing(job, [Failure(25, 0, 99)], 50)
    # 22 s for two checkpoints, 3 lost, back at 32.5; one checkpoint more at 43.5.
    assert seconds(outcome) == pytest.approx({"useful": 60, "checkpoint": 6, "lost": 6, "down": 15, "unfinished": 13})
    again = simulate_checkpointing(job, [Failure(25, 0, 99), Failure(30, 1, 99)], 50)
    assert again.seconds["down"] == pytest.approx(2 * 12.5)


# --- what holds of any run ---------------------------------------------------------------------------------------

JOBS = st.builds(
    Job,
    groups=st.integers(1, 6),
    nodes_per_group=st.integers(1, 3),
    step_s=st.floats(0.1, 5),
    steps_per_round=st.integers(1, 30),
    sync_s=st.floats(0, 5),
    detect_s=st.floats(0, 5),
    reconfigure_s=st.floats(0, 5),
    heal_s=st.floats(0, 5),
    replacements_at_once=st.integers(0, 2),
    job_restart_s=st.floats(0, 50),
    checkpoint_interval_s=st.floats(5, 500),
    checkpoint_stall_s=st.floats(0, 5),
)
FAILURES = st.builds(
    Failures,
    interval_s=st.floats(3, 500),
    periodic=st.booleans(),
    restart_s=st.floats(0, 100),
    replace_s=st.floats(0, 100),
    machine_share=st.floats(0, 1),
    exponential=st.booleans(),
)
POLICIES = pytest.mark.parametrize("policy", [simulate_healing, simulate_checkpointing], ids=lambda run: run.__name__)


@POLICIES
@hypothesis_settings(max_examples=50)
@given(job=JOBS, failures=FAILURES, quorum=st.integers(1, 6), seed=st.integers(0, 1 << 30))
def test_every_second_of_every_group_is_accounted_for(
    policy: Any, job: Job, failures: Failures, quorum: int, seed: int
) -> None:
    job = dataclasses.replace(job, min_groups=min(quorum, job.groups))
    horizon = 1000.0
    hits = failures.draw(job.nodes, horizon, seed)
    outcome = policy(job, hits, horizon)
    assert outcome.failures == len(hits)
    assert sum(outcome.seconds.values()) == pytest.approx(job.groups * horizon)
    assert sum(outcome.active_s.values()) == pytest.approx(horizon)
    assert min(outcome.seconds.values()) >= -1e-6
    assert outcome.seconds["useful"] == pytest.approx(outcome.group_rounds * job.compute_s, abs=1e-6)
    assert outcome.goodput <= job.failure_free_goodput + 1e-9
    assert outcome == policy(job, hits, horizon)


@POLICIES
@hypothesis_settings(max_examples=8, derandomize=True)
@given(job=JOBS, failures=FAILURES, more=st.floats(1.5, 5))
def test_more_failures_are_never_better(policy: Any, job: Job, failures: Failures, more: float) -> None:
    """In expectation: the same random numbers for both, so that the mean difference stands out of the noise."""
    failures = dataclasses.replace(failures, periodic=False)
    often = dataclasses.replace(failures, interval_s=failures.interval_s / more)
    horizon = 1000.0
    gains = []
    for seed in range(16):
        goodputs = [policy(job, kind.draw(job.nodes, horizon, seed), horizon).goodput for kind in (failures, often)]
        gains.append(goodputs[1] - goodputs[0])
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    assert statistics.fmean(gains) <= SIGMAS * error + 0.002


@given(failures=FAILURES, seed=st.integers(0, 1000), nodes=st.integers(1, 50))
def test_failures_come_in_order_and_from_the_seed(failures: Failures, seed: int, nodes: int) -> None:
    hits = failures.draw(nodes, 3000, seed)
    assert hits == failures.draw(nodes, 3000, seed)
    times = [failure.time for failure in hits]
    assert times == sorted(times) and all(0 < time < 3000 for time in times)
    assert all(0 <= failure.node < nodes for failure in hits)
    # Another rate moves the same failures; it does not draw others.
    stretched = dataclasses.replace(failures, interval_s=2 * failures.interval_s).draw(nodes, 6000, seed)
    assert [(hit.node, hit.recovery_s) for hit in stretched] == [(hit.node, hit.recovery_s) for hit in hits]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("groups", 0),
        ("step_s", 0.0),
        ("sync_s", -1.0),
        ("min_groups", 4),
        ("job_restart_s", math.nan),
        ("heal_s", math.inf),
    ],
)
def test_a_job_that_cannot_be_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{name} is {value}, but must be"):
        dataclasses.replace(HAND, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("interval_s", 0.0), ("machine_share", 1.5), ("restart_s", -2.0)])
def test_failures_that_cannot_be_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{name} is {value}, but must be"):
        dataclasses.replace(Failures(10), **{name: value})


# --- network and scaling -----------------------------------------------------------------------------------------

# Four rails of 100 Gbit/s: 50 GB/s a node.
NETWORK = Network(4, 4, 100, node_gb_s=100, hop_latency_s=1e-3, node_latency_s=1e-4)


def test_collectives_by_hand() -> None:
    # 100 GB in 4 nodes of 4: three quarters come from elsewhere at 50 GB/s, or from the node at 100.
    assert NETWORK.all_gather(100e9, 4, 4) == pytest.approx(1.5 + 3e-3 + 3e-4)
    assert NETWORK.all_gather(100e9, 1, 4) == pytest.approx(0.75 + 3e-4)
    assert NETWORK.all_gather(100e9, 4, 1) == pytest.approx(75 / 12.5 + 3e-3)  # one GPU a node has one rail
    assert NETWORK.all_gather(100e9, 1, 1) == 0
    assert NETWORK.all_reduce(100e9, 4, 4) == pytest.approx(2 * (1.5 + 3e-3 + 3e-4))  # rings
    assert NETWORK.all_reduce(8, 1024, 1) == pytest.approx(2 * 10e-3, rel=1e-3)  # a tree of ten levels
    # Each GPU sends 16 GB, 12 of them to other nodes: 48 GB a node.
    assert NETWORK.all_to_all(16e9, 4, 4) == pytest.approx(48 / 50 + 1e-3)


def test_a_narrow_spine_slows_an_all_to_all_and_hardly_a_ring() -> None:
    wide = dataclasses.replace(NETWORK, nodes_per_leaf=8, spine_latency_s=1e-3)
    narrow = dataclasses.replace(wide, spine_oversubscription=4)
    assert narrow.all_gather(1e9, 32, 4) == wide.all_gather(1e9, 32, 4)
    assert wide.all_gather(1e9, 32, 4) == pytest.approx(NETWORK.all_gather(1e9, 32, 4) + 4e-3)
    assert narrow.all_to_all(16e9, 32, 4) > 2 * wide.all_to_all(16e9, 32, 4)
    assert narrow.all_to_all(16e9, 8, 4) == wide.all_to_all(16e9, 8, 4)  # all below one leaf


@given(
    size=st.floats(1, 1e12),
    nodes=st.integers(1, 512),
    local=st.sampled_from([1, 2, 4]),
    leaf=st.integers(1, 64),
    operation=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
)
def test_more_bytes_and_more_nodes_never_take_less(
    size: float, nodes: int, local: int, leaf: int, operation: str
) -> None:
    network = dataclasses.replace(NETWORK, nodes_per_leaf=leaf, spine_oversubscription=2, spine_latency_s=1e-5)
    takes = getattr(network, operation)
    now = takes(size, nodes, local)
    assert takes(2 * size, nodes, local) >= now >= 0
    if operation != "all_to_all":  # which sends a smaller part within the node, the more nodes there are
        assert takes(size, nodes + 1, local) >= now * (1 - 1e-12)


def test_a_network_that_cannot_be_is_refused() -> None:
    for name, value in (
        ("rail_gbit_s", 0),
        ("rail_efficiency", 1.2),
        ("spine_oversubscription", 0.5),
        ("hop_latency_s", -1),
    ):
        with pytest.raises(InputError, match=rf"{name} is {value}, but must be"):
            dataclasses.replace(NETWORK, **{name: value})


WORKLOAD = Workload(NETWORK, base_nodes=2, base_step_s=30, sharded_parameters=1e9, layers=10)


@given(overlap=st.floats(0, 1), jitter=st.floats(0, 0.05), experts=st.floats(0, 1e10), nodes=st.integers(2, 4096))
def test_scaling_starts_at_one_and_only_falls(overlap: float, jitter: float, experts: float, nodes: int) -> None:
    workload = dataclasses.replace(
        WORKLOAD, overlap=overlap, step_jitter=jitter, expert_parameters=experts, expert_parallel=4
    )
    assert workload.efficiency(2) == pytest.approx(1)
    assert workload.efficiency(2 * nodes) <= workload.efficiency(nodes) * (1 + 1e-9)


def test_scaling_by_hand() -> None:
    # 2 GB gathered twice and 4 GB reduced once: of 8 GB (n-1)/n cross at 50 GB/s, and ten layers pay latency thrice.
    assert WORKLOAD.collectives_s(2) == pytest.approx(8 / 2 / 50 + 30 * (1e-3 + 3e-4))
    assert WORKLOAD.collectives_s(8) == pytest.approx(8 * 7 / 8 / 50 + 30 * (7e-3 + 3e-4))
    assert WORKLOAD.step_s(8) == pytest.approx(30 + WORKLOAD.collectives_s(8) - WORKLOAD.collectives_s(2))
    assert dataclasses.replace(WORKLOAD, overlap=1).efficiency(1000) == 1
    with pytest.raises(InputError, match="base_step_s is 0.1, but the collectives"):
        dataclasses.replace(WORKLOAD, base_step_s=0.1)


def test_the_slowest_of_many() -> None:
    assert slowest_of(1) == 0
    assert slowest_of(2) == pytest.approx(1 / math.sqrt(math.pi), abs=0.03)  # exact: 0.5642
    assert slowest_of(100) == pytest.approx(2.5076, abs=0.01)


# --- settings, measured runs, the command ------------------------------------------------------------------------


def test_the_inputs_are_those_that_were_frozen() -> None:
    """They were fixed before the first run: a better input is a new setting beside the old one."""
    digest = "b3d8fb7b73d70aa011a308ebd60f3656d4e7cac513920c2a61864338509b2439"
    assert hashlib.sha256(FROZEN.read_bytes()).hexdigest() == digest
    for setting in simulate.load().values():
        assert setting.published
        for name, entry in setting.inputs.items():
            assert entry.kind in ("published", "derived", "assumed"), name
            assert (entry.source == "assumed") == (entry.kind == "assumed"), name


@pytest.mark.parametrize("name", sorted(simulate.load()))
def test_what_was_published_is_predicted(name: str) -> None:
    setting = simulate.load()[name]
    figures = simulate.predict(setting, setting.values(), seeds=2).figures
    assert set(setting.published) <= set(figures)
    if setting.has_failures:
        assert figures["goodput_checkpointing"].value < figures["goodput_healing"].value < 1
        assert job_of(setting.values()).nodes == setting.inputs["nodes"].value


def test_sensitivity_moves_one_input_at_a_time() -> None:
    setting = simulate.load()["h100-128"]
    values = setting.values()
    found = {entry.name: entry for entry in simulate.sensitivity(setting, values, "scaling_efficiency")}
    assert set(found) == {name for name, entry in setting.inputs.items() if entry.low < entry.high}
    slow = simulate.predict(setting, values | {"overlap": 0.5}).figures["scaling_efficiency"].value
    assert found["overlap"].at_low == slow < found["overlap"].at_high


MEASURED = {
    "title": "a small run",
    "groups": 3,
    "steps_per_round": 10,
    "step_s": [0.9, 1.1],
    "sync_s": 2,
    "reconfigure_s": 1,
    "duration_s": 38,
    "failures": [{"time_s": 16, "group": 1, "recovery_s": 5}],
    "group_rounds": 8,
}


def test_a_measured_run_is_replayed_with_its_own_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(MEASURED))
    found = measured.replay(measured.read(file))
    assert found.outcome.group_rounds == 8 and found.ratio == 1
    assert found.measured.goodput == pytest.approx(80 / (3 * 38))
    assert run(["--measured", str(file)]) == 0
    assert "1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "groups is 0, but must be at least 1"),
        ({"duration_s": 0}, "duration_s is 0.0, but must be more than 0"),
        (
            {"failures": [{"time_s": 1, "group": 3, "recovery_s": 1}]},
            "group of a failure is 3, but must be from 0 to 2",
        ),
        ({"failures": [{"time_s": 1, "group": 0}]}, "is not a measured run: KeyError: 'recovery_s'"),
        ({"step_s": "fast"}, "is not a measured run"),
    ],
)
def test_a_measured_run_that_cannot_be_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(MEASURED | change))
    assert run(["--measured", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_the_command_prints_a_table_that_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["h100-128", "--sensitivity"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Simulation:") and "97.71 %" in text and "step_jitter" in text
    assert run(["mi325-1024", "--inputs"]) == 0
    assert "deepseek-v3" in capsys.readouterr().out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mi300-16", "--seeds", "2", "--json", "--set", "restart_s=0", "--set", "machine_share=0"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["simulation"] is True
    assert document["figures"]["active_nodes_low"]["published"] == 8
    assert sum(document["accounts"]["healing"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mi999"], "setting is 'mi999', but must be one of mi300-16"),
        (["mi300-16", "--set", "speed=3"], "speed is not an input of mi300-16"),
        (["mi325-1024", "--set", "overlap=2"], "overlap is 2.0, but must be from 0 to 1"),
        (["--settings", "/nowhere.json"], "cannot read '/nowhere.json'"),
    ],
)
def test_the_command_refuses_in_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_settings_that_are_not_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    document = json.loads(FROZEN.read_text())
    document["settings"][0]["inputs"]["nodes"]["high"] = 1
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match="nodes is 16, but must be from 16 to 1"):
        simulate.load(file)
    file.write_text("[]")
    with pytest.raises(InputError, match="is not a file of settings"):
        simulate.load(file)


def test_plots_are_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert run(["h100-128", "--plots", str(tmp_path / folder)]) == 0
    pictures = [(tmp_path / folder / "goodput-sensitivity.svg").read_bytes() for folder in ("a", "b")]
    assert pictures[0] == pictures[1] and b"overlap" in pictures[0]


def test_it_runs_as_a_module() -> None:
    argv = [sys.executable, "-m", "monarch_rdma.ft.simulate", "--inputs"]
    text = subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout
    assert b"mi355-32" in text


def test_the_model_is_plain_python() -> None:
    imported = set()
    for path in FROZEN.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.append(node.module)
            imported |= {name.split(".")[0] for name in names}
    assert imported - set(sys.stdlib_module_names) == {"matplotlib"}
