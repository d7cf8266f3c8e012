"""Drawings of tensors and their parts: rows of panels, rectangles in each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from .geometry import PlanError, Shape

__all__ = ["Drawing", "Panel", "Rectangle", "colours_of", "draw"]

_PANEL = 110  # the longer side of a whole tensor, in units of the image
_LEAST = 6  # the height of what has one row


@dataclass(frozen=True)
class Rectangle:
    """Of a plane of elements, with a text that is shown on it and a longer one when it is pointed at."""

    top: int
    left: int
    height: int
    width: int
    colour: str
    tip: str
    text: str = ""


Panel: TypeAlias = "tuple[str, Sequence[Rectangle]]"  # its title, and what is in it


class Drawing(str):
    """The text of an SVG image. Notebooks show it."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an image (.svg) or a page (.html). PlanError for another ending."""
        place = Path(path)
        if place.suffix not in (".svg", ".html"):
            raise PlanError(f"path is {str(place)!r}, but must end in .svg or .html")
        page = "<!doctype html>\n<meta charset='utf-8'>\n" if place.suffix == ".html" else ""
        place.write_text(page + self, encoding="utf-8")


def colours_of(ranks: Sequence[int]) -> dict[int, str]:
    """One for each rank, round the circle."""
    return {rank: f"hsl({i * 360 // len(ranks)},65%,62%)" for i, rank in enumerate(ranks)}


def draw(name: str, shape: Shape, rows: Iterable[tuple[str, Sequence[Panel]]]) -> Drawing:
    """Rows of panels, each of which has room for a tensor of `shape`; of more than two dimensions the last two."""
    height, width = (max(1, shape[-2]) if len(shape) > 1 else 1), (max(1, shape[-1]) if shape else 1)
    unit = _PANEL / max(height, width)
    step_x, step_y = max(70.0, width * unit + 14), height * unit + 34
    parts, columns, y = [], 0, 40.0
    for title, panels in rows:
        parts.append(f'<text x="8" y="{y + 12:.1f}" font-weight="bold">{escape(title)}</text>')
        columns = max(columns, len(panels))
        for i, (label, rectangles) in enumerate(panels):
            x = 70 + i * step_x
            parts.append(f'<text x="{x:.1f}" y="{y - 4:.1f}">{escape(label)}</text>')
            for one in rectangles:
                parts += _rectangle(one, x, y, unit, 0 if len(shape) > 1 else _LEAST)
        y += step_y
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {90 + columns * step_x:.0f} {y + 10:.0f}" '
    head += 'font-family="sans-serif" font-size="10">'
    title = f'<text x="8" y="16" font-weight="bold">{escape(name)} {escape(str(shape))}</text>'
    return Drawing("\n".join([head, title, *parts, "</svg>\n"]))


def _rectangle(one: Rectangle, x: float, y: float, unit: float, least: float) -> list[str]:
    left, top = x + one.left * unit, y + one.top * unit
    width, height = one.width * unit, max(one.height * unit, least)
    shape = (
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{one.colour}" '
        f'stroke="#333" stroke-width="0.4"><title>{escape(one.tip)}</title></rect>'
    )
    if not one.text or height < 9 or width < 6 * len(one.text):
        return [shape]
    middle = f'x="{left + width / 2:.2f}" y="{top + height / 2 + 3.5:.2f}"'
    return [shape, f'<text {middle} text-anchor="middle">{escape(one.text)}</text>']
