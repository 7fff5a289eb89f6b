"""What `compare.py --json` wrote, as a picture: `python loadtest/peers/plot.py peers.json docs/peers.svg`.

One panel for each measure that every subject was asked: tokens a second, at the median; a thin line marks the best
sample. Plain SVG by hand, so that nothing has to be installed. Pure but for `main`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import figures
from figures import Results

_NAMES = {
    "ours": "Outrider",
    "transformers": "transformers",
    "vllm": "vLLM, eager",
    "vllm-compiled": "vLLM, compiled",
}
_OURS, _OTHERS, _INK, _FAINT = "#1f5fbf", "#a9b4c2", "#20262e", "#68727f"
_WIDTH, _LABELS, _VALUES = 720, 130, 120
_BAR, _GAP, _PANEL_GAP, _TITLE, _HEAD, _FOOT = 18, 6, 22, 24, 56, 18


@dataclass(frozen=True, slots=True)
class Bar:
    subject: str
    typical: float
    """Tokens a second, at the median of all samples."""
    best: float


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: list[Bar]


def panels(results: Results) -> list[Panel]:
    """Of the measures whose samples give a known number of tokens: decoding, and prefill."""
    found: list[Panel] = []
    for measure, series in results.items():
        kind, _, count = measure.partition(" ")
        if kind not in ("decode", "prefill") or not count.isdigit():
            continue
        tokens = int(count)
        title = f"decode, {tokens} at once" if kind == "decode" else f"prefill of {tokens:,} tokens"
        bars = [
            Bar(name, tokens / figures.typical(rounds) * 1e3, tokens / figures.best(rounds) * 1e3)
            for name, rounds in series.items()
        ]
        found.append(Panel(title, bars))
    return found


def picture(outcome: Mapping[str, Any]) -> str:
    """The SVG. Raises ValueError when there is nothing to show."""
    shown = panels(outcome["ms"])
    if not shown:
        raise ValueError("ms: no decode or prefill was measured")
    y, parts = _HEAD, []
    for panel in shown:
        parts.append(_panel(panel, y))
        y += _height(panel) + _PANEL_GAP
    height = y - _PANEL_GAP + _FOOT
    about = f"{outcome['cpu']}, one core, {outcome['at'][:10]}. The bar is the median, the line the best sample."
    head = [_text(16, 26, "Tokens a second, the same model and prompts", 16, _INK, "bold"), _text(16, 44, about, 11)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *head,
            *parts,
            "</svg>\n",
        ]
    )


def _height(panel: Panel) -> int:
    return _TITLE + len(panel.bars) * (_BAR + _GAP)


def _panel(panel: Panel, top: int) -> str:
    room = _WIDTH - _LABELS - _VALUES
    longest = max(bar.best for bar in panel.bars)
    lines = [_text(16, top + 14, panel.title, 13, _INK, "bold")]
    for number, bar in enumerate(panel.bars):
        y = top + _TITLE + number * (_BAR + _GAP)
        width, best = (room * value / longest for value in (bar.typical, bar.best))
        colour = _OURS if bar.subject == "ours" else _OTHERS
        middle = y + _BAR // 2
        lines += [
            _text(_LABELS - 8, middle + 4, _NAMES.get(bar.subject, bar.subject), 12, _INK, anchor="end"),
            f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<path d="M{_LABELS + width:.1f} {middle}H{_LABELS + best:.1f}" stroke="{_FAINT}"/>',
            f'<path d="M{_LABELS + best:.1f} {y + 4}V{y + _BAR - 4}" stroke="{_FAINT}"/>',
            _text(_LABELS + best + 8, middle + 4, _number(bar.typical), 12, _INK),
        ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _text(
    x: float, y: float, text: str, size: int, colour: str = _FAINT, weight: str = "normal", anchor: str = "start"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
    return f'<text {where} fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description="What compare.py wrote, as a picture.")
    parser.add_argument("json", type=Path, help="what compare.py --json wrote")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    options = parser.parse_args()
    outcome = json.loads(options.json.read_text())
    if outcome.get("schema") != "outrider/peers/v1":
        parser.error(f"{options.json}: schema is {outcome.get('schema')!r}, not 'outrider/peers/v1'")
    options.svg.write_text(picture(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
