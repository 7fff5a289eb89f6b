"""No tenant sees another's cached prefixes."""

from __future__ import annotations

import pytest

from tests.soak.prefix_probe import _NEW, _OWN, _PRIMED, probe

pytestmark = pytest.mark.timeout(300)


async def test_a_prompt_that_another_tenant_has_asked_is_as_new_as_any() -> None:
    """`python -m tests.soak prefix-probe` compares times as well."""
    probed = await probe(num_probes=40, seed=1)
    assert sum(probed.cached_tokens[_PRIMED]) == sum(probed.cached_tokens[_NEW]) == 0
    assert min(probed.cached_tokens[_OWN]) > 0
