"""What every test of this tier gets."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authorities")


@pytest.fixture(autouse=True)
def quick_clients(no_authorities: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients on loopback need none of the system's authorities. To read these takes each client 20 ms."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(no_authorities))
