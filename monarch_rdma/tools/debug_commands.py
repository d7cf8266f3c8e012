"""The lines that people type into `monarch-rdma debug`, read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError

__all__ = ["HELP", "Attach", "Cast", "Command", "Continue", "Help", "List", "Quit", "Ranks", "parse"]

HELP = """\
  list                            what waits at a breakpoint
  attach ACTOR RANK [PID]         talk to pdb there; `detach` or Ctrl-D leaves it waiting
  cast ACTOR ranks(...) COMMAND   one line for pdb on several ranks:
                                  ranks(1), ranks(1,4,6), ranks(0:8:2), ranks(host=0,gpu=1:4), ranks(gpu=(3,6))
  continue                        clear all breakpoints and let everything go on
  quit                            leave; what waits goes on waiting
An ACTOR with spaces in its name goes in quotes."""

_NUMBERS = re.compile(r"[0-9]+(,[0-9]+)*")
_RANGE = re.compile(r"([0-9]*):([0-9]*)(?::([0-9]+))?")
_DIMENSION = re.compile(r"(\w+)=(\([0-9,]+\)|[0-9:]+)(?:,|$)")
_CAST = re.compile(r"(?P<actor>\"[^\"]+\"|'[^']+'|\S+)\s+ranks\s*\(")


@dataclass(frozen=True)
class List: ...


@dataclass(frozen=True)
class Continue: ...


@dataclass(frozen=True)
class Quit: ...


@dataclass(frozen=True)
class Help: ...


@dataclass(frozen=True)
class Attach:
    actor: str
    rank: int
    pid: int | None = None


@dataclass(frozen=True)
class Ranks:
    """`numbers`: of ranks, or None for any; `coords`: those that each named dimension may have."""

    numbers: frozenset[int] | range | None = None
    coords: Mapping[str, frozenset[int] | range] = field(default_factory=dict)

    def has(self, rank: int, coords: Mapping[str, int]) -> bool:
        if self.numbers is not None and rank not in self.numbers:
            return False
        return all(name in coords and coords[name] in wanted for name, wanted in self.coords.items())


@dataclass(frozen=True)
class Cast:
    actor: str
    ranks: Ranks
    line: str


Command = List | Continue | Quit | Help | Attach | Cast

_PLAIN: dict[str, Command] = {
    **dict.fromkeys(("l", "list"), List()),
    **dict.fromkeys(("c", "continue"), Continue()),
    **dict.fromkeys(("q", "quit"), Quit()),
    **dict.fromkeys(("h", "help", "?"), Help()),
}


def parse(line: str) -> Command:
    """Raises ConfigError, saying what was wrong."""
    line = line.strip()
    if line in _PLAIN:
        return _PLAIN[line]
    word, _, rest = line.partition(" ")
    if word in ("a", "attach"):
        return _attach(rest)
    if word == "cast":
        return _cast(rest.strip())
    raise ConfigError(f"there is no command {word!r}; help lists them")


def _attach(rest: str) -> Attach:
    try:
        actor, rank, *pid = shlex.split(rest)
        return Attach(actor, int(rank), *map(int, pid))
    except (ValueError, TypeError):
        raise ConfigError(f"attach takes ACTOR RANK [PID], not {rest!r}") from None


def _cast(rest: str) -> Cast:
    match = _CAST.match(rest)
    end = _closing(rest, match.end()) if match is not None else -1
    if match is None or end < 0 or not rest[end + 1 :].strip():
        raise ConfigError(f"cast takes ACTOR ranks(...) COMMAND, not {rest!r}")
    return Cast(match["actor"].strip("\"'"), _ranks(rest[match.end() : end]), rest[end + 1 :].strip())


def _closing(text: str, start: int) -> int:
    """Where the parenthesis ends that was opened before `start`; -1 where it does not."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return -1


def _ranks(text: str) -> Ranks:
    bare = text.replace(" ", "")
    if "=" not in bare:
        return Ranks(numbers=_numbers(bare, text))
    coords, at = {}, 0
    while at < len(bare):
        match = _DIMENSION.match(bare, at)
        if match is None:
            raise ConfigError(f"ranks({text}) is not a list of dimension=coordinates")
        coords[match[1]] = _numbers(match[2].strip("()"), text)
        at = match.end()
    return Ranks(coords=coords)


def _numbers(bare: str, text: str) -> frozenset[int] | range:
    if _NUMBERS.fullmatch(bare):
        return frozenset(map(int, bare.split(",")))
    match = _RANGE.fullmatch(bare)
    if match is None or match[3] == "0":
        raise ConfigError(f"ranks({text}) is neither a number, nor a list such as 1,4, nor a range such as 0:8:2")
    return range(int(match[1] or 0), int(match[2] or 1 << 62), int(match[3] or 1))
