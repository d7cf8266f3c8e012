"""A plan for people: a table of what comes from where, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from .copies import Plan, TensorCopies
from .geometry import PlanError, Shape, TensorSpec, itemsize
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


def picture(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec], name: str, *, most: int = 16) -> str:
    """An SVG image of one tensor: above, what each source rank has; below, where each target rank gets its elements.

    Each source rank has a colour. Of tensors with more than two dimensions the first slice is drawn; of more than
    `most` ranks the first ones. PlanError where there is no tensor of this name.
    """
    for which, specs in (("source", source), ("target", target)):
        if name not in specs:
            raise PlanError(f"there is no {which} {name!r}")
    here, there = source[name].layout, target[name].layout
    one_source, one_target = {name: source[name]}, {name: target[name]}
    colours = {rank: f"hsl({i * 360 // len(here.ranks)},65%,62%)" for i, rank in enumerate(here.ranks.tolist())}
    rows = []
    for title, specs, ranks in (("source", one_source, here.ranks), ("target", one_target, there.ranks)):
        tensors = []
        for rank in ranks[:most].tolist():
            plan = make_plan(specs if title == "source" else one_source, specs, rank)
            tensors.append((f"rank {rank}", plan.tensors[0]))
        rows.append((title, tensors))
    return _svg(name, here.shape, rows, colours)


_Row = tuple[str, list[tuple[str, TensorCopies]]]


def _svg(name: str, shape: Shape, rows: list[_Row], colours: Mapping[int, str]) -> str:
    height, width = _plane(shape)
    unit = 110 / max(height, width)
    step_x, step_y = max(70.0, width * unit + 14), height * unit + 34
    parts = []
    for row, (title, tensors) in enumerate(rows):
        y = 40 + row * step_y
        parts.append(f'<text x="8" y="{y + 12:.1f}" font-weight="bold">{title}</text>')
        for i, (label, tensor) in enumerate(tensors):
            x = 70 + i * step_x
            parts.append(f'<text x="{x:.1f}" y="{y - 4:.1f}">{label}</text>')
            parts += [
                f'<rect x="{x + left * unit:.2f}" y="{y + top * unit:.2f}" width="{w * unit:.2f}" '
                f'height="{max(h * unit, 6 if len(shape) < 2 else 0):.2f}" fill="{colours[rank]}" stroke="#333" '
                f'stroke-width="0.4"><title>from rank {rank}</title></rect>'
                for rank, top, left, h, w in _rectangles(tensor)
            ]
    size = f"{90 + max(len(tensors) for _, tensors in rows) * step_x:.0f} {50 + len(rows) * step_y:.0f}"
    title = f'<text x="8" y="16" font-weight="bold">{escape(name)} {escape(str(shape))}</text>'
    body = "\n".join([title, *parts])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="10">'
    return f"{head}\n{body}\n</svg>\n"


def _plane(shape: Shape) -> tuple[int, int]:
    """Height and width of what is drawn of a tensor."""
    return (max(1, shape[-2]) if len(shape) > 1 else 1), (max(1, shape[-1]) if shape else 1)


def _rectangles(tensor: TensorCopies) -> list[tuple[int, int, int, int, int]]:
    """Source rank, top, left, height and width of what each copy fills in the local tensor."""
    copies, found = tensor.copies, []
    dims = len(copies.permutation)
    for row in range(len(copies)):
        if dims > 2 and copies.target_at[row, :-2].any():
            continue
        spans = [_spans(tensor, row, d) for d in range(max(0, dims - 2), dims)]
        spans = [[(0, 1)]] * (2 - len(spans)) + spans
        rank = int(copies.source[row])
        found += [(rank, top, left, h, w) for top, h in spans[0] for left, w in spans[1]]
    return found


def _spans(tensor: TensorCopies, row: int, dim: int) -> list[tuple[int, int]]:
    """Begin and length of the pieces of a copy in one dimension."""
    copies = tensor.copies
    columns = (copies.target_at, copies.size, copies.count, copies.target_step)
    at, size, count, step = (int(column[row, dim]) for column in columns)
    if count > _MOST_RECTANGLES:
        return [(at, (count - 1) * step + size)]
    return [(at + i * step, size) for i in range(count)]
