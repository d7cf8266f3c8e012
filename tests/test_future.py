"""Futures: waited for, awaited in one loop or several, cancelled, let go of, explained."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from child import Child
from knocks import without_knocks

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, Future, RDMABuffer
from monarch_rdma.rdma.completions import Completions

SIZE = 32 << 20


def reading(owner: Engine, reader: Engine, size: int = SIZE) -> tuple[RDMABuffer, torch.Tensor, torch.Tensor]:
    """A buffer of the owner as the reader sees it, what is in it, and where to read it to."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    buffer = RDMABuffer.from_bytes(RDMABuffer(source, engine=owner).to_bytes(), engine=reader)
    return buffer, source, torch.zeros_like(source)


def test_get_result_exception_and_done(owner: Engine, reader: Engine) -> None:
    buffer, source, target = reading(owner, reader)
    done = buffer.read_into(target)
    assert done.get(30) is None
    assert done.result() is None
    assert done.exception() is None
    assert done.done()
    assert not done.cancel()
    assert torch.equal(target, source)


def test_an_error_is_raised_every_time(owner: Engine, reader: Engine) -> None:
    buffer, _, target = reading(owner, reader, 100)
    buffer.drop().get(30)
    done = buffer.read_into(target)
    error = done.exception(30)
    assert isinstance(error, errors.AccessDenied)
    assert (error.peer, error.operation, error.size) == ("owner", "read", 100)
    for _ in range(2):
        with pytest.raises(errors.AccessDenied, match="read of 100 bytes from owner"):
            done.get()


def test_a_wait_that_runs_out_leaves_the_operation_alone(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)
    with pytest.raises(TimeoutError, match="watch is not done after 0.01 s") as caught:
        lost.get(0.01)
    assert not isinstance(caught.value, errors.RdmaError)  # the operation itself is not over
    assert not lost.done()
    owner.close()
    assert isinstance(lost.exception(30), errors.PeerLost)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", True, [1]])
def test_a_timeout_that_is_none_is_refused(owner: Engine, reader: Engine, timeout: Any) -> None:
    buffer, _, target = reading(owner, reader, 100)
    for call in (
        lambda: buffer.read_into(target, timeout=timeout),
        lambda: buffer.write_from(target, timeout=timeout),
        lambda: reader.watch(owner.address).get(timeout),
    ):
        with pytest.raises(errors.ConfigError, match="timeout is"):
            call()


def test_timeouts_of_every_kind_are_taken(owner: Engine, reader: Engine) -> None:
    buffer, source, _ = reading(owner, reader, 5000)
    for timeout in (None, 60, 2.5, float("inf"), 1e12, 10**400):
        target = torch.zeros_like(source)
        buffer.read_into(target, timeout=timeout).get(timeout)
        assert torch.equal(target, source)


def test_cancel(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)
    assert lost.cancel()
    with pytest.raises(errors.Cancelled, match="watch"):
        lost.get(30)
    assert not lost.cancel()


def test_closing_the_engine_ends_its_operations(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)
    buffer, _, target = reading(owner, reader)
    done = buffer.read_into(target)
    waiting = [buffer.read_into(target, lanes="tcp") for _ in range(5)]
    reader.close()
    assert isinstance(lost.exception(30), errors.Cancelled)
    for each in (done, *waiting):
        assert each.done()
        assert each.exception() is None or isinstance(each.exception(), errors.Cancelled)
        assert each.explain().peer == "owner"
    assert buffer.owner == "owner"


def test_explain(owner: Engine, reader: Engine) -> None:
    buffer, _, target = reading(owner, reader)
    done = buffer.read_into(target)
    done.get(30)
    report = done.explain()
    assert (report.operation, report.peer, report.bytes) == ("read", "owner", SIZE)
    assert report.lane.startswith("shm")
    assert report.chunks >= 1 and report.rails >= 1 and report.seconds > 0
    assert str(report).startswith(f"read of {SIZE} bytes, peer owner: shm")
    assert "GB/s" in str(report)


def test_nothing_to_explain_before_the_end(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)
    with pytest.raises(errors.ConfigError, match="not done yet"):
        lost.explain()
    lost.cancel()


def test_repr_tells_the_state(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)
    assert repr(lost) == "<Future of watch: pending>"
    lost.cancel()
    lost.exception(30)
    assert "failed: watch" in repr(lost)


# --- asyncio


def test_await(owner: Engine, reader: Engine) -> None:
    buffer, source, target = reading(owner, reader)

    async def main() -> None:
        done = buffer.read_into(target)
        for _ in range(3):
            assert await done is None
        with pytest.raises(errors.OutOfBounds):
            await buffer.read_into(target[:10])

    asyncio.run(main())
    assert torch.equal(target, source)


def test_await_many_at_once_in_one_queue(owner: Engine, reader: Engine) -> None:
    buffer, source, target = reading(owner, reader, 1 << 20)
    step = 1 << 12

    async def main() -> None:
        parts = range(0, len(source), step)
        await asyncio.gather(*[buffer[at : at + step].read_into(target[at : at + step]) for at in parts])
        lost = reader.watch(owner.address)
        waiting = [asyncio.ensure_future(lost) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(reader.queues) == 1
        lost.cancel()
        for end in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(end, errors.Cancelled)

    asyncio.run(main())
    assert torch.equal(target, source)


def test_an_error_is_raised_where_it_is_awaited(owner: Engine, reader: Engine) -> None:
    async def main() -> None:
        lost = reader.watch(owner.address)
        waiting = asyncio.ensure_future(lost)
        await asyncio.sleep(0)
        owner.close()
        with pytest.raises(errors.PeerLost):
            await waiting
        with pytest.raises(errors.PeerLost):
            await lost

    asyncio.run(main())


def test_the_loop_runs_on_while_a_transfer_is_awaited(owner: Engine, reader: Engine) -> None:
    async def main() -> None:
        lost = reader.watch(owner.address)
        waiting = asyncio.ensure_future(lost)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        threads = threading.active_count()
        owner.close()
        with pytest.raises(errors.PeerLost):
            await waiting
        assert threading.active_count() <= threads  # no thread was needed

    asyncio.run(main())


def ends_in_loops(count: int, owner: Engine, reader: Engine) -> list[type]:
    """What a future of the owner's loss ended with in each of so many event loops, which await it side by side."""
    lost = reader.watch(owner.address)
    begun = threading.Barrier(count + 1)
    ends: list[BaseException] = []

    async def main() -> None:
        waiting = asyncio.ensure_future(lost)
        await asyncio.sleep(0)
        begun.wait(30)
        ends.extend(await asyncio.gather(waiting, return_exceptions=True))

    threads = [threading.Thread(target=lambda: asyncio.run(main()), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    owner.close()
    for thread in threads:
        thread.join(30)
    return [type(end) for end in ends]


def test_several_loops_await_one_future(owner: Engine, reader: Engine) -> None:
    assert ends_in_loops(3, owner, reader) == [errors.PeerLost] * 3


def test_loops_that_await_it_first_at_once(owner: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    both, add = threading.Barrier(2), Completions.add

    def add_together(self: Completions, op: Any) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):  # as it is where one at a time comes
            both.wait(0.5)
        return add(self, op)

    monkeypatch.setattr(Completions, "add", add_together)
    assert ends_in_loops(2, owner, reader) == [errors.PeerLost] * 2


def test_a_loop_that_ended_does_not_hold_up_the_next(owner: Engine, reader: Engine) -> None:
    lost = reader.watch(owner.address)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(_ignore(lost))), 0.01)

    async def wait() -> None:
        with pytest.raises(errors.RdmaError):
            await lost

    asyncio.run(give_up())
    owner.close()
    asyncio.run(wait())
    gc.collect()
    assert len(reader.queues) == 0


async def _ignore(future: Future) -> None:
    with pytest.raises(errors.RdmaError):
        await future


def test_cancelling_a_task_cancels_the_operation_and_waits_for_it(
    child_process: Callable[..., Child], secret: Any
) -> None:
    stopped = child_process(name="stopped", lanes="tcp")
    blob = stopped.run(f"data = bytearray({SIZE}); result = RDMABuffer(data, engine=engine).to_bytes()")
    with Engine(secret=secret, lanes="tcp") as engine:
        buffer = RDMABuffer.from_bytes(blob, engine=engine)
        buffer[:8].read_into(bytearray(8)).get(30)
        stopped.stop()
        target = torch.zeros(SIZE, dtype=torch.uint8)

        async def main() -> None:
            done = buffer.read_into(target)
            task = asyncio.ensure_future(done)
            await asyncio.sleep(0)
            assert not done.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(done.exception(0), errors.Cancelled)  # over when the task is

        asyncio.run(main())
        target.fill_(7)
        stopped.signal(signal.SIGCONT)
        buffer[:8].read_into(bytearray(8)).get(30)
        assert bool((target == 7).all())


def test_wait_for_cancels_too(owner: Engine, reader: Engine) -> None:
    async def main() -> None:
        lost = reader.watch(owner.address)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lost, 0.01)
        assert isinstance(lost.exception(0), errors.Cancelled)

    asyncio.run(main())


# --- futures nobody waits for


def test_memory_lives_until_an_abandoned_operation_is_over(child_process: Callable[..., Child], secret: Any) -> None:
    stopped = child_process(name="stopped", lanes="tcp")
    blob = stopped.run(f"data = bytearray({SIZE}); result = RDMABuffer(data, engine=engine).to_bytes()")
    with Engine(secret=secret, lanes="tcp", heartbeat_timeout=60) as engine:
        buffer = RDMABuffer.from_bytes(blob, engine=engine)
        buffer[:8].read_into(bytearray(8)).get(30)
        stopped.stop()

        class Watched(bytearray):
            """bytearray has no weak references."""

        target = Watched(SIZE)
        gone = weakref.ref(target)
        buffer.read_into(target)
        del target, buffer
        gc.collect()
        engine.sweep()
        assert gone() is not None  # the peer may still send into it
        stopped.kill()
        deadline = time.monotonic() + 30
        while gone() is not None and time.monotonic() < deadline:
            engine.sweep()
        assert gone() is None


def test_a_handle_may_go_while_its_operation_is_in_flight(owner: Engine, reader: Engine) -> None:
    buffer, source, target = reading(owner, reader)
    done = buffer.read_into(target)
    del buffer
    gc.collect()
    done.get(30)
    assert torch.equal(target, source)


def test_an_own_buffer_may_go_while_its_operation_is_in_flight(owner: Engine) -> None:
    source = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    RDMABuffer(source, engine=owner).read_into(target).get(30)
    assert torch.equal(target, source)


# --- signals, forks and the end of the program


def run_program(code: str, **options: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_ctrl_c_ends_a_wait() -> None:
    process = run_program(
        """
        from monarch_rdma.rdma import Engine, Secret
        secret = Secret.generate()
        one, two = Engine(secret=secret), Engine(secret=secret)
        lost = one.watch(two.address)
        try:
            print("waiting", flush=True)
            lost.get()
        except KeyboardInterrupt:
            print("interrupted", lost.done())
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, without_knocks(err)) == (0, "interrupted False\n", "")


def test_a_fork_refuses_its_parents_engine_and_makes_its_own() -> None:
    process = run_program(
        """
        import gc, os
        from monarch_rdma import errors
        from monarch_rdma.rdma import RDMABuffer, default_engine, shared_memory
        engine = default_engine()
        data, shared = bytearray(b"of the parent"), shared_memory(4096, engine=engine)
        buffer, lost = RDMABuffer(data), engine.watch(engine.address)
        handle = buffer.to_bytes()
        child = os.fork()
        if child == 0:
            for use in (lambda: RDMABuffer(data, engine=engine), lambda: buffer.read_into(bytearray(13)), lost.get,
                        lambda: lost.get(1), lost.done, buffer.drop, lambda: shared_memory(64, engine=engine)):
                try:
                    use()
                    print("no error")
                except errors.ConfigError as error:
                    assert "after a fork" in str(error), error
            assert default_engine() is not engine
            got = bytearray(13)
            RDMABuffer.from_bytes(handle).read_into(got).get(30)  # the parent is a peer like any other
            engine.close()
            del buffer, lost, shared
            gc.collect()
            print(got.decode())
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert default_engine() is engine and engine.is_open
            print("parent")
        """
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, without_knocks(err)) == (0, "of the parent\nparent\n", "")


@pytest.mark.parametrize("way", ["returns", "raises", "sys.exit(3)", "waits in a thread", "awaits"])
def test_the_program_may_end_with_operations_in_flight(way: str) -> None:
    process = run_program(
        f"""
        import asyncio, sys, threading
        from monarch_rdma.rdma import Engine, RDMABuffer, Secret, shared_memory
        secret, way = Secret.generate(), {way!r}
        one, two = Engine(secret=secret), Engine(secret=secret)
        shared = shared_memory(1 << 20, engine=two)
        mine = bytearray(shared.nbytes)
        buffer = RDMABuffer.from_bytes(RDMABuffer(shared, engine=two).to_bytes(), engine=one)
        mapped = buffer.map()
        waiting = [one.watch(two.address), *[buffer.read_into(mine) for _ in range(20)]]
        if way == "raises":
            raise KeyError("on purpose")
        if way == "sys.exit(3)":
            sys.exit(3)
        if way == "waits in a thread":
            threading.Thread(target=waiting[0].exception, daemon=True).start()
        if way == "awaits":
            async def main():
                asyncio.ensure_future(waiting[0])
            asyncio.run(main())
        print("end")
        """
    )
    out, err = process.communicate(timeout=60)
    expected = {"raises": 1, "sys.exit(3)": 3}.get(way, 0)
    assert process.returncode == expected, err
    assert ("on purpose" in err) if way == "raises" else without_knocks(err) == "", err
    assert out == ("end\n" if expected == 0 else "")


def test_descriptors_of_loops_that_ended_are_closed(owner: Engine, reader: Engine) -> None:
    buffer, _, target = reading(owner, reader)

    async def main() -> None:
        await buffer.read_into(target)

    asyncio.run(main())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        asyncio.run(main())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
