"""What is said of the two cards, by Python and by doctor; test_rails.py changes their interfaces."""

from __future__ import annotations

from collections.abc import Callable

from monarch_rdma import doctor
from monarch_rdma.doctor import devices
from monarch_rdma.rdma import is_ibverbs_available, verbs


def test_both_devices_become_rails_by_their_ipv4_addresses() -> None:
    found = verbs.describe()
    assert found.built and not found.problem
    assert [(rail.name, rail.group, rail.mtu, rail.link_layer) for rail in found.rails] == [
        ("rxe0:1", 0, 4096, "Ethernet"),
        ("rxe1:1", 1, 4096, "Ethernet"),
    ]
    for rail, card in zip(found.rails, found.cards, strict=True):
        chosen = next(entry for entry in card.ports[0].gids if entry.index == rail.gid_index)
        assert (chosen.type, chosen.interface) == ("RoCE v2", f"rail{rail.group}")
        assert chosen.gid == rail.gid == f"::ffff:10.9.{rail.group}.1"
        assert card.transport == "RC" and card.max_qp > 0 and card.max_mr_size > 0


def test_a_device_that_is_gone_is_no_rail(whole_machine: Callable[[str], str]) -> None:
    whole_machine("rdma link delete rxe0")
    assert [rail.name for rail in verbs.describe().rails] == ["rxe1:1"]
    whole_machine("rdma link delete rxe1")
    found = verbs.describe()
    assert found.rails == () and found.problem
    assert not is_ibverbs_available()


def test_doctor_names_the_rails_and_their_addresses() -> None:
    said = doctor.table(devices.checks(), 120)  # the rest looks for torch, whose import takes a minute here
    for word in ("0 = rxe0:1, 1 = rxe1:1", "10.9.0.1", "10.9.1.1"):
        assert word in said
