"""Techniques of inference: each loads a model and generates greedily from batches of token ids.

All get the same prompts, each batch in one call, and say when each call had its first tokens.  Hugging Face's
``generate`` pads a batch to its left; the engine takes prompts as they are.  With ``continuous`` the engine gets all
batches at once, and a sequence that ends makes room for the next.
"""

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from thalweg.study.prepare import auto_class


class UnsupportedTechnique(ValueError):
    """A technique that cannot run this model here; the text is the reason in the cell's row."""


class Generation(NamedTuple):
    """Of one batch: seconds until each of its sequences had a token, seconds in all, and the tokens."""

    first_seconds: float
    seconds: float
    outputs: list[list[int]]


def now(device: torch.device | str) -> float:
    """The clock, once the device has done what it was given."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


# Bytes of a weight: as the engine and as torch name dtypes; packed by the engine (int4 has a scale of 2 bytes for each
# group of 32, int8 one for each row) and by the libraries that transformers quantises with.
_ITEMSIZES = {
    "fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2,
    "int8": 1, "int4": 0.5625, "bitsandbytes": 1, "torchao": 1,
}  # fmt: skip


def _weight_itemsize(options: dict[str, Any]) -> float:
    return _ITEMSIZES.get(options.get("quantization") or options.get("dtype", "fp32"), 2)


def count_weight_bytes(options: dict[str, Any], shape: dict[str, int]) -> int:
    """Return the bytes that weights take in memory as a technique of inference has them.

    Packed are the weights of products; the embedding is not, and its dtype is that of what is not packed.  Weights in
    a file's own dtype are mapped from it where they are packed: the system may take their pages back.
    """
    if not options.get("quantization"):
        return round(shape["parameters"] * _weight_itemsize(options))
    scales = 4 * shape["linear_parameters"] / shape["hidden_size"]  # fp32, one a row
    return round(shape["linear_parameters"] * _weight_itemsize(options) + scales + 2 * shape["embedding_parameters"])


class HuggingFace:
    """Plain transformers: ``from_pretrained`` and ``generate``.  ``dtype``: as torch names it; ``quantization``: the
    library by which transformers has weights in 8 bits, ``bitsandbytes`` or ``torchao``.

    What every technique says of itself: ``streamed_bytes``: weights that come from another tier in each step, from
    ``tier``; ``copies``: how often a byte of the weights crosses memory in a step; ``weight_itemsize``: bytes of a
    weight.
    """

    streamed_bytes, tier, copies = 0, "", 1

    def __init__(self, spec: dict[str, Any], dtype: str = "float32", quantization: str | None = None) -> None:
        self.weight_itemsize = _weight_itemsize({"dtype": dtype, "quantization": quantization})
        self.device = spec["hardware"]["device"]
        self.model: Any = load_plain(spec, getattr(torch, dtype), quantization)
        self.pad = self.model.generation_config.pad_token_id or 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        """Generate ``new_tokens`` for each prompt, or fewer where the model ends."""
        start = time.perf_counter()
        # A decoder goes on at the right end; an encoder counts positions from the left one.
        side = "right" if self.model.config.is_encoder_decoder else "left"
        rows = [torch.tensor(one, device=self.device) for one in prompts]
        tokens = pad_sequence(rows, True, self.pad, side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
        first: list[float] = []

        def note_first(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if not first:
                first.append(now(input_ids.device))
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        made = self.model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, num_beams=1,
            stopping_criteria=[note_first], pad_token_id=self.pad,
        )  # fmt: skip
        end = now(self.device)
        made = made[:, 1:] if self.model.config.is_encoder_decoder else made[:, tokens.shape[1] :]
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        lengths = [next((i for i, token in enumerate(row, 1) if token in ends), None) for row in made.tolist()]
        outputs = [row[:length] for row, length in zip(made.tolist(), lengths, strict=True)]  # padding follows
        return Generation(first[0] - start, end - start, outputs)

    def close(self) -> None:
        """Nothing outlives the process."""


def load_plain(spec: dict[str, Any], dtype: torch.dtype, quantization: str | None = None) -> Any:
    """Return the model of a cell as transformers loads it, in eval mode on its device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(spec["model"]["path"])
    device, given = spec["hardware"]["device"], {}
    if quantization is not None:
        for library in (quantization, "accelerate"):
            if importlib.util.find_spec(library) is None:
                raise UnsupportedTechnique(f"{library} is not installed; give `python`, an interpreter that has it")
        if quantization == "torchao":
            quantizers: Any = importlib.import_module("torchao.quantization")
            quantized = transformers.TorchAoConfig(quantizers.Int8WeightOnlyConfig())
        else:
            quantized = transformers.BitsAndBytesConfig(load_in_8bit=True)
        given = {"quantization_config": quantized, "device_map": device}  # where it is loaded it stays
    model = auto_class(config).from_pretrained(spec["model"]["path"], dtype=dtype, **given)
    return (model if given else model.to(device)).eval()


class ZeroStage3(HuggingFace):
    """The setting of the report: ZeRO stage 3 around transformers' own ``generate``; ``library``: ``deepspeed`` or
    ``thalweg``, ``config``: its config."""

    tier = "host"
    # A parameter is read where it rests, written where it is gathered to, and read there by the product.
    copies = 3

    def __init__(self, spec: dict[str, Any], library: str, config: dict[str, Any]) -> None:
        if importlib.util.find_spec(library) is None:
            raise UnsupportedTechnique(f"{library} is not installed; give `python`, an interpreter that has it")
        config = {"train_micro_batch_size_per_gpu": 1, **config}
        if library == "deepspeed":
            from transformers.integrations.deepspeed import HfDeepSpeedConfig

            self._partition_at_load = HfDeepSpeedConfig(config)  # from_pretrained asks whether one is alive
        super().__init__(spec)
        module: Any = importlib.import_module(library)
        self.engine = module.initialize(model=self.model, config=config)[0]
        self.model = self.engine.module.eval()
        self.streamed_bytes = 0 if spec["hardware"]["device"] == "cpu" else 1

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        """Generate ``new_tokens`` for each prompt, or fewer where the model ends."""
        with torch.no_grad():
            return super().generate(prompts, new_tokens)

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class ThalwegEngine:
    """The inference engine with :class:`EngineConfig`'s ``options``.

    ``continuous``: all of the samples are queued at once, of which ``max_num_seqs`` run together.  The prefix cache
    is off: each turn has the same prompts.
    """

    tier, copies = "", 1

    def __init__(self, spec: dict[str, Any], continuous: bool = False, **options: Any) -> None:
        from thalweg.infer import EngineConfig, load_engine
        from thalweg.infer.engine.engine import LLMEngine

        dataset = spec["dataset"]
        self.continuous = continuous
        # What is packed anyhow is mapped from its files, in their dtype.
        options = {"dtype": "auto" if options.get("quantization") else "fp32", **options}
        engine_config = EngineConfig(**{
            "device": spec["hardware"]["device"], "max_num_seqs": dataset["batch_size"],
            "max_model_len": dataset["max_prompt_tokens"] + dataset["new_tokens"], "enable_prefix_caching": False,
            **({"weight_offload_dir": spec["scratch"]} if options.get("weight_offload") else {}), **options,
        })  # fmt: skip
        try:
            engine = load_engine(spec["model"]["path"], engine_config)
        except ValueError as error:
            raise UnsupportedTechnique(str(error)) from error
        assert isinstance(engine, LLMEngine), "a model of a study generates"
        self.engine = engine
        self.runner_name = type(engine.runner).__name__
        self.weight_itemsize = _weight_itemsize(options)
        self.tier = {"cpu": "host", "nvme": "disk"}.get(engine_config.weight_offload or "", "")
        ring = getattr(getattr(engine.runner, "_weights", None), "ring", None)
        self.streamed_bytes = getattr(ring, "read_bytes", 0)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        """Generate ``new_tokens`` for each prompt, or fewer where the model ends."""
        from thalweg.infer import Request, SamplingParams

        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=new_tokens)
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting, first = set(range(len(prompts))), 0.0
        requests = (Request(str(number), prompt, params) for number, prompt in enumerate(prompts))
        for output in self.engine.run_requests(requests):
            if output.error:
                raise RuntimeError(output.error)
            outputs[int(output.request_id)] += output.token_ids
            waiting.discard(int(output.request_id))
            if not first and not waiting:
                first = time.perf_counter() - start
        return Generation(first, time.perf_counter() - start, outputs)

    def close(self) -> None:
        """Stop the other ranks, free the offloaded weights' file."""
        self.engine.close()


class OffloadedModules(HuggingFace):
    """ZeRO-Inference for models that the engine does not stream (encoder-decoder ones): units of transformers' own
    modules have their weights in memory only while they compute."""

    def __init__(self, spec: dict[str, Any], weight_offload: str, weight_offload_bytes: int | None = None) -> None:
        from thalweg.infer.offload.module_offload import ModuleOffloader

        super().__init__(spec)
        folder = Path(spec["scratch"])
        folder.mkdir(parents=True, exist_ok=True)
        self.offloader = ModuleOffloader(
            [self.model], offload_device=weight_offload, device=self.device, folder=folder,
            max_bytes=weight_offload_bytes,
        )  # fmt: skip
        self.tier = {"cpu": "host", "nvme": "disk"}[weight_offload]
        self.streamed_bytes = sum(unit.nbytes for unit in self.offloader.units) if weight_offload == "nvme" else 0

    def close(self) -> None:
        """Remove the file."""
        self.offloader.close()


def build_generator(spec: dict[str, Any]) -> HuggingFace | ThalwegEngine:
    """Return the loaded technique of a cell.  Raises UnsupportedTechnique with the reason."""
    kind, options = spec["technique"]["kind"], spec["technique"]["options"]
    if kind == "thalweg" and options.get("weight_offload") and spec["model"]["shape"]["encoder_decoder"]:
        return OffloadedModules(spec, **options)
    types: dict[str, Any] = {"hugging_face": HuggingFace, "thalweg": ThalwegEngine, "zero3": ZeroStage3}
    return types[kind](spec, **options)
