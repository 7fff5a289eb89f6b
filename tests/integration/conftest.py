"""What every test of this tier gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import EmbeddedServer


@pytest.fixture(scope="session")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authorities")


@pytest.fixture(autouse=True)
def quick_clients(no_authorities: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients on loopback need none of the system's authorities. To read these takes each client 20 ms."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(no_authorities))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A metadata store of the test's own. Without persistence: a restart loses everything."""
    with EmbeddedServer.start(tmp_path / "r") as server:
        yield server
