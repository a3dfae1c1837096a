"""The runs whose memory `bench/plan.py` predicts and measures: models, configs, batches.

A case is a JSON object: `model` (a name of MODELS), `stage`, `world`, `dtype`, `remat`,
`accumulation`, `micro`, `sequence`, `kernels`, `optimizer`, `states` and `params` (the tiers of the
optimizer's state and of the parameters), `clip` (0 lets updates run within the backward pass).
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from torch import nn

# Big enough that model and activations dominate the interpreter, small enough for a few seconds.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 8192, "block_size": 256},
    "gpt-untied": {
        "family": "gpt",
        "n_layer": 4,
        "n_head": 8,
        "n_embd": 512,
        "vocab_size": 16384,
        "block_size": 256,
        "tied": False,
        "dropout": 0.1,
    },
    "gpt-deep": {
        "family": "gpt",
        "n_layer": 16,
        "n_head": 6,
        "n_embd": 384,
        "vocab_size": 4096,
        "block_size": 256,
    },
    "gpt2": {
        "family": "hf",
        "class": "GPT2LMHeadModel",
        "model_type": "gpt2",
        "n_layer": 6,
        "n_head": 8,
        "n_embd": 512,
        "vocab_size": 16384,
        "n_positions": 512,
    },
    "llama": {
        "family": "hf",
        "class": "LlamaForCausalLM",
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
        "max_position_embeddings": 1024,
    },
    "bert": {
        "family": "hf",
        "class": "BertForMaskedLM",
        "model_type": "bert",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 16384,
    },
    "t5": {
        "family": "hf",
        "class": "T5ForConditionalGeneration",
        "model_type": "t5",
        "num_layers": 4,
        "num_decoder_layers": 4,
        "d_model": 512,
        "d_ff": 1024,
        "d_kv": 64,
        "num_heads": 8,
        "vocab_size": 16384,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    # Held out: looked at when the model of memory was done.
    "opt": {
        "family": "hf",
        "class": "OPTForCausalLM",
        "model_type": "opt",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "ffn_dim": 2048,
        "num_attention_heads": 8,
        "vocab_size": 16384,
        "word_embed_proj_dim": 512,
        "max_position_embeddings": 512,
    },
    "qwen2": {
        "family": "hf",
        "class": "Qwen2ForCausalLM",
        "model_type": "qwen2",
        "num_hidden_layers": 5,
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "vocab_size": 12000,
        "tie_word_embeddings": True,
    },
    "neox": {
        "family": "hf",
        "class": "GPTNeoXForCausalLM",
        "model_type": "gpt_neox",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 16384,
    },
    "mixtral": {
        "family": "hf",
        "class": "MixtralForCausalLM",
        "model_type": "mixtral",
        "num_hidden_layers": 3,
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 8192,
    },
    "phi": {
        "family": "hf",
        "class": "PhiForCausalLM",
        "model_type": "phi",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 10240,
        "max_position_embeddings": 512,
    },
    "vit": {
        "family": "hf",
        "class": "ViTForImageClassification",
        "model_type": "vit",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "image_size": 224,
        "patch_size": 16,
        "num_labels": 100,
    },
}

HELD_OUT = ("opt", "qwen2", "neox", "vit", "mixtral", "phi")


def _case(model: str, stage: int, world: int, micro: int = 4, sequence: int = 256, **more: Any) -> dict[str, Any]:
    return {"model": model, "stage": stage, "world": world, "micro": micro, "sequence": sequence, **more}


FULL: dict[str, Any] = {"remat": "full"}
SELECTIVE: dict[str, Any] = {"remat": "selective"}
BF16: dict[str, Any] = {"dtype": "bf16"}
TORCH: dict[str, Any] = {"kernels": "torch"}
DISK: dict[str, Any] = {"params": "nvme", "states": "nvme", "clip": 0.0}
CASES: list[dict[str, Any]] = [
    *(_case("gpt", stage, 1) for stage in (0, 2)),
    *(_case("gpt", stage, 2) for stage in (0, 1, 2, 3)),
    _case("gpt", 1, 2, **FULL),
    _case("gpt", 2, 2, **SELECTIVE),
    _case("gpt", 3, 2, accumulation=2),
    _case("gpt", 1, 2, accumulation=4),
    _case("gpt", 0, 1, 8, **BF16),
    _case("gpt", 2, 2, **BF16),
    _case("gpt", 3, 4, 2),
    _case("gpt", 1, 4, 2, **TORCH),
    _case("gpt-untied", 0, 2),
    _case("gpt-untied", 3, 2, **FULL),
    _case("gpt-untied", 2, 1, **BF16),
    _case("gpt-untied", 3, 2, accumulation=2, **BF16),
    _case("gpt-deep", 1, 2, 2),
    _case("gpt-deep", 3, 2, 4, **FULL),
    _case("gpt2", 0, 1, 2),
    _case("gpt2", 2, 2, 2),
    _case("gpt2", 3, 2, 2, **FULL),
    _case("gpt2", 1, 2, 2, accumulation=2),
    _case("gpt2", 3, 2, 2, **BF16),
    _case("llama", 0, 1),
    _case("llama", 1, 2),
    _case("llama", 3, 2, **FULL),
    _case("llama", 2, 2, accumulation=2, **TORCH),
    _case("llama", 3, 4, 2),
    _case("llama", 2, 2, **BF16),
    _case("bert", 0, 2, 2),
    _case("bert", 2, 1, 4, **FULL),
    _case("bert", 3, 2, 2, **BF16),
    _case("bert", 1, 2, 2, accumulation=2),
    _case("t5", 0, 1, 2),
    _case("t5", 2, 2, 2),
    _case("t5", 3, 2, 2, **FULL),
    _case("t5", 1, 2, 2, **BF16),
    _case("gpt", 2, 1, states="cpu", clip=0.0),
    _case("gpt", 2, 2, states="cpu", clip=0.0),
    _case("gpt", 1, 2, states="nvme"),
    _case("gpt", 3, 2, states="nvme", clip=0.0, **FULL),
    _case("gpt-deep", 2, 1, 2, states="nvme", clip=0.0),
    _case("gpt-deep", 3, 1, 2, **DISK),
    _case("gpt-deep", 3, 2, 2, **DISK),
    _case("gpt-deep", 3, 2, 2, **DISK, **BF16, **FULL),
    _case("gpt-untied", 3, 1, 4, **DISK, **FULL),
    _case("gpt-untied", 2, 2, 4, states="nvme", accumulation=2, **BF16),
    _case("llama", 3, 1, 4, **DISK, **FULL),
    _case("llama", 3, 2, 2, **DISK, accumulation=2),
    _case("llama", 1, 1, 2, states="nvme", clip=0.0, **BF16),
    _case("gpt2", 3, 2, 2, states="cpu", clip=0.0, **FULL),
    _case("bert", 2, 2, 2, states="nvme", clip=0.0),
    _case("gpt", 2, 4, 2, **FULL),
    _case("gpt-deep", 2, 4, 1, **BF16),
    _case("opt", 1, 1, 4),
    _case("opt", 3, 2, 2),
    _case("opt", 2, 2, 2, **FULL),
    _case("qwen2", 2, 2, 2),
    _case("qwen2", 0, 1, 4, **BF16),
    _case("neox", 1, 2, 2),
    _case("neox", 3, 1, 4, **FULL),
    _case("vit", 2, 2, 8),
    _case("vit", 0, 1, 8, **FULL),
    _case("opt", 2, 1, 2, states="nvme", clip=0.0),
    _case("neox", 3, 2, 2, **DISK, **FULL),
    _case("mixtral", 2, 2, 2),
    _case("mixtral", 3, 1, 2, **FULL),
    _case("phi", 1, 2, 2, accumulation=2),
    _case("phi", 3, 4, 1, **BF16),
]


def case_name(case: dict[str, Any]) -> str:
    """Return the case in one line."""
    words = [
        case["model"],
        f"stage {case['stage']}",
        f"{case['world']} ranks",
        f"{case['micro']}x{case['sequence']}",
    ]
    words += [str(case[key]) for key in ("dtype", "remat", "kernels") if key in case]
    words += [f"{key} on {case[key]}" for key in ("states", "params") if key in case]
    words += ["no clipping"] if case.get("clip") == 0.0 else []
    return " ".join([*words, f"accumulate {case['accumulation']}"] if "accumulation" in case else words)


# What drawn cases are made of: families that no case above has, by the names their configs give to the same things.
DRAWN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 64}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 64}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 128}),
    "deit": ("DeiTForImageClassification", {"image_size": 224, "patch_size": 16, "num_labels": 100}),
}


def draw_cases(seed: int, count: int) -> list[dict[str, Any]]:
    """Return ``count`` held-out cases: families, shapes and settings that a seed drew and nobody chose."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        family = draw.choice(sorted(DRAWN_FAMILIES))
        cls, more = DRAWN_FAMILIES[family]
        heads = draw.choice([4, 6, 8, 10])
        width, is_image = 64 * heads, "image_size" in more
        spec: dict[str, Any] = {
            "family": "hf",
            "class": cls,
            "model_type": family,
            "num_hidden_layers": draw.randint(3, 9),
            "hidden_size": width,
            "intermediate_size": width * draw.choice([2, 3, 4]),
            "num_attention_heads": heads,
            **more,
        }
        if not is_image:
            spec |= {"vocab_size": draw.randrange(6000, 24000, 8), "max_position_embeddings": 1024}
            spec |= {"num_key_value_heads": draw.choice([heads, heads // 2])} if "ForCausalLM" in cls else {}
        world, stage = draw.choice([1, 2, 2, 4]), draw.randint(0, 3)
        case = _case(
            f"{family}-{seed}-{number}", stage, world, draw.choice([1, 2, 4]), draw.choice([128, 192, 256, 384])
        )
        case |= {"spec": spec}
        case |= draw.choice([{}, {}, FULL, SELECTIVE])
        case |= draw.choice([{}, BF16])
        case |= draw.choice([{}, {}, {"accumulation": 2}])
        if stage == 3:
            case |= draw.choice([{}, {}, DISK])
        elif stage:
            case |= draw.choice([{}, {}, {"states": "cpu", "clip": 0.0}, {"states": "nvme", "clip": 0.0}])
        cases.append(case)
    return cases


def get_spec(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case's model as keywords."""
    spec: dict[str, Any] = case.get("spec") or MODELS[case["model"]]
    return dict(spec)


def preload(case: dict[str, Any]) -> None:
    """Import what building the model imports, so that it counts as the process' base."""
    spec = get_spec(case)
    if spec["family"] == "hf":
        import transformers

        _ = getattr(transformers, spec["class"])
    else:
        import thalweg.nn.transformer  # noqa: F401


def build_model(case: dict[str, Any], device: str = "cpu") -> nn.Module:
    """Return the case's model in fp32, with its own initialisation."""
    spec = get_spec(case)
    family = spec.pop("family")
    torch.manual_seed(7)
    with torch.device(device):
        if family == "gpt":
            from thalweg.nn.transformer import GPT, GPTConfig

            return GPT(GPTConfig(**spec))
        import transformers

        cls = getattr(transformers, spec.pop("class"))
        config = transformers.AutoConfig.for_model(spec.pop("model_type"), **spec)
        return cls(config)


def make_config(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case's ds_config."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["micro"],
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "optimizer": {"type": case.get("optimizer", "AdamW"), "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": case["stage"], **_offload_config(case)},
        "gradient_clipping": case.get("clip", 1.0),
        "cpu_kernels": case.get("kernels", "auto"),
    }
    if case.get("remat", "none") != "none":
        config["activation_checkpointing"] = {"policy": case["remat"]}
    if case.get("dtype", "fp32") != "fp32":
        config[case["dtype"]] = {"enabled": True}
    return config


def _offload_config(case: dict[str, Any]) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    for key, block in (("states", "offload_optimizer"), ("params", "offload_param")):
        if key in case:
            blocks[block] = {"device": case[key]}
            if case[key] == "nvme":
                blocks[block]["nvme_path"] = tempfile.gettempdir()
    if "params" in case:
        blocks["offload_param"]["max_in_cpu"] = 0
    return blocks


def make_batch(case: dict[str, Any], model: nn.Module, seed: int) -> dict[str, Any]:
    """Return one real micro-batch."""
    from thalweg.plan.inputs.input_spec import infer_input_spec

    spec = infer_input_spec(model, case["micro"], case.get("sequence"))
    return spec.make_random(torch.Generator().manual_seed(seed))[1]
