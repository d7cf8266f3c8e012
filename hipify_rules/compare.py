"""How a CUDA name and a HIP name differ, by the facts of their headers (headers.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .headers import Fact

TYPES = ("integer", "enum", "float", "pointer", "record", "union", "function", "opaque")


class Sides:
    """Both sides' facts, and the comparison of one with the other."""

    def __init__(self, cuda: Mapping[str, Fact], hip: Mapping[str, Fact]) -> None:
        self.cuda, self.hip = cuda, hip
        self.types: dict[str, str] = {}  # CUDA types that have a counterpart

    def fact(self, side: Mapping[str, Fact], name: str) -> Fact | None:
        """What `name` is, through any macros that stand for another name."""
        fact = side.get(name)
        for _ in range(4):
            if fact is None or fact["is"] != "spelling":
                return fact
            fact = side.get(fact["of"])
        return None

    def is_type(self, cuda: str) -> bool:
        """Whether a CUDA name is a type's."""
        fact = self.fact(self.cuda, cuda)
        return fact is not None and fact["is"] in TYPES

    def kind(self, fact: Fact) -> str:
        if fact["is"] in TYPES:
            return "type"
        return "constant" if fact["is"] == "constant" else "function"

    def resolved(self, type_: str, side: Mapping[str, Fact]) -> str:
        """A type as HIP's headers have it, typedefs undone: what two types are compared by."""

        def one(found: re.Match[str]) -> str:
            name = found[0]
            if side is self.cuda and name in self.types:
                return self.resolved(self.types[name], self.hip)
            fact = side.get(name, {"is": ""})
            stands_for = fact.get("of") or (fact.get("to") if fact["is"] in TYPES else None)
            return self.resolved(stands_for, side) if stands_for else name

        return re.sub(r"[A-Za-z_]\w*", one, type_).replace(" const const", " const")

    def differ(self, cuda: str, hip: str) -> tuple[str, ...] | None:
        """How the two names differ; None if one is no counterpart of the other."""
        ours, theirs = self.fact(self.cuda, cuda), self.fact(self.hip, hip)
        if ours is None or theirs is None or self.kind(ours) != self.kind(theirs):
            return None
        if ours["is"] == "constant":
            return tuple(self._constants_differ(ours, theirs))
        if self.kind(ours) == "type":
            return self._types_differ(ours, theirs)
        return self._calls_differ(ours, theirs)

    def _constants_differ(self, ours: Fact, theirs: Fact) -> Iterator[str]:
        if ours["value"] != theirs["value"]:
            yield f"value {ours['value']} on CUDA, {theirs['value']} on HIP"
        mine, other = ours.get("enum"), theirs.get("enum")
        if mine in self.types and self.resolved(mine, self.cuda) != self.resolved(other or "int", self.hip):
            yield f"of type {mine} on CUDA, {other or 'int'} on HIP"

    def _types_differ(self, ours: Fact, theirs: Fact) -> tuple[str, ...] | None:
        if "opaque" in (ours["is"], theirs["is"]):  # only the pointer is for users
            return () if {ours["is"], theirs["is"]} <= {"opaque", "record"} else None
        mine, others = ours.get("fields", {}), theirs.get("fields", {})
        missing = [field for field in mine if field not in others]
        if ours["is"] == "record" and len(missing) * 2 > len(mine):
            return None  # another record of a like name
        found = []
        for what in ("is", "size", "align", "signed"):
            if ours.get(what) != theirs.get(what) and (what != "signed" or ours["is"] == theirs["is"]):
                found.append(f"{what} {ours.get(what)} on CUDA, {theirs.get(what)} on HIP")
        if missing:
            found.append(f"fields not in HIP: {', '.join(missing)}")
        if moved := [field for field in mine if field in others and mine[field][0] != others[field][0]]:
            found.append(f"fields elsewhere in HIP: {', '.join(moved)}")
        for field in (one for one in mine if one in others):
            one, other = mine[field][1], others[field][1]
            if self._plain(one, self.cuda) != self._plain(other, self.hip):
                found.append(f"field {field} is {one} on CUDA, {other} on HIP")
        return tuple(found)

    def _calls_differ(self, ours: Fact, theirs: Fact) -> tuple[str, ...] | None:
        if ours["is"] == "template":  # its types are whatever the call has: only their number can be told
            theirs_range = theirs["parameters"] if theirs["is"] == "template" else theirs.get("overloads", [99, 0])
            one, other = ("{} to {} arguments".format(*counts) for counts in (ours["parameters"], theirs_range))
            if theirs_range[1] < ours["parameters"][1]:
                return None
            return () if theirs_range[0] <= ours["parameters"][0] else (f"{one} on CUDA, {other} on HIP",)
        if theirs["is"] == "template":
            return None
        mine, others = ours["parameters"], theirs["parameters"]
        fewest = min(len(others) - theirs.get("optional", 0), *theirs.get("overloads", [99]))
        if not fewest <= len(mine) <= len(others):
            return None
        found: list[str] = []
        if (verdict := self._passes(ours["result"], theirs["result"])) is None:
            return None
        found += [f"result {verdict}"] if verdict else []
        for number, (one, other) in enumerate(zip(mine, others, strict=False), 1):
            if (verdict := self._passes(one, other)) is None:
                return None
            found += [f"parameter {number} {verdict}"] if verdict else []
        return tuple(found)

    def _passes(self, ours: str, theirs: str) -> str | None:
        """'' for the same type, how they differ for types that take the same values, None for others."""
        one, other = self.resolved(ours, self.cuda), self.resolved(theirs, self.hip)
        if one == other:
            return ""
        told = f"{ours} on CUDA, {theirs} on HIP"
        if one.replace(" const", "") == other.replace(" const", ""):
            return told
        if self._whole(one, self.cuda) and self._whole(other, self.hip):
            return told
        return None

    def _plain(self, type_: str, side: Mapping[str, Fact]) -> str:
        """A field's type as far as assigning to it goes: const, and which of two equal integers it is, aside."""
        resolved = self.resolved(type_, side).replace(" const", "")
        return {"unsigned long long": "unsigned long", "long long": "long"}.get(resolved, resolved)

    def _whole(self, resolved: str, side: Mapping[str, Fact]) -> bool:
        """Whether a type is a whole number's or an enum's."""
        fact = self.fact(side, resolved) or self.fact(self.hip, resolved)
        numbers = ("int", "unsigned int", "long", "unsigned long", "long long", "unsigned long long")
        return resolved in numbers or (fact is not None and fact["is"] in ("enum", "integer"))
