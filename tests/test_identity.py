"""Uid and ProcId, as Monarch's programs use them."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.actor import ProcId, Uid
from monarch_rdma.errors import ConfigError

labels = st.from_regex(r"[a-z]([A-Za-z0-9_-]{0,61}[a-z0-9])?", fullmatch=True)
values = st.integers(0, 2**64 - 1)


@given(values, st.none() | labels)
def test_an_instance_is_read_back_from_its_text(value: int, label: str | None) -> None:
    uid = Uid.instance_from_value(value, label)
    again = Uid.from_string(str(uid))
    assert (again, again.label, again.instance_value) == (uid, label, value)
    assert (uid.is_instance, uid.is_singleton) == (True, False)
    assert pickle.loads(pickle.dumps(uid)) == uid and hash(again) == hash(uid)


@given(labels)
def test_a_label_alone_is_a_singleton(label: str) -> None:
    uid = Uid.from_string(label)
    assert (str(uid), uid.label, uid.instance_value) == (label, label, None)
    assert (uid.is_instance, uid.is_singleton) == (False, True)
    assert uid == Uid.from_string(label) != Uid.instance(label)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "<1>"), (5, "<6>"), (1947, "<zz>"), (3889444765733088400, "<a2DjwEeX9Kb>")]
)
def test_the_digits_are_monarchs(value: int, text: str) -> None:
    assert str(Uid.instance_from_value(value)) == text
    assert Uid.from_string(text).instance_value == value


def test_the_number_tells_instances_apart_not_the_label() -> None:
    assert Uid.instance_from_value(1, "a") == Uid.instance_from_value(1, "b") != Uid.instance_from_value(2, "a")
    assert Uid.from_string("a") != Uid.from_string("b")
    assert Uid.instance("a") != Uid.instance("a")
    assert Uid.anonymous().label is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<",
        "<>",
        "a<>",
        "a b",
        "_x",
        "1a",
        "A",
        "a-",
        "a.b",
        "a:b",
        "ä",
        "<1>x",
        "a<0>",
        "a<zzzzzzzzzzzzz>",
        "a" * 64,
    ],
)
def test_what_is_no_uid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"label is|invalid uid"):
        Uid.from_string(text)


@given(st.text())
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert Uid.from_string(text) == Uid.from_string(str(Uid.from_string(text)))


@pytest.mark.parametrize("value", [-1, 2**64, "1", True, None])
def test_values_have_64_bits(value: object) -> None:
    with pytest.raises(ConfigError, match="value is"):
        Uid.instance_from_value(value)  # type: ignore[arg-type]


def test_a_uid_is_made_by_its_functions_only() -> None:
    with pytest.raises(TypeError, match=r"Uid\.instance"):
        Uid()


def test_a_proc_id_is_a_uid() -> None:
    proc = ProcId.from_string("trainer<6>")
    assert (str(proc), proc.label, proc.uid) == ("trainer<6>", "trainer", Uid.instance_from_value(5))
    assert proc == ProcId(Uid.instance_from_value(5, "other")) and proc != proc.uid
    assert pickle.loads(pickle.dumps(proc)) == proc
    with pytest.raises(TypeError, match="uid is a str"):
        ProcId("trainer")  # type: ignore[arg-type]
