"""A bar chart as SVG, drawn by hand: it needs no library, and a page shows it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f6feb", "#8250df", "#bf8700", "#1a7f37")
_BAR, _GAP, _WIDTH, _LETTER = 14, 14, 520, 7.2
_STYLE = "font-family='sans-serif' font-size='12' fill='#57606a'"


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    values: Mapping[str, float]


def bars(title: str, rows: Sequence[Bar], line: float) -> str:
    """Horizontal bars, a group for each row; a vertical line stands at `line`."""
    most = max(line, *(value for row in rows for value in row.values.values())) * 1.1
    scale, names = _WIDTH / most, list(rows[0].values)
    left = 20 + round(_LETTER * max(len(row.name) for row in rows))
    parts, y = [_text(left, 16, title), *_legend(left, names)], 52
    for row in rows:
        middle = y + len(names) * _BAR / 2 + 4
        parts.append(_text(left - 8, middle, row.name, "end"))
        for number, name in enumerate(names):
            parts.append(_bar(left, y, row.values[name] * scale, row.values[name], _COLOURS[number % len(_COLOURS)]))
            y += _BAR
        y += _GAP
    x = left + line * scale
    parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='44' y2='{y}' stroke='#57606a' stroke-dasharray='4 3'/>")
    width = left + _WIDTH + 50
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {y}' width='{width}' height='{y}'>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='#ffffff'/>", *parts, "</svg>\n"])


def _legend(left: int, names: Sequence[str]) -> list[str]:
    found = []
    for number, name in enumerate(names):
        x = left + 110 * number
        found.append(f"<rect x='{x}' y='26' width='10' height='10' fill='{_COLOURS[number % len(_COLOURS)]}'/>")
        found.append(_text(x + 16, 36, name))
    return found


def _bar(left: int, y: float, length: float, value: float, colour: str) -> str:
    rect = f"<rect x='{left}' y='{y}' width='{length:.1f}' height='{_BAR - 2}' fill='{colour}'/>"
    return rect + _text(left + length + 5, y + 10, f"{value:.2f}")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {_STYLE}>{escape(text)}</text>"
