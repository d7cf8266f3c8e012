"""The `monarch-rdma` command. Each subcommand is a module of its own, imported when it is asked for.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .errors import ConfigError

__all__ = ["main"]

_INTERRUPTED, _BROKEN_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE


JOBS = ("run", "apply", "exec", "status", "kill", "logs")

# Of supervision.chaos.FAULTS, written here so that the other commands need not import it.
CHAOS = (
    "kill",
    "stop",
    "hold-gil",
    "exhaust-memory",
    "abort-group",
    "break-link",
    "cut-link",
    "slow-link",
    "corrupt-frame",
)


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return int(text)

    return count


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _sets(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= {"real", "generated"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma list of real and generated")
    return names


def _point(text: str) -> dict[str, int]:
    point = {}
    for part in text.split(","):
        label, equals, number = part.partition("=")
        if not (label and equals and number.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not LABEL=NUMBER, such as hosts=1")
        point[label] = int(number)
    return point


def _add_jobs(commands: Any) -> list[argparse.ArgumentParser]:
    """Those about jobs: run, apply, exec, status, kill, logs."""
    kept = argparse.ArgumentParser(add_help=False)
    about = "file that says which job runs [%(default)s]"
    kept.add_argument("--state", metavar="FILE", default=".monarch/job_state.json", help=about)

    run = commands.add_parser("run", help="runs a program here, with hosts that are its own until it ends")
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts", metavar="LIST", help="that ssh reaches: node1,node2")
    where.add_argument("--processes", metavar="N", type=_at_least(1), help="of this host, that play hosts")
    where.add_argument("--slurm", metavar="N", type=_at_least(1), help="nodes of SLURM")
    run.add_argument("--partition", help="of SLURM")
    run.add_argument("--gpus-per-node", metavar="N", type=_at_least(0), help="of SLURM")
    run.add_argument("--time", metavar="LIMIT", help="of SLURM, as 1:00:00")
    run.add_argument("program", nargs=argparse.REMAINDER, help="a Python file or a command, and its arguments")

    apply = commands.add_parser("apply", help="asks a scheduler for a job, waits for it, keeps it", parents=[kept])
    apply.add_argument("job", metavar="JOB", help="where it is: path/job.py, path/job.py:name or module:name")
    apply.add_argument("--no-wait", action="store_true", help="do not wait in the queue")
    apply.add_argument(
        "--client", nargs=argparse.REMAINDER, default=[], help="the command that is run inside the job; goes last"
    )

    execute = commands.add_parser("exec", help="runs a command on hosts of the job", parents=[kept])
    execute.add_argument("--mesh", metavar="NAME", help="which, where there are several")
    execute.add_argument("--all", action="store_true", help="on all meshes")
    execute.add_argument("--point", metavar="hosts=N", type=_point, default={}, help="on this host alone")
    execute.add_argument("--per-host", metavar="N", type=_at_least(1), default=1, help="so many times [%(default)s]")
    execute.add_argument("program", nargs=argparse.REMAINDER, help="the command")

    status = commands.add_parser("status", help="what the scheduler says of the job", parents=[kept])
    status.add_argument("--json", action="store_true", help="print one JSON document")
    kill = commands.add_parser("kill", help="ends the job", parents=[kept])
    logs = commands.add_parser("logs", help="what the job has printed", parents=[kept])
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    return [run, apply, execute, status, kill, logs]


def _run_jobs(arguments: argparse.Namespace) -> int:
    from .job import ProcessJob, SlurmJob, SSHJob, command

    given = arguments.command
    if given == "apply":
        return command.apply(arguments.job, arguments.state, _program(arguments.client), not arguments.no_wait)
    if given == "status":
        return command.status(arguments.state, arguments.json)
    if given == "kill":
        return command.kill(arguments.state)
    if given == "logs":
        return command.logs(arguments.state, arguments.follow)
    program = _program(arguments.program)
    if not program:
        raise ConfigError("there is no command to run")
    if given == "exec":
        where = arguments.mesh, arguments.point, arguments.per_host, arguments.all
        return command.execute(arguments.state, program, *where)
    if arguments.processes:
        return command.run(ProcessJob({"hosts": arguments.processes}), program)
    if arguments.hosts:
        return command.run(SSHJob(meshes={"hosts": arguments.hosts.split(",")}), program)
    options = {"partition": arguments.partition, "time_limit": arguments.time}
    job = SlurmJob({"hosts": arguments.slurm}, gpus_per_node=arguments.gpus_per_node, **options)
    return command.run(job, program)


def _program(words: list[str]) -> list[str]:
    return words[1:] if words[:1] == ["--"] else words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="monarch-rdma",
        description="Moves tensors between processes with one-sided reads and writes.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show where a failure came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this host can do, and the command that changes what it cannot")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")

    # -h belongs to these programs too: they know their own options.
    commands.add_parser(
        "bench",
        add_help=False,
        help="latency and bandwidth of each lane (--help lists the options); --collectives: of collectives",
    )

    about = "a model of training under failures: goodput and scaling (--help lists the options)"
    commands.add_parser("simulate", add_help=False, help=about)

    demo = commands.add_parser("demo", help="moves a real model's weights between processes, and kills one of them")
    demo.add_argument("--weights", metavar="FILE", type=Path, help="take the tensors of this safetensors file")
    demo.add_argument(
        "--sets", metavar="LIST", type=_sets, default="real,generated", help="real, generated or both [%(default)s]"
    )
    demo.add_argument("--small", action="store_true", help="scale the generated set down, for tiny machines")
    demo.add_argument(
        "--owners", metavar="N", type=_at_least(2, 64), default=2, help="processes that hold the tensors [%(default)s]"
    )
    demo.add_argument(
        "--readers", metavar="N", type=_at_least(1, 64), default=2, help="processes that pull all of them [%(default)s]"
    )
    demo.add_argument(
        "--max-size",
        metavar="BYTES",
        type=_at_least(4096, 64 << 30),
        default=256 << 20,
        help="largest size of the chart [%(default)s]",
    )
    demo.add_argument("--output", metavar="DIR", type=Path, default="demo_out", help="where figures go [%(default)s]")
    about = "makes this host one that clients attach to, until Ctrl-C or SIGTERM"
    worker = commands.add_parser("worker", help=about)
    worker.add_argument("address", metavar="ADDRESS", help="where clients reach it, such as tcp://node1:22222")
    worker.add_argument(
        "--secret-file",
        metavar="FILE",
        type=Path,
        help="the job's secret, the same on all hosts [what option secret_file says]",
    )
    worker.add_argument("--until-shutdown", action="store_true", help="end also when a client shuts the hosts down")
    about = "keeps the names of published weights for jobs that share a secret, until Ctrl-C or SIGTERM"
    directory = commands.add_parser("directory", help=about)
    directory.add_argument("address", metavar="ADDRESS", help="where it is reached, such as node1:22300")
    directory.add_argument(
        "--secret-file", metavar="FILE", type=Path, help="the jobs' secret [what option secret_file says]"
    )
    of_program = argparse.ArgumentParser(add_help=False)
    of_program.add_argument(
        "pid", metavar="PID", nargs="?", type=_at_least(1), help="of the program; needed where several run"
    )
    of_program.add_argument("--json", action="store_true", help="print one JSON document")
    all_of_it = argparse.ArgumentParser(add_help=False)
    all_of_it.add_argument("--all", action="store_true", help="the library's own actors, threads and frames too")

    about = "the Python stack of every actor and thread of a running program"
    stacks = commands.add_parser("stacks", help=about, parents=[of_program, all_of_it])
    about = "a live view of a running program's processes and actors, and what each works on"
    top = commands.add_parser("top", help=about, parents=[of_program, all_of_it])
    top.add_argument("--once", action="store_true", help="print a table once")
    top.add_argument(
        "--interval", metavar="SECONDS", type=_seconds, default=1.0, help="between two looks [%(default)s]"
    )
    about = "attaches to actors of a running program that wait at a breakpoint()"
    debug = commands.add_parser("debug", help=about, parents=[of_program])
    about = "puts faults on processes of a running program on purpose; without any, lists the processes"
    chaos = commands.add_parser("chaos", help=about, parents=[of_program])
    for name in CHAOS:
        whom = "A,B" if name.endswith(("link", "frame")) else "PROCESS"
        chaos.add_argument(f"--{name}", metavar=whom, help=f"{name.replace('-', ' ')}: names as listed, or ranks")
    chaos.add_argument("--seconds", type=float, default=0.0, help="how long it lasts, where it lasts")
    chaos.add_argument("--amount", type=float, help="bytes, or bytes a second, or the way to damage a frame")
    chaos.add_argument("--plan", metavar="FILE", type=Path, help="carry out the plan in this file")
    chaos.add_argument("--rate", type=float, help="random faults, so many a second on average")
    chaos.add_argument("--duration", metavar="SECONDS", type=float, help="for so long")
    chaos.add_argument("--seed", type=int, default=0, help="what the random faults are made from [%(default)s]")
    chaos.add_argument(
        "--kinds", metavar="LIST", default="kill", help="which, such as kill,stop,cut_link [%(default)s]"
    )
    chaos.add_argument(
        "--target", metavar="PATTERN", default="*", help="processes that random faults hit [%(default)s]"
    )
    chaos.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    k8s = commands.add_parser("k8s", help="what a job is to Kubernetes: `k8s render` prints its manifests")
    render = k8s.add_subparsers(dest="k8s_command", metavar="COMMAND", required=True).add_parser(
        "render", help="prints a job's manifests, to look at or for kubectl apply"
    )
    jobs = _add_jobs(commands)
    for subparser in (render, doctor, demo, worker, directory, stacks, top, debug, chaos, *jobs):
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    _add_render_arguments(render)
    return parser


def _add_render_arguments(render: argparse.ArgumentParser) -> None:
    render.add_argument(
        "--name", default="job", help="of the job, from which its objects' names are made [%(default)s]"
    )
    render.add_argument("--namespace", default="default", help="[%(default)s]")
    render.add_argument(
        "--mesh", metavar="NAME=PODS", action="append", default=[], help="a mesh; may be given again [hosts=1]"
    )
    render.add_argument("--image", help="of the pods; without it only what is for the client is printed")
    render.add_argument("--gpu", metavar="KIND=N", help="GPUs for each pod, such as amd=8 or nvidia=8")
    render.add_argument(
        "--resource",
        metavar="NAME=AMOUNT",
        action="append",
        default=[],
        help="anything else for each pod, such as rdma/hca=1, cpu=32, memory=512Gi; may be given again",
    )
    render.add_argument("--shared-memory", metavar="SIZE", help="of /dev/shm, such as 64Gi")
    render.add_argument("--host-network", action="store_true", help="the pods use their nodes' network")
    render.add_argument("--user", metavar="NUMBER", type=_at_least(0), help="that the workers run as, not the image's")
    render.add_argument("--workload", choices=("statefulset", "indexed_job", "monarchmesh"), default="statefulset")
    render.add_argument("--kueue-queue", metavar="NAME", help="the pods wait in this queue of Kueue")
    render.add_argument("--volcano-queue", metavar="NAME", help="the pods wait in this queue of Volcano")
    render.add_argument("--rbac", action="store_true", help="also the role that the job's client needs")
    render.add_argument("--json", action="store_true", help="print one JSON document instead of YAML")


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.command == "doctor":
        from . import doctor

        return doctor.run(as_json=arguments.json)
    if arguments.command == "bench":
        from . import bench

        return bench.run(rest)
    if arguments.command == "simulate":
        from .ft.simulate.run import run as simulate

        return simulate(rest)
    if arguments.command == "worker":
        from .actor import run_worker_loop_forever, run_worker_loop_until_shutdown

        run = run_worker_loop_until_shutdown if arguments.until_shutdown else run_worker_loop_forever
        run(address=arguments.address, private_key=arguments.secret_file)
        return 0
    if arguments.command == "directory":
        from .tools import directory

        return directory.run(arguments.address, arguments.secret_file)
    if arguments.command == "stacks":
        from .tools import stacks

        return stacks.run(pid=arguments.pid, as_json=arguments.json, everything=arguments.all)
    if arguments.command == "top":
        from .tools import top

        return top.run(
            pid=arguments.pid,
            once=arguments.once,
            as_json=arguments.json,
            interval=arguments.interval,
            everything=arguments.all,
        )
    if arguments.command == "debug":
        from .tools import debug

        return debug.run(pid=arguments.pid, as_json=arguments.json)
    if arguments.command == "k8s":
        from .job.kubernetes import render

        return render.run(arguments)
    if arguments.command == "chaos":
        return _run_chaos(arguments)
    if arguments.command in JOBS:
        return _run_jobs(arguments)
    from .demo import run as demo

    plan = demo.Plan(
        weights=arguments.weights,
        sets=arguments.sets,
        small=arguments.small,
        num_owners=arguments.owners,
        num_readers=arguments.readers,
        max_size=arguments.max_size,
        output=arguments.output,
    )
    return demo.run(plan)


def _run_chaos(arguments: argparse.Namespace) -> int:
    from .tools import chaos

    given = vars(arguments)
    kinds = [name.replace("-", "_") for name in CHAOS]
    plan = chaos.from_arguments(
        [(kind, given[kind]) for kind in kinds if given[kind] is not None],
        file=arguments.plan,
        rate=arguments.rate,
        duration=arguments.duration,
        seed=arguments.seed,
        kinds=arguments.kinds.split(","),
        target=arguments.target,
        seconds=arguments.seconds,
        amount=arguments.amount,
    )
    return chaos.run(pid=arguments.pid, plan=plan, as_json=arguments.json, dry_run=arguments.dry_run)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through every `finally`, so that no process is left


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("bench", "simulate"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.version:
        from importlib.metadata import version

        print(f"monarch-rdma {version('monarch-rdma')}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        code = _run(arguments, rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except Exception as error:
        if arguments.debug:
            raise
        print(f"monarch-rdma {arguments.command}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, who wants to see nothing of it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminated)
        return _main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
