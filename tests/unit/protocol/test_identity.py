"""What every process says of itself is said in one way."""

from __future__ import annotations

import re
from importlib.metadata import version

from outrider.protocol.identity import new_worker_id, package_version


def test_a_worker_id_names_the_role_and_is_another_at_every_start() -> None:
    assert re.fullmatch(r"draft-[0-9a-f]{12}", new_worker_id("draft"))
    assert new_worker_id("draft") != new_worker_id("draft")


def test_the_release_is_that_of_the_installed_distribution() -> None:
    assert package_version() == version("outrider")
