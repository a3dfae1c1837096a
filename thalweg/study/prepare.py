"""What comes before the measurements: rows in files, random models in folders, and what datasets look like."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.study.config import StudyConfig, StudyDataset, StudyModel, slug
from thalweg.study.datasets import explore, load_rows, normalize
from thalweg.utils.atomic_file import publish_file
from thalweg.utils.formatting import format_bytes, parse_bytes
from thalweg.utils.procfs import available_host_memory

# The ids that T5 gives them; other families do not mind.
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def write_json(path: Path, value: Any) -> None:
    """Publish a file by rename: a reader, or the next run of the study, sees all of it or nothing."""
    publish_file(path, lambda file: file.write(json.dumps(value, indent=1).encode()))


def prepare(config: StudyConfig, folder: Path) -> None:
    """Fill ``folder`` with what all cells read, and leave out what is there already.

    ``data/NAME.json`` has the rows of a dataset, ``models/NAME.json`` where a model is, ``explored.json`` the counts;
    a dataset or a model that cannot be had is an ``error`` there, and each of its cells reports it.
    """
    data, models = {}, {}
    for dataset in config.datasets:
        data[dataset.name] = _make_once(folder / "data" / f"{slug(dataset.name)}.json", _read_dataset, dataset)
    texts = [row[key] for one in data.values() for row in one.get("rows", ()) for key in ("input", "output")]
    measured = not all(one.planned for one in config.hardware)
    for model in config.models:
        path = folder / "models" / slug(model.name)
        arguments = model, path, texts, config.seed, measured
        models[model.name] = _make_once(path.with_name(f"{path.name}.json"), _make_model, *arguments)
    if not (folder / "explored.json").exists():
        write_json(folder / "explored.json", _explore(models, data))


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def _make_once(path: Path, make: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    if not path.exists():
        try:
            made = make(*args)
        except Exception as error:  # whatever a loader raises is the reason in the row
            made = {"error": f"{type(error).__name__}: {error}"}
        write_json(path, made)
    return read_json(path)


def _read_dataset(dataset: StudyDataset) -> dict[str, Any]:
    rows, num_skipped = normalize(load_rows(dataset), dataset)
    return {"rows": rows, "skipped": num_skipped}


def _make_model(model: StudyModel, folder: Path, texts: Sequence[str], seed: int, weights: bool) -> dict[str, Any]:
    """Return where a model is; one of random weights is made there, with a tokenizer of the study's own texts, and
    without ``weights`` where all is planned."""
    import torch
    import transformers

    from thalweg.utils.hub import check_model_path

    if model.config is None:
        check_model_path(str(model.path))
        config = transformers.AutoConfig.from_pretrained(str(model.path))
        return {"path": str(model.path), "random": False, "shape": describe_shape(config)}
    fields = dict(model.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    shape = describe_shape(config)
    if weights:
        check_free_memory(shape["itemsize"] * shape["parameters"], "its random weights")
        torch.manual_seed(seed)
        made: Any = auto_class(config).from_config(config)
        # Random weights would name an end at random: without one all outputs are of the length that was asked for.
        made.generation_config.eos_token_id = made.config.eos_token_id = None
        made.save_pretrained(temporary, max_shard_size="1GB")  # a shard's bytes are made beside the model
    else:
        config.save_pretrained(temporary)
    _train_tokenizer(texts, config.vocab_size).save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)  # half of one, from a run that was killed
    temporary.rename(folder)
    return {"path": str(folder.absolute()), "random": True, "shape": shape}


def check_free_memory(needed: int, purpose: str, limit: int | str | None = None) -> None:
    """Raise MemoryError where that many bytes are not there (or beyond ``limit``), before the system kills somebody."""
    available = available_host_memory() if limit is None else parse_bytes(limit, "memory")
    if available is not None and needed > available:
        raise MemoryError(f"{format_bytes(needed)} for {purpose}, {format_bytes(available)} of memory")


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a generating model."""
    import transformers

    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def describe_shape(config: Any) -> dict[str, int]:
    """Return what decides how many bytes a step reads: parameters in all, those of a decoding step (no encoder, of
    the embedding a row), those of products, those of the embedding, the bytes of one as the config has it, and the
    elements of the keys and values of a position in all layers."""
    import torch

    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or text.hidden_size // text.num_attention_heads
    layers = getattr(text, "num_decoder_layers", None) or text.num_hidden_layers
    parameters = sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding or bool(getattr(config, "tie_word_embeddings", False))
    decoding = linear = parameters - (0 if is_tied else embedding.numel())
    if config.is_encoder_decoder:
        # Encoder and decoder may share the embedding, which is no product.
        decoding -= sum(p.numel() for p in model.get_encoder().parameters() if p is not embedding)
    return {
        "parameters": parameters, "decoding_parameters": decoding, "kv_elements": 2 * layers * heads * dim,
        "encoder_decoder": int(config.is_encoder_decoder), "linear_parameters": linear, "itemsize": embedding.itemsize,
        "embedding_parameters": embedding.numel(), "hidden_size": embedding.shape[1],
    }  # fmt: skip


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level tokenizer of these texts, with T5's special tokens."""
    import transformers

    from thalweg.data.tokenizer import train_byte_level_bpe

    tokenizer = train_byte_level_bpe(texts, vocab_size, _SPECIAL_TOKENS)
    names = dict(zip(("pad_token", "eos_token", "unk_token"), _SPECIAL_TOKENS, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a folder, or of a name on the hub."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path)


def _explore(models: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    tokenizers = {name: load_tokenizer(made["path"]) for name, made in models.items() if "error" not in made}
    return {
        name: {"error": one["error"]} if "error" in one else explore(one["rows"], one["skipped"], tokenizers)
        for name, one in data.items()
    }


def main(folder: str) -> None:
    """The body of the process that prepares: what a large dataset takes of memory is given back when it ends."""
    root = Path(folder)
    prepare(StudyConfig.model_validate(read_json(root / "study.json")["config"]), root)
