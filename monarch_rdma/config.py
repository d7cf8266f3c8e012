"""Every option: its type, default, unit, environment variable and meaning, in one table.

A value comes from, first to last: an argument of `Engine(...)`, `configure(...)` or `configured(...)`, the environment
variable `MONARCH_RDMA_<NAME>`, the default. This module is the only reader of the environment. An option that is
unknown, or a value that cannot be used, is an error: nothing is ignored silently.

Engine options are read when an engine is created; those marked `engine` are the fields of `mr_options` (csrc/engine.h),
by name.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .errors import ConfigError

__all__ = [
    "ALIASES",
    "LANES",
    "OPTIONS",
    "Kept",
    "Option",
    "clear_runtime_config",
    "configure",
    "configured",
    "engine_options",
    "generation",
    "get",
    "get_global_config",
    "get_runtime_config",
    "is_plain",
    "launcher_variables",
    "python_breakpoint",
    "runtime_directory",
]

Value = str | bool | int | float
V = TypeVar("V")

_ENV_PREFIX = "MONARCH_RDMA_"
_OF_OTHERS = (_ENV_PREFIX + "BUILD_", _ENV_PREFIX + "TEST_")  # read by the build and by the tests
LANES = ("shm", "verbs", "tcp")  # those of this build, best first


@dataclass(frozen=True)
class Option:
    """One option. `unit` is "", "bytes" or "s"; `engine` tells whether it is a field of mr_options."""

    name: str
    type: type
    default: Value
    doc: str
    unit: str = ""
    minimum: float = 0
    maximum: float = 2**32 - 1
    choices: tuple[Value, ...] = ()
    is_absolute_path: bool = False  # or ""
    engine: bool = True

    @property
    def env(self) -> str:
        return _ENV_PREFIX + self.name.upper()

    def check(self, value: object, where: str) -> Value:
        """The value in this option's type; ConfigError naming option and value where it cannot be used."""
        if self.type is bool:
            checked = _to_bool(value)
        elif self.type is int:
            checked = _to_int(value, self.unit)
        elif self.type is float:
            checked = _to_seconds(value)
        elif self.name == "lanes":
            checked = _to_lanes(value)
        else:
            checked = os.fspath(value) if isinstance(value, str | os.PathLike) else None
            checked = checked if is_plain(checked) else None
        if checked is None:
            raise ConfigError(f"{where} is {value!r}, but must be {self._wanted()}")
        if self.is_absolute_path and checked and not os.path.isabs(str(checked)):
            raise ConfigError(
                f"{where} is {value!r}, but must be an absolute path: processes differ in their directory"
            )
        if self.choices and checked not in self.choices:
            raise ConfigError(f"{where} is {value!r}, but must be one of {', '.join(map(repr, self.choices))}")
        if self.type in (int, float) and not self.minimum <= checked <= self.maximum:  # type: ignore[operator]
            raise ConfigError(f"{where} is {value!r}, but must be from {self.minimum:g} to {self.maximum:g}")
        return checked

    def _wanted(self) -> str:
        if self.name == "lanes":
            return f"a comma list of different lanes out of {', '.join(LANES)}, best first"
        if self.unit:
            example = {"bytes": '"64MiB"', "s": '"30s"'}[self.unit]
            return f"{'an integer' if self.type is int else 'a number'} of {self.unit} (or a string like {example})"
        return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[self.type]


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("name", str, "", 'Name of this process in messages and handles; "" = host:pid.'),
        Option("listen_host", str, "127.0.0.1", "Address or interface name that the TCP control stream listens on."),
        Option("advertise_host", str, "", 'Address that others are told to connect to; "" = the one listened on.'),
        Option("port_min", int, 0, "First TCP port that may be taken; 0 with port_max 0 = any.", maximum=65535),
        Option("port_max", int, 0, "Last TCP port that may be taken.", maximum=65535),
        Option("ip_family", int, 0, "4 or 6 to use only that family of addresses; 0 = either.", choices=(0, 4, 6)),
        Option("lanes", str, "shm,verbs,tcp", "Comma list of the lanes that may be used, best first."),
        Option("same_host_unix", bool, True, "Reach peers on this host through a Unix socket; else TCP with TLS."),
        Option(
            "unix_socket_dir",
            str,
            "",
            "Directory (mode 0700) where that socket has a file, for processes in other network namespaces (as in "
            'containers) that have it too; "" = a private one in runtime_dir, "none" = nowhere.',
        ),
        Option("shm_mapped", bool, True, "Map the shared memory of peers on this host."),
        Option("shm_process_vm", bool, True, "Use process_vm_readv/writev for memory of this host that is not shared."),
        Option(
            "allow_ptrace",
            str,
            "no",
            'Who may read this process\'s memory where kernel.yama.ptrace_scope is 1: "no" one but what is above it; '
            '"job": peers on this host, once proven, and what runs below where they meet in the process tree; "any" '
            "process of this user.",
            choices=("no", "job", "any"),
        ),
        Option("bulk_tls", bool, False, "Encrypt and authenticate the bytes of tensors on the tcp lane too."),
        Option("tcp_sockets", int, 4, "Data sockets per peer for large transfers.", minimum=1, maximum=64),
        Option(
            "tcp_sockets_far",
            int,
            8,
            "As many at most where the round trip is long; no more than tcp_sockets: those.",
            maximum=64,
        ),
        Option("copy_threads", int, 0, "Threads for large copies on one host; 0 = chosen from the cores.", maximum=256),
        Option(
            "verbs_devices",
            str,
            "",
            'Comma list of the RDMA cards to use, in the order of rails: "mlx5_0,mlx5_1:1,bnxt_re*"; "" = chosen.',
        ),
        Option(
            "verbs_gid_index",
            int,
            -1,
            "Entry of the GID table to use on RoCE ports; -1 = chosen.",
            minimum=-1,
            maximum=255,
        ),
        Option(
            "verbs_queue_pairs",
            int,
            2,
            "Queue pairs per peer and rail; the first is for small operations.",
            minimum=1,
            maximum=64,
        ),
        Option(
            "verbs_max_queue_pairs",
            int,
            4096,
            "Queue pairs of an engine, those that peers asked for included.",
            minimum=1,
            maximum=1 << 20,
        ),
        Option("verbs_depth", int, 128, "Work requests at a time on one queue pair.", minimum=2, maximum=32768),
        Option("verbs_chunk_bytes", int, 1 << 20, "Most bytes of one work request.", "bytes", 4096, 1 << 30),
        Option(
            "verbs_min_run",
            int,
            512,
            "Remote runs shorter than this go over tcp, whose owner packs them.",
            "bytes",
            1,
            1 << 30,
        ),
        Option(
            "verbs_inline_bytes",
            int,
            220,
            "Writes up to this size go inside of the request, where the card can.",
            "bytes",
            0,
            4096,
        ),
        Option("verbs_rd_atomic", int, 16, "Reads and atomics at a time on one queue pair.", minimum=1, maximum=255),
        Option("verbs_mtu", int, 0, "Payload of a packet; 0 = the ports'.", choices=(0, 256, 512, 1024, 2048, 4096)),
        Option(
            "verbs_timeout",
            int,
            14,
            "4.096 us * 2^timeout until a packet counts as lost; 0 = never.",
            maximum=31,
        ),
        Option(
            "verbs_retries",
            int,
            6,
            "Times a lost packet is sent again; some cards, Soft-RoCE among them, take 7 for ever.",
            maximum=7,
        ),
        Option(
            "verbs_rnr_retries",
            int,
            7,
            "Times a packet is sent again to a receiver that is not ready; 7 = for ever.",
            maximum=7,
        ),
        Option("verbs_rnr_timer", int, 12, "Code of the pause before that.", maximum=31),
        Option("verbs_traffic_class", int, 0, "Traffic class of RoCE packets: DSCP * 4 + ECN.", maximum=255),
        Option(
            "verbs_service_level", int, 0, "Service level of InfiniBand packets, priority of RoCE ones.", maximum=15
        ),
        Option("verbs_hop_limit", int, 64, "Hops that a packet may take.", minimum=1, maximum=255),
        Option("verbs_pkey_index", int, 0, "Entry of the partition key table.", maximum=65535),
        Option("verbs_spin", float, 50e-6, "How long a thread polls a card before it sleeps.", "s", 0, 1),
        Option(
            "verbs_cache_bytes",
            int,
            16 << 30,
            "Registered local memory that is kept while no operation uses it.",
            "bytes",
            maximum=1 << 62,
        ),
        Option("verbs_on_demand", bool, False, "On-demand paging instead of pinning local memory, where the card can."),
        Option(
            "verbs_atomics",
            bool,
            False,
            "Atomics by the card where it has them; not atomic against those of processors and of other cards.",
        ),
        Option("max_frame_bytes", int, 16 << 20, "Largest control frame accepted.", "bytes", 4096, 1 << 30),
        Option(
            "message_window_bytes", int, 64 << 20, "Unread message bytes a peer may have here.", "bytes", 4096, 1 << 40
        ),
        Option("max_pending_ops", int, 1 << 20, "Operations in flight per engine.", minimum=1),
        Option(
            "loop_spin",
            float,
            0.0,
            "How long the engine's thread looks for the next event before it sleeps, where the last came that soon.",
            "s",
            0,
            1,
        ),
        Option("heartbeat_interval", float, 0.5, "Pause between heartbeats, where one is needed.", "s", 0.001, 3600),
        Option("heartbeat_timeout", float, 5.0, "Silence after which a peer counts as lost.", "s", 0.001, 86400),
        Option("connect_timeout", float, 10.0, "Time for reaching a peer and proving membership.", "s", 0.001, 86400),
        Option("drop_timeout", float, 1.0, "How long a drop waits for accesses in flight.", "s", 0.001, 86400),
        Option("protocol_version", int, 0, "Version of the protocol to speak; 0 = the current one."),
        Option("secret_file", str, "", "Path of the job secret: a file of mode 0600, at least 16 bytes.", engine=False),
        Option(
            "secret_fd", int, -1, "Descriptor to read the job secret from, once; -1 = none.", minimum=-1, engine=False
        ),
        Option(
            "job_dir",
            str,
            "",
            'Directory for the private files of jobs, which all their hosts see; "" = ~/.monarch_rdma/jobs.',
            is_absolute_path=True,
            engine=False,
        ),
        Option(
            "job_state",
            str,
            "",
            "State file of the job that this program runs in; set for programs that a job starts.",
            is_absolute_path=True,
            engine=False,
        ),
        Option(
            "message_inline_bytes",
            int,
            64 << 10,
            "Buffers of at least this size are read from their sender one-sided, instead of going in the message.",
            "bytes",
            1024,
            4 << 20,
            engine=False,
        ),
        Option(
            "mailbox_messages",
            int,
            1024,
            "Messages that one process may have waiting in an actor's mailbox, or at a port; then it waits.",
            minimum=64,
            engine=False,
        ),
        Option(
            "mailbox_bytes",
            int,
            1 << 30,
            "Large buffers that an actor's mailbox fetches ahead; more stay with their senders, who wait.",
            "bytes",
            0,
            1 << 50,
            engine=False,
        ),
        Option(
            "log_window",
            float,
            0.2,
            "Identical lines of several processes within this time are shown as one; 0 shows each line at once.",
            "s",
            0,
            60,
            engine=False,
        ),
        Option("log_prefix", bool, True, "Say which process printed a line.", engine=False),
        Option("log_forwarding", bool, True, "Show in the client what its processes print.", engine=False),
        Option(
            "cast_fanout",
            int,
            128,
            "Calls to more actors than this go over a tree, in which each process sends to at most so many.",
            minimum=2,
            engine=False,
        ),
        Option(
            "cleanup_timeout",
            float,
            3.0,
            "How long the actors of a process may take to end.",
            "s",
            0,
            86400,
            engine=False,
        ),
        Option(
            "process_exit_timeout",
            float,
            10.0,
            "After it a process that was stopped is killed.",
            "s",
            0,
            86400,
            engine=False,
        ),
        Option(
            "message_limit",
            float,
            0.0,
            "How long a message may be worked on before its actor is reported as stuck, where its endpoint declares no "
            "limit of its own; 0 = any time.",
            "s",
            0,
            86400,
            engine=False,
        ),
        Option(
            "stuck_timeout",
            float,
            10.0,
            "A process that lives, but runs no Python for this long, is reported as stuck; 0 = never.",
            "s",
            0,
            86400,
            engine=False,
        ),
        Option(
            "event_log",
            str,
            "",
            'Absolute path of the file that every process of the program appends its events to; "" = none.',
            is_absolute_path=True,
            engine=False,
        ),
        Option(
            "metrics_listen",
            str,
            "",
            'HOST:PORT at which a program with actors serves metrics of all its processes to Prometheus; "" = nowhere.',
            engine=False,
        ),
        Option(
            "pyspy_bin", str, "", 'The py-spy to use; "" = the one beside this Python, or on the path.', engine=False
        ),
        Option(
            "collective_step_bytes",
            int,
            0,
            "What a member of a group stages in shared memory at a time, for one step of a collective; 0 = what "
            "collective_table says for groups of its size.",
            "bytes",
            0,
            1 << 30,
            engine=False,
        ),
        Option(
            "collective_table",
            str,
            "",
            "A file that `monarch-rdma bench --collectives` has written, by which collectives choose their way, the "
            'same on all members; "" = the figures that are built in.',
            engine=False,
        ),
        Option(
            "collective_algorithm",
            str,
            "auto",
            "The algorithm of all collectives that have it (the others go direct), the same on all members; auto = "
            "what collective_table says where members are on several hosts, and direct where they are on one.",
            choices=("auto", "direct", "doubling", "halving", "ring", "tree"),
            engine=False,
        ),
        Option(
            "collective_hierarchy",
            bool,
            True,
            "Collectives of several hosts with as many members on each go in two levels: on each host, and across.",
            engine=False,
        ),
        Option(
            "collective_message_bytes",
            int,
            256 << 10,
            "Parts in which messages between members of a group go.",
            "bytes",
            64,
            1 << 30,
            engine=False,
        ),
        Option(
            "collective_device_bytes",
            int,
            8 << 20,
            "Room that a member of a group takes on its GPU, once tensors there are used in it; larger ones go in "
            "parts. The smallest of the members' counts.",
            "bytes",
            1024,
            1 << 32,
            engine=False,
        ),
        Option(
            "collective_one_shot_bytes",
            int,
            256 << 10,
            "Up to this size, and between two members always, every GPU of a group sums all of a tensor itself; larger "
            "ones are summed a part by each. As rank 0 has it.",
            "bytes",
            0,
            1 << 40,
            engine=False,
        ),
        Option(
            "collective_timeout",
            float,
            1800.0,
            "How long a collective may take where its caller does not say.",
            "s",
            0.001,
            86400 * 365,
            engine=False,
        ),
        Option(
            "runtime_dir",
            str,
            "",
            'Where private files of programs are kept; "" = $XDG_RUNTIME_DIR or /tmp.',
            engine=False,
        ),
    )
}


# Monarch's names for what exists here: name -> (option, current value of the option, value given) -> new value.
def _allow_tcp(lanes: Value, allow: Value) -> Value:
    kept = [lane for lane in str(lanes).split(",") if lane != "tcp"]
    return ",".join([*kept, "tcp"] if allow else kept)


def _disable_verbs(lanes: Value, disable: Value) -> Value:
    return ",".join(lane for lane in str(lanes).split(",") if not (disable and lane == "verbs"))


def _bulk_security(_: Value, security: Value) -> Value:
    return security == "tls"


def _same(_: Value, value: Value) -> Value:
    return value


ALIASES = {
    alias.name: (alias, target, convert)
    for alias, target, convert in (
        (Option("rdma_allow_tcp_fallback", bool, True, "Whether tcp is in lanes."), "lanes", _allow_tcp),
        (Option("rdma_disable_ibverbs", bool, False, "Whether verbs is kept out of lanes."), "lanes", _disable_verbs),
        (Option("rdma_tcp_fallback_parallelism", int, 4, "tcp_sockets.", minimum=1, maximum=64), "tcp_sockets", _same),
        (Option("max_cast_fanout", int, 128, "cast_fanout.", minimum=2), "cast_fanout", _same),
        (
            Option("codec_max_frame_length", int, 16 << 20, "max_frame_bytes, at most 1 GiB.", "bytes", 4096, 1 << 50),
            "max_frame_bytes",
            lambda _, value: min(int(value), 1 << 30),
        ),
        (Option("server_heartbeat_interval", float, 0.5, "heartbeat_interval.", "s"), "heartbeat_interval", _same),
        (Option("supervision_watchdog_timeout", float, 5.0, "heartbeat_timeout.", "s"), "heartbeat_timeout", _same),
        (Option("channel_reconnect_timeout", float, 10.0, "connect_timeout.", "s"), "connect_timeout", _same),
        (Option("prefix_with_rank", bool, True, "log_prefix."), "log_prefix", _same),
        (Option("enable_log_forwarding", bool, True, "log_forwarding."), "log_forwarding", _same),
        (Option("bulk_security", str, "none", "bulk_tls.", choices=("none", "tls")), "bulk_tls", _bulk_security),
    )
}

_runtime: dict[str, Value] = {}  # what configure() set
_generation = 0  # counts changes of _runtime


def _find(name: str) -> Option:
    if name in OPTIONS:
        return OPTIONS[name]
    near = difflib.get_close_matches(name, [*OPTIONS, *ALIASES], 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(OPTIONS)}"
    raise ConfigError(f"there is no option {name!r}{hint}")


def _checked(settings: dict[str, Any]) -> dict[str, Value]:
    """The settings under our names, in their types, aliases resolved; nothing is changed yet."""
    checked: dict[str, Value] = {}
    for name, value in settings.items():
        if name not in ALIASES:
            checked[name] = _find(name).check(value, f"option {name}")
    for name, value in settings.items():
        if name in ALIASES:
            alias, target, convert = ALIASES[name]
            now = checked[target] if target in checked else get(target)
            new = convert(now, alias.check(value, f"option {name}"))
            checked[target] = OPTIONS[target].check(new, f"option {target} (set through {name}={value!r})")
    return checked


def _replace(settings: dict[str, Value]) -> None:
    global _runtime, _generation
    _runtime = settings
    _generation += 1


def configure(**settings: Any) -> None:
    """Sets options for the engines created from now on. All or none: a wrong name or value changes nothing."""
    _replace(_runtime | _checked(settings))


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[dict[str, Value]]:
    """Like `configure`, for the length of a with block; gives all options."""
    before = _runtime
    configure(**settings)
    try:
        yield get_global_config()
    finally:
        _replace(before)


def generation() -> int:
    """A number that changes whenever `configure` or `configured` change an option."""
    return _generation


def get(name: str) -> Value:
    """The value of one option now."""
    option = _find(name)
    if name in _runtime:
        return _runtime[name]
    if option.env in os.environ:
        return option.check(os.environ[option.env], f"environment variable {option.env}")
    return _alias_from_environment(option)


class Kept(Generic[V]):
    """One option, for paths on which `get` takes too long: read again where options have been changed."""

    def __init__(self, name: str, kind: Callable[[Any], V]) -> None:
        self._name = name
        self._kind = kind
        self._read: tuple[int, V] | None = None  # at which generation, and what

    def __call__(self) -> V:
        read = self._read
        if read is None or read[0] != _generation:
            read = self._read = _generation, self._kind(get(self._name))
        return read[1]


def _alias_from_environment(option: Option) -> Value:
    value = option.default
    for alias, target, convert in ALIASES.values():
        env = _ENV_PREFIX + alias.name.removeprefix("rdma_").upper()
        if target == option.name and env in os.environ:
            where = f"environment variable {env}"
            value = option.check(convert(value, alias.check(os.environ[env], where)), where)
    return value


def get_global_config() -> dict[str, Value]:
    """All options and their values now."""
    return {name: get(name) for name in OPTIONS}


def get_runtime_config() -> dict[str, Value]:
    """The options that `configure` or `configured` set."""
    return dict(_runtime)


def clear_runtime_config() -> None:
    """Forgets what `configure` set."""
    _replace({})


def engine_options(**settings: Any) -> dict[str, Value]:
    """All engine options, with `settings` over what is configured: what one engine is created with."""
    _refuse_unknown_environment()
    checked = _checked(settings)
    for name in checked:
        if not OPTIONS[name].engine:
            raise ConfigError(f"option {name!r} is not one of a single engine; use configure({name}=...)")
    return {name: checked[name] if name in checked else get(name) for name, option in OPTIONS.items() if option.engine}


def _refuse_unknown_environment() -> None:
    known = {option.env for option in OPTIONS.values()}
    known |= {_ENV_PREFIX + name.removeprefix("rdma_").upper() for name in ALIASES}
    for variable in os.environ:
        if variable.startswith(_ENV_PREFIX) and variable not in known and not variable.startswith(_OF_OTHERS):
            near = difflib.get_close_matches(variable, sorted(known), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else "; unset it"
            raise ConfigError(f"environment variable {variable} names no option{hint}")


def take_secret_fd() -> int:
    """The secret's descriptor, or -1; forgets it, also for children, to whom the number would mean another file."""
    value = get("secret_fd")
    _replace({name: kept for name, kept in _runtime.items() if name != "secret_fd"})
    os.environ.pop(OPTIONS["secret_fd"].env, None)
    return int(value)


def runtime_directory() -> str:
    """Where files of this user's session belong."""
    import tempfile

    return str(get("runtime_dir")) or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


def launcher_variables() -> dict[str, str]:
    """What torchrun, SLURM or MPI say of this process, and of the run that it is part of."""
    begin = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI", "OMPI_", "PBS_JOBID", "LSB_JOBID")
    return {name: value for name, value in os.environ.items() if name.startswith(begin)}


def python_breakpoint() -> str:
    """What the user wants `breakpoint()` to do, in the variable of Python itself; "" leaves it to us."""
    return os.environ.get("PYTHONBREAKPOINT", "")


def is_plain(value: object) -> bool:
    """Whether it is a string that the core, in C and UTF-8, can be told."""
    return isinstance(value, str) and "\0" not in value and value.encode(errors="replace").decode() == value


def _to_bool(value: object) -> Value | None:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    words: dict[object, bool] = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    return words.get(value.strip().lower()) if isinstance(value, str) else None


_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(-?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _to_int(value: object, unit: str) -> Value | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    scale = _BYTES.get(match[2].lower()) if match and (unit == "bytes" or not match[2]) else None
    if match is None or scale is None:
        return None
    number = float(match[1]) * scale
    return int(number) if number.is_integer() else None


def _to_seconds(value: object) -> Value | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if value != value else value if abs(value) > 2**53 else float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    scale = _SECONDS.get(match[2].lower()) if match else None
    return float(match[1]) * scale if match and scale else None


def _to_lanes(value: object) -> Value | None:
    lanes = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    lanes = [lane.strip() for lane in lanes if isinstance(lane, str)]
    if not lanes or len(set(lanes)) != len(lanes) or not set(lanes) <= set(LANES):
        return None
    return ",".join(lanes)
