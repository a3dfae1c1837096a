"""A Llama of random weights with a byte-pair tokenizer, as a Hugging Face folder, for the serving bench.

`python bench/_serve_model.py FOLDER SIZE`.  It has no end token, so every server generates just as
many tokens as it is asked for.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "110m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
VOCAB_SIZE = {"tiny": 4096, "110m": 32000}


def write_model(folder: Path, size: str) -> None:
    """Write the model's files."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train(files, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE[size],
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        **SHAPES[size],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # rows that the tokenizer has no text for are never chosen
        model.lm_head.weight[4096:] = 0
        model.lm_head.weight[:4096] *= 8
    model.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2])
