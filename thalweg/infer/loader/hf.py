"""A Hugging Face model from its directory: loaded, or left in its files with only its structure made."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from thalweg.infer.bottleneck import with_bottleneck_adapters
from thalweg.infer.config import EngineConfig
from thalweg.infer.offload.packed_file import content_digest
from thalweg.infer.quantization.checkpoints import check_all_loaded, get_quant_method, is_supported, load_quantized
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.hub import check_model_path

ModelKind = Literal["causal", "seq2seq", "encoder"]


# What a directory says of its model, and tokenizers in all their forms (Marian's are two .spm, PhoBERT's has .codes).
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.spm", "*.codes", "*.jinja", "*.tiktoken", "*.py"]


def to_local_folder(model: str | Path) -> Path:
    """Return the directory of a model: of a name on the hub, where the hub's cache has it, or has it now.

    Raises FileNotFoundError or ValueError with the cure where there is no such model.
    """
    check_model_path(model)
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        for weights in ("*.safetensors", "pytorch_model*.bin"):  # the second form where there is no first
            if not any(folder.glob("*.safetensors")):
                wanted = [*_HUB_FILES, weights]  # but for Mistral's own copy of the weights
                folder = Path(snapshot_download(str(model), allow_patterns=wanted, ignore_patterns="consolidated*"))
    return folder


def load_tokenizer(model: str | Path, options: EngineConfig) -> Any:
    """Return the directory's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with contextlib.suppress(OSError, ValueError, KeyError):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=options.trust_remote_code)
    return None


def get_model_kind(model: Any) -> ModelKind:
    """Return what a live Hugging Face model does: ``causal``, ``seq2seq`` or ``encoder``."""
    generates = model.can_generate() if hasattr(model, "can_generate") else hasattr(model, "generate")
    if not generates or (_is_encoder_only(model.config) and not type(model).__name__.endswith(_GENERATIVE)):
        return "encoder"
    return "seq2seq" if getattr(model.config, "is_encoder_decoder", False) else "causal"


_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def _has_architecture(config: Any, suffixes: tuple[str, ...]) -> bool:
    return any(name.endswith(suffixes) for name in getattr(config, "architectures", None) or ())


def _is_encoder_only(config: Any) -> bool:
    from thalweg.infer.models import ENCODERS

    is_encoder = config.model_type in ENCODERS and not getattr(config, "is_encoder_decoder", False)
    return is_encoder and not getattr(config, "is_decoder", False)


def _kind_from_config(config: Any, folder: Path, options: EngineConfig) -> ModelKind:
    """Return the same for a directory: what is asked of it, what its model was saved as, or what such models can do."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    # Today's sentence encoders are saved as decoders that generate; a list of modules tells them apart.
    is_sentence_encoder = options.pooling != "auto" or (folder / "modules.json").is_file()
    if is_sentence_encoder or _has_architecture(config, ("EncoderModel",)):
        return "encoder"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if _has_architecture(config, _GENERATIVE):
        return "causal"
    if options.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return "causal"
    # Saved without a head, a model generates only where its embeddings are all of it (Cerebras-GPT is a GPT2Model).
    is_tied = getattr(config, "tie_word_embeddings", False) and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    can_generate = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not _is_encoder_only(config)
    return "causal" if can_generate and (is_tied or not _has_architecture(config, ("Model",))) else "encoder"


def load_model(model: str | Path, options: EngineConfig) -> Any:
    """Load a model that generates, or an encoder, in the dtype and onto the device of the options."""
    import transformers

    model = to_local_folder(model)
    trust_remote_code = options.trust_remote_code
    dtype: Any = "auto" if options.dtype == "auto" else parse_dtype(options.dtype)
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    kind = _kind_from_config(config, model, options)
    auto_class: Any = {
        "causal": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "encoder": transformers.AutoModelForTextEncoding if config.model_type in _T5_LIKE else transformers.AutoModel,
    }[kind]
    takes_pictures = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if kind == "causal" and takes_pictures and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto_class = transformers.AutoModelForImageTextToText  # for its text alone
    if is_supported(config):
        compute_dtype = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.bfloat16
        loaded = load_quantized(auto_class, model, config, compute_dtype, trust_remote_code)
        return loaded.to(options.device).eval()
    try:
        loaded, loading_info = with_bottleneck_adapters(auto_class, config).from_pretrained(
            model, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they can be named
        )  # fmt: skip
    except (ImportError, RuntimeError, *_LOAD_ERRORS) as error:
        if get_quant_method(config) is not None:
            raise ValueError(f"{model}: its weights are quantised by {get_quant_method(config)}: {error}") from error
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{model}: {_find_corrupt_file(model) or f'{type(error).__name__} {error}'}") from error
    check_all_loaded(model, loading_info)
    return loaded.to(options.device).eval()


# What a loader says of files that are cut short or hold something else.
_LOAD_ERRORS = (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError)


def _find_corrupt_file(folder: Path) -> str:
    """Return which of a directory's files cannot be read, or an empty text."""
    for path in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.index.json"))):
        try:
            if path.suffix == ".safetensors":
                safe_open(path, "pt")  # reads its header
            else:
                json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            return f"{path.name} is damaged ({error}): download or save it again"
    return ""


_T5_LIKE = ("t5", "mt5", "umt5")  # their AutoModel is both halves


def load_mmapped(model: str | Path, options: EngineConfig) -> tuple[Any, Any]:
    """Return a model whose parameters are its safetensors files, mapped, and a digest of these files' contents.

    The parameters keep the files' dtypes; reading them takes page cache, never memory of this process.  A
    model without such files is loaded, and has no digest.
    """
    folder = to_local_folder(model)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return load_model(folder, replace(options, device="cpu")), None
    # In their own dtype, Hugging Face's loader takes tensors as the mapped files give them.
    loaded = load_model(folder, replace(options, dtype="auto", device="cpu"))
    return loaded, content_digest([*files, folder / "config.json"])
