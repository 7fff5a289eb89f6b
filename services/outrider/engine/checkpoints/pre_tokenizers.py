"""The pre-tokenizers that a GGUF file names in `tokenizer.ggml.pre`: how a text is split before merges apply.

The names are llama.cpp's (src/llama-vocab.cpp). The expressions are those of the tokenizer.json of the models after
which they are named. Each splits what the one before it has left, and what it does not match stays a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One of them, with the settings that go with its name."""

    splits: tuple[str, ...]
    composes: bool = False
    """Texts are brought into Unicode's form NFC first, which a GGUF file does not say."""
    ignores_merges: bool = False
    """A piece that is a token is that token, whatever the merges."""
    adds_bos: bool = False
    """A text begins with the BOS token, unless the file says otherwise."""


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_FAMILIES = {
    ("default",): _DEFAULT,
    ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "exaone4"): PreTokenizer(
        (_GPT2,)
    ),
    ("mpt", "olmo"): PreTokenizer((_GPT2,), composes=True),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"): PreTokenizer((r"\p{N}", _GPT2)),
    ("command-r",): PreTokenizer((r"\p{N}", _GPT2), composes=True),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("qwen2", "megrez"): PreTokenizer((_QWEN2,), composes=True),
    ("stablelm2", "deepseek-r1-qwen", "kormo", "hunyuan", "solar-open", "grok-2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), composes=True),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): PreTokenizer((_GPT4O,)),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
PRE_TOKENIZERS = {name: rule for names, rule in _FAMILIES.items() for name in names}
"""By name. A file that names another is refused."""
