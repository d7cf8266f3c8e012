"""Calls that never unpickle: `options(codec="safe")` and actors that accept nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from actor_client import LIMIT

from monarch_rdma.actor import Actor, ActorError, ActorMesh, ProcMesh, endpoint, this_proc
from monarch_rdma.actor.encoding.codec import encode
from monarch_rdma.actor.runtime import instance
from monarch_rdma.errors import ConfigError, ProtocolError


class Careful(Actor):
    accept_codec = "safe"

    @endpoint
    def echo(self, *values: Any) -> Any:
        return values

    @endpoint
    def refuse(self) -> None:
        raise KeyError("not here")

    @endpoint
    def give_function(self) -> Any:
        return print


class Trap:
    """Its pickle calls a function wherever it is loaded."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.fixture(scope="module")
def careful(procs: ProcMesh) -> ActorMesh[Careful]:
    return procs.slice(gpus=0).spawn("careful", Careful)


def test_plain_values_arrays_and_tensors_go_both_ways(careful: ActorMesh[Careful]) -> None:
    large = torch.arange(100_000, dtype=torch.bfloat16)
    sent = (None, 1 << 80, -0.5, "ä", b"\0", [1, {"k": (2,)}], np.arange(6).reshape(2, 3), large)
    got = careful.echo.options(codec="safe").call_one(*sent).get(timeout=LIMIT)
    assert got[:6] == sent[:6]
    assert np.array_equal(got[6], sent[6])
    assert torch.equal(got[7], large)


@pytest.mark.parametrize("value", [1, Trap(), lambda: 1], ids=["plain", "trap", "function"])
def test_an_actor_that_accepts_safe_calls_alone_refuses_pickles_unloaded(
    careful: ActorMesh[Careful], value: Any
) -> None:
    with pytest.raises(ActorError, match=r"only codec='safe' is accepted") as caught:
        careful.echo.call_one(value).get(timeout=LIMIT)
    assert isinstance(caught.value.exception, ProtocolError)
    assert careful.echo.options(codec="safe").call_one("on").get(timeout=LIMIT) == ("on",)


def test_what_is_not_safe_is_refused_at_the_call_by_its_place(careful: ActorMesh[Careful]) -> None:
    with pytest.raises(ConfigError, match=r"\[1\].*Trap"):
        careful.echo.options(codec="safe").call_one(1, Trap())


def test_exceptions_of_safe_calls_come_as_text(careful: ActorMesh[Careful]) -> None:
    with pytest.raises(ActorError, match="not here") as caught:
        careful.refuse.options(codec="safe").call_one().get(timeout=LIMIT)
    assert type(caught.value.exception).__name__ == "RemoteException"


def test_a_result_that_is_not_safe_is_an_error_of_the_call(careful: ActorMesh[Careful]) -> None:
    with pytest.raises(ActorError, match=r"builtin_function_or_method|print"):
        careful.give_function.options(codec="safe").call_one().get(timeout=LIMIT)


def test_a_codec_that_is_not_known_is_refused(careful: ActorMesh[Careful]) -> None:
    with pytest.raises(ConfigError, match="codec is 'json'"):
        careful.echo.options(codec="json")


def test_a_caller_of_safe_calls_refuses_a_pickle_as_the_answer(
    careful: ActorMesh[Careful], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a process that does not keep to what it was asked."""
    here = this_proc().spawn("here", Careful)
    honest: Callable[..., Any] = encode
    monkeypatch.setattr(instance, "encode", lambda value, codec="pickle": honest(value))
    with pytest.raises(ProtocolError, match="only codec='safe'"):
        here.echo.options(codec="safe").call_one(1).get(timeout=LIMIT)
    here.stop().get(timeout=LIMIT)
