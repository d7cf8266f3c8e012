"""What the errors of real operations say: peer, operation, size and cause; and of a write that failed, what it did."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from child import Child

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMABuffer, Secret

SIZE = 4096
OWN = """
from monarch_rdma.rdma import RDMABuffer
owned = RDMABuffer(bytearray(size), engine=engine, **rights)
result = owned.to_bytes()
"""


@pytest.fixture
def far(reader: Engine, child_process: Callable[..., Child]) -> Callable[..., tuple[Child, RDMABuffer]]:
    """A buffer that another process has, over tcp."""

    def make(**rights: Any) -> tuple[Child, RDMABuffer]:
        owner = child_process(name="its-owner", lanes="tcp")
        return owner, RDMABuffer.from_bytes(owner.run(OWN, size=SIZE, rights=rights), engine=reader)

    return make


def check(error: BaseException | None, cls: type[errors.RdmaError], operation: str, cause: str) -> errors.RdmaError:
    assert type(error) is cls
    assert (error.peer, error.operation, error.size) == ("its-owner", operation, SIZE)
    assert error.cause is not None and cause in error.cause and error.cause in str(error)
    for fact in (operation, str(SIZE), "its-owner"):
        assert fact in str(error)
    return error


def test_a_dropped_region(far: Any) -> None:
    owner, buffer = far()
    buffer.read_into(bytearray(SIZE)).get(20)
    owner.run("owned.drop().get(20)")
    check(buffer.read_into(bytearray(SIZE)).exception(20), errors.AccessDenied, "read", "dropped")
    denied = check(buffer.write_from(bytearray(SIZE)).exception(20), errors.AccessDenied, "write", "dropped")
    assert denied.remote_state == "not_written"


def test_a_right_that_was_not_granted(far: Any) -> None:
    """Refused here, before anything is sent."""
    _, buffer = far(access="read")
    with pytest.raises(errors.AccessDenied, match="write of region .* of its-owner, which does not grant it") as caught:
        buffer.write_from(bytearray(SIZE))
    assert (caught.value.peer, caught.value.operation, caught.value.size) == ("its-owner", "write", SIZE)


def test_a_process_that_is_stopped(far: Any) -> None:
    """The write may have reached it, or not; the read says nothing of its memory."""
    owner, buffer = far()
    buffer.read_into(bytearray(SIZE)).get(20)
    owner.stop()
    late = check(buffer.write_from(bytearray(SIZE), timeout=0.2).exception(20), errors.TransferTimeout, "write", "0.2")
    assert late.remote_state == "unknown"
    late = check(buffer.read_into(bytearray(SIZE), timeout=0.2).exception(20), errors.TransferTimeout, "read", "0.2")
    assert late.remote_state is None


def test_a_process_that_is_gone(far: Any) -> None:
    owner, buffer = far()
    owner.kill()
    error = check(buffer.write_from(bytearray(SIZE)).exception(20), errors.PeerLost, "write", "")
    assert error.remote_state == "not_written"


def test_more_operations_than_the_option_allows(secret: Secret, child_process: Callable[..., Child]) -> None:
    owner = child_process(lanes="tcp")
    with Engine(secret=secret, max_pending_ops=4) as engine:
        buffer = RDMABuffer.from_bytes(owner.run(OWN, size=SIZE, rights={}), engine=engine)
        buffer.read_into(bytearray(SIZE)).get(20)
        owner.stop()
        begun = [buffer.read_into(bytearray(SIZE)) for _ in range(4)]
        with pytest.raises(errors.ResourceExhausted, match=r"4 operations are in flight .option max_pending_ops"):
            buffer.read_into(bytearray(SIZE))
        owner.signal(signal.SIGCONT)
        for each in begun:
            each.get(20)
        buffer.read_into(bytearray(SIZE)).get(20)


def test_the_name_of_an_interface_is_its_address(secret: Secret) -> None:
    with Engine(secret=secret, listen_host="lo", ip_family=4) as engine:
        assert "//127.0.0.1:" in engine.address
