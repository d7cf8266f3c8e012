"""A plan for people: a table of what comes from where, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .copies import Plan, TensorCopies
from .drawing import Drawing, Panel, Rectangle, colours_of, draw
from .geometry import PlanError, TensorSpec, itemsize
from .planner import make_plan

__all__ = ["picture", "table"]

_MOST_RECTANGLES = 64  # along one dimension of one copy; more are drawn as one


def table(plan: Plan, most: int = 20) -> str:
    """One line a tensor, those that move the most first, and a sum."""
    rows = sorted((_row(plan, tensor) for tensor in plan.tensors), key=lambda row: -row[0])
    lines: list[tuple[str, ...]] = [("tensor", "ranks", "copies", "messages", "bytes moved", "bytes here")]
    lines += [row[1] for row in rows[:most]]
    if len(rows) > most:
        lines.append((f"({len(rows) - most} more)", "", "", "", "", ""))
    total = (len(plan.bytes_from), plan.num_copies, plan.messages, plan.bytes_moved, plan.bytes_here)
    lines.append((f"rank {plan.rank}", *(f"{number:,}" for number in total)))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(n) for text, n in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _row(plan: Plan, tensor: TensorCopies) -> tuple[int, tuple[str, ...]]:
    copies, size = tensor.copies, itemsize(tensor.source_dtype)
    away = copies.source != plan.rank
    moved, here = (int(copies.elements[which].sum()) * size for which in (away, ~away))
    name = tensor.target + ("" if tensor.source == tensor.target else f" <- {tensor.source}")
    name += f" ({tensor.source_dtype} -> {tensor.target_dtype})" if tensor.is_cast else ""
    numbers = (np.unique(copies.source[away]).size, int(away.sum()), int(copies.messages[away].sum()), moved, here)
    return moved, (name, *(f"{number:,}" for number in numbers))


# --- pictures


def picture(
    source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec], name: str, *, most: int = 16
) -> Drawing:
    """An SVG image of one tensor: above, what each source rank has; below, where each target rank gets its elements.

    Each source rank has a colour. Of tensors with more than two dimensions the first slice is drawn; of more than
    `most` ranks the first ones. PlanError where there is no tensor of this name.
    """
    for which, specs in (("source", source), ("target", target)):
        if name not in specs:
            raise PlanError(f"there is no {which} {name!r}")
    here, there = source[name].layout, target[name].layout
    one_source, one_target = {name: source[name]}, {name: target[name]}
    colours = colours_of(here.ranks.tolist())
    rows: list[tuple[str, list[Panel]]] = []
    for title, specs, ranks in (("source", one_source, here.ranks), ("target", one_target, there.ranks)):
        panels: list[Panel] = []
        for rank in ranks[:most].tolist():
            plan = make_plan(specs if title == "source" else one_source, specs, rank)
            panels.append((f"rank {rank}", _rectangles(plan.tensors[0], colours)))
        rows.append((title, panels))
    return draw(name, here.shape, rows)


def _rectangles(tensor: TensorCopies, colours: Mapping[int, str]) -> list[Rectangle]:
    """What each copy fills in the local tensor."""
    copies, found = tensor.copies, []
    dims = len(copies.permutation)
    for row in range(len(copies)):
        if dims > 2 and copies.target_at[row, :-2].any():
            continue
        spans = [_spans(tensor, row, d) for d in range(max(0, dims - 2), dims)]
        spans = [[(0, 1)]] * (2 - len(spans)) + spans
        rank = int(copies.source[row])
        found += [
            Rectangle(top, left, h, w, colours[rank], f"from rank {rank}")
            for top, h in spans[0]
            for left, w in spans[1]
        ]
    return found


def _spans(tensor: TensorCopies, row: int, dim: int) -> list[tuple[int, int]]:
    """Begin and length of the pieces of a copy in one dimension."""
    copies = tensor.copies
    columns = (copies.target_at, copies.size, copies.count, copies.target_step)
    at, size, count, step = (int(column[row, dim]) for column in columns)
    if count > _MOST_RECTANGLES:
        return [(at, (count - 1) * step + size)]
    return [(at + i * step, size) for i in range(count)]
