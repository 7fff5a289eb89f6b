"""The picture of a comparison."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from benchmarks.peers import plot

SVG = "{http://www.w3.org/2000/svg}"
OUTCOME: dict[str, Any] = {
    "cpu": "A <CPU>",
    "at": "2026-01-02T03:04Z",
    "ms": {
        "decode 1": {"ours": [[20.0, 25.0], [25.0, 30.0]], "vllm": [[50.0, 50.0], [50.0, 50.0]]},
        "prefill 1000": {"ours": [[2000.0]], "vllm": [[1000.0]]},
        "verify 5": {"one": [[1.0]], "many": [[1.0]]},
    },
}


def test_bars_are_tokens_a_second_at_the_median_and_at_best() -> None:
    decode, prefill = plot.panels(OUTCOME["ms"])
    assert decode == plot.Panel("decode, 1 at once", [plot.Bar("ours", 40, 50), plot.Bar("vllm", 20, 20)])
    assert [bar.typical for bar in prefill.bars] == [500, 1000]


def test_a_bar_is_as_long_as_its_number_within_its_panel() -> None:
    root = ET.fromstring(plot.picture(OUTCOME))
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect")][1:]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert widths[3] == pytest.approx(2 * widths[2], abs=0.2)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "Outrider" in texts and "vLLM, eager" in texts and "1000" in texts
    assert any("A <CPU>" in str(text) for text in texts)


def test_nothing_goes_beyond_the_picture() -> None:
    root = ET.fromstring(plot.picture(OUTCOME))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(float(t.attrib["x"]) < width and float(t.attrib["y"]) < height for t in root.iter(f"{SVG}text"))


def test_a_comparison_without_a_common_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="ms"):
        plot.picture({**OUTCOME, "ms": {"verify 5": {"one": [[1.0]]}}})
