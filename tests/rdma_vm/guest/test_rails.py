"""The choice of rails beside what pyverbs and the kernel say, as interfaces get and lose their addresses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from rails import BOTH, present, until

from monarch_rdma import config
from monarch_rdma.rdma import verbs


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)


def reason(card: str) -> str:
    return next(one.ports[0].reason for one in verbs.describe().cards if one.name == card)


@pytest.fixture(autouse=True)
def interfaces_as_they_were() -> Iterator[None]:
    until(lambda: present() == BOTH)
    yield
    for rail, address in BOTH.values():
        ip("addr", "flush", "dev", f"rail{rail}", "scope", "global")
        ip("link", "set", f"rail{rail}", "up")
        ip("addr", "add", f"{address.removeprefix('::ffff:')}/24", "dev", f"rail{rail}")
    until(lambda: present() == BOTH)


def test_pyverbs_sees_the_same() -> None:
    device = pytest.importorskip("pyverbs.device", reason="pyverbs of the distribution is for another Python than this")
    for card in verbs.describe().cards:
        with device.Context(name=card.name) as context:
            port, limits = context.query_port(1), context.query_device()
            assert (card.max_qp, card.max_sge, card.max_mr_size) == (limits.max_qp, limits.max_sge, limits.max_mr_size)
            assert card.ports[0].mtu == 128 << port.active_mtu
            assert {entry.index for entry in card.ports[0].gids} == {
                entry.gid_index for entry in context.query_gid_table(port.gid_tbl_len)
            }


def test_a_rail_that_comes_back_has_its_number_again() -> None:
    ip("link", "set", "rail0", "down")
    until(lambda: present() == {"rxe1:1": BOTH["rxe1:1"]})  # rail 1 is still rail 1
    ip("link", "set", "rail0", "up")
    until(lambda: present()["rxe0:1"][0] == 0)


def test_addresses_that_come_and_go_are_followed() -> None:
    ip("addr", "add", "2001:db8::5/64", "dev", "rail1", "nodad")
    ip("addr", "del", f"{BOTH['rxe1:1'][1].removeprefix('::ffff:')}/24", "dev", "rail1")
    until(lambda: present()["rxe1:1"][1] == "2001:db8::5")
    ip("addr", "del", "2001:db8::5/64", "dev", "rail1")
    until(lambda: present()["rxe1:1"][1].startswith("fe80::"))
    assert "one Ethernet segment only" in reason("rxe1")


def test_an_entry_of_the_table_and_a_card_can_be_asked_for() -> None:
    with config.configured(verbs_devices="rxe1", verbs_gid_index=0):
        assert list(present()) == ["rxe1:1"]
        assert present()["rxe1:1"][1].startswith("fe80::")
    with config.configured(verbs_devices="mlx5_0"):
        assert verbs.describe().problem == "option verbs_devices = mlx5_0: there is no mlx5_0; here are rxe0, rxe1"
    with config.configured(verbs_gid_index=99):
        assert "option verbs_gid_index = 99: no port" in verbs.describe().problem


def test_a_process_that_may_not_open_the_cards_is_told_so() -> None:
    code = "import os\nfrom monarch_rdma.rdma import verbs\nos.setuid(65534)\nprint(verbs.describe().problem)"
    modes = {path: os.stat(path).st_mode for path in ("/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1")}
    try:
        for path in modes:
            os.chmod(path, 0o600)
        done = subprocess.run(["python", "-c", code], capture_output=True, text=True, check=True, timeout=100)
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode)
    for number in (0, 1):
        assert f"rxe{number}: ibv_open_device of rxe{number}: " in done.stdout
        assert f"/dev/infiniband/uverbs{number}: Permission denied (in a container: docker" in done.stdout
