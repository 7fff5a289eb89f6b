"""A tiny real checkpoint: a Llama of a few thousand weights with a byte-level tokenizer and a chat template.

Its weights are random but loud, so that greedy text is not a tie and sampled text has some shape.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """Byte-level: ids 0–2 are special, 3–258 the bytes, the rest are never produced by encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*_SPECIALS, *alphabet])}
    if vocab_size < len(vocab):
        raise ValueError(f"vocab_size: at least {len(vocab)}")
    for i in range(len(vocab), vocab_size):
        vocab[f"<extra_{i}>"] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_checkpoint(
    directory: Path,
    *,
    vocab_size: int = 384,
    layers: int = 2,
    seed: int = 0,
    max_context_len: int = 512,
    intermediate_size: int = 128,
    head_dim: int = 16,
    infinite_token: int | None = None,
    tied: bool = True,
) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json into `directory` and returns it.

    tied: its vocabulary head is its embedding. infinite_token: its embedding is infinite, so that whatever looks at it
    is no number; the head is sound.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_context_len,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied and infinite_token is None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        if infinite_token is not None:
            model.model.embed_tokens.weight.data[infinite_token] = torch.inf
    model.save_pretrained(directory)
    tiny_tokenizer(vocab_size).save_pretrained(directory)
    return directory
