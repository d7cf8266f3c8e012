"""What is typed into monarch-rdma debug."""

from __future__ import annotations

import pytest

from monarch_rdma.errors import ConfigError
from monarch_rdma.tools import debug_commands as commands
from monarch_rdma.tools.debug_commands import Ranks, parse


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("l", commands.List()),
        (" list ", commands.List()),
        ("c", commands.Continue()),
        ("quit", commands.Quit()),
        ("h", commands.Help()),
        ("a actor 3", commands.Attach("actor", 3)),
        ("attach 'my actor' 0 123", commands.Attach("my actor", 0, 123)),
        ("cast actor ranks(1) n", commands.Cast("actor", Ranks(frozenset({1})), "n")),
        ("cast actor ranks(1, 4,6) p f(x)", commands.Cast("actor", Ranks(frozenset({1, 4, 6})), "p f(x)")),
        ("cast 'my actor' ranks (0:8:2) n", commands.Cast("my actor", Ranks(range(0, 8, 2)), "n")),
        (
            "cast actor ranks(host=0,gpu=1:4) p (1)",
            commands.Cast("actor", Ranks(coords={"host": frozenset({0}), "gpu": range(1, 4)}), "p (1)"),
        ),
        (
            "cast actor ranks(gpu=(3,6)) n",
            commands.Cast("actor", Ranks(coords={"gpu": frozenset({3, 6})}), "n"),
        ),
    ],
)
def test_lines(line: str, command: commands.Command) -> None:
    assert parse(line) == command


@pytest.mark.parametrize(
    "line",
    [
        "what",
        "attach",
        "attach actor",
        "attach actor one",
        "attach actor 1 2 3",
        "attach 'actor 1",
        "cast",
        "cast actor",
        "cast actor 1 n",
        "cast actor ranks(1)",
        "cast actor ranks(1",
        "cast actor ranks() n",
        "cast actor ranks(a) n",
        "cast actor ranks(1,) n",
        "cast actor ranks(0:4:0) n",
        "cast actor ranks(gpu) n",
        "cast actor ranks(gpu=) n",
        "cast actor ranks(gpu=1;host=2) n",
    ],
)
def test_wrong_lines_are_refused_with_a_sentence(line: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+ \w+"):
        parse(line)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("2", [2]),
        ("1,3,99", [1, 3]),
        ("1:3", [1, 2]),
        (":2", [0, 1]),
        ("4:", [4, 5]),
        ("::2", [0, 2, 4]),
        ("host=1", [3, 4, 5]),
        ("gpu=2", [2, 5]),
        ("host=0,gpu=1:", [1, 2]),
        ("gpu=(0,2),host=1", [3, 5]),
        ("rack=0", []),
    ],
)
def test_ranks_of_two_hosts_with_three_gpus(text: str, chosen: list[int]) -> None:
    command = parse(f"cast actor ranks({text}) n")
    assert isinstance(command, commands.Cast)
    found = [rank for rank in range(6) if command.ranks.has(rank, {"host": rank // 3, "gpu": rank % 3})]
    assert found == chosen
