"""Tokenizers as families of models publish them, trained on a few lines, and texts on which they differ.

They are made with the `tokenizers` library alone. tokenizer_config.json names the class that the family names there, of
which transformers builds something else than tokenizer.json says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

_PARTS = [
    *("Steps:", "\n\n", "1. do", "\n", "\r\n", "\t", " ", "  ", "    ", "        ", "\u00a0", "\u3000"),
    *("2024", "3.14159", "1000000", "٣٤", "½", "x=1;", "def f(x):\n    return x + 1\n", "if (a != b) {\n\t", "}\n"),
    *("don't", "WE'LL", "I'm", "hello", " world", "Hello", "The", " the", "naïve", "e\u0301te\u0301", "straße"),
    *("日本語", "你好，世界", "Привет", "مرحبا", "नमस्ते", "한국어", "ไทย", "שלום", "😀", "👩‍👩‍👧", "🇩🇪", "\u200d"),
    *("!?", "...", "—", "(", ")", "[0]", "{}", "//", "#include <x>", "`a`", "$5", "<b>", "▁", "▁▁", "\x00", "\ufffd"),
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<tool_call>"),
]


def texts(count: int = 2000) -> list[str]:
    """Equal at every call. Of digits, line ends, code, scripts, emoji, spaces and marks."""
    rng = random.Random(33)
    return ["", " ", "Steps:\n\n1. do", *("".join(rng.choices(_PARTS, k=rng.randint(1, 12))) for _ in range(count - 3))]


def _trained(shape: Tokenizer, size: int, alphabet: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    shape.train_from_iterator(texts(600), trainer)
    model = json.loads(shape.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(
    pre: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    *,
    ignore_merges: bool = False,
    bos: str | None = None,
) -> Tokenizer:
    """Special tokens come last in the vocabulary, as in Qwen 2 and Llama 3."""
    shape = Tokenizer(models.BPE())
    if normalizer is not None:
        shape.normalizer = normalizer
    shape.pre_tokenizer = pre
    vocab, merges = _trained(shape, 700, pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    made.add_tokens([AddedToken("<tool_call>", normalized=False)])
    if bos is not None:
        made.post_processor = _begins_with(bos, made)
    return made


def _begins_with(bos: str, made: Tokenizer) -> processors.PostProcessor:
    special = [(bos, made.token_to_id(bos))]
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=special)


def sentencepiece(
    normalizer: normalizers.Normalizer | None, pre: pre_tokenizers.PreTokenizer | None, *, bos: bool = True
) -> Tokenizer:
    """A BPE with a fallback to bytes, as Llama 2, Mistral and Gemma publish it."""
    shape = Tokenizer(models.BPE())
    shape.normalizer = normalizers.Replace(" ", "▁")
    shape.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    learned, _ = _trained(shape, 400, ["▁"])
    vocab = {token: i for i, token in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *BYTES, *learned]))}
    # As SentencePiece merges: whatever two pieces make up the token that was learned first.
    cuts = [(token, at) for token in learned for at in range(len(token) - 1, 0, -1)]
    merges = [(t[:at], t[at:]) for t, at in cuts if t[:at] in vocab and t[at:] in vocab]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    if bos:
        made.post_processor = _begins_with("<s>", made)
    return made


def with_runs(made: Tokenizer) -> Tokenizer:
    """Gemma's tokens for runs of line ends and marks of HTML, which are found before anything else."""
    made.add_tokens([AddedToken(token, normalized=False) for token in ("\n", "\n\n", "<b>", "▁▁▁▁▁▁")])
    return made


def _split(expression: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _replaced(*before: normalizers.Normalizer) -> normalizers.Normalizer:
    return normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "gpt2": (lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "GPT2TokenizerFast"),
    "digits": (lambda: byte_level(_digits()), "GPT2Tokenizer"),
    "digits as a Llama": (lambda: byte_level(_digits()), "LlamaTokenizerFast"),
    "qwen2": (lambda: byte_level(_split(QWEN2), normalizers.NFC()), "Qwen2TokenizerFast"),
    "qwen2 with digits": (lambda: byte_level(_digits()), "Qwen2Tokenizer"),
    "llama3": (lambda: byte_level(_split(LLAMA3), ignore_merges=True, bos="<|im_start|>"), "PreTrainedTokenizerFast"),
    "llama2": (lambda: sentencepiece(_replaced(normalizers.Prepend("▁")), None), "LlamaTokenizerFast"),
    "without prefix": (lambda: sentencepiece(_replaced(), None), "LlamaTokenizer"),
    "prefix first": (
        lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "LlamaTokenizerFast",
    ),
    "gemma": (
        lambda: sentencepiece(_replaced(), pre_tokenizers.Split(" ", behavior="merged_with_previous")),
        "GemmaTokenizerFast",
    ),
    "gemma with runs": (
        lambda: with_runs(sentencepiece(_replaced(), pre_tokenizers.Split(" ", behavior="merged_with_previous"))),
        "GemmaTokenizer",
    ),
    "no class": (lambda: byte_level(_digits()), ""),
}


def write(kind: str, directory: Path) -> Path:
    """tokenizer.json and tokenizer_config.json of one kind. Returns the directory."""
    make, class_name = KINDS[kind]
    made = make()
    bos, eos = ("<s>", "</s>") if made.token_to_id("</s>") is not None else ("<|im_start|>", "<|im_end|>")
    settings = {"bos_token": bos, "eos_token": eos, "add_bos_token": True, "add_prefix_space": True, "legacy": False}
    made.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": class_name} if class_name else {}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    return directory
