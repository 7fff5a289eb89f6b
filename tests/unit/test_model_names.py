"""Names of models."""

from __future__ import annotations

import pytest
from outrider.model_names import HubModel, hub_model, served_name


@pytest.mark.parametrize(
    ("model", "hub", "served"),
    [
        ("smollm2-135m-instruct", None, "smollm2-135m-instruct"),
        ("/models/llama/", None, "llama"),
        ("./some.gguf", None, "some"),
        ("hf://Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B", "main"), "Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B@v1.0", HubModel("Qwen/Qwen3-8B", "v1.0"), "Qwen3-8B"),
    ],
)
def test_a_model_is_a_path_a_known_name_or_a_repository(model: str, hub: HubModel | None, served: str) -> None:
    assert (hub_model(model), served_name(model)) == (hub, served)


def test_only_a_commit_pins() -> None:
    assert HubModel("a/b", "0" * 40).pinned
    assert not HubModel("a/b", "main").pinned


@pytest.mark.parametrize(
    "model",
    ["hf://", "hf://Qwen", "hf://a/b/c", "hf://a/b@", "hf://a/..", "hf://../b", "hf://a/b@../../etc", "hf://a b/c"],
)
def test_what_is_no_repository_is_refused_by_the_fields_name(model: str) -> None:
    with pytest.raises(ValueError, match=r"^model: "):
        hub_model(model)
