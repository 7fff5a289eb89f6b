"""Quantized checkpoints of the field: written here as their formats say, served as the weights that they mean."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import CheckpointError, Engine, EngineConfig, Row, weights_revision
from outrider.engine.checkpoints import packed_weights
from outrider.engine.checkpoints.quantization import Float8Linear, Int8Linear
from outrider.engine.loading import loader
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.memory import DoesNotFit, count_linear, kv_blocks
from outrider.local import Speculator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine.test_supported_models import MODELS, greedy, made

PROMPT = [random.Random(i).randrange(3, 250) for i in range(60)]
Written = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors, and the weight that they mean, [outputs, inputs]."""
ByScheme = Callable[[str], tuple[Path, Path]]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """[rows, columns] of unsigned numbers → words of 32 bits along the columns, the first in the lowest bits."""
    rows, per_word = numbers.tolist(), 32 // bits
    words = [
        [
            sum(number << bits * place for place, number in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        for row in rows
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def drawn(rng: torch.Generator, bits: int, inputs: int, outputs: int) -> Tensor:
    return torch.randint(0, 1 << bits, (inputs, outputs), generator=rng)


def scales(rng: torch.Generator, *shape: int) -> Tensor:
    return ((torch.rand(shape, generator=rng) + 0.5) * 0.06).half()


def gptq(rng: torch.Generator, outputs: int, inputs: int, scheme: dict[str, Any]) -> Written:
    bits, size = scheme["bits"], scheme["group_size"]
    groups = 1 if size < 0 else inputs // size
    numbers, scale = drawn(rng, bits, inputs, outputs), scales(rng, groups, outputs)
    # Symmetric weights have the middle as zero. What is stored is one less.
    least = torch.full((groups, outputs), (1 << bits - 1) - 1)
    zeros = least if scheme["sym"] else torch.randint(0, (1 << bits) - 1, least.shape, generator=rng)
    group = torch.arange(inputs) // (inputs // groups)
    if scheme["desc_act"]:
        group = group[torch.randperm(inputs, generator=rng)]
    weight = torch.stack([(numbers[i] - (zeros[group[i]] + 1)) * scale[group[i]].float() for i in range(inputs)], 1)
    tensors = {"qweight": packed(numbers.T, bits).T, "qzeros": packed(zeros, bits), "scales": scale}
    return {**tensors, "g_idx": group.int()}, weight


def awq(rng: torch.Generator, outputs: int, inputs: int, scheme: dict[str, Any]) -> Written:
    groups = inputs // scheme["group_size"]
    numbers, zeros, scale = drawn(rng, 4, inputs, outputs), drawn(rng, 4, groups, outputs), scales(rng, groups, outputs)

    def words(values: Tensor) -> Tensor:
        # The k-th number of a word is that of output 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
        order = [at + place for at in range(0, outputs, 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
        return packed(values[:, order], 4)

    of = [i * groups // inputs for i in range(inputs)]
    weight = torch.stack([(numbers[i] - zeros[of[i]]) * scale[of[i]].float() for i in range(inputs)], 1)
    return {"qweight": words(numbers), "qzeros": words(zeros), "scales": scale}, weight


def compressed(rng: torch.Generator, outputs: int, inputs: int, scheme: dict[str, Any]) -> Written:
    form = scheme["config_groups"]["group_0"]["weights"]
    bits, strategy = form["num_bits"], form["strategy"]
    groups = inputs // form["group_size"] if strategy == "group" else 1
    scale = scales(rng, 1 if strategy == "tensor" else outputs, groups).float()
    spread = scale.repeat_interleave(inputs // groups, 1).expand(outputs, inputs)
    if strategy == "block":
        rows, columns = form["block_structure"]
        scale = scales(rng, -(-outputs // rows), -(-inputs // columns)).float()
        spread = torch.stack([scale[i // rows, torch.arange(inputs) // columns] for i in range(outputs)])
    if form["type"] == "float":
        # Of mean size 1, so that the model is as loud as the others.
        numbers = torch.randn(outputs, inputs, generator=rng).mul(4).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * spread
    half = 1 << bits - 1
    signed = drawn(rng, bits, outputs, inputs) - half
    if scheme["format"] == "int-quantized":
        return {"weight": signed.to(torch.int8), "weight_scale": scale * 0.05}, signed * spread * 0.05
    tensors = {"weight_packed": packed(signed + half, bits), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor([outputs, inputs])
    if form["symmetric"]:
        return tensors, signed * spread
    zeros = drawn(rng, bits, outputs, groups) - half
    tensors["weight_zero_point"] = packed((zeros + half).T, bits).T
    return tensors, (signed - zeros.repeat_interleave(inputs // groups, 1)) * spread


def gptq_scheme(bits: int = 4, group_size: int = 32, *, desc_act: bool = False, sym: bool = True) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym}


def compressed_scheme(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


Write = Callable[[torch.Generator, int, int, dict[str, Any]], Written]
SCHEMES: dict[str, tuple[Write, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, gptq_scheme()),
    "gptq, one group": (gptq, gptq_scheme(group_size=-1)),
    "gptq, order of activations": (gptq, gptq_scheme(group_size=16, desc_act=True)),
    "gptq, asymmetric": (gptq, gptq_scheme(sym=False)),
    "gptq, 8 bits": (gptq, gptq_scheme(8, desc_act=True, sym=False)),
    "int4": (compressed, compressed_scheme("pack-quantized", num_bits=4, strategy="group", group_size=16)),
    "int4, asymmetric": (
        compressed,
        compressed_scheme("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "int4, rows": (compressed, compressed_scheme("pack-quantized", num_bits=4)),
    "int8": (compressed, compressed_scheme("int-quantized")),
    "int8, groups": (compressed, compressed_scheme("int-quantized", strategy="group", group_size=32)),
    "fp8": (compressed, compressed_scheme("float-quantized", type="float")),
    "fp8, blocks": (
        compressed,
        compressed_scheme("float-quantized", type="float", strategy="block", block_structure=[48, 40]),
    ),
    "fp8, one scale": (compressed, compressed_scheme("float-quantized", type="float", strategy="tensor")),
}


@pytest.fixture(scope="module")
def by_scheme(tmp_path_factory: pytest.TempPathFactory) -> ByScheme:
    """The checkpoints of a scheme, written once for all tests, which only read them."""
    return cache(lambda name: written(tmp_path_factory.mktemp("model"), name))


@pytest.fixture(scope="module", params=SCHEMES)
def checkpoint(request: pytest.FixtureRequest, by_scheme: ByScheme) -> tuple[Path, Path]:
    return by_scheme(request.param)


def written(directory: Path, name: str, kind: str = "qwen2") -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one of the weights that it means."""
    write, scheme = SCHEMES[name]
    paths = [made(kind, MODELS[kind], directory / how) for how in ("quantized", "plain")]
    rng = torch.Generator().manual_seed(1)
    quantized, plain = (load_file(path / "model.safetensors") for path in paths)
    for name in [name for name in quantized if name.endswith("_proj.weight")]:
        tensors, weight = write(rng, *quantized.pop(name).shape, scheme)
        layer = name.removesuffix(".weight")
        quantized |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        plain[name] = weight.contiguous()
    for path, tensors in zip(paths, (quantized, plain), strict=True):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return paths[0], paths[1]


def test_it_is_served_as_the_weights_that_its_format_means(
    checkpoint: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = checkpoint
    with caplog.at_level(logging.INFO, "outrider"):
        have_the_same_logits(path, plain)
    lines = [record.message for record in caplog.records if record.message.startswith("weights in")]
    assert len(lines) == 1
    config = (path / "config.json").read_text()
    assert ("kept in int8" in lines[0]) == ("int-quantized" in config and rows_of_int8(path))
    assert json.loads(config)["quantization_config"]["quant_method"] in lines[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_weights_lie_row_by_row_as_kernels_read_them(scheme: str, by_scheme: ByScheme) -> None:
    found = packed_weights.read(by_scheme(scheme)[0], SCHEMES[scheme][1], torch.bfloat16, keep=())
    assert found.state and all(tensor.is_contiguous() for tensor in found.state.values())


def test_scales_of_blocks_are_not_taken_for_those_of_rows() -> None:
    weight = torch.ones(256, 256, dtype=torch.int8)
    assert packed_weights._rows_of_8_bits({"weight": weight, "weight_scale": torch.ones(256, 1)}) is not None
    assert packed_weights._rows_of_8_bits({"weight": weight, "weight_scale": torch.ones(2, 128)}) is None


@pytest.mark.parametrize("scheme", ["fp8", "fp8, one scale"])
def test_rows_of_fp8_stay_as_they_are_for_kernels_that_read_them(scheme: str, by_scheme: ByScheme) -> None:
    path, plain = by_scheme(scheme)
    found = packed_weights.read(path, SCHEMES[scheme][1], torch.bfloat16, keep=(Int8Linear, Float8Linear))
    tensors, want = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    assert {f"{name}.weight" for name in found.kept} == {name for name in tensors if name.endswith("_proj.weight")}
    for name, layer in found.kept.items():
        assert isinstance(layer, Float8Linear)
        assert torch.equal(layer.weight.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        torch.testing.assert_close(layer.weight.float() * layer.scale[:, None], want[f"{name}.weight"].float())


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int8, groups", "gptq"])
def test_on_a_gpu_they_are_counted_as_they_are_kept(
    scheme: str, by_scheme: ByScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = by_scheme(scheme)
    monkeypatch.setattr(loader, "reads_fp8", lambda device: True)
    need = loader._need(path, loader.read_settings(path), EngineConfig(device="cuda"), 64)
    weights = load_file(plain / "model.safetensors")
    kept = {name for name in weights if name.endswith("_proj.weight")} if scheme in ("int8", "fp8") else set()
    wanted = sum(weight.numel() * (1 if name in kept else 2) for name, weight in weights.items())
    assert need.weight_bytes == need.loaded_bytes == wanted
    if kept:
        with pytest.raises(DoesNotFit, match=r"parameters, 0\.1 M of them in 8 bits, are"):
            kv_blocks(need, wanted, "cuda", blocks=None, kv_bytes=None)


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("gptq", {"dynamic": {"-:.*up_proj.*": {}, "+:.*": {"bits": 4, "group_size": 16}}, "lm_head": False}),
        ("gptq", {"checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["some:1.0"]}}),
        ("awq", {"version": "GEMM", "modules_to_not_convert": ["up_proj"], "backend": "autoawq"}),
        ("int8", {"kv_cache_scheme": None, "sparsity_config": {"format": "dense"}, "transform_config": {}}),
    ],
)
def test_so_are_they_with_more_in_their_config_and_layers_left_plain(
    scheme: str, more: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = written(tmp_path, scheme)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= more
    (path / "config.json").write_text(json.dumps(config))
    whole, tensors = load_file(plain / "model.safetensors"), load_file(path / "model.safetensors")
    left = {name: value for name, value in tensors.items() if ".up_proj." not in name}
    left |= {name: value for name, value in whole.items() if ".up_proj." in name}
    save_file(left, path / "model.safetensors", metadata={"format": "pt"})
    have_the_same_logits(path, plain)


@pytest.mark.parametrize("scheme", ["gptq", "int8"])
def test_so_are_experts(scheme: str, tmp_path: Path) -> None:
    have_the_same_logits(*written(tmp_path, scheme, "qwen3_moe"))


def have_the_same_logits(path: Path, plain: Path) -> None:
    engine = load_engine(path, EngineConfig(dtype="float32", num_blocks=64))
    found = engine.forward([Row(engine.kv.open([]), PROMPT, len(PROMPT))])
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    assert float((found - want).abs().max() / want.abs().max()) < 1e-4


def rows_of_int8(path: Path) -> bool:
    return load_file(path / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"].shape[1] == 1


# What each packing means is tested above. Of texts: one packing of each method in float32, where they are transformers'
# too, and in bfloat16 one of each way that weights are kept.
_IN_FLOAT32 = ("gptq", "awq", "int4", "int8", "fp8")
_IN_BFLOAT16 = ("gptq", "int8", "fp8")


@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in quick else pytest.mark.slow)
        for dtype, quick in (("float32", _IN_FLOAT32), ("bfloat16", _IN_BFLOAT16))
        for name in SCHEMES
    ],
    indirect=["checkpoint"],
)
def test_its_texts_are_the_same_with_and_without_drafts(checkpoint: tuple[Path, Path], dtype: str) -> None:
    path, plain = checkpoint
    speculator = Speculator(path, path, dtype=dtype)
    prompts = [PROMPT[:n] for n in (1, 9, 30, 60)]
    texts, drafted = (
        [found.token_ids for found in speculator.generate(prompts, max_new_tokens=12, speculate=on)]
        for on in (False, True)
    )
    assert drafted == texts
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        assert texts == [greedy(model, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


def test_its_revision_is_another_one_where_its_scheme_is(by_scheme: ByScheme, tmp_path: Path) -> None:
    path, _ = by_scheme("gptq")
    before, config = weights_revision(path), json.loads((path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    assert weights_revision(tmp_path) != before


def native(path: Path, variant: str, quantization: str = "none") -> Engine:
    settings = {"native_variant": variant, "quantization": quantization, "num_blocks": 64}
    return load_engine(path, EngineConfig(execution="native", **settings))


def logits(engine: Engine) -> Tensor:
    return engine.forward([Row(engine.kv.open([]), PROMPT, len(PROMPT))])


KEPT = {
    "awq": 5,
    "gptq": 5,
    "gptq, one group": 4,
    "gptq, asymmetric": 5,
    "int4, asymmetric": 5,
    "int4, rows": 4,
    "int8": 8,
}
"""Bits of a weight of the schemes that the kernels multiply as they are, without scales of rows."""


@pytest.mark.parametrize("scheme", KEPT)
def test_what_the_kernels_multiply_stays_as_it_is(scheme: str, variant: str, by_scheme: ByScheme) -> None:
    path, plain = by_scheme(scheme)
    engine, widened = native(path, variant), native(plain, variant)
    linear = count_linear(plain).used - 384 * 64  # without the head
    saved = (widened.weight_bytes - engine.weight_bytes) * 8 / linear
    assert 16 - KEPT[scheme] - 1.6 < saved <= 16 - KEPT[scheme] + 0.1
    # Its inputs are rounded: another arithmetic, and so another revision.
    assert engine.info.execution == f"native-{variant}{'' if scheme == 'int8' else '-w4a8'}"


@pytest.mark.parametrize("scheme", [scheme for scheme in KEPT if scheme != "int8"])
def test_four_bits_are_multiplied_by_inputs_rounded_in_groups_of_32(
    scheme: str, variant: str, by_scheme: ByScheme
) -> None:
    path, plain = by_scheme(scheme)
    found = logits(native(path, variant))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        exact = model(torch.tensor([PROMPT])).logits[0]
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        off = model(torch.tensor([PROMPT])).logits[0]
    # All else, keys and values among it, is rounded to bfloat16.
    assert (found - exact).norm() < 2 * (off - exact).norm()


def rounded(x: Tensor) -> Tensor:
    """To 127 steps either way of the largest of each 32."""
    groups = x.unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / step).round() * step).flatten(-2)


@pytest.mark.parametrize("scheme", ["gptq, order of activations", "gptq, 8 bits", "int4", "fp8"])
def test_what_they_do_not_multiply_is_widened(
    scheme: str, by_scheme: ByScheme, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = by_scheme(scheme)
    with caplog.at_level(logging.INFO, "outrider"):
        assert torch.equal(logits(native(path, "auto")), logits(native(plain, "auto")))
    assert any("widened to bfloat16" in record.message for record in caplog.records)


def test_a_module_with_a_plain_layer_is_widened_and_the_others_stay(tmp_path: Path, variant: str) -> None:
    path, plain = written(tmp_path, "gptq")
    tensors, meant = (load_file(directory / "model.safetensors") for directory in (path, plain))
    layer = "model.layers.0.self_attn.k_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
    tensors |= {name: meant[name] for name in meant if name.startswith(layer)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    found, widened = logits(native(path, variant)), logits(native(plain, variant))
    # Inputs of what stays are rounded to 8 bits.
    assert float((found - widened).norm() / widened.norm()) < 0.1


@pytest.mark.parametrize("scheme", ["awq", "gptq", "int4", "int8", "fp8"])
def test_a_layer_whose_tensors_do_not_fit_one_another_is_named(
    scheme: str, by_scheme: ByScheme, tmp_path: Path
) -> None:
    path, _ = by_scheme(scheme)
    tensors = load_file(path / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    end = next(end for end in ("scales", "weight_scale") if f"{layer}.{end}" in tensors)
    tensors[f"{layer}.{end}"] = torch.ones(3, 5, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(path / name)
    with pytest.raises(CheckpointError, match=rf"{layer}: its packed weights do not fit"):
        load_engine(tmp_path, EngineConfig(dtype="float32", num_blocks=64))
