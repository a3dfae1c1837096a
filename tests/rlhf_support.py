"""A tiny base model with a tokenizer, and data, as files: what the steps of RLHF are tried on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["red", "blue", "green", "one", "two", "sun", "sea", "hill"]


def make_tokenizer() -> Any:
    """A token for each byte, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_base(folder: Path, **sizes: int) -> Path:
    """Write a small Llama with random weights, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2} | sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, pad_token_id=tokenizer.eos_token_id, tie_word_embeddings=True, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(path: Path, count: int = 40) -> Path:
    """Write preferences in DeepSpeed-Chat's columns: the chosen answer says the prompt's word once more."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            word, other = WORDS[i % len(WORDS)], WORDS[(i + 3) % len(WORDS)]
            row = {"prompt": f"Human: {word} Assistant:", "chosen": f" {word}", "rejected": f" {other}", "word": word}
            file.write(json.dumps(row) + "\n")
    return path


def score_vowels(prompts: list[str], completions: list[str], word: list[str]) -> list[float]:
    """A verifiable reward: the part of a response that is vowels."""
    assert len(prompts) == len(completions) == len(word)
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


def score_on_even_ranks(prompts: list[str], completions: list[str], word: list[str]) -> list[float]:
    """The same where it counts: one of two tensor ranks finds other numbers."""
    return score_vowels(prompts, completions, word) if dist.get_rank() % 2 == 0 else [99.0] * len(completions)


def score_nothing(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """The control: numbers that have nothing to do with the responses."""
    return [hash((i, len(prompts))) % 7 / 6 for i in range(len(completions))]
