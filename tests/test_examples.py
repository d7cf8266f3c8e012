"""What the README and examples/ show works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from knocks import without_knocks

from monarch_rdma.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def output_of(program: Path, errors: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False, cwd=program.parent
    )
    assert done.returncode == 0 and re.fullmatch(errors, without_knocks(done.stderr)), done.stderr
    return done.stdout


def blocks_of(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("number", "told", "most_lines"),
    [(0, "16777216.0", 16), (1, "hello you, from rank 3\n", 15), (2, "True\n", 15)],
    ids=["rdma", "actor", "sharding"],
)
def test_the_readme_example(number: int, told: str, most_lines: int, tmp_path: Path) -> None:
    block = blocks_of("README.md", "python")[number]
    program = tmp_path / "example.py"
    program.write_text(block)
    assert len([line for line in block.splitlines() if line.strip()]) <= most_lines
    assert told in output_of(program)


def test_the_readme_example_of_collectives(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(blocks_of("README.md", "python")[3])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "") == "2.02.0"  # their ends of line may come together


@pytest.fixture(autouse=True)
def imports_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is at one for long is reported as stuck."""
    monkeypatch.setenv("MONARCH_RDMA_STUCK_TIMEOUT", "100")


EXAMPLES: list[tuple[str, list[str]]] = [
    ("copy_weights", ["4 tensors, 33.6 MB", "the reader's model is now the owner's"]),
    ("ping_pong", ["the ball came back 2000 times"]),
    ("parameter_server", ["the loss fell from"]),
    ("weight_sync", ["the mean reward rose from"]),
    ("notify", [f"row {row:2} is complete" for row in range(16)]),
    ("share_model", ["134 MB of weights"]),
    ("reshard_weights", ["generators have version 20; each read 37408 of 74784", "and they are the trainers' weights"]),
    ("relay_weights", ["the mean reward rose from", "took 61 x 2320 bytes from the trainer for 61 versions"]),
    ("verify", ["after the read 0 of 64 MiB differ", "MiB 19 differs", "read again, 0 differ"]),
    ("grow", ["3600000 of 4800000 bytes moved; every rank has its part: True"]),
]


@pytest.mark.parametrize(("name", "told"), EXAMPLES)
def test_example(name: str, told: list[str]) -> None:
    out = output_of(ROOT / "examples" / f"{name}.py")
    assert [text for text in told if text not in out] == []


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {name for name, _ in EXAMPLES}


ONE_PROCESS = r"(.*UserWarning: torch.distributed is .*in a single process\.\n.*\n)*"  # what its checkpoints say


def promised_by(program: str) -> list[str]:
    """What the comments behind its print statements say."""
    return re.findall(r"^ *print\(.*\) +# (.*)$", program, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "least", "errors"),
    [("actors", 20, ""), ("sharding", 24, ONE_PROCESS), ("supervision", 20, r"(.*; restart \d of it.*\n)+")],
)
def test_a_document_prints_what_it_says(tmp_path: Path, page: str, least: int, errors: str) -> None:
    program = tmp_path / f"{page}.py"
    blocks = [block for block in blocks_of(f"docs/{page}.md", "python") if not block.startswith(">>>")]
    # What waits for a processor is not stuck: only the block about it has so short a time.
    blocks = [f"{block}\nconfigure(stuck_timeout=100.0)\n" if "(stuck_timeout=" in block else block for block in blocks]
    program.write_text("\n".join(blocks))
    lines = iter(output_of(program, errors).splitlines())
    promised = promised_by(program.read_text())
    assert len(promised) >= least
    assert [text for text in promised if text not in lines] == []  # `in` goes on behind the line it has found


def test_the_worker_loops_of_the_document_of_actors(tmp_path: Path) -> None:
    """With files in place of hosts."""
    (shell,), (client,) = blocks_of("docs/actors.md", "sh"), blocks_of("docs/actors.md", "py")
    _, make_secret, run_loop = shell.splitlines()
    make_secret = re.sub(r"^python -c \"(.*)\"$", r"\1", make_secret)
    run_loop = run_loop.partition("#")[0].replace("monarch-rdma", f"exec {sys.executable} -m monarch_rdma.cli")
    python = partial(subprocess.Popen, cwd=tmp_path, env={**os.environ, "MONARCH_RDMA_SECRET_FILE": "job.secret"})
    assert python([sys.executable, "-c", make_secret]).wait(30) == 0
    hosts = {f"tcp://node{n}:22222": f"ipc://{tmp_path}/{n}" for n in (1, 2)}
    loops = [python(["sh", "-c", run_loop.replace("tcp://node1:22222", file)]) for file in hosts.values()]
    try:
        for host, file in hosts.items():
            client = client.replace(host, file)
        shown = client.replace('"gpus": 8', '"gpus": 2') + "print(procs.extent)\n"
        with python([sys.executable, "-c", shown], stdout=subprocess.PIPE, text=True) as running:
            assert running.communicate(timeout=60) == ("{hosts: 2, gpus: 2}\n", None)
    finally:
        for loop in loops:
            loop.terminate()
    assert [loop.wait(30) for loop in loops] == [0, 0]


def rows_below(heading: str) -> list[tuple[list[str], str]]:
    """The tables of a section of coming-from-monarch.md: names in the first column, and the text of the last one."""
    section = (ROOT / "docs" / "coming-from-monarch.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = re.findall(r"^\| (`.*)\|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", names), text.strip()) for names, text in lines]


def test_every_name_of_monarch_is_in_the_table_and_what_is_absent_is_said_to_be() -> None:
    from monarch_rdma import actor

    said = {name: text for names, text in rows_below("Names of monarch.actor") for name in names}
    assert sorted(said) == sorted(MONARCH_NAMES.split())
    assert [name for name, text in said.items() if hasattr(actor, name) == text.startswith("absent")] == []


def test_absent_methods_of_meshes_are_said_to_be() -> None:
    from monarch_rdma import actor

    rows = rows_below("Methods of meshes")
    assert len(rows) > 4
    for names, text in rows:
        mesh = getattr(actor, names[0].partition(".")[0])
        for name in names:
            assert hasattr(mesh, name.rpartition(".")[2]) != text.startswith("absent"), name


def test_every_key_of_monarch_is_accepted_or_refused_as_is_said() -> None:
    from monarch_rdma import config

    said = [name for names, _ in rows_below("Configuration keys") for name in names]
    accepted = [key for key in MONARCH_KEYS.split() if key in config.OPTIONS or key in config.ALIASES]
    assert said[: len(accepted)] == sorted(accepted, key=said.index)
    assert set(said) <= set(MONARCH_KEYS.split())
    for key in accepted:
        option = config.OPTIONS[key] if key in config.OPTIONS else config.ALIASES[key][0]
        with config.configured(**{key: option.default}):
            assert key not in config.ALIASES or config.ALIASES[key][1] in config.get_runtime_config()
    for key in set(MONARCH_KEYS.split()) - set(accepted):
        with pytest.raises(ConfigError):
            config.configure(**{key: "1s"})


def test_documents_name_files_that_exist() -> None:
    missing = []
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            if not (document.parent / target).exists():
                missing.append(f"{document.name}: {target}")
    assert missing == []


def test_every_option_is_documented() -> None:
    from monarch_rdma import config

    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in config.OPTIONS if f"`{name}`" not in text] == []


# Those of torchmonarch 0.7.0: monarch.actor.__all__, and what monarch.config.get_global_config() has.
MONARCH_NAMES = """
    Accumulator Actor ActorError Channel ChannelTransport Context Endpoint Extent Future HostMesh MeshFailure
    Point Port PortReceiver ProcId ProcMesh Uid ValueMesh as_endpoint attach attach_to_workers
    concurrent_endpoint config context current_actor_name current_rank current_size debug_controller
    default_bootstrap_cmd enable_transport endpoint get_meter get_or_spawn_controller returns_future
    run_worker_loop_forever run_worker_loop_until_shutdown send shutdown_context span start_worker_loop_forever
    this_host this_proc traced unhandled_fault_hook
"""
MONARCH_KEYS = """
    actor_spawn_max_idle channel_net_rx_buffer_full_check_interval channel_reconnect_timeout
    channel_tcp_congestion channel_tcp_keepalive_idle cleanup_timeout codec_max_frame_length default_encoding
    default_transport enable_dest_actor_reordering_buffer enable_file_capture enable_log_forwarding
    enable_otel_metrics enable_otel_tracing enable_recorder_tracing enable_sqlite_tracing
    enable_unawaited_python_task_traceback file_log_level force_file_log forwarder_flush_timeout
    get_actor_state_max_idle get_proc_state_max_idle host_spawn_ready_timeout max_cast_dimension_size
    max_cast_fanout mesh_admin_addr mesh_admin_config_dump_bridge_timeout mesh_admin_max_concurrent_resolves
    mesh_admin_pyspy_bridge_timeout mesh_admin_pyspy_client_timeout mesh_admin_pyspy_max_profile_duration
    mesh_admin_pyspy_timeout mesh_admin_query_child_timeout mesh_admin_resolve_actor_timeout
    mesh_admin_single_host_timeout mesh_admin_tree_timeout mesh_attach_config_timeout
    mesh_bootstrap_enable_pdeathsig mesh_orphan_timeout mesh_proc_spawn_max_idle mesh_terminate_concurrency
    mesh_terminate_timeout message_ack_every_n_messages message_ack_time_interval message_delivery_timeout
    message_latency_sampling_rate message_ttl_default monarch_log_suffix otel_metric_export_interval
    pending_actor_delivery_timeout prefix_with_rank proc_launcher_kind proc_stop_max_idle process_exit_timeout
    process_memory_metric_interval pyspy_bin rdma_allow_tcp_fallback rdma_cq_poller_per_device
    rdma_disable_ibverbs rdma_host_odp rdma_ibverbs_target rdma_max_chunk_size_mb rdma_max_nics_per_buffer
    rdma_min_stripe_size_kb rdma_peer_device_affinity rdma_qp_init_timeout rdma_qps_per_cq rdma_qps_per_peer
    rdma_runtime_worker_threads rdma_tcp_fallback_parallelism read_log_buffer scuba_log_enter_exit
    sequencer_max_locked_keys server_heartbeat_interval small_write_threshold split_max_buffer_age
    split_max_buffer_size stop_actor_timeout stop_grace_period supervision_watchdog_timeout tail_log_lines
    terminated_snapshot_retention tokio_worker_threads use_direct_spawn
"""
