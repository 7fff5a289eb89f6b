"""Plots the output of `compare.py` or `answers.py`: `python -m benchmarks.peers.plot peers.json docs/peers.svg`.

Steps: one panel per measure of all subjects, tokens per second at the median; a thin line marks the best sample.
Answers: tokens per second of all subjects over all prompts, then of the contenders by category. Plain SVG without
further packages. Pure except for `main`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.peers import figures
from benchmarks.peers.answer_figures import VLLM
from benchmarks.peers.figures import Results

_NAMES = {
    "ours": "Outrider",
    "transformers": "transformers",
    "vllm": "vLLM, eager",
    "vllm-compiled": "vLLM, compiled",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "ours-off": "Outrider, plain",
    "assisted": "transformers, assisted",
    "vllm-ngram": "vLLM, n-grams",
    "vllm-ngram-compiled": "vLLM, compiled, n-grams",
    "vllm-draft": "vLLM, our draft",
    "vllm-draft-compiled": "vLLM, compiled, our draft",
    "vllm-outrider": "vLLM, our plugin",
    "vllm-outrider-compiled": "vLLM, compiled, our plugin",
}
_STEPS, _ANSWERS = "outrider/peers/v1", "outrider/peer-answers/v1"
_OURS, _OTHERS, _INK, _FAINT = "#1f5fbf", "#a9b4c2", "#20262e", "#68727f"
_WIDTH, _LABELS, _VALUES = 720, 170, 120
_BAR, _GAP, _PANEL_GAP, _TITLE, _HEAD, _FOOT = 18, 6, 22, 24, 56, 18


@dataclass(frozen=True, slots=True)
class Bar:
    subject: str
    typical: float
    """Tokens per second: at the median of all samples, or over all answers."""
    best: float | None = None
    """Tokens per second at the best sample."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: list[Bar]


def panels(results: Results) -> list[Panel]:
    """Panels of the measures with a known number of tokens per sample: decoding and prefill."""
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


def answer_panels(summed: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """All subjects over all prompts; by category ours, assisted generation and the fastest vLLM."""
    rates = {name: about["tokens_per_second"] for name, about in summed.items()}
    found = [Panel("all prompts", [Bar(name, by_category["all"]) for name, by_category in rates.items()])]
    vllm = max((name for name in rates if name in VLLM), key=lambda name: rates[name]["all"], default="")
    contenders = [name for name in rates if name in ("ours", "assisted", vllm)]
    for category in rates["ours"]:
        if category != "all":
            title = category.replace("_", " ")
            found.append(Panel(title, [Bar(name, rates[name][category]) for name in contenders]))
    return found


def picture(outcome: Mapping[str, Any]) -> str:
    """The SVG. Raises ValueError when there is nothing to show."""
    if outcome.get("schema") == _ANSWERS:
        title = "Tokens a second of one stream, prefill included"
        about = f"{outcome['cpu']}, {outcome['cores']} cores, {outcome['at'][:10]}. The same model and prompts."
        return _picture(title, about, answer_panels(outcome["figures"]))
    shown = panels(outcome["ms"])
    if not shown:
        raise ValueError("ms: no decode or prefill was measured")
    about = f"{outcome['cpu']}, one core, {outcome['at'][:10]}. The bar is the median, the line the best sample."
    return _picture("Tokens a second, the same model and prompts", about, shown)


def _picture(title: str, about: str, shown: Sequence[Panel]) -> str:
    y, parts = _HEAD, []
    for panel in shown:
        parts.append(_panel(panel, y))
        y += _height(panel) + _PANEL_GAP
    height = y - _PANEL_GAP + _FOOT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            _text(16, 26, title, 16, _INK, "bold"),
            _text(16, 44, about, 11),
            *parts,
            "</svg>\n",
        ]
    )


def _height(panel: Panel) -> int:
    return _TITLE + len(panel.bars) * (_BAR + _GAP)


def _panel(panel: Panel, top: int) -> str:
    room = _WIDTH - _LABELS - _VALUES
    longest = max(bar.best or bar.typical for bar in panel.bars)
    lines = [_text(16, top + 14, panel.title, 13, _INK, "bold")]
    for number, bar in enumerate(panel.bars):
        lines += _bar(bar, top + _TITLE + number * (_BAR + _GAP), room / longest)
    return "\n".join(lines)


def _bar(bar: Bar, y: int, scale: float) -> list[str]:
    width, end = bar.typical * scale, (bar.best or bar.typical) * scale
    colour = _OURS if bar.subject == "ours" else _OTHERS
    middle = y + _BAR // 2
    lines = [
        _text(_LABELS - 8, middle + 4, _NAMES.get(bar.subject, bar.subject), 12, _INK, anchor="end"),
        f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
    ]
    if bar.best:
        lines += [
            f'<path d="M{_LABELS + width:.1f} {middle}H{_LABELS + end:.1f}" stroke="{_FAINT}"/>',
            f'<path d="M{_LABELS + end:.1f} {y + 4}V{y + _BAR - 4}" stroke="{_FAINT}"/>',
        ]
    return [*lines, _text(_LABELS + end + 8, middle + 4, _number(bar.typical), 12, _INK)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _text(
    x: float, y: float, text: str, size: int, colour: str = _FAINT, weight: str = "normal", anchor: str = "start"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
    return f'<text {where} fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description="What compare.py or answers.py wrote, as a picture.")
    parser.add_argument("json", type=Path, help="what --json wrote")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    options = parser.parse_args()
    outcome = json.loads(options.json.read_text())
    if outcome.get("schema") not in (_STEPS, _ANSWERS):
        parser.error(f"{options.json}: schema is {outcome.get('schema')!r}, not {_STEPS!r} or {_ANSWERS!r}")
    options.svg.write_text(picture(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
