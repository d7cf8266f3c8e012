"""Workers from a template: what they get, how they end, and that nothing of them is left, whoever dies first."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import wait_until

from monarch_rdma.actor.launch import placement
from monarch_rdma.actor.launch.launcher import ProcessSpec, Started, Template
from monarch_rdma.errors import ConfigError, PeerLost, TransferTimeout

ENTRY = "launched:run"
GONE = 10.0  # seconds in which all must be gone after the death of client or template; 2 unless the machine is busy
FOREVER = "import time; time.sleep(1000)"
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); READY; time.sleep(1000)"
HOLDS_THE_GIL = (
    "import ctypes, signal; signal.signal(signal.SIGTERM, lambda *_: 0); READY\nwhile 1: ctypes.PyDLL(None).pause()"
)
STOPPED = "import os, signal; READY; os.kill(os.getpid(), signal.SIGSTOP)"
STUBBORN = {"sleeps": f"READY; {FOREVER}", "no_sigterm": IGNORES_SIGTERM, "gil": HOLDS_THE_GIL, "stopped": STOPPED}
SAY_READY = "__import__('os').write(fds[0], b'.')"


def spec(source: str, name: str = "worker", **options: Any) -> ProcessSpec:
    return ProcessSpec(name, textwrap.dedent(source).encode(), **options)


@pytest.fixture
def make() -> Iterator[Callable[..., Template]]:
    """Makes templates that are closed with the test; checks that each has left no process and no descriptor."""
    before = Counter(open_files())
    made: list[Template] = []

    def make_one(**options: Any) -> Template:
        made.append(Template(**{"entry": ENTRY, **options}))
        return made[-1]

    yield make_one
    for template in made:
        template.close()
    assert [left for template in made for left in left_of_session(template.process.pid)] == []
    assert Counter(open_files()) - before == Counter()


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return [name for name in names if not name.startswith("/proc/")]


def pids_of_session(session: int) -> list[int]:
    """Those alive (zombies that init has not got to yet do not count)."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(pid))
    return found


def left_of_session(session: int, but: tuple[int, ...] = ()) -> list[int]:
    """Those that are still alive after a while in which what was killed may end."""
    deadline = time.monotonic() + GONE
    while set(left := pids_of_session(session)) - set(but) and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    return left


def all_end(pidfds: list[int], within: float) -> bool:
    """Whether these processes end in time. Closes the descriptors."""
    deadline = time.monotonic() + within
    ended = []
    for fd in pidfds:
        ended.append(bool(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]))
        os.close(fd)
    return all(ended)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(fd: int, wanted: int) -> bytes:
    data = b""
    while len(data) < wanted:
        assert select.select([fd], [], [], 20)[0], f"only {data!r} came"
        data += os.read(fd, wanted - len(data))
    return data


# --- what a worker gets ------------------------------------------------------------------------------------------


def output_of(template: Template, source: str, fds: list[int] | None = None, **options: Any) -> str:
    (worker,) = template.spawn([spec(source, **options)], fds or [])
    assert worker.wait(20) == 0, worker.tail()
    return "\n".join(worker.tail()["stdout"])


def test_the_entry_gets_payload_and_descriptors(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    workers = template.spawn([spec(f"import os; os.write(fds[0], b'{n}'); result = {n}") for n in range(3)], [pipe[1]])
    assert [worker.wait(20) for worker in workers] == [0, 1, 2]
    assert sorted(read_until(pipe[0], 3)) == [*b"012"]


def test_a_worker_has_its_own_descriptors_only(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    others = template.spawn([spec(f"{SAY_READY}; {FOREVER}")] * 2, [pipe[1]])
    read_until(pipe[0], 2)
    source = """
        import os
        names = sorted(int(name) for name in os.listdir('/proc/self/fd'))
        print([n for n in names if os.path.exists(f'/proc/self/fd/{n}')] == [0, 1, 2, *sorted(fds)], len(fds))
        """
    assert output_of(template, source, [pipe[1], pipe[0]]) == "True 2"
    assert all(worker.kill() for worker in others)


def test_environment_and_directory(make: Callable[..., Template], tmp_path: Path) -> None:
    template = make(env={"FROM_TEMPLATE": "t", "REMOVED": "x"})
    source = "import os; print([os.environ.get(n) for n in ('FROM_TEMPLATE', 'REMOVED', 'OWN')], os.getcwd())"
    given = output_of(template, source, env={"OWN": "o", "REMOVED": None}, cwd=str(tmp_path))
    assert given == f"['t', None, 'o'] {tmp_path}"
    assert output_of(template, source) == f"['t', 'x', None] {os.getcwd()}"


def test_the_environment_reaches_programs_started_by_a_worker(make: Callable[..., Template]) -> None:
    source = "import subprocess; print(subprocess.check_output(['sh', '-c', 'echo $OWN'], text=True).strip())"
    assert output_of(make(), source, env={"OWN": "o"}) == "o"


def test_binding_to_cpus(make: Callable[..., Template]) -> None:
    one = str(max(os.sched_getaffinity(0)))
    source = "import os; print(os.sched_getaffinity(0))"
    template = make()
    assert output_of(template, source, bind={"cpus": one}) == f"{{{one}}}"
    assert output_of(template, source, bind={"physcpubind": one, "cpunodebind": "all"}) == f"{{{one}}}"
    assert output_of(template, source) == str(os.sched_getaffinity(0))


def test_binding_to_memory_nodes(make: Callable[..., Template]) -> None:
    source = "print([line for line in open('/proc/self/numa_maps')][0].split()[1])"
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    assert output_of(make(), source, bind={"membind": "0"}).startswith("bind:0")


def test_threads_also_of_libraries_that_the_template_has_loaded(make: Callable[..., Template]) -> None:
    source = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    template = make(preload=["torch"])
    assert output_of(template, source, threads=1) == "1 1"
    assert output_of(template, source, threads=3) == "3 3"


def test_numpys_global_generator_differs_between_workers(make: Callable[..., Template]) -> None:
    template = make(preload=["numpy.random"])
    assert len({output_of(template, "import numpy; print(numpy.random.rand())") for _ in range(3)}) == 3


def test_the_name_is_shown(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    (worker,) = make().spawn([spec(f"{SAY_READY}; {FOREVER}", name="mesh/trainer 3")], [pipe[1]])
    read_until(pipe[0], 1)
    assert Path(f"/proc/{worker.pid}/comm").read_text() == "mesh/trainer 3\n"
    assert Path(f"/proc/{worker.pid}/cmdline").read_bytes().rstrip(b"\0") == b"mesh/trainer 3"
    assert repr(worker) == f"<mesh/trainer 3 pid {worker.pid}: running>"


def test_modules_of_the_client_are_found(make: Callable[..., Template], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "only_here.py").write_text("value = 5")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert output_of(make(), "import only_here; print(only_here.value)") == "5"


def test_another_interpreter(make: Callable[..., Template], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    assert output_of(make(python=str(python)), "import sys; print(sys.executable)") == str(python)


@pytest.mark.parametrize(
    ("before", "hip", "cuda"),
    [
        ({}, "1,3", "1,3"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, "1,3", "1,3"),
        ({"HIP_VISIBLE_DEVICES": "4,5,6,7"}, "5,7", "1,3"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c, GPU-d"}, "GPU-b,GPU-d", "GPU-b,GPU-d"),
        ({"HIP_VISIBLE_DEVICES": "3,2,1,0", "CUDA_VISIBLE_DEVICES": "9,8,7,6"}, "2,0", "8,6"),
    ],
)
def test_visible_devices_count_among_those_visible(before: dict[str, str], hip: str, cuda: str) -> None:
    changes = placement.visible_devices([1, 3], before)
    assert changes == {"HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda}


def test_visible_devices_reach_the_worker(make: Callable[..., Template]) -> None:
    names = "('HIP_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')"
    template = make(env={"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": None, "CUDA_VISIBLE_DEVICES": None})
    source = f"import os; print([os.environ.get(n) for n in {names}])"
    assert output_of(template, source, visible_devices=[1]) == "['1', '1', '6,7']"
    assert output_of(template, source, visible_devices=[]) == "['-1', '-1', '6,7']"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": ""}, "name is ''"),
        ({"payload": "text"}, "payload is of type str"),
        ({"env": {"A=B": "c"}}, "'A=B'"),
        ({"env": {"A": 1}}, "env['A'] is 1"),
        ({"cwd": "/does/not/exist"}, "'/does/not/exist'"),
        ({"bind": {"cpu": "0"}}, "'cpu', but knows only cpunodebind"),
        ({"bind": {"cpus": "0-"}}, "bind['cpus'] is '0-'"),
        ({"bind": {"cpus": 0}}, "bind['cpus'] is 0"),
        ({"bind": {"cpus": "4095"}}, "[4095] are not among"),
        ({"bind": {"cpus": "!all"}}, "leaves no CPU"),
        ({"bind": {"membind": "63"}}, "bind['membind'] is '63'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True"),
        ({"visible_devices": [-1]}, "visible_devices is [-1]"),
        ({"visible_devices": [0, 0]}, "visible_devices is [0, 0]"),
        ({"visible_devices": [2]}, "HIP_VISIBLE_DEVICES shows only 2"),
    ],
)
def test_a_wrong_spec_starts_nothing(make: Callable[..., Template], options: dict[str, Any], sentence: str) -> None:
    template = make(env={"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": None})
    template.wait_ready(30)
    with pytest.raises(ConfigError) as raised:
        template.spawn([spec(FOREVER), ProcessSpec(**{"name": "worker", **options})])
    assert sentence in str(raised.value)
    assert pids_of_session(template.process.pid) == [template.process.pid]


@pytest.mark.parametrize("fds", [[-1], [99999], ["x"], [0] * 300])
def test_wrong_descriptors_are_named(make: Callable[..., Template], fds: list[Any]) -> None:
    with pytest.raises(ConfigError, match="fds "):
        make().spawn([spec(FOREVER)], fds)


# --- the template ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preload": ["no_such_module"]}, "preload 'no_such_module' cannot be imported"),
        ({"entry": "no_such_module:run"}, "entry 'no_such_module:run' cannot be imported"),
        ({"entry": "launched:nothing"}, "entry 'launched:nothing' cannot be imported"),
        ({"preload": ["leaves_at_once"]}, "SystemExit"),
    ],
)
def test_a_failed_import_is_told(
    make: Callable[..., Template], options: Any, sentence: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    template = make(**options)
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            template.spawn([spec(FOREVER)], timeout=30)
        assert sentence in str(raised.value)


def test_a_template_that_dies_while_it_imports(make: Callable[..., Template], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "crashes.py").write_text(
        "import os, sys; print('last words', file=sys.stderr); os.kill(os.getpid(), 11)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PeerLost, match="SIGSEGV: last words"):
        make(preload=["crashes"]).spawn([spec(FOREVER)], timeout=30)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"python": "/no/such/python"}, "python is '/no/such/python'"),
        ({"entry": "launched"}, "entry is 'launched'"),
        ({"preload": "torch"}, "preload is 'torch'"),
        ({"env": {"": "x"}}, "names a variable ''"),
    ],
)
def test_wrong_arguments_of_a_template(make: Callable[..., Template], options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(**options)
    assert sentence in str(raised.value)


def test_what_the_template_prints_is_handed_on(make: Callable[..., Template], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "prints.py").write_text("print('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines: list[tuple[str, str, list[str]]] = []
    template = make(
        preload=["prints"], on_lines=lambda process, stream, some: lines.append((process.name, stream, some))
    )
    template.wait_ready(30)
    template.close()
    assert lines == [("template", "stdout", ["imported"])]


def test_a_template_imports_no_torch_unasked(make: Callable[..., Template]) -> None:
    assert output_of(make(), "import sys; print({'torch', 'numpy'} & set(sys.modules))") == "set()"


def test_the_template_of_actors_has_one_thread(make: Callable[..., Template]) -> None:
    template = make(entry="monarch_rdma.actor.hosting.worker:main")
    template.wait_ready(30)
    assert len(os.listdir(f"/proc/{template.process.pid}/task")) == 1


def test_workers_outlive_the_thread_that_asked_for_them(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    result: list[Started] = []

    def start() -> None:
        # It reads a byte, answers, and ends.
        source = "import os; os.read(fds[0], 1); result = 5"
        result.extend(make().spawn([spec(source)], [pipe[0]]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(30)
    assert result[0].wait(0.2) is None
    os.write(pipe[1], b".")
    assert result[0].wait(20) == 5


def test_a_fork_of_the_client_cannot_use_or_end_it(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    (worker,) = template.spawn([spec(FOREVER)])
    pid = os.fork()
    if pid == 0:
        try:
            template.close()
            template.spawn([spec(FOREVER)])
        except ConfigError as error:
            os.write(pipe[1], str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"belongs to process" in os.read(pipe[0], 1000)
    assert worker.wait(0) is None
    assert worker.kill()


def test_many_workers(make: Callable[..., Template]) -> None:
    template = make()
    workers = template.spawn([spec(f"print('line', {n})", name=f"w{n}") for n in range(100)])
    assert [worker.wait(60) for worker in workers] == [0] * 100
    assert [worker.tail()["stdout"] for worker in workers] == [[f"line {n}"] for n in range(100)]
    assert len({worker.pid for worker in workers}) == 100


def test_several_threads_spawn_at_once(make: Callable[..., Template]) -> None:
    template = make()
    codes: list[list[int | None]] = []

    def spawn(n: int) -> None:
        codes.append([w.wait(60) for w in template.spawn([spec(f"result = {n}") for _ in range(5)])])

    threads = [threading.Thread(target=spawn, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(tuple, codes)) == [(n,) * 5 for n in range(4)]


def test_a_large_payload(make: Callable[..., Template]) -> None:
    template = make()
    (worker,) = template.spawn([spec("x = '" + "x" * (8 << 20) + "'; result = len(x) == 8 << 20")])
    assert worker.wait(20) == 1


# --- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "code", "last"),
    [
        ("result = 3", 3, None),
        ("import sys; sys.exit(4)", 4, None),
        ("import sys; sys.exit('a sentence')", 1, "a sentence"),
        ("raise ValueError('of the entry')", 1, "ValueError: of the entry"),
        ("import os; os._exit(9)", 9, None),
        ("import os; os.abort()", -signal.SIGABRT, None),
        ("import os; print('x', end='', flush=True, file=__import__('sys').stderr); os.kill(os.getpid(), 9)", -9, "x"),
        ("import atexit; atexit.register(print, 'at exit', file=__import__('sys').stderr)", 0, "at exit"),
        (
            "import sys, threading, time\n"
            "def late(): time.sleep(0.1); print('thread', file=sys.stderr)\n"
            "threading.Thread(target=late).start()",
            0,
            "thread",
        ),
    ],
)
def test_exit_codes_and_last_lines(make: Callable[..., Template], source: str, code: int, last: str | None) -> None:
    (worker,) = make().spawn([spec(source)])
    assert worker.wait(20) == code
    assert worker.returncode == code
    assert [*worker.tail()["stderr"], None][-2 if last else -1] == last
    assert not worker.kill()


def test_all_that_a_worker_printed_is_there_when_its_end_is_told(make: Callable[..., Template]) -> None:
    lines: list[str] = []
    told: list[int] = []
    template = make(on_lines=lambda process, stream, some: lines.extend(some))
    (worker,) = template.spawn([spec("for n in range(100_000): print(n)\nimport os; os.kill(os.getpid(), 9)")])
    worker.on_exit(lambda process: told.append(len(lines)))
    assert worker.wait(60) == -9
    template.close()
    assert told[0] == len(lines)
    assert lines == [str(n) for n in range(len(lines))]  # the rest was in the worker's own buffer: less than 8 KiB
    assert len(lines) > 98_000
    assert worker.tail(3)["stdout"] == lines[-3:]


def test_on_exit_is_called_once_early_or_late(make: Callable[..., Template]) -> None:
    calls: list[str] = []
    (worker,) = make().spawn([spec("result = 2")])
    worker.on_exit(lambda process: calls.append(f"early {process.returncode}"))
    worker.wait(20)
    worker.on_exit(lambda process: calls.append(f"late {process.returncode}"))
    wait_until(lambda: len(calls) == 2, lambda: f"only these were called: {calls}")  # who watches calls the first
    assert sorted(calls) == ["early 2", "late 2"]


def test_a_callback_that_fails_does_not_stop_the_others(make: Callable[..., Template], caplog: Any) -> None:
    template = make(on_lines=lambda *_: 1 / 0)
    workers = template.spawn([spec("print('x')") for _ in range(3)])
    assert [worker.wait(20) for worker in workers] == [0, 0, 0]
    template.close()
    assert "a callback of the launcher failed" in caplog.text


def test_kill_sends_signals(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    source = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(6)); {SAY_READY}; {FOREVER}"
    (worker,) = make().spawn([spec(source)], [pipe[1]])
    read_until(pipe[0], 1)
    assert worker.wait(0) is None
    assert worker.kill(signal.SIGUSR1)
    assert worker.wait(20) == 6


def stubborn(template: Template, kind: str, pipe: tuple[int, int], n: int = 2) -> list[Started]:
    workers = template.spawn([spec(STUBBORN[kind].replace("READY", SAY_READY)) for _ in range(n)], [pipe[1]])
    read_until(pipe[0], n)
    return workers


@pytest.mark.parametrize("kind", STUBBORN)
def test_close_ends_all_workers(make: Callable[..., Template], kind: str, pipe: tuple[int, int]) -> None:
    template = make()
    workers = stubborn(template, kind, pipe)
    template.close(timeout=0.3)
    expected = {"sleeps": -signal.SIGTERM, "stopped": -signal.SIGTERM}.get(kind, -signal.SIGKILL)
    assert [worker.returncode for worker in workers] == [expected] * 2
    assert template.process.returncode == -signal.SIGKILL
    template.close()
    with pytest.raises(ConfigError, match="is closed"):
        template.spawn([spec(FOREVER)])


@pytest.mark.parametrize("kind", STUBBORN)
def test_workers_die_with_the_template(make: Callable[..., Template], kind: str, pipe: tuple[int, int]) -> None:
    template = make()
    workers = stubborn(template, kind, pipe)
    pidfds = [os.pidfd_open(worker.pid) for worker in workers]
    template.process.kill()
    assert all_end(pidfds, GONE)
    assert [worker.wait(20) for worker in workers] == [-signal.SIGKILL] * 2
    assert template.process.wait(20) == -signal.SIGKILL
    with pytest.raises(PeerLost, match="has ended with signal SIGKILL"):
        template.spawn([spec(FOREVER)])


def test_sigterm_to_the_template_ends_all_in_order(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    source = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(8)); {SAY_READY}; {FOREVER}"
    (worker,) = template.spawn([spec(source)], [pipe[1]])
    read_until(pipe[0], 1)
    template.process.kill(signal.SIGTERM)
    assert worker.wait(20) == 8
    assert template.process.wait(20) is not None


def test_closing_twice_at_once_is_no_less_patient(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    source = f"import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), exit(8))); {SAY_READY}"
    (worker,) = template.spawn([spec(f"{source}; {FOREVER}")], [pipe[1]])
    read_until(pipe[0], 1)
    threads = [threading.Thread(target=template.close, args=(20,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert worker.returncode == 8


@pytest.mark.timeout(60)
def test_nobody_waits_for_ever_if_watching_fails(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    template = Template(entry=ENTRY)
    (worker,) = template.spawn([spec("import time; time.sleep(0.1)\nprint('x')\ntime.sleep(1000)")])
    monkeypatch.setattr(template, "_hand_on", lambda *_: 1 / 0)
    assert worker.wait(20) == -signal.SIGKILL
    with pytest.raises(PeerLost, match="not watched"):
        template.spawn([spec(FOREVER)])
    template.close()
    assert "watching it failed" in caplog.text
    assert left_of_session(template.process.pid) == []


def test_a_stopped_template(make: Callable[..., Template], pipe: tuple[int, int]) -> None:
    template = make()
    (worker, other) = stubborn(template, "no_sigterm", pipe)
    template.process.kill(signal.SIGSTOP)
    worker.kill()
    assert worker.wait(20) == -signal.SIGKILL  # known although the template cannot tell
    with pytest.raises(TransferTimeout, match="did not start"):
        template.spawn([spec(FOREVER)], timeout=0.2)
    template.close(timeout=0.2)
    assert other.returncode == -signal.SIGKILL


def test_a_worker_that_came_too_late_is_ended(make: Callable[..., Template]) -> None:
    template = make()
    template.wait_ready(30)
    template.process.kill(signal.SIGSTOP)
    with pytest.raises(TransferTimeout):
        template.spawn([spec(FOREVER)], timeout=0.1)
    template.process.kill(signal.SIGCONT)
    assert template.spawn([spec("result = 1")])[0].wait(20) == 1  # so the first order has been carried out, too
    assert left_of_session(template.process.pid, but=(template.process.pid,)) == [template.process.pid]


@pytest.mark.parametrize("first", ["close", "template"])
def test_what_a_worker_started_ends_too(make: Callable[..., Template], pipe: tuple[int, int], first: str) -> None:
    template = make()
    source = "import os, subprocess; os.write(fds[0], b'%10d' % subprocess.Popen(['sleep', '1000']).pid)"
    (worker,) = template.spawn([spec(source)], [pipe[1]])
    pidfd = os.pidfd_open(int(read_until(pipe[0], 10)))
    assert worker.wait(20) == 0
    if first == "close":
        template.close()
    else:
        template.process.kill()
    assert all_end([pidfd], GONE)


def test_a_daemon_that_a_worker_left_ends_with_the_template(
    make: Callable[..., Template], pipe: tuple[int, int]
) -> None:
    """It has a session of its own, and a child that will be left too."""
    source = """
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.write(fds[0], b"%10d%10d" % (os.getpid(), child.pid))
        time.sleep(1000)
    os._exit(0)
"""
    template = make()
    (worker,) = template.spawn([spec(source)], [pipe[1]])
    told = read_until(pipe[0], 20)
    pidfds = [os.pidfd_open(int(told[:10])), os.pidfd_open(int(told[10:]))]
    assert worker.wait(20) == 0
    template.close()
    assert all_end(pidfds, GONE)


def test_a_worker_that_forks_and_leaves_keeps_nobody_waiting(make: Callable[..., Template]) -> None:
    source = "import os, time\nprint('said', flush=True)\nif os.fork() == 0: os.setsid(); time.sleep(60); os._exit(0)"
    template = make()
    (worker,) = template.spawn([spec(source)])
    started = time.monotonic()
    assert worker.wait(20) == 0
    assert worker.tail()["stdout"] == ["said"]
    template.close()
    assert time.monotonic() - started < 30


# --- ends of the client ------------------------------------------------------------------------------------------


class Client:
    """A program of its own that starts workers and tells all process ids."""

    def __init__(self, source: str, **options: Any) -> None:
        program = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from monarch_rdma.actor.launch.launcher import ProcessSpec, Template
def tell(*pids):
    os.write(told, (json.dumps(pids) + chr(10)).encode())
{textwrap.dedent(source)}
"""
        self.told, told = os.pipe()
        os.set_inheritable(told, True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"told = {told}\n{program}"],
            close_fds=False,
            start_new_session=True,
            **{"stdin": subprocess.PIPE, **options},
        )
        os.close(told)
        self._unread = b""

    def hear(self) -> list[int]:
        while b"\n" not in self._unread:
            assert select.select([self.told], [], [], 30)[0], "the client says nothing"
            more = os.read(self.told, 4096)
            assert more, "the client has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return list(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.told)
        if self.process.stdin is not None:
            self.process.stdin.close()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(source: str, **options: Any) -> Client:
        made.append(Client(source, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def with_workers(kind: str) -> str:
    source = STUBBORN[kind].replace("READY", SAY_READY)
    return f"""
        template = Template(entry={ENTRY!r})
        reading, writing = os.pipe()
        workers = template.spawn([ProcessSpec('worker', {source!r}.encode())] * 2, [writing])
        ready = b''
        while len(ready) < 2: ready += os.read(reading, 2)
        """


@pytest.mark.parametrize("kind", STUBBORN)
def test_all_are_gone_soon_after_the_client(client: Callable[..., Client], kind: str) -> None:
    each = client(with_workers(kind) + "tell(template.process.pid, *(w.pid for w in workers)); time.sleep(1000)")
    pidfds = [os.pidfd_open(pid) for pid in each.hear()]
    each.process.kill()
    assert all_end(pidfds, GONE)


def test_a_stopped_template_ends_with_the_client(client: Callable[..., Client]) -> None:
    each = client(with_workers("stopped") + "tell(template.process.pid, *(w.pid for w in workers)); time.sleep(1000)")
    pids = each.hear()
    pidfds = [os.pidfd_open(pid) for pid in pids]
    signal.pidfd_send_signal(pidfds[0], signal.SIGSTOP)
    each.process.kill()
    assert all_end(pidfds, GONE)


def test_a_stopped_client_loses_nothing_until_it_is_killed(client: Callable[..., Client]) -> None:
    each = client(with_workers("sleeps") + "tell(template.process.pid, *(w.pid for w in workers)); time.sleep(1000)")
    pidfds = [os.pidfd_open(pid) for pid in each.hear()]
    each.process.send_signal(signal.SIGSTOP)
    assert not any(select.select([fd], [], [], 0.1)[0] for fd in pidfds)
    each.process.kill()
    assert all_end(pidfds, GONE)


def test_a_fork_of_the_client_that_lives_on_keeps_no_worker(client: Callable[..., Client]) -> None:
    fork = """
        heir = os.fork()
        if heir == 0: time.sleep(1000)
        tell(heir, template.process.pid, *(w.pid for w in workers)); time.sleep(1000)
        """
    each = client(textwrap.dedent(with_workers("sleeps")) + textwrap.dedent(fork))
    heir, *pidfds = [os.pidfd_open(pid) for pid in each.hear()]
    each.process.kill()
    assert all_end(pidfds, GONE)
    signal.pidfd_send_signal(heir, signal.SIGKILL)
    assert all_end([heir], GONE)


def test_a_template_that_imports_ends_with_the_client(client: Callable[..., Client], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    each = client(
        f"sys.path.insert(0, {str(tmp_path)!r}); template = Template(entry={ENTRY!r}, preload=['slow']); "
        "tell(template.process.pid); time.sleep(1000)"
    )
    pidfds = [os.pidfd_open(pid) for pid in each.hear()]
    each.process.kill()
    assert all_end(pidfds, GONE)


def test_a_client_killed_at_any_moment(client: Callable[..., Client]) -> None:
    dice = random.Random(7)
    for _ in range(8):
        each = client(f"""
            template = Template(entry={ENTRY!r})
            tell(template.process.pid)
            while True: template.spawn([ProcessSpec('worker', b'import time; time.sleep(1000)')] * 3)
            """)
        (pid,) = each.hear()
        pidfd = os.pidfd_open(pid)
        select.select([], [], [], dice.uniform(0, 0.15))
        each.process.kill()
        assert all_end([pidfd], GONE)
        assert left_of_session(pid) == []


def test_a_client_that_ends_without_closing(client: Callable[..., Client]) -> None:
    each = client(
        with_workers("no_sigterm") + "tell(template.process.pid, *(w.pid for w in workers)); sys.stdin.read()"
    )
    pidfds = [os.pidfd_open(pid) for pid in each.hear()]
    assert each.process.stdin is not None
    each.process.stdin.close()
    assert each.process.wait(20) == 0
    assert all_end(pidfds, GONE)


def test_ctrl_c_leaves_the_decision_to_the_client(client: Callable[..., Client]) -> None:
    rest = """
        try:
            tell()
            time.sleep(1000)
        except KeyboardInterrupt:
            tell(*(w.returncode for w in workers), template.process.returncode)
            template.close()
            tell(*(w.returncode for w in workers))
        """
    each = client(textwrap.dedent(with_workers("sleeps")) + textwrap.dedent(rest))
    each.hear()
    os.killpg(each.process.pid, signal.SIGINT)  # what the terminal does: to all of the foreground group
    assert each.hear() == [None, None, None]
    assert each.hear() == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("closed", [[0], [1, 2], [0, 1, 2]])
def test_a_client_without_stdio(client: Callable[..., Client], closed: list[int]) -> None:
    rest = """
        printed = template.spawn([ProcessSpec('printer', b'print(1); result = 3')])[0]
        tell(printed.wait(20), *map(int, printed.tail()['stdout']))
        template.close()
        tell(*(w.returncode for w in workers))
        """
    each = client(
        "".join(f"os.close({fd}); " for fd in closed)
        + "\n"
        + textwrap.dedent(with_workers("sleeps"))
        + textwrap.dedent(rest)
    )
    assert each.hear() == [3, 1]
    assert each.hear() == [-signal.SIGTERM] * 2


def test_no_descriptors_left_is_said(client: Callable[..., Client]) -> None:
    source = f"""
        import resource
        from monarch_rdma.errors import ResourceExhausted
        template = Template(entry={ENTRY!r})
        template.wait_ready(30)
        here = len(os.listdir('/proc/self/fd'))
        resource.setrlimit(resource.RLIMIT_NOFILE, (here + 20, here + 20))
        try:
            template.spawn([ProcessSpec('worker', b'import time; time.sleep(1000)') for _ in range(30)])
        except ResourceExhausted as error:
            assert 'ulimit -n' in str(error), error
            tell(1)
        until = time.monotonic() + 20
        while True:
            try:
                tell(template.spawn([ProcessSpec('worker', b'result = 4')])[0].wait(20))
                break
            except ResourceExhausted:  # as long as those killed have not ended
                if time.monotonic() > until: raise
        template.close()
        """
    each = client(source)
    assert each.hear() == [1]
    assert each.hear() == [4]
    assert each.process.wait(20) == 0


def test_a_template_for_which_no_descriptors_are_left(client: Callable[..., Client]) -> None:
    source = f"""
        import resource
        from monarch_rdma.errors import ResourceExhausted
        here = len(os.listdir('/proc/self/fd')) - 1
        refused = 0
        while True:
            resource.setrlimit(resource.RLIMIT_NOFILE, (here + refused, 1000))
            try:
                template = Template(entry={ENTRY!r})
                break
            except ResourceExhausted:
                assert len(os.listdir('/proc/self/fd')) - 1 == here
                refused += 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        tell(template.spawn([ProcessSpec('worker', b'result = 4')])[0].wait(20), refused)
        template.close()
        """
    code, refused = client(source).hear()
    assert code == 4
    assert refused > 5
