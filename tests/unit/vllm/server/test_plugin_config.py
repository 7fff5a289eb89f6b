"""The plugin's configuration: each field that is at fault is named."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from outrider.vllm.server.plugin_config import PluginConfig


def config(**given: Any) -> PluginConfig:
    return PluginConfig.of({"outrider": given})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"draft": ["127.0.0.1:9000"]}, "additional_config.outrider.draft: there is no such option"),
        ({"drafts": ["127.0.0.1"]}, "additional_config.outrider.drafts.0: "),
        ({"drafts": "127.0.0.1:9000"}, "additional_config.outrider.drafts: "),
        ({"lookups": ["prediction"]}, "additional_config.outrider.lookups.0: there are ngram, suffix"),
        ({"max_draft_tokens": -1}, "additional_config.outrider.max_draft_tokens: "),
        ({"row_price": float("nan")}, "additional_config.outrider.row_price: "),
        ({"tenants": {"a": {"cap": 1}}}, "additional_config.outrider.tenants.a.cap: there is no such option"),
        ({"tenants": {"a": {"keys": ["sk-secret"]}}}, "additional_config.outrider.tenants.a.keys.0: "),
    ],
)
def test_a_fault_names_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=r"additional_config") as raised:
        config(**given)
    assert str(raised.value).startswith(field)
    assert "sk-secret" not in str(raised.value)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"additional_config\.outrider"):
        PluginConfig.of({"outrider": []})


def test_a_vllm_without_a_configuration_has_the_defaults() -> None:
    assert PluginConfig.of({}) == PluginConfig.of({"other": 1}) == PluginConfig()


def test_a_tenant_has_its_own_cap_or_that_of_all() -> None:
    made = config(
        max_draft_tokens=3, tenants={"off": {"max_draft_tokens": 0}, "gold": {"max_draft_tokens": 8}, "x": {}}
    )
    assert [made.cap_of(name) for name in ("off", "gold", "x", "stranger", "")] == [0, 8, 3, 3, 3]
    # What the control plane is told, with the rest under the empty name.
    assert made.caps == {"off": 0, "gold": 8, "x": 3, "": 3}


def test_a_tenant_is_found_by_its_key() -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    made = config(tenants={"gold": {"keys": [digest]}, "other": {}})
    assert made.tenant_with("sk-1") == "gold"
    assert made.tenant_with("sk-2") == made.tenant_with("") == made.tenant_with(digest) == ""
