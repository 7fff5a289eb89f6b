"""Clusters and stacks of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stacks that run say so."""
    for name in ("CONTEXT", "CONTROL", "GATEWAY", "MODEL", "OPERATOR_TOKEN", "API_KEY", "TLS_DIR", "GATEWAY_CA"):
        monkeypatch.delenv(f"OUTRIDER_{name}", raising=False)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTRIDER_CONTEXTS_FILE", str(tmp_path / "config" / "config.yaml"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where clusters are named."""
    return tmp_path / "config" / "config.yaml"
