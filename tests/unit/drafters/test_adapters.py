"""Adapters: what the engine makes of them, and whose requests draft with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.drafters import load_drafter
from outrider.drafters.adapters import owned_adapters
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.adapters import base_of, read_adapter, save_adapter
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.testing.tiny import tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine.variants import slow_but_the_best

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEXTS = ([3, 9, 27, 81, 12, 5], [200, 100, 50, 25], [7] * 20, [60, 61, 62])
FORMS = [
    ("transformers", "float32", "auto"),
    *(pytest.param("native", "bfloat16", *one.values, marks=one.marks) for one in slow_but_the_best()),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def adapter(path: Path, base: Path, seed: int, rank: int = 4, modules: tuple[str, ...] = ALL) -> Path:
    """A loud one."""
    drawn = torch.Generator().manual_seed(seed)
    matrices = {
        name: (
            torch.randn(rank, module.in_features, generator=drawn) * 0.3,
            torch.randn(module.out_features, rank, generator=drawn) * 0.3,
        )
        for name, module in model_of(base).named_modules()
        if name.rpartition(".")[2] in modules
    }
    save_adapter(path, matrices, base=str(base), alpha=rank / 2)
    return path


def merged(base: Path, path: Path | None) -> Any:
    """transformers' model with W + B A · alpha / rank in the place of W."""
    model, config = model_of(base), {} if path is None else json.loads((path / "adapter_config.json").read_text())
    stored = {} if path is None else load_file(path / "adapter_model.safetensors")
    for name, a in stored.items():
        if name.endswith(".lora_A.weight"):
            b = stored[name.replace("lora_A", "lora_B")]
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += b.float() @ a.float() * config["lora_alpha"] / config["r"]
    return model


def together(engine: Engine, numbers: tuple[int, ...]) -> list[Tensor]:
    """Logits of the texts in one batch."""
    rows = []
    for text, number in zip(TEXTS, numbers, strict=True):
        sequence = engine.kv.open([])
        sequence.adapter = number
        rows.append(Row(sequence, text, len(text)))
    return list(engine.forward(rows).split([len(text) for text in TEXTS]))


@pytest.mark.parametrize(("execution", "dtype", "variant"), FORMS)
def test_each_sequence_of_a_batch_has_the_logits_of_its_adapter_merged_into_the_weights(
    tiny: Path, tmp_path: Path, execution: str, dtype: str, variant: str
) -> None:
    paths = [adapter(tmp_path / "1", tiny, 1), adapter(tmp_path / "2", tiny, 2, 6, ("q_proj", "v_proj", "up_proj"))]
    config = EngineConfig(dtype=dtype, execution=execution, native_variant=variant, num_blocks=32)
    engine = load_engine(tiny, config)
    alone = together(engine, (-1,) * 4)
    engine.adapt([read_adapter(path) for path in paths])
    found = together(engine, (0, -1, 1, 0))
    tolerance = 1e-4 if dtype == "float32" else 0.03
    for number, text, logits in zip((0, -1, 1, 0), TEXTS, found, strict=True):
        with torch.no_grad():
            wanted = merged(tiny, None if number < 0 else paths[number])(input_ids=torch.tensor([text])).logits[0]
        assert (logits - wanted).norm() < tolerance * wanted.norm()
    assert torch.equal(found[1], alone[1])
    assert (found[0] - alone[0]).norm() > 0.3 * alone[0].norm()


def test_peft_reads_an_adapter_of_ours_and_an_engine_reads_one_of_peft(tiny: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ours = adapter(tmp_path / "ours", tiny, 1)
    theirs = peft.PeftModel.from_pretrained(model_of(tiny), ours)
    theirs.save_pretrained(tmp_path / "theirs")
    engine = load_engine(tiny, EngineConfig(dtype="float32", execution="transformers", num_blocks=32))
    for path in (ours, tmp_path / "theirs"):
        engine.adapt([read_adapter(path)])
        with torch.no_grad():
            wanted = theirs(input_ids=torch.tensor([TEXTS[0]])).logits[0]
        torch.testing.assert_close(together(engine, (0, -1, 0, 0))[0], wanted, rtol=1e-3, atol=1e-3)


def opening(tenant: str) -> SequenceSpec:
    params = SamplingParams(temperature=0.0)
    prompt, salt = tuple(TEXTS[0]), tenant.encode()
    speculation = Speculation(6)
    return SequenceSpec(prompt, params, VerificationMode.GREEDY, speculation=speculation, salt=salt, tenant=tenant)


def drafts(drafter: Any, tenants: list[str]) -> dict[str, list[int]]:
    sequences = [drafter.open(opening(tenant)) for tenant in tenants]
    found = {tenant: one.guess() for tenant, one in zip(tenants, drafter.draft(sequences), strict=True)}
    for sequence in sequences:
        drafter.close(sequence)
    return found


def test_only_its_tenant_drafts_with_an_adapter_and_nobody_once_its_files_are_erased(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.adapters._LOOK_S", 0.0)
    engine = EngineConfig(num_blocks=64)
    held = {name: adapter(tmp_path / name, tiny, seed) for seed, name in enumerate(("acme", "bolt"))}
    base = drafts(load_drafter(tiny, engine=engine), [""])[""]
    alone = {name: drafts(load_drafter(path, engine=engine), [""])[""] for name, path in held.items()}
    assert len({tuple(one) for one in (base, *alone.values())}) == 3
    drafter = load_drafter(tiny, engine=engine, adapters=owned_adapters(tmp_path))
    assert drafts(drafter, ["acme", "cole", "bolt", ""]) == {**alone, "cole": base, "": base}
    (held["acme"] / "adapter_config.json").unlink()
    assert drafts(drafter, ["acme", "bolt"]) == {"acme": base, "bolt": alone["bolt"]}


def test_an_adapter_is_of_the_tenant_whose_samples_made_it_else_of_its_directory_s_name(
    tiny: Path, tmp_path: Path
) -> None:
    made, other = adapter(tmp_path / "all" / "acme-1", tiny, 1), adapter(tmp_path / "all" / "bolt", tiny, 2)
    (made / "recipe.json").write_text(json.dumps({"config": {"samples_of": "acme"}}))
    (tmp_path / "all" / "gone").symlink_to(tmp_path / "erased")
    assert owned_adapters(tmp_path / "all") == {"acme": made, "bolt": other}
    assert owned_adapters(made) == {"acme": made}
    adapter(tmp_path / "all" / "acme", tiny, 3)
    with pytest.raises(ValueError, match="both of acme"):
        owned_adapters(tmp_path / "all")


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, _: config.update(use_dora=True), "use_dora: True is not supported"),
        (lambda config, _: config.update(modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda config, _: config.update(layer_replication=[[0, 2], [0, 2]]), "layer_replication"),
        (lambda config, _: config.update(alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
        (lambda config, _: config.update(r=5), r"\[5, inputs\]"),
        (lambda config, _: config.update(base_model_name_or_path=""), "base_model_name_or_path: names no model"),
        (lambda _, stored: stored.update(more=torch.ones(1)), "more: is no part of a plain LoRA"),
        (lambda _, stored: stored.clear(), "no tensor: is no part of a plain LoRA"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_its_field(
    tiny: Path, tmp_path: Path, change: Change, message: str
) -> None:
    path = adapter(tmp_path / "one", tiny, 1)
    file, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    config, stored = json.loads(file.read_text()), load_file(weights)
    change(config, stored)
    file.write_text(json.dumps(config))
    save_file(stored, weights)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(path), base_of(path)


@pytest.mark.parametrize(("execution", "dtype", "variant"), FORMS[:2])
def test_an_adapter_of_another_model_is_refused(
    tiny: Path, tmp_path: Path, execution: str, dtype: str, variant: str
) -> None:
    other = adapter(tmp_path / "other", tiny_checkpoint(tmp_path / "wide", intermediate_size=256), 1)
    config = EngineConfig(dtype=dtype, execution=execution, native_variant=variant, num_blocks=8)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.\w+_proj: the model has no such"):
        load_engine(tiny, config).adapt([read_adapter(other)])
