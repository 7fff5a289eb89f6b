"""Spans are sent where an endpoint is configured, and cost nothing where none is."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from outrider.telemetry.tracing import configured, open_tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_decide(environ: dict[str, str], wanted: bool) -> None:
    assert configured(environ) is wanted


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys; import outrider.gateway.generation.observer, outrider_controller.router.process; "
        "from outrider.telemetry.tracing import open_tracing; assert open_tracing('x', {}) is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "[]\n"


def test_asked_for_and_not_installed_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert open_tracing("x", ENDPOINT) is None
    assert "outrider[otel]" in caplog.text


@pytest.mark.parametrize(("protocol", "kind"), [("", ".grpc."), ("grpc", ".grpc."), ("http/protobuf", ".http.")])
def test_the_protocol_is_the_one_asked_for(protocol: str, kind: str) -> None:
    tracing = open_tracing("outrider-x", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert tracing is not None
    processor = tracing.provider._active_span_processor._span_processors[0]
    assert kind in type(processor.span_exporter).__module__  # type: ignore[attr-defined]
    assert tracing.provider.resource.attributes["service.name"] == "outrider-x"
    tracing.close()
