"""Metrics: what is registered, how it is written, served and exported, and that the numbers are right."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_client import LIMIT, Stage, client_of_its_own, faults_recorded, hold, wait_until
from hypothesis import given
from hypothesis import strategies as st
from knocks import without_knocks
from prometheus_client.parser import text_string_to_metric_families

from monarch_rdma.actor import Actor, HostMesh, Port, ProcMesh, endpoint, this_host, this_proc
from monarch_rdma.actor import metrics as program_metrics
from monarch_rdma.config import configured
from monarch_rdma.errors import ConfigError
from monarch_rdma.rdma import Engine, RDMABuffer
from monarch_rdma.supervision import events, metrics
from monarch_rdma.supervision.metrics.registry import Metric, Reading, Value
from monarch_rdma.supervision.metrics.server import Server
from monarch_rdma.supervision.tally import Tally

Found = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str) -> Found:
    """By the name of each sample, as Prometheus's own parser sees it."""
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def number(found: Found, name: str, **labels: str) -> float:
    matching = [value for own, value in found.get(name, []) if labels.items() <= own.items()]
    assert len(matching) == 1, (name, labels, found.get(name))
    return matching[0]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


@pytest.fixture
def registered() -> Iterator[list[Metric]]:
    """Metrics put here are gone after the test."""
    made: list[Metric] = []
    yield made
    for metric in made:
        metrics.unregister(metric)


def reading_of(metric: Metric) -> list[Reading]:
    return [reading for reading in metrics.collect() if reading.name == metric.name]


# --- the registry


def test_a_tally_counts_what_threads_add() -> None:
    tally = Tally()
    threads = [threading.Thread(target=lambda: [tally.add() for _ in range(10_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = [tally.read() for _ in range(100)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert (tally.read(), tally.read()) == (40_000, 40_000)


def test_metrics_are_read_when_asked(registered: list[Metric]) -> None:
    waiting = [1, 2, 3]
    registered.append(metrics.gauge("waiting", "Jobs.", lambda: len(waiting)))
    registered.append(
        metrics.counter("done_total", "Jobs.", lambda: [Value({"kind": "a"}, 1), Value({"kind": "b"}, 2)])
    )
    waiting.pop()
    assert reading_of(registered[0]) == [Reading("waiting", "gauge", "Jobs.", [Value({}, 2)])]
    assert [value.number for value in reading_of(registered[1])[0].values] == [1, 2]
    metrics.unregister(registered[0])
    assert reading_of(registered[0]) == []


def test_what_cannot_be_registered_is_refused(registered: list[Metric]) -> None:
    registered.append(metrics.gauge("mine", "", lambda: 0))
    for make, arguments, problem in [
        (metrics.gauge, ("mine", "", lambda: 0), "name is 'mine', but there is a metric of that name"),
        (metrics.gauge, ("my jobs", "", lambda: 0), "name is 'my jobs', but must be letters, digits and underscores"),
        (metrics.counter, ("jobs", "", lambda: 0), "name is 'jobs', but the name of a counter must end in _total"),
        (metrics.gauge, ("jobs", "", 3), "read is 3, but must be a function"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            make(*arguments)  # type: ignore[operator]


def test_one_that_cannot_be_read_hides_no_other(registered: list[Metric], caplog: pytest.LogCaptureFixture) -> None:
    registered.append(metrics.gauge("broken", "", lambda: 1 / 0))
    registered.append(metrics.gauge("whole", "", lambda: 1))
    assert (reading_of(registered[0]), len(reading_of(registered[1]))) == ([], 1)
    assert "metric broken cannot be read" in caplog.text


# --- the text

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False))


@given(st.lists(st.tuples(texts, numbers), max_size=5, unique_by=lambda pair: pair[0]), texts)
def test_prometheus_reads_what_is_written(values: list[tuple[str, float]], about: str) -> None:
    readings = [Reading("jobs", "gauge", about, [Value({"what": what, "n": "1"}, each)]) for what, each in values]
    found = parsed(metrics.render(readings))
    assert found.get("jobs", []) == [({"what": what, "n": "1"}, float(each)) for what, each in values]


def test_numbers_that_are_none() -> None:
    odd = [Value({"n": str(index)}, each) for index, each in enumerate([float("inf"), float("-inf"), float("nan")])]
    lines = metrics.render([Reading("jobs", "gauge", "", odd)]).splitlines()[2:]
    assert lines == ['jobs{n="0"} +Inf', 'jobs{n="1"} -Inf', 'jobs{n="2"} NaN']


# --- the server


def test_a_page_is_served_until_it_is_closed(registered: list[Metric]) -> None:
    registered.append(metrics.gauge("mine", "All mine.", lambda: 42))
    server = Server("127.0.0.1:0")
    try:
        assert number(parsed(get(server.url)), "mine") == 42
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.url.replace("metrics", "secret"))
        host, port = "127.0.0.1", int(server.url.split(":")[2].split("/")[0])
        with socket.create_connection((host, port)) as silent:  # holds up nobody
            assert number(parsed(get(server.url)), "mine") == 42
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 10
            silent.close()
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(server.url)


@pytest.mark.parametrize("listen", ["", "9464", ":9464", "localhost", "127.0.0.1:70000", "127.0.0.1:x", "[::1"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        Server(listen)


def test_an_address_that_is_taken_or_not_ours_is_refused() -> None:
    server = Server("127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match="cannot be listened on: .*in use"):
            Server(server.url.removeprefix("http://").removesuffix("/metrics"))
        with pytest.raises(ConfigError, match="cannot be listened on"):
            Server("192.0.2.1:0")
    finally:
        server.close()


def test_a_fork_keeps_no_address() -> None:
    server = Server("127.0.0.1:0")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        server.close()
        Server(server.url.removeprefix("http://").removesuffix("/metrics")).close()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(pid, 0)


# --- what is counted


def process_value(name: str, **labels: str) -> float:
    values = [value for reading in metrics.collect() if reading.name == name for value in reading.values]
    return sum(value.number for value in values if labels.items() <= value.labels.items())


def test_transfers_are_counted_by_lane(owner: Engine, reader: Engine) -> None:
    def counted() -> tuple[float, float]:
        labels = {"lane": "shm", "direction": "read"}
        return (
            process_value("monarch_rdma_transfers_total", **labels),
            process_value("monarch_rdma_transfer_bytes_total", **labels),
        )

    source, target = torch.arange(1000.0), torch.empty(1000)
    handle = RDMABuffer(source, engine=owner).to_bytes()
    remote = RDMABuffer.from_bytes(handle, engine=reader)
    remote.read_into(target).get()
    times, size = counted()
    for _ in range(7):
        remote.read_into(target).get()
    assert counted() == (times + 7, size + 7 * 4000)


def test_events_are_counted() -> None:
    before = events.counts().get("test.happened", 0)
    for _ in range(3):
        events.emit("test.happened")
    assert events.counts()["test.happened"] == before + 3
    assert process_value("monarch_rdma_events_total", kind="test.happened") == before + 3


class Worker(Actor):
    @endpoint
    def work(self, value: Any) -> Any:
        return value

    @endpoint
    def hold(self, started: Port[Any]) -> None:
        hold(started)

    @endpoint
    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_page_that_cannot_be_served_is_an_error_each_time() -> None:
    with configured(metrics_listen="192.0.2.1:9464"):
        for make in (this_host, this_host, lambda: this_proc().spawn("worker", Worker)):
            with pytest.raises(ConfigError, match="metrics_listen is '192.0.2.1:9464', which cannot be listened on"):
                make()
    with client_of_its_own():
        assert this_proc().spawn("worker", Worker).work.call_one(1).get() == 1
    with pytest.raises(ConfigError, match="set option metrics_listen"):
        program_metrics.url()


@pytest.fixture(scope="module")
def client_with_a_page() -> Iterator[HostMesh]:
    with configured(metrics_listen="127.0.0.1:0"), client_of_its_own() as host:
        yield host


@pytest.fixture
def program(client_with_a_page: HostMesh) -> Iterator[ProcMesh]:
    """Two processes of a client that serves a page with the metrics of all."""
    with client_with_a_page.spawn_procs({"gpus": 2}, name="workers") as procs:
        yield procs


def page() -> Found:
    return parsed(get(program_metrics.url()))


def test_a_program_has_one_page_for_all_its_processes(program: ProcMesh) -> None:
    workers = program.spawn("workers", Worker)
    for _ in range(5):
        workers.work.call(torch.zeros(1 << 18)).get()
    found = page()
    assert {labels["process"] for labels, up in found["monarch_rdma_up"] if up == 1} > {"workers/0", "workers/1"}
    of_zero = {"process": "workers/0", "class": f"{__name__}.Worker"}
    assert number(found, "monarch_rdma_handled_total", **of_zero) == 5
    of_one = {"process": "workers/1", "lane": "shm", "direction": "read"}
    assert number(found, "monarch_rdma_transfer_bytes_total", **of_one) == 5 << 20
    assert number(found, "monarch_rdma_transfers_total", **of_one) == 5
    client = str(os.getpid())
    assert number(found, "monarch_rdma_calls_total", pid=client) >= 5
    assert number(found, "monarch_rdma_actors", process="workers/1") == 2  # with its agent
    before = number(found, "monarch_rdma_messages_total", pid=client, direction="sent")
    workers.work.call(1).get()
    after = number(page(), "monarch_rdma_messages_total", pid=client, direction="sent")
    assert before + 2 <= after < before + 200  # the page itself asks, too, and the host's agent now and then


def test_mailboxes_are_measured_and_the_ended_are_counted(program: ProcMesh) -> None:
    workers = program.slice(gpus=1).spawn("worker", Worker)
    stage = Stage()
    held = workers.hold.call_one(stage.port)
    go = stage.next()
    waiting = [workers.work.call_one(value) for value in range(3)]
    of_it = {"process": "workers/1", "actor": "worker"}
    wait_until(lambda: number(page(), "monarch_rdma_mailbox_depth", **of_it) == 3, "the mailbox does not fill")
    assert number(page(), "monarch_rdma_message_age_seconds", **of_it) > 0
    go.send(None)
    held.get()
    assert [future.get() for future in waiting] == [0, 1, 2]
    assert number(page(), "monarch_rdma_mailbox_depth", **of_it) == 0
    workers.stop().get()
    counted = {"process": "workers/1", "class": f"{__name__}.Worker"}
    assert number(page(), "monarch_rdma_handled_total", **counted) == 4
    assert [labels for labels, _ in page()["monarch_rdma_mailbox_depth"] if labels["actor"] == "worker"] == []


def test_a_process_that_does_not_answer_is_told_and_delays_little(program: ProcMesh) -> None:
    pid = int(next(labels["pid"] for labels, _ in page()["monarch_rdma_up"] if labels["process"] == "workers/1"))
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        found = page()
        assert time.monotonic() - began < 10
        assert number(found, "monarch_rdma_up", process="workers/1", pid=str(pid)) == 0
        assert number(found, "monarch_rdma_up", process="workers/0") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: number(page(), "monarch_rdma_up", process="workers/1") == 1, "it does not come back")


def test_failures_are_counted(program: ProcMesh) -> None:
    workers = program.spawn("workers", Worker)
    client = str(os.getpid())
    before = number(page(), "monarch_rdma_failures_total", pid=client, kind="process.failed")
    with faults_recorded() as faults:
        workers.slice(gpus=0).kill.broadcast()
        faults.next()
    found = page()
    assert number(found, "monarch_rdma_failures_total", pid=client, kind="process.failed") == before + 1
    assert [labels for labels, _ in found["monarch_rdma_up"] if labels["process"] == "workers/0"] == []


# --- OpenTelemetry

EXPORTS = """
    import sys
    from monarch_rdma.actor import Actor, endpoint, this_host
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    is_early = sys.argv[1] == "early"
    if is_early:
        metrics.set_meter_provider(MeterProvider([reader]))

    class Worker(Actor):
        @endpoint
        def work(self):
            from monarch_rdma.supervision import metrics
            return metrics.export_to_opentelemetry()

    with this_host().spawn_procs() as procs:
        assert procs.spawn("worker", Worker).work.call_one().get()
    if not is_early:
        metrics.set_meter_provider(MeterProvider([reader]))
    from monarch_rdma.supervision.metrics import counter, export_to_opentelemetry
    counter("mine_total", "Mine.", lambda: 7)
    assert export_to_opentelemetry()
    for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                print(scope.scope.name, type(metric.data).__name__, metric.name, dict(point.attributes), point.value)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_opentelemetry_gets_every_metric_once(when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXPORTS), when], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("monarch_rdma Sum mine {} 7") == 1
    assert lines.count("monarch_rdma Sum monarch_rdma_events {'kind': 'process.started'} 1") == 1
    assert any(line.startswith("monarch_rdma Gauge monarch_rdma_regions {} ") for line in lines)
    assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)


def test_without_opentelemetry_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    assert not metrics.export_to_opentelemetry()


def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "events-and-metrics.md").read_text()
    ours = [reading for reading in metrics.collect() if reading.name.startswith("monarch_rdma_")]
    assert len(ours) > 15
    assert [
        each.name for each in ours if not re.search(rf"`{each.name}` \|.*\| {re.escape(each.about)} \|", text)
    ] == []


def test_the_pages_program_serves_metrics() -> None:
    text = (Path(__file__).parent.parent / "docs" / "events-and-metrics.md").read_text()
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if ">>>" not in block]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/metrics\n", done.stdout) and not without_knocks(done.stderr), (
        done.stderr
    )
